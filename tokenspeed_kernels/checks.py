"""Checks of index tensors beside those of the registry; they too run where reading the values costs no sync."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from tokenspeed_registry import ContentError
from tokenspeed_registry.signature import evaluate


@dataclass(frozen=True)
class LongestRun:
    """No two neighbouring offsets are further apart than dim, integer argument or product of these `bound`."""

    argument: str
    bound: str

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.bound.split("*"))

    def verify(self, op: str, values: Tensor, dims: Mapping[str, int]) -> None:
        limit = evaluate(self.bound, dims)
        longest = max((end - start for start, end in pairwise(values.tolist())), default=0)
        if longest > limit:
            raise ContentError(op, self.argument, f"runs of at most {self.bound}={limit}", f"one of {longest}")

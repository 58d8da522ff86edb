"""A rank among those that share a model: which part of it is its own, and how parts become a whole again.

Each rank has a share of the heads, of the experts, of the inner width of other MLPs, and of the rows of large tables.
What lies between sublayers is the same on all. So a sublayer yields a part of a sum, and one `sum` completes it.

Importing takes no torch, since descriptions of models name their ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Group(Protocol):
    """What of a `torch.distributed` process group is used; every rank makes the same calls in the same order."""

    def allreduce(self, tensors: "list[Tensor]", /) -> Any: ...

    def allgather(self, outputs: "list[list[Tensor]]", inputs: "list[Tensor]", /) -> Any: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `size`. `group` connects them; None where there is only one."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def part(self, count: int, rank: int | None = None) -> range:
        """Its share of `count` things, or that of another rank: the last ones may have fewer."""
        each = -(-count // self.size)
        first = min((self.rank if rank is None else rank) * each, count)
        return range(first, min(first + each, count))

    def part_or_copy(self, count: int) -> range:
        """As `part`, but of fewer things than ranks one, which its neighbours have too."""
        if count >= self.size:
            return self.part(count)
        own = self.rank * count // self.size
        return range(own, own + 1)

    def sum(self, tensor: "Tensor") -> "Tensor":
        """Adds up the contiguous tensors of all ranks, in place; bit for bit the same on each."""
        if self.group is not None:
            self.group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: "Tensor", width: int) -> "Tensor":
        """[..., width] of the ranks' [..., their part of width]."""
        if self.group is None:
            return tensor
        import torch

        widths = [len(self.part(width, rank)) for rank in range(self.size)]
        padded = torch.nn.functional.pad(tensor, (0, max(widths) - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        self.group.allgather([parts], [padded]).wait()
        return torch.cat([part[..., :own] for part, own in zip(parts, widths, strict=True)], dim=-1)


ALONE = Ranks()
"""The one rank of a model that is not shared."""


def not_shared(fields: Sequence[tuple[str, int]], size: int) -> list[str]:
    """A problem for each (name, count) that `size` ranks cannot share evenly."""
    return [
        f"ranks: {name} is {count}, which {size} ranks cannot share evenly" for name, count in fields if count % size
    ]

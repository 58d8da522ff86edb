"""The gated delta rule over a chunk of tokens at once: the WY form, whose sequential part is one triangular system.

With G_i the sum of g up to token i, the updates δ of a chunk that starts from state S solve

    δ_i + β_i Σ_{j<i} exp(G_i − G_j) (k_i·k_j) δ_j = β_i (v_i − exp(G_i) S k_i)

so that δ = written − read Sᵀ with two right-hand sides that do not depend on S.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """What a chunk of `size` tokens does to any state, for any leading dims; float32."""

    query: Tensor  # [... size d_k] queries, decayed from the chunk's start
    scores: Tensor  # [... size size] query·key of earlier and equal tokens, with the decay between
    written: Tensor  # [... size d_v]
    read: Tensor  # [... size d_k]
    key: Tensor  # [... size d_k] keys, decayed to the chunk's end
    decay: Tensor  # [... 1 1] of the whole chunk

    def at(self, index: int) -> "Chunk":
        """The entry `index` of the first leading dim."""
        return Chunk(*(part[index] for part in self))

    def apply(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [... size d_v] of a chunk that starts from `state` [... d_v d_k], and the state after it."""
        delta = self.written - self.read @ state.mT
        out = self.query @ state.mT + self.scores @ delta
        return out, self.decay * state + delta.mT @ self.key


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunk:
    """A chunk from q, k [... size d_k], v [... size d_v], g and beta [... size], all float32.

    q is scaled, q and k are normalised. A token with k, v, g and beta of zero changes nothing.
    """
    size = g.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    # Row i, column j: exp(Σ of g over j < l ≤ i), summed for each pair since a difference of sums from the chunk's
    # start loses the digits of a small decay after a large one. Above the diagonal the sum is empty: no exponent is
    # positive.
    between = torch.where(earlier, g.unsqueeze(-1), 0.0).cumsum(-2).exp()
    beta = beta.unsqueeze(-1)
    from_start = g.cumsum(-1).exp().unsqueeze(-1)
    system = (beta * (k @ k.mT) * between).tril(-1)
    sides = torch.cat([beta * v, beta * from_start * k], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    return Chunk(
        query=from_start * q,
        scores=((q @ k.mT) * between).tril(),
        written=written,
        read=read,
        key=between[..., -1, :].unsqueeze(-1) * k,
        decay=from_start[..., -1:, :],
    )

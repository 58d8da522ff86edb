"""A batch cut where recurrent layers change ops: the places of each decode row, then whole chunks of prefill rows."""

from dataclasses import dataclass

from torch import Tensor

from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.qwen4_exp.lookup import Lookups


@dataclass(frozen=True)
class Step:
    """A batch, and the index tensors of its two parts.

    The first `decodes` rows have `q_len` places each, and so the first `decode_tokens` tokens are theirs. decode_slots:
    Int32 [decodes]. prefill_slots: Int32 [S − decodes], prefill_cu_seqlens: Int32 [S − decodes + 1], offsets among the
    tokens after the decodes, prefill_fresh: Bool [S − decodes]. decode_dropped: Int32 [decodes], None where no drafts
    are ever run. lookups: what its n-gram blocks take in.
    """

    batch: Batch
    decodes: int
    q_len: int
    decode_slots: Tensor
    decode_dropped: Tensor | None
    prefill_slots: Tensor
    prefill_cu_seqlens: Tensor
    prefill_fresh: Tensor
    lookups: Lookups | None

    @property
    def decode_tokens(self) -> int:
        return self.decodes * self.q_len

    @property
    def has_prefills(self) -> bool:
        return self.batch.num_rows > self.decodes

    def by_row(self, tokens: Tensor) -> Tensor:
        """[decodes, q_len, ...] of [T, ...]: the decode rows' part."""
        return tokens[: self.decode_tokens].view(self.decodes, self.q_len, *tokens.shape[1:])


def make_step(batch: Batch, lookups: Lookups | None = None) -> Step:
    """Cuts a batch. Done once for all layers. A prefill row starts on a settled slot, so it has nothing to drop."""
    decodes = batch.num_decodes
    return Step(
        batch=batch,
        decodes=decodes,
        q_len=batch.q_len,
        decode_slots=batch.slots[:decodes],
        decode_dropped=None if batch.rollback is None else batch.rollback.dropped[:decodes],
        prefill_slots=batch.slots[decodes:],
        prefill_cu_seqlens=batch.cu_seqlens[decodes:] - batch.decode_tokens,
        prefill_fresh=batch.fresh[decodes:],
        lookups=lookups,
    )

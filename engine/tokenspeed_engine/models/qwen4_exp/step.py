"""A batch cut where recurrent layers change ops: one token of each decode row, then whole chunks of prefill rows."""

from dataclasses import dataclass

from torch import Tensor

from tokenspeed_engine.execution.batch import Batch


@dataclass(frozen=True)
class Step:
    """A batch, and the index tensors of its two parts.

    The first `decodes` rows have one token each, and so are the first `decodes` tokens. decode_slots: Int32
    [decodes]. prefill_slots: Int32 [S − decodes], prefill_cu_seqlens: Int32 [S − decodes + 1], offsets among the
    tokens after the decodes, prefill_fresh: Bool [S − decodes].
    """

    batch: Batch
    decodes: int
    decode_slots: Tensor
    prefill_slots: Tensor
    prefill_cu_seqlens: Tensor
    prefill_fresh: Tensor

    @property
    def has_prefills(self) -> bool:
        return self.batch.num_sequences > self.decodes


def make_step(batch: Batch) -> Step:
    """Cuts a batch. Done once for all layers."""
    decodes = batch.num_decodes
    return Step(
        batch=batch,
        decodes=decodes,
        decode_slots=batch.slots[:decodes],
        prefill_slots=batch.slots[decodes:],
        prefill_cu_seqlens=batch.cu_seqlens[decodes:] - decodes,
        prefill_fresh=batch.fresh[decodes:],
    )

"""One step's rows as the index tensors that ops take.

Every decode row has `q_len` places for tokens. A row with fewer tokens is filled up with padding, which counts as
drafts that were rejected: recurrent layers take it in and drop it again, as they do with those. Attention must not see
it, for there may be no page that it could lie on; to attention it is a sequence of its own, of length 0.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The tokens of a step as attention sees them: N runs of new tokens, each the last ones of its sequence.

    cu_seqlens: Int32 [N+1], offsets of the runs. seq_lens: Int32 [N], tokens of each sequence with this step's, 0 for
    padding. page_table: Int32 [N, P], −1 past a sequence's pages. slots: Int32 [N], −1 for padding.
    """

    cu_seqlens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Rollback:
    """What rows have to take back of the drafts that the row before on their slot ran; see `execution.ledger`.

    dropped: Int32 [S], newest rows of the slot's histories that do not count. kept: Int32 [D], accepted tokens that the
    delta rule's states still miss. initial: Int32 [D], the place of the recurrent state to start from; targets: Int32
    [D, q_len], where to put the state after each token, −1 for padding.
    """

    dropped: Tensor
    kept: Tensor
    initial: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Batch:
    """Packed tokens of a step: S rows, T tokens, the D decode rows first with q_len tokens each.

    ids: Int64 [T], −1 for padding. positions, slot_mapping: Int64 [T]. cu_seqlens: Int32 [S+1], offsets of the rows'
    tokens. slots: Int32 [S], −1 for padding. fresh: Bool [S], whether the sequence starts here. context: Int64 [S, C],
    tokens before the row, oldest first, the model's fill where there are none. sampled: Int64 [R], the tokens after
    which logits are asked for. lengths: Int32 [D], tokens of the decode rows without padding, None where there is none.
    rollback: None where no drafts are ever run. Known to the host: `max_q_len` and `max_seq_len` bound runs and
    sequences from above; prefix_lens: tokens that each row after the decodes had before this step.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    fresh: Tensor
    context: Tensor
    sequences: Sequences
    sampled: Tensor
    lengths: Tensor | None
    rollback: Rollback | None
    num_decodes: int
    q_len: int
    max_q_len: int
    max_seq_len: int
    prefix_lens: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes * self.q_len


@dataclass(frozen=True)
class Settling:
    """N slots whose states are brought into plain form. Int32 [N] each, as in `Rollback`."""

    slots: Tensor
    dropped: Tensor
    kept: Tensor
    initial: Tensor

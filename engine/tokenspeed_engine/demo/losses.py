"""What each kind of training step minimises."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import KeyValues, Mode, rope_table
from .model import DemoModel

BALANCE_WEIGHT = 0.01
DRAFT_PASSES = 3


class Losses(NamedTuple):
    """`total` is minimised; `token` is the next-token or draft cross-entropy in nats, the rest is auxiliary."""

    total: Tensor
    token: Tensor
    balance: Tensor
    indexer: Tensor


def token_loss(model: DemoModel, streams: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats; targets: [batch, time] int64."""
    return F.cross_entropy(model.head(streams).float().flatten(0, 1), targets.flatten())


def text_losses(model: DemoModel, window: Tensor, mode: Mode) -> Losses:
    """Next-token loss of the main model; window: [batch, time + 1] int64."""
    streams, balance, indexer = model.text(window[:, :-1], mode)
    token = token_loss(model, streams, window[:, 1:])
    return Losses(token + BALANCE_WEIGHT * balance + indexer, token, balance, indexer)


def draft_logits(model: DemoModel, ids: Tensor, mode: Mode) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Runs the frozen model, then the draft layer `DRAFT_PASSES` times, each pass on the streams of the one before.

    ids: [batch, time] int64. Returns (teacher [batch, time − 1, vocab], one draft of that shape a pass, balance loss,
    indexer loss). Row r of every draft predicts token r + 2, as does row r of the teacher; pass n is valid from row n.
    """
    with torch.no_grad():
        streams = model.text(ids, Mode(mode.sparse, train_indexer=False))[0]
        teacher = model.head(streams)[:, 1:]
        embedded = F.pad(model.text.embed_tokens(ids)[:, 1:], (0, 0, 0, 1))
    rope = rope_table(model.config, ids.shape[1], ids.device)
    drafts: list[Tensor] = []
    past: tuple[KeyValues, ...] = ()
    balance = indexer = streams.new_zeros(())
    for number in range(DRAFT_PASSES):
        pass_mode = Mode(mode.sparse, mode.train_indexer and number == 0)
        out, hidden = model.mtp(streams, embedded, rope, pass_mode, past)
        drafts.append(model.lm_head(hidden)[:, :-1])
        past = (*past, out.key_values)
        balance, indexer = balance + out.balance_loss / DRAFT_PASSES, indexer + out.indexer_loss
        streams = F.pad(out.streams, (0, 0, 1, 0))[:, :-1]
    return teacher, drafts, balance, indexer


def draft_losses(model: DemoModel, window: Tensor, mode: Mode) -> Losses:
    """Cross-entropy of the drafts against the main model's own distribution, mean over passes.

    window: [batch, time + 1] int64; its last column is not used.
    """
    teacher, drafts, balance, indexer = draft_logits(model, window[:, :-1], mode)
    target = torch.softmax(teacher.float(), -1)
    each = [
        -(target * torch.log_softmax(draft.float(), -1)).sum(-1)[:, number:].mean()
        for number, draft in enumerate(drafts)
    ]
    token = torch.stack(each).mean()
    return Losses(token + BALANCE_WEIGHT * balance + indexer, token, balance, indexer)

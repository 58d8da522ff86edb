"""Held-out measurements: loss, indexer recall, draft agreement."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .attention import Mode, rope_table
from .losses import draft_logits, token_loss
from .model import DecoderLayer, DemoModel

SPARSE = Mode(sparse=True, train_indexer=False)
DENSE = Mode(sparse=False, train_indexer=False)


def windows(stream: Tensor, length: int, batch: int, limit: int) -> Iterator[Tensor]:
    """At most `limit` tokens of `stream`, as [≤ batch, length + 1] int64 windows that overlap by one token."""
    starts = list(range(0, min(stream.numel(), limit) - length - 1, length))
    for i in range(0, len(starts), batch):
        yield torch.stack([stream[s : s + length + 1] for s in starts[i : i + batch]]).long()


@torch.no_grad()
def text_loss(
    model: DemoModel, stream: Tensor, bytes_per_token: float, length: int, mode: Mode, limit: int = 1 << 18
) -> dict[str, float]:
    """Next-token loss on windows of `length` tokens: nats a token and bits a byte."""
    losses = [token_loss(model, model.text(w[:, :-1], mode)[0], w[:, 1:]) for w in windows(stream, length, 16, limit)]
    nats = torch.stack(losses).mean().item()
    return {"length": length, "nats_per_token": nats, "bits_per_byte": nats / math.log(2) / bytes_per_token}


@torch.no_grad()
def indexer_recall(model: DemoModel, stream: Tensor, length: int, limit: int = 1 << 16) -> list[dict[str, float]]:
    """For each full-attention layer, the share of dense attention mass (over complete blocks) that selection keeps.

    Mean over the queries for which there are more blocks than the budget holds. `best` is what an oracle would keep,
    `recent` what the latest blocks would.
    """
    config = model.config
    results: dict[int, list[Tensor]] = {}
    for window in windows(stream, length, 8, limit):
        ids = window[:, :-1]
        rope = rope_table(config, ids.shape[1], ids.device)
        x = model.text.embed_tokens(ids).repeat(1, 1, config.hc_count)
        for number, layer in enumerate(model.text.layers):
            assert isinstance(layer, DecoderLayer)
            if layer.self_attn is not None:
                mixed = layer.attn_hyper_connection(x)[0]
                q, k, _, _ = layer.self_attn.project(mixed, rope)
                indexer = layer.self_attn.indexer
                mass = indexer.block_mass(q, k)
                scores = indexer.scores(indexer.similarity(*indexer.project(mixed, rope), rope))
                blocks = torch.arange(mass.shape[-1], device=ids.device).expand_as(scores)
                recency = blocks.masked_fill(scores == float("-inf"), -1).float()
                kept = [
                    (mass * (chosen > 0)).sum(-1) / mass.sum(-1).clamp_min(1e-9)
                    for chosen in (
                        indexer.chosen_blocks(scores),
                        indexer.chosen_blocks(mass.masked_fill(scores == float("-inf"), float("-inf"))),
                        indexer.chosen_blocks(recency),
                    )
                ]
                first = config.indexer_budget + config.indexer_compress_ratio - 1
                results.setdefault(number, []).append(torch.stack(kept)[..., first:].mean((1, 2)))
            x = layer(x, ids, rope, SPARSE).streams
    means = {number: torch.stack(values).mean(0).tolist() for number, values in results.items()}
    return [{"layer": n, "selected": v[0], "best": v[1], "recent": v[2]} for n, v in means.items()]


@torch.no_grad()
def draft_agreement(model: DemoModel, stream: Tensor, length: int, limit: int = 1 << 16) -> list[float]:
    """Per draft step, how often its top token is the target's, given that the tokens before it are the text's."""
    equal: list[list[Tensor]] = []
    for window in windows(stream, length, 16, limit):
        teacher, drafts, _, _ = draft_logits(model, window[:, :-1], SPARSE)
        best = teacher.argmax(-1)
        equal.append([(d.argmax(-1) == best)[:, n:].float().mean() for n, d in enumerate(drafts)])
    return [torch.stack(step).mean().item() for step in zip(*equal, strict=True)]


def report(model: DemoModel, stream: Tensor, bytes_per_token: float, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Everything above, for the lengths given; the longest serves recall and agreement."""
    longest = max(lengths)
    return {
        "sparse": [text_loss(model, stream, bytes_per_token, n, SPARSE) for n in lengths],
        "dense": [text_loss(model, stream, bytes_per_token, n, DENSE) for n in lengths],
        "indexer_recall": indexer_recall(model, stream, longest),
        "draft_top1_agreement": draft_agreement(model, stream, longest),
    }

"""The output head: logits of hidden states."""

import torch
from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.linear import linear


class OutputHead:
    """A rank computes the logits of its rows of the vocabulary; then all ranks have all logits.

    Its weight is `lm_head`, or the embedding's where they are one.
    """

    def __init__(self, weights: Weights, vocab: int, tied: bool, ranks: Ranks) -> None:
        self.vocab = vocab
        self.ranks = ranks
        own = ranks.part(vocab)
        self.weight = weights["embed_tokens"][own.start : own.stop] if tied else weights["lm_head"]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Float32 [R, vocab] of [R, hidden], R above 0."""
        return self.ranks.gather(linear(hidden, self.weight, dtype=torch.float32), self.vocab)

    def nothing(self) -> Tensor:
        """The logits of no rows."""
        return self.weight.new_empty(0, self.vocab, dtype=torch.float32)

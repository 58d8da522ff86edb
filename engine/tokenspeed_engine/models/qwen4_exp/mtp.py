"""The draft head: multi-token prediction by one more layer, from a token's residual streams and the token after it."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.families import Forward
from tokenspeed_engine.models.head import OutputHead
from tokenspeed_engine.models.linear import loaded
from tokenspeed_engine.models.qwen4_exp.caches import Caches
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.models.qwen4_exp.layers import DRAFT_PREFIX, Layer
from tokenspeed_engine.models.qwen4_exp.residual import Mixer, Streams
from tokenspeed_engine.models.qwen4_exp.step import make_step
from tokenspeed_engine.parallel.ranks import Ranks
from tokenspeed_kernels.linear import embedding
from tokenspeed_kernels.norm import rms_norm


class DraftHead:
    """Shares the model's embedding and output head. Its caches are those of a layer after the model's last."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, head: OutputHead, ranks: Ranks) -> None:
        self.eps = config.rms_norm_eps
        self.embed_tokens = weights["embed_tokens"]
        self.head = head
        self.embedding_norm = weights[f"{DRAFT_PREFIX}pre_fc_norm_embedding"]
        self.embedding_proj = loaded(weights, f"{DRAFT_PREFIX}fc_embedding")
        self.hidden_norm = weights[f"{DRAFT_PREFIX}pre_fc_norm_hidden"]
        self.hidden_proj = loaded(weights, f"{DRAFT_PREFIX}fc_hidden")
        self.layer = Layer(config, weights, config.num_hidden_layers, ranks)
        self.final_mix = Mixer(config, weights, f"{DRAFT_PREFIX}hyper_connection_mixer.", injects=False)

    def __call__(self, hidden: Tensor, batch: Batch, caches: Caches) -> Forward:
        """Logits of the token after the next, and the streams, both of the batch's sampled tokens.

        hidden: the streams [T, streams, hidden] of tokens at the batch's positions, before the final mix. `batch.ids`
        are the tokens one position further on.
        """
        known = self.embedding_proj(self._normed(embedding(batch.ids, self.embed_tokens), self.embedding_norm))
        # One norm over all streams together: the only one that is not by stream.
        normed = self._normed(hidden.flatten(1), self.hidden_norm).view(-1, hidden.shape[2])
        x = self.hidden_proj(normed).view(hidden.shape) + known[:, None]
        streams = Streams(x)
        self.layer(streams, make_step(batch), caches)
        guessed = streams.rows(batch.sampled).settled()
        if guessed.shape[0] == 0:  # all rows are chunks with more to come
            return Forward(self.head.nothing(), guessed)
        return Forward(self.head(Streams(guessed).mix(self.final_mix)), guessed)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=self.eps, zero_centred=True)

"""The trainable model. Module names are the checkpoint's tensor names, so that export is a copy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attention, KeyValues, Mode, rope_table
from .config import DemoConfig
from .gdn import GatedDeltaNet
from .layers import GatedResidual, MoE, RMSNorm, inject
from .ngram import PerLayerEmbedding


class LayerOutput(NamedTuple):
    """Residual streams [batch, time, streams · hidden] after a layer, and its auxiliary losses."""

    streams: Tensor
    balance_loss: Tensor
    indexer_loss: Tensor
    key_values: KeyValues | None


class DecoderLayer(nn.Module):
    """n-gram injection (some layers), then a token mixer and a mixture of experts, each behind a gated residual."""

    def __init__(self, config: DemoConfig, layer_type: str, ple_index: int | None = None) -> None:
        super().__init__()
        self.linear_attn = GatedDeltaNet(config) if layer_type == "linear_attention" else None
        self.self_attn = Attention(config) if layer_type == "full_attention" else None
        self.mlp = MoE(config)
        self.ple = None if ple_index is None else PerLayerEmbedding(config, ple_index)
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)

    def forward(
        self, x: Tensor, ids: Tensor, rope: Tensor, mode: Mode, past: tuple[KeyValues, ...] = ()
    ) -> LayerOutput:
        """x: [batch, time, streams · hidden] float32, ids: [batch, time] int64, `past` as in `Attention.forward`."""
        if self.ple is not None:
            x = x + self.ple(x, ids)
        mixed, weight = self.attn_hyper_connection(x)
        indexer_loss, key_values = x.new_zeros(()), None
        if self.linear_attn is not None:
            output = self.linear_attn(mixed)
        else:
            assert self.self_attn is not None
            output, indexer_loss, key_values = self.self_attn(mixed, rope, mode, past)
        x = inject(x, output, weight)
        mixed, weight = self.mlp_hyper_connection(x)
        output, balance_loss = self.mlp(mixed)
        return LayerOutput(inject(x, output, weight), balance_loss, indexer_loss, key_values)


class TextModel(nn.Module):
    """Embedding and layers; the last mixer turns streams into what `lm_head` reads."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        ple_ids = sorted(config.ple_layer_ids)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, ple_ids.index(i + 1) if i + 1 in ple_ids else None)
            for i, kind in enumerate(config.layer_types)
        )
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def forward(self, ids: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
        """ids: [batch, time] int64 → (streams before the last mixer, mean balance loss, summed indexer loss)."""
        rope = rope_table(self.config, ids.shape[1], ids.device)
        x: Tensor = self.embed_tokens(ids).repeat(1, 1, self.config.hc_count)
        balance, index = x.new_zeros(()), x.new_zeros(())
        for layer in self.layers:
            out: LayerOutput = layer(x, ids, rope, mode)
            x, balance, index = out.streams, balance + out.balance_loss, index + out.indexer_loss
        return x, balance / len(self.layers), index


class MultiTokenPredictor(nn.Module):
    """The draft layer: from the streams at p and the embedding of token p+1 it predicts token p+2."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.streams = config.hc_count
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(hidden, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.stream_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(config, "full_attention")])
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def forward(
        self, streams: Tensor, embedded: Tensor, rope: Tensor, mode: Mode, past: tuple[KeyValues, ...]
    ) -> tuple[LayerOutput, Tensor]:
        """streams: [batch, time, streams · hidden] at p, embedded: [batch, time, hidden] of p+1, rope at p.

        Returns the layer's output (its streams feed the next pass) and [batch, time, hidden] for `lm_head`.
        """
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded)).float()
        each = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, (self.streams, -1))).float()
        x = (each + token.unsqueeze(-2)).flatten(-2)
        out: LayerOutput = self.layers[0](x, x, rope, mode, past)
        return out, self.hyper_connection_mixer.mix(out.streams)[0]


class Backbone(nn.Module):
    """Gives the text model its checkpoint prefix."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.language_model = TextModel(config)


class DemoModel(nn.Module):
    """Text model, output head and draft layer."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MultiTokenPredictor(config)
        self._initialise()

    @property
    def text(self) -> TextModel:
        return self.model.language_model

    def head(self, streams: Tensor) -> Tensor:
        """[batch, time, streams · hidden] → logits [batch, time, vocab]."""
        logits: Tensor = self.lm_head(self.text.hyper_connection_mixer.mix(streams)[0])
        return logits

    def forward(self, ids: Tensor, mode: Mode = Mode(sparse=True, train_indexer=False)) -> Tensor:  # noqa: B008
        """ids: [batch, time] int64 → logits [batch, time, vocab]."""
        return self.head(self.text(ids, mode)[0])

    @torch.no_grad()
    def start_draft(self) -> None:
        """Starts the draft layer as a copy of the last full-attention layer and of the last mixer."""
        last = max(i for i, kind in enumerate(self.config.layer_types) if kind == "full_attention")
        self.mtp.layers[0].load_state_dict(self.text.layers[last].state_dict())
        self.mtp.hyper_connection_mixer.load_state_dict(self.text.hyper_connection_mixer.state_dict())
        nn.init.eye_(self.mtp.fc_hidden.weight)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Linears by fan-in, projections into the residual smaller with depth, decay rates spread over time scales."""
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            leaf = name.split(".")[-2]
            if name.endswith("A_log"):
                parameter.uniform_(1.0, 16.0).log_()
            elif name.endswith("dt_bias"):
                step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # softplus inverse
            elif leaf == "conv1d":
                parameter.zero_() if ".ple." in name else parameter.uniform_(-0.5, 0.5)
            elif leaf in ("embed_tokens", "ngram_embedding", "lm_head"):
                parameter.normal_(std=0.05)
            elif parameter.dim() > 1:
                into_residual = leaf in ("out_proj", "o_proj") or "down_proj" in name
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5 * (depth_scale if into_residual else 1.0))

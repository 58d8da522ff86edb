"""Tiny random `qwen4_exp` checkpoints with a draft head, and what it guesses by transformers' own layers, uncached."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from tests.engine.tiny import hf_model, randomise, tiny_checkpoint


def draft_checkpoint(variant: str = "default") -> Path:
    """The folder of a variant's checkpoint with a random draft head added. Read only: others use it too."""
    return _draft_checkpoint(variant)


@functools.cache  # which takes a default for another argument than the same one given
def _draft_checkpoint(variant: str) -> Path:
    source = tiny_checkpoint(variant)
    folder = source.with_name(f"{source.name}-draft")
    shutil.copytree(source, folder)
    fields = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "model.safetensors")
    head = {f"mtp.{name}": tensor.contiguous() for name, tensor in _head(source).state_dict().items()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class _Head(torch.nn.Module):
    """The parameters under their names in a checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.hc_count * config.hidden_size
        self.fc_embedding = torch.nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = torch.nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = hf.Qwen4ExpTextRMSNorm(width, eps=config.rms_norm_eps)
        full = config.layer_types.index("indexed_attention")
        self.layers = torch.nn.ModuleList([hf.Qwen4ExpTextDecoderLayer(config, full)])
        self.hyper_connection_mixer = hf.Qwen4ExpTextGatedResidual(config, use_combine=False)

    def run(self, hidden: Tensor, embedded: Tensor, rotary: Any) -> Tensor:
        """The streams [T, width] after the head's layer, of those that come in and of the next tokens' embeddings."""
        known = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        streams = self.pre_fc_norm_hidden(hidden).unflatten(-1, (-1, known.shape[-1]))
        x = (self.fc_hidden(streams) + known[:, None]).flatten(1)[None]
        tokens = x.shape[1]
        mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(tokens).view(1, 1, -1).expand(3, 1, -1)
        out: Tensor = self.layers[0](x, rotary(x, positions), attention_mask=mask)[0]
        return out


@functools.cache
def _head(folder: Path) -> _Head:
    model = hf_model(folder)
    head = _Head(model.config).eval()
    randomise(head, seed=77)
    return head


def hf_drafts(variant: str, ids: Sequence[int], count: int) -> list[Tensor]:
    """Logits [vocab] of each of `count` guesses at what follows `ids`: the first is of the token after the next one.

    ids: tokens of which the last has not been run; each guess takes the most probable one before it as known.
    """
    folder = tiny_checkpoint(variant)
    model, head = hf_model(folder), _head(folder)
    embed, rotary = model.model.embed_tokens, model.model.rotary_emb
    caught: list[Tensor] = []
    hook = model.model.hyper_connection_mixer.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
    with torch.no_grad():
        model(torch.tensor([list(ids[:-1])]), use_cache=False)
        hook.remove()
        hidden, following = caught[0], list(ids[1:])
        guesses = []
        for _ in range(count):
            streams = head.run(hidden, embed(torch.tensor(following)), rotary)
            mixed = head.hyper_connection_mixer(streams[None])[0]
            guesses.append(model.lm_head(mixed[-1]))
            hidden = torch.cat([hidden, streams[-1:]])
            following.append(int(guesses[-1].argmax()))
    return guesses

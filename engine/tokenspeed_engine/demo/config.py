"""Hyperparameters of the embedded `qwen4_exp` model and their Hugging Face form.

The defaults give 4.7 million parameters with every feature of the architecture on, all dimensions powers of two.
"""

from dataclasses import dataclass
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|pad|>")
EOS_ID, IM_START_ID, IM_END_ID, THINK_ID, END_THINK_ID, PAD_ID = range(len(SPECIAL_TOKENS))


@dataclass(frozen=True)
class DemoConfig:
    """Shapes of the text model, named as in `text_config`. Layer i is full attention iff (i+1) % 4 == 0."""

    vocab_size: int = 2048
    hidden_size: int = 128
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000.0
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 64
    hc_count: int = 4
    hc_lowrank: int = 16
    ple_layer_ids: tuple[int, ...] = (2,)
    ple_embed_dim: int = 128
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 3500
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 4
    indexer_n_heads: int = 2
    indexer_head_dim: int = 32
    indexer_budget: int = 256
    indexer_compress_ratio: int = 4
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6

    @property
    def stream_size(self) -> int:
        """Width of all residual streams together."""
        return self.hc_count * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(self.num_hidden_layers)]

    def is_dense(self, length: int) -> bool:
        """Whether the sparse budget covers every query of a sequence of `length` tokens."""
        return length <= self.indexer_budget + self.indexer_compress_ratio - 1

    def hugging_face(self) -> dict[str, Any]:
        """The content of config.json."""
        third = self.rotary_dim // 2 // 3
        skip = {"partial_rotary_factor", "rope_theta", "ple_layer_ids"}
        shapes = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skip}
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
            "mrope_section": [self.rotary_dim // 2 - 2 * third, third, third],
            "mrope_interleaved": True,
        }
        text = {
            "model_type": "qwen4_exp_text",
            **shapes,
            "layer_types": self.layer_types,
            "full_attention_interval": 4,
            "rope_parameters": rope,
            "ple_layer_ids": list(self.ple_layer_ids),
            "indexer_kv_heads": 1,
            "hidden_act": "silu",
            "output_gate_type": "sigmoid",
            "mamba_ssm_dtype": "float32",
            "norm_topk_prob": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": "bfloat16",
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
        }
        return {
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "model_type": "qwen4_exp",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "text_config": text,
        }

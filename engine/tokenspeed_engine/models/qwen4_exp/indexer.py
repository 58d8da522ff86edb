"""The indexer of sparse attention: which blocks of a long sequence each token attends to."""

from torch import Tensor

from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.execution.batch import Batch
from tokenspeed_engine.models.qwen4_exp.caches import IndexCache
from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_kernels.norm import grouped_rms_norm
from tokenspeed_kernels.rope import rope
from tokenspeed_kernels.sparse import index_cache_write
from tokenspeed_kernels.sparse_select import select_blocks


class Indexer:
    """Block keys and index queries of one layer. Exists for configurations with all of the indexer's fields."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, prefix: str, inv_freq: Tensor) -> None:
        sizes = (
            config.indexer_n_heads,
            config.indexer_head_dim,
            config.indexer_budget,
            config.indexer_compress_ratio,
        )
        self.heads, self.dim, budget, self.ratio = (size for size in sizes if size is not None)
        self.top_k = budget // self.ratio
        self.dense_limit = config.dense_limit
        self.eps = config.rms_norm_eps
        self.inv_freq = inv_freq
        self.q_norm = weights[f"{prefix}q_layernorm"].repeat(self.heads, 1)
        self.k_norm = weights[f"{prefix}k_layernorm"]

    def __call__(self, projected: Tensor, batch: Batch, cache: IndexCache) -> Tensor | None:
        """The blocks Int32 [T, top_k] each token attends to, or None where all attend to everything before them.

        projected: [T, (heads + 1) · dim], index queries and the raw index key, maybe strided. The keys are kept in any
        case: a later step, of a longer sequence, will want them.
        """
        sequences = batch.sequences
        q, raw_k = projected.split_with_sizes([self.heads * self.dim, self.dim], dim=-1)
        index_cache_write(
            raw_k,
            cache.ring,
            cache.block_keys,
            sequences.page_table,
            sequences.slots,
            sequences.cu_seqlens,
            sequences.seq_lens,
            self.k_norm,
            self.inv_freq,
            ratio=self.ratio,
            eps=self.eps,
        )
        if batch.max_seq_len <= self.dense_limit:
            return None
        q = grouped_rms_norm(q.view(-1, self.heads, self.dim), self.q_norm, eps=self.eps, zero_centred=True)
        return select_blocks(
            rope(q, batch.positions, self.inv_freq),
            cache.block_keys,
            sequences.page_table,
            sequences.cu_seqlens,
            sequences.seq_lens,
            ratio=self.ratio,
            top_k=self.top_k,
            max_blocks=batch.max_seq_len // self.ratio,
        )

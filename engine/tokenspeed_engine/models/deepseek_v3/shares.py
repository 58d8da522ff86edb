"""What one of several ranks computes of the model: a model with fewer heads and narrower MLPs."""

from tokenspeed_engine.models.deepseek_v3.config import DeepseekV3Config
from tokenspeed_engine.parallel.ranks import Ranks, not_shared


def share_of(config: DeepseekV3Config, ranks: Ranks) -> DeepseekV3Config:
    """The configuration of the rank's attention; widths of MLPs follow from its weights, all else is the whole model's.

    Raises ValueError for a model that cannot be cut so, with every field that is in the way.
    """
    even = [("num_attention_heads", config.num_attention_heads)]
    if config.first_k_dense_replace:
        even.append(("intermediate_size", config.intermediate_size))
    if config.first_k_dense_replace < config.num_hidden_layers:
        shared = config.n_shared_experts * config.moe_intermediate_size
        even += [("n_routed_experts", config.n_routed_experts), ("n_shared_experts · moe_intermediate_size", shared)]
    problems = not_shared(even, ranks.size)
    if problems:
        raise ValueError("; ".join(problems))
    return config.model_copy(update={"num_attention_heads": config.num_attention_heads // ranks.size})

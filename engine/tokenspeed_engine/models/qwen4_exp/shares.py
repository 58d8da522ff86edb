"""What one of several ranks computes of the model: a model with fewer heads and a narrower shared expert."""

from tokenspeed_engine.models.qwen4_exp.config import Qwen4ExpConfig
from tokenspeed_engine.parallel.ranks import Ranks, not_shared


def share_of(config: Qwen4ExpConfig, ranks: Ranks) -> Qwen4ExpConfig:
    """The configuration of the rank's token mixers and shared experts; all else is that of the whole model.

    Heads of keys that are fewer than ranks are held several times. Raises ValueError for a model that cannot be cut so,
    with every field that is in the way.
    """
    size = ranks.size
    even = ["num_attention_heads", "num_experts", "shared_expert_intermediate_size"]
    copied = ["num_key_value_heads"]
    if "linear_attention" in config.layer_types:
        even.append("linear_num_value_heads")
        copied.append("linear_num_key_heads")
    problems = not_shared([(field, getattr(config, field)) for field in even], size)
    for field in copied:
        count = getattr(config, field)
        if count % size and size % count:
            problems.append(f"ranks: {field} is {count}, neither a multiple nor a divisor of {size} ranks")
    if problems:
        raise ValueError("; ".join(problems))
    return config.model_copy(
        update={
            "num_attention_heads": config.num_attention_heads // size,
            "num_key_value_heads": len(ranks.part_or_copy(config.num_key_value_heads)),
            "linear_num_key_heads": len(ranks.part_or_copy(config.linear_num_key_heads)),
            "linear_num_value_heads": config.linear_num_value_heads // size,
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size // size,
        }
    )

"""The gates of the delta rule, made by programs of their own or by some beside those of a convolution."""

import triton
import triton.language as tl


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Log decay and write strength in float32."""
    x = a.to(tl.float32) + dt_bias
    # log(1 + small), to the last digits: what the sum rounded off is made up for.
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    lost = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    return -tl.exp(a_log) * (tl.maximum(x, 0.0) + lost), 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def gates_of_tokens(
    p_a,  # [TOKENS, 1], of the first head
    p_b,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    p_g,  # [TOKENS, 1], of the first head
    p_beta,
    inside,  # [TOKENS]
    known,  # [TOKENS]: no padding
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Gates of some tokens, zero for padding."""
    o_h = tl.arange(0, HEAD_BLOCK)[None, :]
    in_heads = o_h < HEADS
    a_log = tl.load(a_log_ptr + o_h, mask=in_heads, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + o_h, mask=in_heads, other=0.0)
    written = inside[:, None] & in_heads  # [TOKENS, HEAD_BLOCK]
    read = written & known[:, None]
    a = tl.load(p_a + o_h, mask=read, other=0.0)
    b = tl.load(p_b + o_h, mask=read, other=0.0)
    g, beta = gates(a, b, a_log, dt_bias)
    tl.store(p_g + o_h, tl.where(read, g, 0.0), mask=written)
    tl.store(p_beta + o_h, tl.where(read, beta, 0.0), mask=written)

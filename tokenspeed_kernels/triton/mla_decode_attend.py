"""MLA decode, the kernel: attention of one tile of query rows over one run of a sequence's keys.

Query rows are heads x new tokens of one sequence. Every tile of keys is read once, and serves as keys and as values:
latents are both, rotated keys only the former.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from tokenspeed_kernels.triton.attention_parts import operand, softmax_step


@triton.jit
def run_size(length, splits, BLOCK_N: tl.constexpr):
    """Keys of each run of a sequence: whole tiles, so that all but the last run are full."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _step(
    b_o,  # [BR, BL]
    b_max,  # [BR]
    b_sum,  # [BR]
    b_q,  # [BR, BL]
    b_qp,  # [BR, BP]
    b_kv,  # [BN, BL]
    b_kp,  # [BN, BP]
    b_unit,  # what makes the products of `b_q` scores in base 2, [BR, 1]
    b_unit_p,  # and those of `b_qp`
    i_key,
    b_visible,  # [BR]
    all_visible,
    last_visible,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the keys from `i_key` on to the running softmax: of each row those before its `b_visible`. Before
    `all_visible` no row has a hidden one, from `last_visible` on every row has."""
    # Asynchronous matrix units lay out a product that feeds another so that all warps compute the same scores. So the
    # two parts are scaled before they are added, and masks, which few tiles need, stand in a branch.
    b_s = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee") * b_unit  # [BR, BN]
    if ROPE > 0:
        b_s += tl.dot(b_qp, tl.trans(b_kp), input_precision="ieee") * b_unit_p
    if i_key + BLOCK_N > all_visible:
        o_key = i_key + tl.arange(0, BLOCK_N)
        b_s = tl.where(o_key[None, :] < b_visible[:, None], b_s, float("-inf"))
    # Always so, but a branch is placed after the loads of the next keys, which then have until its end to arrive.
    live = i_key < last_visible if BLOCK_R >= 64 else True
    if live:
        b_max, b_sum, b_o = softmax_step(b_s, b_kv, b_max, b_sum, b_o, "ieee")
    return b_o, b_max, b_sum


@triton.jit
def _first(a, b):
    return a


@triton.jit
def _converted(b_kv, COMPUTE: tl.constexpr):
    """Rows [BN, BL] of the cache in the dtype of the products."""
    b_rows = b_kv.to(COMPUTE)
    if b_kv.dtype.primitive_bitwidth == 8:
        # A reduction over one element changes nothing, but compilers do not move the conversion past it. Else threads
        # would exchange rows before it, in single bytes, and convert them for both products.
        b_rows = tl.reduce(tl.reshape(b_rows, [b_kv.shape[0], b_kv.shape[1], 1]), 2, _first)
    return b_rows


@triton.jit(do_not_specialize=["splits", "max_pages"])
def attend(
    q_ptr,  # [batch, rows, QK]
    kv_ptr,  # [pages, PAGE, QK], contiguous in the last
    latent_ptr,  # descriptor of the cache's rows [rows, QK], of tiles [BLOCK_N, BLOCK_L]; None without DESCRIPTORS
    rope_ptr,  # the same, of tiles [BLOCK_N, BLOCK_P]
    table_ptr,  # [batch, max_pages]
    length_ptr,  # [batch]
    kv_scale_ptr,  # [1] or None
    o_ptr,  # [batch, splits, rows, LATENT]
    lse_ptr,  # [batch, splits, rows]
    page_stride,
    row_stride,
    page_rows,
    max_pages,
    splits,
    scale,
    HEADS: tl.constexpr,
    Q_LEN: tl.constexpr,
    QK: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    # Behind descriptors less than a tile is left: small tiles spare the registers of their addresses.
    TAIL_N: tl.constexpr = 16 if DESCRIPTORS else BLOCK_N
    ROWS: tl.constexpr = HEADS * Q_LEN
    GROUPS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    # Row groups of one run are neighbours: they read the same keys, through the L2 cache.
    i_group = tl.program_id(0) % GROUPS
    i_split = tl.program_id(0) // GROUPS % splits
    i_batch = (tl.program_id(0) // GROUPS // splits).to(tl.int64)
    length = tl.load(length_ptr + i_batch)
    run = run_size(length, splits, BLOCK_N)
    start = i_split * run
    end = tl.minimum(start + run, length)
    if (i_split > 0) & (start >= length):
        return

    o_r = i_group * BLOCK_R + tl.arange(0, BLOCK_R)
    o_l = tl.arange(0, BLOCK_L)
    o_p = LATENT + tl.arange(0, BLOCK_P)
    b_visible = length - Q_LEN + 1 + o_r // HEADS
    p_q = q_ptr + (i_batch * ROWS + o_r[:, None]) * QK
    inside = (o_r < ROWS)[:, None]
    b_q = tl.load(p_q + o_l[None, :], mask=inside & (o_l < LATENT)[None, :], other=0.0)  # [BR, BL]
    b_q, b_unit = operand(b_q, COMPUTE)
    b_qp, b_unit_p = b_q, b_unit
    if QK > LATENT:
        b_qp, b_unit_p = operand(tl.load(p_q + o_p[None, :], mask=inside & (o_p < QK)[None, :], other=0.0), COMPUTE)
    kv_scale = 1.0
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
    log2_scale = scale * kv_scale * 1.4426950408889634
    b_unit *= log2_scale
    b_unit_p *= log2_scale

    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_o = tl.zeros([BLOCK_R, BLOCK_L], tl.float32)

    p_table = table_ptr + i_batch * max_pages
    all_visible = length - Q_LEN + 1
    last_visible = all_visible + tl.minimum(i_group * BLOCK_R + BLOCK_R - 1, ROWS - 1) // HEADS
    followed = start
    if DESCRIPTORS:  # whole tiles: rows past the end may hold NaN, which no weight of zero would hide
        followed = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
        b_page = tl.load(p_table + start // PAGE, mask=start < followed, other=0)
        for i_key in range(start, followed, BLOCK_N):
            i_row = b_page * page_rows + i_key % PAGE
            i_next = i_key + BLOCK_N
            b_page = tl.load(p_table + i_next // PAGE, mask=i_next < followed, other=0)
            b_kv = _converted(latent_ptr.load([i_row, 0]), COMPUTE)  # [BN, BL]
            b_kp = rope_ptr.load([i_row, LATENT]).to(COMPUTE)  # [BN, BP]
            b_o, b_max, b_sum = _step(
                b_o, b_max, b_sum, b_q, b_qp, b_kv, b_kp, b_unit, b_unit_p, i_key, b_visible, all_visible, last_visible,
                QK - LATENT, BLOCK_R, BLOCK_N,
            )  # fmt: skip
    o_n = tl.arange(0, TAIL_N)
    if ONE_PAGE:
        b_page = tl.load(p_table + followed // PAGE, mask=followed < end, other=0)
    for i_key in tl.range(followed, end, TAIL_N, num_stages=4 if DESCRIPTORS else None):
        o_key = i_key + o_n
        live = (o_key < end)[:, None]
        if ONE_PAGE:
            p_kv = kv_ptr + b_page.to(tl.int64) * page_stride + o_n.to(tl.int64)[:, None] * row_stride
            p_kv += tl.cast(i_key % PAGE, tl.int64) * row_stride
            i_next = i_key + TAIL_N
            b_page = tl.load(p_table + i_next // PAGE, mask=i_next < end, other=0)
        else:
            pages = tl.load(p_table + o_key // PAGE, mask=o_key < end, other=0).to(tl.int64)
            p_kv = kv_ptr + (pages * page_stride + (o_key % PAGE).to(tl.int64) * row_stride)[:, None]
        if BLOCK_L == LATENT:
            b_kv = _converted(tl.load(p_kv + o_l[None, :], mask=live, other=0.0), COMPUTE)  # [BN, BL]
        else:
            b_kv = tl.load(p_kv + o_l[None, :], mask=live & (o_l < LATENT)[None, :], other=0.0).to(COMPUTE)
        b_kp = b_kv
        if BLOCK_P == QK - LATENT:
            b_kp = tl.load(p_kv + o_p[None, :], mask=live, other=0.0).to(COMPUTE)  # [BN, BP]
        elif QK > LATENT:
            b_kp = tl.load(p_kv + o_p[None, :], mask=live & (o_p < QK)[None, :], other=0.0).to(COMPUTE)
        b_o, b_max, b_sum = _step(
            b_o, b_max, b_sum, b_q, b_qp, b_kv, b_kp, b_unit, b_unit_p, i_key, b_visible, all_visible, last_visible,
            QK - LATENT, BLOCK_R, TAIL_N,
        )  # fmt: skip

    if PDL:
        gdc_launch_dependents()
    b_norm = tl.where(b_sum > 0, kv_scale / b_sum, 0.0)
    b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
    b_o = b_o * b_norm[:, None]
    o_row = (i_batch * splits + i_split) * ROWS + o_r
    tl.store(lse_ptr + o_row, b_lse, mask=o_r < ROWS)
    p_o = o_ptr + o_row[:, None] * LATENT + o_l[None, :]
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=inside & (o_l < LATENT)[None, :])

"""How far a lookup of n-gram rows in host memory hides behind a layer: `python bench/ngram_prefetch.py [--trace FILE]`.

The table lies in pinned host memory. A step asks for its rows on a stream of their own, as the engine does, while the
mixer of a linear-attention layer runs: both projections, short convolution and gates, delta rule, gated norm. Tokens
are decode rows, one a sequence, at the sizes of Qwen3.8-Flash-Next. Printed are microseconds a step, replayed as CUDA
graphs: the lookup alone, the layer alone, one after the other, and beside each other; and how much of what the lookup
adds to the layer is hidden so. `--trace` writes a Chrome trace (chrome://tracing) of one step of the last kind for each
number of tokens. Without a device it says so and exits with 1.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tokenspeed_kernels import gated_rms_norm, gdn_decode, gdn_inputs_update, linear, ngram_embed

TOKENS = (1, 32, 1024)
HIDDEN, K_HEADS, V_HEADS, HEAD_DIM, WIDTH = 2560, 16, 48, 128, 4
ORDER, TABLE_HEADS, ROW, VOCAB, EOS = 3, 16, 160, 248_320, 3
KEYS, VALUES = K_HEADS * HEAD_DIM, V_HEADS * HEAD_DIM
CHANNELS = 2 * KEYS + VALUES
REPLAYS = 50


class Lookup:
    """The n-grams of new tokens and the table that they name rows of."""

    def __init__(self, tokens: int, table: Tensor, device: torch.device) -> None:
        share = table.shape[0] // TABLE_HEADS
        integers = partial(torch.randint, dtype=torch.int64, device=device)
        self.ids = integers(0, VOCAB, (tokens,))
        self.context = integers(0, VOCAB, (tokens, ORDER - 1))
        self.cu_seqlens = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self.multipliers = integers(0, 1 << 45, (ORDER,)) | 1
        self.moduli = torch.full((TABLE_HEADS,), share, device=device)
        self.offsets = share * torch.arange(TABLE_HEADS, device=device)
        self.table, self.scale = table, torch.ones(1, device=device)
        self.embedded = torch.empty(tokens, TABLE_HEADS * ROW, dtype=torch.bfloat16, device=device)

    def __call__(self) -> None:
        hashing = self.ids, self.context, self.cu_seqlens, self.multipliers, self.moduli, self.offsets
        ngram_embed(*hashing, self.table, self.scale, eos=EOS, dtype=torch.bfloat16, out=self.embedded)


class Layer:
    """The mixer of a linear-attention layer and the states of its sequences."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        normal = partial(torch.randn, device=device)
        half = partial(normal, dtype=torch.bfloat16)
        self.widths = [CHANNELS, VALUES, V_HEADS, V_HEADS]
        self.x = half(tokens, HIDDEN)
        self.w_in = half(sum(self.widths), HIDDEN) * HIDDEN**-0.5
        self.w_conv = half(CHANNELS, WIDTH)
        self.history = half(tokens, WIDTH - 1, CHANNELS)
        self.slots = torch.arange(tokens, dtype=torch.int32, device=device)
        self.a_log, self.dt_bias = normal(V_HEADS), normal(V_HEADS)
        self.state = torch.zeros(tokens, V_HEADS, HEAD_DIM, HEAD_DIM, device=device)
        self.w_norm = half(HEAD_DIM)
        self.w_out = half(HIDDEN, VALUES) * VALUES**-0.5

    def __call__(self) -> Tensor:
        tokens = self.x.shape[0]
        channels, z, b, a = linear(self.x, self.w_in).split_with_sizes(self.widths, dim=1)
        channels, a, b = channels[:, None], a[:, None], b[:, None]
        made = gdn_inputs_update(channels, a, b, self.w_conv, self.history, self.slots, self.a_log, self.dt_bias)
        y, g, beta = (x[:, 0] for x in made)
        q, k, v = (x.view(tokens, -1, HEAD_DIM) for x in y.split_with_sizes([KEYS, KEYS, VALUES], dim=1))
        o = gdn_decode(q, k, v, g, beta, self.state, self.slots, scale=HEAD_DIM**-0.5)
        o = gated_rms_norm(o, z.view(tokens, V_HEADS, HEAD_DIM), self.w_norm, eps=1e-6, activation="silu")
        return linear(o.flatten(1), self.w_out)


def in_turn(lookup: Lookup, layer: Layer) -> None:
    lookup()
    layer()


def beside(lookup: Lookup, layer: Layer, side: torch.cuda.Stream) -> None:
    """The lookup on the side stream, the layer on the current one, which then waits for the rows."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lookup()
    layer()
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    step()  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median over replays."""
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return 1e3 * statistics.median(times)


def host_table(rows: int, device: torch.device) -> Tensor:
    """Random float8 rows, none of them NaN, in pinned host memory."""
    table = torch.empty(rows, ROW, dtype=torch.uint8, pin_memory=True)
    table.copy_(torch.randint(0, 256, table.shape, dtype=torch.uint8, device=device) & 0b1111_0111)
    return table.view(torch.float8_e4m3fn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1 << 22, help="of the table, 160 bytes each")
    parser.add_argument("--trace", metavar="FILE", help="where to write a Chrome trace")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 1
    device = torch.device("cuda")
    table = host_table(options.rows, device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    replayed = []
    print(f"{torch.cuda.get_device_name()}, {table.nbytes / 1e9:.1f} GB of table on the host; µs a step")
    print(f"{'tokens':>6} {'lookup':>8} {'layer':>8} {'in turn':>8} {'beside':>8} {'hidden':>7}")
    for tokens in TOKENS:
        lookup, layer = Lookup(tokens, table, device), Layer(tokens, device)
        steps = lookup, layer, partial(in_turn, lookup, layer), partial(beside, lookup, layer, side)
        graphs = [captured(step) for step in steps]
        alone, mixer, one_by_one, both = (microseconds(graph) for graph in graphs)
        hidden = (one_by_one - both) / (one_by_one - mixer)
        print(f"{tokens:6} {alone:8.1f} {mixer:8.1f} {one_by_one:8.1f} {both:8.1f} {hidden:7.0%}")
        replayed.append((graphs[-1], lookup, layer))  # a graph holds none of its tensors
    if options.trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for graph, *_ in replayed:
                graph.replay()
                torch.cuda.synchronize()
        profile.export_chrome_trace(options.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())

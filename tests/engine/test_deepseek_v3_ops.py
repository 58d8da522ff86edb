"""The model computes by the toolkit's ops, all of them chosen by the registry, in the form that each row calls for."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.engine.forward import Harness
from tests.engine.test_deepseek_v3_model import IDS, model_of
from tests.engine.tiny_deepseek import BASE, tiny_checkpoint
from tokenspeed_registry import trace

EVERY_STEP = {
    *("embedding", "linear", "rms_norm", "add_rms_norm", "rope", "mla_cache_write"),
    *("silu_mul", "moe_route_grouped", "moe_experts"),
}
PREFILL = {"mla_prefill"}
PREFIX = {"mla_cache_read", "merge_states"}
DECODE = {"mla_absorb_query", "mla_decode", "mla_value_up"}


def test_every_op_runs_through_the_registry() -> None:
    """The ops that ran, each on the torch backend, and how often a layer calls them."""
    harness = Harness.of_checkpoint(tiny_checkpoint())
    text, other = harness.start(IDS), harness.start(IDS[:7])
    steps = {}
    with trace() as steps["fresh prompt"]:
        harness.run(prefills=[(text, 19)])
    with trace() as steps["chunk behind a prefix"]:
        harness.run(prefills=[(text, 3)])
    with trace() as steps["decode"]:
        harness.run(decodes=[text])
    with trace() as steps["decode beside a fresh prompt"]:
        harness.run(decodes=[text], prefills=[(other, 5)])
    with trace() as steps["decode beside a chunk"]:
        harness.run(decodes=[text], prefills=[(other, 1)])
    assert {name: {call.op for call in calls} - EVERY_STEP for name, calls in steps.items()} == {
        "fresh prompt": PREFILL,
        "chunk behind a prefix": PREFILL | PREFIX,
        "decode": DECODE,
        "decode beside a fresh prompt": PREFILL | DECODE,
        "decode beside a chunk": PREFILL | PREFIX | DECODE,
    }
    assert all({call.op for call in calls} >= EVERY_STEP for calls in steps.values())
    assert {call.backend for calls in steps.values() for call in calls} == {"torch"}
    layers, dense = BASE["num_hidden_layers"], BASE["first_k_dense_replace"]
    counts = Counter(call.op for call in steps["decode beside a chunk"])
    assert counts["mla_prefill"] == 2 * layers  # the chunk, and its prefix
    assert counts["mla_decode"] == counts["mla_cache_write"] == counts["merge_states"] == layers
    assert counts["moe_experts"] == counts["moe_route_grouped"] == layers - dense
    assert counts["silu_mul"] == layers  # dense and shared
    assert counts["add_rms_norm"] == 2 * layers  # all but the first norm, and the last one


def test_computes_by_ops_alone() -> None:
    """As one graph, the model is ops of the toolkit, views and copies, and the sum of routed and shared experts."""
    harness = Harness.of_checkpoint(tiny_checkpoint())
    model = model_of(harness)
    model.layers = model.layers[:2]  # one of each kind
    text, other = harness.start(IDS[:31]), harness.start(IDS[:20])
    harness.run(prefills=[(text, 30), (other, 12)])
    batch = harness.batch([text], [(other, 8)])
    pools = [pool.clone() for pool in harness.caches.tensors()]
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        eager = model.forward(batch, harness.caches)
        for pool, content in zip(harness.caches.tensors(), pools, strict=True):
            pool.copy_(content)
        compiled = torch.compile(model.forward, fullgraph=True, backend=record)(batch, harness.caches)
    assert torch.equal(eager.logits, compiled.logits)
    (graph,) = graphs
    called = Counter(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
    ops = {name.split(".")[1] for name in called if name.startswith("tokenspeed_kernels.")}
    assert ops == EVERY_STEP | PREFILL | PREFIX | DECODE
    rest: Counter[str] = Counter()
    for name, count in called.items():
        if not name.startswith("tokenspeed_kernels."):
            rest[name.removeprefix("<built-in ").split(" of type")[0].rstrip(">")] += count
    assert rest.pop("function add") == 1
    assert rest.pop("function sub") == 1  # offsets of the prefill rows alone
    assert rest.pop("method tensor") == 2  # where the part of the prefix starts in each row, and its offsets
    views = {"function getitem", "view", "flatten", "split_with_sizes", "unsqueeze", "squeeze", "expand"}
    assert set(rest) <= views | {"method cat", "index_select", "to"}

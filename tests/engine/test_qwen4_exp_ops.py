"""The model computes by the toolkit's ops, all of them chosen by the registry."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.engine.forward import Harness, weights_of
from tests.engine.test_qwen4_exp_model import IDS
from tests.engine.tiny import BASE, tiny_checkpoint
from tokenspeed_engine.models.qwen4_exp.model import Qwen4ExpModel
from tokenspeed_registry import trace

OPS = {
    *("embedding", "linear", "residual_mix", "residual_inject", "residual_inject_mix"),
    *("ngram_embed", "ngram_gate", "ngram_inject", "causal_conv_prefill", "causal_conv_update"),
    *(
        "gdn_inputs_prefill",
        "gdn_inputs_update",
        "gdn_decode",
        "gdn_prefill",
        "gated_rms_norm",
        "grouped_rms_norm",
        "rope",
    ),
    *("kv_cache_write", "paged_attention", "sigmoid_mul", "moe_route", "moe_experts", "silu_mul"),
    *("index_cache_write", "select_blocks", "sparse_attention"),
}


def test_every_op_runs_through_the_registry() -> None:
    """The ops that ran, each on the torch backend: past the budget and before it, decodes beside a chunk."""
    harness = Harness.of_checkpoint(tiny_checkpoint())
    text, other, third = harness.start(IDS), harness.start(IDS[:7]), harness.start(IDS[:1])
    harness.run(prefills=[(text, 19)])
    with trace() as dense:
        harness.run(prefills=[(other, 7)])
    with trace() as sparse:
        harness.run(decodes=[text], prefills=[(third, 1)])
    decoding = {"gdn_decode", "gdn_inputs_update", "causal_conv_update"}
    selecting = {"select_blocks", "sparse_attention"}
    assert {call.op for call in dense} == OPS - decoding - selecting
    assert {call.op for call in sparse} == OPS - {"paged_attention"}
    assert {call.backend for call in [*dense, *sparse]} == {"torch"}
    layers = Counter(call.op for call in sparse)
    kinds = Counter(BASE["layer_types"])
    assert layers["moe_experts"] == len(BASE["layer_types"])
    assert layers["sparse_attention"] == layers["index_cache_write"] == kinds["full_attention"]
    assert layers["gdn_decode"] == layers["gdn_prefill"] == kinds["linear_attention"]
    assert layers["gdn_inputs_update"] == layers["gdn_inputs_prefill"] == kinds["linear_attention"]
    assert layers["causal_conv_update"] == len(BASE["ple_layer_ids"])


def test_computes_by_ops_alone() -> None:
    """As one graph, the model is ops of the toolkit, views and copies, and the sum of routed and shared experts."""
    harness = Harness.of_checkpoint(tiny_checkpoint())
    model = harness.model
    assert isinstance(model, Qwen4ExpModel)
    short = Qwen4ExpModel(model.config, weights_of(tiny_checkpoint()))
    short.layers = short.layers[:3]  # every kind: linear attention, the n-gram block, full attention
    text, other = harness.start(IDS[:31]), harness.start(IDS[:20])
    harness.run(prefills=[(text, 30)])
    batch = harness.batch([text], [(other, 20)])
    pools = [pool.clone() for pool in harness.caches.tensors()]
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        eager = short.forward(batch, harness.caches)
        for pool, content in zip(harness.caches.tensors(), pools, strict=True):
            pool.copy_(content)
        compiled = torch.compile(short.forward, fullgraph=True, backend=record)(batch, harness.caches)
    assert torch.equal(eager.logits, compiled.logits)
    (graph,) = graphs
    called = Counter(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
    ops = {name.split(".")[1] for name in called if name.startswith("tokenspeed_kernels.")}
    assert ops == OPS - {"paged_attention"}
    rest = {name: count for name, count in called.items() if not name.startswith("tokenspeed_kernels.")}
    assert rest.pop("<built-in function add>") == len(short.layers)
    assert rest.pop("<built-in function sub>") == 1  # offsets of the prefill rows alone
    moves = {"view", "flatten", "split_with_sizes", "repeat", "copy_", "index_select", "float"}
    assert {name for name in rest if "getitem" not in name and "method empty" not in name} <= moves

"""Case sets have cases of the models' own static dims, and what they count is what a call moves."""

from dataclasses import replace

import pytest

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_registry import Contract
from tokenspeed_registry.cases import case_set, matching_cases
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.steering import facts_of

CONTRACTS = list(default_registry.contracts.values())
each_op = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)

# Static dims of which a few stand for all, since float64 references of the whole would take minutes: experts, rows of
# large matrices, and of the largest experts' matrices one width.
REDUCED = {
    "moe_experts": {"experts", "hidden", "inter"},
    "moe_experts_fp8_block": {"experts", "hidden", "inter", "hidden_blocks", "inter_blocks"},
    "moe_experts_nvfp4": {"experts", "hidden", "inter"},
    "linear": {"out_features"},
    "linear_fp8_block": {"out_features", "out_blocks"},
    "linear_nvfp4": {"out_features"},
}


def statics_of(contract: Contract, signature: Signature) -> dict[str, int | None]:
    reduced = REDUCED.get(contract.name, set())
    return {dim: signature.dims.get(dim) for dim in contract.static if dim not in reduced}


@each_op
def test_every_model_has_small_cases_of_its_static_dims(contract: Contract) -> None:
    source = case_set(contract)
    for name, smalls in source.statics.items():
        assert smalls, "a case set with models says how to shrink them"
        model = source.signature(contract, source.model(name))
        for params in smalls:
            small = source.signature(contract, source.case(params))
            assert statics_of(contract, small) == statics_of(contract, model), name
            assert _elements(small) <= min(_elements(model), 1 << 24), name
        assert any(source.case(params) in source.cases() for params in smalls)
        first = source.signature(contract, source.case(smalls[0]))
        assert {t.name: first.dtypes.get(t.name) for t in contract.tensors} == {
            t.name: model.dtypes.get(t.name) for t in contract.tensors
        }, name


@each_op
def test_matching_cases_of_the_models(contract: Contract) -> None:
    source = case_set(contract)
    for params in [smalls[0] for smalls in source.statics.values()]:
        call = source.signature(contract, source.case(params))
        found = matching_cases(contract, call, limit=1)
        assert [facts_of(contract, source.signature(contract, case)) for case in found] == [facts_of(contract, call)]


@pytest.mark.parametrize("op", ["mla_decode", "paged_attention", "sparse_attention", "moe_experts"])
def test_counts_can_only_lower_what_dims_bound(op: str) -> None:
    contract = default_registry.contract(op)
    source = case_set(contract)
    lower = 0
    for case in source.cases():
        counted = source.signature(contract, case)
        cost, bound = contract.cost(counted), contract.cost(replace(counted, counts={}))
        assert 0 <= cost.nbytes <= bound.nbytes, case
        assert 0 <= cost.flops <= bound.flops, case
        lower += cost.nbytes < bound.nbytes
    assert lower > 5


def test_what_is_counted() -> None:
    def counts(op: str, **params: object) -> dict[str, int]:
        contract = default_registry.contract(op)
        source = case_set(contract)
        return dict(source.signature(contract, source.case(params)).counts)

    assert counts("paged_attention", new=(1, 1), before=0) == {"cached_tokens": 2, "pairs": 2}
    assert counts("paged_attention", new=(4,), before=0) == {"cached_tokens": 4, "pairs": 1 + 2 + 3 + 4}
    assert counts("mla_decode", batch=2, longest=0, q_len=4) == {"cached_tokens": 8}
    # Tail alone: of 9 tokens in blocks of 4 the last sees itself, the one before its whole block but only as a block.
    assert counts("sparse_attention", sequences=((9, 1),), chosen="none") == {"cached_tokens": 1, "pairs": 1}
    assert counts("sparse_attention", sequences=((9, 1),), chosen="most", top_k=9) == {"cached_tokens": 9, "pairs": 9}
    assert counts("gdn_verify_replay", batch=4, kept="full", padding="none") == {
        "sequences": 4,
        "kept_tokens": 4 * 4,
        "folded": 4,
    }
    assert counts("gdn_verify_replay", kept="full", padding="all") == {"sequences": 0, "kept_tokens": 0, "folded": 0}


def _elements(signature: Signature) -> int:
    return sum(signature.numel(role) for role in signature.shapes)


def test_a_kept_token_and_a_fold_cost_what_they_move() -> None:
    contract = default_registry.contract("gdn_verify_replay")
    source = case_set(contract)
    sizes = source.signature(contract, source.case({"batch": 4}))

    def nbytes(**counts: int) -> float:
        return contract.cost(replace(sizes, counts={"sequences": 4, **counts})).nbytes

    state = sizes["v_heads"] * sizes["d_v"] * sizes["d_k"] * sizes.dtype("state").itemsize
    token = sizes.nbytes("kept_k", "kept_v", "kept_g", "kept_beta") / (sizes["pool"] * sizes["capacity"])
    assert nbytes(folded=1) - nbytes() == state
    assert nbytes(kept_tokens=3) - nbytes() == pytest.approx(3 * token)

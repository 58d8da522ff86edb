"""What every op of the public API must do, whatever its family: one test a property, over all contracts."""

import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenspeed_kernels  # noqa: F401  declares the ops
from tokenspeed_registry import ArgumentError, Contract, Kernel, platform_of
from tokenspeed_registry.cases import Case, case_set
from tokenspeed_registry.conformance import Way, check_case, check_kernel
from tokenspeed_registry.registry import default_registry
from tokenspeed_registry.validation import signature_of

CONTRACTS = list(default_registry.contracts.values())
CPU = torch.device("cpu")
TORCH_KERNELS = [kernel for kernel in default_registry.kernels() if kernel.backend == "torch"]
# A kernel for tables in host memory serves calls on an accelerator only; `verify` runs it there.
KERNELS = [kernel for kernel in TORCH_KERNELS if kernel.requires.explain(platform_of(CPU)) is None]
each_op = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def arguments_of(contract: Contract) -> dict[str, Any]:
    source = case_set(contract)
    return source.arguments(contract, source.case({}))


def call(contract: Contract, arguments: dict[str, Any], **more: Any) -> Any:
    return default_registry.dispatcher(contract.name).function(**arguments, **more)


def test_every_op_has_a_torch_kernel() -> None:
    assert {kernel.op for kernel in KERNELS} == {contract.name for contract in CONTRACTS}


def test_plugins_load_whole() -> None:
    assert {s.name: s.reason for s in default_registry.plugins()}["torch"] == ""


@each_kernel
def test_conformance(kernel: Kernel) -> None:
    report = check_kernel(default_registry.contract(kernel.op), kernel, CPU)
    assert report.ok, "\n".join(report.failures)
    assert report.refused == 0, "a plain-torch kernel serves every case"


@each_kernel
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_conformance_of_random_cases(kernel: Kernel, data: st.DataObject) -> None:
    contract = default_registry.contract(kernel.op)
    source = case_set(contract)
    case: Case = data.draw(source.strategy())
    outcome = check_case(contract, kernel, source, source.arguments(contract, case), Way(CPU))
    assert outcome.ok, f"{case}: {outcome}"


@each_op
def test_registered_with_torch_library(contract: Contract) -> None:
    overload = getattr(torch.ops.tokenspeed_kernels, contract.name).default
    arguments = arguments_of(contract)
    positional = tuple(arguments[p.name] for p in contract.parameters if not p.keyword)
    keywords = {p.name: arguments[p.name] for p in contract.parameters if p.keyword}
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(getattr(value, "dtype", None) == torch.float8_e4m3fn for value in arguments.values()):
        # It compares arguments before and after by arithmetic that float8 lacks; conformance compares their bytes.
        checks.remove("test_schema")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations while it traces
        results = torch.library.opcheck(overload, positional, keywords, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@each_op
def test_compiles_without_graph_breaks(contract: Contract) -> None:
    arguments = arguments_of(contract)
    eager_arguments, compiled_arguments = _clone(arguments), _clone(arguments)
    eager = call(contract, eager_arguments)
    torch.compiler.reset()
    compiled = torch.compile(lambda **kwargs: call(contract, kwargs), fullgraph=True, backend="aot_eager")
    traced = compiled(**compiled_arguments)
    for a, b in zip(_tensors(eager), _tensors(traced), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for name in contract.mutates:
        torch.testing.assert_close(eager_arguments[name], compiled_arguments[name], rtol=0, atol=0, equal_nan=True)


@each_op
def test_bound_handle_computes_the_same(contract: Contract) -> None:
    arguments = arguments_of(contract)
    function = default_registry.dispatcher(contract.name).function
    eager = call(contract, _clone(arguments))
    handle = function.bind(**_clone(arguments))
    again = _clone(arguments)
    positional = [again[p.name] for p in contract.parameters if not p.keyword]
    bound = handle(*positional, **{p.name: again[p.name] for p in contract.parameters if p.keyword})
    for a, b in zip(_tensors(eager), _tensors(bound), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@each_op
def test_the_default_dtype_changes_nothing(contract: Contract) -> None:
    arguments = arguments_of(contract)
    plain = _clone(arguments)
    wanted = call(contract, plain)
    torch.set_default_dtype(torch.bfloat16)  # as frameworks do while they build a model
    try:
        again = _clone(arguments)
        got = call(contract, again)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(_tensors(wanted), _tensors(got), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for name in contract.mutates:
        torch.testing.assert_close(plain[name], again[name], rtol=0, atol=0, equal_nan=True)


@each_op
def test_out_is_written_and_returned(contract: Contract) -> None:
    if not contract.outputs:
        assert call(contract, arguments_of(contract)) is None
        return
    arguments = arguments_of(contract)
    fresh = call(contract, _clone(arguments))
    out = tuple(torch.empty_like(tensor) for tensor in _tensors(fresh))
    returned = call(contract, _clone(arguments), out=out if len(out) > 1 else out[0])
    for given_, got, wanted in zip(out, _tensors(returned), _tensors(fresh), strict=True):
        assert got is given_
        torch.testing.assert_close(given_, wanted, rtol=0, atol=0, equal_nan=True)


@each_op
def test_bad_tensors_are_refused_by_name_and_harm_nothing(contract: Contract) -> None:
    arguments = arguments_of(contract)
    call(contract, _clone(arguments))  # from here on a table hit vouches for the key
    for parameter in contract.tensors:
        value = arguments[parameter.name]
        if value is None:
            continue
        wrong: dict[str, Any] = {
            "dtype": value.to(torch.complex64),
            "rank": value[None],
            "device": value.to("meta"),
            "not a tensor": "text",
        }
        if len(contract.tensors) == 1:
            del wrong["device"]  # nothing to differ from
        if parameter.name not in contract.strided and value.dim() > 1 and min(value.shape) > 1:
            wrong["strides"] = value.transpose(0, 1).contiguous().transpose(0, 1)
        if value.dtype.is_floating_point and value.dtype.itemsize > 1:
            wrong["grad"] = value.clone().requires_grad_()
        for kind, bad in wrong.items():
            with pytest.raises(ArgumentError) as refusal:
                call(contract, {**_clone(arguments), parameter.name: bad})
            first = kind == "device" and parameter.name == contract.tensors[0].name
            assert first or refusal.value.argument == parameter.name, (kind, refusal.value)
    call(contract, _clone(arguments))


@each_op
def test_tensors_of_mismatched_dims_are_refused(contract: Contract) -> None:
    arguments = arguments_of(contract)
    call(contract, _clone(arguments))
    names: dict[str, int] = {}
    for parameter in (tensor for tensor in contract.tensors if arguments[tensor.name] is not None):
        for expr in parameter.dims:
            names[expr] = names.get(expr, 0) + 1
    for parameter in contract.tensors:
        value = arguments[parameter.name]
        if value is None:
            continue
        for position, expr in enumerate(parameter.dims):
            if names[expr] == 1 and expr.isidentifier():
                continue  # nothing else has this dim, so any size is right
            longer = torch.cat([value, value.narrow(position, 0, 1)], position) if value.shape[position] else None
            if longer is not None:
                with pytest.raises(ArgumentError):
                    call(contract, {**_clone(arguments), parameter.name: longer})


@each_op
def test_cost_and_tolerance_are_defined_for_every_case(contract: Contract) -> None:
    source = case_set(contract)
    for case in source.cases():
        signature = signature_of(contract, source.arguments(contract, case))
        cost = contract.cost(signature)
        assert cost.nbytes >= 0
        assert cost.flops >= 0
        for role in (*(output.name for output in contract.outputs), *contract.mutates):
            # What is rounded to float8_e4m3fn may be off by a step beside a tie: an eighth.
            limit = 0.2 if signature.dtype(role).itemsize == 1 else 0.1
            assert 0 <= contract.tolerance(signature, role) < limit


@each_op
def test_model_shapes_fit_the_contract(contract: Contract) -> None:
    source = case_set(contract)
    assert source.models, "every op names the shapes at which models call it"
    for params in source.models.values():
        assert set(params) <= set(source.axes)


@each_op
def test_docstring_says_what_a_caller_needs(contract: Contract) -> None:
    prose = contract.reference.__doc__ or ""
    assert "Source" in prose, "where the maths comes from"
    assert "Raises" in prose, "which errors a caller meets"
    # What a whole family shares, such as page tables, is described once, at the top of its module.
    prose += sys.modules[contract.reference.__module__].__doc__ or ""
    missing = [p.name for p in contract.parameters if p.name not in prose]
    assert not missing, f"parameters that no prose mentions: {missing}"
    help_text = default_registry.dispatcher(contract.name).function.__doc__
    assert all(f"    {p.name}: " in help_text for p in contract.parameters)


def _clone(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)

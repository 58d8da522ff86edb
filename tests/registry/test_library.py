"""Every op is a torch.library op too: schema, fake implementation, mutation, and compiled graphs equal to eager."""

from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from tests.registry.toys import BLEND, DOUBLE, blend, blend_arguments, double, doubling, fill_rows, new_registry, toy
from tokenspeed_registry import Dim, NoKernelError, ShapeError, trace
from tokenspeed_registry.library import schema


def everything(
    x: Float[Tensor, "tokens dim"],
    pool: Float32[Tensor, "slots dim"],
    counts: Int32[Tensor, "slots"] | None,
    cu: Int32[Tensor, "seqs+1"],
    n: int,
    *,
    bias: Float32[Tensor, "dim"] | None = None,
    eps: float = 1e-6,
    width: int = 2,
    window: int | None = None,
    causal: bool = True,
    style: Literal["add", "multiply"] = "add",
    layout: str | None = None,
    dtype: torch.dtype = torch.float32,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "tokens dim"], Float32[Tensor, "seqs width*n"]]:
    """Every kind of parameter, two mutated arguments, two outputs."""
    pool[0] += eps
    if counts is not None:
        counts += n
    y = x.double() if bias is None else x.double() + bias.double()
    y = y * (2 if causal else 3) + (len(style) if layout is None else 0)
    return y, x.new_full((len(cu) - 1, width * n), window or 0, dtype=torch.float64)


EVERYTHING: dict[str, Any] = {
    "outputs": ("y", "windows"),
    "output_dtypes": {"y": "dtype"},
    "mutates": ("pool", "counts"),
    "where": ("width >= 1",),
}


def everything_arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    counts, cu = torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    return torch.randn(3, 4), torch.randn(2, 4), counts, cu, 3


def library_op(registry: Any, name: str) -> Any:
    return getattr(getattr(torch.ops, registry.namespace), name).default


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_schema() -> None:
    op = toy(new_registry(), everything, **EVERYTHING)
    assert schema(op.contract) == (
        "everything(Tensor x, Tensor(a!) pool, Tensor(b!)? counts, Tensor cu, SymInt n, *, Tensor? bias=None, "
        'float eps=1e-06, SymInt width=2, SymInt? window=None, bool causal=True, str style="add", str? layout=None, '
        "ScalarType dtype=float32, str? backend=None) -> (Tensor, Tensor)"
    )
    assert schema(toy(new_registry(), double, **DOUBLE).contract).endswith("-> Tensor")
    assert schema(toy(new_registry(), fill_rows, mutates=("pool",)).contract).endswith("-> ()")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": torch.ones(4), "window": 5, "causal": False, "style": "multiply", "layout": "rows"},
        {"dtype": torch.bfloat16, "width": 3, "eps": 2.0, "backend": "reference"},
    ],
)
def test_opcheck_of_every_kind_of_parameter(options: dict[str, Any]) -> None:
    registry = new_registry()
    toy(registry, everything, **EVERYTHING)
    torch.library.opcheck(library_op(registry, "everything"), everything_arguments(), options)
    x, pool, _, cu, n = everything_arguments()
    torch.library.opcheck(library_op(registry, "everything"), (x, pool, None, cu, n), options)


def test_opcheck_of_the_others() -> None:
    registry = new_registry()
    toy(registry, double, **DOUBLE, strided=("x",))
    toy(registry, fill_rows, mutates=("pool",))
    toy(registry, blend, **BLEND)
    torch.library.opcheck(library_op(registry, "double"), (torch.randn(4, 8)[:, :4],))
    fill = torch.zeros(3, 2), torch.tensor([1], dtype=torch.int32), torch.ones(1, 2)
    torch.library.opcheck(library_op(registry, "fill_rows"), fill)
    arguments = blend_arguments()
    positional = tuple(arguments.pop(name) for name in ("x", "weight", "cu"))
    torch.library.opcheck(library_op(registry, "blend"), positional, arguments)


def test_library_op_validates_as_the_public_one() -> None:
    registry = new_registry()
    toy(registry, everything, **EVERYTHING)
    x, pool, counts, cu, n = everything_arguments()
    with pytest.raises(ShapeError):
        library_op(registry, "everything")(x, pool[:, :3].contiguous(), counts, cu, n)


def test_fake_outputs_match_real_ones() -> None:
    registry = new_registry()
    op = toy(registry, everything, **EVERYTHING)
    real = op(*everything_arguments(), dtype=torch.float16)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in everything_arguments()]
        fake = library_op(registry, "everything")(*fakes, dtype=torch.float16)
    for mine, theirs in zip(fake, real, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_compiled_equals_eager_with_mutation() -> None:
    op = toy(new_registry(), everything, **EVERYTHING)

    def model(x: Tensor, pool: Tensor, counts: Tensor | None, cu: Tensor, n: int) -> tuple[Tensor, Tensor]:
        y, windows = op(x * 2, pool, counts, cu, n, window=4, dtype=torch.bfloat16)
        return y + pool[0], windows + 1

    arguments = everything_arguments()
    eager = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    expected, got = model(*eager), compiled(model)(*arguments)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(arguments[1], eager[1])  # type: ignore[arg-type]
    assert arguments[2].tolist() == [3, 3]


def test_one_graph_for_all_sizes() -> None:
    op = toy(new_registry(), double, **DOUBLE)
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = torch.compile(lambda x: op(x + 1) * 3, fullgraph=True, backend=counting, dynamic=True)
    for tokens in (2, 3, 17, 64):
        x = torch.randn(tokens, 4)
        assert torch.equal(model(x), op(x + 1) * 3)
    assert len(graphs) == 1


def test_sizes_as_integer_arguments_stay_symbolic() -> None:
    op = toy(new_registry(), everything, **EVERYTHING)
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def model(x: Tensor, pool: Tensor, cu: Tensor) -> Tensor:
        return op(x, pool, None, cu, 1, width=x.shape[0] + 2)[1]

    torch._dynamo.reset()
    function = torch.compile(model, fullgraph=True, backend=counting, dynamic=True)
    _, pool, _, cu, _ = everything_arguments()
    for tokens in (7, 5, 9):
        assert function(torch.randn(tokens, 4), pool, cu).shape == (3, tokens + 2)
    assert len(graphs) == 1


def test_dynamic_shapes_select_the_kernel_at_run_time() -> None:
    registry = new_registry()
    op = toy(registry, double, **DOUBLE)
    registry.add_kernel(doubling(op, "few", priority=300, constraints=[Dim("tokens") <= 8]))
    registry.add_kernel(doubling(op, "rest"))
    model = compiled(lambda x: op(x), dynamic=True)
    with trace() as calls:
        for tokens in (4, 8, 9):
            model(torch.ones(tokens, 4))
    assert [call.kernel for call in calls] == ["few", "few", "rest"]


def test_compiled_with_an_explicit_backend() -> None:
    registry = new_registry()
    op = toy(registry, double, **DOUBLE)
    registry.add_kernel(doubling(op, "aa"))
    registry.add_kernel(doubling(op, "bb", constraints=[Dim("tokens") <= 8]))
    model = compiled(lambda x: op(x, backend="bb"))
    with trace() as calls:
        assert torch.equal(model(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    assert [call.kernel for call in calls] == ["bb"]
    with pytest.raises(NoKernelError, match="needs tokens <= 8, got 9"):
        compiled(lambda x: op(x, backend="bb"))(torch.ones(9, 4))


def test_compiled_with_out() -> None:
    op = toy(new_registry(), everything, **EVERYTHING)

    def model(x: Tensor, pool: Tensor, counts: Tensor, cu: Tensor, n: int, out: tuple[Tensor, Tensor]) -> Tensor:
        y, _ = op(x, pool, counts, cu, n, out=out)
        return y + 1

    expected = op(*everything_arguments_seeded())
    out = torch.full((3, 4), torch.nan), torch.full((3, 6), torch.nan)
    returned = compiled(model)(*everything_arguments_seeded(), out)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(out, expected, strict=True))
    assert torch.equal(returned, expected[0] + 1)
    single = toy(new_registry(), double, **DOUBLE)
    target = torch.empty(2, 4)
    assert compiled(lambda x, out: single(x, out=out))(torch.ones(2, 4), target) is target
    assert target.tolist() == [[2.0] * 4] * 2


def everything_arguments_seeded() -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    torch.manual_seed(0)
    return everything_arguments()


def test_compiled_refuses_what_eager_refuses() -> None:
    op = toy(new_registry(), fill_rows, mutates=("pool",))
    model = compiled(lambda pool, rows, values: op(pool, rows, values))
    pool = torch.zeros(3, 2)
    model(pool, torch.tensor([1], dtype=torch.int32), torch.ones(1, 2))
    assert pool.tolist() == [[0, 0], [1, 1], [0, 0]]
    with pytest.raises(ShapeError):
        model(pool, torch.tensor([1], dtype=torch.int32), torch.ones(2, 2))

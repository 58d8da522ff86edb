"""Projections in every format compute what their values say; quantising as they are loaded changes nothing else."""

import pytest
import torch
from torch import Tensor

from tests.engine.test_llm import greedy
from tokenspeed_engine import LLM, EngineOptions
from tokenspeed_engine.checkpoint.load import Weights
from tokenspeed_engine.models import linear as module
from tokenspeed_engine.models.linear import Apart, Linear, loaded, quantised, quantised_rows, stacked
from tokenspeed_engine.models.qwen4_exp import residual
from tokenspeed_kernels.quantise import to_fp8_block

X = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))


def weight(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 200, generator=torch.Generator().manual_seed(seed))


def weights(tensors: dict[str, Tensor], quantise: bool = False) -> Weights:
    return Weights(tensors, {}, quantise)


def fp8(**plain: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        found[name], found[f"{name}.scale"] = to_fp8_block(tensor)
    return found


def test_a_projection_in_fp8_is_its_values() -> None:
    projection = loaded(weights(fp8(a=weight(300, 1))), "a")
    assert projection.weight.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(projection(X), X @ projection.dequantised(torch.float32).T)
    assert float((projection(X) - X @ weight(300, 1).T).abs().max()) > 1e-3, "it was rounded"


def test_a_wide_projection_is_quantised_only_when_asked() -> None:
    kept = loaded(weights({"a": weight(300, 1)}), "a")
    assert kept == Linear(kept.weight)
    assert loaded(weights({"a": weight(300, 1)}, quantise=True), "a").weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("quantise", [False, True])
def test_wide_projections_are_stacked(quantise: bool) -> None:
    together = stacked(weights({"a": weight(130, 1), "b": weight(70, 2)}, quantise), ["a", weight(3, 3), "b"])
    assert isinstance(together, Linear)
    values = together.dequantised(torch.float32)
    whole = torch.cat([weight(130, 1), weight(3, 3), weight(70, 2)])
    assert torch.equal(values, whole) is not quantise
    assert values.shape == whole.shape
    torch.testing.assert_close(together(X), X @ values.T)


@pytest.mark.parametrize(("rows", "kind"), [(256, Linear), (130, Apart)])
def test_fp8_projections_are_stacked_where_blocks_allow_it(rows: int, kind: type) -> None:
    given = weights(fp8(a=weight(rows, 1), b=weight(70, 2)))
    together = stacked(given, ["a", "b"])
    assert type(together) is kind
    wanted = torch.cat([loaded(given, name)(X) for name in ("a", "b")], dim=-1)
    torch.testing.assert_close(together(X), wanted)


def test_rows_take_a_scale_each() -> None:
    elements, scale = quantised_rows(torch.tensor([[0.0, 0.0], [1e-3, 2e-3], [-448.0, 3.0]]))
    assert elements.float().tolist() == [[0.0, 0.0], [224.0, 448.0], [-448.0, 3.0]]
    assert scale.tolist()[1:] == pytest.approx([2e-3 / 448, 1.0])


def test_a_model_quantised_as_it_is_loaded_computes_what_its_values_say(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(max_context=128, num_drafts=2, quantise="fp8")

    def tokens() -> list[tuple[int, ...]]:
        return [each.token_ids for each in LLM(None, options).generate(["def f(x):", "import os\n"], greedy(12))]

    def values(found: Tensor) -> Linear:
        return Linear(quantised(found).dequantised(torch.float32))

    def row_values(found: Tensor) -> tuple[Tensor, None]:
        elements, scale = quantised_rows(found)
        return elements.float() * scale[:, None], None

    found = tokens()
    monkeypatch.setattr(module, "quantised", values)
    monkeypatch.setattr(residual, "quantised_rows", row_values)
    assert tokens() == found

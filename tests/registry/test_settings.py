"""What the environment and the configuration file say, and errors for what they cannot say."""

from pathlib import Path

import pytest
import torch

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy
from tokenspeed_registry import Registry, TokenspeedError, UnknownNameError, trace
from tokenspeed_registry.settings import Settings, read_settings

PREFIX = "TOKENSPEED_KERNELS_"


def test_defaults() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert (settings.debug, settings.self_check) == (False, True)
    assert settings.cache == Path.home() / ".cache" / "tokenspeed_kernels"
    assert settings.kernels == {}
    assert settings.disabled == frozenset()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_switches(value: str, on: bool) -> None:
    settings = read_settings({f"{PREFIX}DEBUG": value, f"{PREFIX}SELF_CHECK": value})
    assert settings.debug is on
    assert settings.self_check is on


def test_cache_folder_is_where_evidence_is_kept(tmp_path: Path) -> None:
    settings = read_settings({f"{PREFIX}CACHE": str(tmp_path)})
    assert settings.cache == tmp_path
    assert read_settings({f"{PREFIX}CACHE": ""}).cache == Settings().cache


def test_config_file_decides_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "choices.toml"
    path.write_text('[kernels]\ndouble = "bb"\n"*" = "aa"\n[plugins]\ndisabled = ["cuda", "rocm"]\n')
    settings = read_settings({f"{PREFIX}CONFIG": str(path)})
    assert settings.kernels == {"double": "bb", "*": "aa"}
    assert settings.disabled == frozenset({"cuda", "rocm"})
    registry = Registry(new_registry().namespace, settings=settings, plugins=False)
    op = toy(registry, double, **DOUBLE)
    for name in ("aa", "bb"):
        registry.add_kernel(doubling(op, name))
    with trace() as calls:
        op(torch.ones(2, 4))
    assert [call.kernel for call in calls] == ["bb"]


def test_a_configured_kernel_that_does_not_exist_raises() -> None:
    op = toy(new_registry(kernels={"double": "typo"}), double, **DOUBLE)
    with pytest.raises(UnknownNameError, match="'typo'"):
        op(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kernels", "config file"),
        ("[kernel]\n", r"unknown tables \['kernel'\]; known: kernels, plugins"),
        ("[kernels]\nmla = 3\n", "maps op names to backend or kernel names"),
        ("[kernels.mla]\nbackend = 'cuda'\n", "maps op names to backend or kernel names"),
        ("kernels = 'cuda'\n", "maps op names to backend or kernel names"),
        ("[plugins]\ndisabled = 'cuda'\n", "a list of names"),
        ("[plugins]\ndisabled = [1]\n", "a list of names"),
        ("[plugins]\ndisable = ['cuda']\n", "plugins"),
        ("plugins = ['cuda']\n", "plugins"),
    ],
)
def test_a_config_file_that_says_nothing_useful_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "choices.toml"
    path.write_text(text)
    with pytest.raises(TokenspeedError, match=message) as caught:
        read_settings({f"{PREFIX}CONFIG": str(path)})
    assert str(path) in str(caught.value)


def test_a_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TokenspeedError, match=r"absent\.toml"):
        read_settings({f"{PREFIX}CONFIG": str(tmp_path / "absent.toml")})
    (tmp_path / "latin.toml").write_bytes(b"[kernels]\nx = '\xff'\n")
    with pytest.raises(TokenspeedError, match=r"latin\.toml"):
        read_settings({f"{PREFIX}CONFIG": str(tmp_path / "latin.toml")})

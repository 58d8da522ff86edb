"""What the environment and the configuration file say, and errors for what they cannot say."""

from pathlib import Path

import pytest
import torch

from tests.registry.toys import DOUBLE, double, doubling, new_registry, toy
from tokenspeed_registry import Registry, TokenspeedError, UnknownNameError, trace
from tokenspeed_registry.configuration import resolve
from tokenspeed_registry.settings import Settings, read_settings

PREFIX = "TOKENSPEED_KERNELS_"


def test_defaults() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert (settings.debug, settings.self_check) == (False, True)
    assert settings.cache == Path.home() / ".cache" / "tokenspeed_kernels"
    assert settings.kernels == {}
    assert settings.disabled == frozenset()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("yes", True), ("0", False), ("off", False)])
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
        ("[kernel]\n", "unknown field kernel; known: debug, self_check, cache, arch, kernels, plugins"),
        ("[kernels]\nmla = 3\n", r"kernels\.mla: .* got 3"),
        ("[kernels.mla]\nbackend = 'cuda'\n", r"kernels\.mla: "),
        ("kernels = 'cuda'\n", "kernels: .* got 'cuda'"),
        ("debug = 'perhaps'\n", "debug: .* got 'perhaps'"),
        ("[plugins]\ndisabled = 'cuda'\n", r"plugins\.disabled: .* got 'cuda'"),
        ("[plugins]\ndisabled = [1]\n", r"plugins\.disabled"),
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


def test_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "choices.toml"
    path.write_text('debug = true\ncache = "elsewhere"\n')
    environment = {f"{PREFIX}CONFIG": str(path), f"{PREFIX}DEBUG": "0", f"{PREFIX}ARCH": ""}
    resolved = resolve(environment, {"self_check": False})
    assert resolved.configuration.debug is False, "a variable wins over the file"
    assert resolved.configuration.cache == Path("elsewhere")
    assert resolved.configuration.self_check is False
    assert resolved.origins == {
        "debug": f"environment {PREFIX}DEBUG",
        "self_check": "flag",
        "cache": f"file {path}",
        "arch": "default",
        "kernels": "default",
        "plugins": "default",
    }


def test_a_variable_that_nobody_reads_is_named_with_the_nearest_one() -> None:
    with pytest.warns(RuntimeWarning, match=f"{PREFIX}DEBGU is not read; did you mean {PREFIX}DEBUG"):
        resolve({f"{PREFIX}DEBGU": "1"})
    with pytest.raises(TokenspeedError, match=f"{PREFIX}DEBUG: debug: .* got 'maybe'"):
        resolve({f"{PREFIX}DEBUG": "maybe"})


def test_the_configuration_is_read_at_the_first_dispatch_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}CONFIG", "/no/such/file")
    registry = Registry(new_registry().namespace, plugins=False)
    op = toy(registry, double, **DOUBLE)
    with pytest.raises(TokenspeedError, match="/no/such/file"):
        op(torch.ones(2, 4))

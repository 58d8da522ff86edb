"""Folders of safetensors files: one file, shards with an index, and what is wrong with either."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.reader import Checkpoint

A, B, C = (torch.full((2, 2), float(value)) for value in (1, 2, 3))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A, "b": B}, tmp_path / "one.safetensors")
    save_file({"c": C}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return caught.value.problems


def test_single_file(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}
        assert torch.equal(checkpoint.read("b"), B)


def test_shards(sharded: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c"}
        for name, expected in (("c", C), ("a", A), ("b", B)):
            assert torch.equal(checkpoint.read(name), expected)


def test_shards_that_are_links(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Download caches keep the content elsewhere and link to it."""
    linked = tmp_path_factory.mktemp("linked")
    for file in sharded.iterdir():
        (linked / file.name).symlink_to(file)
    with Checkpoint.open(linked) as checkpoint:
        assert torch.equal(checkpoint.read("c"), C)


def test_files_outside_the_index_are_ignored(sharded: Path) -> None:
    (sharded / "other.safetensors").write_bytes(b"")
    with Checkpoint.open(sharded) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c"}


def test_empty_folder(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == ("has neither model.safetensors nor model.safetensors.index.json",)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    assert problems_of(sharded) == ("names shard two.safetensors, which is missing",)


def test_truncated_shard(sharded: Path) -> None:
    shard = sharded / "two.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"two.safetensors: truncated: "):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["../two.safetensors", "/etc/passwd", "sub/two.safetensors", "..\\two.safetensors"])
def test_shards_outside_the_folder(sharded: Path, name: str) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "one.safetensors", "c": name})
    assert problems_of(sharded) == (f"names shard {name!r}, which is not a file name in the folder",)


def test_index_and_shards_that_disagree(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"})
    assert problems_of(sharded) == (
        "does not place b in one.safetensors, which holds it",
        "places d in two.safetensors, which does not hold it",
    )


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}])
def test_index_without_a_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    assert problems_of(sharded) == ("has no weight_map from tensor names to file names",)


def test_index_that_is_no_json(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read: "):
        Checkpoint.open(sharded)


def test_file_replaced_after_opening(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"model.safetensors: a cannot be read"):
            checkpoint.read("a")

"""A folder of safetensors files, opened as one checkpoint and read one tensor at a time."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.header import TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model folder. Opening reads headers only; `read` maps one tensor from disk.

    A context manager: files stay mapped until it closes.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._open_files: dict[Path, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

        Raises CheckpointError when there is neither, a shard is missing or malformed, or index and shards disagree.
        """
        if (folder / SINGLE_FILE).exists():
            return cls(folder, read_header(folder / SINGLE_FILE))
        if not (folder / INDEX_FILE).exists():
            raise CheckpointError(str(folder), [f"has neither {SINGLE_FILE} nor {INDEX_FILE}"])
        return cls(folder, _read_shards(folder))

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU, as stored; its memory is the mapped file and must not be written to."""
        file = self.tensors[name].file
        try:
            if file not in self._open_files:
                self._open_files[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensor: torch.Tensor = self._open_files[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(file), [f"{name} cannot be read: {error}"]) from error
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.clear()
        self._stack.close()


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    where = _read_weight_map(folder)
    shards = sorted(set(where.values()))
    problems: list[str] = []
    for shard in shards:
        if PurePosixPath(shard).name != shard or "\\" in shard:
            problems.append(f"names shard {shard!r}, which is not a file name in the folder")
        elif not (folder / shard).is_file():
            problems.append(f"names shard {shard}, which is missing")
    if problems:
        raise CheckpointError(str(folder / INDEX_FILE), problems)

    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if where.get(name) == shard:
                tensors[name] = info
            else:
                problems.append(f"does not place {name} in {shard}, which holds it")
    problems += [f"places {name} in {where[name]}, which does not hold it" for name in where.keys() - tensors.keys()]
    if problems:
        raise CheckpointError(str(folder / INDEX_FILE), problems)
    return tensors


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, as the index says."""
    index = folder / INDEX_FILE
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(str(index), [f"cannot be read: {error}"]) from error
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(str(index), ["has no weight_map from tensor names to file names"])
    return where

"""Headers of safetensors files, good and bad, with the safetensors library as the judge of both."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.header import read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    tensors = {
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "empty": torch.ones(0, 4, dtype=torch.float16),
        "ids": torch.arange(5),
        "quantised": torch.ones(4, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def test_reads_what_safetensors_reads(file: Path) -> None:
    header = read_header(file)
    with safe_open(file, framework="pt") as opened:
        assert set(header) == set(opened.keys())
        for name, info in header.items():
            tensor = opened.get_tensor(name)
            assert info.shape == tuple(tensor.shape)
            assert info.dtype == opened.get_slice(name).get_dtype()
            assert info.nbytes == tensor.nbytes
            assert info.file == file


@pytest.mark.parametrize("kept", [0, 7, 8, 40])
def test_file_cut_in_its_header(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{file.name}: truncated: "):
        read_header(file)


def test_file_cut_in_its_data(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name}: truncated: its tensors take 72 bytes, the file holds 71"):
        read_header(file)


def test_something_else_with_the_right_name(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CheckpointError, match=rf"{file.name}: not a safetensors file"):
        read_header(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["half"].update(dtype="BF17"), "tensor half: unknown dtype 'BF17'"),
        (
            lambda header: header["half"].update(shape=[3, 3]),
            r"tensor half: 12 bytes of data for BF16 \[3, 3\], expected 18",
        ),
        (lambda header: header["half"].update(shape=[-3, -2]), r"tensor half: bad shape \[-3, -2\]"),
        (lambda header: header["half"].pop("data_offsets"), "tensor half: bad data_offsets None"),
        (lambda header: header.update(half=3), "tensor half: not a JSON object"),
        (lambda header: header.pop("ids"), "malformed header: data of "),
        (lambda header: header["half"].update(data_offsets=header["scalar"]["data_offsets"]), "tensor half: 4 bytes"),
    ],
)
def test_malformed_header(file: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    rewrite_header(file, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert caught.value.subject == str(file)
    with pytest.raises(SafetensorError), safe_open(file, framework="pt"):
        pass


@pytest.mark.parametrize("text", [b"{'a':", b"[" * 100_000], ids=["quotes", "depth"])
def test_header_that_is_no_json(file: Path, text: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="malformed header: "):
        read_header(file)


def test_bytes_after_the_last_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0\0")
    with pytest.raises(CheckpointError, match="2 bytes follow the last tensor"):
        read_header(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")

"""Reading many tensors of several files at once, in parts."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed_engine.checkpoint import stream as module
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.checkpoint.header import read_header
from tokenspeed_engine.checkpoint.stream import Read, stream

STORED = {
    "a": torch.arange(700, dtype=torch.float32),
    "b": torch.arange(333).to(torch.bfloat16),
    "c": torch.arange(0, 200, dtype=torch.uint8),
    "d": torch.linspace(-4, 4, 77).to(torch.float8_e4m3fn),
    "e": torch.empty(0, dtype=torch.float32),
    "f": torch.tensor(2.5),
}


def files(folder: Path) -> dict[str, Read]:
    """Two files, each with every tensor, and where those go."""
    reads = {}
    for number in range(2):
        path = folder / f"{number}.safetensors"
        save_file({f"{number}.{name}": tensor for name, tensor in STORED.items()}, path)
        for name, info in read_header(path).items():
            tensor = STORED[name.partition(".")[2]]
            reads[name] = Read(info, torch.full((tensor.numel(),), -1.0).to(tensor.dtype))
    return reads


def test_every_tensor_arrives_whatever_the_size_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = files(tmp_path)
    monkeypatch.setattr(module, "PART_BYTES", 64)
    told: list[tuple[int, int]] = []
    stream(list(reads.values()), lambda done, total: told.append((done, total)))
    for name, read in reads.items():
        wanted = STORED[name.partition(".")[2]].view(-1)
        assert torch.equal(read.target.view(torch.uint8), wanted.view(torch.uint8)), name
    total = sum(read.source.nbytes for read in reads.values())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_tensor_is_widened_or_rounded_to_its_place(tmp_path: Path) -> None:
    reads = files(tmp_path)
    place = torch.empty(333, dtype=torch.float32)
    stream([Read(reads["0.b"].source, place)], lambda done, total: None)
    assert torch.equal(place, STORED["b"].float())


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
def test_a_part_of_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3)
    save_file({"before": torch.ones(9), "w": whole}, tmp_path / "w.safetensors")
    info = read_header(tmp_path / "w.safetensors")["w"]
    place = torch.empty(3 * 2 * 3)
    told: list[tuple[int, int]] = []
    stream([Read(info, place, (range(2, 5), range(1, 3), range(3)))], lambda done, total: told.append((done, total)))
    assert torch.equal(place.view(3, 2, 3), whole[2:5, 1:3])
    assert told[-1] == (3 * 5 * 3 * 4, 3 * 5 * 3 * 4), "rows that nobody wants are not read"


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    reads = files(tmp_path)
    file = tmp_path / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"1\.safetensors.*ends before its last tensor"):
        stream(list(reads.values()), lambda done, total: None)


MEASURE = """
import resource, sys
from pathlib import Path
import torch
from tokenspeed_engine.checkpoint.header import read_header
from tokenspeed_engine.checkpoint.stream import Read, stream
reads = [
    Read(info, torch.empty(info.nbytes // 4, device="meta"))
    for file in Path(sys.argv[1]).iterdir()
    for info in read_header(file).values()
]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stream(reads, lambda done, total: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_host_memory_stays_below_one_file(tmp_path: Path) -> None:
    count = 25 * 1024**2
    for number in range(4):
        save_file({f"w{number}": torch.zeros(count)}, tmp_path / f"{number}.safetensors")
    found = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) * 1024 < count * 4


def test_after_a_failure_other_files_are_not_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 64)
    reads = files(tmp_path)
    (tmp_path / "0.safetensors").unlink()
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        time.sleep(0.01)

    with pytest.raises(CheckpointError, match=r"0\.safetensors.*cannot be read"):
        stream(list(reads.values()), tell)
    assert len(told) < 30, "of some sixty parts"

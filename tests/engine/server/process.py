"""`tokenspeed-engine serve` as a process of its own, and clients on raw sockets, which may leave at any point."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAIN = "from tokenspeed_engine.cli import main; main()"
MODEL = "tokenspeed-demo"
Leaving = Literal["in the body", "at once", "after the first token", "before the last token"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class ServerProcess:
    """The embedded model, served. Standard error goes to a file."""

    def __init__(self, port: int, options: Sequence[str], log: Path) -> None:
        self.port = port
        self._log = log
        command = [sys.executable, "-c", MAIN, "serve", "--port", str(port), *options]
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stderr=file, stdout=file)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    assert answer.status == 200
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, self.log
                assert time.monotonic() < deadline
                time.sleep(0.1)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def wait_until_free(self) -> dict[str, float]:
        """Until no request holds or waits for anything; the metrics then."""
        deadline = time.monotonic() + 60
        while True:
            found = {name.removeprefix("tokenspeed_"): value for name, value in self.metrics().items()}
            if (
                (found["num_running"], found["num_waiting"]) == (0, 0)
                and found["num_free_pages"] == found["num_pages"]
                and found["num_free_slots"] == found["num_slots"]
            ):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def resident_bytes(self) -> int:
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        return int(kib) * 1024

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def serving(port: int, options: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(port, options, log)
    try:
        process.wait_until_healthy()
        yield process
    finally:
        process.kill()


@dataclass
class Answer:
    """What came back: status 0 where the client left or was cut off. `finished`: whether the answer was whole."""

    status: int = 0
    body: bytes = b""
    finished: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.body.decode().removesuffix("\n\n").split("\n\n")]


async def ask(port: int, path: str, body: bytes | dict[str, Any], leaving: Leaving | None = None) -> Answer:
    """One request on a connection of its own. A client that leaves does so half the time with a reset."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return await exchange(port, head + (data[: len(data) // 2] if leaving == "in the body" else data), body, leaving)


async def exchange(
    port: int, request: bytes, body: bytes | dict[str, Any] = b"", leaving: Leaving | None = None
) -> Answer:
    """What a server says to these bytes, and how far the client listens."""
    answer = Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        if leaving == "in the body" or leaving == "at once":
            _reset(writer, len(request) % 2 == 0)
            return answer
        head = await reader.readuntil(b"\r\n\r\n")
        answer.status = int(head.split()[1])
        if leaving is not None:
            assert isinstance(body, dict)
            events = 1 if leaving == "after the first token" else body["max_tokens"] - 1
            for _ in range(events):
                await reader.readuntil(b"data: ")
            _reset(writer, len(request) % 2 == 0)
            return answer
        answer.body = await _read_body(reader, b"chunked" in head.lower())
        answer.finished = True
    except (ConnectionError, asyncio.IncompleteReadError):
        answer.status = 0
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer


async def _read_body(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    if not chunked:
        return await reader.read()
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return bytes(body)


def _reset(writer: asyncio.StreamWriter, hard: bool) -> None:
    """Let the connection end with a reset instead of an end of stream."""
    if hard:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

"""`tokenspeed-engine serve` as a process: it starts, drains at SIGTERM, and says what is missing."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import tokenspeed_engine.server
from tokenspeed_engine.cli import main

MAIN = "from tokenspeed_engine.cli import main; main()"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _wait_for_health(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except urllib.error.URLError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_it_serves_the_embedded_model_and_finishes_what_runs_at_sigterm() -> None:
    port = _free_port()
    command = [sys.executable, "-c", MAIN, "serve", "--port", str(port), "--max-context", "128"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for_health(f"http://127.0.0.1:{port}", process)
        body = {"model": "tokenspeed-demo", "prompt": "a", "max_tokens": 40, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            events = (first + answer.read()).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        _, log = process.communicate(timeout=30)
        assert "Application shutdown complete" in log
        assert "Traceback" not in log
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "app"):
        monkeypatch.delattr(tokenspeed_engine.server, name, raising=False)
        monkeypatch.delitem(sys.modules, f"tokenspeed_engine.server.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr(sys, "argv", ["tokenspeed-engine", "serve"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "pip install 'tokenspeed-kernels[server]'" in capsys.readouterr().err

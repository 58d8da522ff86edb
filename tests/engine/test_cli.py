"""`tokenspeed-engine` as a user runs it: JSON, exit codes, one line for what a user can get wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import hf_greedy, tiny_checkpoint


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tokenspeed_engine.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_generate_prints_json_of_a_folder_without_tokenizer() -> None:
    folder = tiny_checkpoint("default")
    options = ("--max-new-tokens", "5", "--ignore-eos", "--logprobs", "2", "--dtype", "float32", "--json")
    result = run("generate", "--model", str(folder), "--prompt-ids", "5,6,7,8", *options)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == {"token_ids", "text", "finish_reason", "logprobs", "kernels", "usage"}
    assert answer["token_ids"] == hf_greedy(folder, [5, 6, 7, 8], 5)
    assert answer["text"] is None
    assert answer["finish_reason"] == "length"
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])
    assert {"gdn_decode", "moe_experts", "sample"} <= {row["op"] for row in answer["kernels"]}
    assert all(row["kernel"] == f"torch.{row['op']}" for row in answer["kernels"])
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


def test_the_embedded_model_completes_python() -> None:
    result = run("demo", "--max-new-tokens", "12")
    assert result.returncode == 0, result.stderr
    assert "self.items.append(item)" in result.stdout
    assert "torch.gdn_verify_replay" in result.stdout
    assert "tokens accepted a step" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "--prompt-ids", "1,x"), "--prompt-ids"),
        (("generate",), "--prompt"),
        (("generate", "--prompt", "a", "--prompt-ids", "1"), "exactly one"),
        (("generate", "--prompt", "a", "--model", "absent"), "absent"),
        (("generate", "--prompt-ids", ",".join(["1"] * 5000)), "context"),
        (("generate", "--prompt-ids", "999999"), "999999"),
        (("generate", "--prompt", "a", "--temperature", "-1"), "temperature"),
        (("generate", "--prompt", "a", "--dtype", "int4"), "dtype"),
        (("generate", "--prompt", "\udcff"), "prompt"),  # a byte that is no UTF-8
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("tokenspeed-engine:")]
    assert len(lines) == 1
    assert says in lines[0]
    assert "Traceback" not in result.stderr


def test_nothing_of_the_control_plane_needs_torch() -> None:
    code = "import sys, tokenspeed_engine.control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_embedded_checkpoint_is_within_its_size() -> None:
    from tokenspeed_engine.llm import EMBEDDED_MODEL

    assert sum(file.stat().st_size for file in Path(EMBEDDED_MODEL).iterdir()) <= 10_000_000

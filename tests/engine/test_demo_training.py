"""The embedded model: its training code learns, its files round-trip, and transformers computes the same logits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tokenspeed_engine.demo import CHECKPOINT, corpus, evaluate
from tokenspeed_engine.demo.attention import Attention, KeyValues, Mode, rope_table
from tokenspeed_engine.demo.config import EOS_ID, SPECIAL_TOKENS, DemoConfig
from tokenspeed_engine.demo.export import checkpoint_tensors, load_checkpoint, read_config, save_checkpoint
from tokenspeed_engine.demo.gdn import UnitLowerInverse, chunk_gated_delta_rule
from tokenspeed_engine.demo.model import DemoModel
from tokenspeed_engine.demo.ngram import NGramEmbedding, hash_multipliers, table_sizes
from tokenspeed_engine.demo.tokenizer import save_tokenizer, train_tokenizer
from tokenspeed_engine.demo.train import Trainer, default_plan

TINY = replace(
    DemoConfig(), vocab_size=300, hidden_size=32, num_hidden_layers=4, indexer_budget=32, ngram_vocab_size_base=50
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_every_phase_lowers_its_loss() -> None:
    stream = torch.arange(6, 70).repeat(20)
    plan = default_plan([60, 10, 10, 40, 10], 1e-2, (64, 96, 96))
    trainer = Trainer(TINY, plan, stream, 192, "cpu")
    seen: dict[str, list[tuple[float, float]]] = {}
    while trainer.phase < len(plan):
        name = plan[trainer.phase].name
        losses = trainer.train_step()
        seen.setdefault(name, []).append((losses.token.item(), losses.indexer.item()))
    assert list(seen) == ["dense", "indexer", "sparse", "draft-dense", "draft-sparse"]
    assert seen["dense"][0][0] == pytest.approx(math.log(300), abs=0.5)
    assert seen["sparse"][-1][0] < 0.5 * seen["dense"][0][0]
    assert seen["sparse"][-1][1] < seen["indexer"][0][1]
    assert seen["draft-sparse"][-1][0] < 0.7 * seen["draft-dense"][0][0]
    agreement = evaluate.draft_agreement(trainer.model, stream[:300], 96)
    assert agreement[0] > 0.2  # one of 64 by chance


def test_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    stream = torch.randint(6, 300, (2000,))
    plan = default_plan([3, 0, 3, 2, 0], 1e-3, (32, 64, 64))
    whole, first = (Trainer(TINY, plan, stream, 128, "cpu") for _ in range(2))
    for _ in range(4):
        first.train_step()
    first.save(tmp_path / "state.pt")
    second = Trainer(TINY, plan, stream, 128, "cpu", seed=0)
    second.load(tmp_path / "state.pt")
    for _ in range(7):
        whole.train_step()
    for _ in range(3):
        second.train_step()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_draft_phase_leaves_the_main_model_alone() -> None:
    trainer = Trainer(TINY, default_plan([0, 0, 1, 2, 0], 1e-2, (32, 64, 64)), torch.randint(6, 300, (999,)), 64, "cpu")
    trainer.train_step()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for _ in range(2):
        trainer.train_step()
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)


def test_export_round_trips(tmp_path: Path) -> None:
    model = DemoModel(TINY)
    save_checkpoint(model, tmp_path)
    assert read_config(tmp_path) == TINY
    tensors, again = checkpoint_tensors(model), checkpoint_tensors(load_checkpoint(tmp_path))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in tensors.items())


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_chunked_delta_rule_equals_the_recurrence(length: int) -> None:
    shape = (2, length, 3)
    q, k, v = (torch.randn(*shape, d, dtype=torch.float64) for d in (8, 8, 16))
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay, beta = -4 * torch.rand(shape, dtype=torch.float64) ** 4, torch.rand(shape, dtype=torch.float64)
    state, rows = torch.zeros(2, 3, 8, 16, dtype=torch.float64), []
    for t in range(length):
        state = state * log_decay[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(2))
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        rows.append((state * q[:, t, :, :, None]).sum(2))
    out = chunk_gated_delta_rule(q, k, v, log_decay, beta)
    torch.testing.assert_close(out, torch.stack(rows, 1), rtol=1e-6, atol=1e-6)


def test_triangular_inverse_and_its_gradient() -> None:
    a = torch.randn(3, 8, 8, dtype=torch.float64).tril(-1).requires_grad_()
    inverse = UnitLowerInverse.apply(a)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(inverse, torch.linalg.inv(torch.eye(8, dtype=torch.float64) + a))
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), a)  # type: ignore[no-untyped-call]


def test_hash_constants_of_the_real_model() -> None:
    real = replace(DemoConfig(), vocab_size=248320, ngram_vocab_size_base=20_000_000, heads_per_ngram=8)
    assert hash_multipliers(real, 0) == [23703573157769, 20109073645365, 8052911324071]
    sizes = table_sizes(real, 0)
    assert sizes[:3] == [20000003, 20000023, 20000033]
    assert sizes[-1] == 20000171
    assert sum(sizes) == 320001446


def test_eos_hides_older_tokens_but_not_itself() -> None:
    embedding = NGramEmbedding(TINY, 0)
    ids = torch.tensor([[7, 8, EOS_ID, 9, 10]])
    rows = embedding(ids)
    assert torch.equal(embedding(torch.tensor([[EOS_ID, 9, 10]]))[0, 1:], rows[0, 3:])
    assert not torch.equal(embedding(torch.tensor([[5, EOS_ID]]))[0, 1], rows[0, 2])


def test_chained_draft_attention_equals_stepping() -> None:
    """Row r of the second pass must attend as decoding would: older rows of the first pass, then its own key."""
    attention, time = Attention(TINY), 12
    first, second = torch.randn(1, time, 32), torch.randn(1, time, 32)
    rope, mode = rope_table(TINY, time, torch.device("cpu")), Mode(sparse=False, train_indexer=False)
    past: KeyValues = attention(first, rope, mode)[2]
    chained = attention(second, rope, mode, (past,))[0]
    for row in (0, 1, time - 1):
        mixed = torch.cat((first[:, :row], second[:, row : row + 1]), 1)
        torch.testing.assert_close(attention(mixed, rope[:, : row + 1], mode)[0][:, -1], chained[:, row])


def test_corpus_and_tokenizer_keep_text_and_hold_files_out(tmp_path: Path) -> None:
    body = "def add(a, b):\n" + "    total = a + b\n" * 7 + "    return total\n"
    for number in range(80):
        (tmp_path / f"module_{number}.py").write_text(body.replace("total", f"total_{number}"))
    (tmp_path / "table.py").write_text("x = [" + "1234567, " * 50 + "]")
    sources = corpus.read_sources(tmp_path)
    assert {source.path for source in sources} == {f"module_{number}.py" for number in range(80)}
    tokenizer = train_tokenizer((source.text for source in sources), 320)
    save_tokenizer(tokenizer, tmp_path, 64)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(6))
    odd = "naïve\t€ \U0001f40d\r\n  x = 12\n\n"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd
    streams = corpus.build(tokenizer, sources)
    held = [source for source in sources if source.held_out]
    assert 0 < len(held) < 20
    assert (streams["held_out"] == EOS_ID).sum() == len(held)
    assert (streams["library"] == EOS_ID).sum() == 80 - len(held)
    assert len(streams["chat"]) > 0


@pytest.fixture(scope="module")
def shipped() -> DemoModel:
    return load_checkpoint(CHECKPOINT).eval()


def test_shipped_size_and_layout() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 10_000_000
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    constants = {name for name, dtype in dtypes.items() if dtype == "I64"}
    assert len(constants) == 3
    assert all(dtype == "BF16" for name, dtype in dtypes.items() if name not in constants)
    prefixes = {name.split(".")[0] for name in dtypes}
    assert prefixes == {"model", "lm_head", "mtp"}
    assert "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight" in dtypes


def test_transformers_computes_the_same_logits(shipped: DemoModel) -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = Path(json.__file__).read_text()
    ids = torch.tensor([[*tokenizer.encode(text).ids[:330], EOS_ID, *tokenizer.encode("import re\n").ids]])
    assert not shipped.config.is_dense(ids.shape[1])
    text_config = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    oracle = Qwen4ExpForCausalLM.from_pretrained(
        CHECKPOINT, config=Qwen4ExpTextConfig(**text_config), dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(shipped(ids), oracle(ids).logits, rtol=0, atol=1e-3)


def test_knows_python(shipped: DemoModel) -> None:
    """Library files that training never saw: a uniform guess over the vocabulary costs about 3.6 bits a byte."""
    files = [corpus.Source(path.name, path.read_text()) for path in sorted(Path(json.__file__).parents[1].glob("*.py"))]
    text = "".join(source.text[:4000] for source in files if source.held_out)
    ids = torch.tensor(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(text).ids)
    loss = evaluate.text_loss(shipped, ids, len(text.encode()) / len(ids), 512, Mode(True, False), limit=4000)
    assert loss["bits_per_byte"] < 1.5

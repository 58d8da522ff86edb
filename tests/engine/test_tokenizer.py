"""Tokenizer, chat templates and stop ids of a model folder, with transformers as the judge."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tokenspeed_engine.chat_template import ChatTemplateError
from tokenspeed_engine.checkpoint.errors import CheckpointError
from tokenspeed_engine.tokenizer import Tokenizer, read_stop_token_ids

CHATML = """\
{%- if not messages %}{{ raise_exception('No messages, "please"') }}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ '<|im_start|>assistant\\n' + message.content + eos_token + '\\n' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

MESSAGES = [
    {"role": "user", "content": "Was heißt 你好? <b>&</b>"},
    {"role": "skip", "content": "unseen"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And 🎉?"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "description": "<size> & 'more'"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a begin token and ChatML's special tokens, saved as transformers does."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the quick brown fox says hello hello hello"], trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="<|im_end|>")
    theirs.chat_template = CHATML
    path = tmp_path_factory.mktemp("tokenizer")
    theirs.save_pretrained(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def in_config(folder: Path, **fields: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


TEXTS = ["hello fox", "", " two  spaces", "héllo 你好 🎉", "<|im_start|>user\nhi<|im_end|>"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_encodes_and_decodes_as_transformers(folder: Path, text: str, special: bool) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load(folder)
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    assert ours.decode(ids, skip_special_tokens=False) == ("<s>" if special else "") + text
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_half_a_character(folder: Path) -> None:
    ours = load(folder)
    ids = ours.encode("🎉", add_special_tokens=False)
    assert len(ids) == 4
    assert ours.decode(ids[:2]).startswith("\N{REPLACEMENT CHARACTER}")
    assert ours.decode(ids) == "🎉"


def test_ids_outside_the_vocabulary_are_left_out(folder: Path) -> None:
    assert load(folder).decode([2, 100_000], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize(
    "variables", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": False}]
)
def test_renders_chats_as_transformers(folder: Path, variables: dict[str, Any]) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **({"add_generation_prompt": True} | variables))
    assert load(folder).render_chat(MESSAGES, **variables) == expected
    assert "unseen" not in expected


def test_tojson_writes_characters_as_they_are(folder: Path) -> None:
    assert '"größe", "description": "<size> & \'more\'"' in load(folder).render_chat(MESSAGES, tools=TOOLS)


def test_template_that_refuses(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match='No messages, "please"'):
        load(folder).render_chat([])


def test_message_that_the_template_cannot_take(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match="chat template: "):
        load(folder).render_chat([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for name in messages.append.__globals__ %}{{ name }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_templates_run_in_a_sandbox(copy: Path, attack: str) -> None:
    (copy / "chat_template.jinja").write_text(attack)
    rendered: str | None
    try:
        rendered = load(copy).render_chat([])
    except ChatTemplateError:
        rendered = None
    assert not rendered


def test_template_in_the_config(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    in_config(
        copy, chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token={"content": "<s>", "lstrip": False}
    )
    assert load(copy).render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_named_templates(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    in_config(copy, chat_template=named)
    assert load(copy).render_chat(MESSAGES) == "plain"
    assert load(copy).render_chat(MESSAGES, tools=TOOLS) == "tools"
    assert load(copy).render_chat(MESSAGES, tools=[]) == "plain"


def test_file_comes_before_config(copy: Path) -> None:
    in_config(copy, chat_template="from the config")
    (copy / "chat_template.jinja").write_text("from the file, in {{ strftime_now('%Y') }}")
    assert load(copy).render_chat(MESSAGES).startswith("from the file, in 2")


def test_without_a_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    tokenizer = load(copy)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("source", [b"{% if %}", b"\xff\xfe"])
def test_template_that_cannot_be_read(copy: Path, source: bytes) -> None:
    (copy / "chat_template.jinja").write_bytes(source)
    with pytest.raises(CheckpointError, match="chat template: "):
        Tokenizer.from_folder(copy)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_malformed_files(copy: Path, file: str) -> None:
    (copy / file).write_text('{"a": ')
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read"):
        Tokenizer.from_folder(copy)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, (7,)),
        ({}, (7,)),
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [3, 5]}, (3, 5)),
        ({"eos_token_id": []}, ()),
    ],
)
def test_stop_token_ids(tmp_path: Path, content: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_stop_token_ids(tmp_path, (7,)) == expected


@pytest.mark.parametrize("stop", ["3", [3, None], [-1], True])
def test_bad_stop_token_ids(tmp_path: Path, stop: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id: expected token ids"):
        read_stop_token_ids(tmp_path, (7,))

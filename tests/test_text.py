"""Laws of text: encoding and decoding are exact, in pieces too, and chats follow the template."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import text_cases
import torch
from cli_fixtures import call, here, succeed
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig

from lightning_specdec import RNN, ModelDrafter, SpeculativeDecoder
from lightning_specdec.text import chat_template
from lightning_specdec.text.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer

__all__ = ["here"]
HELLO = [{"role": "user", "content": "the oak"}]
TEXTS = [
    *text_cases.SAMPLES,
    "\x00\x7f\u0080\uffff\U0010ffff",
    "a\r\nb",
    "".join(map(chr, range(0, 3000, 7))),
]
of_every_kind = pytest.mark.parametrize("kind", text_cases.TOKENIZERS)


def shared(kind: str) -> TextTokenizer:
    return TextTokenizer(text_cases.tokenizer(kind))


def cut(tokens: list[int], generator: random.Random) -> Iterator[list[int]]:
    """The tokens in chunks of random sizes, some of them empty."""
    start = 0
    while start < len(tokens):
        size = generator.choice([0, 1, 1, 2, 3, 9])
        yield tokens[start : start + size]
        start += size


def check_stream(tokenizer: Tokenizer, tokens: list[int], generator: random.Random) -> None:
    """Check that chunks of any size give the whole text."""
    stream = tokenizer.stream()
    pieces = [stream.push(chunk) for chunk in cut(tokens, generator)]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(tokens), tokens


def single_byte_tokens(kind: str) -> dict[int, int]:
    """The token of each byte."""
    if kind != "byte_level":
        ids = text_cases.tokenizer(kind).get_vocab()
        return {byte: ids[f"<0x{byte:02X}>"] for byte in range(256)}
    tokens = {}
    for token, piece in enumerate(shared(kind).vocabulary.token_bytes):
        if piece is not None and len(piece) == 1:
            tokens[piece[0]] = token
    return tokens


@of_every_kind
def test_the_pieces_of_a_text_add_up_to_the_whole_decode(kind: str) -> None:
    """Random tokens, and tokens of single bytes with complete, cut and missing characters."""
    generator = random.Random(1)
    tokenizer = shared(kind)
    num_ids = len(tokenizer.vocabulary)
    byte_tokens = single_byte_tokens(kind)
    assert len(byte_tokens) == 256
    for _ in range(600):
        # Some of these ids are outside the vocabulary.
        num_tokens = generator.randint(0, 12)
        random_tokens = [generator.randrange(num_ids + 3) for _ in range(num_tokens)]
        check_stream(tokenizer, random_tokens, generator)

        characters = generator.choices("aé日🌩 ", k=generator.randint(1, 5))
        broken_tokens = []
        for byte in "".join(characters).encode():
            if generator.random() < 0.9:
                broken_tokens.append(byte_tokens[byte])
        for _ in range(generator.choice([0, 0, 1, 2])):
            inserted = generator.choice([byte_tokens[0xE2], generator.randrange(num_ids)])
            broken_tokens.insert(generator.randint(0, len(broken_tokens)), inserted)
        check_stream(tokenizer, broken_tokens, generator)


# Tokenizers with byte tokens change some control characters.
READ_BACK = [(kind, text) for kind in ("bytes", "byte_level") for text in TEXTS] + [
    (kind, text) for kind in ("sentencepiece", "gemma") for text in text_cases.SAMPLES
]


@pytest.mark.parametrize(("kind", "text"), READ_BACK)
def test_any_text_comes_back_and_streams_without_half_a_character(kind: str, text: str) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else shared(kind)
    tokens = tokenizer.encode(text)
    stream = tokenizer.stream()
    shown = ""
    for token in tokens:
        shown += stream.push([token])
        assert text.startswith(shown)
    assert shown + stream.finish() == tokenizer.decode(tokens) == text


@of_every_kind
def test_what_is_held_is_shown_later_and_what_is_dropped_never(kind: str) -> None:
    generator = random.Random(3)
    tokenizer = shared(kind)
    for sample in text_cases.TEXT:
        text = sample.strip()
        tokens = tokenizer.encode(text)
        num_bytes = len(text.encode())
        for drop in (0, 1, 2, 5, num_bytes, num_bytes + 9):
            stream = tokenizer.stream()
            shown = ""
            for chunk in cut(tokens, generator):
                shown += stream.push(chunk, hold=max(drop, generator.randint(0, 6)))
            shown += stream.finish(drop=drop)
            num_shown = max(num_bytes - drop, 0)
            assert shown == text.encode()[:num_shown].decode(errors="replace")


def test_bytes_are_tokens_and_nothing_is_special() -> None:
    tokenizer = ByteTokenizer()
    check_stream(tokenizer, [*range(256), *range(256)], random.Random(0))
    assert tokenizer.decode([104, 105, 300]) == "hi", (
        "a model may have more outputs than there are bytes"
    )
    assert tokenizer.encode("a\ud800b") == [97, 63, 98]
    assert not tokenizer.eos and tokenizer.start is None and not tokenizer.has_chat_template
    assert not tokenizer.vocabulary.special_texts and len(tokenizer.vocabulary) == 256
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat(HELLO)


@pytest.fixture
def text_ckpt(tmp_path: Path, here: object) -> str:
    """A tiny untrained pair whose tokens are bytes."""
    torch.manual_seed(0)
    target = RNN(256, embedding_size=8, hidden_size=16)
    draft = RNN(256, embedding_size=8, hidden_size=8)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), prompts=[list("def café(".encode())])
    decoder.read_text(ByteTokenizer())
    decoder.save(tmp_path / "text.ckpt")
    return str(tmp_path / "text.ckpt")


def test_a_checkpoint_of_text_takes_and_gives_text(text_ckpt: str, tmp_path: Path) -> None:
    decoder = SpeculativeDecoder.from_checkpoint(text_ckpt)
    assert isinstance(decoder.tokenizer, ByteTokenizer)
    whole = decoder.decode_standard("def main(", max_new_tokens=30, temperature=1.0)
    printable = [token for token in whole.tokens[0] if 32 < token < 127]
    stop_index = whole.tokens[0].index(printable[0])
    stop = chr(printable[0])
    row = decoder.decode("def main(", max_new_tokens=30, stop=stop, temperature=1.0).rows[0]
    assert row.prompt == list(b"def main(")
    assert row.stop_reason == "stop" and row.tokens == whole.tokens[0][: stop_index + 1]
    assert row.text == bytes(row.tokens[:-1]).decode("utf-8", "replace")
    options = ["--max_new_tokens", "6", "--repeats", "0"]
    shown = succeed("decode", "--ckpt", text_ckpt, "--prompt", "def main(", *options).out
    assert "def main(" in shown
    assert "def café(" in succeed("decode", "--ckpt", text_ckpt, *options).out
    exported = str(tmp_path / "exported.ckpt")
    succeed("export", "--ckpt", text_ckpt, "--output", exported)
    assert "bytes" in succeed("info", "--ckpt", exported).out
    assert call("decode", "--ckpt", exported, "--prompt", "def main(", *options).out == shown


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_chat_has_the_tokens_that_the_template_gives(kind: str) -> None:
    tokenizer = shared(kind)
    messages = [
        *HELLO,
        {"role": "assistant", "content": " fell"},
        {"role": "user", "content": "é 🌩\n"},
    ]
    expected = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == expected["input_ids"]
    assert tokenizer.render_chat(messages).endswith("<s>user\né 🌩\n</s>\n<s>assistant\n")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a tokenizer."""
    text_cases.tokenizer("sentencepiece").save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_the_tokenizer_with_all_that_ends_an_answer(saved: Path) -> None:
    GenerationConfig(eos_token_id=[2, 5]).save_pretrained(saved)
    loaded = TextTokenizer.load(saved)
    original = shared("sentencepiece")
    assert loaded.eos == {2, 5} and loaded.has_chat_template
    assert loaded.encode(text_cases.TEXT[2]) == original.encode(text_cases.TEXT[2])
    assert loaded.encode_chat(HELLO) == original.encode_chat(HELLO)
    assert loaded.vocabulary == original.vocabulary


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "added'),
        ("tokenizer_config.json", "{"),
        ("tokenizer.json", None),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_one_line(
    saved: Path,
    file: str,
    content: str | None,
) -> None:
    if content is None:
        (saved / file).unlink()
        expected = "has no tokenizer"
    else:
        (saved / file).write_text(content)
        expected = "cannot be read"
    with pytest.raises(ValueError, match=expected) as error:
        TextTokenizer.load(saved)
    message = str(error.value)
    assert str(saved) in message and "\n" not in message and len(message) < 400


ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}"
)
SHARED_RANGE = (
    "{% set r = range(99999) %}"
    "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}"
)
EXPONENTIAL_CALLS = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
)
DOUBLING = (
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = TWICE %}{% endfor %}"
)
PADDING = [
    "{% set unused = 'x'|center(10**9) %}",
    "{{ 'x'|center(1000000000) }}",
    "{% set unused = '%1000000000d' % 1 %}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ (1).to_bytes(10**9, 'big')|length }}",
    "{{ messages|tojson(indent=10**8) }}",
]
TWICE = ["ns.x + ns.x", "ns.x ~ ns.x", "[ns.x, ns.x]|join", "ns.x.replace('x', 'xx')", "ns.x * 2"]


LIMITS = "does not end within|needs more than 1024 MiB|writes more than|too (big|large|many)"
NESTING = (
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = TWICE %}{% endfor %}"
)
NESTED = ["[ns.x, ns.x]", "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "namespace(a=ns.x, b=ns.x)"]
WRITTEN = ["{{ ns.x }}", "{{ ns.x|string|length }}", "{{ ns.x|pprint }}", "{{ '%s' % [ns.x] }}"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system\n role') }}", "no system role"),
        ("{% if %}", "does not accept this chat"),
        (ENDLESS + "{% endfor %}", "does not end"),
        (SHARED_RANGE, "does not end"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        (EXPONENTIAL_CALLS, "does not end"),
        ("{{ 'x' * 10**10 }}", LIMITS),
        ("{{ 10**10 * [1] }}", LIMITS),
        ("{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}", LIMITS),
        *((DOUBLING.replace("TWICE", twice), LIMITS) for twice in TWICE),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 9 ** (9 ** (9 ** 9)) }}", LIMITS),
        *((padding, LIMITS) for padding in PADDING),
        ("{{ ('x'.encode() * 10**10)|length }}", LIMITS),
        ("{{ lipsum(n=10**6) }}", LIMITS),
        *((NESTING.replace("TWICE", twice) + WRITTEN[0], LIMITS) for twice in NESTED),
        *((NESTING.replace("TWICE", NESTED[0]) + written, LIMITS) for written in WRITTEN),
        (NESTING.replace("TWICE", NESTED[0]) + "{{ ns.x|tojson }}", LIMITS),
        (NESTING.replace("TWICE", NESTED[2]) + "{{ ns.x|tojson }}", LIMITS),
    ],
)
def test_a_template_that_does_not_take_a_chat_says_why_in_one_line_at_once(
    template: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = template
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message) as error:
        TextTokenizer(tokenizer).encode_chat(HELLO)
    assert "\n" not in str(error.value) and time.perf_counter() - started < 5
    # The next chat is rendered again.
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert TextTokenizer(tokenizer).render_chat(HELLO) == HELLO[0]["content"]


RENDERED = {
    "powers": "{{ 2 ** 3 }}",
    "keyword arguments": "{% set x = {'a': 1} %}{{ dict(**x) }} {{ namespace(**x).a }}",
    "loop variables": "{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}",
    "loop lengths": "{% for m in messages %}{{ loop.length }}{{ loop.nextitem }}{% endfor %}",
    "empty loops": "{% for t in [] %}x{% else %}no tools{% endfor %}",
    "undefined loops": "{% for u in unknown %}x{% endfor %}",
    "filters": "{{ messages|map(attribute='content')|join(', ') }}",
    "json": "{{ messages[0]|tojson(indent=1) }}",
    "special tokens": "{{ bos_token ~ eos_token }}",
    "other variables": "{{ add_generation_prompt }}{{ documents is none }}",
    "loop controls": "{% for i in [1, 2] %}{{ i }}{% if i %}{% break %}{% endif %}{% endfor %}",
    "recursion": (
        "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
    ),
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "blocks": "{% set x | upper %}a{% filter trim %} b {% endfilter %}{% endset %}{{ x }}",
    "whitespace": "  {% if true %}\n x\n  {% endif %}\n",
    "time": "{{ strftime_now('%Y') }}",
    "padding": "{{ 'a'.ljust(9) }}{{ 'a'|center(9) }}{{ '%05d %s' % (200000, 'a') }}{{ 9 % 7 }}",
    "JSON by formats": (
        """{{ '{"a": {"b": "%s"}}' % 'c' }}{{ '{}' }}"""
        """{% set form = '{' ~ '{"a": "{}", "b": {' ~ '{"c": 1}' ~ '}}' ~ '}' %}"""
        """{{ form.format('d') }}"""
    ),
    "formats": "{{ '{:>9}'.format('100% {x:500000}') }}{{ '%s: %d'|format('a', 200000) }}",
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = RENDERED[name]
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "it's\n", "tool_calls": None}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TextTokenizer(tokenizer).render_chat(messages) == expected


def test_variables_reach_the_chat_template() -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    arguments = {"enable_thinking": True}
    text = TextTokenizer(tokenizer).render_chat(HELLO, chat_template_kwargs=arguments)
    assert text == "the oak<think>"
    tokens = TextTokenizer(tokenizer).encode_chat(HELLO, chat_template_kwargs=arguments)
    assert tokens == TextTokenizer(tokenizer).encode_rendered("the oak<think>")
    assert TextTokenizer(tokenizer).render_chat(HELLO) == "the oak"


def test_of_several_chat_templates_the_default_one_is_used_or_the_one_for_tools() -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = {"default": text_cases.CHATML, "tool_use": "{{ tools|length }} tools"}
    several = TextTokenizer(tokenizer)
    assert several.has_chat_template
    assert several.encode_chat(HELLO) == shared("byte_level").encode_chat(HELLO)
    assert several.render_chat(HELLO, chat_template_kwargs={"tools": [{}, {}]}) == "2 tools"

    tokenizer.chat_template = {"tool_use": text_cases.CHATML}
    with pytest.raises(ValueError, match="multiple chat templates with no default"):
        several.encode_chat(HELLO)


@of_every_kind
def test_half_a_surrogate_is_replaced_wherever_text_is_encoded(kind: str) -> None:
    tokenizer = shared(kind)
    broken = "the \ud83d oak"
    assert tokenizer.encode(broken) == tokenizer.encode("the ? oak")
    assert tokenizer.encode_plain(broken) == tokenizer.encode_plain("the ? oak")
    chats = [[{"role": "user", "content": text}] for text in (broken, "the ? oak")]
    assert tokenizer.encode_chat(chats[0]) == tokenizer.encode_chat(chats[1])


EOS_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "a list in config.json": ({"eos_token_id": [2, 5]}, None),
    "one in config.json": ({"eos_token_id": 5}, None),
    "none at all": ({"eos_token_id": None}, None),
    "in generation_config.json": ({"eos_token_id": 7}, {"eos_token_id": [5, 6]}),
    "not in generation_config.json": ({"eos_token_id": 5}, {"do_sample": True}),
}


@pytest.mark.parametrize("name", EOS_CONFIGS)
def test_an_answer_ends_at_the_eos_tokens_that_transformers_uses(saved: Path, name: str) -> None:
    config, generation_config = EOS_CONFIGS[name]
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=500, intermediate_size=8, **sizes, **config).save_pretrained(saved)
    if generation_config is not None:
        (saved / "generation_config.json").write_text(json.dumps(generation_config))
    model_config = AutoConfig.from_pretrained(saved)
    model = AutoModelForCausalLM.from_config(model_config)
    if generation_config is not None:
        model.generation_config = GenerationConfig.from_pretrained(saved)
    expected = TextTokenizer(
        text_cases.tokenizer("sentencepiece"), generation_config=model.generation_config
    )
    assert TextTokenizer.load(saved).eos == expected.eos
    tokenizer_eos = {text_cases.tokenizer("sentencepiece").eos_token_id}
    eos_lists = {
        "a list in config.json": {2, 5},
        "one in config.json": {5},
        "in generation_config.json": {5, 6},
    }
    assert expected.eos == tokenizer_eos | eos_lists.get(name, set())


def test_eos_tokens_of_a_nested_text_config_count(saved: Path) -> None:
    """As in models of text and pictures, whose text_config has them."""
    text_config = {"model_type": "gemma3_text", "vocab_size": 500, "eos_token_id": [4, 6]}
    config = {"model_type": "gemma3", "text_config": text_config}
    (saved / "config.json").write_text(json.dumps(config))
    outer = GenerationConfig.from_model_config(AutoConfig.from_pretrained(saved)).eos_token_id
    assert TextTokenizer.load(saved).eos == {2, *([outer] if isinstance(outer, int) else outer)}


def test_a_tokenizer_of_a_model_that_transformers_does_not_know_is_loaded(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "a_model_of_tomorrow", "eos_token_id": 5}')
    assert TextTokenizer.load(saved).eos == {2}

"""Laws of tokenizers: what goes in comes out, chats are rendered by the model's template, EOS is a set of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import text_cases
from transformers import GenerationConfig

from lightning_specdec.text.tokenizer import TextTokenizer

REAL = Path(__file__).parent.parent / "checkpoints" / "smollm2"
HELLO = [{"role": "user", "content": "the oak"}]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a tokenizer."""
    text_cases.tokenizer("sentencepiece").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_text_is_decoded_as_it_was_encoded(kind: str) -> None:
    tokenizer = TextTokenizer(text_cases.tokenizer(kind))
    for text in text_cases.SAMPLES:
        if kind != "metaspace" or not text.startswith(" "):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_comes_where_the_tokenizer_adds_it_and_once_in_a_chat() -> None:
    with_bos, without = (TextTokenizer(text_cases.tokenizer(kind)) for kind in ("sentencepiece", "byte_level"))
    bos = with_bos.tokenizer.bos_token_id
    assert with_bos.encode("the oak")[0] == bos and bos not in without.encode("the oak")
    assert with_bos.encode_chat(HELLO).count(bos) == 2  # one a turn, as the template writes them
    assert with_bos.decode(with_bos.encode_chat(HELLO), show_special=True).startswith("<s>")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_chat_has_the_tokens_that_the_template_gives(kind: str) -> None:
    tokenizer = TextTokenizer(text_cases.tokenizer(kind))
    messages = [*HELLO, {"role": "assistant", "content": " fell"}, {"role": "user", "content": "é 🌩\n"}]
    expected = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(messages) == expected
    assert tokenizer.render_chat(messages).endswith("<s>user\né 🌩\n</s>\n<s>assistant\n")


def test_eos_is_what_tokenizer_and_model_name_and_pad_is_no_part_of_it() -> None:
    tokenizer = text_cases.byte_level()
    assert TextTokenizer(tokenizer).eos == {2}
    assert TextTokenizer(tokenizer, generation_config=GenerationConfig(eos_token_id=7)).eos == {2, 7}
    assert TextTokenizer(tokenizer, generation_config=GenerationConfig(eos_token_id=[7, 9])).eos == {2, 7, 9}
    tokenizer.eos_token = None
    assert tokenizer.pad_token_id == 2 and TextTokenizer(tokenizer).eos == set()
    assert TextTokenizer(tokenizer).decode([2], show_special=True) == "</s>"


def test_a_directory_gives_the_tokenizer_with_all_that_ends_an_answer(saved: Path) -> None:
    GenerationConfig(eos_token_id=[2, 5]).save_pretrained(saved)
    loaded, own = TextTokenizer.load(saved), TextTokenizer(text_cases.tokenizer("sentencepiece"))
    assert loaded.eos == {2, 5} and loaded.has_chat_template
    assert loaded.encode(text_cases.TEXT[2]) == own.encode(text_cases.TEXT[2])
    assert loaded.encode_chat(HELLO) == own.encode_chat(HELLO)
    assert loaded.vocabulary == own.vocabulary


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="holds no tokenizer") as error:
        TextTokenizer.load(tmp_path)
    assert str(tmp_path) in one_line(error)
    with pytest.raises(ValueError, match="there is no such directory"):
        TextTokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "added'),
        ("tokenizer.json", '{"no": "tokenizer"}'),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", "{"),
        ("generation_config.json", "{"),
        ("tokenizer.json", json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": 3}})),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_one_line(saved: Path, file: str, content: str) -> None:
    (saved / file).write_text(content)
    with pytest.raises(ValueError, match="cannot be read") as error:
        TextTokenizer.load(saved)
    assert str(saved) in one_line(error)


def test_a_chat_without_a_template_is_refused_in_one_line() -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = None
    wrapped = TextTokenizer(tokenizer)
    assert not wrapped.has_chat_template
    with pytest.raises(ValueError, match="no chat template") as error:
        wrapped.encode_chat(HELLO)
    one_line(error)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system\n role') }}", "{{ nothing.at.all }}", "{% if %}"])
def test_a_template_that_does_not_take_a_chat_says_why_in_one_line(template: str) -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template does not take") as error:
        TextTokenizer(tokenizer).encode_chat(HELLO)
    one_line(error)


@pytest.mark.real
@pytest.mark.skipif(not REAL.is_dir(), reason="checkpoints/smollm2 is absent: make smollm2")
def test_smollm2_encodes_and_ends_as_transformers_does() -> None:
    tokenizer = TextTokenizer.load(REAL)
    own: Any = tokenizer.tokenizer
    assert tokenizer.eos == {2} and own.pad_token_id == 2
    assert tokenizer.encode_chat(HELLO) == own.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    for text in text_cases.SAMPLES:
        tokens, stream = tokenizer.encode(text), tokenizer.stream()
        assert "".join([*(stream.push([token]) for token in tokens), stream.finish()]) == text

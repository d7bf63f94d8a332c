"""Laws of prompt sources: every prompt is what it says it is, the same each time, and faults are one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers
from generated import corpus, generate, target
from tiny_models import CHAT

from lightning_specdec.data import OpeningTurns, PromptFiles, PromptSource
from lightning_specdec.data.corpus import open_corpus
from lightning_specdec.text.tokenizer import TextTokenizer

__all__ = ["corpus", "target"]
PLAIN = TextTokenizer(tiny_tokenizers.byte_level())
TALKING = TextTokenizer(tiny_tokenizers.byte_level(chat_template=CHAT))


def texts(source: PromptSource, tokenizer: TextTokenizer = TALKING) -> list[str]:
    assert source.prompts(tokenizer) == (prompts := source.prompts(tokenizer)), (
        "the same at every call"
    )
    return [tokenizer.decode(prompt) for prompt in prompts]


def turn(text: str, system: str | None = None) -> str:
    return (f"<system> {system}\n" if system else "") + f"<user> {text}\n<assistant>"


def test_lines_of_files_are_users_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\none\n" + "long " * 300, encoding="utf-8-sig")
    lines = [
        {"prompt": "three"},
        {"turns": ["four", "and then"]},
        "five",
        {"question": "no", "prompt": "six"},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    everything = ["one", "two", "three", "four", "five", "six"]
    assert texts(PromptFiles(str(tmp_path / "*"))) == [turn(text) for text in everything]
    assert "6 of 8 are different ones of at most 512 tokens" in capsys.readouterr().err
    assert texts(PromptFiles(str(tmp_path), num_prompts=2, system="Be brief")) == [
        turn(text, "Be brief") for text in everything[:2]
    ]
    assert texts(PromptFiles(str(tmp_path), chat=False), PLAIN) == everything


def test_an_opening_turn_ends_where_the_users_words_begin() -> None:
    assert texts(OpeningTurns(3)) == ["<user> "] * 3
    assert texts(OpeningTurns(3, beginnings=["Add:", ""])) == [
        "<user> Add:",
        "<user> ",
        "<user> Add:",
    ]


def test_written_turns_become_prompts_once_they_ended(target: str, corpus: Path) -> None:
    tokenizer = TextTokenizer.load(target)
    ended: dict[str, None] = {}
    unfinished = 0
    for shard in open_corpus(corpus)[1]:
        for number, length in enumerate(shard.prompt_lengths.tolist()):
            new = shard.row(number).tolist()[length:]
            if new[-1] not in tokenizer.eos:
                unfinished += 1
            elif text := tokenizer.decode(new).strip():
                ended[turn(text)] = None
    assert unfinished and len(ended) > 5, "a case that tells something"
    assert texts(PromptFiles(str(corpus)), tokenizer) == list(ended)
    with pytest.raises(ValueError, match="is text of another tokenizer"):
        PromptFiles(str(corpus)).prompts(
            TextTokenizer(tiny_tokenizers.byte_level(vocab_size=300, chat_template=CHAT))
        )


def test_a_turn_that_was_begun_is_asked_with_its_beginning(target: str, tmp_path: Path) -> None:
    tokenizer, begun = TextTokenizer.load(target), ["Add:", "Say"]
    turns = generate(
        target, tmp_path / "turns", OpeningTurns(16, beginnings=begun), temperatures=[1.0]
    )
    asked = texts(PromptFiles(str(turns)), tokenizer)
    assert {
        next(words for words in begun if text.startswith(f"<user> {words}")) for text in asked
    } == set(begun)


FAULTS: dict[str, tuple[Callable[[Path], PromptSource], TextTokenizer, str]] = {
    "no file": (
        lambda path: PromptFiles(str(path / "nowhere.txt")),
        TALKING,
        "nowhere.txt does not exist",
    ),
    "no json": (
        lambda path: PromptFiles(str(path / "bad.jsonl")),
        TALKING,
        r"bad.jsonl, line 2: this is not JSON",
    ),
    "no template": (
        lambda path: PromptFiles(str(path / "a.txt")),
        PLAIN,
        "no chat template: set data.chat to false",
    ),
    "no opening": (lambda path: OpeningTurns(2), PLAIN, "no chat template"),
    "all too long": (
        lambda path: PromptFiles(str(path / "a.txt"), max_prompt_tokens=3),
        TALKING,
        "there is no prompt",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"prompt": \n')
    make, tokenizer, told = FAULTS[name]
    with pytest.raises((ValueError, FileNotFoundError), match=told) as caught:
        make(tmp_path).prompts(tokenizer)
    assert "\n" not in str(caught.value)

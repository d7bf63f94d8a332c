"""Laws of prompt sources: every prompt is what it says it is, the same each time, and faults are one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from generated import PROMPTS, corpus, generate, prompt_file, target
from tiny_models import CHAT

from lightning_specdec.data import GeneratedPrompts, OpeningTurns, Passages, PromptFiles, PromptMix, PromptSource
from lightning_specdec.data.corpus import open_corpus, read_manifest, write_manifest
from lightning_specdec.data.prompt_sources import TEMPLATES
from lightning_specdec.text.tokenizer import TextTokenizer

__all__ = ["corpus", "target"]
PLAIN = TextTokenizer(tiny_tokenizers.byte_level())
TALKING = TextTokenizer(tiny_tokenizers.byte_level(chat_template=CHAT))


def texts(source: PromptSource, tokenizer: TextTokenizer = TALKING) -> list[str]:
    assert source.prompts(tokenizer) == (prompts := source.prompts(tokenizer)), "the same at every call"
    return [tokenizer.decode(prompt) for prompt in prompts]


def turn(text: str, system: str | None = None) -> str:
    return (f"<system> {system}\n" if system else "") + f"<user> {text}\n<assistant>"


def test_lines_of_files_are_users_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\none\n" + "long " * 300, encoding="utf-8-sig")
    lines = [{"prompt": "three"}, {"turns": ["four", "and then"]}, "five", {"question": "no", "prompt": "six"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    everything = ["one", "two", "three", "four", "five", "six"]
    assert texts(PromptFiles(str(tmp_path / "*"))) == [turn(text) for text in everything]
    assert "(left out: 1 repeated, 1 over max_prompt_tokens)" in capsys.readouterr().err
    assert texts(PromptFiles(str(tmp_path), num_prompts=2, system="Be brief")) == [
        turn(text, "Be brief") for text in everything[:2]
    ]
    assert texts(PromptFiles(str(tmp_path), chat=False), PLAIN) == everything
    (tmp_path / "b.jsonl").write_text('{"question": "why"}\n')
    assert texts(PromptFiles(str(tmp_path / "b.jsonl"), field="question")) == [turn("why")]


def test_passages_are_whole_lines_of_the_files_in_every_template(tmp_path: Path) -> None:
    corpus = [f"line {number} of the file: {'x' * (number % 9)}\n" for number in range(200)]
    (tmp_path / "a.txt").write_text("".join(corpus))
    source = Passages(str(tmp_path), templates=["A {passage}", "{passage} {B}"], num_prompts=20, length=120, chat=False)
    found = texts(source, PLAIN)
    assert [text.startswith("A ") for text in found] == [True, False] * 10 and found[1].endswith(" {B}")
    bare = [text.removeprefix("A ").removesuffix(" {B}") for text in found]
    assert all(60 <= len(text) <= 120 and set(text.splitlines(keepends=True)[:-1]) <= set(corpus) for text in bare)
    assert len(set(bare)) == 20 and bare != sorted(bare)
    other = Passages(str(tmp_path), templates=source.templates, num_prompts=20, length=120, chat=False, seed=1)
    assert texts(other, PLAIN)[0] != found[0]


def test_without_files_the_passages_are_the_standard_librarys() -> None:
    found = texts(Passages(num_prompts=4, max_prompt_tokens=4096))
    asked = [template.partition("{passage}")[0] for template in TEMPLATES[:4]]
    assert [text.startswith(f"<user> {question}") for text, question in zip(found, asked, strict=True)] == [True] * 4


def test_an_opening_turn_ends_where_the_users_words_begin() -> None:
    assert texts(OpeningTurns(3)) == ["<user> "] * 3
    assert texts(OpeningTurns(1, system="Be brief")) == ["<system> Be brief\n<user> "]
    assert texts(OpeningTurns(3, beginnings=["Add:", ""])) == ["<user> Add:", "<user> ", "<user> Add:"]


def test_generated_turns_become_prompts_once_they_ended(target: str, corpus: Path) -> None:
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
    assert texts(GeneratedPrompts(str(corpus)), tokenizer) == list(ended)


def test_a_mix_has_all_of_its_sources(tmp_path: Path) -> None:
    first, second = PromptFiles(prompt_file(tmp_path)), OpeningTurns(2)
    mix = PromptMix([first, second])
    assert texts(mix) == [turn(prompt) for prompt in PROMPTS] + ["<user> "] * 2
    assert json.loads(json.dumps(mix.arguments()))["sources"][1] == {
        "class": "OpeningTurns",
        "num_prompts": 2,
        "system": None,
        "beginnings": [""],
    }


FAULTS: dict[str, tuple[Callable[[Path], PromptSource], TextTokenizer, str]] = {
    "no file": (lambda path: PromptFiles(str(path / "nowhere.txt")), TALKING, "nowhere.txt does not exist"),
    "no json": (lambda path: PromptFiles(str(path / "bad.jsonl")), TALKING, r"bad.jsonl, line 2: this is no JSON"),
    "no field": (
        lambda path: PromptFiles(str(path / "field.jsonl")),
        TALKING,
        "field.jsonl, line 1: a row needs a prompt",
    ),
    "no template": (lambda path: PromptFiles(str(path / "a.txt")), PLAIN, "no chat template: set data.chat to false"),
    "no opening": (lambda path: OpeningTurns(2), PLAIN, "no chat template that opens"),
    "a space behind": (lambda path: OpeningTurns(2, beginnings=["Add: "]), TALKING, "none that ends with a space"),
    "all too long": (
        lambda path: PromptFiles(str(path / "a.txt"), max_prompt_tokens=3),
        TALKING,
        "gives no prompt .1 over max_prompt_tokens.",
    ),
    "too few": (lambda path: Passages(str(path / "a.txt")), TALKING, "has 0 passages of up to 600 characters"),
    "no passage": (lambda path: Passages(templates=["Explain"]), TALKING, "{passage} in them"),
    "no sources": (lambda path: PromptMix([]), TALKING, "sources is an empty list"),
    "no corpus": (lambda path: GeneratedPrompts(str(path)), TALKING, "holds no generated text"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"prompt": \n')
    (tmp_path / "field.jsonl").write_text('{"text": "hello"}\n')
    make, tokenizer, told = FAULTS[name]
    with pytest.raises((ValueError, FileNotFoundError), match=told) as caught:
        make(tmp_path).prompts(tokenizer)
    assert "\n" not in str(caught.value)


def test_turns_of_another_tokenizer_or_of_half_a_run_are_refused(target: str, corpus: Path, tmp_path: Path) -> None:
    source: Any = GeneratedPrompts(str(corpus))
    with pytest.raises(ValueError, match="is text of another tokenizer"):
        source.prompts(TextTokenizer(tiny_tokenizers.byte_level(vocab_size=300)))
    half = tmp_path / "half"
    shutil.copytree(corpus, half)
    (half / "shard-00002.safetensors").unlink()
    write_manifest(half, read_manifest(half) | {"totals": None})
    with pytest.raises(FileNotFoundError, match="shard-00002.safetensors is missing: run `lightning_specdec generate`"):
        GeneratedPrompts(str(half)).prompts(TextTokenizer.load(target))


def test_a_turn_that_was_begun_is_asked_with_its_beginning(target: str, tmp_path: Path) -> None:
    tokenizer, begun = TextTokenizer.load(target), ["Add:", "Say"]
    turns = generate(target, tmp_path / "turns", OpeningTurns(16, beginnings=begun), temperatures=[1.0])
    asked = texts(GeneratedPrompts(str(turns)), tokenizer)
    starts = [next(words for words in begun if text.startswith(f"<user> {words}")) for text in asked]
    assert set(starts) == set(begun)
    answers = generate(target, tmp_path / "answers", GeneratedPrompts(str(turns)))
    assert read_manifest(answers)["num_prompts"] == len(asked) > 1
    mix = PromptMix([OpeningTurns(2), OpeningTurns(2, beginnings=begun)])
    mixed = generate(target, tmp_path / "mixed", mix, temperatures=[1.0])
    with pytest.raises(ValueError, match="mixed mixes turns with beginnings"):
        GeneratedPrompts(str(mixed)).prompts(tokenizer)

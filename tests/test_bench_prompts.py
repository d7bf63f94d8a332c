"""Prompts by domain: those that ship, those of files, those that a target can read, and refusals in
one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level

from lightning_specdec.data.prompts import Prompt, by_domain, read_prompts, shipped_prompts
from lightning_specdec.text.prompts import INSTRUCTION, MAX_ARTICLE_TOKENS
from lightning_specdec.text.tokenizer import ByteTokenizer, TextTokenizer

BYTES = ByteTokenizer()


def write_lines(path: Path, *records: Any) -> Path:
    """Write a file of JSON lines; strings are written unchanged."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_articles_are_cut_to_512_tokens_and_the_instruction_stays() -> None:
    tokenizer = TextTokenizer(byte_level())
    article = "the cat sat on the café 🙂 " * 200
    prompt = Prompt("x", "summarization", text=article, instruction=INSTRUCTION)
    text = tokenizer.decode(prompt.encoded(tokenizer).tokens)
    assert text.endswith(INSTRUCTION)

    cut_article = text.removesuffix(INSTRUCTION)
    assert article.startswith(cut_article)
    num_tokens = len(tokenizer.encode_plain(cut_article))
    assert MAX_ARTICLE_TOKENS - 4 <= num_tokens <= MAX_ARTICLE_TOKENS


def test_a_short_article_is_not_cut() -> None:
    tokenizer = TextTokenizer(byte_level())
    prompt = Prompt("x", "summarization", text="Short.", instruction=INSTRUCTION)
    assert tokenizer.decode(prompt.encoded(tokenizer).tokens) == "Short." + INSTRUCTION


@pytest.fixture
def mixed_prompts(tmp_path: Path) -> list[Prompt]:
    """Domain a is of text, b of tokens."""
    records = [
        {"domain": "a", "prompt": "x"},
        {"domain": "b", "tokens": [1, 2]},
        {"domain": "a", "prompt": "y"},
    ]
    return list(read_prompts(write_lines(tmp_path / "mixed.jsonl", *records)))


def test_each_target_receives_the_domains_that_it_can_read(mixed_prompts: list[Prompt]) -> None:
    (text_domain,) = by_domain(mixed_prompts, BYTES).items()
    domain, prompts = text_domain
    assert domain == "a"
    assert [prompt.tokens for prompt in prompts] == [(120,), (121,)]

    integers = {"b": [Prompt("mixed-2", "b", (1, 2))]}
    assert by_domain(mixed_prompts, None) == integers
    assert by_domain(mixed_prompts, BYTES, ["b"]) == integers, (
        "whoever names a domain knows whose tokens it has"
    )


def test_domains_that_a_target_cannot_read_are_refused(mixed_prompts: list[Prompt]) -> None:
    text_prompt = mixed_prompts[0]
    with pytest.raises(ValueError, match="cannot read the prompts of a"):
        by_domain([text_prompt], None)
    with pytest.raises(ValueError, match="cannot read the prompts of b"):
        by_domain(mixed_prompts, BYTES, ["a", "b"])
    with pytest.raises(ValueError, match="a different one"):
        by_domain([text_prompt, text_prompt], BYTES)


def test_unknown_domains_are_refused(mixed_prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match="'odes' is no domain"):
        by_domain(mixed_prompts, BYTES, ["odes"])
    with pytest.raises(ValueError, match="'odes' is no domain of the prompts that ship"):
        shipped_prompts(["odes"])


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    question = {"question_id": 161, "category": "rag", "turns": ["Look up.", "So?"]}
    questions_path = write_lines(tmp_path / "question.jsonl", question)
    nulls = {"id": None, "domain": None, "tokens": None, "article": None, "prompt": "Hello \ud800"}
    article = {"id": "x", "domain": "news", "article": "A."}
    mixed_path = write_lines(tmp_path / "mine.jsonl", nulls, "", article, {"tokens": [1]})
    text_path = tmp_path / "plain.txt"
    text_path.write_text("one\n\ntwo\n")

    prompts: list[Prompt] = []
    for path in (questions_path, mixed_path, text_path):
        prompts += read_prompts(path)
    assert [(prompt.id, prompt.domain, prompt.text) for prompt in prompts] == [
        ("question-161", "rag", "Look up."),
        ("mine-1", "mine", "Hello ?"),
        ("x", "news", "A."),
        ("mine-4", "mine", None),
        ("plain-1", "plain", "one"),
        ("plain-3", "plain", "two"),
    ]


BAD_FILES: dict[str, tuple[str | None, str]] = {
    "gone": (None, "there is no prompts file"),
    "empty": ("\n", "holds no prompt"),
    "a bad line": ('{"prompt": "x"}\n{no', "line 2: this is not JSON"),
    "no prompt in it": ('{"question": "x"}', "needs a prompt.*this one has question"),
    "bad tokens": ('{"tokens": [1, -2]}', '"tokens" must be'),
    "an id of two lines": ('{"id": "a\\nb", "prompt": "x"}', '"id" must be a name'),
}
"""Content and error message."""


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_holds_no_prompts_is_one_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_prompts(path)
    assert "\n" not in str(raised.value)

"""Prompts by domain: what ships, what is read, what a target takes of it, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level

from lightning_specdec.data.prompts import Prompt, by_domain, read_prompts, shipped_prompts
from lightning_specdec.text.prompts import INSTRUCTION, MAX_ARTICLE_TOKENS
from lightning_specdec.text.tokenizer import ByteTokenizer, TextTokenizer

ROOT = Path(__file__).parent.parent
BYTES = ByteTokenizer()


def lines(path: Path, *rows: Any) -> Path:
    """A file of JSON lines; what is a string already stays as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_articles_are_cut_to_512_tokens_and_the_instruction_stays() -> None:
    tokenizer = TextTokenizer(byte_level())
    long = Prompt(
        "x", "summarization", text="the cat sat on the café 🙂 " * 200, instruction=INSTRUCTION
    )
    text = tokenizer.decode(long.encoded(tokenizer).tokens)
    kept = text.removesuffix(INSTRUCTION)
    assert text.endswith(INSTRUCTION) and long.text is not None and long.text.startswith(kept)
    assert MAX_ARTICLE_TOKENS - 4 <= len(tokenizer.encode_plain(kept)) <= MAX_ARTICLE_TOKENS
    short = Prompt("x", "summarization", text="Short.", instruction=INSTRUCTION).encoded(tokenizer)
    assert tokenizer.decode(short.tokens) == "Short." + INSTRUCTION


def test_each_target_takes_the_domains_that_it_can_read(tmp_path: Path) -> None:
    rows = [
        {"domain": "a", "prompt": "x"},
        {"domain": "b", "tokens": [1, 2]},
        {"domain": "a", "prompt": "y"},
    ]
    prompts = read_prompts(lines(tmp_path / "mixed.jsonl", *rows))
    assert {
        domain: [each.tokens for each in several]
        for domain, several in by_domain(prompts, BYTES).items()
    } == {"a": [(120,), (121,)]}
    integers = {"b": [Prompt("mixed-2", "b", (1, 2))]}
    assert by_domain(prompts, None) == integers
    assert by_domain(prompts, BYTES, ["b"]) == integers, "whoever names them knows whose they are"
    refused: list[tuple[list[Prompt], Any, list[str] | None, str]] = [
        (prompts[:1], None, None, "cannot read the prompts of a"),
        (prompts, BYTES, ["a", "b"], "cannot read the prompts of b"),
        (prompts, BYTES, ["odes"], "'odes' is no domain"),
        ([prompts[0], prompts[0]], BYTES, None, "a different one"),
    ]
    for chosen, tokenizer, domains, told in refused:
        with pytest.raises(ValueError, match=told):
            by_domain(chosen, tokenizer, domains)
    with pytest.raises(ValueError, match="'odes' is no domain of the prompts that ship"):
        shipped_prompts(["odes"])


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    questions = lines(
        tmp_path / "question.jsonl",
        {"question_id": 161, "category": "rag", "turns": ["Look up.", "So?"]},
    )
    null = {"id": None, "domain": None, "tokens": None, "article": None, "prompt": "Hello \ud800"}
    mine = lines(
        tmp_path / "mine.jsonl",
        null,
        "",
        {"id": "x", "domain": "news", "article": "A."},
        {"tokens": [1]},
    )
    plain = tmp_path / "plain.txt"
    plain.write_text("one\n\ntwo\n")
    found = [prompt for path in (questions, mine, plain) for prompt in read_prompts(path)]
    assert [(prompt.id, prompt.domain, prompt.text) for prompt in found] == [
        ("question-161", "rag", "Look up."),
        ("mine-1", "mine", "Hello ?"),
        ("x", "news", "A."),
        ("mine-4", "mine", None),
        ("plain-1", "plain", "one"),
        ("plain-3", "plain", "two"),
    ]


BAD: dict[str, tuple[str | None, str]] = {
    "gone": (None, "there is no prompts file"),
    "empty": ("\n", "holds no prompt"),
    "a bad line": ('{"prompt": "x"}\n{no', "line 2: this is not JSON"),
    "no prompt in it": ('{"question": "x"}', "needs a prompt.*this one has question"),
    "bad tokens": ('{"tokens": [1, -2]}', '"tokens" must be'),
    "an id of two lines": ('{"id": "a\\nb", "prompt": "x"}', '"id" must be a name'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_holds_no_prompts_is_one_line(name: str, tmp_path: Path) -> None:
    content, told = BAD[name]
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=told) as raised:
        read_prompts(path)
    assert "\n" not in str(raised.value)

"""Laws of prompt sources: prompts are read as written, and faults are one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers
from generated import corpus, generate, target
from tiny_models import CHAT

from lightning_specdec.data import OpeningTurns, PromptFiles, PromptSource
from lightning_specdec.data.corpus import open_corpus
from lightning_specdec.text.prompts import read_prompts
from lightning_specdec.text.tokenizer import TextTokenizer

__all__ = ["corpus", "target"]
PLAIN = TextTokenizer(tiny_tokenizers.byte_level())
TALKING = TextTokenizer(tiny_tokenizers.byte_level(chat_template=CHAT))


def texts(source: PromptSource, tokenizer: TextTokenizer = TALKING) -> list[str]:
    prompts = source.prompts(tokenizer)
    assert source.prompts(tokenizer) == prompts, "the same at every call"
    return [tokenizer.decode(prompt) for prompt in prompts]


def turn(text: str, system: str | None = None) -> str:
    system_turn = f"<system> {system}\n" if system else ""
    return f"{system_turn}<user> {text}\n<assistant>"


def test_lines_of_files_are_users_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\none\n" + "long " * 300, encoding="utf-8-sig")
    lines = [
        {"prompt": "three"},
        {"turns": ["four", "and then"]},
        "five",
        {"question": "no", "prompt": "six"},
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    all_texts = ["one", "two", "three", "four", "five", "six"]
    assert texts(PromptFiles(str(tmp_path / "*"))) == [turn(text) for text in all_texts]
    assert "6 of 8 are different ones of at most 512 tokens" in capsys.readouterr().err
    brief = PromptFiles(str(tmp_path), num_prompts=2, system="Be brief")
    assert texts(brief) == [turn(text, "Be brief") for text in all_texts[:2]]
    assert texts(PromptFiles(str(tmp_path), chat=False), PLAIN) == all_texts


def test_an_opening_turn_ends_where_the_users_words_begin() -> None:
    assert texts(OpeningTurns(3)) == ["<user> "] * 3
    assert texts(OpeningTurns(3, beginnings=["Add:", ""])) == [
        "<user> Add:",
        "<user> ",
        "<user> Add:",
    ]


def test_written_turns_become_prompts_once_they_ended(target: str, corpus: Path) -> None:
    tokenizer = TextTokenizer.load(target)
    finished_turns: dict[str, None] = {}
    num_unfinished = 0
    for shard in open_corpus(corpus)[1]:
        for number, length in enumerate(shard.prompt_lengths.tolist()):
            new = shard.row(number).tolist()[length:]
            if new[-1] not in tokenizer.eos:
                num_unfinished += 1
                continue
            text = tokenizer.decode(new).strip()
            if text:
                finished_turns[turn(text)] = None
    assert num_unfinished > 0 and len(finished_turns) > 5, "the corpus has both kinds"
    assert texts(PromptFiles(str(corpus)), tokenizer) == list(finished_turns)

    other_tokenizer = tiny_tokenizers.byte_level(vocab_size=300, chat_template=CHAT)
    with pytest.raises(ValueError, match="is text of another tokenizer"):
        PromptFiles(str(corpus)).prompts(TextTokenizer(other_tokenizer))


def test_a_turn_that_was_begun_is_asked_with_its_beginning(target: str, tmp_path: Path) -> None:
    source = OpeningTurns(16, beginnings=["Add:", "Say"])
    turns = generate(target, tmp_path / "turns", source, temperatures=[1.0])
    prompts = texts(PromptFiles(str(turns)), TextTokenizer.load(target))
    num_add = sum(prompt.startswith("<user> Add:") for prompt in prompts)
    num_say = sum(prompt.startswith("<user> Say") for prompt in prompts)
    assert num_add > 0 and num_say > 0
    assert num_add + num_say == len(prompts)


OPENAI = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}]},
    {"role": "assistant", "content": "four"},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief"},
    {"from": "human", "value": "one"},
    {"from": "gpt", "value": "two"},
    {"from": "human", "value": "three"},
    {"from": "gpt", "value": "four"},
]
CONVERSATION = "<system> Be brief\n<user> one\n<assistant> two\n<user> three\n<assistant>"
CONVERSATION_ROWS = {
    "openai": {"messages": OPENAI},
    "sharegpt": {"conversations": SHAREGPT},
    "lmsys": {"conversation": OPENAI, "conversation_id": 7},
    "trl": {"prompt": OPENAI[:4]},
}


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("shape", CONVERSATION_ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".list.json"])
def test_conversations_are_prompts_up_to_their_last_user_turn(
    tmp_path: Path,
    shape: str,
    suffix: str,
) -> None:
    path = tmp_path / f"a{suffix}"
    row = CONVERSATION_ROWS[shape]
    if suffix == ".list.json":
        path.write_text(json.dumps([row, {"prompt": "five"}], indent=1))
    else:
        write_rows(path, row, {"prompt": "five"})
    expected = [CONVERSATION, "<system> Use words\n<user> five\n<assistant>"]
    assert texts(PromptFiles(str(path), system="Use words")) == expected

    typed = read_prompts(path, as_typed=True)
    assert [prompt.text for prompt in typed] == ["three", "five"]
    assert TALKING.decode(typed[0].encoded(TALKING).tokens) == CONVERSATION
    with pytest.raises(ValueError, match="a conversation of 4 turns, which needs a chat template"):
        typed[0].encoded(PLAIN)


def test_a_conversation_of_one_turn_is_a_text_without_a_chat_template(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"messages": OPENAI[1:3]})
    assert texts(PromptFiles(str(path), chat=False), PLAIN) == ["one"]


def test_a_typed_conversation_is_no_text_in_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"messages": OPENAI}) + '\n{"a": 1}\n[1, 2]\n'
    path = tmp_path / "a.txt"
    path.write_text(line)
    expected = ["three", '{"a": 1}', "[1, 2]"]
    assert [prompt.text for prompt in read_prompts(path, as_typed=True)] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    assert [prompt.text for prompt in read_prompts(Path("-"), as_typed=True)] == expected


ROW_FAULTS: dict[str, tuple[object, str]] = {
    "other fields": ({"question": "a", "answer": "b"}, "this one has question, answer"),
    "no turns": ({"messages": []}, '"messages" must be a list of turns'),
    "no list": ({"conversations": "a"}, '"conversations" must be a list of turns'),
    "other turns": ({"messages": [{"text": "a"}]}, "a turn needs role and content"),
    "no user turn": ({"messages": OPENAI[:1]}, "has no user turn with text"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "content must be text",
    ),
}


@pytest.mark.parametrize("as_typed", [False, True])
@pytest.mark.parametrize("name", ROW_FAULTS)
def test_a_row_that_is_no_prompt_is_refused_in_one_line(
    tmp_path: Path,
    name: str,
    as_typed: bool,
) -> None:
    row, message = ROW_FAULTS[name]
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match=f"a.jsonl, line 2.*{message}") as caught:
        read_prompts(path, as_typed=as_typed)
    assert "\n" not in str(caught.value)


def test_ids_and_categories_may_be_numbers(tmp_path: Path) -> None:
    rows = [{"id": 7, "category": 3, "prompt": "a"}, {"id": 8, "domain": 0, "tokens": [1]}]
    prompts = read_prompts(write_rows(tmp_path / "a.jsonl", *rows))
    assert [(prompt.id, prompt.domain) for prompt in prompts] == [("7", "3"), ("8", "0")]
    with pytest.raises(ValueError, match='"id" must be a name, got True'):
        read_prompts(write_rows(tmp_path / "b.jsonl", {"id": True, "prompt": "a"}))


def test_files_in_utf_16_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the oak", encoding="utf-16")
    for as_typed in (False, True):
        with pytest.raises(ValueError, match="a.txt is text in UTF-16: save it as UTF-8"):
            read_prompts(path, as_typed=as_typed)


def test_variables_of_the_chat_template_reach_every_prompt(tmp_path: Path) -> None:
    template = CHAT + "{% if enable_thinking %} <think>{% endif %}"
    thinking = TextTokenizer(tiny_tokenizers.byte_level(chat_template=template))
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "one"})
    source = PromptFiles(str(path), chat_template_kwargs={"enable_thinking": True})
    assert texts(source, thinking) == [turn("one") + " <think>"]
    assert source.arguments()["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in PromptFiles(str(path)).arguments()


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
    make, tokenizer, message = FAULTS[name]
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        make(tmp_path).prompts(tokenizer)
    assert "\n" not in str(caught.value)

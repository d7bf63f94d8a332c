"""Laws of what a row has beside its turns: system prompts and tools reach the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from lightning_specdec.data.prompt_sources import PromptFiles
from lightning_specdec.data.text import find_texts
from lightning_specdec.text.prompts import read_prompts
from lightning_specdec.text.tokenizer import TextTokenizer

TEMPLATE = (
    "{% if tools %}<tools>{{ tools|tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
USER = {"role": "user", "content": "a dog"}
ANSWER = {"role": "assistant", "content": "the cat"}
SYSTEM = {"role": "system", "content": "be short"}
SHAREGPT = [{"from": "human", "value": "a dog"}, {"from": "gpt", "value": "the cat"}]


def tokenizer_of(template: str = TEMPLATE) -> TextTokenizer:
    return TextTokenizer(tiny_tokenizers.byte_level(chat_template=template))


def expected_text(turns: list[dict[str, str]], *, tools: Any = None, whole: bool) -> str:
    options = {"tokenize": False, "add_generation_prompt": not whole}
    text = tokenizer_of().tokenizer.apply_chat_template(turns, tools=tools, **options)
    return str(text)


def write(tmp_path: Path, row: dict[str, Any]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    return path


ROWS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # A row, and whether it has a system turn and tools.
    "ShareGPT": ({"conversations": SHAREGPT}, False, False),
    "ShareGPT with a system prompt": (
        {"system": "be short", "conversations": SHAREGPT, "tools": "[]"},
        True,
        False,
    ),
    "an empty system prompt": (
        {"system": "", "conversations": SHAREGPT, "tools": ""},
        False,
        False,
    ),
    "the same system prompt twice": (
        {"system": "be short", "messages": [SYSTEM, USER, ANSWER]},
        True,
        False,
    ),
    "OpenAI": ({"messages": [SYSTEM, USER, ANSWER], "tools": [TOOL]}, True, True),
    "tools in JSON": ({"messages": [USER, ANSWER], "tools": json.dumps([TOOL])}, False, True),
    "functions": ({"messages": [USER, ANSWER], "functions": [TOOL["function"]]}, False, True),
}


@pytest.mark.parametrize("name", ROWS)
def test_system_prompts_and_tools_are_trained_on_and_prompted_with(
    name: str, tmp_path: Path
) -> None:
    row, has_system, has_tools = ROWS[name]
    path = write(tmp_path, row)
    prompt_turns = [SYSTEM, USER] if has_system else [USER]
    tools = [TOOL] if has_tools else None
    tokenizer = tokenizer_of()

    [text] = find_texts([str(path)])
    expected = expected_text([*prompt_turns, ANSWER], tools=tools, whole=True)
    assert tokenizer.decode(text.encode(tokenizer)) == expected

    for as_typed in (False, True):
        [prompt] = read_prompts(path, as_typed=as_typed)
        tokens = prompt.encoded(tokenizer).tokens
        assert tokenizer.decode(tokens) == expected_text(prompt_turns, tools=tools, whole=False)


@pytest.mark.parametrize("field", ["prompt", "turns"])
def test_a_single_prompt_may_have_a_system_prompt_and_tools(field: str, tmp_path: Path) -> None:
    text: Any = "a dog" if field == "prompt" else ["a dog", "and then?"]
    path = write(tmp_path, {field: text, "system": "be short", "tools": [TOOL]})
    tokenizer = tokenizer_of()
    for as_typed in (False, True):
        [prompt] = read_prompts(path, as_typed=as_typed)
        assert prompt.text == "a dog"
        tokens = prompt.encoded(tokenizer).tokens
        expected = expected_text([SYSTEM, USER], tools=[TOOL], whole=False)
        assert tokenizer.decode(tokens) == expected


def test_texts_that_differ_in_their_tools_are_different_texts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "tools": [TOOL]},
        {"messages": [USER, ANSWER], "tools": []},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert len(find_texts([str(path)])) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"system": ["x"]}, '"system" must be text'),
        ({"system": "other", "messages": [SYSTEM, USER]}, "the system turn differ"),
        ({"tools": {"a": 1}}, '"tools" must be a list of objects'),
        ({"tools": "look"}, '"tools" is not JSON'),
        ({"tools": ["look"]}, '"tools" must be a list of objects'),
    ],
)
def test_other_system_prompts_and_tools_are_refused_in_one_line(
    row: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {"messages": [USER, ANSWER], **row})
    for read in (lambda: find_texts([str(path)]), lambda: read_prompts(path)):
        with pytest.raises(ValueError, match=message) as error:
            read()
        assert f"{path}, line 1" in str(error.value) and "\n" not in str(error.value)


def test_tools_need_a_chat_template_with_a_place_for_them(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [USER, ANSWER], "tools": [TOOL]})
    [text], [prompt] = find_texts([str(path)]), read_prompts(path)
    tokenizer = tokenizer_of(WITHOUT_TOOLS)
    for encode in (lambda: text.encode(tokenizer), lambda: prompt.encoded(tokenizer)):
        with pytest.raises(ValueError, match="no place for tools"):
            encode()
    with pytest.raises(ValueError, match="has tools, which need a chat template"):
        prompt.encoded(tokenizer, raw=True)
    article = write(tmp_path, {"article": "the cat sat", "system": "be short"})
    with pytest.raises(ValueError, match="an article takes no"):
        read_prompts(article)


@pytest.mark.parametrize(
    "options",
    [{"system": "Be brief."}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=str,
)
def test_what_only_a_chat_template_reads_is_refused_without_one(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are for a chat template, and data.chat is false"):
        PromptFiles("prompts.txt", chat=False, **options)

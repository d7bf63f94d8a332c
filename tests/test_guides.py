"""Every page of the documentation: its commands are valid, and its links and anchors exist."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import lightning_specdec
from lightning_specdec.cli.main import TRAINER_VERBS, VERBS, make_parser

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "checkpoints" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINKING_PAGES = [*PAGES, *sorted((ROOT / "docs" / "log").glob("*.md"))]
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^ *(?:\$L|(?:\.venv/bin/)?lightning_specdec) +(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
ENTRY = re.compile(r"^::: (\S+)\.(\w+)$", re.MULTILINE)


def commands(path: Path) -> list[list[str]]:
    """The arguments of every call of the program in a page's code blocks."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    calls = []
    for block in FENCED.findall(text):
        for call in CALL.findall(block):
            calls.append(shlex.split(call, comments=True))
    return calls


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_understood(path: Path) -> None:
    """Checks the verb and the config, and the options of verbs other than the Trainer's."""
    for verb, *arguments in commands(path):
        assert verb in VERBS
        for flag, value in pairwise(arguments):
            if flag == "--config" and value.startswith("configs/"):
                assert (ROOT / value).exists(), value

        is_help = any(word.endswith(".help") for word in arguments)
        if verb not in TRAINER_VERBS and not is_help:
            make_parser(verb).read(arguments)


def test_there_are_commands_to_look_at() -> None:
    assert sum(len(commands(path)) for path in PAGES) > 40


@pytest.mark.parametrize("path", LINKING_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        target_path = path.parent / target if target else path
        assert target_path.exists(), target
        if anchor and target_path.suffix == ".md":
            assert anchor in anchors(target_path), f"{target}#{anchor}"


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    names = set()
    for title in HEADING.findall(text):
        words = re.sub(r"[^\w\- ]", "", title.lower())
        names.add(words.replace(" ", "-"))
    return names


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public_text, _, types_text = text.partition("\n## Types of ")
    public_entries = ENTRY.findall(public_text)
    type_entries = ENTRY.findall(types_text)
    for module, name in (*public_entries, *type_entries):
        assert hasattr(import_module(module), name), f"{module}.{name}"

    public_names = set(lightning_specdec.__all__) - {"__version__"}
    assert {name for _, name in public_entries} == public_names
    for _, name in type_entries:
        assert name not in lightning_specdec.__all__, "a public name is among the types"

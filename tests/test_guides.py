"""Every page of the documentation: its commands are understood, its links and their anchors lead somewhere."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
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
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^ *(?:\$L|(?:\.venv/bin/)?lightning_specdec) +(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def commands(path: Path) -> list[list[str]]:
    """The arguments of every call of the program that stands in a block of a page."""
    blocks = FENCED.findall(path.read_text(encoding="utf-8").replace("\\\n", " "))
    calls = [CALL.findall(block) for block in blocks]
    return [shlex.split(call, comments=True) for several in calls for call in several]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_understood(path: Path) -> None:
    """Its verb, its config and, of verbs other than the Trainer's, its options."""
    for verb, *rest in commands(path):
        assert verb in VERBS
        configs = [
            word for before, word in zip(rest, rest[1:], strict=False) if before == "--config"
        ]
        assert [
            word for word in configs if word.startswith("configs/") and not (ROOT / word).exists()
        ] == []
        if verb not in TRAINER_VERBS and not any(word.endswith(".help") for word in rest):
            make_parser(verb).read(rest)


def test_there_are_commands_to_look_at() -> None:
    assert sum(len(commands(path)) for path in PAGES) > 40


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        found = path.parent / target if target else path
        assert found.exists(), target
        assert not anchor or found.suffix != ".md" or anchor in anchors(found), f"{target}#{anchor}"


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = HEADING.findall(FENCED.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_public_name_is_in_the_reference() -> None:
    public, _, types = (
        (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("\n## Types of ")
    )
    entries, others = (
        re.findall(r"^::: (\S+)\.(\w+)$", each, re.MULTILINE) for each in (public, types)
    )
    assert {name for _, name in entries} == {*lightning_specdec.__all__} - {"__version__"}
    assert not {name for _, name in others} & {*lightning_specdec.__all__}, (
        "a public name stands among the others"
    )
    assert all(hasattr(import_module(module), name) for module, name in [*entries, *others])

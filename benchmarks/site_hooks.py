"""Hooks of mkdocs: convert formulas to MathML, which needs no script, and insert the `--help` of each verb."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from lightning_specdec.cli import main

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
_HELP = "<!-- help -->"
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the help of verbs, and replace links to files outside the site by their text."""
    if _HELP in markdown:
        verbs = [verb for verb in main.VERBS if verb not in main.TRAINER_VERBS]
        markdown = markdown.replace(_HELP, "\n\n".join(f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs))
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML."""

    def formula(found: re.Match[str]) -> str:
        return str(convert(html.unescape(found[3]).strip(), display="block" if found[2] == "[" else "inline"))

    return _MATH.sub(formula, content)


def _help(verb: str) -> str:
    return main.make_parser(verb).format_help().rstrip().replace(str(Path.home()), "~")

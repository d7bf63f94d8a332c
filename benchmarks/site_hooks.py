"""Hooks of mkdocs: formulas as MathML, each verb's `--help`, and the fields of settings."""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

from lightning_specdec.cli import main
from lightning_specdec.config.settings import Settings, hints, setting_fields

REFERENCE = Path(__file__).parents[1] / "docs" / "api.md"
"""The page that lists the public names."""

HELP_MARK = "<!-- help -->"
"""Where a page shows the help of all verbs."""
REFERENCE_ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)
"""A name in the reference."""
UPWARD_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)]*)\)")
"""A link to a directory above the page's."""
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"\\(?P<bracket>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>",
    re.DOTALL,
)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Insert the help of verbs, and replace links to files outside the site by their text."""
    if HELP_MARK in markdown:
        markdown = markdown.replace(HELP_MARK, all_help())
    directory = posixpath.dirname(page.file.src_uri)

    def inside_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(directory, match["target"]))
        return match["text"] if path.startswith("..") else match[0]

    return UPWARD_LINK.sub(inside_link, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which needs no script."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    latex = html.unescape(match["latex"]).strip()
    display = "block" if match["bracket"] == "[" else "inline"
    return str(convert(latex, display=display))


def all_help() -> str:
    """A section with the help of each verb. The options of the Trainer's verbs are LightningCLI's."""
    sections = []
    for verb in main.VERBS:
        if verb not in main.TRAINER_VERBS:
            text = main.make_parser(verb).format_help().rstrip()
            # The help shows defaults below the home directory.
            text = text.replace(str(Path.home()), "~")
            sections.append(f"## {verb}\n\n```text\n{text}\n```")
    return "\n\n".join(sections)


class SettingsReference(griffe.Extension):
    """Describes the settings of the reference's classes: help, limits, and default of each field."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        for documented_class in reference_classes():
            entry = static_entry(pkg, documented_class)
            if issubclass(documented_class, Settings):
                _show_defaults(pkg, documented_class)
                _append_section(entry, "Args", _argument_lines(pkg, documented_class))
                continue
            settings = getattr(documented_class, "Settings", None)
            if settings and setting_fields(settings) and "Settings" in entry.members:
                _append_section(entry, "Keyword Args", _keyword_lines(settings))


def reference_classes() -> Iterator[type]:
    """The classes among the names of the reference."""
    for path in REFERENCE_ENTRY.findall(REFERENCE.read_text(encoding="utf-8")):
        module, _, name = path.rpartition(".")
        value = getattr(import_module(module), name)
        if isinstance(value, type):
            yield value


def static_entry(pkg: Any, documented_class: type) -> Any:
    """griffe's entry of a class."""
    path = f"{documented_class.__module__}.{documented_class.__qualname__}"
    return pkg[path.partition(".")[2]]


def _show_defaults(pkg: Any, settings: type[Settings]) -> None:
    """Show each field's default in place of the call that declares it."""
    for base in settings.__mro__:
        if base is Settings or not issubclass(base, Settings):
            continue
        members = static_entry(pkg, base).members
        for field in setting_fields(base):
            member = members.get(field.name)
            if member is not None and "setting(" in str(member.value):
                member.value = None if field.default is MISSING else repr(field.default)


def _argument_lines(pkg: Any, settings: type[Settings]) -> list[str]:
    """A line for each field: its docstring, or else its help."""
    members = static_entry(pkg, settings).members
    lines = []
    for field in setting_fields(settings):
        text = _described(field)
        member = members.get(field.name)
        if member is not None and member.docstring is not None:
            text = str(member.docstring.value) or text
            # The page would show it a second time.
            member.docstring = None
        lines.append(f"{field.name}: {text}")
    return lines


def _keyword_lines(settings: Any) -> list[str]:
    """A line for each field that has a default."""
    types = hints(settings)
    lines = []
    for field in setting_fields(settings):
        if field.default is not MISSING:
            hint = types[field.name]
            type_name = getattr(hint, "__name__", hint)
            text = f"{_described(field)} Default: `{field.default}`."
            lines.append(f"{field.name} ({type_name}): {text}")
    return lines


def _described(field: Any) -> str:
    """The help of a field, and its limits."""
    parts = [field.metadata.get("help"), _limits(field)]
    return "; ".join(part for part in parts if part) + "."


def _limits(field: Any) -> str:
    """The values that a field accepts; empty if there is no limit."""
    limits = field.metadata
    low = limits.get("minimum")
    high = limits.get("maximum")
    above = limits.get("above")
    choices = limits.get("choices")

    parts = []
    if choices is not None and low is None:
        parts.append(f"one of {', '.join(choices)}")
    if above is not None:
        parts.append(f"above {above:,}")
        if high is not None:
            parts[-1] += f", at most {high:,}"
    elif low is not None and high is None:
        parts.append(f"at least {low:,}")
    elif low is not None:
        parts.append(f"{low:,} to {high:,}")
    return "; ".join(parts)


def _append_section(entry: Any, title: str, lines: list[str]) -> None:
    """Add a section to a docstring, unless it has this section."""
    if lines and entry.docstring is not None and f"\n{title}:" not in entry.docstring.value:
        section = "\n    ".join((f"{title}:", *lines))
        entry.docstring.value += f"\n\n{section}"

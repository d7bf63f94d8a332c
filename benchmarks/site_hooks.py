"""Hooks of mkdocs: MathML for formulas (no script needed), each verb's `--help`, and the fields of settings."""

from __future__ import annotations

import html
import re
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

from lightning_specdec.cli import main
from lightning_specdec.config.settings import Settings, hints, setting_fields

_REFERENCE = Path(__file__).parents[1] / "docs" / "api.md"

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
_HELP = "<!-- help -->"
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the help of verbs, and replace links to files outside the site by their text."""
    if _HELP in markdown:
        verbs = [verb for verb in main.VERBS if verb not in main.TRAINER_VERBS]
        markdown = markdown.replace(
            _HELP, "\n\n".join(f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs)
        )
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML."""

    def formula(found: re.Match[str]) -> str:
        return str(
            convert(
                html.unescape(found[3]).strip(), display="block" if found[2] == "[" else "inline"
            )
        )

    return _MATH.sub(formula, content)


def _help(verb: str) -> str:
    return main.make_parser(verb).format_help().rstrip().replace(str(Path.home()), "~")


class SettingsReference(griffe.Extension):
    """Describes the settings of each class in the reference by its fields: the line of `--help`, limits and default."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        for entry in re.findall(
            r"^::: (\S+)$", _REFERENCE.read_text(encoding="utf-8"), re.MULTILINE
        ):
            module, _dot, name = entry.rpartition(".")
            kind = getattr(import_module(module), name)
            if not isinstance(kind, type):
                continue
            known = _static(pkg, kind)
            if issubclass(kind, Settings):
                _set_defaults(pkg, kind)
                own_docs = {
                    each.name: _docstring(pkg, kind, each.name) for each in setting_fields(kind)
                }
                lines = [
                    f"{each.name}: {own_docs[each.name] or _described(each)}"
                    for each in setting_fields(kind)
                ]
                _append(known, "Args", lines)
            elif (
                (own := getattr(kind, "Settings", None))
                and setting_fields(own)
                and "Settings" in known.members
            ):
                types = {
                    name: str(getattr(hint, "__name__", hint)) for name, hint in hints(own).items()
                }
                lines = [
                    f"{each.name} ({types[each.name]}): {_described(each)} Default: `{each.default}`."
                    for each in setting_fields(own)
                    if each.default is not MISSING
                ]
                _append(known, "Keyword Args", lines)


def _static(pkg: Any, kind: type) -> Any:
    """What griffe knows of a class."""
    return pkg[f"{kind.__module__}.{kind.__qualname__}".partition(".")[2]]


def _docstring(pkg: Any, kind: type, name: str) -> str:
    """Take what stands below a field, where it has no line of help."""
    member = _static(pkg, kind).members.get(name)
    if member is None or member.docstring is None:
        return ""
    found, member.docstring = str(member.docstring.value), None
    return found


def _set_defaults(pkg: Any, kind: type) -> None:
    """Show a field's default in place of the call that declares it."""
    for each in (
        base for base in kind.__mro__ if base is not Settings and issubclass(base, Settings)
    ):
        for own in setting_fields(each):
            member = _static(pkg, each).members.get(own.name)
            if member is not None and "setting(" in str(member.value):
                member.value = None if own.default is MISSING else repr(own.default)


def _described(field: Any) -> str:
    """The help of a field, and what values it takes."""
    limits, parts = field.metadata, [field.metadata["help"]] if field.metadata.get("help") else []
    low, high, above, choices = (
        limits.get(name) for name in ("minimum", "maximum", "above", "choices")
    )
    if choices is not None and low is None:
        parts.append(f"one of {', '.join(choices)}")
    if above is not None:
        parts.append(f"above {above:,}" + ("" if high is None else f", at most {high:,}"))
    elif low is not None:
        parts.append(f"at least {low:,}" if high is None else f"{low:,} to {high:,}")
    return "; ".join(parts) + "."


def _append(known: Any, title: str, lines: list[str]) -> None:
    """Add a section to a docstring, unless it describes the fields itself."""
    if lines and known.docstring is not None and f"\n{title}:" not in known.docstring.value:
        known.docstring.value += "\n\n" + "\n    ".join((f"{title}:", *lines))

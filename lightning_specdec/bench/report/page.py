"""The report as one HTML page that needs no network.

Whatever comes from the results is escaped, and the page runs no script.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lightning_specdec.bench.report.colors import palette
from lightning_specdec.bench.report.picture import Picture
from lightning_specdec.bench.report.prediction import TOLERANCE
from lightning_specdec.bench.report.tables import to_html
from lightning_specdec.manifest import made_on

if TYPE_CHECKING:
    from lightning_specdec.bench.report.report import Report

_RAISED = {"light": "#f3f5f8", "dark": "#1e2329"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LONG = ("prompts",)
"""What the page leaves out of the manifest."""
FEW = 8
"""Predictions that missed and are in sight at once."""


def page(report: Report, drawings: Mapping[str, Sequence[str]]) -> str:
    """The page.

    Args:
        drawings: of each picture its panels as SVG.
    """
    every = to_html(report.tables["cells"])
    parts = [
        f"<h1>{_text(report.name)}: does speculation pay?</h1>",
        f'<p class="machine">{_text(_machine(report.manifest))}</p>',
        _answer(report),
        _warnings(report.warnings),
        '<h2 id="advice">What pays where</h2>',
        '<p class="note">Of each domain the fastest lossless choice that is proven to pay (the fastest where none is), '
        "by seconds for as many tokens as standard decoding's. An interval is of 95%, over prompts and repeats; one "
        "whose end is ten times as much or more is not shown. A choice pays where the bound for the best of several "
        "lies above 1: then chance should say so of none of a setting's choices in 95 of 100 runs. Below the "
        "break-even acceptance its window costs time; where windows adapt, that and the theory are those of the "
        "fastest fixed one.</p>",
        to_html(report.tables["advice"]),
        '<h2 id="predictions">Measured against predicted</h2>',
        '<p class="note">Predicted from the acceptance on other prompts and from isolated calls. Textbook: an endless '
        "text, wide calls as cheap as narrow ones, rounds without overhead. Where a prediction is more than 10% off, "
        "the verdict names the assumptions that break, each with the factor that it accounts for.</p>",
        _promises(report),
        '<h2 id="cells">All cells</h2>',
        f"<details><summary>{len(report.cells)} cells with all figures</summary>{every}</details>",
        *(_picture(picture, drawings[picture.name]) for picture in report.pictures),
        '<h2 id="manifest">Where and how it was measured</h2>',
        f"<details><summary>Manifest</summary><pre>{_text(_shown_manifest(report.manifest))}</pre></details>",
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(report.name)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def _answer(report: Report) -> str:
    lines = []
    for pair, told in report.answers:
        lines.append(f'<p class="pair">{_text(pair)}</p>')
        for number, (setting, sentence) in enumerate(told):
            start = f"<i>{_text(setting)}:</i> " if setting else ""
            lines.append(f'<p class="{"" if number else "first"}">{start}{_text(sentence)}</p>')
    return f'<section class="answer" id="answer">{"".join(lines) or "<p>Nothing has been measured yet.</p>"}</section>'


def _promises(report: Report) -> str:
    """How many predictions hold; those that missed, in sight if they are few; all of them behind a click."""
    without = "".join(f"<p>No prediction of {_text(line)}.</p>" for line in report.without_prediction)
    if not report.predictions:
        return without or "<p>There is nothing to predict.</p>"
    held, number = sum(each.holds for each in report.predictions), len(report.predictions)
    lines = [f"<p>{held} of {number} predictions come within {TOLERANCE:.0%} of the measured speedup.</p>"]
    if missed := number - held:
        shown_or_not = " open" if missed <= FEW else ""
        told = f"<summary>{missed} that {'miss' if missed > 1 else 'misses'}, and which assumption broke</summary>"
        lines.append(f"<details{shown_or_not}>{told}{to_html(report.tables['missed'])}</details>")
    lines.append(f"<details><summary>All predictions</summary>{to_html(report.tables['predictions'])}</details>")
    lines.append(without)
    return "\n".join(lines)


def _warnings(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<p>{_text(line)}</p>" for line in lines)
    return f'<section class="warning" id="warnings">{items}</section>'


def _picture(picture: Picture, drawings: Sequence[str]) -> str:
    """A picture with the data that it is drawn from."""
    figures = "".join(
        f'<figure role="img" aria-label="{_text(f"{picture.title}, {panel.title}")}">{svg}</figure>'
        for panel, svg in zip(picture.panels, drawings, strict=True)
    )
    shown_or_not = f'<div class="panels">{figures}</div>' if figures else f"<p>{_text(picture.missing or '')}</p>"
    return (
        f'<section class="picture" id="{picture.name}">\n<h2>{_text(picture.title)}</h2>\n'
        f'<p class="note">{_text(picture.caption)}</p>\n{shown_or_not}\n'
        f'<script type="application/json" id="data-{picture.name}">{_data(asdict(picture))}</script>\n</section>'
    )


def _data(values: Any) -> str:
    """JSON that cannot end the element that it stands in; what is not finite is null."""
    text = json.dumps(_finite(values), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _style() -> str:
    """The palette of both themes, then the rules."""
    themes = {}
    for theme, raised in _RAISED.items():
        themes[theme] = (
            "".join(f" --{name}: {color};" for name, color in palette(theme).items()) + f" --raised: {raised};"
        )
    rules = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{{themes['dark']} }} }}"
    return f":root {{{themes['light']} }}\n{dark}\n{rules}"


def _text(value: object) -> str:
    return html.escape("".join(letter for letter in str(value) if letter.isprintable() or letter == "\n"))


def _machine(manifest: Mapping[str, Any]) -> str:
    """One line on where and when it was measured."""
    return f"{made_on(manifest)}, {manifest.get('date', '?')}"


def _shown_manifest(manifest: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in manifest.items() if name not in _LONG}, indent=1)

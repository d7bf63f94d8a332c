"""Draw the pictures of README.md and docs/ in docs/pictures: `python benchmarks/pictures.py`.

`answer.svg` shows a real decode, recorded in docs/results/answer.json. To decode and measure again:

    make smollm2
    python benchmarks/pictures.py --prompt "Write a short story about a fox."
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "answer.json"
PICTURES = ROOT / "docs" / "pictures"

# Sizes in pixels; COLUMNS is the number of characters on a line.
WIDTH = 840
LEFT = 24
COLUMNS = 94
CHARACTER_WIDTH = 8.4
LINE_HEIGHT = 24
LONGEST_BAR = 430.0

STYLE = """
  text {
    font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    fill: #1f2328;
  }
  .plain { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .head { font-size: 15px; font-weight: 600; }
  .soft { fill: #57606a; } .line { stroke: #8c959f; fill: none; }
  .page { fill: #ffffff; stroke: #d0d7de; } .kept { fill: #a6e9b5; } .own { fill: #dbe1e8; }
  .rejected { fill: #ffc9c4; } .slow { fill: #8c959f; } .fast { fill: #2da44e; }
  .empty { fill: #f6f8fa; stroke: #d0d7de; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .soft { fill: #9da7b1; } .line { stroke: #6e7681; }
    .page { fill: #0d1117; stroke: #30363d; } .kept { fill: #1c5a2e; } .own { fill: #2d333b; }
    .rejected { fill: #7d2a26; } .slow { fill: #6e7681; } .fast { fill: #3fb950; }
    .empty { fill: #161b22; stroke: #30363d; }
  }
"""


Outcome = str
"""CSS class of a token: kept, own, rejected or empty."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", help="decode this prompt and write a new record")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--target", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num_draft_tokens", type=int, default=3)
    parser.add_argument("--max_new_tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    if options.prompt is not None:
        record = measure(options)
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record = json.loads(options.record.read_text(encoding="utf-8"))
    PICTURES.mkdir(exist_ok=True)
    for name, svg in pictures(record).items():
        (PICTURES / name).write_text(svg, encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Decode a prompt with both methods; record text, outcome of each token, and speeds."""
    # Drawing alone needs neither torch nor the package.
    import torch

    from lightning_specdec import DecodingConfig, SpeculativeDecoder
    from lightning_specdec.bench.manifest import manifest
    from lightning_specdec.cli.decode_text import pieces

    decoder = SpeculativeDecoder.from_pretrained(
        options.target, options.draft, drafter="NGramWithFallback", dtype=options.dtype
    )
    config = DecodingConfig(max_new_tokens=options.max_new_tokens)
    config = config.changed(num_draft_tokens=options.num_draft_tokens)
    prompts = [decoder.encode_chat(options.prompt)]
    standard_row = decoder.decode_standard(prompts, config).rows[0]
    row = decoder.decode(prompts, config).rows[0]
    comparison = decoder.benchmark(prompts, config, repeats=options.repeats, warmup=1)
    assert comparison.walltime_speedup is not None
    return {
        "manifest": manifest(options={**vars(options), "record": None}, device=torch.device("cpu")),
        "prompt": options.prompt,
        "pieces": list(pieces(row, decoder.tokenizer)),
        "same_tokens": standard_row.tokens == row.tokens,
        "num_new_tokens": len(row.tokens),
        "num_rounds": len(row.rounds or []),
        "tokens_per_second": [
            comparison.standard_tokens_per_second,
            comparison.tokens_per_second,
        ],
        "walltime_speedup": list(comparison.walltime_speedup),
    }


def pictures(record: dict[str, Any]) -> dict[str, str]:
    """All pictures by file name."""
    return {
        "answer.svg": answer(record),
        "round.svg": one_round(),
        "prefill.svg": prefill(),
        "ragged.svg": ragged(),
    }


def answer(record: dict[str, Any]) -> str:
    """Speed of both methods, and the text with its draft tokens marked."""
    standard_speed, draft_speed = record["tokens_per_second"]
    longest_speed = max(standard_speed, draft_speed)
    speedup, low, high = record["walltime_speedup"]
    sameness = "output identical" if record["same_tokens"] else "output differs at a near-tie"
    summary = (
        f"faster: {speedup:.2f}x [{low:.2f}, {high:.2f}], {sameness}: "
        f"{record['num_new_tokens']} tokens in {record['num_rounds']} calls of the target"
    )
    elements = [
        _text(LEFT, 34, f"\u201c{record['prompt']}\u201d", "plain head"),
        *_bar(52, "standard decoding", standard_speed, longest_speed, "slow"),
        *_bar(84, "with the draft", draft_speed, longest_speed, "fast"),
        _text(LEFT, 138, summary, "plain head"),
    ]

    pieces = [(outcome, text) for outcome, text in record["pieces"] if outcome != "rejected"]
    y = 160
    for line in _wrapped(pieces):
        elements += _marked_line(y, line)
        y += LINE_HEIGHT

    manifest = record["manifest"]
    processor = manifest["processor"].replace("(R)", "").removesuffix(" Processor")
    conditions = (
        f"SmolLM2-135M-Instruct, {manifest['options']['dtype']}, batch 1, "
        f"{manifest['threads']} cores of an {processor}, prefill included"
    )
    elements += [
        _box(LEFT, y + 12, 14, 14, "kept"),
        _text(LEFT + 22, y + 24, "draft token, accepted", "plain soft"),
        _text(280, y + 24, "the other tokens are the target's, one in each call", "plain soft"),
        _text(LEFT, y + 48, conditions, "plain soft"),
    ]
    return _svg(y + 66, elements, f"An answer of SmolLM2, {speedup:.2f}x faster with a draft")


def _bar(y: int, label: str, speed: float, longest_speed: float, kind: str) -> list[str]:
    """A labeled bar whose length is a speed."""
    width = LONGEST_BAR * speed / longest_speed
    return [
        _text(LEFT, y + 17, label, "plain"),
        _box(170, y, width, 24, kind),
        _text(182 + width, y + 17, f"{speed:.1f} tokens/s", "plain head"),
    ]


def _marked_line(y: int, line: Sequence[tuple[int, Outcome, str]]) -> list[str]:
    """One line of the answer, with boxes behind kept draft tokens."""
    elements = []
    for column, outcome, text in line:
        x = LEFT + column * CHARACTER_WIDTH
        width = len(text) * CHARACTER_WIDTH
        if outcome == "kept":
            elements.append(_box(x, y, width, LINE_HEIGHT - 3, "kept"))
        if text.strip():
            elements.append(_text(x, y + 16, text, "", width))
    return elements


def _wrapped(pieces: Sequence[tuple[Outcome, str]]) -> Iterator[list[tuple[int, Outcome, str]]]:
    """Lines of (column, outcome, text), wrapped between words."""
    outcomes: list[Outcome] = []
    text = ""
    for outcome, piece in pieces:
        outcomes += [outcome] * len(piece)
        text += piece

    start = 0
    while start < len(text):
        end = _line_end(text, start)
        yield _line_pieces(text[start:end], outcomes[start:end])
        start = end
        # The line break or blank at which a line ends is not shown.
        if end < len(text) and text[end] in " \n":
            start += 1


def _line_end(text: str, start: int) -> int:
    """Where the line that begins at `start` ends: at a line break, or at a blank."""
    end = text.find("\n", start)
    if end < 0:
        end = len(text)
    if end - start <= COLUMNS:
        return end
    last_blank = text.rfind(" ", start, start + COLUMNS)
    if last_blank < 0:
        return start + COLUMNS
    return last_blank


def _line_pieces(text: str, outcomes: Sequence[Outcome]) -> list[tuple[int, Outcome, str]]:
    """Stretches of a line with one outcome, each with its first column."""
    pieces = []
    column = 0
    for outcome, stretch in itertools.groupby(outcomes):
        width = len(list(stretch))
        pieces.append((column, outcome, text[column : column + width]))
        column += width
    return pieces


def one_round() -> str:
    """A round: the draft proposes, and the target verifies all draft tokens in one call."""
    text = [("own", "the"), ("own", "cat"), ("own", "sat")]
    proposed = [("kept", "on"), ("kept", "the"), ("rejected", "sofa")]
    target_tokens = [("own", "on"), ("own", "the"), ("own", "mat"), ("empty", "unused")]
    verdict = [("kept", "on"), ("kept", "the"), ("own", "mat")]
    caption = (
        "Three new tokens for one call of the target. The target's token replaces the rejected one."
    )
    elements = [
        _text(LEFT, 32, "A round", "plain head"),
        *_words(56, "text", text),
        *_words(116, "1. the draft proposes", proposed, first_column=3),
        *_words(176, "2. the target, in one call", target_tokens, first_column=3),
        *_words(236, "3. the new tokens", verdict, first_column=3),
        _text(LEFT, 298, caption, "plain soft"),
    ]
    return _svg(318, elements, "A round of speculative decoding")


def prefill() -> str:
    """Predictive prefill: the call that reads the prompt also verifies draft tokens."""
    prompt = [("own", "name"), ("own", "three"), ("own", "uses")]
    draft_tokens = [("kept", "of"), ("kept", "a")]
    caption = (
        "A drafter that needs no hidden states proposes first, so the call that reads the prompt "
        "also verifies draft tokens."
    )
    elements = [
        _text(LEFT, 32, "Predictive prefill", "plain head"),
        *_words(56, "usual: call 1", prompt),
        *_words(106, "call 2", draft_tokens, first_column=3),
        *_words(176, "here: call 1", [*prompt, *draft_tokens]),
        _text(LEFT, 238, caption, "plain soft"),
    ]
    return _svg(258, elements, "Predictive prefill")


NUM_SLOTS = 12
"""Slots of a row in the picture of ragged rows."""


def ragged() -> str:
    """Ragged rows: each row of a batch continues from its own accepted length."""
    elements = [
        _text(LEFT, 32, "Ragged batch", "plain head"),
        *_slots(56, "row 0", length=3, num_kept=3, num_rejected=0),
        *_slots(100, "row 1", length=5, num_kept=1, num_rejected=2),
        *_slots(144, "row 2", length=2, num_kept=0, num_rejected=3),
    ]
    legend = (
        (80, "own", "text"),
        (170, "kept", "accepted"),
        (290, "rejected", "rejected, overwritten next"),
        (520, "empty", "free"),
    )
    for x, outcome, label in legend:
        elements.append(_box(x, 196, 14, 14, outcome))
        elements.append(_text(x + 22, 208, label, "plain soft"))
    caption = (
        "Rolling back lowers the length of a row. Nothing is copied, and no row waits for another."
    )
    elements.append(_text(LEFT, 240, caption, "plain soft"))
    return _svg(258, elements, "A ragged batch in a static cache")


def _slots(y: int, label: str, *, length: int, num_kept: int, num_rejected: int) -> list[str]:
    """A row of cache slots: text, kept draft tokens, rejected ones, and free slots."""
    num_free = NUM_SLOTS - length - num_kept - num_rejected
    outcomes = ["own"] * length + ["kept"] * num_kept
    outcomes += ["rejected"] * num_rejected + ["empty"] * num_free
    boxes = [_box(80 + 44 * slot, y, 40, 32, outcome) for slot, outcome in enumerate(outcomes)]
    summary = f"{num_kept} accepted + 1: {length + num_kept + 1} tokens"
    return [
        _text(LEFT, y + 21, label, "plain"),
        *boxes,
        _text(622, y + 21, summary, "plain soft"),
    ]


def _words(
    y: int,
    label: str,
    tokens: Sequence[tuple[Outcome, str]],
    first_column: int = 0,
) -> list[str]:
    """Row of tokens as boxes from a given column, after a label."""
    elements = [_text(LEFT, y + 21, label, "plain")]
    for column, (outcome, word) in enumerate(tokens, first_column):
        x = 230 + 84 * column
        word_width = len(word) * CHARACTER_WIDTH
        elements.append(_box(x, y, 76, 32, outcome))
        elements.append(_text(x + 38 - word_width / 2, y + 21, word, ""))
    return elements


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3"/>'
    )


def _text(x: float, y: float, text: str, kind: str, width: float | None = None) -> str:
    """Text at a position, stretched to a width if one is given."""
    stretched = ""
    if width is not None:
        stretched = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
    attributes = f'class="{kind}" x="{x:.1f}" y="{y}"{stretched} xml:space="preserve"'
    return f"<text {attributes}>{escape(text)}</text>"


def _svg(height: float, elements: Sequence[str], title: str) -> str:
    """A picture of these elements on a page with round corners."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    page_size = f'width="{WIDTH - 1}" height="{height - 1}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" {page_size} rx="8"/>',
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

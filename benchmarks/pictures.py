"""Draw the pictures of README.md and docs/ in docs/pictures: `python benchmarks/pictures.py`.

`answer.svg` shows a real decode, recorded in docs/results/answer.json. To decode and measure again:

    make smollm2
    python benchmarks/pictures.py --prompt "Write a short story about a fox." --record docs/results/answer.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "answer.json"
PICTURES = ROOT / "docs" / "pictures"
WIDTH, COLUMNS, CHARACTER, LINE = 840, 94, 8.4, 24
STYLE = """
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; }
  .plain { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .head { font-size: 15px; font-weight: 600; } .soft { fill: #57606a; } .line { stroke: #8c959f; fill: none; }
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
        options.record.write_text(json.dumps(measured(options), indent=1) + "\n", encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures(json.loads(options.record.read_text(encoding="utf-8"))).items():
        (PICTURES / name).write_text(text, encoding="utf-8")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Decode a prompt with both methods; record text, outcome of each token, and speeds."""
    import torch

    from lightning_specdec import DecodingConfig, SpeculativeDecoder
    from lightning_specdec.bench.manifest import manifest
    from lightning_specdec.bench.records import speed
    from lightning_specdec.cli.decode_text import pieces

    decoder = SpeculativeDecoder.from_pretrained(
        options.target, options.draft, drafter="NGramWithFallback", dtype=options.dtype
    )
    config = DecodingConfig(max_new_tokens=options.max_new_tokens)
    config = config.changed(num_draft_tokens=options.num_draft_tokens)
    prompts = [decoder.encode_chat(options.prompt)]
    standard, speculative = (
        decoder.decode_standard(prompts, config),
        decoder.decode(prompts, config),
    )
    comparison = decoder.benchmark(prompts, config, repeats=options.repeats, warmup=1)
    speedup = comparison.walltime_speedup
    assert speedup is not None
    return {
        "manifest": manifest(options={**vars(options), "record": None}, device=torch.device("cpu")),
        "prompt": options.prompt,
        "pieces": list(pieces(speculative.rows[0], decoder.tokenizer)),
        "same_tokens": standard.rows[0].tokens == speculative.rows[0].tokens,
        "num_new_tokens": len(speculative.rows[0].tokens),
        "num_rounds": len(speculative.rows[0].rounds or []),
        "tokens_per_second": [speed(comparison.standard), speed(comparison.rows)],
        "walltime_speedup": list(speedup),
    }


def pictures(record: dict[str, Any]) -> dict[str, str]:
    """All pictures by file name."""
    return {
        "answer.svg": answer(record),
        "round.svg": a_round(),
        "prefill.svg": prefill(),
        "ragged.svg": ragged(),
    }


def answer(record: dict[str, Any]) -> str:
    """Speed of both methods, and the text with its draft tokens marked."""
    slow, fast = record["tokens_per_second"]
    value, low, high = record["walltime_speedup"]
    same = "output identical" if record["same_tokens"] else "output differs at a near-tie"
    parts = [_text(24, 34, f"\u201c{record['prompt']}\u201d", "plain head")]
    longest = 430.0
    for y, name, speed, kind in (
        (52, "standard decoding", slow, "slow"),
        (84, "with the draft", fast, "fast"),
    ):
        width = longest * speed / max(slow, fast)
        parts += [_text(24, y + 17, name, "plain"), _box(170, y, width, 24, kind)]
        parts.append(_text(182 + width, y + 17, f"{speed:.1f} tokens/s", "plain head"))
    told = (
        f"faster: {value:.2f}x [{low:.2f}, {high:.2f}], {same}: {record['num_new_tokens']} tokens"
    )
    parts.append(
        _text(24, 138, f"{told} in {record['num_rounds']} calls of the target", "plain head")
    )
    y = 160
    for row in _wrapped([(fate, text) for fate, text in record["pieces"] if fate != "rejected"]):
        for column, fate, text in row:
            x, width = 24 + column * CHARACTER, len(text) * CHARACTER
            if fate == "kept":
                parts.append(_box(x, y, width, LINE - 3, "kept"))
            if text.strip():
                parts.append(_text(x, y + 16, text, "", width))
        y += LINE
    parts += [
        _box(24, y + 12, 14, 14, "kept"),
        _text(46, y + 24, "proposed by the draft and kept", "plain soft"),
    ]
    parts.append(
        _text(280, y + 24, "the rest is the target's own token of each call", "plain soft")
    )
    made = record["manifest"]
    processor = made["processor"].replace("(R)", "").removesuffix(" Processor")
    names = f"SmolLM2-135M-Instruct, {made['options']['dtype']}, batch 1, {made['threads']} cores of an {processor}"
    parts.append(_text(24, y + 48, f"{names}, prefill included", "plain soft"))
    return _svg(y + 66, parts, f"An answer of SmolLM2, {value:.2f}x faster with a draft")


def _wrapped(pieces: Sequence[tuple[str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    """Lines of (column, outcome, text), wrapped at words."""
    characters = [(fate, character) for fate, text in pieces for character in text]
    while characters:
        end = next((i for i, (_, each) in enumerate(characters) if each == "\n"), len(characters))
        if end > COLUMNS:
            blanks = [i for i, (_, each) in enumerate(characters[:COLUMNS]) if each == " "]
            end = blanks[-1] if blanks else COLUMNS
        line: list[tuple[int, str, str]] = []
        for column, (fate, character) in enumerate(characters[:end]):
            if line and line[-1][1] == fate:
                line[-1] = (line[-1][0], fate, line[-1][2] + character)
            else:
                line.append((column, fate, character))
        yield line
        characters = characters[end + (end < len(characters) and characters[end][1] in " \n") :]


def a_round() -> str:
    """A round: the draft proposes, and the target verifies all draft tokens in one call."""
    parts = _words(56, "text", [("own", "the"), ("own", "cat"), ("own", "sat")])
    proposed = [("kept", "on"), ("kept", "the"), ("rejected", "sofa")]
    parts += _words(116, "1. the draft proposes", proposed, first=3)
    parts += _words(
        176,
        "2. the target, in one call",
        [("own", "on"), ("own", "the"), ("own", "mat"), ("empty", "unused")],
        first=3,
    )
    parts += _words(
        236, "3. the verdict", [("kept", "on"), ("kept", "the"), ("own", "mat")], first=3
    )
    told = "Three new tokens for one call of the target. The rejected token gives way to the target's own."
    parts.append(_text(24, 298, told, "plain soft"))
    return _svg(
        318, [_text(24, 32, "A round", "plain head"), *parts], "A round of speculative decoding"
    )


def prefill() -> str:
    """Predictive prefill: the call that reads the prompt also verifies draft tokens."""
    prompt = [("own", each) for each in ("name", "three", "uses")]
    parts = [_text(24, 32, "Predictive prefill", "plain head")]
    parts += _words(56, "as usual: call 1", prompt) + _words(
        106, "call 2", [("kept", "of"), ("kept", "a")], first=3
    )
    parts += _words(176, "here: call 1", [*prompt, ("kept", "of"), ("kept", "a")])
    told = "A drafter that needs no hidden state proposes first, so that reading the prompt also checks its draft tokens."
    return _svg(258, [*parts, _text(24, 238, told, "plain soft")], "Predictive prefill")


def ragged() -> str:
    """Ragged rows: each row of a batch continues from its own accepted length."""
    parts = [_text(24, 32, "Ragged rows", "plain head")]
    for number, (length, window, kept) in enumerate(((3, 3, 3), (5, 3, 1), (2, 3, 0))):
        y = 56 + 44 * number
        parts.append(_text(24, y + 21, f"row {number}", "plain"))
        kinds = ["own"] * length + ["kept"] * kept + ["rejected"] * (window - kept)
        for slot, kind in enumerate(kinds + ["empty"] * (12 - len(kinds))):
            parts.append(_box(80 + 44 * slot, y, 40, 32, kind))
        parts.append(
            _text(622, y + 21, f"{kept} kept, 1 own: {length + kept + 1} tokens", "plain soft")
        )
    named = (
        ("own", "text"),
        ("kept", "kept"),
        ("rejected", "rejected, overwritten next"),
        ("empty", "free"),
    )
    for x, (kind, told) in zip((80, 170, 260, 490), named, strict=True):
        parts += [_box(x, 196, 14, 14, kind), _text(x + 22, 208, told, "plain soft")]
    told = "Going back is a shorter length; nothing is moved, and no row waits for another."
    return _svg(258, [*parts, _text(24, 240, told, "plain soft")], "Ragged rows in a static cache")


def _words(y: int, name: str, tokens: Sequence[tuple[str, str]], first: int = 0) -> list[str]:
    """Row of tokens as boxes from a given column, after a name."""
    parts = [_text(24, y + 21, name, "plain")]
    for number, (kind, word) in enumerate(tokens, first):
        x = 230 + 84 * number
        parts += [
            _box(x, y, 76, 32, kind),
            _text(x + 38 - len(word) * CHARACTER / 2, y + 21, word, ""),
        ]
    return parts


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3"/>'
    )


def _text(x: float, y: float, text: str, kind: str, width: float | None = None) -> str:
    fitted = "" if width is None else f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y}"{fitted} xml:space="preserve">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            page,
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    main()

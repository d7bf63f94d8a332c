"""Compare the tokens and counts of two source trees for every shipped checkpoint, drafter, rule and temperature.

git worktree add ../before b9e94ee
PYTHONPATH=../before python benchmarks/golden.py write before.json --checkpoints ../before/checkpoints
PYTHONPATH=. python benchmarks/golden.py write after.json --checkpoints ../before/checkpoints
python benchmarks/golden.py compare before.json after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CHECKPOINTS = ("rnn", "early_exit", "medusa", "text")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}
WINDOWS = range(1, 9)
MAX_NEW_TOKENS = 40


def decoders(path: Path) -> Iterator[tuple[str, Any]]:
    """Decoders of a shipped checkpoint: each draft, each exit, and prompt lookup."""
    from lightning_specdec import SpeculativeDecoder
    from lightning_specdec.drafters import NGramDrafter

    decoder = SpeculativeDecoder.from_checkpoint(path)
    yield "own", decoder
    yield "n-gram", decoder.with_drafter(NGramDrafter())
    for draft, drafter in decoder.drafts.items():
        yield f"draft {draft}", decoder.with_drafter(drafter)
    if path.stem in ("early_exit", "text"):
        yield "exit 1", decoder.with_exit(1)


def cases(directory: Path) -> Iterator[tuple[str, Any]]:
    """Name and decoded result of each case."""
    from lightning_specdec.rules import RULES

    for name in CHECKPOINTS:
        for draft, decoder in decoders(directory / f"{name}.safetensors"):
            weights = hashlib.sha256()
            for key, value in sorted(
                {**decoder.target.state_dict(), **decoder.drafter.state_dict()}.items()
            ):
                weights.update(
                    key.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                )
            yield f"{name}, {draft}, weights", weights.hexdigest()
            prompts = [list(prompt)[: 5 + 9 * i] for i, prompt in enumerate(decoder.prompts[:3])]
            for sampling, options in SAMPLINGS.items():
                standard = decoder.decode_standard(
                    prompts, max_new_tokens=MAX_NEW_TOKENS, seed=5, **options
                )
                yield f"{name}, {draft}, {sampling}, standard", standard.tokens
                for rule_name, rule in RULES.items():
                    for window in WINDOWS:
                        try:
                            result = decoder.decode(
                                prompts,
                                max_new_tokens=MAX_NEW_TOKENS,
                                num_draft_tokens=window,
                                rule=rule(),
                                seed=5,
                                **options,
                            )
                        except ValueError as error:
                            yield (
                                f"{name}, {draft}, {sampling}, {rule_name}, {window}",
                                type(error).__name__,
                            )
                            continue
                        rows = [
                            (
                                row.tokens,
                                row.counts.histogram,
                                row.counts.num_proposed,
                                row.stop_reason,
                            )
                            for row in result.rows
                        ]
                        yield f"{name}, {draft}, {sampling}, {rule_name}, {window}", rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write")
    write.add_argument("output", type=Path)
    write.add_argument(
        "--checkpoints", type=Path, required=True, help="checkpoints that both trees read"
    )
    compare = verbs.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.verb == "write":
        torch.set_num_threads(1)
        options.output.write_text(json.dumps(dict(cases(options.checkpoints))))
        return
    before, after = json.loads(options.before.read_text()), json.loads(options.after.read_text())
    changed = [name for name in before if name not in after or before[name] != after[name]]
    print(*changed, sep="\n")
    print(
        f"{len(before)} cases, {len(changed)} changed or missing, {len(after.keys() - before.keys())} new"
    )


if __name__ == "__main__":
    main()

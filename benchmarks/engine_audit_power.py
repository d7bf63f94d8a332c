"""How often `audit --engine` finds biased engines, by the number of tokens: `docs/results/engine_audit_power.json`.

    python benchmarks/engine_audit_power.py --output docs/results/engine_audit_power.json

The engine is this package's own decoding of a tiny random pair, with the biased rules of
`lightning_specdec/audit/biased_rules.py` and without a bias. Answers are decoded once for each rule
and draft. Audits with few tokens use parts of them, so each answer belongs to one audit of a size.
The pair is that of the tests: a target with an entropy of about 2 nats, and drafts that are the
target with noise in its weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from markdown_tables import markdown_table

from lightning_specdec.audit.biased_rules import BIASED_RULES
from lightning_specdec.audit.token_law import FALSE_ALARM_ODDS, TokenScores, examine
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.rules import RejectionSampling

ROOT = Path(__file__).resolve().parent.parent
RULES: dict[str, type[RejectionSampling]] = {"no bias": RejectionSampling, **BIASED_RULES}
NOISES = (0.1, 0.5)
"""Noise in the weights of the drafts, relative to their spread."""
ANSWERS = (16, 32, 64, 128)
"""Answers of an audit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=20, help="audits with 64 answers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    rows = []
    for noise in NOISES:
        for name in RULES:
            start = time.perf_counter()
            rows.append(measure(name, noise, options.audits))
            print(f"{json.dumps(rows[-1])} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(table(rows))
    if options.output is not None:
        settings = {"audits": options.audits, "noises": NOISES, "answers": ANSWERS}
        record = {
            "manifest": manifest(options=settings, device=torch.device("cpu")),
            "false_alarm_odds": FALSE_ALARM_ODDS,
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, noise: float, num_audits: int) -> dict[str, Any]:
    """Audits of one rule with one draft: how many of each size find a bias."""
    # The pair stands beside the tests.
    sys.path.insert(0, str(ROOT / "tests"))
    from sampled_answers import answer_scores, peaked_pair

    audits, acceptance_rate = answer_scores(
        peaked_pair(noise), RULES[name](), num_audits=num_audits
    )
    answers = [scores for audit in audits for scores in audit]
    sizes = []
    for num_answers in ANSWERS:
        reports = []
        for first in range(0, len(answers) - num_answers + 1, num_answers):
            reports.append(examine(TokenScores.join(answers[first : first + num_answers])))
        sizes.append(
            {
                "tokens": reports[0].num_tokens,
                "audits": len(reports),
                "found": sum(report.failed for report in reports),
            }
        )
    all_scores = TokenScores.join(answers)
    return {
        "bias": name,
        "noise": noise,
        "acceptance_rate": acceptance_rate,
        "entropy": float(all_scores.entropies.mean()),
        "sizes": sizes,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """How many audits of each size found the bias."""
    sizes = [f"{size['tokens']:,} tokens" for size in rows[0]["sizes"]]
    lines = []
    for row in rows:
        found = [f"{size['found']} of {size['audits']}" for size in row["sizes"]]
        lines.append((row["bias"], f"{row['acceptance_rate']:.2f}", *found))
    return markdown_table(("Bias", "Acceptance rate", *sizes), lines)


if __name__ == "__main__":
    main()

"""Tables of docs/results.md, one function for each: records in docs/results become Markdown.

Every function takes the part of a record that it shows and returns a whole table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

DTYPES = ("bfloat16", "float32")

SMOLLM2_RATIOS = {
    "standard over generate": "our standard decoding over transformers without a draft",
    "standard over generate, long prompts": (
        "our standard decoding over transformers without a draft, long prompts"
    ),
    "lookup over generate's": "our lookup over transformers'",
    "lookup over standard": "our lookup over our standard decoding",
    "adaptive lookup over standard": "our adaptive lookup over our standard decoding",
    "adaptive lookup over generate's": "our adaptive lookup over transformers'",
    "right draft over generate's": "right draft, ours over transformers'",
    "right draft over standard": "right draft, ours over our standard decoding",
    "wrong draft over generate's": "wrong draft, ours over transformers'",
    "wrong draft over standard": "wrong draft, ours over our standard decoding",
}
"""Labels of the ratios in smollm2_speed.json."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Cells are Markdown, so they are not escaped."""
    separators = ["---"] * len(headings)
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, separators, *rows)]
    return "\n".join(lines)


def format_number(value: float | None, digits: int = 2) -> str:
    """The number with this many decimal places; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


def audits_table(audits: Sequence[Row]) -> str:
    """One line for each audited checkpoint: what was covered, the verdicts, and the seconds."""
    headings = (
        "Checkpoint",
        "Drafts",
        "Rules",
        "Checks of what is lossless, by verdict",
        "Seconds",
    )
    rows = []
    for audit in audits:
        findings = [finding for finding in audit["findings"] if finding["check"] != "lossy"]
        drafts = {finding["draft"] for finding in findings}
        rules = {finding["rule"] for finding in findings}
        verdict_counts = Counter(finding["verdict"] for finding in findings)
        verdicts = [f"{count} {verdict}" for verdict, count in verdict_counts.items()]
        rows.append(
            (
                f"`{audit['checkpoint']}`",
                str(len(drafts)),
                str(len(rules)),
                ", ".join(verdicts),
                f"{audit['wall_seconds']:.0f}",
            )
        )
    return markdown_table(headings, rows)


def rnn_speed_table(measurements: Sequence[Row]) -> str:
    """The recurrent pair on unseen prompts: each rule at window 3 and at its best window."""
    headings = (
        "Rule, temperature",
        "Draft",
        "Window",
        "Acceptance rate",
        "Block efficiency",
        "walltime_speedup",
    )
    unseen = [row for row in measurements if row["prompts"] == "unseen"]
    rows = []
    for setting, group in _group_by(unseen, ("rule", "temperature")).items():
        rule, temperature = setting
        best = max(group, key=lambda row: row["walltime_speedup"])
        for row in group:
            window = str(row["num_draft_tokens"])
            if row is best:
                window += " (best)"
            elif row["num_draft_tokens"] != 3:
                continue
            rows.append(
                (
                    f"{rule}, {temperature:.0f}",
                    row["draft"],
                    window,
                    format_number(row["acceptance_rate"]),
                    format_number(row["block_efficiency"]),
                    format_number(row["walltime_speedup"]),
                )
            )
    return markdown_table(headings, rows)


def smollm2_calls_table(measurements: Sequence[Row]) -> str:
    """Milliseconds of one call by dtype and number of tokens, a column for each form of the model.

    The record also has rows of memory, which have no milliseconds.
    """
    calls = [row for row in measurements if "milliseconds" in row]
    forms = list(calls[0]["milliseconds"])
    rows = []
    for call in calls:
        milliseconds = [format_number(call["milliseconds"][form], 1) for form in forms]
        rows.append((call["dtype"], str(call["width"]), *milliseconds))
    return markdown_table(("dtype", "Tokens", *forms), rows)


def smollm2_speed_table(measurements: Sequence[Row]) -> str:
    """Ratios of seconds to transformers and to standard decoding, a column for each dtype."""
    ratios = [row for row in measurements if "ratio" in row]
    values = {(row["ratio"], row["dtype"]): row["value"] for row in ratios}
    rows = []
    for name in dict.fromkeys(row["ratio"] for row in ratios):
        cells = [format_number(values.get((name, dtype))) for dtype in DTYPES]
        rows.append((SMOLLM2_RATIOS[name], *cells))
    return markdown_table(("Ratio of seconds", *DTYPES), rows)


def smollm2_draft_kinds_table(drafts: Mapping[str, Row]) -> str:
    """Block efficiency: a line for each kind of prompt, a column for each draft."""
    kinds: dict[str, None] = {}
    for draft in drafts.values():
        kinds.update(dict.fromkeys(draft["block_efficiency"]))
    rows = []
    for kind in kinds:
        efficiencies = [draft["block_efficiency"].get(kind) for draft in drafts.values()]
        rows.append((kind, *[format_number(efficiency) for efficiency in efficiencies]))
    return markdown_table(("Prompts", *drafts), rows)


def smollm2_drafts_table(drafts: Mapping[str, Row]) -> str:
    """Each trained draft, alone and after prompt lookup, at its best window.

    Args:
        drafts: by name of a draft: its training (`recipe`), and the `rows` measured with it, both
            alone and after lookup.
    """
    headings = (
        "Draft",
        "Training, minutes",
        "Tokens seen",
        "Teacher-forced acceptance",
        "Window",
        "Block efficiency, T=0, T=1",
        "walltime_speedup bfloat16, T=0, T=1",
        "float32, T=0",
        "File, MB",
    )
    rows: list[Sequence[str]] = []
    for name, draft in drafts.items():
        for label, group in _group_by(draft["rows"], ("draft",)).items():
            is_trained_alone = label == (name,) and draft["recipe"] is not None
            recipe = draft["recipe"] if is_trained_alone else {}
            rows.append(_smollm2_draft_row(label[0], group, recipe))
    return markdown_table(headings, rows)


def _smollm2_draft_row(name: str, measurements: Sequence[Row], recipe: Row) -> Sequence[str]:
    """One line of `smollm2_drafts_table`.

    Args:
        recipe: how the draft was trained; empty for lookup, and for a draft after lookup.
    """
    # All windows were measured in the first dtype, and only the best of them in the second.
    first_dtype = measurements[0]["dtype"]
    greedy = {dtype: _fastest_greedy(measurements, dtype) for dtype in DTYPES}
    sampled = {dtype: _rejection_sampling(measurements, dtype) for dtype in DTYPES}
    best = greedy[first_dtype]
    assert best is not None, f"{name} was not measured at temperature 0"

    efficiencies = [_figure(best, "block_efficiency")]
    efficiencies.append(_figure(sampled[first_dtype], "block_efficiency"))
    speedups = [_figure(greedy["bfloat16"], "walltime_speedup")]
    speedups.append(_figure(sampled["bfloat16"], "walltime_speedup"))
    return (
        name,
        _scaled(recipe.get("training_seconds"), 60, "{:.0f}"),
        _scaled(recipe.get("tokens_seen"), 1e6, "{:.2f} M"),
        _teacher_forced_acceptance(recipe),
        str(best["num_draft_tokens"]),
        ", ".join(efficiencies),
        ", ".join(speedups),
        _figure(greedy["float32"], "walltime_speedup"),
        _scaled(recipe.get("file_bytes"), 1e6, "{:.1f}"),
    )


def _fastest_greedy(measurements: Sequence[Row], dtype: str) -> Row | None:
    greedy = [
        row
        for row in measurements
        if row["dtype"] == dtype and row["temperature"] == 0 and row["error"] is None
    ]
    return max(greedy, key=lambda row: row["walltime_speedup"], default=None)


def _rejection_sampling(measurements: Sequence[Row], dtype: str) -> Row | None:
    for row in measurements:
        is_sampled = row["dtype"] == dtype and row["rule"] == "RejectionSampling"
        if is_sampled and row["error"] is None:
            return row
    return None


def _teacher_forced_acceptance(recipe: Row) -> str:
    """Held-out acceptance at the first, second, ... draft token when training ended."""
    metrics = recipe.get("reached") or {}
    names = [
        name
        for name in sorted(metrics)
        if name.startswith("val/position_") and "sampling" not in name
    ]
    return " ".join(format_number(metrics[name]) for name in names) or "-"


def _scaled(value: float | None, unit: float, pattern: str) -> str:
    """The value in multiples of a unit; "-" if there is none."""
    if not value:
        return "-"
    return pattern.format(value / unit)


def _figure(row: Row | None, name: str) -> str:
    return format_number(None if row is None else row[name])


def transformer_speed_table(measurements: Sequence[Row]) -> str:
    """The small transformers: the fastest draft and window of each checkpoint in each setting."""
    headings = (
        "Checkpoint",
        "Rule, temperature",
        "Batch",
        "Draft, window",
        "Acceptance rate",
        "Block efficiency",
        "Cost ratio",
        "walltime_speedup (quartiles)",
    )
    keys = ("checkpoint", "rule", "temperature", "batch_size")
    rows: list[Sequence[str]] = []
    for setting, group in _group_by(measurements, keys).items():
        checkpoint, rule, temperature, batch_size = setting
        labels = (checkpoint, f"{rule}, {temperature:.0f}", str(batch_size))
        succeeded = [row for row in group if row["error"] is None]
        if not succeeded:
            rows.append((*labels, "failed", "-", "-", "-", "-"))
            continue
        best = max(succeeded, key=lambda row: row["walltime_speedup"])
        low, high = best["speedup_quartiles"]
        rows.append(
            (
                *labels,
                f"{best['draft']}, {best['num_draft_tokens']}",
                format_number(best["acceptance_rate"]),
                format_number(best["block_efficiency"]),
                format_number(best["cost_ratio"]),
                f"{best['walltime_speedup']:.2f} ({low:.2f} to {high:.2f})",
            )
        )
    return markdown_table(headings, rows)


def transformer_grid_table(measurements: Sequence[Row]) -> str:
    """Every draft with every window, greedy at batch size 1: speedup, acceptance, efficiency."""
    greedy = [
        row
        for row in measurements
        if row["temperature"] == 0 and row["batch_size"] == 1 and row["error"] is None
    ]
    windows = list(dict.fromkeys(row["num_draft_tokens"] for row in greedy))
    rows = []
    for labels, group in _group_by(greedy, ("checkpoint", "draft")).items():
        by_window = {row["num_draft_tokens"]: row for row in group}
        cells = [_grid_cell(by_window.get(window)) for window in windows]
        rows.append((*labels, *cells))
    headings = ("Checkpoint", "Draft", *[f"window {window}" for window in windows])
    return markdown_table(headings, rows)


def _grid_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    acceptance_rate = format_number(row["acceptance_rate"])
    return f"{row['walltime_speedup']:.2f} ({acceptance_rate}, {row['block_efficiency']:.1f})"


def transformer_quality_table(predictors: Sequence[Row]) -> str:
    """How well each exit, head or draft predicts held-out sequences."""
    headings = (
        "Checkpoint",
        "Predicts",
        "Loss",
        "Accuracy",
        "Bits per byte",
        "Agrees with the target",
    )
    names = ("loss", "accuracy", "bits_per_byte", "agreement")
    rows = []
    for predictor in predictors:
        figures = [format_number(predictor[name], 3) for name in names]
        rows.append((predictor["checkpoint"], predictor["predictor"], *figures))
    return markdown_table(headings, rows)


def _group_by(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these keys, in the order of the first row of each group."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row[key] for key in keys), [])
        group.append(row)
    return groups

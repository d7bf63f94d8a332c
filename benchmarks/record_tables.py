"""Tables of docs/results.md, one function for each: records in docs/results become Markdown.

Every function takes the part of a record that it shows and returns a whole table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markdown_tables import (
    format_number,
    markdown_table,
    number_column,
    records_table,
    text_column,
)

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

ENGINE_DRAFTS = {
    "head": ("vLLM", "the EAGLE-3.1 head that ships", "this package"),
    "medusa": ("vLLM", "Medusa heads, copies of the output layer", "this package"),
    "model": ("vLLM", "a draft model, the target without four layers", "this package"),
    "plain": ("llama.cpp", "a plain EAGLE-3 head", "llama.cpp without a draft"),
}
"""Engine, label, and what the answers are compared with, of each kind of draft in engines.json."""


def audits_table(audits: Sequence[Row]) -> str:
    """One line for each audited checkpoint: what was covered, the verdicts, and the seconds."""
    columns = {
        "Checkpoint": lambda audit: f"`{audit['checkpoint']}`",
        "Drafts": lambda audit: str(len(set(_lossless_values(audit, "draft")))),
        "Rules": lambda audit: str(len(set(_lossless_values(audit, "rule")))),
        "Verdicts of the checks of lossless rules": _verdict_counts,
        "Seconds": number_column("wall_seconds", 0),
    }
    return records_table(columns, audits)


def _lossless_values(audit: Row, name: str) -> list[str]:
    """Values of this name in the findings about lossless rules."""
    return [finding[name] for finding in audit["findings"] if finding["check"] != "lossy"]


def _verdict_counts(audit: Row) -> str:
    counts = Counter(_lossless_values(audit, "verdict"))
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


FAMILY_RESULTS = {
    "exact": "exact",
    "tie": "exact but for rounding",
    "partly refused": "exact, some uses refused",
    "refused": "refused",
    "transformers does not generate": "transformers does not generate",
    "wrong": "wrong",
    "crash": "crash",
    "time limit": "not finished",
}
"""How the results of families.json are called, in the order of the table."""


def family_counts_table(families: Sequence[Row]) -> str:
    """How many families have each result."""
    counts = Counter(row["outcome"] for row in families)
    rows = []
    for outcome, label in FAMILY_RESULTS.items():
        if counts[outcome]:
            rows.append((label, str(counts[outcome])))
    return markdown_table(("Result", "Families"), rows)


def families_table(families: Sequence[Row]) -> str:
    """One line for each family: its layers, whether it is decoded exactly, and why not."""
    columns = {
        "Family": lambda row: f"`{row['family']}`",
        "Layers": lambda row: row.get("layers", "-"),
        "Result": lambda row: FAMILY_RESULTS[row["outcome"]],
        "Reason": _family_reason,
    }
    return records_table(columns, sorted(families, key=lambda row: str(row["family"])))


def _family_reason(row: Row) -> str:
    """Why a family is not exact, without the place in the code that raised the error."""
    reason = str(row.get("reason", ""))
    without_place = re.sub(r" \(\w+\.py:\d+\)$", "", reason)
    if row["outcome"] == "refused":
        # A refusal is a sentence of its own, in whatever use it appeared.
        without_place = re.sub(r"^.*ValueError: ", "", without_place)
    # A bar would end the cell.
    return without_place.replace("|", "\\|") or "-"


def engines_table(drafts: Sequence[Row]) -> str:
    """Exported drafts in other engines: equal answers, and acceptance lengths on both sides."""
    columns = {
        "Engine": lambda row: ENGINE_DRAFTS[row["kind"]][0],
        "Draft": lambda row: ENGINE_DRAFTS[row["kind"]][1],
        "Answers compared with": lambda row: ENGINE_DRAFTS[row["kind"]][2],
        "Equal answers": lambda row: f"{row['same_tokens']} of {row['num_prompts']}",
        "Acceptance length there": number_column("theirs", 3),
        "Acceptance length here": number_column("ours", 3),
        "Difference": lambda row: f"{100 * row['off']:+.1f}%",
    }
    # The engines in the order of the labels.
    kinds = list(ENGINE_DRAFTS)
    return records_table(columns, sorted(drafts, key=lambda row: kinds.index(row["kind"])))


def rnn_speed_table(measurements: Sequence[Row]) -> str:
    """The recurrent pair on unseen prompts: each rule at window 3 and at its best window."""
    unseen = [row for row in measurements if row["prompts"] == "unseen"]
    shown: list[Row] = []
    for group in _group_by(unseen, ("rule", "temperature")).values():
        best = max(group, key=lambda row: row["walltime_speedup"])
        for row in group:
            if row is best:
                shown.append({**row, "num_draft_tokens": f"{row['num_draft_tokens']} (best)"})
            elif row["num_draft_tokens"] == 3:
                shown.append(row)
    columns = {
        "Rule, temperature": _rule_and_temperature,
        "Draft": text_column("draft"),
        "Window": text_column("num_draft_tokens"),
        "Acceptance rate": number_column("acceptance_rate"),
        "Block efficiency": number_column("block_efficiency"),
        "walltime_speedup": number_column("walltime_speedup"),
    }
    return records_table(columns, shown)


def _rule_and_temperature(row: Row) -> str:
    return f"{row['rule']}, {row['temperature']:.0f}"


def smollm2_calls_table(measurements: Sequence[Row]) -> str:
    """Milliseconds of one call by dtype and number of tokens, a column for each form of the model.

    The record also has rows of memory, which have no milliseconds.
    """
    calls = [row for row in measurements if "milliseconds" in row]
    rows = []
    for call in calls:
        milliseconds = [format_number(value, 1) for value in call["milliseconds"].values()]
        rows.append((call["dtype"], str(call["width"]), *milliseconds))
    return markdown_table(("dtype", "Tokens", *calls[0]["milliseconds"]), rows)


def smollm2_speed_table(measurements: Sequence[Row]) -> str:
    """Ratios of seconds to transformers and to standard decoding, a column for each dtype."""
    values: dict[str, dict[str, float]] = {}
    for row in measurements:
        if "ratio" in row:
            values.setdefault(row["ratio"], {})[row["dtype"]] = row["value"]
    rows = []
    for name, by_dtype in values.items():
        cells = [format_number(by_dtype.get(dtype)) for dtype in DTYPES]
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
        rows.append((kind, *map(format_number, efficiencies)))
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
    greedy = []
    for row in _succeeded(measurements):
        if row["dtype"] == dtype and row["temperature"] == 0:
            greedy.append(row)
    return max(greedy, key=lambda row: row["walltime_speedup"], default=None)


def _rejection_sampling(measurements: Sequence[Row], dtype: str) -> Row | None:
    for row in _succeeded(measurements):
        if row["dtype"] == dtype and row["rule"] == "RejectionSampling":
            return row
    return None


def _succeeded(measurements: Sequence[Row]) -> list[Row]:
    return [row for row in measurements if row["error"] is None]


def _teacher_forced_acceptance(recipe: Row) -> str:
    """Held-out acceptance at the first, second, ... draft token when training ended."""
    metrics = recipe.get("reached") or {}
    rates = []
    for name in sorted(metrics):
        if name.startswith("val/position_") and "sampling" not in name:
            rates.append(format_number(metrics[name]))
    return " ".join(rates) or "-"


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
    for group in _group_by(measurements, keys).values():
        setting = group[0]
        labels = (
            setting["checkpoint"],
            _rule_and_temperature(setting),
            str(setting["batch_size"]),
        )
        succeeded = _succeeded(group)
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
    greedy = []
    for row in _succeeded(measurements):
        if row["temperature"] == 0 and row["batch_size"] == 1:
            greedy.append(row)
    windows = list(dict.fromkeys(row["num_draft_tokens"] for row in greedy))
    rows = []
    for labels, group in _group_by(greedy, ("checkpoint", "draft")).items():
        by_window = {row["num_draft_tokens"]: row for row in group}
        rows.append((*labels, *[_grid_cell(by_window.get(window)) for window in windows]))
    headings = ("Checkpoint", "Draft", *[f"window {window}" for window in windows])
    return markdown_table(headings, rows)


def _grid_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    acceptance_rate = format_number(row["acceptance_rate"])
    return f"{row['walltime_speedup']:.2f} ({acceptance_rate}, {row['block_efficiency']:.1f})"


def transformer_quality_table(predictors: Sequence[Row]) -> str:
    """How well each exit, head or draft predicts held-out sequences."""
    columns = {
        "Checkpoint": text_column("checkpoint"),
        "Predicts": text_column("predictor"),
        "Loss": number_column("loss", 3),
        "Accuracy": number_column("accuracy", 3),
        "Bits per byte": number_column("bits_per_byte", 3),
        "Agrees with the target": number_column("agreement", 3),
    }
    return records_table(columns, predictors)


def _group_by(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these keys, in the order of the first row of each group."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row[key] for key in keys), [])
        group.append(row)
    return groups

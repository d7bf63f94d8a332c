"""Tables of the comparison with other engines, from the rows that `peers.py` measures."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markdown_tables import markdown_table
from peers_methods import METHODS, PAIR_METHODS, PRECISIONS, Method, worker_name

Row = dict[str, Any]
Cells = dict[Any, dict[str, float]]
"""By prompt the medians over repeats of `seconds`, `first`, `num_tokens` and `calls`."""

NUM_RESAMPLES = 2000
"""Draws of the bootstrap."""


def cells(rows: Iterable[Row], part: str, method: str) -> Cells:
    """What a method measured in a part, by prompt."""
    rows_by_prompt: dict[Any, list[Row]] = {}
    for row in rows:
        if row["part"] == part and row["method"] == method and "seconds" in row:
            rows_by_prompt.setdefault(row["prompt"], []).append(row)

    medians: Cells = {}
    for prompt, repeats in rows_by_prompt.items():
        medians[prompt] = {}
        for name in ("seconds", "first", "num_tokens", "calls"):
            # An engine that does not report a figure has None there.
            medians[prompt][name] = statistics.median([row[name] or 0.0 for row in repeats])
    return medians


def speed(prompt_cells: Iterable[Mapping[str, float]]) -> float:
    """Tokens per second, including the time to read the prompt."""
    num_tokens = 0.0
    seconds = 0.0
    for cell in prompt_cells:
        num_tokens += cell["num_tokens"]
        seconds += cell["seconds"]
    return num_tokens / seconds


def ratio(top: Cells, bottom: Cells) -> tuple[float, float, float]:
    """Ratio of two methods' speeds over the prompts that both answered, with its 95% interval.

    The interval is a bootstrap over the prompts. `bench`'s interval compares seconds for equal
    numbers of tokens; engines end their answers at different tokens, so this compares speeds.
    """
    prompts = [prompt for prompt in top if prompt in bottom]

    def ratio_over(sample: Sequence[Any]) -> float:
        top_speed = speed(top[prompt] for prompt in sample)
        bottom_speed = speed(bottom[prompt] for prompt in sample)
        return top_speed / bottom_speed

    generator = random.Random(0)
    resampled_ratios = []
    for _ in range(NUM_RESAMPLES):
        sample = generator.choices(prompts, k=len(prompts))
        resampled_ratios.append(ratio_over(sample))
    resampled_ratios.sort()
    low = resampled_ratios[int(0.025 * NUM_RESAMPLES)]
    high = resampled_ratios[int(0.975 * NUM_RESAMPLES) - 1]
    return ratio_over(prompts), low, high


def ratio_text(top: Cells, bottom: Cells) -> str:
    """Ratio of speeds with its interval."""
    value, low, high = ratio(top, bottom)
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def table(
    rows: Sequence[Row],
    part: str = "prompts",
    methods: Mapping[str, Method] = METHODS,
) -> str:
    """Speed of each method, fastest first. Ratios are to our standard decoding in OpenVINO."""
    headings = (
        "Engine",
        "Type",
        "Method",
        "tokens/s",
        "tokens/s after the first token",
        "tokens per call",
        "first token, ms",
        "speed over our standard decoding (95% interval)",
        "answers that differ (widest gap)",
        "memory, MB",
    )
    lines: list[tuple[float, Sequence[str]]] = []
    for method in methods.values():
        method_cells = cells(rows, part, method.name)
        if method_cells:
            figures = _speed_figures(rows, part, method, method_cells)
            lines.append((speed(method_cells.values()), (*method.labels, *figures)))
        elif part != "context":
            error = _last_error(rows, method)
            if error is not None:
                dashes = ["-"] * (len(headings) - 4)
                lines.append((0.0, (*method.labels, f"fails: {error}", *dashes)))
    return markdown_table(headings, _fastest_first(lines))


def _speed_figures(
    rows: Sequence[Row],
    part: str,
    method: Method,
    method_cells: Cells,
) -> Sequence[str]:
    """A method's columns after its labels in `table`."""
    num_prompts = len(method_cells)
    num_tokens = _total(method_cells, "num_tokens")
    num_calls = _total(method_cells, "calls")
    first_seconds = [cell["first"] for cell in method_cells.values()]
    later_seconds = _total(method_cells, "seconds") - sum(first_seconds)

    over_standard = "-"
    standard_cells = cells(rows, part, method.our_standard)
    if set(standard_cells) & set(method_cells):
        over_standard = ratio_text(method_cells, standard_cells)
        if num_prompts == 1:
            # One prompt has no interval.
            over_standard = over_standard.split()[0]
    return (
        f"{speed(method_cells.values()):.1f}",
        f"{(num_tokens - num_prompts) / later_seconds:.1f}",
        f"{num_tokens / num_calls:.2f}",
        f"{1000 * statistics.median(first_seconds):.0f}",
        over_standard,
        _differing_answers(rows, part, method),
        _peak_memory(rows, part, method),
    )


def _total(method_cells: Cells, name: str) -> float:
    """Sum of a figure over the prompts."""
    return sum(cell[name] for cell in method_cells.values())


def _fastest_first(lines: list[tuple[float, Sequence[str]]]) -> list[Sequence[str]]:
    lines.sort(key=lambda line: -line[0])
    return [columns for _, columns in lines]


def _last_error(rows: Iterable[Row], method: Method) -> str | None:
    error = None
    for row in rows:
        if row["method"] == method.name and "error" in row:
            error = row["error"]
    return error


def _differing_answers(rows: Iterable[Row], part: str, method: Method) -> str:
    """Number of answers that differ from ours, number of prompts, and the widest logit gap."""
    prompts = set()
    differing_prompts = set()
    widest_gap = 0.0
    for row in rows:
        if row["part"] != part or row["method"] != method.name or "differs" not in row:
            continue
        prompts.add(row["prompt"])
        if row["differs"] is not None:
            differing_prompts.add(row["prompt"])
        widest_gap = max(widest_gap, row.get("gap", 0.0))
    if not prompts:
        return "-"
    text = f"{len(differing_prompts)} of {len(prompts)}"
    if differing_prompts:
        text += f" ({widest_gap:.2f})"
    return text


def _peak_memory(rows: Sequence[Row], part: str, method: Method) -> str:
    """Megabytes of a method's process. One of our processes serves all methods of its backend."""
    workers = set()
    for row in rows:
        if row["part"] == part and row["method"] == method.name:
            workers.add(worker_name(method.engine, row["load"]))
    peak_bytes = []
    for row in rows:
        if row["part"] == "memory" and row["prompt"] == part and row["method"] in workers:
            peak_bytes.append(row["peak_bytes"])
    if not peak_bytes:
        return "-"
    return f"{max(peak_bytes) / 1e6:.0f}"


def fastest(rows: Sequence[Row]) -> str:
    """Tokens per second of each engine's standard decoding and fastest drafting."""
    methods_by_engine: dict[tuple[str, str], dict[str, Cells]] = {}
    for method in METHODS.values():
        method_cells = cells(rows, "prompts", method.name)
        if method_cells:
            engine, precision, decoding = method.labels
            methods_by_engine.setdefault((engine, precision), {})[decoding] = method_cells

    lines: list[tuple[float, Sequence[str]]] = []
    for labels, decodings in methods_by_engine.items():
        speeds = {name: speed(decoding.values()) for name, decoding in decodings.items()}
        num_prompts = min(len(decoding) for decoding in decodings.values())

        standard_text = "-"
        if "standard" in speeds:
            standard_text = f"{speeds['standard']:.1f}"
        drafting_text = "-"
        drafting = [name for name in speeds if name != "standard"]
        if drafting:
            best = max(drafting, key=lambda name: speeds[name])
            drafting_text = f"{speeds[best]:.1f} ({best})"
        columns = (*labels, standard_text, drafting_text, str(num_prompts))
        lines.append((max(speeds.values()), columns))
    headings = ("Engine", "Type", "standard, tokens/s", "with its best drafting", "prompts")
    return markdown_table(headings, _fastest_first(lines))


def batches(rows: Sequence[Row]) -> str:
    """Tokens per second of a whole batch, by batch size."""
    batch_rows = [row for row in rows if row["part"] == "batch"]
    sizes = list(dict.fromkeys(row["prompt"] for row in batch_rows))
    lines = []
    for method in METHODS.values():
        method_cells = cells(batch_rows, "batch", method.name)
        if not method_cells:
            continue
        speeds = []
        for size in sizes:
            has_size = size in method_cells
            speeds.append(f"{speed([method_cells[size]]):.1f}" if has_size else "-")
        lines.append((*method.labels, *speeds))
    headings = ("Engine", "Type", "Method", *[f"{size}, tokens/s" for size in sizes])
    return markdown_table(headings, lines)


def own_table(rows: Sequence[Row]) -> str:
    """Our methods at temperature 1, and the time of their greedy rounds outside the models."""
    headings = (
        "Backend",
        "Type",
        "Method",
        "temperature 1, tokens/s",
        "speed over standard decoding (95% interval)",
        "outside the models, ms per round",
    )
    lines = []
    for method in METHODS.values():
        if not method.is_ours or not cells(rows, "prompts", method.name):
            continue
        sampled = cells(rows, "temperature", method.name)
        standard_name = f"{method.engine}/{method.precision}/standard"
        standard = cells(rows, "temperature", standard_name)

        speed_text = "-"
        if sampled:
            speed_text = f"{speed(sampled.values()):.1f}"
        over_standard = "-"
        if sampled and standard:
            over_standard = ratio_text(sampled, standard)
        lines.append(
            (
                method.engine.removeprefix("ours "),
                method.precision,
                method.decoding,
                speed_text,
                over_standard,
                f"{milliseconds_outside(rows, method.name):.2f}",
            )
        )
    return markdown_table(headings, lines)


def milliseconds_outside(rows: Iterable[Row], method: str) -> float:
    """Milliseconds of acceptance and bookkeeping in our greedy rounds at batch 1."""
    seconds = 0.0
    num_rounds = 0
    for row in rows:
        if row["part"] == "prompts" and row["method"] == method and "phases" in row:
            seconds += row["phases"]["accept"] + row["phases"]["rest"]
            num_rounds += row["calls"]
    if num_rounds == 0:
        return float("nan")
    return 1000 * seconds / num_rounds


def compared_with_genai(rows: Sequence[Row]) -> str:
    """Ratios of our speed and of our time to the first token over OpenVINO GenAI's."""
    lines = []
    for precision in PRECISIONS:
        ours = _by_decoding(rows, "ours openvino", precision)
        genai = _by_decoding(rows, "openvino_genai", precision)
        if "standard" not in ours or "standard" not in genai:
            continue

        ratios = {"standard over standard": ratio(ours["standard"], genai["standard"])}
        drafting = [decoding for decoding in ours if decoding != "standard"]
        if drafting and "lookup" in genai:
            best = max(drafting, key=lambda decoding: speed(ours[decoding].values()))
            ratios[f"{best} over lookup"] = ratio(ours[best], genai["lookup"])
        # A ratio of seconds is the inverse of a ratio of speeds, so ours is the second argument.
        ratios["seconds to the first token, standard"] = ratio(
            _first_tokens(genai["standard"]), _first_tokens(ours["standard"])
        )
        for label, (value, low, high) in ratios.items():
            lines.append((precision, label, f"{value:.2f}", f"{low:.2f} to {high:.2f}"))
    headings = ("Type", "Ours over OpenVINO GenAI's", "Ratio", "95% interval")
    return markdown_table(headings, lines)


def _by_decoding(rows: Sequence[Row], engine: str, precision: str) -> dict[str, Cells]:
    """What an engine measured on the prompts, by kind of decoding."""
    measured = {}
    for method in METHODS.values():
        if method.engine == engine and method.precision == precision:
            method_cells = cells(rows, "prompts", method.name)
            if method_cells:
                measured[method.decoding] = method_cells
    return measured


def _first_tokens(method_cells: Cells) -> Cells:
    """The same prompts as if only their first token had been decoded."""
    first_token_cells = {}
    for prompt, cell in method_cells.items():
        first_token_cells[prompt] = {"num_tokens": 1.0, "seconds": cell["first"]}
    return first_token_cells


PAIR_PARTS = {"humaneval": "HumanEval", "prompts": "Spec-Bench"}
"""Sources of the prompts in a pair's comparison, by part."""


KINDS = {
    "standard": ("standard",),
    "lookup": ("lookup, 5 tokens", "lookup, always 5 tokens"),
    "draft model": ("draft model",),
}
"""Kinds of decoding that we and others have, with the beginnings of their names."""


def pair_ratios(rows: Sequence[Row]) -> str:
    """Ratios of speeds of a pair's methods: ours over OpenVINO GenAI's, and over our own."""
    lines = []
    for part, source in PAIR_PARTS.items():
        ours = _pair_cells(rows, part, "ours openvino")
        genai = _pair_cells(rows, part, "openvino_genai")
        others = _pair_cells(rows, part, "openvino_genai", "llama_server", "transformers")
        if "standard" not in ours:
            continue

        ratios = {}
        if _starting(ours, "draft model"):
            our_draft = _fastest_cells(_starting(ours, "draft model"))
            label = "our draft model over our standard decoding"
            ratios[label] = ratio(our_draft, ours["standard"])
        if others:
            label = "our fastest over the fastest of the other engines"
            ratios[label] = ratio(_fastest_cells(ours), _fastest_cells(others))
        for kind, starts in KINDS.items():
            our_kind = _starting(ours, *starts)
            genai_kind = _starting(genai, *starts)
            if our_kind and genai_kind:
                label = f"{kind} over OpenVINO GenAI's"
                ratios[label] = ratio(_fastest_cells(our_kind), _fastest_cells(genai_kind))
        if "standard" in genai:
            # A ratio of seconds is the inverse of a ratio of speeds, so ours is the second one.
            ratios["seconds to the first token over OpenVINO GenAI's, standard"] = ratio(
                _first_tokens(genai["standard"]), _first_tokens(ours["standard"])
            )
        for label, (value, low, high) in ratios.items():
            lines.append((source, label, f"{value:.2f}", f"{low:.2f} to {high:.2f}"))
    return markdown_table(("Prompts", "Ratio of", "Value", "95% interval"), lines)


def _pair_cells(rows: Sequence[Row], part: str, *engines: str) -> dict[str, Cells]:
    """What engines measured in a part of a pair's comparison, by kind of decoding.

    With several engines, the engine is part of the kind.
    """
    measured = {}
    for method in PAIR_METHODS.values():
        if method.engine in engines:
            method_cells = cells(rows, part, method.name)
            if method_cells:
                key = method.decoding if len(engines) == 1 else method.name
                measured[key] = method_cells
    return measured


def _starting(cells_by_decoding: Mapping[str, Cells], *starts: str) -> dict[str, Cells]:
    """The kinds of decoding whose names start in one of these ways."""
    return {name: cell for name, cell in cells_by_decoding.items() if name.startswith(starts)}


def _fastest_cells(cells_by_decoding: Mapping[str, Cells]) -> Cells:
    """The cells with the most tokens per second among those with the most prompts."""
    most_prompts = max(len(method_cells) for method_cells in cells_by_decoding.values())
    complete = [cell for cell in cells_by_decoding.values() if len(cell) == most_prompts]
    return max(complete, key=lambda method_cells: speed(method_cells.values()))


def rounds_table(rows: Sequence[Row]) -> str:
    """Where a round of our methods spends its time, in a pair's comparison."""
    lines = []
    for part, source in PAIR_PARTS.items():
        for method in PAIR_METHODS.values():
            if not method.is_ours:
                continue
            figures = _round_milliseconds(rows, part, method.name)
            if figures:
                lines.append((source, method.decoding, *figures))
    headings = (
        "Prompts",
        "Method",
        "rounds",
        "draft, ms per round",
        "target, ms per round",
        "acceptance, ms per round",
        "rest, ms per round",
    )
    return markdown_table(headings, lines)


def _round_milliseconds(rows: Sequence[Row], part: str, method: str) -> list[str]:
    """Number of rounds, and milliseconds of each phase in one; empty if nothing was measured.

    The first round of each prompt, which reads it, is included.
    """
    seconds = dict.fromkeys(("draft", "verify", "accept", "rest"), 0.0)
    num_rounds = 0
    for row in rows:
        if row["part"] == part and row["method"] == method and "phases" in row:
            num_rounds += row["calls"]
            for phase in seconds:
                seconds[phase] += row["phases"][phase]
    if num_rounds == 0:
        return []
    milliseconds = [f"{1000 * total / num_rounds:.2f}" for total in seconds.values()]
    return [str(num_rounds), *milliseconds]

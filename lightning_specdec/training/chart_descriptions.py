"""What the charts of a run show, as TensorBoard tells it beside each of them."""

from __future__ import annotations

import re

_POSITION = re.compile(r"^position_(\d+)/")

_METRICS = {
    "learning_rate": "Learning rate of the optimizer.",
    "epoch": "Passes through the training data.",
    "bits_per_byte": "Loss per byte of text, in bits: comparable between tokenizers.",
    "loss": "Loss per token; lower is better.",
    "accuracy": "Share of the tokens that the model ranks first.",
    "acceptance_rate": (
        "Share of the draft tokens that the target accepts, of those up to the first rejection in "
        "each round."
    ),
    "block_efficiency": "New tokens per target call. Standard decoding has 1.",
    "walltime_speedup_low": "Lower end of the 95% interval of the speedup.",
    "walltime_speedup_high": "Upper end of the 95% interval of the speedup.",
    "walltime_speedup": (
        "Seconds of standard decoding, divided by those of speculative decoding of the same "
        "prompts. Above 1, the draft pays."
    ),
}
"""By the end of a chart's name; a longer end comes before a shorter one that it contains."""

_CONDITIONS = {
    "teacher_forced_": "Estimated from known texts, without decoding.",
    "sampling_": "At temperature 1. Charts without `sampling` are at temperature 0.",
}
"""By a part of a chart's name."""


def describe_chart(tag: str) -> str:
    """What a scalar shows, in Markdown; empty for a name that is not known.

    Args:
        tag: such as `val/sampling_acceptance_rate`.
    """
    split, _, name = tag.partition("/")
    sentences = []
    position = _POSITION.match(name)
    if position is not None:
        sentences.append(f"Of draft token {position[1]} of each round.")
        name = name[position.end() :]

    for part, sentence in _CONDITIONS.items():
        if part in name:
            sentences.append(sentence)
            name = name.replace(part, "")

    for metric, sentence in _METRICS.items():
        if name.endswith(metric):
            owner = name.removesuffix(metric).strip("_/")
            if owner:
                sentences.append(f"Of `{owner}`.")
            data = {"train": "training data", "val": "validation data", "test": "test data"}
            if split in data and metric not in ("learning_rate", "epoch"):
                sentences.append(f"On {data[split]}.")
            return " ".join([sentence, *sentences])
    return ""

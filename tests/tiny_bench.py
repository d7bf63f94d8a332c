"""A benchmark of a tiny pair: three tokens a prompt, a few hundredths of a second in all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import torch

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.results import Results
from lightning_specdec.bench.run import BenchPair, open_results, run
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel

PROMPTS = {
    "sequences": [
        Prompt(f"p{i}", "sequences", tuple(tokens)) for i, tokens in enumerate(cases.PROMPTS[:2])
    ]
}
DRAFTS: dict[str, Any] = {"model": {}, "ngram": {"drafter": "NGramDrafter"}}


def config(drafts: Mapping[str, Any] = DRAFTS, **changes: Any) -> BenchConfig:
    """A config of one group: standard decoding, a draft model, and prompt lookup."""
    values: dict[str, Any] = {
        "name": "tiny",
        "pairs": {"tiny": {"ckpt": "tiny.ckpt", "drafts": drafts}},
        "num_draft_tokens": [2],
        "max_new_tokens": 3,
        "repeats": 2,
        "warmup": 0,
        "threads": 1,
    }
    return BenchConfig.from_dict({**values, **changes})


def pair(
    target: LanguageModel | None = None,
    drafts: Mapping[str, Drafter | str] | None = None,
    prompts: Mapping[str, Any] = PROMPTS,
) -> BenchPair:
    """The pair of the config."""
    if target is None:
        target = cases.MODELS["rnn"]()
    if drafts is None:
        drafts = {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}
    return BenchPair.of("tiny", target, drafts, prompts)


@functools.cache
def machine() -> dict[str, Any]:
    """The manifest's entries about this machine."""
    return manifest(options={}, device=torch.device("cpu"))


def measured(
    directory: Path,
    bench_config: BenchConfig,
    bench_pair: BenchPair | None = None,
) -> Results:
    """Run what is missing."""
    if bench_pair is None:
        bench_pair = pair()
    with open_results(directory, bench_config, machine()) as results:
        run(bench_config, results, lambda name: bench_pair)
    return results

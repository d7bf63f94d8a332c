"""A benchmark of a tiny pair, for the tests: three tokens a prompt, a few hundredths of a second in all."""

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
        Prompt(f"p{i}", "sequences", tuple(text)) for i, text in enumerate(cases.PROMPTS[:2])
    ]
}


def config(drafts: Mapping[str, Any] | None = None, **more: Any) -> BenchConfig:
    """A config of one group: standard decoding, a draft model, and lookup."""
    drafts = drafts or {"model": {}, "ngram": {"drafter": "NGramDrafter"}}
    values: dict[str, Any] = {
        "name": "tiny",
        "pairs": {"tiny": {"ckpt": "tiny.ckpt", "drafts": drafts}},
    }
    values |= {
        "num_draft_tokens": [2],
        "max_new_tokens": 3,
        "repeats": 2,
        "warmup": 0,
        "threads": 1,
    }
    return BenchConfig.from_dict(values | more)


def pair(
    target: LanguageModel | None = None,
    drafts: Mapping[str, Drafter | str] | None = None,
    **more: Any,
) -> BenchPair:
    """The pair that the config speaks of."""
    target = target or cases.MODELS["rnn"]()
    drafts = drafts or {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}
    return BenchPair.of("tiny", target, drafts, **{"prompts": PROMPTS, **more})


@functools.cache
def made() -> dict[str, Any]:
    """What the manifest says of this machine."""
    return manifest(options={}, device=torch.device("cpu"))


def measured(directory: Path, chosen: BenchConfig, given: BenchPair | None = None) -> Results:
    """Run what is missing."""
    given = given or pair()
    with open_results(directory, chosen, made()) as results:
        run(chosen, results, lambda name: given)
    return results

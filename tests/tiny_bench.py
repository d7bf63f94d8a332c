"""A benchmark of a tiny pair, for the tests: three tokens a prompt, a few hundredths of a second in all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import torch

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.results import Results
from lightning_specdec.bench.run import open_results, run
from lightning_specdec.bench.subject import DRAFT_FACTS, Subject
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.manifest import manifest
from lightning_specdec.models import LanguageModel

PROMPTS = {"sequences": [Prompt(f"p{i}", "sequences", tuple(text)) for i, text in enumerate(cases.PROMPTS[:2])]}
OTHERS = {"sequences": [Prompt("o0", "sequences", (2, 3, 4))]}


def plain(drafts: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The values of a config."""
    drafts = drafts or {"model": {}, "ngram": {"drafter": "NGramDrafter"}}
    values: dict[str, Any] = {"name": "tiny", "pairs": {"tiny": {"ckpt": "tiny.ckpt", "drafts": drafts}}}
    values |= {"num_draft_tokens": [2], "max_new_tokens": 3, "repeats": 2, "warmup": 0, "threads": 1}
    return values | more


def config(drafts: Mapping[str, Any] | None = None, **more: Any) -> BenchConfig:
    """A config of one group: standard decoding, a model that guesses, and look-up."""
    return BenchConfig.from_dict(plain(drafts, **more))


def subject(
    target: LanguageModel | None = None, drafts: Mapping[str, Drafter | str] | None = None, **more: Any
) -> Subject:
    """The pair that the config speaks of."""
    target = target or cases.MODELS["rnn"]()
    drafts = drafts or {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}
    return Subject.of("tiny", target, drafts, **{"prompts": PROMPTS, "others": OTHERS, **more})


@functools.cache
def made() -> dict[str, Any]:
    """What the manifest says of this machine."""
    return manifest(options={}, device=torch.device("cpu"))


def without(given: Subject, failed: Mapping[str, str]) -> Subject:
    """The pair as it is loaded where some of its drafts are not."""
    facts = {name: {**given.facts[name], **dict.fromkeys(failed)} for name in DRAFT_FACTS}
    return replace(given, drafts={**given.drafts, **failed}, facts={**given.facts, **facts})


def measured(directory: Path, chosen: BenchConfig, given: Subject | None = None) -> Results:
    """Run what is missing."""
    given = given or subject()
    with open_results(directory, chosen, made()) as results:
        run(chosen, results, lambda name, failed: without(given, failed))
    return results.results

"""A whole benchmark: each pair of its config is loaded and its cases run in turn.

Each finished row is on the disk before the next run. A run that was stopped resumes with what is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from lightning_specdec.bench.config import OWN, SHIPPED, BenchConfig
from lightning_specdec.bench.huggingface import HuggingFace
from lightning_specdec.bench.measure import FAILURES, Case, measure, missing_repeats, windows_of
from lightning_specdec.bench.results import ResultsWriter
from lightning_specdec.bench.rows import ASSISTED, GENERATE, SPECULATIVE, STANDARD
from lightning_specdec.checkpoints.loading import find_device, load_pair
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.models import check_directory
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.prompts import (
    SEQUENCES,
    Prompt,
    by_domain,
    read_prompts,
    shipped_prompts,
)
from lightning_specdec.decoding.rows import check_prompt
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.base import weights_digest
from lightning_specdec.rules import make_rule

log = logging.getLogger(__name__)
Prompts = Mapping[str, Sequence[Prompt]]
"""By domain."""
BY_PAIR = ("pairs", "prompts", "failed_pairs")
"""What the manifest says of each pair, once it is known."""


@dataclass
class BenchPair:
    """A pair as it is measured.

    Args:
        name: in the config.
        target: packed.
        drafts: fused drafters by name; or why one of them cannot draft.
        prompts: those that are measured.
        eos: tokens that end a row.
        baseline: the same models for Hugging Face's methods; None where they are not of transformers.
        facts: what the manifest says of it.
    """

    name: str
    target: LanguageModel
    drafts: Mapping[str, Drafter | str]
    prompts: Prompts
    eos: tuple[int, ...] = ()
    baseline: HuggingFace | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        target: LanguageModel,
        drafts: Mapping[str, Drafter | str],
        prompts: Prompts,
        **more: Any,
    ) -> BenchPair:
        """The pair as it decodes, from models as they were loaded; `more` are other fields."""
        loaded = {key: draft.eval() for key, draft in drafts.items() if isinstance(draft, Drafter)}
        dtype = getattr(target.eval(), "dtype", None) or next(target.parameters()).dtype
        facts = {
            "target": type(getattr(target, "model", target)).__name__,
            "target_parameters": target.num_parameters,
            "backend": target.backend,
            "dtype": str(dtype).removeprefix("torch."),
            "target_sha256": weights_digest(target),
            "draft_parameters": {key: _num_parameters(draft) for key, draft in loaded.items()},
            "draft_sha256": {key: weights_digest(draft) for key, draft in loaded.items()},
        }
        ready: dict[str, Drafter | str] = dict(drafts)
        for key, draft in loaded.items():
            try:
                ready[key] = draft.fused(target)
            except FAILURES as error:  # the memory for it may be missing
                ready[key] = one_line(error)
        packed = target.packed()
        baseline = None
        if hasattr(model := getattr(packed, "model", None), "generate"):
            models = {key: each.model for key, each in ready.items() if type(each) is ModelDrafter}
            baseline = HuggingFace(
                model, {key: each.model for key, each in models.items() if hasattr(each, "model")}
            )
        return cls(name, packed, ready, prompts, **{"baseline": baseline, "facts": facts, **more})

    def cases(self, config: BenchConfig) -> list[list[Case]]:
        """The cases of the matrix, in groups that are compared, standard decoding first in each.

        Windows that a draft cannot fill are those that it can, and rules that would do the same are one.
        """
        groups = []
        lossless = [rule for rule in config.rules if make_rule(rule).lossless]
        numbers = [window for window in config.num_draft_tokens if isinstance(window, int)]
        adaptive = ["auto"] if "auto" in config.num_draft_tokens else []
        for domain, temperature, size in product(
            self.prompts, config.temperatures, config.batch_sizes
        ):
            eos = () if config.ignore_eos else self.eos
            decoding = DecodingConfig(
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                eos=eos,
                seed=config.seed,
            )
            standard = Case(
                method=STANDARD,
                target=self.target,
                config=decoding,
                prompts=self.prompts[domain],
                pair=self.name,
                domain=domain,
                batch_size=size,
            )
            group = [standard]
            # Greedy, all lossless rules accept the same draft tokens.
            rules = [rule for rule in config.rules if temperature > 0 or rule not in lossless[1:]]
            for draft, drafter in self.drafts.items():
                most = drafter.max_draft_tokens if isinstance(drafter, Drafter) else None
                windows: list[int | str] = [*windows_of(most, numbers), *adaptive]
                for rule, window in product(rules, windows):
                    chosen = decoding.changed(rule=rule, num_draft_tokens=window)
                    group.append(
                        replace(
                            standard,
                            method=SPECULATIVE,
                            config=chosen,
                            drafter=drafter,
                            draft=draft,
                        )
                    )
            for method in config.baselines if self.baseline is not None else ():
                theirs = replace(standard, method=method, baseline=self.baseline)
                names = self.baseline.assistants if method == ASSISTED else [None]  # type: ignore[union-attr]
                fixed = [None] if method == GENERATE else numbers or [DEFAULT_WINDOW]
                for name, number in product(names, fixed):
                    group.append(
                        replace(
                            theirs, config=decoding.changed(num_draft_tokens=number), draft=name
                        )
                    )
            groups.append(group)
        return groups


def check_pairs(config: BenchConfig) -> None:
    """Raise ValueError or OSError for models, prompts and devices that are not there, before any model is loaded."""
    find_device(config.device)
    if config.prompts not in (OWN, SHIPPED):
        read_prompts(Path(config.prompts).expanduser())
    for entry in config.pairs.values():
        if entry.ckpt is not None:
            open(entry.ckpt, "rb").close()
        elif entry.pair is not None:
            get_pair(entry.pair)
        else:
            check_directory(entry.target)


def load_bench_pair(name: str, config: BenchConfig) -> BenchPair:
    """A pair of the config; a draft that cannot draft for the target is kept as the reason.

    Raises:
        ValueError: the target cannot be loaded, or there are no such prompts.
    """
    entry = config.pairs[name]
    alone = entry.source(next(iter(entry.drafts)), config.device)
    alone = alone.changed(
        draft=None, drafter="NGramDrafter", draft_dtype=None, draft_quantization=None
    )
    loaded = load_pair(
        alone, pack=False
    )  # packed later: transformers decodes with the same weights
    target = loaded.target
    drafts: dict[str, Drafter | str] = {}
    for draft in entry.drafts:
        try:
            drafts[draft] = load_pair(
                entry.source(draft, config.device), target=target, pack=False
            ).drafter
        except FAILURES as error:
            drafts[draft] = one_line(error)
    prompts = _prompts(target, loaded.prompts, config)
    for prompt in chain(*prompts.values()):
        check_prompt(prompt.tokens, target.vocab_size, f"prompt {prompt.id}")
    eos = () if target.tokenizer is None else target.tokenizer.eos
    ends = tuple(sorted(token for token in eos if token < target.vocab_size))
    return BenchPair.of(name, target, drafts, prompts, eos=ends)


def _num_parameters(draft: Drafter) -> int | None:
    """Those that belong to the draft; None where it has none."""
    models = [part for part in draft.modules() if isinstance(part, LanguageModel)]
    return (
        max(
            [
                sum(each.numel() for each in draft.parameters()),
                *(model.num_parameters for model in models),
            ]
        )
        or None
    )


def _prompts(target: LanguageModel, own: Sequence[Sequence[int]], config: BenchConfig) -> Prompts:
    tokenizer, source, domains = target.tokenizer, config.prompts, config.domains
    if source == SHIPPED:
        prompts = shipped_prompts([SEQUENCES] if tokenizer is None else domains)
    elif source == OWN:
        if not own:
            raise ValueError(
                f"prompts: {OWN} needs a pair with its own prompts: say {SHIPPED}, or name a file"
            )
        domain = SEQUENCES if tokenizer is None else OWN
        prompts = [Prompt(f"{OWN}-{i}", domain, tuple(tokens)) for i, tokens in enumerate(own)]
    else:
        prompts = read_prompts(Path(source).expanduser())
    found = by_domain(prompts, tokenizer, domains)
    for domain, several in found.items():
        if len(several) < config.num_prompts:
            log.warning("%s: %d of %d prompts are there", domain, len(several), config.num_prompts)
    return {domain: several[: config.num_prompts] for domain, several in found.items()}


def open_results(
    directory: Path, config: BenchConfig, manifest: Mapping[str, Any]
) -> ResultsWriter:
    """The results of a config, new or begun.

    Args:
        manifest: what `manifest.manifest` says.

    Raises:
        ValueError: the directory holds those of another config, machine or format.
    """
    values = {
        "name": config.name,
        **manifest,
        "config": config.to_dict(),
        **{name: {} for name in BY_PAIR},
    }
    return ResultsWriter.open(directory, values)


def run(
    config: BenchConfig,
    results: ResultsWriter,
    load: Callable[[str], BenchPair],
    say: Callable[[str], None] = log.debug,
) -> None:
    """Run what is missing of a benchmark.

    Args:
        load: gives a pair by its name; one is held at a time.
        say: told what is being done.

    Raises:
        ValueError: the only pair cannot be loaded. One of several is left out, and the manifest keeps why.
        OSError: nothing more can be written; what was finished stays.
        KeyboardInterrupt: Ctrl-C; the same.
    """
    for name in config.pairs:
        say(f"{name}: loading")
        try:
            pair = load(name)
        except FAILURES as error:
            if len(config.pairs) == 1:
                raise
            results.update(failed_pairs={**results.manifest["failed_pairs"], name: one_line(error)})
            log.warning("failed: %s: %s", name, one_line(error))
            continue
        _describe(pair, results)
        groups = pair.cases(config)
        missing = [
            sum(len(missing_repeats(case, config.repeats, results.known)) for case in group)
            for group in groups
        ]
        done, began = 0, time.monotonic()
        for group, wanted in zip(groups, missing, strict=True):
            options: dict[str, Any] = {
                "repeats": config.repeats,
                "warmup": config.warmup,
                "known": results.known,
            }
            for row in measure(group, **options) if wanted else ():
                results.append(row)
                done += 1
                left = (time.monotonic() - began) / done * (sum(missing) - done)
                say(f"{name}: {done} of {sum(missing)} runs, {left:.0f} s left")
        del pair


def _describe(pair: BenchPair, results: ResultsWriter) -> None:
    """Say in the manifest what the pair is, or refuse one that is not what it was."""
    name = pair.name
    prompts = {
        domain: {each.id: list(each.tokens) for each in s} for domain, s in pair.prompts.items()
    }
    manifest = {part: dict(results.manifest[part]) for part in BY_PAIR}
    if name in manifest["pairs"]:
        known = manifest["pairs"][name]
        drafts = known["draft_sha256"]  # a draft that could not be loaded has none
        changed = [fact for fact in ("dtype", "target_sha256") if known[fact] != pair.facts[fact]]
        changed += [
            draft
            for draft, found in pair.facts["draft_sha256"].items()
            if drafts.get(draft, found) != found
        ]
        if changed or manifest["prompts"][name] != prompts:
            what = [*changed, "prompts"][0]
            raise ValueError(
                f"{results.directory} was measured with another {what} of {name}: give the config another name"
            )
    manifest["pairs"].setdefault(name, pair.facts)
    manifest["prompts"].setdefault(name, prompts)
    manifest["failed_pairs"].pop(name, None)
    results.update(**manifest)

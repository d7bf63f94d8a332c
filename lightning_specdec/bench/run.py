"""A whole benchmark: each pair of its config is loaded and its cases run in turn.

Each finished row is on the disk before the next run. A run that was stopped resumes with what is
missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from lightning_specdec.bench.config import OWN, SHIPPED, BenchConfig
from lightning_specdec.bench.huggingface import HuggingFace
from lightning_specdec.bench.measure import FAILURES, Case, measure, planned_runs, windows_of
from lightning_specdec.bench.records import ASSISTED, GENERATE, SPECULATIVE, STANDARD
from lightning_specdec.bench.results import ResultsWriter
from lightning_specdec.bench.run_progress import RunProgress
from lightning_specdec.checkpoints.loading import find_device, load_pair
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.models import DEFAULT_DEVICE, advice_on_path, check_directory
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.prompts import (
    SEQUENCES,
    Prompt,
    by_domain,
    read_prompts,
    shipped_prompts,
)
from lightning_specdec.decoding.requests import check_prompt
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.weights import weights_digest
from lightning_specdec.rules import make_rule

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Prompts = Mapping[str, Sequence[Prompt]]
"""By domain."""
BY_PAIR = ("pairs", "prompts", "failed_pairs")
"""Entries of the manifest about each pair, added when it is loaded."""


@dataclass
class BenchPair:
    """A pair in the form that is measured.

    Args:
        name: in the config.
        target: packed.
        drafts: fused drafters by name, or the reason why a drafter cannot draft.
        prompts: those that are measured.
        eos: tokens that end a row.
        baseline: the same models for Hugging Face's methods; None if they are not of transformers.
        facts: what the manifest records of it.
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
        **fields: Any,
    ) -> BenchPair:
        """The pair in the form that decodes, from models as they were loaded.

        Args:
            drafts: drafters by name, or the reason why a drafter could not be loaded.
            fields: other fields of the pair.
        """
        target.eval()
        loaded_drafts: dict[str, Drafter] = {}
        for draft_name, draft in drafts.items():
            if isinstance(draft, Drafter):
                loaded_drafts[draft_name] = draft.eval()
        # The facts describe the weights before they are packed.
        facts = _facts(target, loaded_drafts)

        fused_drafts: dict[str, Drafter | str] = dict(drafts)
        for draft_name, draft in loaded_drafts.items():
            try:
                fused_drafts[draft_name] = draft.fused(target)
            except FAILURES as error:
                # The memory may be missing, for instance.
                fused_drafts[draft_name] = one_line(error)

        packed_target = target.packed()
        values: dict[str, Any] = {
            "baseline": _baseline(packed_target, fused_drafts),
            "facts": facts,
            **fields,
        }
        return cls(name, packed_target, fused_drafts, prompts, **values)

    def cases(self, config: BenchConfig) -> list[list[Case]]:
        """The cases of the matrix, in groups that are compared, standard decoding first in each.

        Windows that a draft cannot fill are replaced by those that it can, and rules with the same
        outcome are measured once.
        """
        groups = []
        for domain, temperature, batch_size in product(
            self.prompts, config.temperatures, config.batch_sizes
        ):
            decoding = DecodingConfig(
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                eos=() if config.ignore_eos else self.eos,
                seed=config.seed,
            )
            standard = Case(
                method=STANDARD,
                target=self.target,
                config=decoding,
                prompts=self.prompts[domain],
                pair=self.name,
                domain=domain,
                batch_size=batch_size,
            )
            speculative_cases = self._speculative_cases(standard, config)
            baseline_cases = self._baseline_cases(standard, config)
            groups.append([standard, *speculative_cases, *baseline_cases])
        return groups

    def _speculative_cases(self, standard: Case, config: BenchConfig) -> list[Case]:
        """Each draft with each rule and window, in the settings of standard decoding."""
        rules = _distinct_rules(config, greedy=standard.config.greedy)
        adaptive_windows = ["auto"] if "auto" in config.num_draft_tokens else []
        cases = []
        for draft_name, drafter in self.drafts.items():
            max_draft_tokens = drafter.max_draft_tokens if isinstance(drafter, Drafter) else None
            fixed_windows = windows_of(max_draft_tokens, _fixed_windows(config))
            for rule, window in product(rules, [*fixed_windows, *adaptive_windows]):
                cases.append(
                    replace(
                        standard,
                        method=SPECULATIVE,
                        config=standard.config.changed(rule=rule, num_draft_tokens=window),
                        drafter=drafter,
                        draft=draft_name,
                    )
                )
        return cases

    def _baseline_cases(self, standard: Case, config: BenchConfig) -> list[Case]:
        """Hugging Face's methods, each with its assistants and windows."""
        if self.baseline is None:
            return []
        cases = []
        for method in config.baselines:
            draft_names: Sequence[str | None] = [None]
            if method == ASSISTED:
                draft_names = list(self.baseline.assistants)
            windows: Sequence[int | None] = [None]
            if method != GENERATE:
                windows = _fixed_windows(config) or [DEFAULT_WINDOW]
            for draft_name, window in product(draft_names, windows):
                cases.append(
                    replace(
                        standard,
                        method=method,
                        baseline=self.baseline,
                        config=standard.config.changed(num_draft_tokens=window),
                        draft=draft_name,
                    )
                )
        return cases


def _facts(target: LanguageModel, drafts: Mapping[str, Drafter]) -> dict[str, Any]:
    """What the manifest records of a pair."""
    dtype = getattr(target, "dtype", None) or next(target.parameters()).dtype
    return {
        "target": type(getattr(target, "model", target)).__name__,
        "target_parameters": target.num_parameters,
        "backend": target.backend,
        "dtype": str(dtype).removeprefix("torch."),
        "target_sha256": weights_digest(target),
        "draft_parameters": {name: _num_parameters(draft) for name, draft in drafts.items()},
        "draft_sha256": {name: weights_digest(draft) for name, draft in drafts.items()},
    }


def _num_parameters(draft: Drafter) -> int | None:
    """The number of parameters that belong to the draft; None if it has none."""
    counts = [sum(parameter.numel() for parameter in draft.parameters())]
    for module in draft.modules():
        # A quantized model counts its parameters itself.
        if isinstance(module, LanguageModel):
            counts.append(module.num_parameters)
    return max(counts) or None


def _baseline(
    packed_target: LanguageModel, drafts: Mapping[str, Drafter | str]
) -> HuggingFace | None:
    """The models of transformers in a pair; None if its target is none."""
    model = getattr(packed_target, "model", None)
    if not hasattr(model, "generate"):
        return None
    assistants = {}
    for name, draft in drafts.items():
        # Subclasses draft in their own ways, which an assistant would not follow.
        if type(draft) is ModelDrafter and hasattr(draft.model, "model"):
            assistants[name] = draft.model.model
    return HuggingFace(model, assistants)


def _fixed_windows(config: BenchConfig) -> list[int]:
    return [window for window in config.num_draft_tokens if isinstance(window, int)]


def _distinct_rules(config: BenchConfig, *, greedy: bool) -> list[Any]:
    """The rules that differ in what they accept."""
    if not greedy:
        return list(config.rules)
    # Greedy, all lossless rules accept the same draft tokens: the first one stands for all.
    lossless_rules = [rule for rule in config.rules if make_rule(rule).lossless]
    return [rule for rule in config.rules if rule not in lossless_rules[1:]]


def check_pairs(config: BenchConfig) -> None:
    """Check that models, prompts and devices exist, before any model is loaded.

    Raises:
        ValueError or OSError: one of them does not.
    """
    find_device(config.device or DEFAULT_DEVICE)
    if config.prompts not in (OWN, SHIPPED):
        read_prompts(Path(config.prompts).expanduser())
    for name, pair in config.pairs.items():
        if pair.ckpt is not None:
            path = Path(pair.ckpt)
            if not path.exists():
                raise FileNotFoundError(
                    f"pairs.{name}.ckpt: there is no checkpoint {path}{advice_on_path(path)}"
                )
            # Opening it raises an error with the file's name.
            path.open("rb").close()
        elif pair.pair is not None:
            get_pair(pair.pair)
        else:
            check_directory(pair.target)


def with_engine_of_pairs(config: BenchConfig) -> BenchConfig:
    """The config with the device and the threads that its registered pairs name.

    What the config names itself stays. All pairs of a benchmark run on one device, with one number
    of threads, so that their figures can be compared.

    Raises:
        ValueError: two pairs name different ones.
    """
    registered = [get_pair(entry.pair) for entry in config.pairs.values() if entry.pair is not None]
    device = config.device
    if device is None:
        device = _shared_value("device", [pair.device for pair in registered]) or DEFAULT_DEVICE
    threads = config.threads
    if threads is None:
        threads = _shared_value("threads", [pair.threads for pair in registered])
    return replace(config, device=device, threads=threads)


def _shared_value(name: str, values: Sequence[Value | None]) -> Value | None:
    """The value that all pairs with one share; None if none of them has one."""
    named = [value for value in values if value is not None]
    different = list(dict.fromkeys(named))
    if len(different) > 1:
        listed = " and ".join(str(value) for value in different)
        raise ValueError(
            f"its pairs name different {name} ({listed}), and a benchmark runs all of them alike: "
            f"give it `{name}:` of its own"
        )
    return different[0] if different else None


def load_bench_pair(name: str, config: BenchConfig) -> BenchPair:
    """Load a pair of the config. A draft that cannot draft for the target is kept as the reason.

    Raises:
        ValueError: the target cannot be loaded, or the prompts do not exist.
    """
    pair = config.pairs[name]
    first_draft = next(iter(pair.drafts))
    # Lookup needs no draft model, so this loads the target and nothing else.
    target_source = pair.source(first_draft, config.device).changed(
        draft=None, drafter="NGramDrafter", draft_dtype=None, draft_quantization=None
    )
    # Packed later: transformers decodes with the same weights.
    loaded = load_pair(target_source, pack=False)
    target = loaded.target

    drafts: dict[str, Drafter | str] = {}
    for draft_name in pair.drafts:
        draft_source = pair.source(draft_name, config.device)
        try:
            drafts[draft_name] = load_pair(draft_source, target=target, pack=False).drafter
        except FAILURES as error:
            drafts[draft_name] = one_line(error)

    prompts = _prompts(target, loaded.prompts, config)
    for domain_prompts in prompts.values():
        for prompt in domain_prompts:
            check_prompt(prompt.tokens, target.vocab_size, f"prompt {prompt.id}")

    tokenizer_eos = () if target.tokenizer is None else target.tokenizer.eos
    eos = sorted(token for token in tokenizer_eos if token < target.vocab_size)
    return BenchPair.of(name, target, drafts, prompts, eos=tuple(eos))


def _prompts(
    target: LanguageModel,
    own_prompts: Sequence[Sequence[int]],
    config: BenchConfig,
) -> Prompts:
    """The prompts of the config that the target can read, by domain."""
    tokenizer = target.tokenizer
    if config.prompts == SHIPPED:
        prompts = shipped_prompts([SEQUENCES] if tokenizer is None else config.domains)
    elif config.prompts == OWN:
        if not own_prompts:
            raise ValueError(
                f"prompts: {OWN} needs a pair with its own prompts: say {SHIPPED}, or name a file"
            )
        domain = SEQUENCES if tokenizer is None else OWN
        prompts = []
        for i, tokens in enumerate(own_prompts):
            prompts.append(Prompt(f"{OWN}-{i}", domain, tuple(tokens)))
    else:
        prompts = read_prompts(Path(config.prompts).expanduser())

    selected = {}
    for domain, domain_prompts in by_domain(prompts, tokenizer, config.domains).items():
        num_available = len(domain_prompts)
        if num_available < config.num_prompts:
            log.warning("%s: %d of %d prompts are there", domain, num_available, config.num_prompts)
        selected[domain] = domain_prompts[: config.num_prompts]
    return selected


def open_results(
    directory: Path,
    config: BenchConfig,
    manifest: Mapping[str, Any],
) -> ResultsWriter:
    """The results of a config, new or resumed.

    Args:
        manifest: from `manifest.manifest`.

    Raises:
        ValueError: the directory has results of another config, machine or format.
    """
    entries = {"name": config.name, **manifest, "config": config.to_dict()}
    for entry in BY_PAIR:
        entries[entry] = {}
    return ResultsWriter.open(directory, entries)


def run(
    config: BenchConfig,
    results: ResultsWriter,
    load: Callable[[str], BenchPair],
    say: Callable[[str], None] = log.debug,
) -> None:
    """Run what is missing of a benchmark.

    Args:
        load: returns a pair by its name; one pair is held at a time.
        say: called with a line of progress.

    Raises:
        ValueError: the only pair cannot be loaded. One of several is left out, and the manifest
            records the reason.
        OSError: nothing more can be written; finished rows stay.
        KeyboardInterrupt: Ctrl-C; finished rows stay.
    """
    for name in config.pairs:
        say(f"{name}: loading")
        try:
            pair = load(name)
        except FAILURES as error:
            if len(config.pairs) == 1:
                raise
            failed_pairs = {**results.manifest["failed_pairs"], name: one_line(error)}
            results.update(failed_pairs=failed_pairs)
            log.warning("failed: %s: %s", name, one_line(error))
            continue
        _record_pair(pair, results)
        _run_pair(pair, config, results, say)
        # Its memory is free before the next pair is loaded.
        del pair


def _run_pair(
    pair: BenchPair,
    config: BenchConfig,
    results: ResultsWriter,
    say: Callable[[str], None],
) -> None:
    """Run what is missing of a pair."""
    groups = []
    num_runs: dict[Hashable, int] = {}
    way_of: dict[Hashable, Hashable] = {}
    for group in pair.cases(config):
        group_runs = planned_runs(
            group, repeats=config.repeats, warmup=config.warmup, known=results.known
        )
        # A group that is complete is not warmed up either.
        if sum(group_runs.values()):
            groups.append(group)
            num_runs.update(group_runs)
        for case in group:
            row = case.row(0)
            way_of[row.cell] = (row.method, row.draft, row.num_draft_tokens, row.rule)

    say(f"{pair.name}: measuring")
    with RunProgress(f"{pair.name}: measuring", num_runs, way_of) as progress:
        for group in groups:
            rows = measure(
                group,
                repeats=config.repeats,
                warmup=config.warmup,
                known=results.known,
                progress=progress,
            )
            for row in rows:
                results.append(row)


def _record_pair(pair: BenchPair, results: ResultsWriter) -> None:
    """Record a pair in the manifest.

    Raises:
        ValueError: the results were measured with other weights or prompts of that name.
    """
    prompts: dict[str, dict[str, list[int]]] = {}
    for domain, domain_prompts in pair.prompts.items():
        prompts[domain] = {prompt.id: list(prompt.tokens) for prompt in domain_prompts}

    manifest = {entry: dict(results.manifest[entry]) for entry in BY_PAIR}
    if pair.name in manifest["pairs"]:
        changes = _changed_facts(manifest["pairs"][pair.name], pair.facts)
        if manifest["prompts"][pair.name] != prompts:
            changes.append("prompts")
        if changes:
            raise ValueError(
                f"{results.directory} was measured with another {changes[0]} of {pair.name}: give "
                "the config another name"
            )

    manifest["pairs"].setdefault(pair.name, pair.facts)
    manifest["prompts"].setdefault(pair.name, prompts)
    # It may have failed in an earlier run.
    manifest["failed_pairs"].pop(pair.name, None)
    results.update(**manifest)


def _changed_facts(old_facts: Mapping[str, Any], new_facts: Mapping[str, Any]) -> list[str]:
    """The names of the models that differ from those of earlier rows."""
    changes = []
    for name in ("dtype", "target_sha256"):
        if old_facts[name] != new_facts[name]:
            changes.append(name)
    for draft_name, digest in new_facts["draft_sha256"].items():
        # A draft that could not be loaded in the earlier run has no digest there.
        old_digest = old_facts["draft_sha256"].get(draft_name, digest)
        if old_digest != digest:
            changes.append(draft_name)
    return changes

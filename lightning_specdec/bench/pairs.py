"""A pair of a benchmark's config, loaded: its models as they decode, its prompts, and its cases."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from torch import nn

from lightning_specdec.bench.config import OWN, SHIPPED, BenchConfig
from lightning_specdec.bench.huggingface import HuggingFace
from lightning_specdec.bench.measure import FAILURES, Case, in_one_line, windows_of
from lightning_specdec.bench.rows import ASSISTED, SPECULATIVE, STANDARD
from lightning_specdec.checkpoints.loading import find_device, load_pair
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import check_directory
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.data.prompts import Prompt, by_domain, read_prompts, shipped_prompts
from lightning_specdec.data.prompts.domains import SEQUENCES
from lightning_specdec.decoding.calibration import fingerprint
from lightning_specdec.decoding.rows import check_prompt
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import make_rule

log = logging.getLogger(__name__)
Prompts = Mapping[str, Sequence[Prompt]]
"""By domain."""
_IN_HASH = ("max_new_tokens", "ignore_eos", "seed", "warmup", "device", "threads")
NUM_DIGITS = 16
"""Hexadecimal digits of a cell's hash."""


@dataclass
class BenchPair:
    """A pair as it is measured.

    Args:
        name: in the config.
        target: packed.
        drafts: fused drafters by name; or why one of them cannot draft.
        prompts: those that are measured.
        others: those that predictions and Hugging Face's settings are taken from; none of `prompts`.
        eos: tokens that end a row.
        baseline: the same models for Hugging Face's methods; None where they are not of transformers.
        facts: what the manifest says of it.
    """

    name: str
    target: LanguageModel
    drafts: Mapping[str, Drafter | str]
    prompts: Prompts
    others: Prompts = field(default_factory=dict)
    eos: tuple[int, ...] = ()
    baseline: HuggingFace | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, target: LanguageModel, drafts: Mapping[str, Drafter | str], prompts: Prompts, **more: Any
    ) -> BenchPair:
        """The pair as it decodes, from models as they were loaded; `more` are other fields."""
        for module in (target, *drafts.values()):
            if isinstance(module, nn.Module):
                module.eval()
        origin, dtype = getattr(target, "origin", None), getattr(target, "dtype", None)
        kind = type(getattr(target, "model", target)).__name__
        facts: dict[str, Any] = {
            "target": kind if origin is None else f"{kind} {origin.source}",
            "target_parameters": target.num_parameters,
            "target_bytes": target.memory_bytes,
            "target_sha256": weights_digest(target),
            "dtype": str(dtype or next(target.parameters()).dtype).removeprefix("torch."),
            **{fact: {} for fact in ("draft_parameters", "draft_sha256", "max_draft_tokens")},
        }
        ready: dict[str, Drafter | str] = {}
        found: tuple[Any, ...]
        for key, draft in drafts.items():
            try:
                if isinstance(draft, str):
                    raise ValueError(draft)
                found = (_num_parameters(draft), weights_digest(draft), draft.max_draft_tokens)
                ready[key] = draft.fused()
            except FAILURES as error:  # the memory for it may be missing
                found, ready[key] = (None, None, None), in_one_line(error)
            for fact, value in zip(("draft_parameters", "draft_sha256", "max_draft_tokens"), found, strict=True):
                facts[fact][key] = value
        packed = target.packed()
        model = getattr(packed, "model", None)
        baseline = None
        if hasattr(model, "generate"):
            models = {key: each.model for key, each in ready.items() if type(each) is ModelDrafter}
            assistants = {key: each.model for key, each in models.items() if hasattr(each, "model")}
            baseline = HuggingFace(model, assistants)
        return cls(name, packed, ready, prompts, **{"baseline": baseline, "facts": facts, **more})

    def cases(self, config: BenchConfig) -> list[list[Case]]:
        """The cases of the matrix, in groups that are compared, standard decoding first in each.

        Windows that a draft cannot fill are those that it can, and rules that would do the same are one.
        """
        groups = []
        for domain, temperature, size in product(self.prompts, config.temperatures, config.batch_sizes):
            eos = () if config.ignore_eos else self.eos
            decoding = DecodingConfig(
                temperature=temperature, max_new_tokens=config.max_new_tokens, eos=eos, seed=config.seed
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
            for draft, drafter in self.drafts.items():
                numbers = [window for window in config.num_draft_tokens if isinstance(window, int)]
                windows = [*windows_of(self.facts["max_draft_tokens"][draft], numbers)] if numbers else []
                if "auto" in config.num_draft_tokens:
                    windows.append("auto")  # type: ignore[arg-type]
                for rule, window in product(_rules(config, temperature), windows):
                    chosen = decoding.changed(rule=rule, num_draft_tokens=window)
                    group.append(replace(standard, method=SPECULATIVE, config=chosen, drafter=drafter, draft=draft))
            for method in config.baselines if self.baseline is not None else ():
                names = self.baseline.assistants if method == ASSISTED else [None]  # type: ignore[union-attr]
                group += [replace(standard, method=method, baseline=self.baseline, draft=name) for name in names]
            groups.append([replace(case, cell=self._hash(case, config)) for case in group])
        return groups

    def _hash(self, case: Case, config: BenchConfig) -> str:
        """A hash of all that decides a case's outcome: its settings, weights and prompts."""
        entry = config.pairs[self.name].to_dict()
        drafts = entry.pop("drafts")
        return digest(
            {
                **{name: getattr(case, name) for name in ("method", "pair", "draft", "domain", "batch_size")},
                "config": {name: value for name, value in case.config.to_dict().items() if name != "processors"},
                "pair_settings": entry,
                "draft_settings": drafts.get(case.draft),
                "target_sha256": self.facts["target_sha256"],
                "draft_sha256": self.facts["draft_sha256"].get(case.draft),
                "dtype": self.facts["dtype"],
                "prompts": [list(prompt.tokens) for prompt in case.prompts],
                **{name: getattr(config, name) for name in _IN_HASH},
            }
        )


def check_pairs(config: BenchConfig) -> None:
    """Raise ValueError or OSError for models, prompts and devices that are not there, before any model is loaded."""
    find_device(config.device)
    for source in (config.prompts, config.other_prompts):
        if source not in (None, OWN, SHIPPED):
            read_prompts(Path(source).expanduser())
    for entry in config.pairs.values():
        if entry.ckpt is not None:
            open(entry.ckpt, "rb").close()
        elif entry.pair is not None:
            get_pair(entry.pair)
        else:
            check_directory(entry.target)


def load_bench_pair(name: str, config: BenchConfig, *, prompts: Prompts | None = None) -> BenchPair:
    """A pair of the config; a draft that cannot draft for the target is kept as the reason.

    Args:
        prompts: instead of those that the config names.

    Raises:
        ValueError: the target cannot be loaded, or there are no such prompts.
    """
    entry = config.pairs[name]
    alone = entry.source(next(iter(entry.drafts)), config.device)
    alone = alone.changed(draft=None, drafter="NGramDrafter", draft_dtype=None, draft_quantization=None)
    loaded = load_pair(alone, pack=False)  # packed later: transformers decodes with the same weights
    target = loaded.target
    drafts: dict[str, Drafter | str] = {}
    for draft in entry.drafts:
        try:
            drafts[draft] = load_pair(entry.source(draft, config.device), target=target, pack=False).drafter
        except FAILURES as error:
            drafts[draft] = in_one_line(error)
    others: Prompts = {}
    if prompts is None:
        prompts, others = _prompts(target, loaded.prompts, config)
    for prompt in chain(*prompts.values(), *others.values()):
        check_prompt(prompt.tokens, target.vocab_size, f"prompt {prompt.id}")
    eos = () if target.tokenizer is None else target.tokenizer.eos
    ends = tuple(sorted(token for token in eos if token < target.vocab_size))
    more = {} if config.baselines else {"baseline": None}
    return BenchPair.of(name, target, drafts, prompts, others=others, eos=ends, **more)


def digest(values: object) -> str:
    """A hash of plain values that does not depend on the order of names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]


def weights_digest(module: nn.Module) -> str:
    """A hash of a network's parts and weights; weights that lie in files go by those files' hashes."""
    found, known = hashlib.sha256(fingerprint(module).encode()), set()
    for name, part in module.named_modules():
        if (origin := getattr(part, "origin", None)) is not None:
            found.update(f"{name} {origin.sha256}".encode())
            known |= {id(tensor) for tensor in chain(part.parameters(), part.buffers())}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if id(tensor) not in known and tensor.numel():
            found.update(name.encode())
            plain = tensor.detach().cpu().contiguous()
            found.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return found.hexdigest()


def _num_parameters(draft: Drafter) -> int | None:
    """Those of its own; None where it has none."""
    models = [part for part in draft.modules() if isinstance(part, LanguageModel)]
    return max([sum(each.numel() for each in draft.parameters()), *(model.num_parameters for model in models)]) or None


def _rules(config: BenchConfig, temperature: float) -> list[Choice]:
    """Those that accept different draft tokens: greedy, all lossless rules accept the same."""
    lossless = [rule for rule in config.rules if make_rule(rule).lossless]
    return [rule for rule in config.rules if temperature > 0 or rule not in lossless[1:]]


def _prompts(target: LanguageModel, own: Sequence[Sequence[int]], config: BenchConfig) -> tuple[Prompts, Prompts]:
    """The prompts to measure, and the others."""
    found = _source(target, own, config.prompts, config.domains)
    measured = {domain: several[: config.num_prompts] for domain, several in found.items()}
    rest = {domain: several[config.num_prompts :] for domain, several in found.items()}
    if config.other_prompts is not None:
        rest = _source(target, own, config.other_prompts, config.domains)
    taken = {prompt.tokens for several in measured.values() for prompt in several}
    others = {}
    for domain, several in measured.items():
        if len(several) < config.num_prompts:
            log.warning("%s: %d prompts of the %d that are asked for", domain, len(several), config.num_prompts)
        if left := [prompt for prompt in rest.get(domain, ()) if prompt.tokens not in taken]:
            others[domain] = left[: config.num_other_prompts]
    return measured, others


def _source(
    target: LanguageModel, own: Sequence[Sequence[int]], source: str, domains: Sequence[str] | None
) -> dict[str, list[Prompt]]:
    """The prompts of a source, by domain."""
    tokenizer = target.tokenizer
    if source == SHIPPED:
        return by_domain(shipped_prompts([SEQUENCES] if tokenizer is None else domains), tokenizer, domains)
    if source == OWN:
        if not own:
            raise ValueError(f"prompts: {OWN} needs a pair with prompts of its own: say {SHIPPED}, or name a file")
        domain = SEQUENCES if tokenizer is None else OWN
        prompts = [Prompt(f"{OWN}-{i}", domain, tuple(tokens)) for i, tokens in enumerate(own)]
        return by_domain(prompts, tokenizer, domains)
    try:
        return by_domain(read_prompts(Path(source).expanduser()), tokenizer, domains)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error

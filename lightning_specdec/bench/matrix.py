"""The cells of a benchmark: what its config and its models come to, each under a hash of all that decides its outcome.

Knows nothing of files, nor of how a cell is run.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import Any

from torch import nn

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import RuleChoice
from lightning_specdec.bench.outside import Forms, Outside
from lightning_specdec.bench.prompts import Prompt
from lightning_specdec.bench.remembered import fingerprint
from lightning_specdec.bench.sweep import windows_of
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule

NUM_DIGITS = 16
"""Of a cell's hash, hexadecimal."""
_QUIET = "speculative"
"""The way that labels do not name."""


def digest(values: object) -> str:
    """A hash of plain values that does not depend on the order of names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]


def config_hash(config: BenchConfig) -> str:
    """A hash of a config that changes with any of its settings."""
    return digest(config.to_dict())


def weights_digest(module: nn.Module) -> str:
    """A hash of a network's parts and weights; weights that lie in files go by these files' own."""
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


@dataclass
class Subject:
    """A pair as it is measured.

    Args:
        name: in the config.
        target: as it shall decode, packed.
        drafts: by name, as they shall guess; or why one of them cannot.
        prompts: what is measured, by domain.
        others: what alpha and settings are taken from; none of the prompts.
        stops: tokens that end a row.
        outside: the same target and models of drafts, for transformers' own ways; None where they are not of it.
        rolled: the target as fused as a draft.
        facts: what the manifest says of it.
    """

    name: str
    target: LanguageModel
    drafts: Mapping[str, Drafter | str]
    prompts: Mapping[str, Sequence[Prompt]]
    others: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    outside: Outside | None = None
    rolled: ModelDrafter | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        target: LanguageModel,
        drafts: Mapping[str, Drafter | str],
        *,
        prompts: Mapping[str, Sequence[Prompt]],
        others: Mapping[str, Sequence[Prompt]] | None = None,
        stops: Sequence[int] = (),
        outside: bool = False,
        rolled: bool = False,
    ) -> Subject:
        """The pair in the forms that decode fastest.

        Args:
            target, drafts: as they were loaded, not packed.
            outside: whether transformers shall decode with it too.
            rolled: whether the target alone shall be rolled out too.
        """
        for module in (target, *drafts.values()):
            if isinstance(module, nn.Module):
                module.eval()
        facts = {
            "target": _named(target),
            "target_parameters": target.num_parameters,
            "target_bytes": target.memory_bytes,
            "target_sha256": weights_digest(target),
            "dtype": str(getattr(target, "dtype", None) or next(target.parameters()).dtype).removeprefix("torch."),
            "draft_parameters": {key: _num_parameters(each) for key, each in drafts.items()},
            "draft_sha256": {
                key: weights_digest(each) if isinstance(each, Drafter) else None for key, each in drafts.items()
            },
        }
        ready = target.packed()
        guessing = {key: each.fused() if isinstance(each, Drafter) else each for key, each in drafts.items()}
        assistants = {
            key: forms for key, each in drafts.items() if (forms := _assistant(each, guessing[key])) is not None
        }
        baseline = _forms(target, ready) if outside else None
        return cls(
            name,
            ready,
            guessing,
            prompts,
            others or {},
            tuple(stops),
            None if baseline is None else Outside(baseline, assistants),
            ModelDrafter(target).fused() if rolled else None,
            facts,
        )


@dataclass(frozen=True)
class Cell:
    """One place of the matrix.

    Args:
        way: standard, rolled, speculative, generate, assisted or prompt_lookup.
        hash: of all that decides its outcome: see `cells`.
    """

    pair: str
    way: str
    domain: str
    temperature: float
    batch_size: int
    draft: str | None = None
    num_draft_tokens: int | str | None = None
    rule: RuleChoice | None = None
    hash: str = ""

    @property
    def group(self) -> tuple[str, float, int]:
        """What it is compared within; its cells take turns."""
        return self.domain, self.temperature, self.batch_size

    def make_rule(self) -> AcceptanceRule | None:
        """What keeps or rejects guesses; None where nothing of ours does."""
        return None if self.rule is None else self.rule.make()

    @property
    def label(self) -> str:
        """What differs within its group, in a few words."""
        parts = ["" if self.way == _QUIET else self.way, self.draft, self.num_draft_tokens]
        return " ".join(str(part) for part in [*parts, self.rule and self.rule.label] if part)


def cells(config: BenchConfig, subject: Subject) -> list[list[Cell]]:
    """The cells of a pair, in groups that take turns, standard decoding first in each.

    A cell's hash is one of its own settings, of its pair's in the config, of the weights and of the prompts' tokens.
    Windows that a draft cannot fill are what it can.
    """
    groups = []
    for domain, temperature, size in product(subject.prompts, config.temperatures, config.batch_sizes):
        place = (domain, temperature, size)
        group = [Cell(subject.name, "standard", *place)]
        if subject.rolled is not None:
            group.append(Cell(subject.name, "rolled", *place))
        for draft, drafter in subject.drafts.items():
            for rule, window in product(config.rules, _windows(config, drafter)):
                group.append(Cell(subject.name, "speculative", *place, draft, window, rule))
        if subject.outside is not None:
            for way in config.outside:
                names = subject.outside.assistants if way == "assisted" else [None]
                group += [Cell(subject.name, way, *place, name) for name in names]
        groups.append([_hashed(cell, config, subject) for cell in group])
    return groups


def _windows(config: BenchConfig, drafter: Drafter | str) -> list[int | str]:
    numbers = [window for window in config.num_draft_tokens if isinstance(window, int)]
    if isinstance(drafter, Drafter):
        numbers = windows_of(drafter, numbers)
    return [*numbers, *(window for window in config.num_draft_tokens if isinstance(window, str))]


def _hashed(cell: Cell, config: BenchConfig, subject: Subject) -> Cell:
    pair = asdict(config.pairs[cell.pair])
    drafts = pair.pop("drafts")
    settings = {name: value for name, value in asdict(cell).items() if name != "hash"}
    settings |= {
        "pair_settings": pair,
        "draft_settings": drafts[cell.draft] if cell.draft is not None else None,
        "target_sha256": subject.facts["target_sha256"],
        "draft_sha256": subject.facts["draft_sha256"].get(cell.draft),
        "prompts": [list(prompt.tokens) for prompt in subject.prompts[cell.domain]],
        "stops": list(subject.stops),
        "dtype": subject.facts["dtype"],
    }
    settings |= {name: getattr(config, name) for name in ("max_new_tokens", "seed", "warmup", "device", "threads")}
    return Cell(**{**vars(cell), "hash": digest(settings)})


def _named(target: LanguageModel) -> str:
    origin = getattr(target, "origin", None)
    kind = type(getattr(target, "model", target)).__name__
    return kind if origin is None else f"{kind} {origin.source}"


def _num_parameters(draft: Drafter | str) -> int | None:
    """Those of its own; None where it has none."""
    if isinstance(draft, str):
        return None
    models = [part for part in draft.modules() if isinstance(part, LanguageModel)]
    return max([sum(each.numel() for each in draft.parameters()), *(model.num_parameters for model in models)]) or None


def _forms(plain: LanguageModel, ready: LanguageModel) -> Forms | None:
    """The model of transformers behind one of ours; None where there is none."""
    models = [getattr(each, "model", None) for each in (plain, ready)]
    return Forms(*models) if all(hasattr(model, "generate") for model in models) else None


def _assistant(draft: Drafter | str, ready: Drafter | str) -> Forms | None:
    """What can assist in a draft's stead: its model, where that shares the target's vocabulary."""
    if type(draft) is not ModelDrafter or not isinstance(ready, ModelDrafter):
        return None
    return _forms(draft.model, ready.model)

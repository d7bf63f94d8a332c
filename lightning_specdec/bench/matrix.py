"""The cells of a benchmark: what its config and models come to, each under a hash of all that decides its outcome."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import product

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import ASSISTED, ROLLED, SPECULATIVE, STANDARD, RuleChoice
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.sweep import windows_up_to
from lightning_specdec.rules import AcceptanceRule

NUM_DIGITS = 16
"""Of a cell's hash, hexadecimal."""


def digest(values: object) -> str:
    """A hash of plain values that does not depend on the order of names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]


def config_hash(config: BenchConfig) -> str:
    """A hash of a config that changes with any of its settings."""
    return digest(config.to_dict())


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
        parts = ["" if self.way == SPECULATIVE else self.way, self.draft, self.num_draft_tokens]
        return " ".join(str(part) for part in [*parts, self.rule and self.rule.label] if part)


def cells(config: BenchConfig, subject: Subject) -> list[list[Cell]]:
    """The cells of a pair, in groups that take turns, standard decoding first in each.

    A cell's hash is one of its own settings, of its pair's in the config, of the weights and of the prompts' tokens; of
    a draft that could not be made ready, the weights are those that it had before, or none.
    Windows that a draft cannot fill are what it can, and rules that would do the same are one.
    """
    groups = []
    for domain, temperature, size in product(subject.prompts, config.temperatures, config.batch_sizes):
        place = (domain, temperature, size)
        group = [Cell(subject.name, STANDARD, *place)]
        if subject.rolled is not None:
            group.append(Cell(subject.name, ROLLED, *place))
        for draft in subject.drafts:
            windows = _windows(config, subject.facts["max_draft_tokens"][draft])
            for rule, window in product(_rules(config, temperature), windows):
                group.append(Cell(subject.name, SPECULATIVE, *place, draft, window, rule))
        if subject.outside is not None:
            for way in config.outside:
                names = subject.outside.assistants if way == ASSISTED else [None]
                group += [Cell(subject.name, way, *place, name) for name in names]
        groups.append([_hashed(cell, config, subject) for cell in group])
    return groups


def _rules(config: BenchConfig, temperature: float) -> list[RuleChoice]:
    """Those that keep different guesses: greedy, all lossless rules keep what the target says."""
    first = next((rule for rule in config.rules if rule.make().lossless), None)
    return [rule for rule in config.rules if temperature > 0 or rule is first or not rule.make().lossless]


def _windows(config: BenchConfig, most: int | None) -> list[int | str]:
    numbers = [window for window in config.num_draft_tokens if isinstance(window, int)]
    return [*windows_up_to(most, numbers), *(each for each in config.num_draft_tokens if isinstance(each, str))]


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
    names = ("max_new_tokens", "ignore_eos", "seed", "warmup", "device", "threads")
    settings |= {name: getattr(config, name) for name in names}
    return Cell(**{**vars(cell), "hash": digest(settings)})

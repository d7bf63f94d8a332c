"""The settings of decoding: sampling, draft tokens, acceptance rule, stopping, and seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_specdec.config.settings import Settings, check, check_names, setting

MAX_TOKENS = 2**20
"""Largest number of tokens that any setting accepts."""

MIN_TEMPERATURE = 1e-6
MAX_REPETITION_PENALTY = 1000.0
"""Beyond this, and below its reciprocal, scores could overflow."""
"""Smallest temperature that is not 0. Dividing logits by a smaller one could overflow."""


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """How to draw a token from logits.

    The settings apply in this order: repetition penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = setting(0.0, "divide logits by this; 0 is greedy", minimum=0)
    top_k: int | None = setting(None, "keep only the k most likely tokens", minimum=1)
    top_p: float | None = setting(
        None,
        "keep the smallest set of most likely tokens with this total probability",
        above=0,
        maximum=1,
    )
    min_p: float | None = setting(
        None,
        "keep tokens at least this many times as likely as the most likely one",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float | None = setting(
        None,
        "divide the scores of tokens already in the text by this",
        minimum=1 / MAX_REPETITION_PENALTY,
        maximum=MAX_REPETITION_PENALTY,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least 1e-06, got {self.temperature:g}: "
                "use 0 for greedy"
            )

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0, so that nothing is drawn at random."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(SamplingSettings):
    """All settings of a decoding call.

    Methods that accept a config also accept its fields as keyword arguments.

    `num_draft_tokens` is an integer, "auto" (`SpeculativeDecoder` only), or a `Window`. `rule` is
    an `AcceptanceRule`, or a name or import path, with settings as
    `{"class_path": NAME, "init_args": {...}}`. `eos` and `stop` accept single values.

    Raises:
        ValueError: a field has the wrong type or is out of range.
    """

    max_new_tokens: int = setting(
        64, "generate at most this many tokens per prompt", minimum=1, maximum=MAX_TOKENS
    )
    num_draft_tokens: Any = setting(
        None,
        "draft tokens per round, or auto; default: those of the pair, else auto, or of small "
        "targets those of the draft, else 3",
        metavar="INT|auto",
    )
    rule: Any = setting(None, "acceptance rule; default: ExactMatch", metavar="RULE")
    eos: tuple[int, ...] | None = setting(
        None, "token that ends a row; default: that of the tokenizer; repeatable"
    )
    stop: tuple[str, ...] = setting(
        (), "stop where the output contains this text, which is left out; repeatable"
    )
    seed: int = setting(0, "the same seed produces the same tokens", minimum=0, maximum=2**63 - 1)
    logprobs: bool = setting(False, "report each token's log probability under the target")
    processors: tuple[Any, ...] = setting(())
    """Logits processors as in transformers: functions of a prefix `[1, T]` and its scores `[1, V]`
    that return new scores."""

    def __post_init__(self) -> None:
        for name, value in _with_tuples(vars(self)).items():
            object.__setattr__(self, name, value)
        super().__post_init__()

        if "" in self.stop:
            raise ValueError("a stop string is empty: give at least one character")

        # Anything else is a `Window`, which checks itself.
        if isinstance(self.num_draft_tokens, int | float | str):
            limits = {"minimum": 1, "maximum": MAX_TOKENS, "choices": ("auto",)}
            check("num_draft_tokens", self.num_draft_tokens, int | str, limits)

    @classmethod
    def of(cls, config: DecodingConfig | None = None, **changes: Any) -> DecodingConfig:
        """Return the config with the fields in `changes` replaced.

        Without a config, return a new one with these fields. `sampling=` sets all sampling fields
        from a `SamplingSettings` or `Sampling`.

        Raises:
            ValueError: a name is not a field, or a value is wrong.
        """
        if not isinstance(config, cls | None):
            raise ValueError(
                f"config must be a {cls.__name__}, got {config!r}: give its fields by name"
            )

        sampling = changes.pop("sampling", None)
        if sampling is not None:
            sampling_fields = {
                field.name: getattr(sampling, field.name, None)
                for field in fields(SamplingSettings)
            }
            processors = tuple(getattr(sampling, "processors", ()))
            changes = {**sampling_fields, "processors": processors, **changes}

        changes = _with_tuples(changes)
        check_names(changes, cls)
        if config is None:
            return cls(**changes)
        if not changes:
            return config
        return config.changed(**changes)

    @property
    def sampling(self) -> SamplingSettings:
        """The sampling fields only. `Sampling.of` also reads the processors."""
        values = {field.name: getattr(self, field.name) for field in fields(SamplingSettings)}
        return SamplingSettings(**values)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a single `eos` or `stop`, or another iterable of them, by a tuple."""
    converted = dict(values)
    for name, single_type in (("eos", int), ("stop", str)):
        value = converted.get(name)
        if isinstance(value, single_type):
            converted[name] = (value,)
        elif isinstance(value, Iterable):
            converted[name] = tuple(value)
    return converted

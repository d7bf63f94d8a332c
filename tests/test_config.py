"""Laws of settings, kinds and configs: fields decide everything, and errors name what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest

from lightning_specdec.config.decoding import DecodingConfig, SamplingSettings
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.settings import Settings, parse, setting


@dataclass(frozen=True)
class Inner(Settings):
    size: int = setting(minimum=1)


@dataclass(frozen=True)
class Outer(Settings):
    inner: Inner
    rate: float = setting(0.5, above=0, maximum=1)
    word: str = setting("a", choices=("a", "bee"))
    tokens: tuple[int, ...] = setting((), minimum=0)
    flag: bool = False


def test_settings_go_through_plain_values_and_back() -> None:
    settings = Outer.from_dict({"inner": {"size": 3}, "rate": 1, "tokens": [1, 2]})
    assert settings == Outer(Inner(3), 1.0, tokens=(1, 2))
    assert isinstance(settings.rate, float)
    assert Outer.from_dict(settings.to_dict()) == settings
    assert settings.changed(flag=True).flag


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"size": 0}}, "inner.size must be at least 1"),
        ({"inner": {}}, "inner.size is missing"),
        ({"inner": 5}, "inner must be a mapping"),
        ({"inner": {"size": 1}, "rate": 0}, "rate must be in"),
        ({"inner": {"size": 1}, "word": "bea"}, "did you mean bee"),
        ({"inner": {"size": 1}, "tokens": [-1]}, "tokens must be"),
        ({"inner": {"size": 1}, "flag": 1}, "flag must be"),
        ({"inner": {"size": 1}, "rat": 1}, "rat: did you mean rate"),
        ([1], "must be a mapping"),
    ],
)
def test_a_wrong_value_is_named(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outer.from_dict(values)


def test_words_of_a_command_line_are_parsed_by_their_field() -> None:
    assert parse("3", int) == 3
    assert parse("0.5", float) == 0.5
    assert parse("true", bool) is True
    assert parse("none", int | None) is None
    assert parse("none", str | None) == "none"


@pytest.mark.parametrize(
    ("word", "hint", "description"),
    [("x", int | None, "an integer or none"), ("1_000", int, "int"), (" 7", float, "a number")],
)
def test_a_word_of_another_type_is_refused(word: str, hint: Any, description: str) -> None:
    with pytest.raises(ValueError, match=f"must be .*{description}"):
        parse(word, hint)


def test_a_decoding_config_takes_changes_and_a_sampling_at_once() -> None:
    config = DecodingConfig.of(None, eos=3, stop="x", sampling=SamplingSettings(0.7, top_k=2))
    assert config.eos == (3,)
    assert config.stop == ("x",)
    assert config.temperature == 0.7
    assert config.top_k == 2
    assert DecodingConfig.of(config) is config
    assert DecodingConfig.of(config, seed=1).top_k == 2

    # The shape checker looks at types before single values are converted.
    jaxtyping.config.update("jaxtyping_disable", True)
    from_values = DecodingConfig(eos=3, stop="x")  # type: ignore[arg-type]
    assert from_values == DecodingConfig.from_dict({"eos": 3, "stop": "x"})
    with pytest.raises(ValueError, match="eos must be a list of integers or none, got 1.5"):
        DecodingConfig(eos=1.5)  # type: ignore[arg-type]
    message = "config must be a DecodingConfig, got 'auto': give its fields by name"
    with pytest.raises(ValueError, match=message):
        DecodingConfig.of("auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean seed"):
        DecodingConfig.of(config, sead=1)
    with pytest.raises(ValueError, match="auto or an integer"):
        DecodingConfig.of(config, num_draft_tokens="many")


def test_kinds_are_found_by_name_and_paths_only_where_they_are_trusted() -> None:
    drafter_class = DRAFTERS.load("NGramDrafter")
    assert DRAFTERS.name_of(drafter_class) == "NGramDrafter"
    assert "ExactMatch" in RULES
    with pytest.raises(ValueError, match="did you mean NGramDrafter"):
        DRAFTERS.check("NGramDraftr")
    with pytest.raises(ValueError, match="never imported from a file"):
        DRAFTERS.load("os.system", trusted=False)
    with pytest.raises(ValueError, match="is not a Drafter"):
        DRAFTERS.load("os.system")
    with pytest.raises(ValueError, match="cannot import"):
        DRAFTERS.load("no_such.Thing")
    with pytest.raises(ValueError, match="has no propose: write it"):
        DRAFTERS.load("lightning_specdec.drafters.Drafter")
    with pytest.raises(ValueError, match="has no judge: write it"):
        RULES.load("lightning_specdec.rules.AcceptanceRule")


def test_a_choice_is_read_from_every_form() -> None:
    assert Choice.read("A", "drafter") == Choice("A")
    assert Choice.read({"class_path": "A"}, "drafter") == Choice("A")
    with_settings = Choice.read({"class_path": "A", "init_args": {"k": 1}}, "drafter")
    assert with_settings.label == "A(k=1)"
    with pytest.raises(ValueError, match="drafter must be a name"):
        Choice.read(5, "drafter")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "got none"),
        ({"ckpt": "a", "pair": "b"}, "got --ckpt and --pair"),
        ({"ckpt": "a", "quantization": "int8"}, "--quantization is for pretrained"),
        ({"target": 5}, "target must be a model's name"),
        ({"target": "a", "drafter": "Oracle"}, "no drafter 'Oracle'"),
    ],
)
def test_models_are_named_one_way(names: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairSource(**names)

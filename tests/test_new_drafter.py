"""A user's drafter, in a module outside the package, works wherever one of ours does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.rules import ExactMatch, Sampling, make_rule

NAME = "habit_drafter.HabitDrafter"
SOURCE = '''
from dataclasses import dataclass

import torch
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import Drafter
from lightning_specdec.rules import Draft


@dataclass(frozen=True)
class HabitSettings(Settings):
    period: int = setting(2, "how far back it looks", minimum=1, maximum=9)


class HabitDrafter(Drafter):
    """Repeats the token `period` positions before."""

    Settings = HabitSettings

    def propose(self, state, request, windows, sampling):
        texts = [list(text) for text in request.texts]
        for text in texts:
            for _ in range(max(windows)):
                text.append(text[-min(len(text), self.settings.period)])
        tokens = torch.tensor([text[len(before):] for text, before in zip(texts, request.texts)])
        return Draft(tokens, torch.tensor(windows))

    def needs_noise(self, sampling):
        return False
'''


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Any]]:
    directory = tmp_path_factory.mktemp("others")
    (directory / "habit_drafter.py").write_text(SOURCE)
    sys.path.insert(0, str(directory))
    yield importlib.import_module("habit_drafter").HabitDrafter
    sys.path.remove(str(directory))
    del sys.modules["habit_drafter"]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, top_k=6)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("target", ["rnn", "transformer", "gemma3"])
def test_it_meets_the_laws(kind: type[Any], target: str, sampling: Sampling) -> None:
    for window in (1, 3, 8):
        options: dict[str, Any] = {
            "max_new_tokens": 10,
            "num_draft_tokens": window,
            "sampling": sampling,
        }
        model = cases.target(target)
        drafter = kind(period=3)
        batch = speculative_decode(model, drafter, cases.PROMPTS, eos=cases.EOS, **options)
        assert batch.tokens == cases.standard(target, sampling, 10).tokens
        row = speculative_decode(
            model, drafter, cases.PROMPTS[1], indices=[1], eos=cases.EOS, **options
        ).rows[0]
        assert (row.tokens, row.rounds) == (batch.rows[1].tokens, batch.rows[1].rounds)


def test_its_import_path_names_it_and_its_settings_are_checked(kind: type[Any]) -> None:
    assert DRAFTERS.load(NAME) is kind and DRAFTERS.name_of(kind) == NAME
    drafter = kind.for_target(cases.target("rnn"), period=4)
    assert drafter.settings.period == 4 and drafter.arguments() == {"period": 4}
    for wrong in ({"period": 0}, {"priod": 1}):
        with pytest.raises(ValueError, match="period"):
            kind(**wrong)
    with pytest.raises(ValueError, match="takes no draft model"):
        kind.for_target(cases.target("rnn"), cases.target("rnn"))
    with pytest.raises(ValueError, match="cannot import"):
        DRAFTERS.load("habit_drafter.Missing")
    with pytest.raises(ValueError, match="is not a Drafter"):
        DRAFTERS.load("lightning_specdec.rules.ExactMatch")
    with pytest.raises(
        ValueError, match="did you mean NGramDrafter"
    ):  # never another kind in its place
        DRAFTERS.load("NGramDraftr")


def test_a_decoder_takes_its_name_and_a_file_gives_it_back_to_who_names_it(
    kind: type[Any], tmp_path: Path
) -> None:
    path = tmp_path / "own.safetensors"
    target = cases.target("rnn")
    named = SpeculativeDecoder.from_pretrained(target, drafter=Choice(NAME, {"period": 3}))
    assert type(named.drafter) is kind and named.drafter.settings.period == 3
    expected = named.decode(cases.PROMPTS, max_new_tokens=9)
    assert expected.tokens == named.decode_standard(cases.PROMPTS, max_new_tokens=9).tokens
    checkpoint.save(path, target, kind(period=3))
    with pytest.raises(ValueError, match="never imported from a file"):
        checkpoint.load(path)
    loaded = checkpoint.load(path, drafter=NAME)
    assert type(loaded.drafter) is kind and loaded.drafter.arguments() == {"period": 3}
    again = SpeculativeDecoder.from_checkpoint(path, drafter=NAME)
    assert again.decode(cases.PROMPTS, max_new_tokens=9).tokens == expected.tokens


def test_every_kind_that_is_found_in_the_rooms_goes_through_the_laws() -> None:
    tested_kinds = {type(cases.drafter(name, target)) for target, name in cases.ONE_EACH}
    assert {*DRAFTERS} == {
        kind.__name__ for kind in tested_kinds if kind.__module__.startswith("lightning_specdec.")
    }
    assert all(DRAFTERS.load(name).__name__ == name and DRAFTERS.summary(name) for name in DRAFTERS)
    assert {"ExactMatch", "RejectionSampling"} <= {*RULES} == {*cases.RULES}


def test_a_decoder_takes_a_kind_by_its_name_too(kind: type[Any]) -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(target, {"class_path": NAME, "init_args": {"period": 3}})
    assert type(decoder.drafter) is kind and decoder.drafter.settings.period == 3
    assert type(decoder.with_drafter("NGramDrafter").drafter) is NGramDrafter
    for wrong, message in (
        ("NGramDraftr", "did you mean NGramDrafter"),
        (3, "drafter must be a name"),
        (kind, "HabitDrafter is a class: call it"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.with_drafter(wrong)  # type: ignore[arg-type]
    assert (
        Choice(NAME, {"period": 3}).label == f"{NAME}(period=3)"
        and Choice("NGramDrafter").label == "NGramDrafter"
    )


def test_a_rule_is_made_from_nothing_a_name_a_choice_or_itself() -> None:
    assert type(make_rule(None)) is ExactMatch
    assert type(make_rule("RejectionSampling")).__name__ == "RejectionSampling"
    rule = make_rule(Choice("TypicalAcceptance", {"delta": 0.2}))
    assert rule.settings.to_dict() == {"epsilon": 0.09, "delta": 0.2} and make_rule(rule) is rule
    for wrong in (
        "RejectSampling",
        Choice("EpsilonThreshold", {"epsilon": 0}),
        Choice("ExactMatch", {"epsilon": 0.1}),
    ):
        with pytest.raises(ValueError, match="RejectionSampling|epsilon"):
            make_rule(wrong)

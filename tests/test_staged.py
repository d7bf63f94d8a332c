"""Laws of staged drafts: the tokens are those of the last stage alone, and none is read twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import pytest
import torch
from test_rounds import Interrupted, Reads
from test_states import assert_close
from tiny_vocabularies import cross
from torch import Tensor

from lightning_specdec import models
from lightning_specdec.checkpoints import networks
from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.decoding import Session, open_session, run
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    StagedDrafter,
    TargetContext,
)
from lightning_specdec.drafters.base import JointState
from lightning_specdec.models import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Sampling


def penalize(prefix: Tensor, scores: Tensor) -> Tensor:
    """A processor that makes the tokens of the text less likely."""
    return scores.scatter_add(1, prefix, torch.full(prefix.shape, -0.5))


SAMPLINGS = {
    "greedy": Sampling(),
    "t1": Sampling(1.0),
    "top_k": Sampling(1.0, top_k=3),
    "processors": Sampling(1.0, top_p=0.9, processors=[penalize]),
}
LLAMA = cases.target("llama")


def middle(name: str = "transformer") -> LanguageModel:
    return cases.near(cases.target(name))


FIRST: dict[str, Callable[[LanguageModel], Drafter]] = {
    "near": lambda model: ModelDrafter(cases.near(model, seed=9)),
    "small": cases.small,
    "itself": ModelDrafter,
    "hotter": lambda model: ModelDrafter(cases.near(model), sampling=Sampling(1.5)),
    "ragged": lambda model: cases.Ragged(model),
    "wrong": lambda model: cases.AlwaysWrong(model),
    "ngram": lambda model: NGramDrafter(),
    "cross": lambda model: cross(cases.near(model)),
}
"""First stages, by the model that they draft for."""


class Twins(Drafter):
    """Drafts in stages and with the last stage alone, and compares the two."""

    gives_logits = True

    def __init__(self, staged: StagedDrafter) -> None:
        super().__init__()
        self.staged = staged
        self.alone = staged.larger
        self.num_compared = 0

    @property
    def inside_target(self) -> bool:  # type: ignore[override]
        return self.staged.inside_target

    def check_target(self, target: LanguageModel) -> None:
        self.staged.check_target(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.staged.needs_noise(sampling)

    def arguments(self) -> dict[str, Any]:
        return {}

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> DraftState:
        alone, staged = (
            each.init_state(batch_size, max_length, context) for each in (self.alone, self.staged)
        )
        return JointState(alone, staged)

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        assert isinstance(state, JointState)
        alone = self.alone.propose(state.states[0], request, windows, sampling)
        staged = self.staged.propose(state.states[1], request, windows, sampling)
        assert staged.tokens.shape == alone.tokens.shape
        assert (staged.lengths is None) == (alone.lengths is None) and (staged.probs is None) == (
            alone.probs is None
        )
        for row, window in enumerate(windows):
            assert staged.tokens[row, :window].tolist() == alone.tokens[row, :window].tolist()
            for values, expected in ((staged.probs, alone.probs), (staged.logits, alone.logits)):
                if values is not None and expected is not None:
                    torch.testing.assert_close(
                        values[row, :window], expected[row, :window], rtol=1e-5, atol=1e-5
                    )
            self.num_compared += window
        if staged.lengths is not None:
            assert staged.lengths.tolist() == list(windows)
        return staged

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, JointState)
        self.alone.observe(state.states[0], output, num_accepted)
        self.staged.observe(state.states[1], output, num_accepted)


def compare(
    target: LanguageModel,
    staged: StagedDrafter,
    sampling: Sampling,
    window: int,
    rule: str,
) -> None:
    """Compare every round's tokens, while rows join, leave and end at different times."""
    twins = Twins(staged)
    session = Session(
        target,
        twins,
        max_length=40,
        rule=cases.RULES[rule](),
        sampling=sampling,
        num_draft_tokens=window,
        eos=cases.EOS,
        seed=7,
    )
    for prompt in cases.PROMPTS:
        session.add(prompt, max_new_tokens=9)
        session.step()
    session.cancel(session.live[0])
    session.add([6, 6, 6], max_new_tokens=12)
    while session.live:
        session.step()
    assert twins.num_compared >= 10


@pytest.mark.parametrize(
    ("target", "window", "sampling"),
    [
        *zip(["rnn"] * 5, range(1, 6), ["t1", "greedy", "top_k", "t1", "processors"], strict=True),
        *(("transformer", 6, name) for name in SAMPLINGS),
    ],
)
def test_a_staged_draft_proposes_what_its_last_stage_proposes_alone(
    target: str,
    window: int,
    sampling: str,
) -> None:
    model = middle(target)
    staged = StagedDrafter([FIRST["near"](model), ModelDrafter(model)], stage_windows=3)
    compare(cases.target(target), staged, SAMPLINGS[sampling], window, "RejectionSampling")


@pytest.mark.parametrize("first", FIRST)
def test_so_it_does_whatever_its_first_stage_is(first: str) -> None:
    model = middle("rnn")
    staged = StagedDrafter([FIRST[first](model), ModelDrafter(model)], stage_windows=3)
    compare(cases.target("rnn"), staged, SAMPLINGS["processors"], 5, "EpsilonThreshold")


@pytest.mark.parametrize("sampling", ["t1", "processors"])
def test_so_it_does_with_three_stages(sampling: str) -> None:
    model = middle()
    stages = [
        NGramDrafter(),
        cases.small(model),
        ModelDrafter(model, sampling=Sampling(1.3, top_k=4)),
    ]
    compare(
        cases.target("rnn"),
        StagedDrafter(stages, stage_windows=2),
        SAMPLINGS[sampling],
        6,
        "RejectionSampling",
    )


@pytest.mark.parametrize(
    ("first", "sampling"), [("near", "greedy"), ("near", "t1"), ("ngram", "processors")]
)
def test_so_it_does_over_the_targets_own_lower_layers(first: str, sampling: str) -> None:
    smaller = FIRST[first](cases.target("rnn"))
    compare(
        LLAMA,
        StagedDrafter([smaller, EarlyExitDrafter(2)], stage_windows=2),
        SAMPLINGS[sampling],
        5,
        "ExactMatch",
    )


def test_what_lower_layers_hand_on_is_what_they_make_of_the_drafts_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked_lengths: list[int] = []
    forward = HuggingFaceLM.forward

    def spy(
        self: HuggingFaceLM,
        tokens: Tensor,
        state: Any = None,
        exit_states: ExitStates | None = None,
        **options: Any,
    ) -> ModelOutput:
        if exit_states is None:
            return forward(self, tokens, state, **options)
        for row, (read, length) in enumerate(zip(state.consumed, exit_states.lengths, strict=True)):
            session_row = session._batch.rows[row]
            unread = session_row.text[read:]
            draft_tokens = tokens[row, len(unread) :].tolist()
            assert tokens[row, : len(unread)].tolist() == unread
            tokens_read = [*unread, *draft_tokens][:length]
            text = torch.tensor([[*session_row.text[:read], *tokens_read]])
            fresh = LLAMA(text, features=(1,)).features[1]
            assert_close(exit_states.hidden[row, :length], fresh[0, read:])
            checked_lengths.append(length)
        return forward(self, tokens, state, exit_states=exit_states, **options)

    monkeypatch.setattr(HuggingFaceLM, "forward", spy)
    drafter = StagedDrafter([cases.small(LLAMA), EarlyExitDrafter(2)], stage_windows=2)
    session = open_session(
        LLAMA, drafter, cases.PROMPTS, max_new_tokens=12, num_draft_tokens=4, eos=cases.EOS
    )
    while session.step():
        pass
    assert session.result().tokens == cases.standard("llama", Sampling(), 12).tokens
    assert len(checked_lengths) > 12
    assert checked_lengths.count(4) > len(checked_lengths) / 3, (
        "a window of 4 hands on all but its last draft token"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_reads_the_device_twice_for_each_call_of_the_larger_stage(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception to one read a round: what the larger stage keeps decides what it reads next."""
    model = middle("rnn")
    staged = StagedDrafter([ModelDrafter(cases.near(model)), ModelDrafter(model)], stage_windows=2)
    session = open_session(
        cases.target("rnn"),
        staged,
        cases.PROMPTS,
        max_new_tokens=12,
        sampling=Sampling(temperature),
        num_draft_tokens=5,
    )
    with Reads(monkeypatch) as reads:
        while session.live:
            reads.seen.clear()
            before = session.num_draft_calls
            session.step()
            num_calls = session.num_draft_calls - before
            assert set(reads.seen) <= {"tolist"} and len(reads.seen) <= 1 + 2 * num_calls


class Told(ModelDrafter):
    """Records what it drafts for its only row, and how many of these tokens it observes as kept."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.drafted: list[tuple[int, list[int]]] = []
        self.observed: list[int] = []

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        self.drafted.append((len(request.texts[0]), draft.tokens[0, : windows[0]].tolist()))
        return draft

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        # In some calls it has drafted nothing.
        if len(self.observed) < len(self.drafted):
            self.observed += num_accepted
        super().observe(state, output, num_accepted)


def test_the_smaller_stage_learns_how_many_of_its_tokens_the_larger_one_keeps() -> None:
    model = cases.target("rnn")
    smaller = Told(cases.near(model))
    staged = StagedDrafter([smaller, ModelDrafter(model)], stage_windows=2)
    result = run(
        open_session(model, staged, [cases.PROMPTS[0]], max_new_tokens=24, num_draft_tokens=5)
    )
    text = [*cases.PROMPTS[0], *result.tokens[0]]
    num_kept = []
    for start, tokens in smaller.drafted:
        pairs = enumerate(zip(tokens, text[start:], strict=False))
        rejected = [i for i, (draft_token, token) in pairs if draft_token != token]
        num_kept.append(rejected[0] if rejected else len(tokens))
    assert smaller.observed == num_kept and {*num_kept} == {0, 1, 2}


@pytest.mark.parametrize("at_call", range(1, 6))
def test_a_session_goes_on_after_a_failed_call_of_any_stage(at_call: int) -> None:
    model = middle("rnn")
    for failing_stage in range(2):
        stage_models = [cases.near(model), model]
        stage_models[failing_stage] = Interrupted(stage_models[failing_stage], at_call)
        stages = [ModelDrafter(stage_model) for stage_model in stage_models]
        staged = StagedDrafter(stages, stage_windows=2)
        session = open_session(
            cases.target("rnn"),
            staged,
            cases.PROMPTS,
            max_new_tokens=12,
            sampling=Sampling(1.0),
            num_draft_tokens=4,
        )
        failures = 0
        while session.live:
            try:
                session.step()
            except KeyboardInterrupt:
                failures += 1
        assert failures == 1
        assert session.result().tokens == cases.standard("rnn", Sampling(1.0), 12, None).tokens


def test_its_arguments_build_it_again() -> None:
    staged = StagedDrafter(
        [NGramDrafter(), cases.small(middle()), ModelDrafter(middle())], stage_windows=5
    )
    again = StagedDrafter(**staged.arguments())
    assert (
        again.arguments() == staged.arguments()
        and again.state_dict().keys() == staged.state_dict().keys()
    )
    older = networks.spec(StagedDrafter([NGramDrafter(), ModelDrafter(models.RNN(5))]))
    older["arguments"]["stage_windows"] = [3, 5]
    assert networks.build(older, (DRAFTERS,)).arguments()["stage_windows"] == 5
    with pytest.raises(ValueError, match="keeps no sampling"):
        StagedDrafter([NGramDrafter(), ModelDrafter(middle(), sampling=Sampling())]).arguments()


RNN = cases.MODELS["rnn"]
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "none": (lambda: StagedDrafter([]), "stages must be .* got none"),
    "one": (lambda: StagedDrafter([NGramDrafter()]), "stages must be"),
    "model": (lambda: StagedDrafter([NGramDrafter(), RNN(1)]), "got NGramDrafter, RNN"),  # type: ignore[list-item]
    "n-gram": (
        lambda: StagedDrafter([ModelDrafter(RNN(1)), NGramDrafter()]),
        "got ModelDrafter, NGramDrafter",
    ),
    "exit first": (
        lambda: StagedDrafter([EarlyExitDrafter(1), ModelDrafter(RNN(1))]),
        "outside its target",
    ),
    "no window": (
        lambda: StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))], stage_windows=0),
        "stage_windows must be at least 1, got 0",
    ),
    "target": (
        lambda: StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))]).check_target(
            RNN(1, vocab_size=7)
        ),
        "the draft has a vocabulary of 11 tokens, the target one of 7",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_stages_that_cannot_work_are_refused_by_name(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_its_texts_are_as_long_as_its_stages_may_have_them() -> None:
    first = cross(RNN(1))
    first.model.max_positions = 16  # of which it reads the end
    assert StagedDrafter([first, ModelDrafter(RNN(1))]).max_positions is None

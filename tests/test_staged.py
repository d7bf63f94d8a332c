"""Laws of drafts in stages: the guesses are those of the last stage alone, and nothing is read twice on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cases
import pytest
import torch
from test_early_exit import Uneven
from test_multi_token import Checked
from test_rounds import Interrupted, Reads
from test_states import assert_close
from tiny_heads import heads
from tiny_vocabularies import cross
from torch import Tensor

from lightning_specdec.decoding import Session, open_session, speculative_decode
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    ModelDrafter,
    MultiTokenDrafter,
    NGramDrafter,
    StagedDrafter,
    TargetContext,
)
from lightning_specdec.drafters.ngram_with_fallback import FallbackState
from lightning_specdec.models import ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.state import DecodeState
from lightning_specdec.rules import Sampling


def penalize(prefix: Tensor, scores: Tensor) -> Tensor:
    """A processor: what stands in the text is less likely."""
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


def tiny_heads(model: LanguageModel) -> MultiTokenDrafter:
    assert model.hidden_size is not None
    drafter: MultiTokenDrafter = cases.make(
        lambda vocab_size: MultiTokenDrafter(2, hidden_size=model.hidden_size or 0, vocab_size=vocab_size), 3
    )
    return drafter


FIRST: dict[str, Callable[[LanguageModel], Drafter]] = {
    "near": lambda model: ModelDrafter(cases.near(model, seed=9)),
    "small": cases.small,
    "itself": ModelDrafter,
    "hotter": lambda model: ModelDrafter(cases.near(model), sampling=Sampling(1.5)),
    "ragged": lambda model: cases.Ragged(model),
    "wrong": lambda model: cases.AlwaysWrong(model),
    "ngram": lambda model: NGramDrafter(),
    "cross": lambda model: cross(cases.near(model)),
    "heads": tiny_heads,
    "exit": lambda model: EarlyExitDrafter(1),
    "staged": lambda model: StagedDrafter([NGramDrafter(), cases.small(model)], stage_windows=2),
}
"""What may stand first, by the model that it guesses for."""


class Twins(Drafter):
    """Guesses in stages and with the last stage alone, side by side, and holds the two against each other."""

    gives_logits = True

    def __init__(self, staged: StagedDrafter) -> None:
        super().__init__()
        self.staged, self.alone = staged, staged.larger
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

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> DraftState:
        alone, staged = (each.init_state(batch_size, max_length, context) for each in (self.alone, self.staged))
        return FallbackState(alone, staged, context)

    def propose(self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, FallbackState)
        alone = self.alone.propose(state.lookup, request, windows, sampling)
        staged = self.staged.propose(state.fallback, request, windows, sampling)
        assert staged.tokens.shape == alone.tokens.shape
        assert (staged.lengths is None) == (alone.lengths is None) and (staged.probs is None) == (alone.probs is None)
        for row, window in enumerate(windows):
            assert staged.tokens[row, :window].tolist() == alone.tokens[row, :window].tolist()
            for one, other in ((staged.probs, alone.probs), (staged.logits, alone.logits)):
                if one is not None and other is not None:
                    torch.testing.assert_close(one[row, :window], other[row, :window], rtol=1e-5, atol=1e-5)
            self.num_compared += window
        if staged.lengths is not None:
            assert staged.lengths.tolist() == list(windows)
        return staged

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, FallbackState)
        self.alone.observe(state.lookup, output, num_accepted)
        self.staged.observe(state.fallback, output, num_accepted)


def compare(target: LanguageModel, staged: StagedDrafter, sampling: Sampling, window: int, rule: str) -> None:
    """Rows come, go and end at different times; every round's guesses are those of the last stage alone."""
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
def test_a_staged_draft_proposes_what_its_last_stage_proposes_alone(target: str, window: int, sampling: str) -> None:
    model = middle(target)
    staged = StagedDrafter([FIRST["near"](model), ModelDrafter(model)], stage_windows=3)
    compare(cases.target(target), staged, SAMPLINGS[sampling], window, "RejectionSampling")


@pytest.mark.parametrize("first", FIRST)
def test_so_it_does_whatever_its_first_stage_is(first: str) -> None:
    model = middle("llama") if first in ("exit", "heads") else middle("rnn")
    staged = StagedDrafter([FIRST[first](model), ModelDrafter(model)], stage_windows=3)
    sampling = SAMPLINGS["t1" if first in ("exit", "heads") else "processors"]
    compare(cases.target("rnn"), staged, sampling, 5, "EpsilonThreshold")


@pytest.mark.parametrize("sampling", ["t1", "processors"])
def test_so_it_does_with_three_stages(sampling: str) -> None:
    model = middle()
    stages = [NGramDrafter(), cases.small(model), ModelDrafter(model, sampling=Sampling(1.3, top_k=4))]
    compare(
        cases.target("rnn"), StagedDrafter(stages, stage_windows=[3, 2]), SAMPLINGS[sampling], 6, "RejectionSampling"
    )


@pytest.mark.parametrize(
    ("first", "sampling"), [("near", "greedy"), ("near", "t1"), ("ngram", "processors"), ("staged", "t1")]
)
def test_so_it_does_over_the_targets_own_lower_layers(first: str, sampling: str) -> None:
    smaller = FIRST[first](cases.target("rnn"))
    compare(LLAMA, StagedDrafter([smaller, EarlyExitDrafter(2)], stage_windows=2), SAMPLINGS[sampling], 5, "ExactMatch")


def test_what_lower_layers_hand_on_is_what_they_make_of_the_drafts_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = HuggingFaceLM.forward

    def spy(
        self: HuggingFaceLM, tokens: Tensor, state: Any = None, exit_states: ExitStates | None = None, **options: Any
    ) -> ModelOutput:
        if exit_states is None:
            return forward(self, tokens, state, **options)
        for row, (read, length) in enumerate(zip(state.consumed, exit_states.lengths, strict=True)):
            session_row = session._batch.rows[row]
            first = [*session_row.text[read:], *tokens[row, len(session_row.text) - read :].tolist()]
            assert tokens[row, : len(session_row.text) - read].tolist() == session_row.text[read:]
            text = torch.tensor([[*session_row.text[:read], *first[:length]]])
            fresh = LLAMA(text, features=(1,)).features[1]
            assert_close(exit_states.hidden[row, :length], fresh[0, read:])
            seen.append(length)
        return forward(self, tokens, state, exit_states=exit_states, **options)

    monkeypatch.setattr(HuggingFaceLM, "forward", spy)
    drafter = StagedDrafter([cases.small(LLAMA), EarlyExitDrafter(2)], stage_windows=2)
    session = open_session(LLAMA, drafter, cases.PROMPTS, max_new_tokens=12, num_draft_tokens=4, eos=cases.EOS)
    while session.step():
        pass
    assert session.result().tokens == cases.standard("llama", Sampling(), 12).tokens
    assert len(seen) > 12 and seen.count(4) > len(seen) / 3, "a window of 4 hands on all but its last guess"


def test_a_perfect_smaller_draft_spares_the_larger_one_most_calls_and_a_wrong_one_none() -> None:
    model = middle()
    for name, num_calls in (("itself", 2), ("wrong", 6)):
        staged = StagedDrafter([FIRST[name](model), ModelDrafter(model)], stage_windows=4)
        state, text = staged.init_state(1, 20), [1, 2, 3]
        with torch.inference_mode():
            draft = staged.propose(state, DraftRequest([text], torch.tensor([[2, 3]]), None), [6], Sampling())
        assert draft.num_calls == num_calls


class Counting(LanguageModel):
    """A model that counts the tokens of the longest row that it reads."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model, self.vocab_size = model, model.vocab_size
        self.reads: list[int] = []

    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        return self.model.init_state(batch_size, max_length)

    def forward(self, tokens: Tensor, state: DecodeState | None = None, **options: Any) -> ModelOutput:
        self.reads.append(tokens.shape[1])
        return self.model(tokens, state, **options)

    def arguments(self) -> dict[str, Any]:
        return self.model.arguments()


@pytest.mark.parametrize("target", ["rnn", "transformer"])
def test_no_stage_reads_again_what_is_settled(target: str) -> None:
    small, large = Counting(cases.near(cases.target(target), noise=0.4)), Counting(middle(target))
    staged = StagedDrafter([ModelDrafter(small), ModelDrafter(large)], stage_windows=3)
    session = open_session(cases.target(target), staged, [[1, 2, 3] * 10], max_new_tokens=40, num_draft_tokens=5)
    session.step()
    assert max(small.reads) == 30 and max(large.reads) == 33
    held = []
    while session.live:
        small.reads.clear()
        large.reads.clear()
        session.step()
        assert max([*small.reads, *large.reads], default=0) <= 6
        state: Any = session._batch.draft_state
        held.append(len(state.larger.model_state.consumed))
    assert len(held) > 6


def test_a_look_up_keeps_its_table_and_takes_in_what_is_settled_alone() -> None:
    staged = StagedDrafter([NGramDrafter(), ModelDrafter(middle("rnn"))])
    session = open_session(cases.target("rnn"), staged, [[1, 2, 3, 1, 2]], max_new_tokens=20, num_draft_tokens=5)
    state: Any = session._batch.draft_state
    index = state.smaller.rows[0]
    while session.live:
        length = len(session.live[0].text)
        session.step()
        assert state.smaller.rows[0] is index and index.end <= length


class Diary(DraftState):
    """All that a drafter was shown of each row's text."""

    num_taken_back = 0

    def go_back(self, row: int, length: int) -> None:
        self.num_taken_back += max(0, len(self.rows[row]) - length)
        del self.rows[row][length:]


class Witness(cases.Repeater):
    """Sees to it that texts only grow, but for what it was told to forget; and that what is settled stays."""

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> Diary:
        self.diary = Diary(batch_size, list)
        return self.diary

    def propose(self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, Diary) and request.settled is not None
        for row, (text, settled) in enumerate(zip(request.texts, request.settled, strict=True)):
            seen = state.rows[row]
            assert seen == list(text[: len(seen)]) and settled <= len(text)
            state.rows[row] = list(text)
        return super().propose(state, request, windows, sampling)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_first_stage_is_told_what_the_target_took_back(num_stages: int) -> None:
    witness, model = Witness(), middle("rnn")
    stages = [witness, cases.small(model), ModelDrafter(model)]
    staged = StagedDrafter([witness, *stages[1 - num_stages :]], stage_windows=2)
    session = Session(cases.target("rnn"), staged, max_length=40, num_draft_tokens=5, eos=cases.EOS)
    for prompt in [*cases.PROMPTS, [6, 6, 6]]:
        session.add(prompt, max_new_tokens=12)
        session.step()
    session.cancel(session.live[0])
    while session.step():
        pass
    assert witness.diary.num_taken_back > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_reads_the_device_twice_for_each_call_of_the_larger_stage(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception to one read a round: what the larger stage keeps decides what it reads next."""
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


@pytest.mark.parametrize("at_call", range(1, 6))
def test_a_session_goes_on_after_a_failed_call_of_any_stage(at_call: int) -> None:
    model = middle("rnn")
    for which in range(2):
        models = [cases.near(model), model]
        models[which] = Interrupted(models[which], at_call)
        staged = StagedDrafter([ModelDrafter(each) for each in models], stage_windows=2)
        session = open_session(
            cases.target("rnn"), staged, cases.PROMPTS, max_new_tokens=12, sampling=Sampling(1.0), num_draft_tokens=4
        )
        failures = 0
        while session.live:
            try:
                session.step()
            except KeyboardInterrupt:
                failures += 1
        assert failures == 1
        assert session.result().tokens == cases.standard("rnn", Sampling(1.0), 12, None).tokens


@pytest.mark.parametrize("first", ["exit", "heads"])
def test_what_works_inside_its_target_works_inside_the_stage_behind_it(first: str) -> None:
    model = middle("llama")
    session = open_session(
        cases.target("rnn"), StagedDrafter([FIRST[first](model), ModelDrafter(model)]), cases.PROMPTS, max_new_tokens=12
    )
    assert not session.drafter.inside_target
    while session.step():
        pass
    assert session.result().tokens == cases.standard("rnn", Sampling(), 12, None).tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["rnn", "transformer"])
def test_heads_of_a_stage_know_the_last_state_of_every_row_whatever_the_rows_beside_it_want(
    name: str, seed: int
) -> None:
    """A row whose window is full takes part in the calls that others still need."""
    model = middle(name)
    checked = Checked(heads(model), model)
    staged = StagedDrafter([checked, ModelDrafter(model)], stage_windows=2)
    options: dict[str, Any] = {"max_new_tokens": 14, "sampling": Sampling(0.9), "num_draft_tokens": Uneven(seed)}
    result = speculative_decode(cases.target(name), staged, cases.PROMPTS, **options)
    assert result.tokens == cases.standard(name, Sampling(0.9), 14, None).tokens
    assert sum(bool(length) for _, length in checked.made) > 4


def test_its_arguments_build_it_again() -> None:
    model = middle()
    stages = [NGramDrafter(), cases.small(model), ModelDrafter(cases.near(model)), ModelDrafter(model)]
    staged = StagedDrafter(stages, stage_windows=[5, 3, 2])
    assert staged.stages == stages and staged.stage_windows == [5, 3, 2]
    again = StagedDrafter(**staged.arguments())
    assert again.arguments() == staged.arguments() and again.state_dict().keys() == staged.state_dict().keys()
    with pytest.raises(ValueError, match="keeps no sampling"):
        StagedDrafter([NGramDrafter(), ModelDrafter(model, sampling=Sampling())]).arguments()


RNN = cases.MODELS["rnn"]
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "one": (lambda: StagedDrafter([NGramDrafter()]), "two drafters or more"),
    "model": (lambda: StagedDrafter([NGramDrafter(), RNN(1)]), "stage 2 is a RNN"),  # type: ignore[list-item]
    "n-gram": (lambda: StagedDrafter([ModelDrafter(RNN(1)), NGramDrafter()]), "stage 2 is a NGramDrafter"),
    "heads": (
        lambda: StagedDrafter([NGramDrafter(), MultiTokenDrafter(2, hidden_size=4, vocab_size=7)]),
        "stage 2 is a MultiTokenDrafter",
    ),
    "cross": (
        lambda: StagedDrafter([NGramDrafter(), cross(RNN(1)), ModelDrafter(RNN(1))]),
        "stage 2 is a CrossVocabulary",
    ),
    "staged": (
        lambda: StagedDrafter([NGramDrafter(), StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))])]),
        "stage 2 is a StagedDrafter",
    ),
    "order": (lambda: StagedDrafter([ModelDrafter(RNN(1)), tiny_last()]), "smallest first"),
    "order of three": (
        lambda: StagedDrafter([ModelDrafter(RNN(1)), EarlyExitDrafter(1), tiny_last()]),
        "smallest first",
    ),
    "vocabulary": (
        lambda: StagedDrafter([ModelDrafter(RNN(1, vocab_size=7, num_layers=1)), ModelDrafter(RNN(1))]),
        "stage 1 cannot draft for stage 2: the draft has a vocabulary of 7",
    ),
    "windows": (
        lambda: StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))], stage_windows=[2, 3]),
        "one for each stage but the last",
    ),
    "no window": (
        lambda: StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))], stage_windows=0),
        "stage_windows must be at least 1, got 0",
    ),
    "target": (
        lambda: StagedDrafter([NGramDrafter(), ModelDrafter(RNN(1))]).check_target(RNN(1, vocab_size=7)),
        "the draft has a vocabulary of 11 tokens, the target one of 7",
    ),
    "exit of an exit": (
        lambda: StagedDrafter([EarlyExitDrafter(1), EarlyExitDrafter(2)]).check_target(LLAMA),
        "stage 1 works inside stage 2, which is a part of the target",
    ),
    "exit of a network without layers": (
        lambda: StagedDrafter([EarlyExitDrafter(1), ModelDrafter(RNN(1))]).check_target(RNN(1)),
        "stage 1 cannot draft for stage 2: RNN has no layers to exit from",
    ),
}


def tiny_last() -> ModelDrafter:
    return ModelDrafter(RNN(1, num_layers=1))


@pytest.mark.parametrize("case", WRONG)
def test_stages_that_cannot_work_are_refused_by_name(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_the_shortest_context_of_all_stages_counts() -> None:
    model = middle("llama")
    assert StagedDrafter([NGramDrafter(), ModelDrafter(model)]).max_positions == model.max_positions == 512
    assert StagedDrafter([NGramDrafter(), tiny_last()]).max_positions is None

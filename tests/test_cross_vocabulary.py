"""A draft with another vocabulary: its guesses are lossless, and what it reads is the text in its own tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cases
import pytest
import test_distribution as exact
import torch
from test_states import assert_close
from tiny_vocabularies import PAIRS, Renamed, letters, other_letters
from torch import Tensor

from lightning_specdec.decoding import Session, autoregressive_decode, run, speculative_decode
from lightning_specdec.drafters import Draft, DraftRequest, DraftState
from lightning_specdec.drafters.cross_vocabulary import CrossDraftState, CrossVocabulary
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import EpsilonThreshold, ExactMatch, RejectionSampling, Sampling
from lightning_specdec.text.vocabulary import Vocabulary


class Watched(CrossVocabulary):
    """Looks at each round whether the draft has read the text as a fresh run would, none of it twice or not at all."""

    num_watched, largest = 0, 0

    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, sampling)
        assert isinstance(state, CrossDraftState) and draft.logits is not None
        for i, (row, text) in enumerate(zip(state.rows, request.texts, strict=True)):
            tokens = row.tokens_from(row.first)
            fresh = self.to_target(self.model(torch.tensor([tokens])).logits[:, -1], request)[0]
            said = fresh.isfinite()
            assert_close(draft.logits[i, 0][said], fresh[said])
            assert row.text.num_covered == len(text)
            self.num_watched += 1
        self.largest = max(self.largest, state.capacity)
        return draft


def vocabulary(*pieces: bytes) -> Vocabulary:
    return Vocabulary(pieces)


def renamed(model: LanguageModel) -> Renamed:
    return Renamed(model, other_letters(model.vocab_size))


@functools.cache
def strangers() -> tuple[LanguageModel, Vocabulary, LanguageModel, Any]:
    """Random networks over two real tokenizers: bytes trained on one text, SentencePiece on another."""
    pytest.importorskip("transformers")
    import tiny_tokenizers

    own, other = tiny_tokenizers.byte_level(), tiny_tokenizers.sentencepiece()
    target, draft = Vocabulary.of(own), Vocabulary.of(other)
    models = [
        cases.make(kind, seed, vocab_size=len(each) + 3, sharpness=2.5)
        for kind, seed, each in ((cases.RNN, 3, target), (cases.TinyTransformer, 4, draft))
    ]
    models[0].vocabulary, models[1].vocabulary = target, draft
    return models[0], target, models[1], functools.partial(other.encode, add_special_tokens=False)


def stranger() -> tuple[LanguageModel, Watched]:
    """A target, and a drafter for it that has not watched anything yet."""
    target, names, draft, encode = strangers()
    assert draft.vocabulary is not None
    return target, Watched(draft, names, encode=encode, start=draft.vocabulary.special["bos"])


WORDS = [[290, 302, 270], [262], [0, 273, 280, 300], [310, 5, 5, 130, 40]]
"""Prompts of the byte-level tokenizer: one with BOS, one that ends in stray bytes."""


@pytest.mark.parametrize(
    ("window", "rule"), [(1, ExactMatch), (3, RejectionSampling), (5, ExactMatch)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_two_real_tokenizers_decode_as_the_target_alone(
    window: int, rule: type[Any], temperature: float
) -> None:
    target, drafter = stranger()
    rule = ExactMatch if temperature else rule
    options: dict[str, Any] = {"max_new_tokens": 20, "eos": 1, "sampling": Sampling(temperature)}
    result = speculative_decode(
        target, drafter, WORDS, num_draft_tokens=window, rule=rule(), **options
    )
    assert result.tokens == autoregressive_decode(target, WORDS, **options).tokens
    assert drafter.num_watched > 20
    new = {token for row in result.tokens for token in row}
    shared, whole = drafter.translation.pairs, drafter.translation.whole
    assert new - set(shared), "the target said nothing that the draft does not have"
    assert new & set(whole) and new - set(whole)


@pytest.mark.parametrize("target", cases.MODELS)
def test_what_the_draft_has_read_equals_a_fresh_run(target: str) -> None:
    model = cases.target(target)
    drafter = Watched(renamed(cases.related(model)), letters(cases.VOCAB))
    for rule in (RejectionSampling(), EpsilonThreshold()):
        result = speculative_decode(
            model,
            drafter,
            cases.PROMPTS,
            max_new_tokens=12,
            rule=rule,
            sampling=Sampling(1.0),
            eos=cases.EOS,
            seed=1,
        )
        assert result.counts is not None and result.counts.num_accepted > 0
    assert drafter.num_watched > 20


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.7)], ids=["greedy", "t1", "p"]
)
@pytest.mark.parametrize("rule", [ExactMatch, RejectionSampling])
@pytest.mark.parametrize("target", ["rnn", "transformer"])
def test_the_target_under_other_names_accepts_everything(
    target: str, rule: type[Any], sampling: Sampling
) -> None:
    """Its numbers are other ones, and it would rather say pairs: nothing of that is left in its guesses."""
    model = cases.target(target)
    pieces = [piece for piece in letters(cases.VOCAB).token_bytes[::-1] if piece]
    drafter = CrossVocabulary(
        Renamed(model, vocabulary(*pieces[:4], *PAIRS, *pieces[4:])), letters(cases.VOCAB)
    )
    result = speculative_decode(
        model,
        drafter,
        cases.PROMPTS,
        max_new_tokens=12,
        num_draft_tokens=3,
        rule=rule(),
        sampling=sampling,
    )
    assert result.acceptance_rate == 1 and result.block_efficiency == 4


@functools.cache
def small_pair() -> tuple[LanguageModel, CrossVocabulary]:
    """A target of a, b and c; the draft has b, a pair, and a."""
    model = cases.MODELS["rnn"](3, vocab_size=exact.VOCAB, sharpness=1.5)
    draft = Renamed(
        cases.MODELS["rnn"](4, vocab_size=exact.VOCAB, sharpness=1.5), vocabulary(b"b", b"ab", b"a")
    )
    return model, CrossVocabulary(draft, letters(exact.VOCAB))


def round_of(drafter: CrossVocabulary, uniform: Tensor, sampling: Sampling) -> Draft:
    """The guesses after one prompt in every row, drawn with these numbers."""
    prompts = [[2, 0, 1]] * len(uniform)
    request = DraftRequest(
        prompts, torch.tensor([[0, 1]] * len(uniform)), uniform, vocab_size=exact.VOCAB
    )
    state = drafter.init_state(len(uniform), 8)
    with torch.inference_mode():
        return drafter.propose(state, request, [exact.WINDOW] * len(uniform), sampling)


@pytest.mark.parametrize("sampling", ["t1", "cold", "top_k", "top_p"])
def test_a_round_through_the_intersection_has_exactly_the_targets_distribution(
    sampling: str,
) -> None:
    """Summed over all guesses and outcomes; where each guess's interval ends is asked of the drafter's own code."""
    (model, drafter), own, num_rows = small_pair(), exact.SAMPLINGS[sampling], len(exact.DRAFTS)
    tokens, numbers = torch.tensor(exact.DRAFTS), torch.zeros(num_rows, exact.WINDOW)
    chances = torch.ones(num_rows, dtype=torch.float64)
    for i in range(exact.WINDOW):

        def token_of(uniform: Tensor, i: int = i) -> Tensor:
            drawn = torch.cat((numbers[:, :i], uniform[:, None], numbers[:, i + 1 :]), dim=1)
            return round_of(drafter, drawn, own).tokens[:, i]

        ends = exact.token_ends(token_of, num_rows)
        sizes = exact.sizes(ends).gather(1, tokens[:, i : i + 1])[:, 0]
        numbers[:, i] = (
            (ends.gather(1, tokens[:, i : i + 1])[:, 0] - sizes / 2).clamp(max=1 - 1e-6).float()
        )
        chances *= sizes
    possible = chances > 0
    draft = round_of(drafter, numbers, own)
    assert draft.probs is not None and draft.tokens[possible].tolist() == tokens[possible].tolist()
    assert 1 < int(possible.sum()) <= 4, "the draft has no c"
    with torch.no_grad():
        texts = torch.tensor([[2, 0, 1, *guess] for guess in exact.DRAFTS])
        logits = model(texts).logits[:, 2:]
    # Reported probabilities as logits, which a softmax leaves as they are.
    reported = exact.Proposal(Sampling(1.0), Sampling(1.0))
    measured = exact.Measured(
        RejectionSampling(), logits, draft.probs.log(), own, reported, exact.WINDOW
    )
    law = measured.law(chances)
    assert sum(law.values()) == pytest.approx(1, abs=exact.TOLERANCE)
    table = {draft[:i]: logits[n, i] for n, draft in enumerate(exact.DRAFTS) for i in range(3)}
    probs = {prefix: own.probs(each).double() for prefix, each in table.items()}
    assert exact.error_of(law, probs, exact.block_probs(table, own)) < exact.TOLERANCE


LACKING = [token for token in range(cases.VOCAB) if (ord("a") + token) % 4 == 0]
"""Letters that the draft of `cases` does not have."""


def raised(prefix: Tensor, scores: Tensor) -> Tensor:
    return scores.index_fill(1, torch.tensor(LACKING[:2]), 3.0)


def forced(prefix: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(LACKING), 0.0)


def allowed(prefix: Tensor, scores: Tensor) -> Tensor:
    return forced(prefix, scores) + scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("processor", [raised, forced, allowed])
@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_logits_processors_may_choose_what_the_draft_lacks(
    kind: str, processor: Any, temperature: float
) -> None:
    target, drafter = cases.target(kind), cases.drafter("cross", kind)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "sampling": Sampling(temperature, processors=[processor]),
    }
    expected = autoregressive_decode(target, cases.PROMPTS, **options).tokens
    assert {token for row in expected for token in row} & set(LACKING)
    for rule in (ExactMatch(), RejectionSampling()):
        result = speculative_decode(target, drafter, cases.PROMPTS, rule=rule, **options)
        if rule.ignores_windows or not temperature:
            assert result.tokens == expected
        if processor is forced:
            assert result.acceptance_rate == 1, "the draft has been told what the target was told"
        elif processor is allowed:
            assert {token for row in result.tokens for token in row} <= set(LACKING)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "t1"])
def test_a_draft_of_a_short_context_goes_on_with_the_end_of_the_text(sampling: Sampling) -> None:
    target = cases.target("transformer")
    drafter = Watched(renamed(cases.MODELS["transformer"](3)), letters(cases.VOCAB))
    drafter.model.max_positions = 16
    prompts = [[1, 2, 3] * 7, [7], [4, 9]]
    options: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 6, "sampling": sampling}
    batch = speculative_decode(target, drafter, prompts, **options)
    assert (
        batch.tokens
        == autoregressive_decode(target, prompts, max_new_tokens=40, sampling=sampling).tokens
    )
    alone = speculative_decode(target, drafter, prompts[0], **options)
    assert alone.rows[0].rounds == batch.rows[0].rounds
    assert drafter.largest == 16, "the buffers are no larger than the context"


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_a_row_that_goes_on_with_another_turn_is_read_on_from_where_the_texts_part(
    kind: str,
) -> None:
    target = cases.target(kind)
    drafter = Watched(renamed(cases.related(target)), letters(cases.VOCAB))
    session = Session(target, drafter, max_length=60, eos=cases.EOS)
    row = session.add(cases.PROMPTS[1], max_new_tokens=9)
    run(session)
    for num_dropped, turn in [(0, [5, 1, 2]), (3, [6]), (0, [8, 9, 3]), (30, [7])]:
        prompt = [*row.text[: max(1, len(row.text) - num_dropped)], *turn]
        row = session.resume(row, prompt, max_new_tokens=9)
        run(session)
        expected = autoregressive_decode(target, prompt, max_new_tokens=9, eos=cases.EOS).tokens[0]
        assert row.text[len(prompt) :] == expected
    assert drafter.num_watched > 10


def test_its_fused_form_shares_what_is_not_the_models() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be copied

        def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    model, faster = renamed(cases.MODELS["rnn"](3)), renamed(cases.MODELS["rnn"](3))
    drafter = CrossVocabulary(
        model, letters(cases.VOCAB), sampling=Sampling(1.0, processors=[Locked()])
    )
    assert drafter.fused() is drafter, "its model has no other form"
    model.fused = lambda: faster  # type: ignore[method-assign]
    fused = drafter.fused()
    assert fused.model is faster and fused._sources is not drafter._sources
    assert (
        fused.sampling is drafter.sampling and fused.target_vocabulary is drafter.target_vocabulary
    )


def test_what_it_has_read_counts_once_however_often_the_target_answers() -> None:
    target = cases.target("rnn")
    drafter, texts = (
        CrossVocabulary(renamed(cases.related(target)), letters(cases.VOCAB)),
        [[1, 2, 3]],
    )
    state = drafter.init_state(1, 30)
    drafter.propose(
        state,
        DraftRequest(texts, torch.tensor([[2, 3]]), None, vocab_size=cases.VOCAB),
        [4],
        Sampling(),
    )
    for num_accepted in (3, 0):  # another drafter drafts for the second answer
        drafter.observe(state, target(torch.tensor(texts)), [num_accepted])
    assert state.rows[0].num_draft_read == 3

"""A draft with another vocabulary is lossless, and reads the text in its own tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cases
import exact_rounds as exact
import pytest
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
    """Checks in each round that the draft has read each token of the text once."""

    num_watched = 0
    largest_capacity = 0

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, sampling)
        assert isinstance(state, CrossDraftState) and draft.logits is not None
        for index, (row, text) in enumerate(zip(state.rows, request.texts, strict=True)):
            tokens = torch.tensor([row.tokens_from(row.first)])
            fresh_logits = self.to_target(self.model(tokens).logits[:, -1], request)[0]
            is_shared = fresh_logits.isfinite()
            assert_close(draft.logits[index, 0][is_shared], fresh_logits[is_shared])
            assert row.text.num_covered == len(text)
            self.num_watched += 1
        self.largest_capacity = max(self.largest_capacity, state.capacity)
        return draft


def vocabulary(*pieces: bytes) -> Vocabulary:
    return Vocabulary(pieces)


def renamed(model: LanguageModel) -> Renamed:
    return Renamed(model, other_letters(model.vocab_size))


@functools.cache
def strangers() -> tuple[LanguageModel, Vocabulary, LanguageModel, Any]:
    """Random networks over two real tokenizers: byte-level BPE and SentencePiece."""
    pytest.importorskip("transformers")
    import tiny_tokenizers

    target_names = Vocabulary.of(tiny_tokenizers.byte_level())
    target = cases.make(cases.RNN, 3, vocab_size=len(target_names) + 3, sharpness=2.5)
    target.vocabulary = target_names

    draft_tokenizer = tiny_tokenizers.sentencepiece()
    draft_names = Vocabulary.of(draft_tokenizer)
    draft = cases.make(cases.TinyTransformer, 4, vocab_size=len(draft_names) + 3, sharpness=2.5)
    draft.vocabulary = draft_names
    encode = functools.partial(draft_tokenizer.encode, add_special_tokens=False)
    return target, target_names, draft, encode


def stranger() -> tuple[LanguageModel, Watched]:
    """A target, and a new drafter for it."""
    target, names, draft, encode = strangers()
    assert draft.vocabulary is not None
    return target, Watched(draft, names, encode=encode, start=draft.vocabulary.special["bos"])


WORDS = [[290, 302, 270], [262], [0, 273, 280, 300], [310, 5, 5, 130, 40]]
"""Prompts of the byte-level tokenizer: one has BOS, one ends with parts of characters."""


@pytest.mark.parametrize(
    ("window", "rule"), [(1, ExactMatch), (3, RejectionSampling), (5, ExactMatch)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_two_real_tokenizers_decode_as_the_target_alone(
    window: int,
    rule: type[Any],
    temperature: float,
) -> None:
    target, drafter = stranger()
    rule = ExactMatch if temperature else rule
    options: dict[str, Any] = {"max_new_tokens": 20, "eos": 1, "sampling": Sampling(temperature)}
    result = speculative_decode(
        target, drafter, WORDS, num_draft_tokens=window, rule=rule(), **options
    )
    assert result.tokens == autoregressive_decode(target, WORDS, **options).tokens
    assert drafter.num_watched > 20
    new_tokens = set().union(*result.tokens)
    shared = set(drafter.translation.pairs)
    whole = set(drafter.translation.whole)
    assert new_tokens - shared, "the target generates tokens that the draft does not have"
    assert new_tokens & whole and new_tokens - whole


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
    target: str,
    rule: type[Any],
    sampling: Sampling,
) -> None:
    """Its tokens have other ids, and it prefers pairs, but its draft tokens are the target's."""
    model = cases.target(target)
    pieces = [piece for piece in reversed(letters(cases.VOCAB).token_bytes) if piece]
    names = vocabulary(*pieces[:4], *PAIRS, *pieces[4:])
    drafter = CrossVocabulary(Renamed(model, names), letters(cases.VOCAB))
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
    draft_model = cases.MODELS["rnn"](4, vocab_size=exact.VOCAB, sharpness=1.5)
    draft = Renamed(draft_model, vocabulary(b"b", b"ab", b"a"))
    return model, CrossVocabulary(draft, letters(exact.VOCAB))


def round_of(drafter: CrossVocabulary, uniform: Tensor, sampling: Sampling) -> Draft:
    """Draft tokens after the same prompt in every row, drawn with these uniform numbers."""
    num_rows = len(uniform)
    prompts = [[2, 0, 1]] * num_rows
    last_two_tokens = torch.tensor([[0, 1]] * num_rows)
    request = DraftRequest(prompts, last_two_tokens, uniform, vocab_size=exact.VOCAB)
    state = drafter.init_state(num_rows, 8)
    with torch.inference_mode():
        return drafter.propose(state, request, [exact.NUM_DRAFT_TOKENS] * num_rows, sampling)


@pytest.mark.parametrize("sampling_name", ["t1", "cold", "top_k", "top_p"])
def test_a_round_through_the_intersection_has_exactly_the_targets_distribution(
    sampling_name: str,
) -> None:
    """Summed over all drafts and outcomes, with draft tokens that the drafter's own code draws."""
    model, drafter = small_pair()
    sampling = exact.SAMPLINGS[sampling_name]
    num_drafts = len(exact.DRAFTS)
    draft_tokens = torch.tensor(exact.DRAFTS)

    # Find uniform numbers that draw each draft, position by position, and its probability.
    draft_uniform = torch.zeros(num_drafts, exact.NUM_DRAFT_TOKENS)
    draft_probs = torch.ones(num_drafts, dtype=torch.float64)
    for position in range(exact.NUM_DRAFT_TOKENS):

        def draw_tokens(uniform: Tensor, position: int = position) -> Tensor:
            all_uniform = draft_uniform.clone()
            all_uniform[:, position] = uniform
            return round_of(drafter, all_uniform, sampling).tokens[:, position]

        interval_ends = exact.interval_ends(draw_tokens, num_drafts)
        token_index = draft_tokens[:, position : position + 1]
        sizes = exact.interval_sizes(interval_ends).gather(1, token_index)[:, 0]
        middles = interval_ends.gather(1, token_index)[:, 0] - sizes / 2
        draft_uniform[:, position] = middles.clamp(max=1 - 1e-6).float()
        draft_probs *= sizes

    is_possible = draft_probs > 0
    draft = round_of(drafter, draft_uniform, sampling)
    assert draft.tokens[is_possible].tolist() == draft_tokens[is_possible].tolist()
    assert 1 < int(is_possible.sum()) <= 4, "the draft does not have the letter c"

    with torch.no_grad():
        texts = torch.tensor([[2, 0, 1, *tokens] for tokens in exact.DRAFTS])
        target_logits = model(texts).logits[:, 2:]
    measured = exact.MeasuredRule(RejectionSampling(), sampling, target_logits, draft.probs)
    round_probs = measured.round_probs(draft_probs)
    assert sum(round_probs.values()) == pytest.approx(1, abs=exact.TOLERANCE)

    logits_after = {}
    for row, draft_text in enumerate(exact.DRAFTS):
        for length in range(exact.NUM_POSITIONS):
            logits_after[draft_text[:length]] = target_logits[row, length]
    target_probs = exact.sampled_probs(logits_after, sampling)
    assert exact.largest_error(round_probs, target_probs) < exact.TOLERANCE


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
    kind: str,
    processor: Any,
    temperature: float,
) -> None:
    target, drafter = cases.target(kind), cases.drafter("cross", kind)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "sampling": Sampling(temperature, processors=[processor]),
    }
    expected = autoregressive_decode(target, cases.PROMPTS, **options).tokens
    assert set().union(*expected) & set(LACKING)
    for rule in (ExactMatch(), RejectionSampling()):
        result = speculative_decode(target, drafter, cases.PROMPTS, rule=rule, **options)
        if rule.ignores_windows or not temperature:
            assert result.tokens == expected
        if processor is forced:
            assert result.acceptance_rate == 1, "draft and target have the same processors"
        elif processor is allowed:
            assert set().union(*result.tokens) <= set(LACKING)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "t1"])
def test_a_draft_of_a_short_context_goes_on_with_the_end_of_the_text(sampling: Sampling) -> None:
    target = cases.target("transformer")
    drafter = Watched(renamed(cases.MODELS["transformer"](3)), letters(cases.VOCAB))
    drafter.model.max_positions = 16
    prompts = [[1, 2, 3] * 7, [7], [4, 9]]
    options: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 6, "sampling": sampling}
    batch = speculative_decode(target, drafter, prompts, **options)
    expected = autoregressive_decode(target, prompts, max_new_tokens=40, sampling=sampling)
    assert batch.tokens == expected.tokens
    alone = speculative_decode(target, drafter, prompts[0], **options)
    assert alone.rows[0].rounds == batch.rows[0].rounds
    assert drafter.largest_capacity == 16, "the buffers are no larger than the context"


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
        num_kept = max(1, len(row.text) - num_dropped)
        prompt = [*row.text[:num_kept], *turn]
        row = session.resume(row, prompt, max_new_tokens=9)
        run(session)
        expected = autoregressive_decode(target, prompt, max_new_tokens=9, eos=cases.EOS).tokens[0]
        assert row.text[len(prompt) :] == expected
    assert drafter.num_watched > 10


def test_its_fused_form_shares_what_is_not_the_models() -> None:
    class Locked:
        def __init__(self) -> None:
            # A lock cannot be copied.
            self.lock = threading.Lock()

        def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    model = renamed(cases.MODELS["rnn"](3))
    faster = renamed(cases.MODELS["rnn"](3))
    sampling = Sampling(1.0, processors=[Locked()])
    drafter = CrossVocabulary(model, letters(cases.VOCAB), sampling=sampling)
    assert drafter.fused() is drafter, "its model has no other form"
    model.fused = lambda: faster  # type: ignore[method-assign]
    fused = drafter.fused()
    assert fused.model is faster and fused._draft_column_of is not drafter._draft_column_of
    assert fused.sampling is drafter.sampling
    assert fused.target_vocabulary is drafter.target_vocabulary


def test_what_it_has_read_counts_once_however_often_the_target_answers() -> None:
    target = cases.target("rnn")
    drafter = CrossVocabulary(renamed(cases.related(target)), letters(cases.VOCAB))
    texts = [[1, 2, 3]]
    state = drafter.init_state(1, 30)
    request = DraftRequest(texts, torch.tensor([[2, 3]]), None, vocab_size=cases.VOCAB)
    drafter.propose(state, request, [4], Sampling())
    # Another drafter drafts for the second answer.
    for num_accepted in (3, 0):
        drafter.observe(state, target(torch.tensor(texts)), [num_accepted])
    assert state.rows[0].num_draft_read == 3

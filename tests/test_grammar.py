"""Structured output: speculative decoding equals standard decoding under the same grammar.

The definition of a grammar here is two functions of a text: whether it is complete, and whether it
can become so. The library that computes masks has no part in it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import cases
import exact_rounds as exact
import llguidance
import oracle
import pytest
import torch
from tiny_vocabularies import letters
from torch import Tensor

from lightning_specdec.decoding import (
    Request,
    Session,
    autoregressive_decode,
    open_session,
    run,
    speculative_decode,
)
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Grammar, RejectionSampling, Sampling
from lightning_specdec.text import grammar as text_grammar
from lightning_specdec.text.vocabulary import Vocabulary

TOKENS = letters(cases.VOCAB)
EOS = cases.EOS
NUM_NEW = 12


@dataclass(frozen=True)
class Definition:
    """A grammar by its two functions, as a logits processor of a row with this prompt."""

    is_complete: Callable[[str], bool]
    can_continue: Callable[[str], bool]
    prompt_length: int = 0

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        new_tokens = prefix[0, self.prompt_length :].tolist()
        text = TOKENS.join(new_tokens).decode()
        allowed = []
        for token in range(cases.VOCAB):
            if token == EOS:
                allowed.append(self.is_complete(text))
            else:
                allowed.append(self.can_continue(text + TOKENS.join([token]).decode()))
        return scores.masked_fill(~torch.tensor([allowed], device=scores.device), -torch.inf)


def _nested_can_continue(text: str) -> bool:
    match = re.fullmatch(r"(a*)(c?)(b*)", text)
    if match is None:
        return False
    return not match[3] or (bool(match[2]) and len(match[3]) <= len(match[1]))


def _words_can_continue(text: str) -> bool:
    return re.fullmatch(r"[a-e]{0,2}|[a-e]{3}(abc|deg)*(a|ab|d|de)?", text) is not None


GRAMMARS: dict[str, tuple[Grammar, Definition]] = {
    "words": (
        Grammar.regex("[a-e]{3}(abc|deg)+"),
        Definition(
            lambda text: re.fullmatch("[a-e]{3}(abc|deg)+", text) is not None,
            _words_can_continue,
        ),
    ),
    # Not regular: the parser has a stack, which rolls back too.
    "nested": (
        Grammar.lark('start: "a" start "b" | "c"'),
        Definition(
            lambda text: (
                re.fullmatch(r"a*cb*", text) is not None and text.count("a") == text.count("b")
            ),
            _nested_can_continue,
        ),
    ),
    # A single text, so that all its tokens are certain.
    "certain": (
        Grammar.choice(["gabbadekaihag"]),
        Definition(lambda text: text == "gabbadekaihag", "gabbadekaihag".startswith),
    ),
}


@cache
def target_of(name: str) -> LanguageModel:
    """The target with a vocabulary of letters."""
    target = copy(cases.target(name))
    target.vocabulary = TOKENS
    return target


@cache
def defined(target: str, grammar: str, temperature: float, prompt_index: int) -> list[int]:
    """The new tokens of a prompt by the definition of its grammar, without a cache or a mask."""
    prompt = cases.PROMPTS[prompt_index]
    definition = GRAMMARS[grammar][1]
    processor = Definition(definition.is_complete, definition.can_continue, len(prompt))
    return oracle.decode(
        cases.target(target),
        prompt,
        max_new_tokens=NUM_NEW,
        sampling=Sampling(temperature, processors=[processor]),
        eos=(EOS,),
        index=prompt_index,
    )


def all_defined(target: str, grammar: str, temperature: float) -> list[list[int]]:
    return [defined(target, grammar, temperature, i) for i in range(len(cases.PROMPTS))]


def test_a_choice_may_hold_every_character() -> None:
    for code in [*range(0x300), 0x2028, 0xFEFF, 0x1F600]:
        source = Grammar.choice([f"a{chr(code)}b", 'c"\\'])
        library_text = text_grammar.library_grammar(source.kind, source.source)
        assert llguidance.LLMatcher.validate_grammar(library_text) == "", hex(code)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("target", ["rnn", "transformer"])
def test_standard_decoding_under_a_grammar_is_its_definition(
    target: str, grammar: str, temperature: float
) -> None:
    sampling = Sampling(temperature, processors=[GRAMMARS[grammar][0]])
    result = autoregressive_decode(
        target_of(target), cases.PROMPTS, max_new_tokens=NUM_NEW, sampling=sampling, eos=EOS
    )
    assert result.tokens == all_defined(target, grammar, temperature)
    for row in result.rows:
        if row.stop_reason == "eos":
            assert GRAMMARS[grammar][1].is_complete(TOKENS.join(row.tokens[:-1]).decode())
        else:
            assert row.stop_reason == "length"


@pytest.mark.parametrize(
    ("target", "drafter", "grammar", "temperature"),
    [
        (*pair, *turn)
        for pair in cases.ONE_EACH
        for turn in cases.in_turn([*GRAMMARS], (0.0, 1.0), *pair)
    ],
)
def test_exact_match_equals_standard_decoding_under_a_grammar(
    target: str, drafter: str, grammar: str, temperature: float
) -> None:
    sampling = Sampling(temperature, processors=[GRAMMARS[grammar][0]])
    result = speculative_decode(
        target_of(target),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        max_new_tokens=NUM_NEW,
        num_draft_tokens=4,
        sampling=sampling,
        eos=EOS,
    )
    assert result.tokens == all_defined(target, grammar, temperature)


@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [(*pair, rule) for pair in cases.ONE_EACH for rule in cases.rules_of(pair[1])],
)
def test_every_rule_keeps_to_the_grammar(target: str, drafter: str, rule: str) -> None:
    """Greedy, a lossless rule has the tokens of standard decoding. A lossy one fits too."""
    result = speculative_decode(
        target_of(target),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        max_new_tokens=NUM_NEW,
        num_draft_tokens=3,
        sampling=Sampling(0.0, processors=[GRAMMARS["words"][0]]),
        rule=rule,
        eos=EOS,
    )
    if cases.RULES[rule].lossless:
        assert result.tokens == all_defined(target, "words", 0.0)
    for row in result.rows:
        definition = GRAMMARS["words"][1]
        ended = row.stop_reason == "eos"
        text = TOKENS.join(row.tokens[:-1] if ended else row.tokens).decode()
        assert definition.is_complete(text) if ended else definition.can_continue(text)


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        (*pair, rule)
        for pair in cases.ONE_EACH
        for rule in ("ExactMatch", "RejectionSampling")
        if rule == "RejectionSampling" or pair[1] in ("near", "ngram", "early_exit", "lookup_heads")
    ],
)
def test_rows_with_different_grammars_have_the_tokens_that_they_have_alone(
    target: str, drafter: str, rule: str
) -> None:
    """They join, leave and resume at random."""
    generator = random.Random(3)
    model = target_of(target)
    drafter_object = cases.drafter(drafter, target)
    settings: dict[str, Any] = {
        "num_draft_tokens": 3,
        "rule": rule,
        "temperature": 1.0,
        "eos": (EOS,),
    }
    session = Session(model, drafter_object, max_length=40, **settings)
    grammars: list[Any] = [*GRAMMARS, None]
    rows: list[tuple[Request, dict[str, Any]]] = []
    while len(rows) < 10 or session.live:
        if len(rows) < 10 and generator.random() < 0.6:
            name = grammars[len(rows) % len(grammars)]
            processors = () if name is None else (GRAMMARS[name][0],)
            options: dict[str, Any] = {
                "processors": processors,
                "max_new_tokens": NUM_NEW,
                "index": len(rows),
            }
            prompt = cases.PROMPTS[generator.randrange(len(cases.PROMPTS))]
            row = session.add(prompt, **options)
            rows.append((row, options))
        if session.live and generator.random() < 0.1:
            session.cancel(generator.choice(session.live))
        session.step()

    for row, options in rows:
        alone = Session(model, drafter_object, max_length=40, **settings)
        single = alone.add(row.text[: row.prompt_length], **options)
        while single.live:
            alone.step()
        assert single.text[: len(row.text)] == row.text
        if row.stop_reason != "cancelled":
            assert single.text == row.text


@pytest.mark.parametrize("drafter", ["near", "early_exit", "heads", "ngram"])
def test_recorded_calls_change_nothing_under_a_grammar(drafter: str) -> None:
    recorded_model: Any = deepcopy(cases.target("llama"))
    recorded_model.record()
    recorded_model.vocabulary = TOKENS
    recorded_drafter: Any = deepcopy(cases.drafter(drafter, "llama"))
    if isinstance(recorded_drafter, ModelDrafter):
        recorded_drafter.model = recorded_drafter.model.record()  # type: ignore[operator]
    for grammar in GRAMMARS:
        options: dict[str, Any] = {
            "max_new_tokens": NUM_NEW,
            "processors": (GRAMMARS[grammar][0],),
            "eos": EOS,
        }
        expected = all_defined("llama", grammar, 0.0)
        standard = autoregressive_decode(recorded_model, cases.PROMPTS, **options)
        speculative = speculative_decode(
            recorded_model, recorded_drafter, cases.PROMPTS, num_draft_tokens=3, **options
        )
        assert standard.tokens == expected
        assert speculative.tokens == expected


def test_the_next_turn_of_a_row_begins_its_grammar_again() -> None:
    model = target_of("transformer")
    session = Session(
        model,
        cases.drafter("near", "transformer"),
        max_length=60,
        processors=(GRAMMARS["nested"][0],),
        eos=EOS,
        temperature=1.0,
    )
    row = session.add([3, 1], max_new_tokens=NUM_NEW)
    for _ in range(3):
        while row.live:
            session.step()
        text = TOKENS.join(row.text[row.prompt_length :]).decode().removesuffix("f")
        assert _nested_can_continue(text)
        row = session.resume(row, [*row.text, 9, 2], max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("sampling", exact.SAMPLINGS)
def test_a_round_has_exactly_the_distribution_of_the_masked_target(sampling: str) -> None:
    """Rejection sampling, for every draft, also those that the grammar forbids."""
    vocabulary = letters(exact.VOCAB)
    model = copy(cases.MODELS["rnn"](1, vocab_size=exact.VOCAB))
    model.vocabulary = vocabulary
    own = exact.SAMPLINGS[sampling]
    # Token 2 is "c" and ends a row.
    grammar = Grammar.regex("(ab|b|ba)+")
    allowed_after = {"": "ab", "a": "b", "b": "abc", "ab": "abc", "ba": "bc", "bb": "abc"}
    # A text of "ba" may be complete or the beginning of "bab".
    allowed_after["ba"] = "abc"

    prompt = [1, 1, 0]
    processed = own.changed(processors=(grammar,)).for_row(len(prompt), model, frozenset({2}))
    texts = [prompt] * len(exact.DRAFTS)
    drafts = [list(tokens) for tokens in exact.DRAFTS]
    target_logits = processed.process(exact.TARGET_LOGITS, texts, drafts, stop_at_impossible=True)
    # This draft knows no grammar.
    reported_probs = own.probs(exact.DRAFT_LOGITS)
    measured = exact.MeasuredRule(RejectionSampling(), own, target_logits, reported_probs)
    round_probs = measured.round_probs(exact.measure_draft_probs(own, exact.DRAFT_LOGITS))

    masked_target = {}
    for tokens, logits in exact.TARGET.items():
        allowed = allowed_after.get(vocabulary.join(tokens).decode(), "abc")
        mask = torch.tensor([letter not in allowed for letter in "abc"])
        masked_target[tokens] = logits.masked_fill(mask, -torch.inf)
    target_probs = exact.sampled_probs(masked_target, own)
    assert exact.largest_error(round_probs, target_probs) < exact.TOLERANCE


@pytest.mark.parametrize("drafter", ["ngram", "near", "early_exit", "staged", "lookup_eagle"])
def test_certain_text_is_drafted_without_a_draft_model(drafter: str) -> None:
    """A grammar of one text is its own draft: a round takes a window and one token more."""
    target = cases.target_of(drafter)
    session = open_session(
        target_of(target),
        cases.drafter(drafter, target),
        [1, 2],
        max_new_tokens=20,
        num_draft_tokens=6,
        processors=(GRAMMARS["certain"][0],),
        eos=EOS,
    )
    result = run(session)
    assert TOKENS.join(result.rows[0].tokens).decode() == "gabbadekaihagf"
    assert result.rows[0].stop_reason == "eos"
    assert result.num_target_calls == 2
    assert result.num_draft_calls == 0


def test_each_position_has_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft and the target use the same one."""
    from lightning_specdec.rules.grammar import GrammarMask

    positions: list[tuple[int, ...]] = []
    compute = GrammarMask._compute_mask

    def counted(self: GrammarMask) -> Tensor:
        positions.append(tuple(self._read))
        return compute(self)

    monkeypatch.setattr(GrammarMask, "_compute_mask", counted)
    result = speculative_decode(
        target_of("transformer"),
        cases.drafter("itself", "transformer"),
        [1, 2],
        max_new_tokens=NUM_NEW,
        num_draft_tokens=3,
        processors=(GRAMMARS["words"][0],),
        eos=EOS,
    )
    assert result.rows[0].counts is not None
    assert result.rows[0].counts.num_accepted == result.rows[0].counts.num_proposed
    assert len(positions) == len(set(positions)) <= NUM_NEW


def test_a_text_of_no_further_token_ends_its_row_alone() -> None:
    """The model has no token for "z": the row fails, the other one does not."""
    model = target_of("rnn")
    session = Session(model, cases.drafter("near", "rnn"), max_length=40, eos=EOS)
    failing = session.add([1, 2], processors=(Grammar.regex("abz"),), max_new_tokens=NUM_NEW)
    other = session.add([1, 2], processors=(GRAMMARS["certain"][0],), max_new_tokens=20)
    while session.live:
        session.step()
    assert failing.stop_reason == "failed"
    assert failing.failure == "no token of the model can continue the text"
    assert TOKENS.join(failing.text[2:]) == b"ab"
    assert other.stop_reason == "eos"


def test_a_dead_end_of_a_draft_is_none_of_the_text() -> None:
    """A drafter may propose what no token continues. The text goes another way."""
    sampling = Sampling(processors=(Grammar.regex("(ab|acz)+"),))
    (mask,) = sampling.for_row(1, target_of("rnn"), frozenset({EOS})).processors
    scores = torch.zeros(1, cases.VOCAB)

    def allowed(*tokens: int) -> list[int]:
        text = [3, *tokens]
        processed = mask.process(text, len(text), scores)
        return [token for token in range(cases.VOCAB) if processed[0, token] == 0]

    for _ in range(2):
        assert allowed() == [0]
        assert allowed(0) == [1, 2]
        assert allowed(0, 2) == []
        assert allowed(0, 1) == [0, EOS]
        assert allowed(0, 1, 0, 2) == []
        assert allowed(0, 1, 0, 1) == [0, EOS]


def test_a_grammar_that_takes_too_long_ends_its_row_alone() -> None:
    model = target_of("rnn")
    session = Session(model, cases.drafter("near", "rnn"), max_length=40, eos=EOS)
    words = GRAMMARS["words"][0]
    slow = session.add([1, 2], processors=(replace(words, max_seconds=0.0),), max_new_tokens=9)
    other = session.add([1, 2], processors=(words,), max_new_tokens=9)
    while session.live:
        session.step()
    assert slow.stop_reason == "failed"
    assert slow.failure == "the grammar takes too long to continue the text"
    assert other.stop_reason in ("eos", "length")


def test_rejected_draft_tokens_use_up_no_limit_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library counts the states of a lexer, also of text that was rolled back."""
    monkeypatch.setattr(text_grammar, "MAX_LEXER_STATES", 400)
    # Each end of a text is another state.
    sampling = Sampling(processors=(Grammar.regex("[ab]*a[ab]{9}c"),))
    target = copy(target_of("rnn"))
    target.vocabulary = letters(cases.VOCAB)
    (mask,) = sampling.for_row(1, target, frozenset({EOS})).processors
    scores = torch.zeros(1, cases.VOCAB)
    generator = random.Random(0)
    text = [3, 0, 1, 1]
    expected = mask.process(text, len(text), scores)
    for _ in range(200):
        draft = [generator.randrange(2) for _ in range(12)]
        for length in range(len(text), len(text) + len(draft)):
            processed = mask.process([*text, *draft], length, scores)
            assert torch.isfinite(processed).any()
        assert mask.process(text, len(text), scores).equal(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("("), "the regular expression is refused: .*unclosed group"),
        (lambda: Grammar.lark("start: missing"), 'the grammar is refused: .*"missing"'),
        (lambda: Grammar.json_schema({"type": "strin"}), "the JSON schema is refused: .*strin"),
        (lambda: Grammar.json_schema('{"type"'), "the JSON schema is no JSON"),
        (lambda: Grammar.json_schema("3"), "must be an object"),
        (lambda: Grammar.choice([]), "needs at least one text"),
        (
            lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}),
            "refused: .*uniqueItems",
        ),
        (
            lambda: Grammar.json_schema(
                {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
            ),
            "refused: .*uniqueItems",
        ),
        (
            lambda: Grammar.json_schema({"$ref": "http://localhost:1/schema.json"}),
            "refused: .*does not fetch",
        ),
        (
            lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}),
            "refused: .*does not fetch",
        ),
    ],
)
def test_what_the_library_refuses_is_one_line(make: Callable[[], Grammar], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        autoregressive_decode(target_of("rnn"), [1], processors=(make(),), eos=EOS)
    assert "\n" not in str(raised.value)


def test_a_grammar_needs_a_vocabulary_and_an_eos() -> None:
    grammar = GRAMMARS["words"][0]
    with pytest.raises(ValueError, match="needs the text of the target's tokens"):
        autoregressive_decode(cases.target("rnn"), [1], processors=(grammar,), eos=EOS)
    with pytest.raises(ValueError, match="give eos"):
        Session(
            target_of("rnn"), cases.drafter("ngram", "rnn"), max_length=9, processors=(grammar,)
        )


def test_a_tokenizer_that_changes_the_end_of_a_text_is_refused() -> None:
    model = copy(cases.target("rnn"))
    model.vocabulary = Vocabulary(TOKENS.token_bytes, num_stripped_at_end=1)
    with pytest.raises(ValueError, match="removes spaces at the end"):
        autoregressive_decode(model, [1], processors=(GRAMMARS["words"][0],), eos=EOS)


def test_a_grammar_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[structured\]'"):
        autoregressive_decode(
            target_of("rnn"), [1], processors=(Grammar.regex("abcde|a"),), eos=EOS
        )

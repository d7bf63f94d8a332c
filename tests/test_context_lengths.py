"""Laws of context lengths: scaled positions, drafts with a shorter context, the last position."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from families import greedy_tokens, tiny
from transformers import GenerationConfig, PreTrainedConfig

import lightning_specdec
from lightning_specdec import ModelDrafter, NGramDrafter, SpeculativeDecoder
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.session import Conversation, Session, run
from lightning_specdec.drafters import StagedDrafter
from lightning_specdec.drafters.ngram_with_fallback import NGramWithFallback
from lightning_specdec.models.attention import max_positions, position_switch
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import RULES

CONTEXT = 96


def model_of(family: str = "llama", **sizes: Any) -> Any:
    model: Any = tiny(family, **sizes)
    model.generation_config = GenerationConfig(do_sample=False)
    return model


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    tokens: list[int] = torch.randint(1, 67, (num_tokens,), generator=generator).tolist()
    return tokens


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0},
    "yarn of a known length": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": CONTEXT,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
    },
}


@pytest.mark.quick_cases("llama3")
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_positions_reach_the_scaled_length(kind: str) -> None:
    model = model_of(rope_parameters=SCALINGS[kind])
    decoder = SpeculativeDecoder(model)
    assert decoder.target.max_positions == 2 * CONTEXT

    prompt = prompt_of(CONTEXT - 6)
    expected = greedy_tokens(model, prompt, 2 * CONTEXT - len(prompt))
    assert len(expected) == CONTEXT + 6
    options: dict[str, Any] = {"max_new_tokens": len(expected)}
    assert decoder.decode([prompt], **options).tokens == [expected]
    assert decoder.decode_standard([prompt], **options).tokens == [expected]

    with pytest.raises(ValueError, match="context of 192"):
        decoder.decode([prompt], max_new_tokens=len(expected) + 2)


def test_a_config_that_has_the_scaled_length_already_is_not_scaled_again() -> None:
    scaling = {**SCALINGS["yarn"], "original_max_position_embeddings": CONTEXT // 2}
    assert HuggingFaceLM(model_of(rope_parameters=scaling)).max_positions == CONTEXT
    scaling = {**SCALINGS["llama3"], "factor": 32.0, "original_max_position_embeddings": 48}
    assert HuggingFaceLM(model_of(rope_parameters=scaling)).max_positions == CONTEXT


def test_scaling_beyond_the_original_length_counts_from_the_original_length() -> None:
    """As Qwen's cards describe it: 32768 in the config, and a factor of 4 for 131072."""
    scaling = {**SCALINGS["yarn"], "factor": 4.0, "original_max_position_embeddings": CONTEXT}
    assert HuggingFaceLM(model_of(rope_parameters=scaling)).max_positions == 4 * CONTEXT


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_last_new_token_needs_no_position(family: str) -> None:
    model = model_of(family)
    prompt = prompt_of(90)
    expected = greedy_tokens(model, prompt, 7)
    decoder = SpeculativeDecoder(model, model_of(family, seed=2))
    for window in (1, 3, 8):
        result = decoder.decode([prompt], max_new_tokens=7, num_draft_tokens=window)
        assert result.tokens == [expected]
    assert decoder.decode_standard([prompt], max_new_tokens=7).tokens == [expected]
    assert greedy_tokens(model, prompt, 7, custom_generate=lightning_specdec.generate) == expected
    with pytest.raises(ValueError, match="do not fit the target's context of 96"):
        decoder.decode([prompt], max_new_tokens=8)


def test_a_chat_may_fill_its_context() -> None:
    model = model_of("gpt2")
    target = HuggingFaceLM(model)
    prompt = prompt_of(90)
    conversation = Conversation(target, NGramDrafter(), DecodingConfig(max_new_tokens=50))
    row = conversation.begin(prompt)
    run(conversation.session)
    assert row.text[90:] == greedy_tokens(model, prompt, 7)
    with pytest.raises(ValueError, match="fill the chat's context of 96"):
        conversation.begin(row.text)


SHORT = 16
"""Context of the draft in tokens."""


def drafts_of(kind: str) -> tuple[Any, Any]:
    """A target, and a draft of a short context."""
    if kind == "transformer":
        short_llama = HuggingFaceLM(model_of("llama", max_position_embeddings=SHORT))
        return HuggingFaceLM(model_of("llama")), short_llama
    if kind == "absolute positions":
        return HuggingFaceLM(model_of("gpt2")), HuggingFaceLM(model_of("gpt2", n_positions=SHORT))
    target = cases.target("transformer")
    draft = cases.near(target)
    draft.max_positions = SHORT
    return target, draft


def drafters_of(draft: Any) -> dict[str, Any]:
    return {
        "model": ModelDrafter(draft),
        "lookup first": NGramWithFallback(NGramDrafter(), ModelDrafter(draft)),
        "smaller stage": StagedDrafter([NGramDrafter(), ModelDrafter(draft)]),
        "larger stage": StagedDrafter([ModelDrafter(draft), ModelDrafter(draft)]),
    }


DRAFTERS = ("model", "lookup first", "smaller stage", "larger stage")
KINDS = ("transformer", "absolute positions", "own transformer")


@pytest.mark.quick_cases("absolute positions", "own transformer-smaller")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_a_shorter_context_drafts_from_the_end_of_the_text(
    kind: str, drafter: str
) -> None:
    target, draft = drafts_of(kind)
    prompts = [prompt_of(30), [5], prompt_of(SHORT)]
    prompts = [[token % target.vocab_size for token in prompt] for prompt in prompts]
    decoder = SpeculativeDecoder(target, drafters_of(draft)[drafter])
    for window in (4, 20):
        options: dict[str, Any] = {"max_new_tokens": 12, "num_draft_tokens": window}
        expected = decoder.decode_standard(prompts, **options)
        result = decoder.decode(prompts, **options)
        assert result.tokens == expected.tokens
        # A row does not depend on its batch.
        alone = decoder.decode([prompts[0]], **options)
        assert alone.rows[0].rounds == result.rows[0].rounds


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_works_with_a_draft_of_a_shorter_context(rule: str) -> None:
    target, draft = drafts_of("own transformer")
    decoder = SpeculativeDecoder(target, ModelDrafter(draft))
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.9}
    result = decoder.decode(cases.PROMPTS, rule=RULES[rule](), **options)
    standard = decoder.decode_standard(cases.PROMPTS, **options)
    if rule == "ExactMatch":
        assert result.tokens == standard.tokens
    assert [len(row) for row in result.tokens] == [40] * len(cases.PROMPTS)


def test_a_draft_that_reads_the_end_of_the_text_still_pays() -> None:
    """The draft is the target, with a limit on its context."""
    target, draft = drafts_of("own transformer")
    draft.load_state_dict(target.state_dict())
    result = SpeculativeDecoder(target, draft).decode([[1, 2, 3] * 10], max_new_tokens=60)
    counts = result.rows[0].counts
    assert counts is not None
    assert counts.num_accepted > 0.3 * counts.num_proposed
    assert counts.num_proposed > 60


def test_a_draft_whose_context_suffices_reads_every_token_once() -> None:
    target, draft = drafts_of("own transformer")
    state = ModelDrafter(draft).init_state(2, 64)
    draft.max_positions = None
    unlimited = ModelDrafter(draft).init_state(2, 64)
    assert state.firsts == unlimited.firsts == [0, 0]
    assert ModelDrafter(draft).max_positions is None


def test_a_conversation_outlives_the_context_of_its_draft() -> None:
    target, draft = drafts_of("own transformer")
    session = Session(target, ModelDrafter(draft), max_length=80, eos=cases.EOS)
    decoder = SpeculativeDecoder(target)
    row = session.add([1, 2, 3], max_new_tokens=12)
    run(session)
    for num_dropped, turn in [(0, [5, 1, 2]), (3, [6]), (0, [8, 2, 3]), (30, [7]), (0, [4])]:
        num_kept = max(1, len(row.text) - num_dropped)
        prompt = [*row.text[:num_kept], *turn]
        row = session.resume(row, prompt, max_new_tokens=12)
        run(session)
        expected = decoder.decode_standard(prompt, max_new_tokens=12, eos=cases.EOS).tokens[0]
        assert row.text[len(prompt) :] == expected


def test_a_layer_whose_positions_depend_on_the_length_bounds_the_context() -> None:
    """Layers of several kinds have a rotary scaling each."""
    changing = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0],
        "long_factor": [4.0],
    }
    for scalings, longest in (
        ({"full_attention": changing, "sliding_attention": {"rope_type": "default"}}, 32),
        ({"full_attention": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        ({"full_attention": {"rope_type": "default"}}, 256),
    ):
        config: Any = PreTrainedConfig()
        config.max_position_embeddings = 256
        config.rope_parameters = scalings
        assert max_positions(config) == longest
        assert position_switch(config) is None

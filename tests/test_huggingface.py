"""Laws of transformers models as `LanguageModel`: their logits and output, a truncatable state."""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import Any

import pytest
import tiny_tokenizers
import torch
from families import FAMILIES, MORE, greedy_tokens, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import ModelDrafter, NGramDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import quantize
from lightning_specdec.rules import RejectionSampling, Sampling

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 60, 66]]
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def reference(family: str) -> Any:
    """The model as transformers runs it."""
    with torch.inference_mode(False):
        return tiny(family)


@functools.cache
def ours(family: str) -> HuggingFaceLM:
    """The same weights as a `LanguageModel`."""
    # The first test may run in inference mode, and a later one may need gradients.
    with torch.inference_mode(False):
        return HuggingFaceLM(tiny(family))


@functools.cache
def packed(family: str) -> HuggingFaceLM:
    return ours(family).fused()


@functools.cache
def generated(family: str, num_new: int) -> list[list[int]]:
    """The new tokens of transformers' own greedy decoding for `PROMPTS`."""
    return [greedy_tokens(reference(family), prompt, num_new) for prompt in PROMPTS]


def random_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 67, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
@pytest.mark.parametrize("form", [ours, packed])
@torch.inference_mode()
def test_ragged_pieces_through_the_state_give_the_logits_of_the_whole(
    family: str, form: object
) -> None:
    """Each row reads pieces of other lengths, right-padded. Some tokens are read twice."""
    model = form(family)  # type: ignore[operator]
    tokens = random_tokens(3, 24)
    expected_logits = reference(family)(tokens).logits
    state = model.init_state(3, 24)
    pieces = [[7, 1, 4], [1, 6, 2], [5, 5, 1], [3, 1, 8]]
    for turn, lengths in enumerate(pieces):
        starts = list(state.consumed)
        positions = torch.tensor(starts)[:, None] + torch.arange(max(lengths))
        piece = tokens.gather(1, positions.clamp(max=23))
        logits = model(piece, state, valid_lengths=lengths).logits
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            assert_close(logits[row, :length], expected_logits[row, start : start + length])

        # Every second row reads its last token again.
        truncated_lengths = []
        for row, length in enumerate(state.consumed):
            truncated_lengths.append(length - (turn + row) % 2)
        state.truncate(truncated_lengths)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_padding_beyond_the_last_slot_changes_no_row(family: str, attention: str) -> None:
    """A row near its end shares a call with a long prompt, so its padding needs more slots than
    there are."""
    inner: Any = tiny(family)
    inner.set_attn_implementation(attention)
    target = HuggingFaceLM(inner)
    short_prompt = [1, 2, 3, 4, 5]
    long_prompt = [7 * i % 60 + 1 for i in range(50)]

    session = Session(target, NGramDrafter(), max_length=60, batch_size=2)
    first = session.add(short_prompt, max_new_tokens=55)
    while first.remaining > 6:
        session.step()
    second = session.add(long_prompt, max_new_tokens=8)
    while session.step():
        pass

    expected = autoregressive_decode(target, short_prompt, max_new_tokens=55)
    assert first.text[len(short_prompt) :] == expected.tokens[0]
    expected = autoregressive_decode(target, long_prompt, max_new_tokens=8)
    assert second.text[len(long_prompt) :] == expected.tokens[0]


@every_family
@pytest.mark.parametrize("form", [ours, packed])
def test_greedy_decoding_equals_generate(family: str, form: object) -> None:
    num_new = 24
    rows = autoregressive_decode(form(family), PROMPTS, max_new_tokens=num_new).tokens  # type: ignore[operator]
    assert len(set().union(*rows)) > 8, "a model that repeats one token would show nothing"
    assert rows == generated(family, num_new)


@every_family
@pytest.mark.parametrize("window", [1, 8])
def test_greedy_speculative_output_is_the_standard_one(family: str, window: int) -> None:
    target = ours(family)
    draft = deepcopy(target)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.1 * weight.std().nan_to_num() * noise)

    options: dict[str, Any] = {"max_new_tokens": 20, "eos": 5}
    expected = autoregressive_decode(target, PROMPTS, **options)
    result = speculative_decode(
        target, ModelDrafter(draft), PROMPTS, num_draft_tokens=window, **options
    )
    assert result.tokens == expected.tokens
    assert result.acceptance_rate is not None
    assert 0 < result.acceptance_rate < 1


@every_family
def test_a_ragged_batch_equals_its_rows_at_every_temperature(family: str) -> None:
    target, drafter = ours(family), ModelDrafter(HuggingFaceLM(tiny("llama", 2)))
    options = {"max_new_tokens": 12, "rule": RejectionSampling(), "sampling": Sampling(0.8)}
    together = speculative_decode(target, drafter, PROMPTS, **options)  # type: ignore[arg-type]
    for i, prompt in enumerate(PROMPTS):
        alone = speculative_decode(target, drafter, [prompt], indices=[i], **options)  # type: ignore[arg-type]
        assert alone.tokens[0] == together.tokens[i]


@every_family
def test_a_text_may_fill_the_context_to_its_last_token(family: str) -> None:
    """Padding and draft tokens after the context's end read no position that the model lacks."""
    target, drafter = ours(family), ModelDrafter(ours(family))
    prompts = [list(range(60)), [1, 2]]
    result = speculative_decode(target, drafter, prompts, max_new_tokens=36, num_draft_tokens=5)
    assert result.tokens == autoregressive_decode(target, prompts, max_new_tokens=36).tokens


@every_family
def test_features_are_the_hidden_states_of_transformers(family: str) -> None:
    tokens = random_tokens(2, 7)
    expected = reference(family)(tokens, output_hidden_states=True).hidden_states
    found = ours(family)(tokens, features=(0, 2)).features
    assert_close(found[0], expected[1])
    assert_close(found[2], expected[3])


@every_family
def test_the_users_model_generates_as_before(family: str) -> None:
    """The replaced attention changes nothing for transformers' own code."""
    model: Any = tiny(family)
    ids = random_tokens(1, 9)
    before = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    HuggingFaceLM(model).fused()
    after = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert before.tolist() == after.tolist()


def test_a_loaded_model_and_tokenizer_of_transformers_serve_as_they_are() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    model = tiny("llama", vocab_size=len(tokenizer))
    target = HuggingFaceLM(model, tokenizer=tokenizer)
    assert target.tokenizer is not None and target.vocabulary == target.tokenizer.vocabulary
    decoder = SpeculativeDecoder.from_pretrained(target)
    text = decoder.decode("the oak", max_new_tokens=5).rows[0].text
    assert text == tokenizer.decode(
        decoder.decode_standard("the oak", max_new_tokens=5).rows[0].tokens
    )
    bare = SpeculativeDecoder.from_pretrained(model, tiny("llama", 2, vocab_size=len(tokenizer)))
    assert (
        bare.decode([1, 2], max_new_tokens=5).tokens
        == bare.decode_standard([1, 2], max_new_tokens=5).tokens
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_int8_copy_is_a_good_draft_and_changes_nothing(family: str) -> None:
    """The rounded weights are near the target's: most draft tokens are accepted."""
    target, draft = ours(family), HuggingFaceLM(tiny(family))
    quantize(draft.model, "int8")
    weights = [weight for weight in draft.parameters() if hasattr(weight, "qdata")]
    assert len(weights) >= 12 and all(weight.qdata.dtype == torch.int8 for weight in weights)
    result = speculative_decode(target, ModelDrafter(draft.pack()), PROMPTS, max_new_tokens=20)
    assert result.tokens == autoregressive_decode(target, PROMPTS, max_new_tokens=20).tokens
    assert result.acceptance_rate is not None and result.acceptance_rate > 0.7


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        (
            "roberta",
            {"hidden_size": 16, "num_attention_heads": 2, "is_decoder": True},
            "decoder-only",
        ),
        (
            "gemma3_text",
            {"num_hidden_layers": 1, "use_bidirectional_attention": True},
            "attend to later ones",
        ),
        ("llama", {"_attn_implementation": "flex_attention"}, "runs on flex_attention"),
    ],
)
def test_a_model_that_is_no_decoder_or_takes_no_masks_is_refused_by_name(
    family: str,
    sizes: dict[str, Any],
    words: str,
) -> None:
    implementation = sizes.pop("_attn_implementation", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, vocab_size=20, **sizes)
        )
    model.config._attn_implementation = implementation or model.config._attn_implementation
    with pytest.raises(ValueError, match=words) as caught:
        HuggingFaceLM(model)
    assert type(model).__name__ in str(caught.value)


def test_eos_tokens_of_a_generation_config_count_however_the_model_is_given() -> None:
    model = tiny("llama", vocab_size=400)
    model.generation_config.eos_token_id = [5, 7]
    tokenizer = tiny_tokenizers.byte_level()
    for target in (model, HuggingFaceLM(model)):
        decoder = SpeculativeDecoder(target, tokenizer=tokenizer)
        assert {5, 7} <= set(decoder.eos)

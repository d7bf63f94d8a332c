"""`generate` with the arguments of transformers: each row is what transformers generates for it."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import CHAT
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import logits_process as theirs

import lightning_specdec
from lightning_specdec import RNN, ModelDrafter, NGramDrafter, SpeculativeDecoder
from lightning_specdec.hf_generate import _decoders, _translated
from lightning_specdec.rules import Sampling

TEXTS = ["the cat sat on the mat and the", "a guess", "said the dog the dog the"]
EOS = [1, 54, 107, 204, 300]
"""Tokens that the model generates, so that rows end at different times."""


@functools.cache
def models() -> tuple[Any, Any, Any]:
    """A target, a draft near it, and a tokenizer. Tests restore what they change."""
    tokenizer = byte_level(chat_template=CHAT, pad_token="<s>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "sharpness": 9.0}
    target = tiny("llama", 1, **sizes)
    draft = tiny("llama", 1, **sizes)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    return target, draft, tokenizer


@functools.cache
def decoder() -> SpeculativeDecoder:
    target, draft, tokenizer = models()
    return SpeculativeDecoder(target, draft, tokenizer=tokenizer)


def encode(texts: list[str] = TEXTS, *, padding_side: str = "left") -> dict[str, Tensor]:
    """The inputs of a call: a padded batch with its mask."""
    _, _, tokenizer = models()
    encoded = tokenizer(
        texts,
        padding=True,
        padding_side=padding_side,
        return_tensors="pt",
        return_token_type_ids=False,
    )
    return dict(encoded)


def generate_row_by_row(inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """The new tokens that transformers generates for each row without padding."""
    model, _, _ = models()
    rows = []
    for tokens, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        prompt = tokens[mask.bool()][None]
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        rows.append(output[0, prompt.shape[1] :].tolist())
    return rows


def output_of(
    inputs: dict[str, Tensor],
    new_tokens: list[list[int]],
    *,
    pad_token: int = 0,
) -> list[list[int]]:
    """What a call returns: the prompts as passed, the new tokens after them, then padding."""
    num_columns = max(len(row) for row in new_tokens)
    rows = []
    for prompt, row in zip(inputs["input_ids"].tolist(), new_tokens, strict=True):
        padding = [pad_token] * (num_columns - len(row))
        rows.append([*prompt, *row, *padding])
    return rows


def as_custom_generate(**options: Any) -> Any:
    """Call `generate` of transformers with this package's function."""
    model, _, _ = models()
    return model.generate(custom_generate=lightning_specdec.generate, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_eos": {"eos_token_id": None},
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "min_new": {"min_new_tokens": 9},
    "bad_words": {"bad_words_ids": [[186], [39], [146, 191]]},
    "suppress": {"suppress_tokens": [186, 39], "begin_suppress_tokens": [146]},
    "bias": {"sequence_bias": [[[139], 9.0], [[191, 184], -9.0]]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "forced_eos": {"forced_eos_token_id": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "several": {"repetition_penalty": 1.2, "min_new_tokens": 5, "renormalize_logits": True},
}


@pytest.mark.parametrize(
    ("name", "padding_side"),
    [("plain", "right"), *zip(SETTINGS, itertools.cycle(["left", "right"]), strict=False)],
)
def test_a_row_of_a_padded_batch_is_what_transformers_generates_for_that_row(
    name: str, padding_side: str
) -> None:
    inputs = encode(padding_side=padding_side)
    options = {"max_new_tokens": 14, **SETTINGS[name]}
    new_tokens = generate_row_by_row(inputs, **options)
    if name not in ("no_eos", "bias", "forced_eos"):
        assert len({len(row) for row in new_tokens}) > 1, "all rows end at the same time"

    expected_output = output_of(inputs, new_tokens)
    assert decoder().generate(**inputs, **options).tolist() == expected_output
    assert as_custom_generate(**inputs, **options).tolist() == expected_output


class NoRepeatAfterTwo(theirs.LogitsProcessor):
    """A user's processor that counts columns: from the third new token on, no token repeats."""

    def __init__(self, prompt_columns: int) -> None:
        self.prompt_columns = prompt_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.prompt_columns + 2:
            return scores
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def test_a_users_processor_sees_the_same_columns_as_in_transformers() -> None:
    model, _, _ = models()
    inputs = encode()
    prompt_columns = inputs["input_ids"].shape[1]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "logits_processor": [NoRepeatAfterTwo(prompt_columns)],
    }
    # Padded on the left, since the padding counts as columns.
    new_tokens = []
    for i in range(len(TEXTS)):
        row = {name: tensor[i : i + 1] for name, tensor in inputs.items()}
        output = model.generate(**row, **options)
        new_tokens.append(output[0, prompt_columns:].tolist())
    assert decoder().generate(**inputs, **options).tolist() == output_of(inputs, new_tokens)
    assert new_tokens != generate_row_by_row(inputs, max_new_tokens=12)


def test_a_function_of_allowed_tokens_gets_the_number_of_each_row() -> None:
    model, _, _ = models()
    inputs = encode()

    def allowed_tokens(row: int, tokens: Tensor) -> list[int]:
        return [row * 10 + 2, row * 10 + 3, 107]

    options: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed_tokens, "max_new_tokens": 8}
    expected_output = model.generate(**inputs, **options)
    assert torch.equal(decoder().generate(**inputs, **options), expected_output)


def test_a_generation_config_of_the_call_is_used() -> None:
    inputs = encode()
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3)
    new_tokens = generate_row_by_row(inputs, generation_config=config)
    output = decoder().generate(**inputs, generation_config=config)
    assert output.tolist() == output_of(inputs, new_tokens)


def test_the_models_own_generation_config_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = models()
    inputs = encode()
    prompt_columns = inputs["input_ids"].shape[1]
    config = GenerationConfig(eos_token_id=EOS, pad_token_id=3, repetition_penalty=1.5)
    monkeypatch.setattr(model, "generation_config", config)

    new_tokens = generate_row_by_row(inputs, max_new_tokens=9)
    output = decoder().generate(**inputs, max_new_tokens=9)
    assert output.tolist() == output_of(inputs, new_tokens, pad_token=3)

    max_length = prompt_columns + 4
    assert decoder().generate(**inputs, max_length=max_length).shape[1] <= max_length
    # Without a length, transformers generates 20 tokens.
    assert decoder().generate(**inputs, eos_token_id=None).shape[1] == prompt_columns + 20


class EvenToken(StoppingCriteria):
    """Ends a row at an even token after this number of columns."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        is_late = torch.tensor(input_ids.shape[1] > self.num_columns)
        return (input_ids[:, -1] % 2 == 0) & is_late


def through_even_token(tokens: list[int]) -> list[int]:
    """The tokens up to the first even one, without regard to the first token."""
    for i, token in enumerate(tokens):
        if i >= 1 and token % 2 == 0:
            return tokens[: i + 1]
    return tokens


def test_stopping_criteria_end_a_row_where_transformers_ends_it() -> None:
    inputs = encode()
    prompt_columns = inputs["input_ids"].shape[1]
    criteria = [EvenToken(prompt_columns + 1)]
    output = decoder().generate(**inputs, max_new_tokens=14, stopping_criteria=criteria)
    rows = generate_row_by_row(inputs, max_new_tokens=14)
    stopped_rows = [through_even_token(row) for row in rows]
    assert output.tolist() == output_of(inputs, stopped_rows)
    assert len({len(row) for row in stopped_rows}) > 1

    # The time is checked after each round, and the first round adds one token.
    output = decoder().generate(**inputs, max_new_tokens=40, max_time=0.0)
    assert output.shape[1] == prompt_columns + 1


def test_stop_strings_end_a_row_where_transformers_ends_it() -> None:
    model, _, tokenizer = models()
    inputs = encode(padding_side="right")
    whole_rows = generate_row_by_row(inputs, max_new_tokens=14, eos_token_id=None)
    stop_strings = [tokenizer.decode([whole_rows[0][5]]), tokenizer.decode([whole_rows[2][2]])]
    new_tokens = generate_row_by_row(
        inputs, max_new_tokens=14, stop_strings=stop_strings, tokenizer=tokenizer
    )
    assert min(len(row) for row in new_tokens) < 6

    expected_output = output_of(inputs, new_tokens)
    output = decoder().generate(**inputs, max_new_tokens=14, stop_strings=stop_strings)
    assert output.tolist() == expected_output
    hook = decoder().as_generate(stop_strings=stop_strings)
    output = model.generate(**inputs, max_new_tokens=14, custom_generate=hook)
    assert output.tolist() == expected_output

    config = GenerationConfig(stop_strings=stop_strings[0], max_new_tokens=14)
    new_tokens = generate_row_by_row(inputs, generation_config=config, tokenizer=tokenizer)
    output = decoder().generate(**inputs, generation_config=config)
    assert output.tolist() == output_of(inputs, new_tokens)


class RecordingStreamer:
    """A streamer that records its calls."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.num_ends = 0

    def put(self, tokens: Tensor) -> None:
        self.columns.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 3}])
def test_a_streamer_receives_what_transformers_passes_to_it(options: dict[str, Any]) -> None:
    model, _, _ = models()
    inputs = encode()
    prompt_columns = inputs["input_ids"].shape[1]
    streamer = RecordingStreamer()
    output = decoder().generate(**inputs, max_new_tokens=12, streamer=streamer, **options)
    expected_streamer = RecordingStreamer()
    model.generate(**inputs, max_new_tokens=12, streamer=expected_streamer, **options)

    prompts, *new_columns = streamer.columns
    assert prompts == expected_streamer.columns[0]
    assert torch.equal(torch.tensor(new_columns).T, output[:, prompt_columns:])
    assert len(streamer.columns) == len(expected_streamer.columns)
    assert streamer.num_ends == 1


def test_text_is_streamed_by_the_bound_object(capsys: pytest.CaptureFixture[str]) -> None:
    model, _, tokenizer = models()
    inputs = encode(TEXTS[:1])
    hook = decoder().as_generate(streamer=TextStreamer(tokenizer, skip_prompt=True))
    output = model.generate(**inputs, max_new_tokens=10, custom_generate=hook)
    new_text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out.strip("\n") == new_text

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, "max_new_tokens": 10, "streamer": streamer}
    thread = threading.Thread(target=decoder().generate, kwargs=options)
    thread.start()
    assert "".join(streamer) == new_text
    thread.join()


WARPED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 0, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 3, "typical_p": 0.9, "min_p": 0.01},
    {"top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    {"top_k": 4, "top_h": 0.5, "repetition_penalty": 1.3, "renormalize_logits": True},
    {"top_k": 2, "watermarking_config": WatermarkingConfig()},
]


@pytest.mark.parametrize("options", WARPED, ids=str)
def test_warpers_are_translated_without_a_change_to_the_distribution(
    options: dict[str, Any],
) -> None:
    model, _, _ = models()
    config, _ = model._prepare_generation_config(GenerationConfig(do_sample=True, **options))
    text = torch.tensor([[5, 6, 7, 5]])
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=4, device="cpu", encoder_input_ids=text
    )
    generator = torch.Generator().manual_seed(3)
    # bfloat16 makes some logits equal.
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * torch.randn(1, model.config.vocab_size, generator=generator)).to(dtype)
        expected_probs = processors(text, logits.float()).softmax(-1)
        settings, other_processors = _translated(processors, True, dtype != torch.float32)
        sampling = Sampling(**settings, processors=other_processors)
        processed_logits = sampling.process(logits[:, None], text.tolist())
        torch.testing.assert_close(sampling.probs(processed_logits)[0], expected_probs)


def test_the_default_warpers_of_transformers_become_settings() -> None:
    temperature = theirs.TemperatureLogitsWarper(0.5)
    top_k = theirs.TopKLogitsWarper(50)
    top_p = theirs.TopPLogitsWarper(0.9)
    settings, other_processors = _translated([temperature, top_k, top_p], True, False)
    assert settings == {"temperature": 0.5, "top_k": 50, "top_p": 0.9}
    assert other_processors == []

    # In another order, filters before the temperature mean something else.
    _, other_processors = _translated([top_p, top_k, temperature], True, False)
    assert other_processors == [top_p, top_k]


def next_token_probs(text: Tensor, sampling_temperature: float, top_k: int) -> dict[int, float]:
    """The target's distribution after a text."""
    model, _, _ = models()
    with torch.no_grad():
        logits = model(text).logits[0, -1].float()
    top_logits, top_tokens = (logits / sampling_temperature).topk(top_k)
    return dict(zip(top_tokens.tolist(), top_logits.softmax(-1).tolist(), strict=True))


def test_samples_have_the_distribution_of_the_target() -> None:
    """2,000 draws of two tokens. Chi-square (15 degrees) exceeds 50 once in 80,000 seeds."""
    inputs = encode(TEXTS[1:2])
    num_draws = 2000
    temperature = 1.5
    top_k = 4
    torch.manual_seed(0)
    output = as_custom_generate(
        **inputs,
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        max_new_tokens=2,
        eos_token_id=None,
        num_return_sequences=num_draws,
        rule="RejectionSampling",
    )
    counts = Counter(map(tuple, output[:, -2:].tolist()))

    expected_counts: dict[tuple[int, ...], float] = {}
    prompt = inputs["input_ids"]
    for first, first_prob in next_token_probs(prompt, temperature, top_k).items():
        text = torch.cat((prompt, torch.tensor([[first]])), dim=1)
        for second, second_prob in next_token_probs(text, temperature, top_k).items():
            expected_counts[first, second] = num_draws * first_prob * second_prob
    assert counts.keys() <= expected_counts.keys()
    chi_square = 0.0
    for pair, expected_count in expected_counts.items():
        chi_square += (counts[pair] - expected_count) ** 2 / expected_count
    assert chi_square < 50


def test_seeds_come_from_torch_unless_they_are_passed() -> None:
    inputs = encode()
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0}

    def sample(seed: int | None = None) -> list[list[int]]:
        return decoder().generate(**inputs, **options, max_new_tokens=8, seed=seed).tolist()

    torch.manual_seed(5)
    first_sample = sample()
    second_sample = sample()
    assert second_sample != first_sample
    torch.manual_seed(5)
    assert sample() == first_sample
    assert sample(seed=3) == sample(seed=3)
    assert sample(seed=3) != first_sample

    output = decoder().generate(**inputs, **options, max_new_tokens=4, num_return_sequences=3)
    assert len(output) == 9
    assert torch.equal(output[0, :3], output[2, :3]), "the samples of a prompt are adjacent"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "groups": ({"num_beams": 2, "penalty_alpha": 0.5}, "penalty_alpha"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "assistant_tokens": ({"num_assistant_tokens": 3}, "num_assistant_tokens"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "hidden": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states",
    ),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "encoder_penalty": ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty"),
    "memory": (
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(2, [1, 2])},
        "SynthID",
    ),
    "cache": ({"past_key_values": DynamicCache()}, "(cache|past_key_values) is not supported"),
    "positions": ({"position_ids": torch.arange(16)[None] + 4}, "position_ids"),
    "typo": ({"max_newtokens": 4}, "max_newtokens"),
    "window": ({"num_draft_tokens": 0}, "num_draft_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_a_speculative_equivalent_is_refused_by_name(name: str) -> None:
    options, message = REFUSED[name]
    text = torch.arange(16)[None] + 40
    inputs: dict[str, Any] = {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "max_new_tokens": 3,
    }
    with pytest.raises(ValueError, match=message):
        decoder().generate(**inputs, **options)
    with pytest.raises(ValueError, match=message):
        as_custom_generate(**inputs, **options)


@pytest.mark.parametrize("option_name", ["streamer", "assistant_model"])
def test_what_transformers_does_not_pass_on_has_no_effect_and_is_documented(
    option_name: str,
) -> None:
    model, draft, tokenizer = models()
    option_values = {"streamer": TextStreamer(tokenizer), "assistant_model": draft}
    options = {
        **encode(TEXTS[:1]),
        "max_new_tokens": 3,
        option_name: option_values[option_name],
    }
    expected_output = model.generate(**encode(TEXTS[:1]), max_new_tokens=3)
    assert torch.equal(as_custom_generate(**options), expected_output)
    hook = decoder().as_generate()
    assert torch.equal(model.generate(custom_generate=hook, **options), expected_output)
    assert option_name in (lightning_specdec.generate.__doc__ or "")


def test_what_a_decoder_already_has_is_refused_by_name() -> None:
    _, draft, _ = models()
    inputs = encode(TEXTS[:1])
    with pytest.raises(ValueError, match="its own drafter"):
        decoder().generate(**inputs, assistant_model=draft)
    with pytest.raises(ValueError, match="its decoder's own target"):
        draft.generate(**inputs, custom_generate=decoder().as_generate())
    with pytest.raises(ValueError, match="target of transformers"):
        SpeculativeDecoder(RNN(5)).generate(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="tokenizer"):
        SpeculativeDecoder(draft).generate(**inputs, stop_strings="x")
    with pytest.raises(ValueError, match="pad_token_id"):
        options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": None, "stop_strings": "x"}
        decoder().generate(**encode(), max_new_tokens=3, **options)


NO_MASK = "prompt 1 seems padded"


@pytest.mark.parametrize("pad_token", [0, 54], ids=["pad", "pad and eos"])
@pytest.mark.parametrize("column", [0, -1])
def test_a_padded_batch_without_a_mask_is_refused(column: int, pad_token: int) -> None:
    tokens = torch.full((2, 5), 50)
    tokens[1, column] = pad_token
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": pad_token}
    with pytest.raises(ValueError, match=NO_MASK):
        decoder().generate(tokens, **options)

    # A mask of ones states that the prompt is not padded.
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    new_tokens = generate_row_by_row(inputs, **options)
    output = decoder().generate(**inputs, **options)
    assert output.tolist() == output_of(inputs, new_tokens, pad_token=pad_token)


@pytest.mark.parametrize("column", [0, -1])
def test_decode_refuses_a_padded_batch_without_a_mask(column: int) -> None:
    tokens = torch.full((2, 5), 50)
    tokens[1, column] = 0
    with pytest.raises(ValueError, match=NO_MASK):
        decoder().decode(tokens, max_new_tokens=4)


@pytest.mark.parametrize("pad_token", [0, 54], ids=["pad", "pad and eos"])
@pytest.mark.parametrize("column", [0, -1])
def test_custom_generate_uses_the_mask_that_transformers_infers(
    column: int, pad_token: int
) -> None:
    tokens = torch.full((2, 5), 50)
    tokens[1, column] = pad_token
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": pad_token}
    if pad_token not in EOS:
        inputs = {"input_ids": tokens, "attention_mask": (tokens != pad_token).long()}
        new_tokens = generate_row_by_row(inputs, **options)
        output = as_custom_generate(inputs=tokens, **options)
        assert output.tolist() == output_of(inputs, new_tokens, pad_token=pad_token)
        return

    # transformers infers no mask from a token that also ends rows. Up to 5.17, it passes a mask of
    # ones instead of none.
    passes_ones = "_mask_length" not in inspect.getsource(GenerationMixin.generate)
    if passes_ones:
        assert as_custom_generate(inputs=tokens, **options).shape[0] == 2
    else:
        with pytest.raises(ValueError, match=NO_MASK):
            as_custom_generate(inputs=tokens, **options)


def test_a_model_is_left_unchanged_and_keeps_its_decoder_until_the_drafter_changes() -> None:
    model: Any = tiny("qwen2", 3, vocab_size=80)
    model.generation_config = GenerationConfig(eos_token_id=[5], pad_token_id=0)
    text = torch.tensor([[4, 8, 15, 16, 23, 42]])
    options: dict[str, Any] = {"max_new_tokens": 10, "attention_mask": torch.ones_like(text)}
    hooked: dict[str, Any] = {"custom_generate": lightning_specdec.generate, **options}
    expected_output = model.generate(text, **options)
    attention = model.config._attn_implementation

    assert torch.equal(model.generate(text, **hooked), expected_output)
    assert model.config._attn_implementation == attention
    assert torch.equal(model.generate(text, **options), expected_output)

    first_decoder = _decoders[model].decoder
    assert type(first_decoder.drafter) is NGramDrafter
    assert first_decoder.target.model is not model
    model.generate(text, **hooked)
    assert _decoders[model].decoder is first_decoder

    draft = tiny("qwen2", 4, vocab_size=80)
    output = model.generate(text, draft=draft, num_draft_tokens=5, **hooked)
    assert torch.equal(output, expected_output)
    assert type(_decoders[model].decoder.drafter) is ModelDrafter


def test_a_call_uses_weights_that_changed_after_the_last_one() -> None:
    model: Any = tiny("qwen2", 3, vocab_size=80)
    model.generation_config = GenerationConfig(eos_token_id=[5], pad_token_id=0)
    text = torch.tensor([[4, 8, 15, 16, 23, 42]])
    options: dict[str, Any] = {"max_new_tokens": 10, "attention_mask": torch.ones_like(text)}
    hooked: dict[str, Any] = {"custom_generate": lightning_specdec.generate, **options}
    first_output = model.generate(text, **hooked)

    other_model: Any = tiny("qwen2", 4, vocab_size=80)
    with torch.no_grad():
        model.lm_head.weight.copy_(other_model.lm_head.weight)
    output = model.generate(text, **hooked)
    assert torch.equal(output, model.generate(text, **options))
    assert not torch.equal(output, first_output)

    model.lm_head = torch.nn.Linear(32, 80, bias=False)
    expected_output = model.generate(text, **options)
    assert torch.equal(model.generate(text, **hooked), expected_output)
    output = model.generate(text, return_dict_in_generate=True, **hooked)
    assert torch.equal(output.sequences, expected_output)


def test_a_pipeline_decodes_speculatively() -> None:
    model, _, tokenizer = models()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    chat = [{"role": "user", "content": "hello"}]
    for prompts in (TEXTS[0], TEXTS, chat):
        expected_output = pipe(prompts, **options)
        for hook in (lightning_specdec.generate, decoder().as_generate()):
            assert pipe(prompts, custom_generate=hook, **options) == expected_output

    hook = lightning_specdec.generate
    assert len(pipe(TEXTS, batch_size=3, custom_generate=hook, **options)) == 3
    # The pipeline samples by default.
    pipe(TEXTS[0], custom_generate=hook, max_new_tokens=4)


def test_an_option_that_changes_no_token_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="lightning_specdec"):
        decoder().generate(**encode(TEXTS[:1]), max_new_tokens=3, use_cache=False)
    assert "without effect in speculative decoding: use_cache" in caplog.text


def test_the_code_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model instead of the one that the guide names."""
    model, _, tokenizer = models()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    guide_path = Path(__file__).parent.parent / "docs" / "transformers.md"
    guide = guide_path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    variables: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("checkpoints/smollm2", str(tmp_path)), variables)
    assert "LlamaForCausalLM" in capsys.readouterr().out

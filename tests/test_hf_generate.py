"""`generate` as transformers calls it: what comes back is what transformers gives, row by row."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import CHAT
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
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
"""Tokens that the model does say, so that rows end at different times."""


@functools.cache
def models() -> tuple[Any, Any, Any]:
    """A target, a draft that is a little off, and a tokenizer. Tests restore what they change."""
    tokenizer = byte_level(chat_template=CHAT, pad_token="<s>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "sharpness": 9.0}
    target, draft = tiny("llama", 1, **sizes), tiny("llama", 1, **sizes)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    return target, draft, tokenizer


def padded(side: str = "left", texts: list[str] = TEXTS) -> dict[str, Tensor]:
    encoded = models()[2](
        texts, padding=True, padding_side=side, return_tensors="pt", return_token_type_ids=False
    )
    return dict(encoded)


@functools.cache
def decoder() -> SpeculativeDecoder:
    target, draft, tokenizer = models()
    return SpeculativeDecoder(target, draft, tokenizer=tokenizer)


def alone(inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """The new tokens of each row by transformers itself: one row at a time, without padding."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        text = ids[mask.bool()][None]
        made = models()[0].generate(text, attention_mask=torch.ones_like(text), **options)
        rows.append(made[0, text.shape[1] :].tolist())
    return rows


def joined(inputs: dict[str, Tensor], rows: list[list[int]], pad: int = 0) -> list[list[int]]:
    """What a call returns: the prompts as passed, the new tokens after them, then padding."""
    width = max(map(len, rows))
    pairs = zip(inputs["input_ids"].tolist(), rows, strict=True)
    return [[*prompt, *row, *[pad] * (width - len(row))] for prompt, row in pairs]


class NotAfter(theirs.LogitsProcessor):
    """A processor of a user that counts columns: after two new tokens, none repeats at once."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.width + 2:
            return scores
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_of_a_padded_batch_is_what_transformers_makes_of_it_alone(
    name: str, side: str
) -> None:
    inputs, options = padded(side), {"max_new_tokens": 14, **SETTINGS[name]}
    expected = alone(inputs, **options)
    assert len({*map(len, expected)}) > 1 or name in ("no_eos", "bias", "forced_eos")
    for call in (
        decoder().generate,
        functools.partial(models()[0].generate, custom_generate=lightning_specdec.generate),
    ):
        assert call(**inputs, **options).tolist() == joined(inputs, expected)


def test_a_users_processor_sees_the_columns_that_transformers_shows() -> None:
    inputs = padded()
    processors = [NotAfter(inputs["input_ids"].shape[1])]
    expected = []
    for i in range(len(TEXTS)):  # by transformers, padded on the left
        row = {name: value[i : i + 1] for name, value in inputs.items()}
        made = models()[0].generate(**row, max_new_tokens=12, logits_processor=processors)
        expected.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    assert decoder().generate(
        **inputs, max_new_tokens=12, logits_processor=processors
    ).tolist() == joined(inputs, expected)
    assert expected != alone(inputs, max_new_tokens=12)


def test_allowed_tokens_are_asked_of_each_row_by_its_number() -> None:
    inputs = padded()

    def allowed(row: int, tokens: Tensor) -> list[int]:
        return [row * 10 + 2, row * 10 + 3, 107]

    options: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 8}
    expected = models()[0].generate(**inputs, **options)
    assert torch.equal(decoder().generate(**inputs, **options), expected)


def test_a_generation_config_and_the_models_own_are_honoured() -> None:
    model, inputs = models()[0], padded()
    before = model.generation_config
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3)
    expected = alone(inputs, generation_config=config)
    assert decoder().generate(**inputs, generation_config=config).tolist() == joined(
        inputs, expected
    )
    try:
        model.generation_config = GenerationConfig(
            eos_token_id=EOS, pad_token_id=3, repetition_penalty=1.5
        )
        expected = alone(inputs, max_new_tokens=9)
        assert decoder().generate(**inputs, max_new_tokens=9).tolist() == joined(
            inputs, expected, pad=3
        )
        longest = inputs["input_ids"].shape[1] + 4
        assert decoder().generate(**inputs, max_length=longest).shape[1] <= longest
        assert (
            decoder().generate(**inputs, eos_token_id=None).shape[1]
            == inputs["input_ids"].shape[1] + 20
        )
    finally:
        model.generation_config = before


class Ends(StoppingCriteria):
    """Ends a row with an even token behind so many columns."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return (input_ids[:, -1] % 2 == 0) & torch.tensor(input_ids.shape[1] > self.width)


def test_stopping_criteria_end_a_row_where_transformers_ends_it() -> None:
    inputs = padded()
    width = inputs["input_ids"].shape[1]
    found = decoder().generate(**inputs, max_new_tokens=14, stopping_criteria=[Ends(width + 1)])
    rows = []
    for row in alone(inputs, max_new_tokens=14):
        end = next((i + 1 for i, token in enumerate(row) if i >= 1 and token % 2 == 0), len(row))
        rows.append(row[:end])
    assert found.tolist() == joined(inputs, rows) and len({*map(len, rows)}) > 1
    quick = decoder().generate(**inputs, max_new_tokens=40, max_time=0.0)
    assert quick.shape[1] == width + 1


def test_stop_strings_end_a_row_where_transformers_ends_it() -> None:
    tokenizer, inputs = models()[2], padded("right")
    whole = alone(inputs, max_new_tokens=14, eos_token_id=None)
    stop = [tokenizer.decode([whole[0][5]]), tokenizer.decode([whole[2][2]])]
    expected = alone(inputs, max_new_tokens=14, stop_strings=stop, tokenizer=tokenizer)
    assert min(map(len, expected)) < 6
    assert decoder().generate(**inputs, max_new_tokens=14, stop_strings=stop).tolist() == joined(
        inputs, expected
    )
    bound = decoder().as_generate(stop_strings=stop)
    assert models()[0].generate(
        **inputs, max_new_tokens=14, custom_generate=bound
    ).tolist() == joined(inputs, expected)
    config = GenerationConfig(stop_strings=stop[0], max_new_tokens=14)
    one = alone(inputs, generation_config=config, tokenizer=tokenizer)
    assert decoder().generate(**inputs, generation_config=config).tolist() == joined(inputs, one)


class Columns:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: Tensor) -> None:
        self.got.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 3}])
def test_a_streamer_gets_what_transformers_gives_it(options: dict[str, Any]) -> None:
    inputs, ours, expected = padded(), Columns(), Columns()
    made = decoder().generate(**inputs, max_new_tokens=12, streamer=ours, **options)
    models()[0].generate(**inputs, max_new_tokens=12, streamer=expected, **options)
    assert torch.equal(torch.tensor(ours.got[1:]).T, made[:, inputs["input_ids"].shape[1] :])
    assert ours.got[0] == expected.got[0] and len(ours.got) == len(expected.got) and ours.ended == 1


def test_text_is_streamed_by_the_bound_object(capsys: pytest.CaptureFixture[str]) -> None:
    model, _, tokenizer = models()
    inputs = padded(texts=TEXTS[:1])
    bound = decoder().as_generate(streamer=TextStreamer(tokenizer, skip_prompt=True))
    made = model.generate(**inputs, max_new_tokens=10, custom_generate=bound)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(
        made[0, inputs["input_ids"].shape[1] :]
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, "max_new_tokens": 10, "streamer": streamer}
    thread = threading.Thread(target=decoder().generate, kwargs=options)
    thread.start()
    assert "".join(streamer) == tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
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
    model = models()[0]
    config, _ = model._prepare_generation_config(GenerationConfig(do_sample=True, **options))
    text = torch.tensor([[5, 6, 7, 5]])
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=4, device="cpu", encoder_input_ids=text
    )
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):  # which has equals
        logits = (3 * torch.randn(1, model.config.vocab_size, generator=generator)).to(dtype)
        expected = processors(text, logits.float()).softmax(-1)
        settings, kept = _translated(processors, True, dtype != torch.float32)
        sampling = Sampling(**settings, processors=kept)
        found = sampling.probs(sampling.process(logits[:, None], text.tolist()))[0]
        torch.testing.assert_close(found, expected)


def test_what_transformers_samples_by_default_needs_no_processor() -> None:
    warpers = [
        theirs.TemperatureLogitsWarper(0.5),
        theirs.TopKLogitsWarper(50),
        theirs.TopPLogitsWarper(0.9),
    ]
    assert _translated(warpers, True, False) == (
        {"temperature": 0.5, "top_k": 50, "top_p": 0.9},
        [],
    )
    assert _translated(warpers[::-1], True, False)[1] == warpers[:0:-1]


def test_samples_have_the_distribution_of_the_target() -> None:
    """2,000 draws of two tokens. Chi-square (15 degrees) exceeds 50 once in 80,000 seeds."""
    model, inputs = models()[0], padded(texts=TEXTS[1:2])
    options: dict[str, Any] = {
        "do_sample": True,
        "top_k": 4,
        "temperature": 1.5,
        "max_new_tokens": 2,
    }
    options |= {"eos_token_id": None, "num_return_sequences": 2000}
    torch.manual_seed(0)
    made = model.generate(
        **inputs, **options, custom_generate=lightning_specdec.generate, rule="RejectionSampling"
    )
    probs: dict[tuple[int, ...], float] = {}

    def laws(text: Tensor) -> list[tuple[int, float]]:
        with torch.no_grad():
            best = (model(text).logits[0, -1].float() / 1.5).topk(4)
        return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    for first, p in laws(inputs["input_ids"]):
        for second, q in laws(torch.cat((inputs["input_ids"], torch.tensor([[first]])), dim=1)):
            probs[first, second] = p * q
    pairs = [tuple(row) for row in made[:, -2:].tolist()]
    assert {*pairs} <= {*probs}
    assert sum((pairs.count(pair) - 2000 * p) ** 2 / (2000 * p) for pair, p in probs.items()) < 50


def test_seeds_come_from_torch_unless_they_are_given() -> None:
    inputs = padded()

    def sample(seed: int | None = None) -> list[list[int]]:
        made: Tensor = decoder().generate(
            **inputs, do_sample=True, temperature=2.0, max_new_tokens=8, seed=seed
        )
        return made.tolist()

    torch.manual_seed(5)
    first, second = sample(), sample()
    torch.manual_seed(5)
    assert sample() == first != second and sample(3) == sample(3) != first
    several = decoder().generate(
        **inputs, do_sample=True, temperature=2.0, max_new_tokens=4, num_return_sequences=3
    )
    assert len(several) == 9 and torch.equal(several[0, :3], several[2, :3])


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
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    options, word = REFUSED[name]
    text = torch.arange(16)[None] + 40
    inputs: dict[str, Any] = {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "max_new_tokens": 3,
    }
    for call in (
        decoder().generate,
        functools.partial(models()[0].generate, custom_generate=lightning_specdec.generate),
    ):
        with pytest.raises(ValueError, match=word):
            call(**inputs, **options)


def test_what_a_decoder_has_itself_is_refused_by_name() -> None:
    model, draft, tokenizer = models()
    inputs = padded(texts=TEXTS[:1])
    # transformers passes neither of these to a function, which documents that they have no effect.
    expected = model.generate(**inputs, max_new_tokens=3)
    hooks: list[Callable[..., Any]] = [lightning_specdec.generate, decoder().as_generate()]
    for hook in hooks:
        for option in ({"streamer": TextStreamer(tokenizer)}, {"assistant_model": draft}):
            output = model.generate(**inputs, custom_generate=hook, max_new_tokens=3, **option)
            assert torch.equal(output, expected)
    for word in ("streamer", "assistant_model"):
        assert word in (lightning_specdec.generate.__doc__ or "")
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
        decoder().generate(**padded(), max_new_tokens=3, **options)


@pytest.mark.parametrize("pad", [0, 54], ids=["another", "that ends rows"])
@pytest.mark.parametrize("side", [0, -1])
def test_a_padded_batch_without_a_mask_is_refused(side: int, pad: int) -> None:
    ids, model = torch.full((2, 5), 50), models()[0]
    ids[1, side] = pad
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": pad}
    with pytest.raises(ValueError, match="prompt 1 seems padded"):
        decoder().generate(ids, **options)
    with pytest.raises(ValueError, match="prompt 1 seems padded"):
        decoder().decode(ids, max_new_tokens=4) if not pad else decoder().generate(ids, **options)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }  # its mask says that it is not padded
    assert decoder().generate(**inputs, **options).tolist() == joined(
        inputs, alone(inputs, **options), pad
    )
    masks_itself = "_mask_length" not in inspect.getsource(GenerationMixin.generate)  # as in 5.17
    if pad in EOS and masks_itself:
        assert (
            model.generate(ids, custom_generate=lightning_specdec.generate, **options).shape[0] == 2
        )
    elif pad in EOS:
        with pytest.raises(ValueError, match="prompt 1 seems padded"):
            model.generate(ids, custom_generate=lightning_specdec.generate, **options)
    else:  # transformers finds the mask by itself
        made = model.generate(ids, custom_generate=lightning_specdec.generate, **options)
        inputs = {"input_ids": ids, "attention_mask": (ids != pad).long()}
        assert made.tolist() == joined(inputs, alone(inputs, **options), pad)


def test_a_model_stays_as_it_is_and_its_weights_may_change() -> None:
    model: Any = tiny("qwen2", 3, vocab_size=80)
    model.generation_config = GenerationConfig(eos_token_id=[5], pad_token_id=0)
    text = torch.tensor([[4, 8, 15, 16, 23, 42]])
    options: dict[str, Any] = {"max_new_tokens": 10, "attention_mask": torch.ones_like(text)}
    hook: dict[str, Any] = {"custom_generate": lightning_specdec.generate, **options}
    before, attention = model.generate(text, **options), model.config._attn_implementation
    assert torch.equal(model.generate(text, **hook), before)
    assert model.config._attn_implementation == attention and torch.equal(
        model.generate(text, **options), before
    )
    kept = _decoders[model].decoder
    model.generate(text, **hook)
    assert _decoders[model].decoder is kept
    assert type(kept.drafter) is NGramDrafter and kept.target.model is not model
    draft = tiny("qwen2", 4, vocab_size=80)
    assert torch.equal(model.generate(text, draft=draft, num_draft_tokens=5, **hook), before)
    assert type(_decoders[model].decoder.drafter) is ModelDrafter
    with torch.no_grad():
        model.lm_head.weight.copy_(draft.lm_head.weight)
    after = model.generate(text, **options)
    assert not torch.equal(after, before) and torch.equal(model.generate(text, **hook), after)
    model.lm_head = torch.nn.Linear(32, 80, bias=False)
    assert torch.equal(model.generate(text, **hook), model.generate(text, **options))
    found = model.generate(text, return_dict_in_generate=True, **hook)
    assert torch.equal(found.sequences, model.generate(text, **options))


def test_a_pipeline_decodes_speculatively() -> None:
    model, _, tokenizer = models()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    chat = [{"role": "user", "content": "hello"}]
    for prompts in (TEXTS[0], TEXTS, chat):
        expected = pipe(prompts, **options)
        for hook in (lightning_specdec.generate, decoder().as_generate()):
            assert pipe(prompts, custom_generate=hook, **options) == expected
    assert (
        len(pipe(TEXTS, batch_size=3, custom_generate=lightning_specdec.generate, **options)) == 3
    )
    pipe(
        TEXTS[0], custom_generate=lightning_specdec.generate, max_new_tokens=4
    )  # sampled, by its own defaults


def test_what_changes_no_token_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    inputs = padded(texts=TEXTS[:1])
    with caplog.at_level("INFO", logger="lightning_specdec"):
        decoder().generate(**inputs, max_new_tokens=3, use_cache=False)
    assert "without effect in speculative decoding: use_cache" in caplog.text


def test_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model in the place of the one that it names."""
    model, _, tokenizer = models()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    guide = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("checkpoints/smollm2", str(tmp_path)), names)
    assert len(blocks) == 4 and "LlamaForCausalLM" in capsys.readouterr().out


def multimodal(model_type: str) -> Any:
    """A tiny model that reads images as well."""
    text = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if model_type == "gemma3":
        config = AutoConfig.for_model(
            "gemma3",
            text_config={**text, "model_type": "gemma3_text", "sliding_window": 16},
            vision_config={**vision, "model_type": "siglip_vision_model"},
            mm_tokens_per_image=4,
        )
    else:
        config = AutoConfig.for_model(
            "llava",
            text_config={**text, "model_type": "llama"},
            vision_config={**vision, "model_type": "clip_vision_model"},
            image_token_index=299,
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_a_multimodal_model_decodes_a_text(model_type: str) -> None:
    """transformers passes it an empty collection of images, which is not an argument."""
    model = multimodal(model_type)
    ids = torch.tensor([[5, 6, 7, 5, 6, 9]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    expected = model.generate(ids, **options)
    assert torch.equal(SpeculativeDecoder(model).generate(ids, **options), expected)
    options["custom_generate"] = lightning_specdec.generate
    assert torch.equal(model.generate(ids, **options), expected)
    with pytest.raises(ValueError, match="pixel_values|mm_encoder_outputs"):
        model.generate(ids, pixel_values=torch.zeros(1, 3, 28, 28), **options)

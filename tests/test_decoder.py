"""The decoder with inputs of users: padded batches, configs, streamed text, changed weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import write_text_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_specdec import RNN, DecodingConfig, ModelDrafter, NGramDrafter, SpeculativeDecoder
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.text.tokenizer import ByteTokenizer

Pair = tuple[SpeculativeDecoder, Any]
TEXTS = ["the cat sat on the mat and", "a guess"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A decoder of a tiny model, and transformers' tokenizer of it."""
    path = write_text_model(tmp_path_factory.mktemp("model"))
    return SpeculativeDecoder.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_read_by_its_attention_mask(pair: Pair, side: str) -> None:
    decoder, tokenizer = pair
    tokenizer.add_special_tokens({"pad_token": tokenizer.pad_token or tokenizer.eos_token})
    tokenizer.padding_side = side
    padded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert not bool(padded["attention_mask"].all())
    expected = decoder.decode(TEXTS, max_new_tokens=6)
    expected_prompts = [row.prompt for row in expected.rows]
    lists = {name: value.tolist() for name, value in padded.items()}
    for prompts in (padded, dict(padded), lists):
        for decode in (decoder.decode, decoder.decode_standard):
            result = decode(prompts, max_new_tokens=6)
            assert [row.prompt for row in result.rows] == expected_prompts
            assert result.tokens == expected.tokens

    # Without the mask, padding is recognized by its token.
    assert decoder.target.vocabulary is not None
    decoder.target.vocabulary.special["pad"] = tokenizer.pad_token_id
    with pytest.raises(ValueError, match="prompt 1 seems padded"):
        decoder.decode(padded["input_ids"], max_new_tokens=6)
    del decoder.target.vocabulary.special["pad"]


@pytest.mark.parametrize("stop", [(), ("a", " t")])
def test_pieces_of_text_add_up_to_the_text(pair: Pair, stop: tuple[str, ...]) -> None:
    decoder, _ = pair
    config = DecodingConfig(max_new_tokens=20, stop=stop, eos=())
    streamed_texts = ["", ""]
    for number, piece in decoder.stream_text(TEXTS, config):
        assert piece
        streamed_texts[number] += piece
    result = decoder.decode(TEXTS, config)
    standard = decoder.decode_standard(TEXTS, config)
    assert [row.text for row in result.rows] == streamed_texts
    assert [row.text for row in standard.rows] == streamed_texts

    streamed_tokens = [token for _, token in decoder.stream(TEXTS[0], config)]
    assert streamed_tokens == result.tokens[0]


def test_the_text_of_one_prompt_comes_as_text_and_can_be_cancelled(pair: Pair) -> None:
    decoder, _ = pair
    config = DecodingConfig(max_new_tokens=40, eos=())
    complete = decoder.decode(TEXTS[0], config)
    assert complete.text is not None
    assert complete.texts[0] == complete.text
    assert "".join(decoder.stream_text(TEXTS[0], config)) == complete.text

    stream = decoder.stream_text(TEXTS[0], config)
    partial_text = next(stream)
    partial_text += next(stream)
    stream.cancel()
    partial_text += "".join(stream)
    result = stream.session.result()
    assert result.rows[0].stop_reason == "cancelled"
    assert 0 < result.num_new_tokens < 40
    assert partial_text
    # The last character may be cut in the middle of its bytes.
    assert complete.text.startswith(partial_text.rstrip("\ufffd"))


def test_a_stream_is_cancelled_from_another_thread_in_the_middle_of_a_round(pair: Pair) -> None:
    decoder, tokenizer = pair
    streams: list[Any] = []

    def cancel_late(prefix: Tensor, scores: Tensor) -> Tensor:
        if prefix.shape[1] == 30:
            thread = threading.Thread(target=streams[0].cancel)
            thread.start()
            thread.join()
        return scores

    config = DecodingConfig(max_new_tokens=60, eos=(), processors=(cancel_late,))
    stream = decoder.stream_text(TEXTS, config)
    streams.append(stream)
    streamed_texts = ["", ""]
    for number, piece in stream:
        streamed_texts[number] += piece

    rows = stream.session.result().rows
    assert 0 < len(rows[0].tokens) < 60
    for row, streamed_text in zip(rows, streamed_texts, strict=True):
        assert row.stop_reason == "cancelled"
        assert streamed_text == tokenizer.decode(row.tokens, skip_special_tokens=True)


def test_threads_share_a_decoder(pair: Pair) -> None:
    """Rounds of two threads never overlap, and threads do not change each other's output."""
    decoder, _ = pair
    target = decoder.ready()[0]
    forward = target.forward
    num_running = 0
    max_running = 0

    def counted_forward(*values: Any, **options: Any) -> Any:
        nonlocal num_running, max_running
        num_running += 1
        max_running = max(max_running, num_running)
        time.sleep(0.001)
        try:
            return forward(*values, **options)
        finally:
            num_running -= 1

    config = DecodingConfig(max_new_tokens=15, eos=())
    expected = [decoder.decode(text, config).tokens for text in TEXTS]
    target.forward = counted_forward  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(4) as pool:
            jobs = []
            for _ in range(2):
                jobs.append(pool.submit(decoder.decode, TEXTS[0], config))
                jobs.append(pool.submit(decoder.decode_standard, TEXTS[1], config))
            tokens = [job.result().tokens for job in jobs]
    finally:
        del target.forward
    assert tokens == [*expected, *expected]
    assert max_running == 1


def test_a_decoder_takes_what_transformers_has_loaded(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config = GenerationConfig(eos_token_id=[1, 200])
    tokenizer = AutoTokenizer.from_pretrained(path)
    draft_model = tiny("llama", 2, vocab_size=len(tokenizer))
    reference = SpeculativeDecoder.from_pretrained(path)
    expected = reference.decode(TEXTS, max_new_tokens=6, eos=(1, 200))
    for draft, drafter_class in ((None, NGramDrafter), (draft_model, ModelDrafter)):
        decoder = SpeculativeDecoder(model, draft, tokenizer=tokenizer)
        assert type(decoder.drafter) is drafter_class
        assert decoder.eos == (1, 200)
        drafter_name = drafter_class.__name__
        description = f"LlamaForCausalLM of 0.0M parameters, {drafter_name}, num_draft_tokens=3"
        assert repr(decoder) == f"SpeculativeDecoder({description})"

        result = decoder.decode(TEXTS, max_new_tokens=6, rule="RejectionSampling")
        assert result.tokens == expected.tokens
        assert result.texts == expected.texts
        assert "12 new tokens" in str(result)
        assert "\n" not in str(result)
        assert len(str(result)) < 150

    decoder = SpeculativeDecoder(RNN(256), tokenizer=ByteTokenizer())
    assert isinstance(decoder.decode("hi", max_new_tokens=2).text, str)
    with pytest.raises(ValueError, match="vocabulary|tokens"):
        SpeculativeDecoder(model, tiny("llama", 2, vocab_size=50))


def draw_weights(model: Any) -> None:
    for weight in model.parameters():
        torch.nn.init.normal_(weight)


def draw_data(model: Any) -> None:
    for weight in model.parameters():
        weight.data.normal_()


def assign_data(model: Any) -> None:
    for weight in model.parameters():
        weight.data = torch.randn_like(weight)


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    optimizer.step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "counted": draw_weights,
    "in data": draw_data,
    "other data": assign_data,
    "fused optimizer": fused_step,
    "another type": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_decoded_with(change: str) -> None:
    model = HuggingFaceLM(tiny("llama"))
    decoder = SpeculativeDecoder(model, HuggingFaceLM(tiny("llama", 2)))
    prompt = [5, 3, 9]
    old_tokens = decoder.decode(prompt, max_new_tokens=12).tokens
    torch.manual_seed(3)
    CHANGES[change](model)

    fresh_decoder = SpeculativeDecoder(deepcopy(model))
    new_tokens = fresh_decoder.decode_standard(prompt, max_new_tokens=12).tokens
    assert decoder.decode_standard(prompt, max_new_tokens=12).tokens == new_tokens
    # In bfloat16, near-ties may be decided differently by calls of another width.
    if change != "another type":
        assert new_tokens != old_tokens
        assert decoder.decode(prompt, max_new_tokens=12).tokens == new_tokens


def test_weights_that_were_made_for_inference_alone_decode() -> None:
    with torch.inference_mode():
        model = tiny("llama")
    decoder = SpeculativeDecoder(model)
    result = decoder.decode([5, 3], max_new_tokens=6)
    standard = decoder.decode_standard([5, 3], max_new_tokens=6)
    assert result.tokens == standard.tokens

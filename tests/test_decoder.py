"""The decoder on what users give: a tokenizer's padded output, configs, text as it comes, one line in a notebook."""

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

TEXTS = ["the cat sat on the mat and", "a guess"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpeculativeDecoder, Any]:
    path = write_text_model(tmp_path_factory.mktemp("model"))
    return SpeculativeDecoder.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_read_by_its_attention_mask(
    pair: tuple[SpeculativeDecoder, Any], side: str
) -> None:
    decoder, tokenizer = pair
    tokenizer.add_special_tokens({"pad_token": tokenizer.pad_token or tokenizer.eos_token})
    tokenizer.padding_side = side
    padded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert not bool(padded["attention_mask"].all())
    expected = decoder.decode(TEXTS, max_new_tokens=6)
    for prompts in (padded, dict(padded), {name: value.tolist() for name, value in padded.items()}):
        for decode in (decoder.decode, decoder.decode_standard):
            result = decode(prompts, max_new_tokens=6)
            assert [row.prompt for row in result.rows] == [row.prompt for row in expected.rows]
            assert result.tokens == expected.tokens
    assert decoder.target.vocabulary is not None
    decoder.target.vocabulary.special["pad"] = tokenizer.pad_token_id
    with pytest.raises(ValueError, match="prompt 1 seems padded"):
        decoder.decode(padded["input_ids"], max_new_tokens=6)
    del decoder.target.vocabulary.special["pad"]


@pytest.mark.parametrize("stop", [(), ("a", " t")])
def test_pieces_of_text_add_up_to_the_text(
    pair: tuple[SpeculativeDecoder, Any], stop: tuple[str, ...]
) -> None:
    decoder, _ = pair
    config = DecodingConfig(max_new_tokens=20, stop=stop, eos=())
    pieces = {0: "", 1: ""}
    for number, piece in decoder.stream_text(TEXTS, config):
        assert piece
        pieces[number] += piece
    result = decoder.decode(TEXTS, config)
    standard = decoder.decode_standard(TEXTS, config)
    assert (
        [*pieces.values()]
        == [row.text for row in result.rows]
        == [row.text for row in standard.rows]
    )
    tokens = list(decoder.stream(TEXTS[0], config))
    assert [token for _, token in tokens] == result.tokens[0]


def test_the_text_of_one_prompt_comes_as_text_and_can_be_cancelled(
    pair: tuple[SpeculativeDecoder, Any],
) -> None:
    decoder, _ = pair
    config = DecodingConfig(max_new_tokens=40, eos=())
    whole = decoder.decode(TEXTS[0], config)
    assert "".join(decoder.stream_text(TEXTS[0], config)) == whole.text == whole.texts[0]
    stream = decoder.stream_text(TEXTS[0], config)
    begun = next(stream) + next(stream)
    stream.cancel()
    begun += "".join(stream)
    result = stream.session.result()
    assert result.rows[0].stop_reason == "cancelled" and 0 < result.num_new_tokens < 40
    assert whole.text is not None and whole.text.startswith(begun.rstrip("\ufffd")) and begun


def test_a_stream_is_cancelled_from_another_thread_in_the_middle_of_a_round(
    pair: tuple[SpeculativeDecoder, Any],
) -> None:
    streams: list[Any] = []

    def cancel_late(prefix: Tensor, scores: Tensor) -> Tensor:
        if prefix.shape[1] == 30:
            thread = threading.Thread(target=streams[0].cancel)
            thread.start()
            thread.join()
        return scores

    config = DecodingConfig(max_new_tokens=60, eos=(), processors=(cancel_late,))
    streams.append(pair[0].stream_text(TEXTS, config))
    pieces = dict.fromkeys((0, 1), "")
    for number, piece in streams[0]:
        pieces[number] += piece
    rows = streams[0].session.result().rows
    assert {row.stop_reason for row in rows} == {"cancelled"} and 0 < len(rows[0].tokens) < 60
    assert [*pieces.values()] == [
        pair[1].decode(row.tokens, skip_special_tokens=True) for row in rows
    ]


def test_threads_share_a_decoder(pair: tuple[SpeculativeDecoder, Any]) -> None:
    """Rounds of two threads never overlap, and nothing of one reaches the other."""
    decoder, _ = pair
    target, inside, most = decoder.ready()[0], [0], [0]
    forward = target.forward

    def counted(*values: Any, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        try:
            return forward(*values, **options)
        finally:
            inside[0] -= 1

    config = DecodingConfig(max_new_tokens=15, eos=())
    expected = [decoder.decode(text, config).tokens for text in TEXTS]
    target.forward = counted  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [decoder.decode, decoder.decode_standard] * 2
            made = pool.map(
                lambda each: each[0](each[1], config).tokens,
                zip(calls, [*TEXTS, *TEXTS], strict=True),
            )
            assert list(made) == expected * 2
    finally:
        del target.forward
    assert most == [1]


def test_a_decoder_takes_what_transformers_has_loaded(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    model.generation_config = GenerationConfig(eos_token_id=[1, 200])
    expected = SpeculativeDecoder.from_pretrained(path).decode(
        TEXTS, max_new_tokens=6, eos=(1, 200)
    )
    for draft, kind in (
        (None, NGramDrafter),
        (tiny("llama", 2, vocab_size=len(tokenizer)), ModelDrafter),
    ):
        decoder = SpeculativeDecoder(model, draft, tokenizer=tokenizer)
        assert type(decoder.drafter) is kind and decoder.eos == (1, 200)
        result = decoder.decode(TEXTS, max_new_tokens=6, rule="RejectionSampling")
        assert result.tokens == expected.tokens and result.texts == expected.texts
        shown = f"SpeculativeDecoder(LlamaForCausalLM of 0.0M parameters, {kind.__name__}, num_draft_tokens=3)"
        assert repr(decoder) == shown
        assert len(str(result)) < 150 and "\n" not in str(result) and "12 new tokens" in str(result)
    decoder = SpeculativeDecoder(RNN(256), tokenizer=ByteTokenizer())
    assert isinstance(decoder.decode("hi", max_new_tokens=2).text, str)
    with pytest.raises(ValueError, match="vocabulary|tokens"):
        SpeculativeDecoder(model, tiny("llama", 2, vocab_size=50))


def assign(model: Any) -> None:
    for weight in model.parameters():
        weight.data = torch.randn_like(weight)


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    optimizer.step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "counted": lambda model: [torch.nn.init.normal_(weight) for weight in model.parameters()],
    "in data": lambda model: [weight.data.normal_() for weight in model.parameters()],
    "other data": assign,
    "fused optimizer": fused_step,
    "another type": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_decoded_with(change: str) -> None:
    model = HuggingFaceLM(tiny("llama"))
    decoder = SpeculativeDecoder(model, HuggingFaceLM(tiny("llama", 2)))
    before = decoder.decode([5, 3, 9], max_new_tokens=12).tokens
    torch.manual_seed(3)
    CHANGES[change](model)
    after = SpeculativeDecoder(deepcopy(model)).decode_standard([5, 3, 9], max_new_tokens=12).tokens
    assert decoder.decode_standard([5, 3, 9], max_new_tokens=12).tokens == after
    if change != "another type":
        assert after != before and decoder.decode([5, 3, 9], max_new_tokens=12).tokens == after


def test_weights_that_were_made_for_inference_alone_decode() -> None:
    with torch.inference_mode():
        model = tiny("llama")
    decoder = SpeculativeDecoder(model)
    assert (
        decoder.decode([5, 3], max_new_tokens=6).tokens
        == decoder.decode_standard([5, 3], max_new_tokens=6).tokens
    )

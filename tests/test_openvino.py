"""The OpenVINO backend computes what torch computes, keeps what it converted, and refuses in one
line what it cannot run."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import json
import logging
import os
import resource
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import openvino
import pytest
import torch
import transformers
from cli_fixtures import refused, succeed
from families import tiny
from tiny_eagle import eagle
from tiny_heads import heads
from torch import Tensor

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.config.files import cache_home
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.session import run
from lightning_specdec.drafters import EarlyExitDrafter, NGramDrafter, StagedDrafter, eagle_openvino
from lightning_specdec.models import (
    LanguageModel,
    agreement,
    backend_timing,
    loading,
    paged_state,
)
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.openvino import Compiled, OpenVINOLM
from lightning_specdec.models.paged_state import CallSizes, PagedState
from lightning_specdec.models.threads import one_thread

FAMILIES = ["llama", "qwen3", "gpt2", "mistral"]
"""Grouped queries; norms of queries and keys; learned positions; a sliding window of 5."""

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_home()


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`refused` checks that nothing is written to the current directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@functools.cache
def torch_llama() -> HuggingFaceLM:
    """A llama of 96 positions. Do not write to it."""
    return HuggingFaceLM(tiny("llama"))


@functools.cache
def openvino_llama() -> OpenVINOLM:
    """The same llama, converted. Do not write to it."""
    return OpenVINOLM.of(torch_llama())


@functools.cache
def long_llamas() -> tuple[HuggingFaceLM, OpenVINOLM]:
    """A llama of 600 positions in torch and in OpenVINO. Do not write to them."""
    model = HuggingFaceLM(tiny("llama", max_position_embeddings=600))
    return model, OpenVINOLM.of(model)


def saved_llama(tmp_path: Path) -> str:
    """Write a llama to a directory and return its path."""
    directory = tmp_path / "model"
    tiny("llama").save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_features_are_those_of_torch(family: str) -> None:
    """For whole texts, for ragged calls after truncation, and for rows in another order."""
    model = HuggingFaceLM(tiny(family))
    converted = OpenVINOLM.of(model)
    generator = torch.Generator().manual_seed(1)

    def draw_tokens(num_tokens: int) -> Tensor:
        return torch.randint(model.vocab_size, (3, num_tokens), generator=generator)

    tokens = draw_tokens(40)
    expected = model(tokens, features=(0, 2))
    output = converted(tokens, features=(0, 2))
    assert_close(output.logits, expected.logits)
    for layer in (0, 2):
        assert_close(output.features[layer], expected.features[layer])

    torch_state = model.init_state(3, 60)
    state = converted.init_state(3, 60)
    for num_tokens, valid_lengths, truncated_lengths in (
        (33, [33, 3, 7], [31, 2, 7]),
        (5, [5, 0, 5], [32, 2, 9]),
        (4, [4, 1, 3], None),
    ):
        tokens = draw_tokens(num_tokens)
        expected_logits = model(tokens, torch_state, valid_lengths=valid_lengths).logits
        logits = converted(tokens, state, valid_lengths=valid_lengths).logits
        is_valid = torch.arange(num_tokens) < torch.tensor(valid_lengths)[:, None]
        assert_close(logits[is_valid], expected_logits[is_valid])
        if truncated_lengths is not None:
            torch_state.truncate(truncated_lengths)
            state.truncate(truncated_lengths)

    torch_state.select([2, -1, 0])
    state.select([2, -1, 0])
    tokens = draw_tokens(2)
    assert_close(converted(tokens, state).logits, model(tokens, torch_state).logits)


@torch.no_grad()
def test_calls_keep_the_last_size_and_padding_changes_no_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call on one token keeps the size of the last call until its padding costs more than a
    change of size, or until the row has no slots left for padding."""
    monkeypatch.setattr(paged_state, "MAX_ATTENDED_IN_A_ROW", 8 * 5 * 1535)
    model = torch_llama()
    converted = openvino_llama()
    sizes: list[tuple[int, int]] = []
    original_run = Compiled.run

    def recording_run(compiled: Compiled, inputs: Any, *more: Any) -> Any:
        num_tokens = len(inputs[0])
        num_scored = len(inputs[1])
        sizes.append((num_tokens, num_scored))
        return original_run(compiled, inputs, *more)

    monkeypatch.setattr(Compiled, "run", recording_run)
    torch_state = model.init_state(1, 64)
    state = converted.init_state(1, 64)
    text = torch.arange(64)[None] * 7919 % 67
    for num_tokens in (20, 6, 1, 4, *[1] * 8, 4, *[2] * 10, 1):
        start = state.consumed[0]
        tokens = text[:, start : start + num_tokens]
        assert_close(converted(tokens, state).logits, model(tokens, torch_state).logits)
    assert state.consumed == [64]
    assert sizes[:4] == [(20, 20), (6, 6), (6, 6), (6, 6)]
    assert [num_tokens for num_tokens, _ in sizes[11:14]] == [1, 6, 6]
    assert sizes[-1][0] == 1, "the last slot leaves no room for padding"

    # The calls of another state do not count.
    converted(text[:, :1], converted.init_state(1, 64))
    assert sizes[-1] == (1, 1)


def test_a_long_context_allows_less_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding attends to the context too."""
    monkeypatch.setattr(paged_state, "MAX_ATTENDED_IN_A_ROW", 8 * 5 * 160)
    sizes = CallSizes()
    assert [sizes.padded(number, 4000) for number in (1, 6, 1, 5)] == [1, 6, 1, 6]


def test_a_padding_token_costs_more_without_spare_arithmetic() -> None:
    costly = CallSizes(token_cost=1500)
    assert [costly.padded(number, 100) for number in (6, 1, 1, 1, 1)] == [6, 6, 6, 6, 1]
    numbers = (40, 36, 30, 9, 5, 17)
    assert [costly.padded(number) for number in numbers] == [40, 40, 30, 10, 10, 17]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@torch.no_grad()
def test_layers_that_are_split_at_an_exit_compute_the_same(
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Layers this small run on one thread, which is refused on processors with AMX.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = HuggingFaceLM(tiny("llama")).to(dtype)
    converted = OpenVINOLM.of(model)
    tokens = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1))
    whole_output = converted(tokens, features=(0, 2))

    converted.check_exit(1)
    split_output = converted(tokens, features=(0, 2))
    close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    close(split_output.logits, whole_output.logits)
    for layer in (0, 2):
        close(split_output.features[layer], whole_output.features[layer])

    lower_layers = converted.lower(tokens, converted.init_state(2, 9), [0, 0], 1)
    torch_lower_layers = model.lower(tokens, model.init_state(2, 9), [0, 0], 1)
    close(lower_layers, torch_lower_layers)


@pytest.mark.parametrize(
    "drafter",
    [EarlyExitDrafter(1), StagedDrafter([NGramDrafter(), EarlyExitDrafter(1)])],
    ids=["early_exit", "staged"],
)
def test_a_row_near_its_end_shares_a_call_with_a_long_prompt(drafter: Any) -> None:
    # An exit splits the converted layers, so the shared model is not used here.
    texts = []
    for model in (torch_llama(), OpenVINOLM.of(torch_llama())):
        session = Session(model, drafter, max_length=60, num_draft_tokens=3, batch_size=2)
        long_request = session.add([1, 2, 3, 4], max_new_tokens=50)
        while len(long_request.text) < 45:
            session.step()
        late_request = session.add(list(range(50)), max_new_tokens=8)
        run(session)
        texts.append([long_request.text, late_request.text])
    in_torch, in_openvino = texts
    assert in_openvino == in_torch


def test_two_decoders_share_a_model_in_two_threads() -> None:
    _, model = long_llamas()
    decoders = [SpeculativeDecoder(model, NGramDrafter()), SpeculativeDecoder(model, eagle(model))]
    prompts = [[1, 2, 3], [4, 5, 6, 7]]

    def decode(decoder: SpeculativeDecoder, prompt: list[int]) -> Any:
        return decoder.decode(prompt, max_new_tokens=60).tokens

    one_after_the_other = list(map(decode, decoders, prompts))
    with ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(decode, decoders, prompts))
    assert at_once == one_after_the_other


@pytest.mark.slow
def test_two_threads_convert_heads_at_once(cache: Path) -> None:
    model = openvino_llama()
    decoders = []
    for norm_output in (False, True):
        decoders.append(SpeculativeDecoder(model, eagle(model, norm_output=norm_output)))

    def decode(decoder: SpeculativeDecoder) -> Any:
        return decoder.decode([1, 2], max_new_tokens=8).tokens

    with ThreadPoolExecutor(2) as pool:
        first_tokens, second_tokens = pool.map(decode, decoders)
    assert first_tokens == second_tokens


def test_threads_that_begin_inside_one_thread_keep_their_number_of_threads() -> None:
    torch.set_num_threads(3)
    try:
        with one_thread(True), ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == 1
            assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_a_head_keeps_the_embeddings_that_it_reads() -> None:
    """They stay in memory when the target's weights are replaced."""
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    drafter = eagle(model).fused(model)
    weight = model.embedding_table
    assert weight is not None
    memory = weakref.ref(weight.untyped_storage())
    weight.data = torch.zeros(1)
    gc.collect()
    assert drafter.in_openvino
    assert memory() is not None


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.rotary_emb.inv_freq"])
def test_a_write_that_torch_does_not_count_is_refused(name: str) -> None:
    """One value of many, and one of a buffer."""
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    decoder = SpeculativeDecoder(model)
    tensors = {**dict(model.model.named_parameters()), **dict(model.model.named_buffers())}
    values = tensors[name].detach().numpy()
    original_value = values.flat[1]
    decoder.decode([5, 3, 9], max_new_tokens=4)
    values.flat[1] = 10.0
    with pytest.raises(ValueError, match="the weights changed after the model was converted"):
        decoder.decode([5, 3, 9], max_new_tokens=4)

    values.flat[1] = original_value
    decoder.decode([5, 3, 9], max_new_tokens=4)


@pytest.mark.parametrize("make_heads", [eagle, heads])
def test_heads_in_float16_draft_in_torch(make_heads: Callable[[LanguageModel], Any]) -> None:
    model = openvino_llama()
    drafter = deepcopy(make_heads(model)).to(torch.float16)
    decoder = SpeculativeDecoder(model, drafter)
    result = decoder.decode([1, 2], max_new_tokens=8)
    assert result.tokens == decoder.decode_standard([1, 2], max_new_tokens=8).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate_of_transformers(family: str) -> None:
    hugging_face = tiny(family)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    generated = hugging_face.generate(torch.tensor([prompt]), **options)  # type: ignore[operator]
    expected_tokens = generated[0, len(prompt) :].tolist()
    decoder = SpeculativeDecoder(OpenVINOLM.of(HuggingFaceLM(hugging_face)), NGramDrafter())
    assert decoder.decode([prompt], max_new_tokens=24).tokens == [expected_tokens]


HEADS: dict[str, Callable[[LanguageModel], Any]] = {
    "eagle": eagle,
    "eagle_31": lambda target: eagle(
        target, attention_window=3, norm_output=True, draft_vocabulary=[*range(30)]
    ),
    "eagle_ending_early": lambda target: eagle(target, min_confidence=0.01),
    "medusa": lambda target: heads(target),
}


@pytest.mark.quick_cases("eagle_31", "medusa")
@pytest.mark.parametrize("kind", HEADS)
def test_trained_heads_draft_as_in_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches whose rows end at different times, after long prompts, in windows of any
    size, greedily (where OpenVINO chooses the tokens) and with sampling."""
    # Quantized heads may draft other tokens.
    monkeypatch.setattr(eagle_openvino, "QUANTIZATION", None)
    torch_model, openvino_model = long_llamas()
    drafter = HEADS[kind](torch_model)
    original_propose = type(drafter).propose
    drafts: list[Any] = []
    backends: set[bool] = set()

    def recording_propose(self: Any, *arguments: Any) -> Any:
        draft = original_propose(self, *arguments)
        lengths = None if draft.lengths is None else draft.lengths.tolist()
        drafts.append((draft.tokens.tolist(), lengths))
        backends.add(bool(self.in_openvino))
        return draft

    monkeypatch.setattr(type(drafter), "propose", recording_propose)
    prompts = [[3, 1, 4, 1, 5] * 100, [5, 6], [9, 2, 9, 2, 9, 2]]

    def decode(target: LanguageModel) -> tuple[list[Any], list[Any], set[bool]]:
        """The decoded tokens, all drafts, and whether they were computed in OpenVINO."""
        drafts.clear()
        backends.clear()
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
        tokens = []
        for options in ({}, {"num_draft_tokens": 1}, {"num_draft_tokens": 7}, {"temperature": 1.0}):
            tokens.append(decoder.decode(prompts, max_new_tokens=12, **options).tokens)
        return tokens, drafts[:], backends.copy()

    torch_tokens, torch_drafts, torch_backends = decode(torch_model)
    tokens, openvino_drafts, openvino_backends = decode(openvino_model)
    assert tokens == torch_tokens
    assert openvino_drafts == torch_drafts
    assert openvino_backends == {True}
    assert torch_backends == {False}


def test_padding_takes_no_slots_from_the_tokens_that_follow_in_a_call() -> None:
    state = PagedState(1, 64, sizes=[(1, 2, 2)], dtype=torch.float32)
    num_following = 4
    for start in range(50, 59):
        call = state.plan_call([start], [2], size=6, num_following=num_following)
        num_tokens = len(call.positions)
        context_length = call.inputs[-1]
        assert num_tokens == min(6, 64 - num_following - start)
        assert context_length == start + num_tokens + num_following
        assert context_length <= 64


@pytest.mark.parametrize("has_room", [True, False])
def test_calls_go_on_while_the_model_is_compiled_again_if_there_is_memory_for_both(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OpenVINOLM.of(torch_llama())
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens, features=[0]).logits
    is_compiling = threading.Event()
    may_compile = threading.Event()
    own_compile_part = OpenVINOLM._compile_part

    def compile_part(self: Any, *arguments: Any) -> Any:
        is_compiling.set()
        assert may_compile.wait(20)
        return own_compile_part(self, *arguments)

    monkeypatch.setattr(OpenVINOLM, "_compile_part", compile_part)
    monkeypatch.setattr(OpenVINOLM, "_has_room_for_two", lambda self: has_room)
    with ThreadPoolExecutor(2) as pool:
        preparing = pool.submit(model.prepare_features, [1])
        assert is_compiling.wait(20)
        call = pool.submit(model, tokens, features=[0])
        if has_room:
            assert_close(call.result(20).logits, expected)
        else:
            # Without memory for both, there is nothing to call.
            assert not wait([call], timeout=0.2).done
        may_compile.set()
        preparing.result(20)
        assert_close(call.result(20).logits, expected)
    output = model(tokens, features=[0, 1])
    assert {*output.features} == {0, 1}
    assert_close(output.logits, expected)


def test_a_shallow_copy_compiles_for_itself() -> None:
    model = OpenVINOLM.of(torch_llama())
    copied = copy(model)
    tokens = torch.tensor([[1, 2, 3]])
    copied(tokens, features=[0])
    assert {*model(tokens, features=[0]).features} == {0}


def test_keys_and_values_of_float32_models_are_kept_in_float32() -> None:
    compiled = openvino_llama()._compiled_for().graphs[0].compiled.request.get_compiled_model()
    for name in ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT"):
        assert compiled.get_property(name) == openvino.Type.f32


@pytest.mark.parametrize(
    ("quantization", "hidden_size"), [("int8", 64), ("int4", 64), ("int4", 40)]
)
def test_drafting_is_lossless_with_respect_to_the_quantized_target(
    quantization: str, hidden_size: int
) -> None:
    config = tiny("llama", hidden_size=hidden_size, intermediate_size=2 * hidden_size)
    model = OpenVINOLM.of(HuggingFaceLM(config), quantization)
    decoder = SpeculativeDecoder(model, NGramDrafter())
    prompts = [[5, 6, 7, 5, 6], [9]]
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature}
        standard = decoder.decode_standard(prompts, **options)
        assert decoder.decode(prompts, **options).tokens == standard.tokens


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_calls_of_all_widths_and_batches_compute_the_same_bits(quantization: str) -> None:
    """The calls before it and the lengths of the other rows do not matter."""
    config = tiny("llama", hidden_size=128, intermediate_size=256)
    model = OpenVINOLM.of(HuggingFaceLM(config), quantization)
    text = torch.arange(44)[None] * 7919 % model.vocab_size
    expected_logits = model(text).logits

    for call_length in (1, 2, 3, 5, 8, 17):
        for batch_size in (1, 2, 3):
            state = model.init_state(batch_size, 44)
            rows = text.expand(batch_size, -1)
            logits = [model(tokens, state).logits for tokens in rows.split(call_length, dim=1)]
            assert torch.equal(torch.cat(logits, 1), expected_logits.expand(batch_size, -1, -1))

    state = model.init_state(3, 44)
    for lengths in ([20, 1, 2], [1, 7, 1], [1, 0, 1], [4, 1, 1], [1, 1, 3]):
        starts = state.consumed
        longest = max(lengths)
        tokens = torch.cat([text[:, start : start + longest] for start in starts])
        logits = model(tokens, state, valid_lengths=lengths).logits
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            row_logits = expected_logits[0, start : start + length]
            assert torch.equal(logits[row, :length], row_logits)


def test_quantized_early_exits_compute_the_same_bits(cache: Path) -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama", hidden_size=128)), "int8")
    decoder = SpeculativeDecoder(model, EarlyExitDrafter(1))
    prompts = [[5, 6, 7, 5, 6], [9]]
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
        standard = decoder.decode_standard(prompts, **options)
        assert decoder.decode(prompts, **options).tokens == standard.tokens
        assert standard.lossless
        assert standard.lossy_reason is None


def test_activations_are_not_quantized_where_the_bits_would_depend_on_the_width(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a processor whose kernels add up in another order for each width.
    disagreement = agreement.Agreement(0.01, 1e-4, "one token")
    agreement_of = "lightning_specdec.models.openvino.agreement_of"
    monkeypatch.setattr(agreement_of, lambda model: disagreement)
    assert OpenVINOLM.of(torch_llama(), "int8").dynamic_group == 0
    assert OpenVINOLM.of(torch_llama()).dynamic_group > 0


def test_a_model_is_converted_once_and_nothing_is_logged_or_reported(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither transformers nor OpenVINO prints a warning, and no telemetry is sent."""
    transformers.utils.logging.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    reports: list[Any] = []
    send = "openvino_telemetry.backend.backend_ga4.GA4Backend.send"
    monkeypatch.setattr(send, lambda self, message: reports.append(message))

    first = OpenVINOLM.of(torch_llama())
    monkeypatch.setattr("lightning_specdec.models.openvino.convert", None)
    assert OpenVINOLM.of(torch_llama()).directory == first.directory
    assert not reports
    assert not caplog.messages


def test_a_damaged_conversion_is_refused(cache: Path) -> None:
    directory = OpenVINOLM.of(torch_llama()).directory
    weights_path = directory / "model.bin"
    digests_path = directory / "sha256.json"
    truncated_weights = weights_path.read_bytes()[:-1]
    for path, damaged_content in (
        (weights_path, truncated_weights),
        (digests_path, None),
        (digests_path, b"{"),
        (digests_path, b"{}"),
    ):
        content = path.read_bytes()
        if damaged_content is None:
            path.unlink()
        else:
            path.write_bytes(damaged_content)
        with pytest.raises(ValueError, match="is damaged: delete it"):
            OpenVINOLM.of(torch_llama())
        path.write_bytes(content)
    assert OpenVINOLM.of(torch_llama()).directory == directory


def test_weights_that_change_in_memory_are_not_served_by_an_old_conversion(
    tmp_path: Path, cache: Path
) -> None:
    model = loading.load_model(saved_llama(tmp_path))
    converted = OpenVINOLM.of(model)
    decoder = SpeculativeDecoder(converted)
    decoder.decode([5, 3, 9], max_new_tokens=4)

    model.model.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="the weights changed after the model was converted"):
        decoder.decode([5, 3, 9], max_new_tokens=4)
    with pytest.raises(ValueError, match="the weights changed"):
        converted(tokens)

    converted_again = OpenVINOLM.of(model)
    assert converted_again.directory != converted.directory
    torch.testing.assert_close(converted_again(tokens).logits, model(tokens).logits.detach())


def test_models_that_differ_only_in_settings_have_separate_conversions(cache: Path) -> None:
    """Llama and Mistral have the same weights here, and only Mistral has an attention window."""
    llama = OpenVINOLM.of(HuggingFaceLM(tiny("llama", 3, num_hidden_layers=2)))
    mistral = OpenVINOLM.of(HuggingFaceLM(tiny("mistral", 3, num_hidden_layers=2)))
    assert llama.directory != mistral.directory


def test_auto_leaves_small_models_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_llama()
    assert loading.in_backend(model, "auto") is model


def test_auto_selects_the_faster_backend_and_remembers_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch_llama()
    monkeypatch.setattr(loading, "MOST_SMALL", 1)
    # The prompt that is timed has more tokens than this vocabulary.
    assert list(backend_timing.call_seconds({"torch": model}, repeats=1)) == ["torch"]

    for seconds, faster_class in (
        ({"torch": 2.0, "openvino": 1.0}, OpenVINOLM),
        ({"torch": 1.0, "openvino": 2.0}, HuggingFaceLM),
    ):
        monkeypatch.setattr(backend_timing, "call_seconds", lambda models, seconds=seconds: seconds)
        assert type(loading.in_backend(model, "auto")) is faster_class
        monkeypatch.setattr(backend_timing, "call_seconds", None)
        assert type(loading.in_backend(model, "auto")) is faster_class

        (timing_path,) = cache.glob("backend-*.json")
        assert json.loads(timing_path.read_text()) == seconds
        # A damaged file is measured again.
        timing_path.write_text('{"torch": ')


def test_a_model_is_loaded_in_the_requested_backend(tmp_path: Path, cache: Path) -> None:
    directory = saved_llama(tmp_path)
    assert type(loading.load_model(directory, backend="torch")) is HuggingFaceLM
    assert type(loading.load_model(directory, backend="auto")) is HuggingFaceLM
    assert type(loading.load_model(directory, backend="openvino")) is OpenVINOLM


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", [], "OpenVINO cannot run MixtralForCausalLM"),
        ("llama", ["--dtype", "float64"], "OpenVINO computes in float32 or bfloat16, got float64"),
    ],
)
def test_a_model_that_openvino_cannot_run_is_refused(
    family: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    cache: Path,
) -> None:
    directory = tmp_path / "model"
    tiny(family).save_pretrained(directory)
    refused(
        "decode", "--target", str(directory), "--backend", "openvino", *options, message=message
    )


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="runs on a CPU, not on cuda"):
        loading.check_openvino("cuda")


def test_one_thread_with_amx_is_refused_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO 2026.4 divides by zero there, which ends the process."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    loading.check_openvino("cpu", torch.float32)
    with pytest.raises(ValueError, match="crashes in bfloat16 on one thread"):
        loading.check_openvino("cpu", torch.bfloat16)


def test_a_missing_installation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved_llama(tmp_path)
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    decode = ("decode", "--target", directory, "--backend", "openvino")
    refused(*decode, message="which is not installed")


def test_a_cache_directory_that_is_a_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    decode = ("decode", "--target", saved_llama(tmp_path), "--backend", "openvino")
    refused(*decode, message="a_file")


def test_a_full_disk_is_reported_with_the_space_that_is_needed(cache: Path) -> None:
    # A limit on the size of a file fails in the same way as a full disk.
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard_limit))
    try:
        with pytest.raises(ValueError, match=f"cannot be written to {cache}: it needs .* are free"):
            OpenVINOLM.of(torch_llama())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert not list(cache.iterdir())


def test_the_next_start_removes_what_a_killed_conversion_left(cache: Path) -> None:
    """Files that another process is still writing stay."""
    abandoned = cache / ".openvino-0123.abcdefgh"
    in_use = cache / ".openvino-0123.ijklmnop"
    for directory in (abandoned, in_use):
        directory.mkdir(parents=True)
        (directory / "model.bin").write_bytes(b"weights")

    lock = os.open(in_use, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        OpenVINOLM.of(torch_llama())
        assert in_use.exists()
        assert not abandoned.exists()
    finally:
        os.close(lock)
    OpenVINOLM.of(torch_llama())
    assert not in_use.exists()


def test_a_cache_that_is_read_only_or_damaged_is_reported_in_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = OpenVINOLM.of(torch_llama()).directory
    for path in directory.iterdir():
        path.unlink()
    (directory / "sha256.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged: delete it"):
        OpenVINOLM.of(torch_llama())

    (directory / "sha256.json").unlink()
    directory.rmdir()
    directory.symlink_to(cache / "gone")
    with pytest.raises(ValueError, match="is a link to a directory that is gone: delete the link"):
        OpenVINOLM.of(torch_llama())
    directory.unlink()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(cache))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ValueError, match=f"cannot be written to {cache}: Permission denied"):
        OpenVINOLM.of(torch_llama())


def test_decode_generates_the_same_tokens_in_openvino(tmp_path: Path, cache: Path) -> None:
    directory = saved_llama(tmp_path)
    tokens = {}
    for backend in ("torch", "openvino"):
        model = ("--target", directory, "--backend", backend)
        options = ("--prompt", "3 1 4 1 5", "--max_new_tokens", "8", "--output", "json")
        document = succeed("decode", *model, *options).json
        tokens[backend] = [prompt["speculative"]["tokens"] for prompt in document["prompts"]]
    assert list(cache.glob("openvino-*"))
    assert tokens["openvino"] == tokens["torch"]


def test_another_decoder_of_the_same_model_changes_nothing(cache: Path) -> None:
    model = openvino_llama()
    first_decoder = SpeculativeDecoder(model, NGramDrafter())
    expected_tokens = first_decoder.decode([[1, 2, 3]], max_new_tokens=8).tokens
    SpeculativeDecoder(model, NGramDrafter()).decode([[1, 2, 3]], max_new_tokens=8)
    assert first_decoder.decode([[1, 2, 3]], max_new_tokens=8).tokens == expected_tokens

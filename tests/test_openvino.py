"""The OpenVINO backend computes what torch computes, keeps what it converted, and refuses in one
line what it cannot run."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
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

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.config.files import cache_home
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.session import run
from lightning_specdec.drafters import EarlyExitDrafter, NGramDrafter, StagedDrafter, eagle_openvino
from lightning_specdec.models import LanguageModel, agreement, backend_timing, loading
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.openvino import Compiled, OpenVINOLM
from lightning_specdec.models.paged_state import CallSizes, PagedState
from lightning_specdec.models.threads import one_thread

FAMILIES = ["llama", "qwen3", "gpt2", "mistral"]
"""Grouped queries; norms of queries and keys; learned positions; a sliding window of 5."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_home()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused writes nothing here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_those_of_torch(family: str) -> None:
    """Of whole texts, and of ragged calls after going back, on rows that change places."""
    model = HuggingFaceLM(tiny(family))
    other = OpenVINOLM.of(model)
    generator = torch.Generator().manual_seed(1)

    def drawn(num_tokens: int) -> torch.Tensor:
        return torch.randint(model.vocab_size, (3, num_tokens), generator=generator)

    tokens = drawn(40)
    wanted, got = model(tokens, features=(0, 2)), other(tokens, features=(0, 2))
    for expected, found in (
        (wanted.logits, got.logits),
        *((wanted.features[i], got.features[i]) for i in (0, 2)),
    ):
        torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)
    states = model.init_state(3, 60), other.init_state(3, 60)
    for num_tokens, valid, back in (
        (33, [33, 3, 7], [31, 2, 7]),
        (5, [5, 0, 5], [32, 2, 9]),
        (4, [4, 1, 3], None),
    ):
        tokens = drawn(num_tokens)
        wanted, got = (
            each(tokens, state, valid_lengths=valid)
            for each, state in zip((model, other), states, strict=True)
        )
        real = torch.arange(num_tokens) < torch.tensor(valid)[:, None]
        torch.testing.assert_close(
            got.logits[real], wanted.logits[real].detach(), atol=1e-4, rtol=1e-4
        )
        for state in states:
            if back is not None:
                state.truncate(back)
    for state in states:
        state.select([2, -1, 0])
    tokens = drawn(2)
    wanted, got = model(tokens, states[0]), other(tokens, states[1])
    torch.testing.assert_close(got.logits, wanted.logits.detach(), atol=1e-4, rtol=1e-4)


def test_calls_keep_recent_sizes_and_padding_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls on a few tokens have few sizes, those on one that of the last call, until changing
    would have been cheaper and up to the row's last slot."""
    monkeypatch.setattr("lightning_specdec.models.paged_state.MAX_ATTENDED_IN_A_ROW", 8 * 5 * 160)
    model, sizes = HuggingFaceLM(tiny("llama")), list[tuple[int, int]]()
    other, run_graph = OpenVINOLM.of(model), Compiled.run

    def watched(compiled: Compiled, inputs: Any, *more: Any) -> Any:
        sizes.append((len(inputs[0]), len(inputs[1])))
        return run_graph(compiled, inputs, *more)

    monkeypatch.setattr(Compiled, "run", watched)
    states, tokens = (
        (model.init_state(1, 64), other.init_state(1, 64)),
        torch.arange(64)[None] * 7919 % 67,
    )
    for num_tokens in (20, 6, 1, 4, *[1] * 8, 4, *[2] * 10, 1):
        start = states[0].consumed[0]
        given = tokens[:, start : start + num_tokens]
        wanted, got = (
            each(given, state).logits for each, state in zip((model, other), states, strict=True)
        )
        torch.testing.assert_close(got, wanted.detach(), atol=1e-4, rtol=1e-4)
    assert states[1].consumed == [64] and sizes[:4] == [(20, 20), (6, 6), (6, 1), (6, 6)]
    assert sizes[11:14] == [(1, 1), (6, 6), (6, 6)] and sizes[-1] == (1, 1), (
        "no room for padding in the last slot"
    )
    other(tokens[:, :1], other.init_state(1, 64))
    assert sizes[-1] == (1, 1), "what ran before with other states"
    long, quantized = CallSizes(), CallSizes(token_cost=1500)
    assert [long.padded(number, 4000) for number in (1, 6, 1, 5)] == [1, 6, 1, 6], (
        "padding attends to the context too"
    )
    monkeypatch.undo()
    assert [quantized.padded(number, 100) for number in (6, 1, 1, 1, 1)] == [6, 6, 6, 6, 1]
    assert [quantized.padded(number) for number in (40, 36, 30, 9, 5, 17)] == [
        40,
        40,
        30,
        10,
        10,
        17,
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_layers_divided_behind_an_exit_compute_the_same(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cpu, "_is_amx_tile_supported", lambda: False
    )  # layers this small run on one thread
    model = HuggingFaceLM(tiny("llama")).to(dtype)
    other, tokens = (
        OpenVINOLM.of(model),
        torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1)),
    )
    whole = other(tokens, features=(0, 2))
    other.check_exit(1)
    divided = other(tokens, features=(0, 2))
    for expected, found in (
        (whole.logits, divided.logits),
        *((whole.features[i], divided.features[i]) for i in (0, 2)),
    ):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    lower = [
        each.lower(tokens, each.init_state(2, 9), [0, 0], 1).detach() for each in (model, other)
    ]
    torch.testing.assert_close(lower[1], lower[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "drafter", [EarlyExitDrafter(1), StagedDrafter([NGramDrafter(), EarlyExitDrafter(1)])]
)
def test_a_row_near_its_end_shares_a_call_with_a_long_prompt(drafter: Any) -> None:
    model, texts = HuggingFaceLM(tiny("llama")), []
    for each in (model, OpenVINOLM.of(model)):
        session = Session(each, drafter, max_length=60, num_draft_tokens=3, batch_size=2)
        rows = [session.add([1, 2, 3, 4], max_new_tokens=50)]
        while len(rows[0].text) < 45:
            session.step()
        rows.append(session.add(list(range(50)), max_new_tokens=8))
        run(session)
        texts.append([row.text for row in rows])
    assert texts[0] == texts[1]


def test_two_decoders_share_a_model_in_two_threads() -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama", max_position_embeddings=200)))
    decoders = [SpeculativeDecoder(model, drafter) for drafter in (NGramDrafter(), eagle(model))]
    pairs = list(zip(decoders, ([1, 2, 3], [4, 5, 6, 7]), strict=True))

    def decode(pair: Any) -> Any:
        return pair[0].decode(pair[1], max_new_tokens=60).tokens

    wanted = [decode(pair) for pair in pairs]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(decode, pairs)] == wanted


def test_two_threads_convert_heads_at_once(cache: Path) -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    decoders = [SpeculativeDecoder(model, eagle(model, norm_output=each)) for each in (False, True)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda decoder: decoder.decode([1, 2], max_new_tokens=8).tokens, decoders
        )
    assert first == second


def test_threads_that_begin_within_one_thread_keep_all() -> None:
    torch.set_num_threads(3)
    try:
        with one_thread(True), ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == 1
            assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_a_head_keeps_the_embeddings_that_it_reads() -> None:
    """A target whose weights are replaced does not free their memory."""
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    drafter, weight = eagle(model).fused(model), model.embedding_table
    assert weight is not None
    memory = weakref.ref(weight.untyped_storage())
    weight.data = torch.zeros(1)
    gc.collect()
    assert drafter.in_openvino and memory() is not None


@pytest.mark.parametrize("make", [eagle, heads])
def test_heads_of_other_types_draft_in_torch(make: Callable[[LanguageModel], Any]) -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    decoder = SpeculativeDecoder(model, deepcopy(make(model)).to(torch.float16))
    assert (
        decoder.decode([1, 2], max_new_tokens=8).tokens
        == decoder.decode_standard([1, 2], max_new_tokens=8).tokens
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate_of_transformers(family: str) -> None:
    hugging_face = tiny(family)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = hugging_face.generate(  # type: ignore[operator]
        torch.tensor([prompt]), **options
    )[0, len(prompt) :].tolist()
    decoder = SpeculativeDecoder(OpenVINOLM.of(HuggingFaceLM(hugging_face)), NGramDrafter())
    assert decoder.decode([prompt], max_new_tokens=24).tokens == [expected]


HEADS: dict[str, Callable[[LanguageModel], Any]] = {
    "eagle": eagle,
    "eagle_31": lambda target: eagle(
        target, attention_window=3, norm_output=True, draft_vocabulary=[*range(30)]
    ),
    "eagle_ending_early": lambda target: eagle(target, min_confidence=0.01),
    "medusa": lambda target: heads(target),
}


@pytest.mark.parametrize("kind", HEADS)
def test_trained_heads_draft_as_in_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches whose rows begin and end at different times, far behind the beginning too;
    where OpenVINO draws the tokens itself, in longer windows, and at random."""
    monkeypatch.setattr(eagle_openvino, "QUANTIZATION", None)  # int8 may draft other tokens
    model, drafted = HuggingFaceLM(tiny("llama", max_position_embeddings=600)), list[list[Any]]()
    drafter = HEADS[kind](model)
    whole = type(drafter).propose

    def propose(*arguments: Any) -> Any:
        draft = whole(*arguments)
        lengths = None if draft.lengths is None else draft.lengths.tolist()
        drafted[-1].append((draft.tokens.tolist(), lengths, bool(arguments[0].in_openvino)))
        return draft

    monkeypatch.setattr(type(drafter), "propose", propose)
    prompts, answers = [[3, 1, 4, 1, 5] * 100, [5, 6], [9, 2, 9, 2, 9, 2]], []
    for target in (model, OpenVINOLM.of(model)):
        drafted.append([])
        decoder, answer = SpeculativeDecoder(target, drafter, num_draft_tokens=3), []
        for options in ({}, {"num_draft_tokens": 1}, {"num_draft_tokens": 7}, {"temperature": 1.0}):
            answer.append(decoder.decode(prompts, max_new_tokens=12, **options).tokens)
        answers.append(answer)
    assert answers[0] == answers[1]
    in_torch, in_openvino = drafted
    assert [each[:2] for each in in_torch] == [each[:2] for each in in_openvino]
    assert {each[2] for each in in_openvino} == {True} != {each[2] for each in in_torch}


def test_padding_takes_no_slots_from_the_tokens_that_follow_in_a_call() -> None:
    state = PagedState(1, 64, sizes=[(1, 2, 2)], dtype=torch.float32)
    for start in range(50, 59):
        positions, *_, longest = state.plan_call([start], [2], size=6, num_following=4).inputs
        assert len(positions) == min(6, 60 - start) and longest == start + len(positions) + 4 <= 64


def test_keys_and_values_of_float32_models_are_kept_in_float32() -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    compiled = model._graphs[0].compiled.request.get_compiled_model()
    for name in ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT"):
        assert compiled.get_property(name) == openvino.Type.f32


@pytest.mark.parametrize(("quantization", "size"), [("int8", 64), ("int4", 64), ("int4", 40)])
def test_drafting_is_lossless_towards_the_quantized_target(quantization: str, size: int) -> None:
    model = OpenVINOLM.of(
        HuggingFaceLM(tiny("llama", hidden_size=size, intermediate_size=2 * size)), quantization
    )
    decoder = SpeculativeDecoder(model, NGramDrafter())
    prompts = [[5, 6, 7, 5, 6], [9]]
    for temperature in (0.0, 1.0):
        standard = decoder.decode_standard(prompts, max_new_tokens=16, temperature=temperature)
        assert (
            decoder.decode(prompts, max_new_tokens=16, temperature=temperature).tokens
            == standard.tokens
        )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_calls_of_all_widths_and_batches_compute_the_same_bits(quantization: str) -> None:
    """Whatever calls came before, and however long a row's neighbors are."""
    config = tiny("llama", hidden_size=128, intermediate_size=256)
    model = OpenVINOLM.of(HuggingFaceLM(config), quantization)
    text = torch.arange(44)[None] * 7919 % model.vocab_size
    expected = model(text).logits

    for call_length in (1, 2, 3, 5, 8, 17):
        for batch_size in (1, 2, 3):
            state = model.init_state(batch_size, 44)
            rows = text.expand(batch_size, -1)
            logits = [model(calls, state).logits for calls in rows.split(call_length, dim=1)]
            assert torch.equal(torch.cat(logits, 1), expected.expand(batch_size, -1, -1))

    state = model.init_state(3, 44)
    for lengths in ([20, 1, 2], [1, 7, 1], [1, 0, 1], [4, 1, 1], [1, 1, 3]):
        starts = state.consumed
        longest = max(lengths)
        tokens = torch.cat([text[:, start : start + longest] for start in starts])
        logits = model(tokens, state, valid_lengths=lengths).logits
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            assert torch.equal(logits[row, :length], expected[0, start : start + length])


def test_quantized_early_exits_compute_the_same_bits(cache: Path) -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama", hidden_size=128)), "int8")
    decoder = SpeculativeDecoder(model, EarlyExitDrafter(1))
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
        standard = decoder.decode_standard([[5, 6, 7, 5, 6], [9]], **options)
        assert decoder.decode([[5, 6, 7, 5, 6], [9]], **options).tokens == standard.tokens
        assert standard.lossless and standard.lossy_reason is None


def test_activations_stay_as_they_are_where_widths_would_disagree(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor whose kernels add up in another order for each width."""
    outcome = agreement.Agreement(0.01, 1e-4, "one token")
    monkeypatch.setattr("lightning_specdec.models.openvino.agreement_of", lambda model: outcome)
    model = HuggingFaceLM(tiny("llama"))
    assert OpenVINOLM.of(model, "int8").dynamic_group == 0
    assert OpenVINOLM.of(model).dynamic_group > 0


def test_a_model_is_converted_once_and_nobody_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers.utils.logging.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    reports: list[Any] = []
    monkeypatch.setattr(
        "openvino_telemetry.backend.backend_ga4.GA4Backend.send",
        lambda self, message: reports.append(message),
    )
    model = HuggingFaceLM(tiny("llama"))
    first = OpenVINOLM.of(model)
    monkeypatch.setattr("lightning_specdec.models.openvino.convert", None)
    assert OpenVINOLM.of(model).directory == first.directory and not reports and not caplog.messages
    weights, sums = first.directory / "model.bin", first.directory / "sha256.json"
    for file, damage in (
        (weights, weights.read_bytes()[:-1]),
        (sums, None),
        (sums, b"{"),
        (sums, b"{}"),
    ):
        whole = file.read_bytes()
        file.unlink() if damage is None else file.write_bytes(damage)
        with pytest.raises(ValueError, match="is damaged: delete it"):
            OpenVINOLM.of(model)
        file.write_bytes(whole)
    assert OpenVINOLM.of(model).directory == first.directory


def test_weights_that_change_in_memory_are_not_served_by_an_old_conversion(
    tmp_path: Path, cache: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    model = loading.load_model(tmp_path / "model")
    other = OpenVINOLM.of(model)
    decoder = SpeculativeDecoder(other)
    decoder.decode([5, 3, 9], max_new_tokens=4)
    model.model.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="the weights changed after the model was converted"):
        decoder.decode([5, 3, 9], max_new_tokens=4)
    with pytest.raises(ValueError, match="the weights changed"):
        other(torch.tensor([[1, 2]]))
    anew = OpenVINOLM.of(model)
    torch.testing.assert_close(
        anew(torch.tensor([[1, 2]])).logits, model(torch.tensor([[1, 2]])).logits.detach()
    )
    assert anew.directory != other.directory


def test_a_converted_model_differs_by_its_settings_too(cache: Path) -> None:
    """A window of attention is no weight."""
    same = {"num_hidden_layers": 2, "seed": 3}
    directories = {
        OpenVINOLM.of(HuggingFaceLM(tiny(family, **same))).directory
        for family in ("llama", "mistral")
    }
    assert len(directories) == 2


def test_auto_takes_the_faster_backend_and_remembers_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HuggingFaceLM(tiny("llama"))
    assert loading.in_backend(model, "auto") is model  # too small to be worth it
    monkeypatch.setattr(loading, "MOST_SMALL", 1)
    assert sorted(backend_timing.call_seconds({"torch": model}, repeats=1)) == [
        "torch"
    ]  # a small vocabulary
    for seconds, kind in (
        ({"torch": 2.0, "openvino": 1.0}, OpenVINOLM),
        ({"torch": 1.0, "openvino": 2.0}, HuggingFaceLM),
    ):
        monkeypatch.setattr(backend_timing, "call_seconds", lambda models, seconds=seconds: seconds)
        assert type(loading.in_backend(model, "auto")) is kind
        monkeypatch.setattr(backend_timing, "call_seconds", None)
        assert type(loading.in_backend(model, "auto")) is kind
        (kept,) = cache.glob("backend-*.json")
        assert json.loads(kept.read_text()) == seconds
        kept.write_text('{"torch": ')  # a damaged file is measured again


def test_a_model_is_loaded_in_the_backend_that_is_asked_for(tmp_path: Path, cache: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    for backend, kind in (
        ("torch", HuggingFaceLM),
        ("auto", HuggingFaceLM),
        ("openvino", OpenVINOLM),
    ):
        assert type(loading.load_model(tmp_path / "model", backend=backend)) is kind


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", [], "OpenVINO cannot run MixtralForCausalLM"),
        ("llama", ["--dtype", "float64"], "OpenVINO computes in float32 or bfloat16, got float64"),
    ],
)
def test_what_it_cannot_run_is_refused(
    family: str, options: list[str], message: str, tmp_path: Path, cache: Path
) -> None:
    tiny(family).save_pretrained(tmp_path / "model")
    refused(
        "decode",
        "--target",
        str(tmp_path / "model"),
        "--backend",
        "openvino",
        *options,
        message=message,
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


def test_a_missing_installation_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    refused(
        "decode",
        "--target",
        str(tmp_path / "model"),
        "--backend",
        "openvino",
        message="which is not installed",
    )


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused("decode", "--target", str(tmp_path / "model"), "--backend", "openvino", message="file")


def test_a_full_disk_is_named_with_the_space_that_is_needed(cache: Path) -> None:
    """Tried with a limit on the size of a file, which OpenVINO meets in the same way."""
    model = HuggingFaceLM(tiny("llama"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=f"cannot be written to {cache}: it needs .* are free"):
            OpenVINOLM.of(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.iterdir())


def test_what_a_killed_conversion_left_is_removed_by_the_next_start(cache: Path) -> None:
    """And what another process is still writing stays."""
    abandoned = cache / ".openvino-0123.abcdefgh"
    in_use = cache / ".openvino-0123.ijklmnop"
    for directory in (abandoned, in_use):
        directory.mkdir(parents=True)
        (directory / "model.bin").write_bytes(b"weights")
    lock = os.open(in_use, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
        assert in_use.exists() and not abandoned.exists()
    finally:
        os.close(lock)
    OpenVINOLM.of(HuggingFaceLM(tiny("llama")))
    assert not in_use.exists()


def test_a_cache_that_is_read_only_or_wrong_is_told_in_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HuggingFaceLM(tiny("llama"))
    directory = OpenVINOLM.of(model).directory

    for path in directory.iterdir():
        path.unlink()
    (directory / "sha256.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged: delete it"):
        OpenVINOLM.of(model)

    (directory / "sha256.json").unlink()
    directory.rmdir()
    directory.symlink_to(cache / "gone")
    with pytest.raises(ValueError, match="is a link to a directory that is gone: delete the link"):
        OpenVINOLM.of(model)
    directory.unlink()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(cache))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ValueError, match=f"cannot be written to {cache}: Permission denied"):
        OpenVINOLM.of(model)


def test_decode_runs_in_openvino(tmp_path: Path, cache: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    prompt = ["--prompt", "3 1 4 1 5", "--max_new_tokens", "8", "--output", "json"]
    outputs = [
        succeed("decode", "--target", str(tmp_path / "model"), "--backend", backend, *prompt)
        for backend in ("torch", "openvino")
    ]
    assert list(cache.glob("openvino-*"))
    in_torch, in_openvino = (
        [each["speculative"]["tokens"] for each in output.json["prompts"]] for output in outputs
    )
    assert in_torch == in_openvino


def test_another_decoder_of_the_same_model_changes_nothing(cache: Path) -> None:
    model = OpenVINOLM.of(HuggingFaceLM(tiny("llama", max_position_embeddings=200)))
    first = SpeculativeDecoder(model, NGramDrafter())
    expected = first.decode([[1, 2, 3]], max_new_tokens=8).tokens
    SpeculativeDecoder(model, NGramDrafter()).decode([[1, 2, 3]], max_new_tokens=8)
    assert first.decode([[1, 2, 3]], max_new_tokens=8).tokens == expected

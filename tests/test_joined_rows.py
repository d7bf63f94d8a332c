"""Rows of recurrent and hybrid models share calls, and get what each gets alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from families import tiny
from row_families import FAMILIES, PROMPTS, ours, standard
from torch import Tensor

from lightning_specdec.decoding import Session, autoregressive_decode
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import row_cache, row_reader
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.row_reader import MAX_JOINED_TOKENS, Joins, RowReader

NUM_NEW = 8
SHARED = ("qwen3_5_text", "falcon_h1", "mamba2", "xlstm", "jamba", "bloom", "gpt_neo")
"""Families whose rows share calls: hybrid, recurrent, one token a call, masks of their own."""


def reader_of(model: HuggingFaceLM) -> RowReader:
    """The reader of a model's rows, after all that is measured before the first answer."""
    autoregressive_decode(model, [[1]], max_new_tokens=2)
    reader = model._row_reader
    assert reader is not None
    return reader


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each call of a model."""
    shapes: list[tuple[int, int]] = []
    call_model = RowReader._call_model

    def record(reader: RowReader, calls: Any, options: dict[str, Any]) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return call_model(reader, calls, options)

    monkeypatch.setattr(RowReader, "_call_model", record)
    return shapes


@pytest.mark.quick_cases("qwen3_5_text", "mamba2", "bloom")
@pytest.mark.parametrize("family", SHARED)
def test_rows_share_calls_after_their_prompts(family: str, calls: list[tuple[int, int]]) -> None:
    model = ours(family)
    assert reader_of(model).joins is Joins.ALL
    calls.clear()
    result = autoregressive_decode(model, PROMPTS, max_new_tokens=NUM_NEW)
    num_steps = NUM_NEW - 1
    assert calls[-num_steps:] == [(len(PROMPTS), 1)] * num_steps
    assert result.tokens == standard(family, NUM_NEW)


@pytest.mark.parametrize(
    ("family", "joins"),
    [
        ("llama4_text", Joins.EQUAL_LENGTHS),
        ("minimax", Joins.EQUAL_LENGTHS),
        ("rwkv", Joins.NONE),
        ("recurrent_gemma", Joins.NONE),
        ("deepseek_v32", Joins.NONE),
    ],
)
def test_rows_share_calls_only_where_that_is_right(
    family: str, joins: Joins, calls: list[tuple[int, int]]
) -> None:
    """Chunks of Llama 4 are counted in slots, and RWKV mixes the rows of calls on one token."""
    model = ours(family)
    assert reader_of(model).joins is joins
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [4, 5, 6]]
    calls.clear()
    result = autoregressive_decode(model, prompts, max_new_tokens=4)
    steps = calls[len(prompts) :]
    if joins is Joins.EQUAL_LENGTHS:
        assert steps == [(2, 1), (1, 1)] * 3
    else:
        assert steps == [(1, 1)] * 9
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        assert autoregressive_decode(model, [prompt], max_new_tokens=4).tokens == [tokens]


def test_padding_on_the_wrong_side_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded_right(rows: Sequence[Tensor]) -> Tensor:
        num_slots = max(row.shape[-2] for row in rows)
        padded = []
        for row in rows:
            padding = (0, 0, 0, num_slots - row.shape[-2])
            padded.append(torch.nn.functional.pad(row, padding))
        return torch.cat(padded)

    monkeypatch.setattr(row_cache, "_padded", padded_right)
    model = HuggingFaceLM(tiny("qwen3_5_text", **FAMILIES["qwen3_5_text"]))
    assert reader_of(model).joins is Joins.EQUAL_LENGTHS


def test_states_of_other_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    row_of = row_cache._row_of

    def first_row(name: Any, value: Any, index: int, length: int) -> Any:
        return row_of(name, value, 0, length)

    monkeypatch.setattr(row_cache, "_row_of", first_row)
    model = HuggingFaceLM(tiny("mamba2", **FAMILIES["mamba2"]))
    assert reader_of(model).joins is Joins.NONE


def test_a_model_that_fails_at_several_rows_reads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise IndexError("index 1 is out of range")

    monkeypatch.setattr(row_reader, "call_joined", fail)
    model = HuggingFaceLM(tiny("mamba2", **FAMILIES["mamba2"]))
    assert reader_of(model).joins is Joins.NONE
    result = autoregressive_decode(model, PROMPTS, max_new_tokens=NUM_NEW)
    assert result.tokens == standard("mamba2", NUM_NEW)


def test_attention_windows_of_padded_rows_are_their_own() -> None:
    """Texts within and beyond the window share calls, before and after rejections."""
    model = tiny("mistral", sliding_window=6, num_hidden_layers=3)
    reader = RowReader(model, model.config)
    device = torch.device("cpu")
    reader.measure(device)
    assert reader.joins is Joins.ALL
    drawn = random.Random(0)
    state = reader.init_state(3, device)
    texts: list[list[int]] = [[], [], []]
    lengths = [3, 6, 17]
    for _ in range(12):
        num_new = max(lengths)
        new_tokens = [[drawn.randrange(1, 60) for _ in range(num_new)] for _ in lengths]
        output = reader.read(torch.tensor(new_tokens), state, lengths, None, ())
        for row, length in enumerate(lengths):
            texts[row] += new_tokens[row][:length]
            whole = model(torch.tensor([texts[row]])).logits[0, -length:]
            difference = (output.logits[row, :length] - whole).abs().max()
            assert difference <= 1e-4 * whole.abs().max()

        kept = []
        for text, committed in zip(texts, state.committed, strict=True):
            kept.append(drawn.randint(max(committed, len(text) - 3), len(text)))
        state.commit(kept)
        state.truncate(kept)
        texts = [text[:length] for text, length in zip(texts, kept, strict=True)]
        lengths = [drawn.choice([2, 3, 4]) for _ in range(3)]


def test_long_calls_are_made_for_each_row(calls: list[tuple[int, int]]) -> None:
    model = ours("mamba2")
    num_new = MAX_JOINED_TOKENS + 1
    state = model.init_state(2, 100)
    with torch.inference_mode():
        model(torch.tensor([[1, 2], [3, 4]]), state)
        calls.clear()
        model(torch.ones(2, num_new, dtype=torch.long), state)
        model(torch.ones(2, MAX_JOINED_TOKENS, dtype=torch.long), state)
    assert calls == [(1, num_new), (1, num_new), (2, MAX_JOINED_TOKENS)]


def test_a_copy_of_a_row_has_memory_of_its_own() -> None:
    model = ours("qwen3_5_text")
    state: Any = model.init_state(3, 64)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]] * 3), state)
        model(torch.tensor([[4]] * 3), state)
        copied: Any = state.rows[0].copy()
    for layer in copied.cache.value.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            assert keys.untyped_storage().nbytes() == keys.numel() * keys.element_size()


def test_an_interrupted_call_for_several_rows_is_repeated() -> None:
    model = HuggingFaceLM(tiny("qwen3_5_text", **FAMILIES["qwen3_5_text"]))
    session = Session(model, NGramDrafter(), max_length=64, max_new_tokens=NUM_NEW)
    rows = [session.add(prompt) for prompt in PROMPTS]
    session.step()
    session.step()
    head: Any = model.model.get_output_embeddings()
    forward = head.forward

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    head.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.step()
    head.forward = forward
    while session.step():
        pass
    for row, prompt, expected in zip(rows, PROMPTS, standard("qwen3_5_text", NUM_NEW), strict=True):
        assert row.text[len(prompt) :] == expected


def test_snapshots_of_windows_have_memory_of_their_own() -> None:
    """A window is a part of a longer text, or of the texts of several rows."""
    model = tiny("mistral", sliding_window=6, num_hidden_layers=2)
    reader = RowReader(model, model.config)
    device = torch.device("cpu")
    reader.measure(device)
    state = reader.init_state(3, device)
    tokens = torch.arange(60).view(3, 20)
    num_windows = 0
    for num_new in (20, 2, 2):
        reader.read(tokens[:, :num_new], state, None, None, ())
        state.commit(state.consumed)
        for row in state.rows:
            for snapshot in row.snapshots:
                layers, _ = snapshot.saved
                for layer in layers:
                    keys = layer["keys"]
                    assert keys.untyped_storage().nbytes() == keys.numel() * keys.element_size()
                    num_windows += 1
    assert num_windows >= 12


def test_threads_measure_a_model_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of them tries how rows may share calls, another one must not decode that way."""
    model = HuggingFaceLM(tiny("mamba2", **FAMILIES["mamba2"]))
    own_measure = RowReader._measure
    is_measuring = threading.Event()
    may_measure = threading.Event()
    num_measured = 0

    def measure(reader: RowReader, device: torch.device) -> None:
        nonlocal num_measured
        num_measured += 1
        is_measuring.set()
        assert may_measure.wait(20)
        own_measure(reader, device)

    monkeypatch.setattr(RowReader, "_measure", measure)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(model.init_state, 1, 20)
        assert is_measuring.wait(20)
        second = pool.submit(model.init_state, 1, 20)
        assert not wait([second], timeout=0.2).done
        may_measure.set()
        first.result(20)
        second.result(20)
    assert num_measured == 1


def test_no_row_is_padded_to_a_much_longer_one(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without keys and values need no padding, so they always share a call."""
    monkeypatch.setattr(row_reader, "SHORT_TEXT", 7)
    lengths = [3, 6, 10, 12, 40]
    prompts = [list(range(1, length + 1)) for length in lengths]
    for family, steps in (("qwen3_5_text", [(2, 1), (2, 1), (1, 1)]), ("mamba2", [(5, 1)])):
        model = ours(family)
        assert reader_of(model).joins is Joins.ALL
        calls.clear()
        result = autoregressive_decode(model, prompts, max_new_tokens=2)
        assert calls[-len(steps) :] == steps
        for prompt, tokens in zip(prompts, result.tokens, strict=True):
            assert autoregressive_decode(model, [prompt], max_new_tokens=2).tokens == [tokens]

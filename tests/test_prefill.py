"""Laws of prefill in parts: a long call returns what short ones return, and takes less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, MORE, greedy_tokens, tiny
from torch import Tensor

from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import KVState, attention, prefill
from lightning_specdec.models.attention import StateCache, continued_mask, grouped_attention
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import PackedLinear, computes_natively
from lightning_specdec.models.prefill import parts_of

NUM_TOKENS = 24
WINDOW = 5
"""Sliding window of the tiny families that have one."""
SHORTER_AND_LONGER = [3, 8]
"""Most tokens of a part: less than the window, and more."""
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@functools.cache
def ours(family: str) -> HuggingFaceLM:
    # The first test may run in inference mode, and a later one may need gradients.
    with torch.inference_mode(False):
        return HuggingFaceLM(tiny(family))


@functools.cache
def packed(family: str) -> HuggingFaceLM:
    return ours(family).packed()


@functools.cache
def eager(family: str) -> HuggingFaceLM:
    with torch.inference_mode(False):
        model = tiny(family)
        model.set_attn_implementation("eager")
        return HuggingFaceLM(model)


@pytest.fixture
def limit_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the most tokens of a part."""

    def set_limit(most_tokens: int) -> None:
        limits = dict.fromkeys(prefill.LONGEST_PART, most_tokens)
        monkeypatch.setattr(prefill, "LONGEST_PART", limits)

    return set_limit


def random_tokens(rows: int, length: int = NUM_TOKENS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 67, (rows, length), generator=generator).to(families.DEVICE)


def read(
    model: HuggingFaceLM, tokens: Tensor, pieces: list[list[int]], **options: Any
) -> list[list[Tensor]]:
    """Read rows in calls of these lengths for each row. Returns the logits of each row's tokens."""
    state = model.init_state(len(tokens), tokens.shape[1] + 1)
    logits: list[list[Tensor]] = [[] for _ in tokens]
    for lengths in pieces:
        width = max(lengths)
        positions = torch.tensor(state.consumed)[:, None] + torch.arange(width)
        positions = positions.clamp(max=tokens.shape[1] - 1).to(tokens.device)
        call_tokens = tokens.gather(1, positions)
        output = model(call_tokens, state, valid_lengths=lengths, **options)
        for row, length in enumerate(lengths):
            logits[row].append(output.logits[row, :length])
    return logits


@pytest.mark.parametrize("most_tokens", SHORTER_AND_LONGER)
@pytest.mark.parametrize("form", [ours, packed])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
@torch.inference_mode()
def test_logits_do_not_depend_on_the_parts(
    family: str,
    form: Callable[[str], HuggingFaceLM],
    most_tokens: int,
    limit_parts: Callable[[int], None],
) -> None:
    """Ragged prompts, and then texts that continue rows of different lengths."""
    model = form(family)
    tokens = random_tokens(4)
    pieces = [[14, 9, 2, 14], [1, 1, 20, 2], [9, 12, 1, 8]]
    limit_parts(NUM_TOKENS)
    expected = read(model, tokens, pieces)
    limit_parts(most_tokens)
    actual = read(model, tokens, pieces)
    for expected_row, actual_row in zip(expected, actual, strict=True):
        assert_close(torch.cat(actual_row), torch.cat(expected_row))


@pytest.mark.parametrize("most_tokens", SHORTER_AND_LONGER)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_eager_attention_reads_parts_too(
    family: str, most_tokens: int, limit_parts: Callable[[int], None]
) -> None:
    tokens = random_tokens(2)
    pieces = [[14, 9], [10, 15]]
    expected = read(ours(family), tokens, pieces)
    limit_parts(most_tokens)
    actual = read(eager(family), tokens, pieces)
    for expected_row, actual_row in zip(expected, actual, strict=True):
        assert_close(torch.cat(actual_row), torch.cat(expected_row))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_features_and_scored_positions_are_those_of_one_call(
    family: str, limit_parts: Callable[[int], None]
) -> None:
    model = ours(family)
    tokens = random_tokens(3)
    lengths = [24, 11, 2]
    last_two = torch.tensor([[22, 23], [9, 10], [0, 1]], device=tokens.device)
    options = {"valid_lengths": lengths, "logits_for": last_two, "features": (0, 2)}
    expected = model(tokens, model.init_state(3, NUM_TOKENS), **options)
    limit_parts(4)
    actual = model(tokens, model.init_state(3, NUM_TOKENS), **options)

    assert_close(actual.logits, expected.logits)
    for layer in (0, 2):
        for row, length in enumerate(lengths):
            assert_close(
                actual.features[layer][row, :length], expected.features[layer][row, :length]
            )
            assert (actual.features[layer][row, length:] == 0).all()


@torch.inference_mode()
def test_a_slice_of_positions_is_scored(limit_parts: Callable[[int], None]) -> None:
    model = ours("llama")
    tokens = random_tokens(2)
    expected = model(tokens, model.init_state(2, NUM_TOKENS), logits_for=slice(-6, None)).logits
    limit_parts(4)
    actual = model(tokens, model.init_state(2, NUM_TOKENS), logits_for=slice(-6, None)).logits
    assert_close(actual, expected)


@torch.inference_mode()
def test_garbage_after_a_row_changes_nothing(limit_parts: Callable[[int], None]) -> None:
    limit_parts(4)
    model = ours("llama")
    tokens = random_tokens(2)
    clean_state = model.init_state(2, NUM_TOKENS)
    dirty_state = model.init_state(2, NUM_TOKENS)
    for state in (clean_state, dirty_state):
        model(tokens[:, :7], state, valid_lengths=[7, 3])
    assert isinstance(dirty_state, KVState)
    for keys, values in dirty_state.storage.layers.values():
        for row, length in enumerate(dirty_state.consumed):
            keys[row, :, length:] = 1e4
            values[row, :, length:] = -1e4

    logits = []
    for state in (clean_state, dirty_state):
        logits.append(model(tokens[:, 7:20], state, logits_for=slice(-1, None)).logits)
    assert_close(logits[1], logits[0])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
def test_greedy_output_is_that_of_generate(family: str, limit_parts: Callable[[int], None]) -> None:
    limit_parts(4)
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (40, 3, 17)]
    expected = [greedy_tokens(tiny(family), prompt, 12) for prompt in prompts]
    assert autoregressive_decode(ours(family), prompts, max_new_tokens=12).tokens == expected

    drafter = ModelDrafter(ours(family))
    result = speculative_decode(
        ours(family), drafter, prompts, max_new_tokens=12, num_draft_tokens=3
    )
    assert result.tokens == expected


def test_recorded_calls_continue_a_prompt_that_was_read_in_parts(
    limit_parts: Callable[[int], None],
) -> None:
    limit_parts(4)
    recorded = HuggingFaceLM(tiny("llama")).record()
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (40, 3)]
    expected = autoregressive_decode(ours("llama"), prompts, max_new_tokens=12).tokens
    result = speculative_decode(
        recorded, NGramDrafter(), prompts, max_new_tokens=12, num_draft_tokens=3
    )
    assert result.tokens == expected


def test_an_early_exit_reads_parts(limit_parts: Callable[[int], None]) -> None:
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (40, 3)]
    expected = autoregressive_decode(ours("llama"), prompts, max_new_tokens=12).tokens
    limit_parts(4)
    result = speculative_decode(
        ours("llama"),
        EarlyExitDrafter(exit_layer=2),
        prompts,
        max_new_tokens=12,
        num_draft_tokens=3,
    )
    assert result.tokens == expected


def test_rows_join_and_resume_with_long_texts(limit_parts: Callable[[int], None]) -> None:
    """A long prompt enters while another row decodes, and a conversation continues."""
    limit_parts(4)
    target = ours("llama")
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (5, 30)]
    session = Session(target, NGramDrafter(), max_length=90, batch_size=2, num_draft_tokens=3)
    first = session.add(prompts[0], max_new_tokens=20)
    session.step()
    second = session.add(prompts[1], max_new_tokens=6)
    while session.step():
        pass
    next_prompt = [*second.text, *random_tokens(1, 17, seed=9)[0].tolist()]
    third = session.resume(second, next_prompt, max_new_tokens=9)
    while session.step():
        pass

    for row, prompt in ((first, prompts[0]), (second, prompts[1]), (third, next_prompt)):
        num_new = len(row.text) - len(prompt)
        expected = autoregressive_decode(target, prompt, max_new_tokens=num_new)
        assert row.text[len(prompt) :] == expected.tokens[0]


@torch.inference_mode()
def test_layers_read_at_most_a_part(
    monkeypatch: pytest.MonkeyPatch, limit_parts: Callable[[int], None]
) -> None:
    """Neither activations nor masks grow with the prompt, and rows of one length need no mask."""
    limit_parts(8)
    widths: list[tuple[int, int]] = []
    mask_columns: list[int] = []
    plain_update = StateCache.update

    def noting_update(
        self: StateCache, keys: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        widths.append((keys.shape[0], keys.shape[2]))
        return plain_update(self, keys, *args, **options)

    def noting_attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        mask_columns.append(0 if mask is None else mask.shape[-1])
        return grouped_attention(module, query, key, value, mask, **options)

    monkeypatch.setattr(StateCache, "update", noting_update)
    interface = attention.AttentionInterface._global_mapping
    monkeypatch.setitem(interface, attention.NAME, noting_attention)

    model = ours("llama")
    tokens = random_tokens(2, 61)
    model(tokens, model.init_state(2, 61), valid_lengths=[61, 30], logits_for=slice(-1, None))
    assert max(width for _, width in widths) == 8
    assert {num_rows for num_rows, _ in widths} == {1}
    if families.DEVICE == "cpu":
        assert set(mask_columns) == {0}


@torch.inference_mode()
def test_attention_without_a_mask_is_attention_with_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_heads, num_key_heads in ((4, 4), (6, 2), (9, 3)):
        query = torch.randn(2, num_heads, 5, 16, generator=generator)
        key = torch.randn(2, num_key_heads, 12, 16, generator=generator)
        value = torch.randn(2, num_key_heads, 12, 16, generator=generator)
        is_visible = torch.arange(12) <= torch.arange(7, 12)[:, None]
        mask = torch.zeros(2, 1, 5, 12).masked_fill(~is_visible, -torch.inf)

        module = torch.nn.Module()
        module.num_key_value_groups = num_heads // num_key_heads  # type: ignore[assignment]
        expected, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
        empty_mask = continued_mask(torch.zeros(2, 5), torch.float32)
        actual, _ = grouped_attention(module, query, key, value, empty_mask, scaling=0.3)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_attention_without_a_mask_refuses_what_it_does_not_compute(option: str) -> None:
    states = torch.zeros(1, 2, 3, 4)
    mask = continued_mask(torch.zeros(1, 3), torch.float32)
    with pytest.raises(ValueError, match=option):
        grouped_attention(
            torch.nn.Module(), states, states, states, mask, **{option: torch.ones(2)}
        )


@pytest.mark.parametrize("most_tokens", [8, 128])
@pytest.mark.parametrize("cost_of_call", [0, 4, 1000])
def test_parts_cover_every_token_once(cost_of_call: int, most_tokens: int) -> None:
    for lengths in (
        [1],
        [9],
        [8, 8],
        [20, 1, 1],
        [20, 7, 30, 3],
        [17, 33],
        [0, 40],
        [90, 3, 200, 70],
    ):
        read_tokens: list[tuple[int, int]] = []
        for part in parts_of(lengths, most_tokens, cost_of_call):
            assert part.num_tokens <= most_tokens
            for row, start, length in zip(part.rows, part.starts, part.lengths, strict=True):
                positions = range(start, start + length)
                read_tokens += [(row, position) for position in positions]
        expected = [(row, position) for row, end in enumerate(lengths) for position in range(end)]
        assert sorted(read_tokens) == expected


def test_no_row_is_padded_to_a_much_longer_one() -> None:
    def calls(lengths: list[int], cost_of_call: int) -> list[tuple[int | None, int]]:
        return [(part.row, part.num_tokens) for part in parts_of(lengths, 1000, cost_of_call)]

    # Reading the long prompt alone saves 3 x 96 tokens of padding, for one more call.
    assert calls([4, 4, 100, 4], 32) == [(2, 96), (None, 4)]
    assert calls([4, 4, 100, 4], 300) == [(None, 100)]
    # Two calls more would cost more than the padding of the shorter row.
    assert calls([4, 15, 200, 4], 32) == [(2, 185), (None, 15)]
    assert calls([5, 1, 1, 1], 32) == [(None, 5)]
    # A round of many rows, one of which has a long draft, is one call.
    assert calls([17, *[1] * 15], 32) == [(None, 17)]
    assert calls([0, 0, 90], 32) == [(2, 90)]
    # A row that is read in parts anyway leaves the padding of the others as it is.
    assert calls([2000, 10, 900], 32) == [(0, 1000), (0, 990), (2, 890), (None, 10)]


@torch.inference_mode()
def test_a_wide_product_in_bfloat16_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).bfloat16()
    bias = torch.randn(40, generator=generator).bfloat16()
    inputs = torch.randn(1, 200, 24, generator=generator).bfloat16()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor packs no bfloat16 weights")

    layer = PackedLinear(weight, bias)
    exact = inputs.double() @ weight.double().T + bias.double()
    for num_tokens in (8, 200):
        output = layer(inputs[:, :num_tokens])
        assert output.dtype == torch.bfloat16
        error = (output.double() - exact[:, :num_tokens]).abs()
        # Half a unit in the last of eight bits, and a little for the sums.
        assert (error <= 2**-8 * exact[:, :num_tokens].abs() + 1e-5).all()


def test_float32_is_native_everywhere() -> None:
    assert computes_natively(torch.float32)

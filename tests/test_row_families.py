"""Laws of models that are decoded row by row: recurrent, hybrid, and with masks of their own."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from families import greedy_tokens, tiny
from resumed_rows import check_resumed_conversation
from row_families import (
    ATTENTION,
    FAMILIES,
    HYBRID,
    ONE_TOKEN,
    PROMPTS,
    RECURRENT,
    other,
    ours,
    reference,
    standard,
)
from tiny_eagle import fitted_eagle
from tiny_heads import heads

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
)
from lightning_specdec.models import row_cache, row_reader
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.row_cache import ModelCache
from lightning_specdec.models.snapshot_state import RowCache, SnapshotRow, SnapshotState
from lightning_specdec.rules import RejectionSampling

NUM_NEW = 16
LOGGER = "lightning_specdec.models.row_reader"
every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "rwkv"])


def generated(family: str) -> list[list[int]]:
    """What transformers' own greedy decoding writes after each prompt."""
    return [greedy_tokens(reference(family), prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.mark.quick_cases("bloom", "jamba", "lfm2", "mamba2", "rwkv", "qwen3_5_text")
@every_family
def test_standard_decoding_of_a_ragged_batch_equals_generate(family: str) -> None:
    expected = generated(family)
    assert len({token for row in expected for token in row}) > 8, "one token would show nothing"
    assert autoregressive_decode(ours(family), PROMPTS, max_new_tokens=NUM_NEW).tokens == expected


@pytest.mark.quick_cases("bloom", "jamba", "lfm2", "mamba2", "rwkv", "qwen3_5_text")
@every_family
def test_drafts_of_a_similar_model_change_nothing(family: str) -> None:
    """Target and draft model are both of the family. A token that occurs ends some rows."""
    expected = standard(family, NUM_NEW)
    eos = expected[1][9]
    drafter = ModelDrafter(other(family, 3, 0.03))
    result = speculative_decode(
        ours(family), drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=4, eos=eos
    )
    for tokens, whole in zip(result.tokens, expected, strict=True):
        end = whole.index(eos) + 1 if eos in whole else NUM_NEW
        assert tokens == whole[:end]
    assert result.acceptance_rate


@pytest.mark.quick_cases("0.8-lfm2")
@some_families
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_window_is_exact_at_every_temperature(family: str, temperature: float) -> None:
    """Drafts by prompt lookup, verified by `ExactMatch`."""
    expected = standard(family, 12, temperature=temperature)
    for num_draft_tokens in range(1, 9):
        result = speculative_decode(
            ours(family),
            NGramDrafter(),
            PROMPTS,
            max_new_tokens=12,
            num_draft_tokens=num_draft_tokens,
            temperature=temperature,
        )
        assert result.tokens == expected


class Wrong(Drafter):
    """Drafts the same wrong tokens in every round, so that every round is rolled back."""

    def propose(self, state: Any, request: Any, windows: Sequence[int], sampling: Any) -> Any:
        tokens = request.last_two_tokens[:, 1:] + torch.arange(1, max(windows) + 1)
        return Draft(tokens % 67, None)


@pytest.mark.quick_cases("lfm2", "qwen3_5_text", "rwkv")
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "rwkv", "zamba2", "mamba", "gpt_neo"])
def test_rejected_tokens_leave_no_trace(family: str) -> None:
    result = speculative_decode(
        ours(family), Wrong(), PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens == standard(family, NUM_NEW)
    assert result.acceptance_rate is not None and result.acceptance_rate < 0.2


@some_families
def test_without_its_snapshots_the_output_would_differ(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the law above can fail: in these families, rejected tokens do leave a trace."""
    ours(family).init_state(1, 1)  # measures the model
    restore_layer = row_cache._restore_layer

    def keep_recurrent_states(layer: Any, saved: dict[str, Any]) -> None:
        others = {name: value for name, value in saved.items() if "states" not in name}
        restore_layer(layer, others)

    monkeypatch.setattr(row_cache, "_restore_layer", keep_recurrent_states)
    if family == "rwkv":
        monkeypatch.setattr(ModelCache, "restore", lambda cache, saved: None)
    result = speculative_decode(
        ours(family), Wrong(), PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens != standard(family, NUM_NEW)


@pytest.mark.quick_cases("bloom", "lfm2", "rwkv")
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1", "rwkv", "bloom"])
@torch.inference_mode()
def test_truncating_and_feeding_again_equals_a_fresh_run(family: str) -> None:
    """A batch that is fed, truncated, committed, reordered and cleared at random."""
    model = ours(family)
    assert model.num_layers is not None
    layers = (0, model.num_layers - 1)
    drawn = random.Random(1)
    state = model.init_state(3, 64)
    texts: list[list[int]] = [[], [], []]
    committed = [0, 0, 0]
    num_compared = 0
    for _ in range(40):
        (step,) = drawn.choices(["feed", "truncate", "commit", "select", "clear"], [7, 4, 2, 1, 1])
        if step == "feed":
            counts = [drawn.randint(0, 4) for _ in texts]
            tokens = torch.tensor([[drawn.randrange(67) for _ in range(4)] for _ in texts])
            output = model(tokens, state, valid_lengths=counts, features=layers)
            for row, count in enumerate(counts):
                texts[row] += tokens[row, :count].tolist()
                if count:
                    compare(model, texts[row], output, row, count, layers)
                    num_compared += count
        elif step == "truncate":
            lengths = drawn_lengths(drawn, committed, texts)
            state.truncate(lengths)
            texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        elif step == "commit":
            committed = drawn_lengths(drawn, committed, texts)
            state.commit(committed)
        elif step == "select":
            rows = [drawn.randrange(-1, len(texts)) for _ in range(drawn.randint(1, 3))]
            state.select(rows)
            texts = [[] if row < 0 else list(texts[row]) for row in rows]
            committed = [0 if row < 0 else committed[row] for row in rows]
        else:
            row = drawn.randrange(len(texts))
            state.clear([row])
            texts[row] = []
            committed[row] = 0
        assert state.consumed == [len(text) for text in texts]
    assert num_compared > 30


def drawn_lengths(
    drawn: random.Random,
    committed: Sequence[int],
    texts: Sequence[list[int]],
) -> list[int]:
    rows = zip(committed, texts, strict=True)
    return [drawn.randint(length, len(text)) for length, text in rows]


def compare(
    model: HuggingFaceLM,
    text: list[int],
    output: Any,
    row: int,
    count: int,
    layers: Sequence[int],
) -> None:
    """The output for the last tokens of a text against a run on the whole text."""
    fresh = model(torch.tensor([text]), features=layers)
    pairs = [(output.logits[row, :count], fresh.logits[0, -count:])]
    for layer in layers:
        pairs.append((output.features[layer][row, :count], fresh.features[layer][0, -count:]))
    for actual, expected in pairs:
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@some_families
def test_rows_that_come_and_go_change_nothing_for_the_others(family: str) -> None:
    expected = standard(family, NUM_NEW)
    session = Session(ours(family), NGramDrafter(), max_length=64, max_new_tokens=NUM_NEW)
    first = session.add(PROMPTS[1])
    session.step()
    cancelled = session.add(PROMPTS[0])
    third = session.add(PROMPTS[2])
    session.step()
    session.cancel(cancelled)
    session.step()
    fourth = session.add(PROMPTS[0], index=0)
    while session.step():
        pass
    for row, index in ((first, 1), (third, 2), (fourth, 0)):
        assert row.text[len(PROMPTS[index]) :] == expected[index]
    assert cancelled.stop_reason == "cancelled"


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_resumed_conversation_equals_a_fresh_one(family: str) -> None:
    check_resumed_conversation(ours(family), NGramDrafter(), PROMPTS[1])


@pytest.mark.quick_cases("llama-lfm2")
@pytest.mark.parametrize(
    ("target", "draft"), [("qwen3_5_text", "llama"), ("llama", "lfm2"), ("rwkv", "mamba2")]
)
def test_target_and_draft_may_be_of_other_kinds(target: str, draft: str) -> None:
    target_model = ours(target) if target in FAMILIES else HuggingFaceLM(tiny(target))
    draft_model = ours(draft) if draft in FAMILIES else HuggingFaceLM(tiny(draft))
    for drafter in (
        ModelDrafter(draft_model),
        NGramWithFallback(NGramDrafter(), ModelDrafter(draft_model)),
        StagedDrafter([NGramDrafter(), ModelDrafter(draft_model)]),
    ):
        result = speculative_decode(
            target_model, drafter, PROMPTS, max_new_tokens=16, num_draft_tokens=3
        )
        expected = autoregressive_decode(target_model, PROMPTS, max_new_tokens=16)
        assert result.tokens == expected.tokens


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "rwkv"])
def test_a_copy_as_draft_is_accepted_whole(family: str) -> None:
    result = speculative_decode(
        ours(family),
        ModelDrafter(deepcopy(ours(family))),
        PROMPTS,
        max_new_tokens=20,
        num_draft_tokens=4,
    )
    assert result.block_efficiency == 5


@pytest.mark.quick_cases("heads-lfm2")
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("make_drafter", [fitted_eagle, heads])
def test_heads_on_hidden_states_draft_for_them(family: str, make_drafter: Any) -> None:
    drafter = make_drafter(ours(family))
    result = speculative_decode(
        ours(family), drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3
    )
    assert result.tokens == standard(family, NUM_NEW)
    assert result.acceptance_rate


@pytest.mark.parametrize("family", ["qwen3_5_text", "rwkv"])
def test_an_early_exit_is_refused_by_name(family: str) -> None:
    with pytest.raises(ValueError, match=r"ForCausalLM cannot be taken apart: its layers"):
        speculative_decode(ours(family), EarlyExitDrafter(1), PROMPTS, max_new_tokens=4)


def test_a_rejection_rule_gives_each_row_of_a_batch_what_it_gets_alone() -> None:
    drafter = ModelDrafter(other("qwen3_5_text", 3, 0.03))
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "rule": RejectionSampling(),
        "temperature": 0.8,
    }
    together = speculative_decode(ours("qwen3_5_text"), drafter, PROMPTS, **options)
    for index, prompt in enumerate(PROMPTS):
        alone = speculative_decode(
            ours("qwen3_5_text"), drafter, [prompt], indices=[index], **options
        )
        assert together.tokens[index] == alone.tokens[0]


@pytest.mark.parametrize("family", ONE_TOKEN)
def test_calls_on_several_tokens_are_avoided_where_they_are_wrong(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = HuggingFaceLM(tiny(family, **FAMILIES[family]))
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        model.init_state(1, 8)
        model.init_state(1, 8)
    messages = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(messages) == 1
    assert messages[0].startswith(f"{type(model.model).__name__} reads one token a call")


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_wrong_calls_on_several_tokens_are_measured(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a family that is wrong in the same way is noticed, too."""
    monkeypatch.setattr(row_reader, "_IGNORES_STATE", ())
    model = HuggingFaceLM(tiny(family, **FAMILIES[family]))
    model.init_state(1, 8)
    assert lengths_of_calls(model) == [3, 1, 1, 1, 1]


def lengths_of_calls(model: HuggingFaceLM) -> list[int]:
    """Tokens of the model's own calls that read three tokens, and four more."""
    lengths: list[int] = []
    state = model.init_state(1, 32)
    embedding: Any = model.model.get_input_embeddings()
    handle = embedding.register_forward_hook(
        lambda module, inputs, output: lengths.append(inputs[0].shape[-1])
    )
    try:
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]), state, logits_for=slice(-1, None))
            model(torch.tensor([[4, 5, 6, 7]]), state)
    finally:
        handle.remove()
    return lengths


@pytest.mark.parametrize("family", [*HYBRID, *RECURRENT, *ATTENTION])
def test_calls_on_several_tokens_are_used_where_they_are_right(family: str) -> None:
    assert lengths_of_calls(ours(family)) == [3, 4]


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_hooks_of_a_user_are_followed(family: str) -> None:
    model: Any = tiny(family, **FAMILIES[family])
    decoder = SpeculativeDecoder(model)
    before = decoder.decode(PROMPTS[1], max_new_tokens=8).tokens
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: -output
    )
    prompt_ids = torch.tensor([PROMPTS[1]])
    text = model.generate(prompt_ids, max_new_tokens=8, do_sample=False)
    hooked = decoder.decode(PROMPTS[1], max_new_tokens=8).tokens
    assert hooked == [text[0, len(PROMPTS[1]) :].tolist()] != before
    hook.remove()
    assert decoder.decode(PROMPTS[1], max_new_tokens=8).tokens == before


def test_a_state_that_cannot_be_restored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCache, "restore", lambda cache, saved: None)
    model = HuggingFaceLM(tiny("mamba2", **FAMILIES["mamba2"]))
    with pytest.raises(ValueError, match="Mamba2ForCausalLM keeps a state that cannot be restored"):
        model.init_state(1, 8)


def test_snapshots_are_counted_in_bytes() -> None:
    model = ours("mamba2")
    state = model.init_state(2, 32)
    assert isinstance(state, SnapshotState)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]] * 2), state)
        caches_bytes = state.num_bytes()
        state.commit([3, 3])
        model(torch.tensor([[4]] * 2), state)
    assert model.snapshot_bytes() > 1000
    assert state.num_bytes() - caches_bytes == 2 * model.snapshot_bytes()


class Letters(RowCache):
    """A cache that is the text itself."""

    def __init__(self) -> None:
        self.text = ""

    def snapshot(self) -> str:
        return self.text

    def restore(self, saved: str) -> None:
        assert self.text.startswith(saved)
        self.text = saved


def read(row: SnapshotRow, text: str, committed: int) -> None:
    """Read new letters, with a snapshot before them."""
    row.append(torch.tensor([ord(letter) for letter in text]))
    row.take_snapshot(committed)
    unread = "".join(chr(letter) for letter in row.unread.tolist())
    with row.reading(len(unread)):
        assert isinstance(row.cache, Letters)
        row.cache.text += unread


def test_a_row_returns_to_any_committed_length_over_two_snapshots_at_most() -> None:
    row = SnapshotRow(Letters, torch.device("cpu"))
    read(row, "abcd", 0)
    read(row, "efg", 2)
    assert [snapshot.num_read for snapshot in row.snapshots] == [4]
    read(row, "hi", 5)
    assert [snapshot.num_read for snapshot in row.snapshots] == [4, 7]
    read(row, "jk", 5)
    assert [snapshot.num_read for snapshot in row.snapshots] == [4, 9]

    row.truncate(10)
    assert row.num_read == 9
    row.truncate(5)
    assert row.num_read == 4
    read(row, "XYZ", 5)
    assert isinstance(row.cache, Letters)
    assert row.cache.text == "abcdeXYZ"
    read(row, "!", 8)
    assert [snapshot.num_read for snapshot in row.snapshots] == [8]


def test_an_interrupted_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is stopped in its last layer, when the others have read the tokens."""
    model = HuggingFaceLM(tiny("qwen3_5_text", **FAMILIES["qwen3_5_text"]))
    session = Session(model, Wrong(), max_length=64, max_new_tokens=NUM_NEW)
    row = session.add(PROMPTS[1])
    session.step()
    head: Any = model.model.get_output_embeddings()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    forward = head.forward
    head.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.step()
    head.forward = forward
    while session.step():
        pass
    assert row.text[len(PROMPTS[1]) :] == standard("qwen3_5_text", NUM_NEW)[1]


def test_the_context_is_not_exceeded_by_drafts() -> None:
    """GPT-Neo has a table of positions, and a long draft of another row shares the last call."""
    target = HuggingFaceLM(
        tiny("gpt_neo", **{**FAMILIES["gpt_neo"], "max_position_embeddings": 24})
    )
    prompts = [PROMPTS[1], list(range(12, 30))]
    session = Session(target, Wrong(), max_length=24, num_draft_tokens=8)
    rows = [session.add(prompts[0], max_new_tokens=19), session.add(prompts[1], max_new_tokens=6)]
    while session.step():
        pass
    for row, prompt in zip(rows, prompts, strict=True):
        expected = autoregressive_decode(target, [prompt], max_new_tokens=24 - len(prompt))
        assert row.text[len(prompt) :] == expected.tokens[0]


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_next", "lfm2"])
def test_a_hybrid_model_of_attention_layers_only_shares_calls_between_rows(family: str) -> None:
    sizes = {
        **FAMILIES[family],
        "layer_types": ["full_attention"] * 4,
        "full_attn_idxs": [0, 1, 2, 3],
    }
    if family != "lfm2":
        sizes.pop("full_attn_idxs")
    model = HuggingFaceLM(tiny(family, **sizes))
    assert not isinstance(model.init_state(1, 8), SnapshotState)
    result = speculative_decode(model, NGramDrafter(), PROMPTS, max_new_tokens=12)
    assert result.tokens == autoregressive_decode(model, PROMPTS, max_new_tokens=12).tokens


def test_a_model_in_training_mode_is_decoded_and_keeps_its_weights_and_mode() -> None:
    """RWKV divides the weights of every sixth layer by a power of two, unless it is trained."""
    model = tiny("rwkv", **{**FAMILIES["rwkv"], "num_hidden_layers": 4, "rescale_every": 2})
    prompt_ids = torch.tensor([PROMPTS[1]])
    untouched: Any = deepcopy(model)
    text = untouched.generate(prompt_ids, max_new_tokens=8, do_sample=False)
    expected = text[0, len(PROMPTS[1]) :].tolist()
    model.train()
    decoder = SpeculativeDecoder(model)
    for _ in range(2):
        assert decoder.decode(PROMPTS[1], max_new_tokens=8).tokens == [expected]
        assert model.training
    train_logits = model(prompt_ids).logits
    fresh = tiny("rwkv", **{**FAMILIES["rwkv"], "num_hidden_layers": 4, "rescale_every": 2})
    torch.testing.assert_close(train_logits, fresh.train()(prompt_ids).logits)


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba"])
def test_a_decoder_writes_the_same(family: str) -> None:
    decoder = SpeculativeDecoder(ours(family))
    assert decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == standard(family, NUM_NEW)

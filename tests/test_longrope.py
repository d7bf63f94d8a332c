"""Laws of LongRoPE positions: texts on both sides of the switch decode as transformers does."""

from __future__ import annotations

import threading
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import related
from cli_fixtures import refused, succeed
from families import DEVICE, greedy_tokens, tiny
from tiny_eagle import eagle
from tiny_models import write_text_model
from tiny_tokenizers import byte_level
from tiny_vocabularies import cross, letters
from transformers import GenerationConfig

import lightning_specdec
from lightning_specdec import ModelDrafter, NGramDrafter, SpeculativeDecoder
from lightning_specdec.audit.identity import readings
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.data import QuadraticProgressions
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.autoregressive import autoregressive_decode
from lightning_specdec.decoding.calibration import calibrate
from lightning_specdec.decoding.session import Conversation, run
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, StagedDrafter
from lightning_specdec.models import RNN, LanguageModel, prefill
from lightning_specdec.models.base import eval_copy
from lightning_specdec.models.changes import ModelStamp, user_code
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.longrope import rotation
from lightning_specdec.models.weights import weights_digest
from lightning_specdec.serve.engine import Engine, Generation
from lightning_specdec.serve.prefix_cache import PrefixCache
from lightning_specdec.serve.service import Service
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.training import PairTraining

SWITCH = 32
CONTEXT = 256
NUM_NEW = 12
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 3.0, 7.0, 12.0],
    "original_max_position_embeddings": SWITCH,
}
LENGTHS = (5, SWITCH - NUM_NEW + 1, SWITCH + 1, SWITCH + 9, 3 * SWITCH)
"""Prompts whose texts end before the switch, at it, and that begin after it."""

_TINY_ENCODER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "phi4_multimodal": {
        "num_key_value_heads": 2,
        "vision_config": {
            **_TINY_ENCODER,
            "num_hidden_layers": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "audio_config": {
            **_TINY_ENCODER,
            "num_blocks": 1,
            "input_size": 16,
            "nemo_conv_channels": 32,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        },
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
}
"""Sizes of a model that also has encoders of images and sound."""


EXPERTS: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 3,
    "sliding_window": None,
}
"""Sizes of PhiMoE."""

SCALES = {"short_mscale": 1.0, "long_mscale": 1.3}
"""PhiMoE's scales of cosines and sines, one for each side."""


def sizes_of(family: str) -> dict[str, Any]:
    """What the tiny models of a family need beside the sizes that all have."""
    if family == "phimoe":
        return {**EXPERTS, "rope_parameters": {**ROPE, **SCALES}}
    return ENCODERS.get(family, {})


def model_of(family: str = "phi3", seed: int = 0, **sizes: Any) -> Any:
    if family.startswith("phi"):
        sizes["original_max_position_embeddings"] = SWITCH
    model: Any = tiny(
        family,
        seed=seed,
        **{"max_position_embeddings": CONTEXT, "rope_parameters": dict(ROPE), **sizes},
    )
    model.generation_config = GenerationConfig(do_sample=False)
    # The last layer changes little, so that an exit before it is often right.
    last_layer = model.model.layers[-1]
    with torch.no_grad():
        last_layer.self_attn.o_proj.weight.mul_(0.1)
        if hasattr(last_layer.mlp, "down_proj"):
            last_layer.mlp.down_proj.weight.mul_(0.1)
    return model


@cache
def shared_model() -> Any:
    return model_of()


@cache
def target() -> HuggingFaceLM:
    return HuggingFaceLM(model_of())


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    # Few different tokens, so that lookups find something.
    tokens: list[int] = torch.randint(1, 9, (num_tokens,), generator=generator).tolist()
    return tokens


@cache
def expected_tokens(length: int, num_new: int = NUM_NEW) -> list[int]:
    return greedy_tokens(shared_model(), prompt_of(length), num_new)


def drafter_of(kind: str) -> Drafter:
    if kind == "lookup":
        return NGramDrafter()
    if kind == "early exit":
        return EarlyExitDrafter(exit_layer=2)
    if kind == "eagle":
        return eagle(target())
    # A draft model has a switch of its own, and is right often enough to have draft tokens
    # accepted.
    draft = related(target())
    if kind == "stages":
        return StagedDrafter([NGramDrafter(), ModelDrafter(draft)])
    return ModelDrafter(draft)


DRAFTERS = ("lookup", "model", "early exit", "eagle", "stages")


def new_session(kind: str, **options: Any) -> Session:
    options = {"max_length": CONTEXT, "num_draft_tokens": 3, "max_new_tokens": NUM_NEW, **options}
    return Session(target(), drafter_of(kind), **options)


def new_tokens(row: Any) -> list[int]:
    tokens: list[int] = row.text[row.prompt_length :]
    return tokens


@torch.no_grad()
def last_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens], device=DEVICE)).logits[0, -1]
    return logits


def test_the_two_sides_give_different_logits() -> None:
    """So the other laws can fail: with the wrong side, tokens differ."""
    model = deepcopy(shared_model())
    expected = last_logits(model, prompt_of(2 * SWITCH))
    rotary = model.model.rotary_emb
    rotary.long_inv_freq = rotary.original_inv_freq.clone()
    wrong = last_logits(model, prompt_of(2 * SWITCH))
    assert (wrong - expected).abs().max() > 0.1 * expected.abs().max()
    prompt = prompt_of(LENGTHS[-1])
    assert greedy_tokens(model, prompt, NUM_NEW) != expected_tokens(LENGTHS[-1])


def test_the_context_is_whole_and_the_switch_is_known() -> None:
    assert target().max_positions == CONTEXT
    assert target().position_switch == SWITCH
    never_longer = model_of()
    never_longer.config.max_position_embeddings = SWITCH
    assert HuggingFaceLM(never_longer).position_switch is None
    assert HuggingFaceLM(tiny("llama")).position_switch is None


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_on_either_side_equals_transformers_generate(drafter: str, length: int) -> None:
    session = new_session(drafter)
    row = session.add(prompt_of(length))
    run(session)
    assert new_tokens(row) == expected_tokens(length)


def test_standard_decoding_equals_transformers_generate_in_a_mixed_batch() -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    result = autoregressive_decode(target(), prompts, max_new_tokens=NUM_NEW)
    assert result.tokens == [expected_tokens(length) for length in LENGTHS]


@pytest.mark.parametrize("max_prompt_tokens", [None, 7, SWITCH + 5])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mixed_batch_whose_prompts_are_read_in_parts_equals_transformers_generate(
    drafter: str, max_prompt_tokens: int | None
) -> None:
    session = new_session(drafter)
    rows = {}
    for length in (*LENGTHS, SWITCH + 2):
        rows[length] = session.add(prompt_of(length))
        session.step(max_prompt_tokens)
    while session.live:
        session.step(max_prompt_tokens)
    for length, row in rows.items():
        assert new_tokens(row) == expected_tokens(length)


@pytest.mark.parametrize("drafter", ["lookup", "model", "early exit", "stages"])
def test_draft_tokens_are_accepted_on_both_sides(drafter: str) -> None:
    """So the other laws are about more than rejected drafts."""
    for length in (5, 3 * SWITCH):
        session = new_session(drafter, max_new_tokens=SWITCH - 5)
        row = session.add(prompt_of(length))
        run(session)
        assert row.counts is not None
        assert row.counts.num_accepted > 0


@pytest.mark.parametrize("first", ["lookup", "model"])
def test_a_drafter_that_has_the_target_read_all_texts_again_keeps_their_sides(first: str) -> None:
    session = new_session(first)
    lengths = (5, SWITCH + 1, 3 * SWITCH)
    rows = [session.add(prompt_of(length)) for length in lengths]
    for _ in range(4):
        session.step(11)
    session.replace_drafter(drafter_of("eagle"))
    while session.live:
        session.step(11)
    for length, row in zip(lengths, rows, strict=True):
        assert new_tokens(row) == expected_tokens(length)


@pytest.mark.parametrize("window", [1, 8])
def test_draft_tokens_may_reach_beyond_the_switch(window: int) -> None:
    length = SWITCH - NUM_NEW + 1
    session = new_session("model", num_draft_tokens=window, batch_size=2)
    short = session.add(prompt_of(length))
    long = session.add(prompt_of(2 * SWITCH), max_new_tokens=40)
    run(session)
    assert new_tokens(short) == expected_tokens(length)
    assert new_tokens(long) == expected_tokens(2 * SWITCH, 40)


@pytest.mark.parametrize("rule", ["ExactMatch", "RejectionSampling"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_rows_equal_each_prompt_alone(drafter: str, rule: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5, "rule": rule}
    session = new_session(drafter, **options)
    rows = []
    for index, length in enumerate(LENGTHS):
        rows.append(session.add(prompt_of(length), index=index))
        session.step(9)
    while session.live:
        session.step(9)

    for index, length in enumerate(LENGTHS):
        single_session = new_session(drafter, **options)
        single = single_session.add(prompt_of(length), index=index)
        run(single_session)
        assert rows[index].text == single.text
        standard = autoregressive_decode(
            target(),
            [prompt_of(length)],
            indices=[index],
            max_new_tokens=NUM_NEW,
            temperature=0.9,
            seed=5,
        )
        if rule == "ExactMatch":
            assert new_tokens(single) == standard.tokens[0]


@pytest.mark.parametrize("drafter", ["model", "stages"])
def test_a_draft_with_a_switch_of_its_own_changes_sides_with_the_text(drafter: str) -> None:
    """It is the target itself, and the target of this test has no switch."""
    plain = HuggingFaceLM(tiny("phi3", max_position_embeddings=CONTEXT))
    draft = drafter_of("model")
    if drafter == "stages":
        draft = StagedDrafter([NGramDrafter(), draft])
    prompt = prompt_of(SWITCH - 4)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "rule": "RejectionSampling"}
    texts = []
    for max_prompt_tokens in (None, 5):
        session = Session(plain, draft, max_length=CONTEXT, num_draft_tokens=3, **options)
        row = session.add(prompt, max_new_tokens=60)
        other = session.add(prompt_of(3 * SWITCH), index=8, max_new_tokens=60)
        while session.live:
            session.step(max_prompt_tokens)
        model_state: Any = session.states[1]
        model_state = getattr(model_state, "larger", model_state).model_state
        assert all(model_state.is_long)
        texts.append((row.text, other.text))
    assert texts[0] == texts[1]


# The boundary


@pytest.mark.parametrize("length", [SWITCH - 1, SWITCH, SWITCH + 1])
def test_only_texts_across_the_switch_are_refused(length: int) -> None:
    """The last new token is not read, so it needs no position."""
    decoder = SpeculativeDecoder(shared_model(), NGramDrafter())
    most_new = 40 if length > SWITCH else SWITCH + 1 - length
    assert target().room_after(length) == (CONTEXT if length > SWITCH else SWITCH) + 1 - length
    prompt = prompt_of(length)
    result = decoder.decode([prompt], max_new_tokens=most_new)
    assert result.tokens == [expected_tokens(length, most_new)]
    assert decoder.decode_standard([prompt], max_new_tokens=most_new).tokens == result.tokens
    if length > SWITCH:
        return

    message = (
        rf"a prompt of {length} tokens and {most_new + 1} new ones would pass token {SWITCH}, "
        rf"where this model changes its positions \(LongRoPE\): ask for up to {most_new} new "
        rf"tokens, or give a prompt of more than {SWITCH}"
    )
    options: dict[str, Any] = {"max_new_tokens": most_new + 1}
    for decode in (decoder.decode, decoder.decode_standard):
        with pytest.raises(ValueError, match=message):
            decode([prompt], **options)
    with pytest.raises(ValueError, match=message):
        greedy_tokens(
            shared_model(), prompt, most_new + 1, custom_generate=lightning_specdec.generate
        )
    with pytest.raises(ValueError, match=message):
        new_session("lookup").add(prompt, **options)


def test_the_command_line_refuses_a_text_across_the_switch_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text_model(
        tmp_path / "model", "phi3", original_max_position_embeddings=SWITCH, rope_parameters=ROPE
    )
    command = ("decode", "--target", "model", "--backend", "torch", "--repeats", "0")
    long_prompt = "the cat sat on the mat " * 12
    for verb_options in (("--mode", "standard"), ("--drafter", "NGramDrafter")):
        refused(
            *command,
            *verb_options,
            "--prompt",
            "the cat",
            "--max_new_tokens",
            "40",
            message=f"would pass token {SWITCH}, where this model changes its positions",
        )
        options = ("--prompt", long_prompt, "--max_new_tokens", "40")
        succeed(*command, *verb_options, *options)
    assert f"position_switch  {SWITCH}" in succeed("info", "model").out


def test_a_text_beyond_the_context_is_refused_on_the_long_side() -> None:
    with pytest.raises(ValueError, match=f"do not fit the target's context of {CONTEXT}"):
        new_session("lookup").add(prompt_of(CONTEXT - 3), max_new_tokens=5)


class Wrapper(LanguageModel):
    """A user's model around another one, which does not repeat its attributes."""

    def __init__(self, model: HuggingFaceLM) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size

    def init_state(self, batch_size: int, max_length: int) -> Any:
        return self.model.init_state(batch_size, max_length)

    def forward(self, tokens: torch.Tensor, state: Any = None, **options: Any) -> Any:
        return self.model(tokens, state, **options)

    def arguments(self) -> dict[str, Any]:
        return {}


def test_a_users_wrapper_that_does_not_know_the_switch_is_refused_across_it_too() -> None:
    wrapper = Wrapper(target())
    session = Session(wrapper, NGramDrafter(), max_length=CONTEXT, num_draft_tokens=2)
    with pytest.raises(ValueError, match="changes its positions"):
        session.add(prompt_of(SWITCH - 2), max_new_tokens=9)
    with pytest.raises(ValueError, match="changes its positions"):
        autoregressive_decode(wrapper, [prompt_of(SWITCH - 2)], max_new_tokens=9)
    row = session.add(prompt_of(SWITCH + 9), max_new_tokens=NUM_NEW)
    while session.live:
        session.step(5)
    assert new_tokens(row) == expected_tokens(SWITCH + 9)


def test_a_chat_crosses_the_switch_between_two_turns() -> None:
    conversation = Conversation(target(), NGramDrafter(), DecodingConfig(max_new_tokens=NUM_NEW))
    first = conversation.begin(prompt_of(SWITCH - 4))
    run(conversation.session)
    # The answer ends before the switch.
    assert new_tokens(first) == expected_tokens(SWITCH - 4, 5)

    second_prompt = [*first.text, 5, 4, 3]
    second = conversation.begin(second_prompt)
    run(conversation.session)
    assert new_tokens(second) == greedy_tokens(shared_model(), second_prompt, NUM_NEW)

    third_prompt = [*second.text, 7]
    third = conversation.begin(third_prompt)
    assert third.num_prompt_read > SWITCH, "turns on one side continue the states"
    run(conversation.session)
    assert new_tokens(third) == greedy_tokens(shared_model(), third_prompt, NUM_NEW)


def test_training_texts_stay_on_one_side() -> None:
    """The rows of a batch share their positions."""
    module = PairTraining(RNN(67), drafts={"small": target()})
    sizes: dict[str, Any] = {"num_train": 4, "num_val": 2, "num_test": 2}
    module.check_data(QuadraticProgressions(67, SWITCH, **sizes))
    with pytest.raises(ValueError, match=f"and small reads {SWITCH}: shorten them, since longer"):
        module.check_data(QuadraticProgressions(67, SWITCH + 1, **sizes))


@pytest.mark.parametrize("context_length", [20, SWITCH, 128])
def test_a_calibration_measures_texts_of_one_side(context_length: int) -> None:
    options: dict[str, Any] = {"windows": (1, 2), "context_length": context_length}
    calibrate(target(), NGramDrafter(), seconds=0.0, **options)


@pytest.mark.parametrize("context_length", [SWITCH - 8, SWITCH + 1, SWITCH + 5, CONTEXT])
@pytest.mark.parametrize("room", [6, 18, 30, 60])
def test_a_calibration_in_a_context_little_longer_than_the_switch_stays_on_one_side(
    room: int, context_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HuggingFaceLM(model_of(max_position_embeddings=SWITCH + room))
    assert model.max_positions == SWITCH + room
    text_lengths = []
    add = Session.add

    def add_and_note(session: Session, prompt: Any, **settings: Any) -> Any:
        text_lengths.append(len(prompt))
        return add(session, prompt, **settings)

    monkeypatch.setattr(Session, "add", add_and_note)
    options: dict[str, Any] = {"windows": (1, 2), "context_length": context_length}
    calibrate(model, NGramDrafter(), seconds=0.0, **options)

    # A pass through these windows adds 15 tokens. The long side is measured if they fit there.
    is_long = context_length > SWITCH and room > 15
    assert all((length > SWITCH) == is_long for length in text_lengths)


# Saved texts


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("first_length", [SWITCH - NUM_NEW, SWITCH + 6])
def test_a_saved_text_serves_prompts_of_its_side_only(drafter: str, first_length: int) -> None:
    session = new_session(drafter)
    prompt = prompt_of(2 * SWITCH)
    first = session.add(prompt[:first_length])
    run(session)
    saved = session.save(first)
    assert saved is not None

    for length in (16, 18, SWITCH + 4, 2 * SWITCH):
        other = prompt[:length]
        is_same_side = (length > SWITCH) == (first_length > SWITCH)
        assert saved.serves(other) == is_same_side
        row = session.add(other, saved=saved)
        assert (row.num_prompt_read > 0) == is_same_side
        while session.live:
            session.step(9)
        assert new_tokens(row) == greedy_tokens(shared_model(), other, NUM_NEW)


def test_the_prefix_cache_keeps_texts_of_both_sides() -> None:
    session = new_session("lookup")
    prompt = prompt_of(2 * SWITCH)
    cache = PrefixCache(2**20)
    texts = []
    for length in (16, SWITCH + 4):
        row = session.add(prompt[:length], max_new_tokens=1)
        run(session)
        text: Any = session.save(row)
        cache.put(text)
        texts.append(text)
    assert len(cache) == 2, "neither serves in place of the other"
    short, long = texts
    assert cache.find(prompt[:20]) == (short, 16)
    assert cache.find(prompt) == (long, SWITCH + 4)
    assert cache.find(prompt[: SWITCH + 1])[0] is long


def test_a_servers_requests_share_prefixes_on_one_side() -> None:
    engine = Engine(
        target(),
        NGramDrafter(),
        DecodingConfig(num_draft_tokens=2),
        max_length=CONTEXT,
        max_batch_size=2,
        max_queue=9,
        prompt_tokens_per_round=8,
        cache_bytes=2**20,
    )
    prompt = prompt_of(3 * SWITCH)
    answers: list[list[int]] = []

    def ask(length: int) -> Generation:
        tokens: list[int] = []
        generation = Generation(
            prompt[:length],
            max_new_tokens=NUM_NEW,
            listener=lambda update: tokens.extend(update.tokens),
        )
        engine.check(generation)
        row = engine._add(generation)
        engine._live[row] = generation
        while row.live:
            engine._decode_round()
        answers.append(tokens)
        assert tokens == greedy_tokens(shared_model(), prompt[:length], NUM_NEW)
        return generation

    assert ask(16).num_cached == 0
    assert ask(3 * SWITCH).num_cached == 0, "of the other side"
    assert ask(20).num_cached == 16
    assert ask(SWITCH + 8).num_cached == SWITCH + 7
    with pytest.raises(ValueError, match="changes its positions"):
        ask(SWITCH - 2)


def test_an_answer_of_a_server_without_a_limit_ends_before_the_switch() -> None:
    engine = Engine(
        target(),
        NGramDrafter(),
        DecodingConfig(num_draft_tokens=2),
        max_length=CONTEXT,
        max_batch_size=2,
        max_queue=9,
    )
    service = Service(engine, TextTokenizer(byte_level()), model_name="phi")
    for length in (1, SWITCH, SWITCH + 1, CONTEXT):
        num_new = service._room_after(prompt_of(length))
        last = SWITCH + 1 if length <= SWITCH else CONTEXT
        assert num_new == max(1, last - length)


# Calls


@pytest.mark.parametrize("drafter", ["model", "early exit"])
def test_recorded_rounds_equal_transformers_generate(drafter: str) -> None:
    """On a CPU, recorded calls run again over the same tensors."""
    recorded = deepcopy(target()).record()
    recorded_drafter: Any = drafter_of(drafter)
    if drafter == "model":
        recorded_drafter.model = recorded_drafter.model.record()
    # Storages with their recordings serve several sessions, with other sides in their rows.
    for lengths in (LENGTHS, LENGTHS[::-1], (5,), (SWITCH + 1,)):
        session = Session(
            recorded,
            recorded_drafter,
            max_length=CONTEXT,
            num_draft_tokens=3,
            max_new_tokens=NUM_NEW,
        )
        rows = []
        for length in lengths:
            rows.append(session.add(prompt_of(length)))
            session.step(11)
            session.step(11)
        while session.live:
            session.step(11)
        for length, row in zip(lengths, rows, strict=True):
            assert new_tokens(row) == expected_tokens(length)


def test_recorded_calls_find_the_sides_where_they_were() -> None:
    recorded = deepcopy(target()).record()
    state: Any = recorded.init_state(2, 80)
    address = state.storage.is_long.data_ptr()
    for sides in ([False, True], [True, False]):
        lengths = [SWITCH + 1 if is_long else 3 for is_long in sides]
        state.clear([0, 1])
        state.expect_prompts(lengths)
        assert state.storage.is_long.tolist() == sides
        assert state.storage.is_long.data_ptr() == address


def test_recorded_standard_decoding_equals_transformers_generate() -> None:
    recorded = deepcopy(target()).record()
    for lengths in (LENGTHS, LENGTHS[::-1]):
        prompts = [prompt_of(length) for length in lengths]
        result = autoregressive_decode(recorded, prompts, max_new_tokens=NUM_NEW)
        assert result.tokens == [expected_tokens(length) for length in lengths]


@pytest.mark.parametrize("takes_apart", [True, False])
def test_prompts_that_one_call_reads_in_parts_equal_transformers_generate(
    takes_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "LONGEST_PART", {"cpu": 8, "cuda": 8})
    monkeypatch.setattr(prefill, "MOST_PADDED", 4)
    model = HuggingFaceLM(model_of())
    if not takes_apart:
        model.model.register_forward_hook(lambda module, inputs, output: None)
    decoder = SpeculativeDecoder(model, NGramDrafter())
    prompts = [prompt_of(length) for length in LENGTHS]
    result = decoder.decode(prompts, max_new_tokens=NUM_NEW)
    assert result.tokens == [expected_tokens(length) for length in LENGTHS]
    assert model.takes_apart == takes_apart


def test_a_call_on_empty_rows_takes_their_valid_lengths_as_prompts() -> None:
    model = target()
    texts = [prompt_of(SWITCH - 1), prompt_of(SWITCH), prompt_of(SWITCH + 1), prompt_of(50)]
    tokens = torch.zeros(len(texts), 50, dtype=torch.long, device=DEVICE)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    state = model.init_state(len(texts), 80)
    lengths = [len(text) for text in texts]
    with torch.no_grad():
        logits = model(tokens, state, valid_lengths=lengths).logits
    assert state.is_long == [False, False, True, True]
    for row, text in enumerate(texts):
        expected = last_logits(shared_model(), text)
        torch.testing.assert_close(logits[row, len(text) - 1], expected, atol=1e-4, rtol=1e-4)

    # The sides follow their rows, and an emptied row begins again.
    state.select([3, 0, -1])
    assert state.is_long == [True, False, False]
    state.clear([0])
    with torch.no_grad():
        model(tokens[:3], state, valid_lengths=[4, 1, 40])
    assert state.is_long == [False, False, True]
    copied = deepcopy(state)
    assert copied.is_long == state.is_long


def test_a_row_truncated_to_nothing_begins_again() -> None:
    state = target().init_state(1, 80)
    for text in (prompt_of(6), prompt_of(60), prompt_of(8)):
        state.truncate([0])
        with torch.no_grad():
            output = target()(torch.tensor([text], device=DEVICE), state)
        expected = last_logits(shared_model(), text)
        torch.testing.assert_close(output.logits[0, -1], expected, atol=1e-4, rtol=1e-4)


def test_readings_of_an_audit_are_on_the_side_of_their_text() -> None:
    text = prompt_of(SWITCH + 2)
    ways = readings(target(), [text], 5, (None, 1, 3))
    for logits in ways[1:]:
        torch.testing.assert_close(logits, ways[0], atol=1e-4, rtol=1e-4)


# Other backends and vocabularies


def test_openvino_refuses_the_long_side_and_names_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    from lightning_specdec.models.openvino import OpenVINOLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    converted = OpenVINOLM.of(HuggingFaceLM(model_of()))
    assert converted.max_positions == SWITCH
    decoder = SpeculativeDecoder(converted, NGramDrafter())
    lengths = LENGTHS[:2]
    result = decoder.decode([prompt_of(length) for length in lengths], max_new_tokens=NUM_NEW)
    assert result.tokens == [expected_tokens(length) for length in lengths]
    with pytest.raises(ValueError, match='fewer, or use backend="torch"') as error:
        decoder.decode([prompt_of(SWITCH + 1)], max_new_tokens=NUM_NEW)
    assert f"context of {SWITCH}" in str(error.value)
    assert f"reads up to {CONTEXT} tokens" in str(error.value)
    assert "\n" not in str(error.value)

    # Calls of the user overwrite the chosen frequencies, which the conversion does not hold.
    last_logits(converted.model, prompt_of(2 * SWITCH))
    again = decoder.decode([prompt_of(LENGTHS[0])], max_new_tokens=NUM_NEW)
    assert again.tokens == [expected_tokens(LENGTHS[0])]


def test_a_draft_of_another_vocabulary_changes_sides_with_its_text() -> None:
    plain = HuggingFaceLM(tiny("phi3", max_position_embeddings=CONTEXT))
    plain.vocabulary = letters(plain.vocab_size)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "rule": "RejectionSampling"}
    texts = []
    for max_prompt_tokens in (None, 5):
        session = Session(plain, cross(target()), max_length=CONTEXT, num_draft_tokens=3, **options)
        row = session.add(prompt_of(SWITCH - 4), max_new_tokens=60)
        other = session.add(prompt_of(3 * SWITCH), index=8, max_new_tokens=60)
        while session.live:
            session.step(max_prompt_tokens)
        draft_state: Any = session.states[1]
        assert all(draft_state.model_state.is_long)
        texts.append((row.text, other.text))
    assert texts[0] == texts[1]


# The user's model


def test_a_users_hooks_run_on_the_chosen_side_and_ours_leave() -> None:
    model = model_of()
    rotations = []

    def double_sines(module: Any, inputs: Any, output: Any) -> Any:
        rotations.append(output)
        cosines, sines = output
        return cosines, 2 * sines

    model.model.rotary_emb.register_forward_hook(double_sines)
    plain_code = [str(part) for part in user_code(model)]
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [greedy_tokens(model, prompt, NUM_NEW) for prompt in prompts]
    assert expected != [expected_tokens(length) for length in LENGTHS]

    decoder = SpeculativeDecoder(model, NGramDrafter())
    assert decoder.decode(prompts, max_new_tokens=NUM_NEW).tokens == expected
    assert [str(part) for part in user_code(model)] == plain_code
    assert len(model.model.rotary_emb._forward_hooks) == 1
    assert not decoder.target.takes_apart


def test_decoding_leaves_the_users_model_as_it_was() -> None:
    model = model_of()
    decoder = SpeculativeDecoder(model, NGramDrafter())
    stamp = ModelStamp(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    digest = weights_digest(model)
    prompts = [prompt_of(length) for length in LENGTHS]
    decoder.decode(prompts, max_new_tokens=NUM_NEW)
    ready = decoder.ready()
    decoder.decode(prompts, max_new_tokens=NUM_NEW)
    assert decoder.ready() == ready, "nothing is packed again"
    assert ModelStamp(model) == stamp
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)

    # Calls of the user overwrite the chosen frequencies, which are no weights.
    last_logits(model, prompt_of(2 * SWITCH))
    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert weights_digest(model) == digest
    assert decoder.decode(prompts, max_new_tokens=NUM_NEW).tokens == [
        expected_tokens(length) for length in LENGTHS
    ]


def test_decoding_leaves_the_frequencies_of_a_loaded_model_as_they_were(tmp_path: Path) -> None:
    """It was packed when it was loaded, so it decodes itself."""
    path = tmp_path / "model"
    write_text_model(path, "phi3", original_max_position_embeddings=SWITCH, rope_parameters=ROPE)
    decoder = SpeculativeDecoder.from_pretrained(str(path), backend="torch")
    target: Any = decoder.target
    rotary = target.model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    num_writes = rotary.inv_freq._version
    for length in LENGTHS:
        decoder.decode([prompt_of(length)], max_new_tokens=3)
        decoder.decode_standard([prompt_of(length)], max_new_tokens=3)
        assert torch.equal(rotary.inv_freq, frequencies)
    assert rotary.inv_freq._version == num_writes


def test_a_copy_in_evaluation_mode_has_chosen_frequencies_of_its_own() -> None:
    model = HuggingFaceLM(model_of()).train()
    copied = eval_copy(model)
    rotary = model.model.model.rotary_emb
    copied_rotary = copied.model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    last_logits(copied.model, prompt_of(2 * SWITCH))
    assert torch.equal(rotary.inv_freq, frequencies)
    assert not torch.equal(copied_rotary.inv_freq, frequencies)
    assert copied_rotary.original_inv_freq is rotary.original_inv_freq
    assert copied.model.lm_head.weight is model.model.lm_head.weight


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("length", "other_length"), [(5, 3 * SWITCH), (3 * SWITCH, 5)])
def test_a_thread_on_the_other_side_changes_no_tokens(
    length: int, other_length: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread runs a round whenever this one has chosen its frequencies."""
    model: Any = HuggingFaceLM(model_of()).eval()
    if is_packed:
        model = model.packed()
    options: dict[str, Any] = {"max_length": CONTEXT, "num_draft_tokens": 3}
    session = Session(model, NGramDrafter(), max_new_tokens=NUM_NEW, **options)
    other_session = Session(model, NGramDrafter(), max_new_tokens=NUM_NEW, **options)
    row = session.add(prompt_of(length))
    other_row = other_session.add(prompt_of(other_length))

    this_thread = threading.get_ident()
    num_frequencies = model.model.model.rotary_emb.inv_freq.numel()
    copy_values = torch.Tensor.copy_
    interruptions = []

    def copy_and_yield(tensor: Any, *inputs: Any, **named_inputs: Any) -> Any:
        result = copy_values(tensor, *inputs, **named_inputs)
        is_here = threading.get_ident() == this_thread
        if is_here and tensor.shape == (num_frequencies,) and other_session.live:
            other_thread = threading.Thread(target=other_session.step)
            other_thread.start()
            other_thread.join()
            interruptions.append(tensor)
        return result

    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_yield)
    while session.live:
        session.step()
    monkeypatch.undo()
    run(other_session)
    assert interruptions
    assert new_tokens(row) == expected_tokens(length)
    assert new_tokens(other_row) == expected_tokens(other_length)


def test_calls_with_gradients_follow_calls_in_inference_mode() -> None:
    model = HuggingFaceLM(model_of())
    decoder = SpeculativeDecoder(model, NGramDrafter())
    prompt = prompt_of(3 * SWITCH)
    with torch.inference_mode():
        decoder.decode([prompt], max_new_tokens=4)
    decoded = decoder.ready()[0]
    with torch.no_grad():
        logits = decoded(torch.tensor([prompt], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(logits, last_logits(shared_model(), prompt), atol=1e-4, rtol=1e-4)
    result = decoder.decode([prompt], max_new_tokens=NUM_NEW)
    assert result.tokens == [expected_tokens(3 * SWITCH)]
    model(torch.tensor([prompt], device=DEVICE)).logits.sum().backward()


FAMILIES = ("phi3", "phi4_multimodal", "phimoe", "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotations_of_both_sides_equal_those_of_transformers_bit_by_bit(
    family: str, dtype: torch.dtype
) -> None:
    rotary = model_of(family, **sizes_of(family)).model.rotary_emb
    hidden = torch.zeros(2, 1, 1, dtype=dtype, device=DEVICE)
    positions = {}
    expected = {}
    for is_long, num_tokens in ((False, SWITCH), (True, 3 * SWITCH)):
        positions[is_long] = torch.arange(num_tokens, device=DEVICE)[None]
        expected[is_long] = rotary(hidden, position_ids=positions[is_long])
        rotated = rotation(rotary, hidden, positions[is_long], is_long)
        assert all(map(torch.equal, rotated, expected[is_long]))
    assert not torch.equal(expected[True][1][:, :SWITCH], expected[False][1])

    sides = torch.tensor([False, True], device=DEVICE)
    rotated = rotation(rotary, hidden, positions[False].expand(2, -1), sides)
    for result, short, long in zip(rotated, expected[False], expected[True], strict=True):
        assert torch.equal(result[0], short[0])
        assert torch.equal(result[1], long[0, :SWITCH])


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_with_such_positions_decode_on_both_sides(family: str) -> None:
    model = model_of(family, **sizes_of(family))
    decoder = SpeculativeDecoder(model, NGramDrafter())
    assert decoder.target.position_switch == SWITCH
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [greedy_tokens(model, prompt, NUM_NEW) for prompt in prompts]
    assert decoder.decode(prompts, max_new_tokens=NUM_NEW).tokens == expected

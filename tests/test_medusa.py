"""Laws of Medusa heads: what hidden state they draft from, and how their weights start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import cases
import pytest
import torch
from families import tiny
from tiny_heads import OPEN, Chain, family, heads, perfect, small
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lightning_specdec.checkpoints.networks import build, spec
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.decoding import Request, Session, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.session import Conversation
from lightning_specdec.decoding.windows import Plan, Window
from lightning_specdec.drafters import (
    Draft,
    DraftRequest,
    DraftState,
    MedusaDrafter,
    TargetContext,
)
from lightning_specdec.drafters.medusa import MAX_STACKED_TOKENS
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import PackedLinear, quantize
from lightning_specdec.rules import RejectionSampling, Sampling


class Checked(MedusaDrafter):
    """Compares each draft with the heads' logits for hidden states that are computed from scratch.

    Records each draft's text and length in `drafts`.
    """

    def __init__(self, drafter: MedusaDrafter, target: LanguageModel) -> None:
        super().__init__(**drafter.arguments())
        self.heads = drafter.heads
        # In a list, so that it is not a submodule.
        self.targets = [target]
        self.drafts: list[tuple[list[int], int]] = []

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        if draft.lengths is None:
            lengths = [draft.tokens.shape[1]] * len(windows)
        else:
            lengths = draft.lengths.tolist()
        probs = draft.probs
        if probs is None:
            probs = one_hot(draft.tokens, self.settings.vocab_size)

        for row, (text, length) in enumerate(zip(request.texts, lengths, strict=True)):
            if windows[row] == 0:
                continue
            assert length in (0, min(windows[row], self.settings.num_heads))
            self.drafts.append((list(text), length))
            if length > 0:
                self.compare(text, probs[row, :length], sampling)
        return draft

    def compare(self, text: Sequence[int], probs: Tensor, sampling: Sampling) -> None:
        """Compare a row's distributions with those of a call on its whole text.

        The target has not read the last token when the heads draft.
        """
        (target,) = self.targets
        (layer,) = self.features(target)
        hidden = target(torch.tensor([text[:-1]]), features=(layer,)).features[layer][0, -1]
        for i, position_probs in enumerate(probs):
            expected_probs = sampling.probs(self.logits(i, hidden))
            torch.testing.assert_close(position_probs.float(), expected_probs, atol=2e-4, rtol=2e-3)


class Script(Window, Plan):
    """Cycles through these windows."""

    def __init__(self, *windows: int) -> None:
        self.script = windows
        self.largest = max(windows)
        self.turn = 0

    def plan(self, *, jointly: bool) -> Plan:
        return Script(*self.script)

    def windows(self, rows: Sequence[Request]) -> list[int]:
        self.turn += 1
        window = self.script[(self.turn - 1) % len(self.script)]
        return [min(window, row.remaining - 1) if row.live else 0 for row in rows]

    def to_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "window", [Script(3), Script(2, 0, 0, 5), Script(0, 1)], ids=["3", "2,0,0,5", "0,1"]
)
@pytest.mark.parametrize("name", cases.MODELS)
def test_every_draft_comes_from_the_hidden_state_of_the_last_token_but_one(
    name: str,
    window: Script,
    temperature: float,
) -> None:
    target = cases.target(name)
    sampling = Sampling(temperature)
    checked = Checked(heads(target), target)
    result = speculative_decode(
        target,
        checked,
        cases.PROMPTS,
        max_new_tokens=12,
        num_draft_tokens=window,
        sampling=sampling,
        eos=cases.EOS,
    )
    assert result.tokens == cases.standard(name, sampling, 12).tokens
    # A row has a hidden state after the target's first call, whether or not that had a draft.
    texts_without_draft = [text for text, length in checked.drafts if length == 0]
    if window.script[0] == 0:
        assert texts_without_draft == []
    else:
        assert texts_without_draft == cases.PROMPTS
    assert len(checked.drafts) > len(texts_without_draft)


@pytest.mark.parametrize("name", ["rnn", "transformer", "llama"])
def test_rows_that_join_leave_and_resume_use_only_their_own_hidden_states(name: str) -> None:
    target = cases.target(name)
    generator = random.Random(5)
    checked = Checked(heads(target), target)
    session = Session(
        target,
        checked,
        max_length=200,
        sampling=Sampling(1.0),
        eos=cases.EOS,
        rule=RejectionSampling(),
    )

    def draw_tokens(most: int) -> list[int]:
        length = generator.randint(1, most)
        return [generator.randrange(cases.VOCAB) for _ in range(length)]

    live_requests: list[Request] = []
    ended_requests: list[Request] = []
    prompts: list[list[int]] = []
    for turn in range(60):
        is_open = turn < 45
        if is_open and generator.random() < 0.4:
            prompts.append(draw_tokens(6))
            max_new_tokens = generator.randint(2, 14)
            live_requests.append(session.add(prompts[-1], max_new_tokens=max_new_tokens))
        if is_open and ended_requests and generator.random() < 0.5:
            request = ended_requests.pop(generator.randrange(len(ended_requests)))
            prefix = request.text[: generator.randint(1, len(request.text))]
            prompts.append([*prefix, *draw_tokens(3)])
            live_requests.append(session.resume(request, prompts[-1], max_new_tokens=9))
        if session.live and generator.random() < 0.1:
            session.cancel(generator.choice(session.live))

        session.step()
        ended_requests += [request for request in live_requests if not request.live]
        live_requests = [request for request in live_requests if request.live]
    assert not session.live
    assert len(prompts) > 20

    # Only a prompt that has not been read yet has no draft.
    texts_without_draft = [text for text, length in checked.drafts if length == 0]
    assert all(text in prompts for text in texts_without_draft)
    assert len(texts_without_draft) < len(checked.drafts) / 2


def test_no_more_heads_run_than_tokens_are_drafted() -> None:
    target = cases.target("transformer")
    calls = [0]
    drafter = deepcopy(heads(target, num_steps=0))
    for head in drafter.heads.children():
        head.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=1, num_draft_tokens=3)
    assert calls == [0], "nothing is known of the text in its first round"
    result = speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=12, num_draft_tokens=2)
    assert calls == [sum(len(record.drafted) for record in result.rows[0].rounds or ())]


@pytest.mark.parametrize("name", ["rnn", "llama"])
def test_a_turn_begins_without_a_draft_and_answers_as_if_read_from_scratch(name: str) -> None:
    target = cases.target(name)
    text = [1, 2, 3]
    conversation = Conversation(
        target, heads(target), DecodingConfig(eos=(cases.EOS,), max_new_tokens=9)
    )
    for turn in ([4, 2], [7], [1, 1, 8]):
        text = [*text, *turn]
        row = conversation.begin(text)
        while row.live:
            conversation.session.step()
        assert row.rounds[0].drafted == []
        expected = autoregressive_decode(target, text, max_new_tokens=9, eos=cases.EOS).tokens[0]
        assert row.text[len(text) :] == expected
        text = row.text


@pytest.mark.parametrize("rule", cases.LOSSLESS)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_perfect_heads_are_kept_whole_in_every_round_but_the_first(
    num_heads: int, rule: str
) -> None:
    target = Chain()
    result = speculative_decode(
        target,
        perfect(target, num_heads),
        [[3], [1, 2, 3], [7, 7]],
        max_new_tokens=1 + 3 * (num_heads + 1),
        num_draft_tokens=5,
        rule=cases.RULES[rule](),
        sampling=Sampling(1.0),
    )
    for row in result.rows:
        num_drafted = [len(record.drafted) for record in row.rounds or ()]
        assert num_drafted == [0, num_heads, num_heads, num_heads]
    assert result.acceptance_rate == 1.0
    assert result.num_target_calls == 4
    assert result.num_draft_calls == 3


def test_a_heads_state_moves_with_its_row() -> None:
    target = cases.target("rnn")
    state = heads(target).init_state(2, 9, TargetContext(target, target.init_state(2, 9)))
    state.scored = torch.arange(16.0).view(2, 2, 4)
    state.lengths = [5, 7]
    state.num_added = [1, 2]
    state.select([1, -1, 0])
    assert state.lengths == [7, 0, 5] and state.num_added[::2] == [2, 1]
    assert state.scored is not None and state.scored[:, 0, 0].tolist()[::2] == [8.0, 0.0]
    state.truncate_row(0, 6)
    state.truncate_row(2, 3)
    assert state.lengths == [7, 0, 0], (
        "a state is of the tokens before its text's last one, and may stay with them"
    )


@pytest.mark.parametrize("num_tokens", [5, MAX_STACKED_TOKENS + 3])
def test_fused_heads_compute_the_same_and_are_packed_if_they_are_large(num_tokens: int) -> None:
    drafter = small(
        num_heads=3, hidden_size=24, vocab_size=MAX_STACKED_TOKENS + 9, draft_vocabulary=num_tokens
    )
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.2)
    fused = drafter.fused()
    hidden = torch.randn(2, 24)
    assert fused.arguments() == drafter.arguments()
    assert any(isinstance(part, PackedLinear) for part in fused.modules()) == (
        num_tokens > MAX_STACKED_TOKENS
    )
    with torch.no_grad():
        for number, logits in enumerate(fused.first_logits(3, hidden)):
            expected = drafter.logits(number, hidden)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    if fused.stacked is not None:
        with pytest.raises(ValueError, match="convert the drafter before"):
            fused.to(torch.float64)


@pytest.mark.parametrize("name", [*OPEN, "gemma3_text", "longcat_flash"])
def test_a_head_that_is_copied_from_the_target_computes_the_targets_logits(name: str) -> None:
    target = family(name)
    quantized = family(name)
    quantize(quantized.model, "int8")
    tokens = torch.tensor([cases.PROMPTS[3]])
    for model in (target, target.fused(), quantized):
        drafter = small(hidden_size=32, vocab_size=cases.VOCAB, num_blocks=2).init_from(model)
        (layer,) = drafter.features(model)
        output = model(tokens, features=(layer,))
        for number in range(2):
            logits = drafter.logits(number, output.features[layer])
            torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)


def test_heads_have_the_width_that_the_targets_output_head_reads() -> None:
    """That need not be the layers' width: some OPT models project their last layer's output."""
    target = HuggingFaceLM(tiny("opt", vocab_size=cases.VOCAB, word_embed_proj_dim=16))
    assert target.hidden_size == 16
    drafter = small(hidden_size=16, vocab_size=cases.VOCAB).init_from(target)
    assert speculative_decode(target, drafter, cases.PROMPTS, max_new_tokens=5).num_draft_calls


def test_heads_of_one_type_serve_a_target_of_another() -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=cases.VOCAB).bfloat16())
    drafter = small(hidden_size=32, vocab_size=cases.VOCAB)
    result = speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=8)
    assert len(result.tokens[0]) == 8 and result.num_draft_calls


def test_weights_have_medusas_names() -> None:
    """Published files have sequences of blocks and a linear layer, without the prefix."""
    names = [
        "0.0.linear.weight",
        "0.0.linear.bias",
        "0.1.weight",
        "1.0.linear.weight",
        "1.0.linear.bias",
        "1.1.weight",
    ]
    assert list(small().state_dict()) == [f"heads.{name}" for name in names]


def test_a_target_of_another_kind_is_refused_by_name() -> None:
    rnn = cases.target("rnn")
    with pytest.raises(ValueError, match="for a hidden size of 4 .*the target has 16"):
        small(vocab_size=cases.VOCAB).check_target(rnn)
    with pytest.raises(ValueError, match="a vocabulary of 7, the target has 16 and 11"):
        small(hidden_size=16).check_target(rnn)
    closed = Chain()
    closed.num_layers = None
    with pytest.raises(ValueError, match="Chain returns no hidden states"):
        small(hidden_size=11, vocab_size=11).check_target(closed)


@pytest.mark.parametrize("name", ["MedusaDrafter", "MultiTokenDrafter"])
def test_both_names_of_the_drafter_mean_the_same_in_choices_and_in_files(name: str) -> None:
    sizes = {"num_heads": 2, "hidden_size": 4, "vocab_size": 7}
    drafter = build({"class": name, "arguments": sizes}, (DRAFTERS,))
    assert type(drafter) is MedusaDrafter is DRAFTERS.load(name)
    assert spec(drafter)["class"] == "MedusaDrafter" == Choice.read(name, "drafter").name
    assert name in DRAFTERS and DRAFTERS.summary(name).startswith("Drafts with trained heads")

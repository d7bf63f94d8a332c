"""The block drafter: what its slots see, that training sees what decoding does, and its windows."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import target
from test_distribution import (
    DRAFTS,
    TOLERANCE,
    VOCAB,
    WINDOW,
    Measured,
    Proposal,
    along,
    block_probs,
    error_of,
    guess_probs,
    world,
)
from test_eagle import TEXT, proposed
from tiny_block import block, fitted_block
from tiny_distillation import (
    batch_of,
    begun,
    check_that_counts_are_decodings,
    check_that_it_learns,
    own_texts,
)
from tiny_distillation import target as tiny_target
from tiny_eagle import fitted_eagle

from lightning_specdec.audit.exact_round import measure_round
from lightning_specdec.decoding import Session, autoregressive_decode
from lightning_specdec.drafters import BlockDrafter, DraftRequest, TargetContext, last_two_tokens_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import RejectionSampling, Sampling
from lightning_specdec.training import BlockTraining
from lightning_specdec.training.block import blocks
from lightning_specdec.training.distillation import DistillationTraining


@torch.no_grad()
def scored(
    drafter: BlockDrafter, model: LanguageModel, text: list[int], start: int
) -> torch.Tensor:
    """What training says of a block that begins with that token of a text, given its own tokens."""
    tokens = torch.tensor([text])
    network = drafter.network
    vocabulary = drafter.draft_vocabulary
    features_by_layer = model(tokens, features=drafter.features(model)).features
    features = network.features(
        [features_by_layer[layer] for layer in drafter.settings.feature_layers]
    )
    hidden = blocks(network, model.embeddings(tokens[:, [start]]), features, torch.tensor([start]))[
        0, 0
    ]
    size = len(text) - 1 - start
    logits = network.output(hidden[:size]) + network.bias(drafter.before(tokens[0, start:-1]))
    return logits if vocabulary is None else vocabulary.spread(logits, -torch.inf)


@pytest.mark.parametrize("name", ["transformer", "llama", "gemma3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 1},
        {"reduced": True, "feature_norms": True},
        {"attention_window": 6},
        {"markov_rank": 0, "head_size": 6, "rotary_base": 5e5},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_guesses_are_those_of_the_blocks_that_it_is_trained_on(
    name: str, changes: dict[str, Any]
) -> None:
    model = target(name)
    drafter = fitted_block(model, num_steps=5, **changes)
    for window in (2, 6):  # what is drafted of a block does not depend on how much is
        draft = proposed(drafter, model, TEXT, 5, window)
        expected = scored(drafter, model, [*TEXT, *draft.tokens[0].tolist()], len(TEXT) - 1)
        torch.testing.assert_close(draft.logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_block_sees_the_features_before_its_anchor_and_all_of_its_own_places() -> None:
    model = target("transformer")
    network = block(model, attention_window=6).network
    anchors = torch.tensor([2, 7])
    embedded = model.embeddings(torch.tensor([[1, 2]]))
    features = torch.randn(
        1, 10, model.hidden_size or 0, generator=torch.Generator().manual_seed(0)
    )

    @torch.no_grad()
    def seen(tokens: slice, anchor: int) -> list[bool]:
        """Whether each slot of a block changes with the features of these tokens."""
        changed = features.clone()
        changed[:, tokens] += 1.0
        slots = blocks(network, embedded, features, anchors)[0, anchor]
        changed_slots = blocks(network, embedded, changed, anchors)[0, anchor]
        pairs = zip(slots, changed_slots, strict=True)
        return [not torch.equal(slot, changed_slot) for slot, changed_slot in pairs]

    assert not any(seen(slice(2, None), 0))
    assert all(seen(slice(1, 2), 0))
    assert not any(seen(slice(7, None), 1))
    assert all(seen(slice(6, 7), 1))

    # With one layer, no slot receives anything from another one. The anchor is five tokens after
    # the changed features, within the window; the next slot is six tokens after them, outside.
    network = block(model, num_layers=1, attention_window=6).network
    assert seen(slice(2, 3), 1) == [True] + [False] * 5

    # The anchor's slot depends on the masks of the others.
    with torch.no_grad():
        hidden = blocks(network, embedded, features, anchors)
        network.mask.add_(1.0)
        changed_hidden = blocks(network, embedded, features, anchors)
    assert not torch.allclose(hidden[:, :, 0], changed_hidden[:, :, 0])


@pytest.mark.parametrize("window", [1, 3, 8])
def test_each_entry_is_read_once_and_no_round_drafts_more_than_a_block(window: int) -> None:
    model = target("transformer")
    session = Session(model, fitted_block(model), max_length=40, num_draft_tokens=window)
    row = session.add(TEXT, max_new_tokens=20)
    session.step()  # the target has read nothing yet: no guesses
    state: Any = session._batch.draft_state
    while row.live:
        num_known = len(row.text) - 1
        num_calls = session.num_draft_calls
        assert state.num_known == [num_known]
        session.step()
        assert session.num_draft_calls == num_calls or state.entry_cache.consumed == [num_known]
    assert (
        row.text[len(TEXT) :]
        == autoregressive_decode(model, TEXT, max_new_tokens=20).rows[0].tokens
    )
    assert row.counts is not None and row.counts.num_accepted > 0
    assert max(len(played_round.drafted) for played_round in row.rounds) == min(window, 6)


def drafts(drafter: BlockDrafter, model: LanguageModel, uniform: torch.Tensor) -> Any:
    """Guesses behind one text with these numbers, row by row."""
    rows, window = uniform.shape
    with torch.inference_mode():
        state = model.init_state(rows, 40)
        memory = drafter.init_state(rows, 40, TargetContext(model, state))
        tokens = torch.tensor([TEXT[:-1]] * rows)
        output = model(tokens, state, logits_for=slice(-1, None), features=drafter.features(model))
        drafter.observe(memory, output, [0] * rows)
        tail = last_two_tokens_of([TEXT] * rows, model.device)
        request = DraftRequest([TEXT] * rows, tail, uniform, vocab_size=model.vocab_size)
        return drafter.propose(memory, request, [window] * rows, Sampling(1.3))


@pytest.mark.parametrize("first", [0, 1])
def test_where_a_window_ends_depends_on_no_token_that_it_cuts_off(first: int) -> None:
    """A block drafts its first slot always; an autoregressive head may draft nothing."""
    model = target("llama")
    drafter: Any = deepcopy(
        fitted_block(model, num_layers=1, num_steps=10) if first else fitted_eagle(model)
    )
    if first:
        with (
            torch.no_grad()
        ):  # so that chances follow from the tokens before alone, and differ widely
            drafter.network.confidence.weight.copy_(
                torch.tensor([0.0] * (model.hidden_size or 0) + [2.0, -2.0, 2.0])
            )
    uniform = torch.rand(400, 3, generator=torch.Generator().manual_seed(0))
    tokens = drafts(drafter, model, uniform).tokens.tolist()
    chances = {}
    for bound in (0.05, 0.15, 0.25, 0.4, 0.6, 1.0):
        cautious = type(drafter)(**{**drafter.arguments(), "min_confidence": bound}).eval()
        cautious.load_state_dict(drafter.state_dict())
        draft = drafts(cautious, model, uniform)
        lengths = draft.lengths.tolist()
        assert min(lengths) >= first and draft.tokens.shape[1] == max(lengths)
        chances[bound] = sum(lengths)
        for end in (0, 1, 2):  # whether there is a place `end` follows from the tokens before it
            longer: dict[tuple[int, ...], set[bool]] = {}
            for row, length in zip(tokens, lengths, strict=True):
                if length >= end:
                    longer.setdefault(tuple(row[:end]), set()).add(length > end)
            assert all(len(each) == 1 for each in longer.values())
    assert len(set(chances.values())) > 3 and chances[1.0] == 400 * first, (
        "the bounds cut alike, or nothing"
    )


@pytest.mark.parametrize("drafter", ["block", "eagle"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_rounds_that_end_early_in_all_rows_are_the_targets(
    settings: dict[str, Any], drafter: str
) -> None:
    fitted_drafter = fitted_block if drafter == "block" else fitted_eagle
    cautious = fitted_drafter(
        target("llama"), num_steps=10, min_confidence=0.3 if drafter == "block" else 0.05
    )
    sampling = Sampling(1.0, **settings)
    law = measure_round(
        target("llama"), cautious, TEXT, rule=RejectionSampling(), sampling=sampling
    )
    assert law.num_drafts and law.is_the_targets


ENDS = {
    "before a token": (lambda draft: 2 if draft[0] else 1, True),
    "at the token itself": (lambda draft: 2 if draft[1] else 1, False),
    "before it is seen": (lambda draft: 1 if draft[0] else 0, False),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_window_that_ends_by_tokens_before_its_end_is_lossless_and_another_is_not(
    end: str,
) -> None:
    length_of, lossless = ENDS[end]
    sampling, proposal = Sampling(1.0), Proposal(Sampling(2.0), Sampling(2.0))
    logits, guesses = along(world(1), WINDOW + 1), along(world(101), WINDOW)
    chances, law = guess_probs(proposal.drawn, guesses), dict[tuple[int, ...], float]()
    lengths = torch.tensor([length_of(draft) for draft in DRAFTS])
    for length in range(WINDOW + 1):
        measured = Measured(RejectionSampling(), logits, guesses, sampling, proposal, length)
        for tokens, chance in measured.law(chances * (lengths == length)).items():
            law[tokens] = law.get(tokens, 0.0) + chance
    probs = {
        prefix: sampling.probs(logits_after).double() for prefix, logits_after in world(1).items()
    }
    error = error_of(law, probs, block_probs(world(1), sampling))
    assert error < TOLERANCE if lossless else error > 1000 * TOLERANCE
    assert VOCAB > 2


def training(**options: Any) -> BlockTraining:
    sizes: dict[str, Any] = {
        "num_heads": 2,
        "num_key_heads": 1,
        "intermediate_size": 16,
        "markov_rank": 3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return BlockTraining(
            tiny_target(), num_draft_tokens=3, **{"block_size": 6, **sizes, **options}
        )


@pytest.mark.parametrize("prompt_length", [1, 3])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    drafter = fitted_block(tiny_target(), num_steps=60, num_layers=1)
    module = training()
    module.drafter = drafter
    check_that_counts_are_decodings(module, prompt_length)


@pytest.mark.parametrize(
    "options",
    [{}, {"markov_rank": 0, "anchor_stride": 3}, {"num_layers": 2, "optimizer": "muon"}],
    ids=str,
)
def test_a_few_steps_lower_the_loss_and_leave_the_target_as_it_is(options: dict[str, Any]) -> None:
    check_that_it_learns(training(draft_vocabulary=9, learning_rate=0.01, **options), 25)


def test_the_confidence_head_learns_how_often_a_guess_is_kept_and_changes_nothing_else() -> None:
    module, batch = begun(training(learning_rate=0.01)), own_texts()
    network: Any = module.drafter.network
    steps = module.draft_steps(batch, module.read(batch, "train"))
    hidden = steps[0].hidden[0]
    logits = torch.randn(len(hidden), module.target.vocab_size)
    labels = torch.zeros(len(hidden), dtype=torch.long)
    losses = module.step_losses(0, hidden, logits.log_softmax(-1), labels)
    plain_losses = DistillationTraining.step_losses(
        module, 0, hidden, logits.log_softmax(-1), labels
    )
    weights = list(network.parameters())
    gradients = [
        torch.autograd.grad(values.sum(), weights, allow_unused=True, retain_graph=True)
        for values in (losses, plain_losses)
    ]
    for name, gradient, plain_gradient in zip(
        dict(network.named_parameters()), *gradients, strict=True
    ):
        if name.startswith("confidence"):
            assert plain_gradient is None and gradient is not None and bool(gradient.any())
        else:
            assert (gradient is None) == (plain_gradient is None) and (
                gradient is None or torch.equal(gradient, plain_gradient)
            )


def test_blocks_begin_all_over_a_text_and_everywhere_when_they_are_measured() -> None:
    module: Any = begun(training(anchor_stride=3))
    batch = batch_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    outputs = module.read(batch, "train")
    first_anchors = set()
    for step in range(40):
        module.trainer.global_step = step
        steps = module.draft_steps(batch, outputs)
        first_anchor = steps[0].first_index - 1
        first_anchors.add(first_anchor)
        for slot, draft_step in enumerate(steps):
            predicted = range(10)[draft_step.predicted]
            assert (
                list(predicted) == list(range(first_anchor + 1 + slot, 10, 3))
                and len(predicted) == draft_step.hidden.shape[1]
            )
    assert first_anchors == {1, 2, 3}
    assert [
        range(10)[draft_step.predicted].start
        for draft_step in module.eval().draft_steps(batch, outputs)
    ] == [2, 3, 4, 5, 6, 7]
    assert len(module.draft_steps(batch, outputs)[0].hidden[0]) == 8


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a round cannot have 3 draft tokens of a block of 2"):
        training(block_size=2)
    with pytest.raises(ValueError, match="attention_window must be at least block_size, 6, got 4"):
        training(attention_window=4)
    with pytest.raises(ValueError, match="anchor_stride must be"):
        training(anchor_stride=0)

"""The block drafter: what its slots see, that decoding and training agree, and how drafts end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import target
from exact_rounds import (
    DRAFT_LOGITS,
    DRAFTS,
    NUM_DRAFT_TOKENS,
    TARGET,
    TARGET_LOGITS,
    TOLERANCE,
    MeasuredRule,
    Text,
    largest_error,
    measure_draft_probs,
    sampled_probs,
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
from lightning_specdec.drafters import (
    BlockDrafter,
    Drafter,
    DraftRequest,
    TargetContext,
    last_two_tokens_of,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import RejectionSampling, Sampling
from lightning_specdec.training import BlockTraining
from lightning_specdec.training.block import blocks
from lightning_specdec.training.distillation import DistillationTraining


@torch.no_grad()
def training_logits(
    drafter: BlockDrafter,
    model: LanguageModel,
    text: list[int],
    anchor: int,
) -> torch.Tensor:
    """The logits that training computes for the block after the text's token at `anchor`."""
    tokens = torch.tensor([text])
    network = drafter.network
    features_by_layer = model(tokens, features=drafter.features(model)).features
    layers = drafter.settings.feature_layers
    features = network.features([features_by_layer[layer] for layer in layers])

    anchor_embedding = model.embeddings(tokens[:, [anchor]])
    hidden = blocks(network, anchor_embedding, features, torch.tensor([anchor]))[0, 0]
    num_predicted = len(text) - 1 - anchor
    previous_tokens = drafter.before(tokens[0, anchor:-1])
    logits = network.output(hidden[:num_predicted]) + network.bias(previous_tokens)
    if drafter.draft_vocabulary is None:
        return logits
    return drafter.draft_vocabulary.spread(logits, -torch.inf)


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
def test_a_draft_has_the_logits_of_the_blocks_that_it_is_trained_on(
    name: str, changes: dict[str, Any]
) -> None:
    """They do not depend on how many tokens of a block are drafted."""
    model = target(name)
    drafter = fitted_block(model, num_steps=5, **changes)
    for num_draft_tokens in (2, 6):
        draft = proposed(drafter, model, TEXT, 5, num_draft_tokens)
        text = [*TEXT, *draft.tokens[0].tolist()]
        expected_logits = training_logits(drafter, model, text, len(TEXT) - 1)
        torch.testing.assert_close(draft.logits[0], expected_logits, atol=1e-4, rtol=1e-4)


def test_a_block_sees_the_features_before_its_anchor_and_all_of_its_slots() -> None:
    model = target("transformer")
    assert model.hidden_size is not None
    network = block(model, attention_window=6).network
    anchors = torch.tensor([2, 7])
    embedded = model.embeddings(torch.tensor([[1, 2]]))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 10, model.hidden_size, generator=generator)

    @torch.no_grad()
    def changed_slots(block_index: int, tokens: slice) -> list[bool]:
        """Whether each slot of a block changes with the features of these tokens."""
        other_features = features.clone()
        other_features[:, tokens] += 1.0
        slots = blocks(network, embedded, features, anchors)[0, block_index]
        other_slots = blocks(network, embedded, other_features, anchors)[0, block_index]
        return (slots != other_slots).any(dim=-1).tolist()

    assert not any(changed_slots(0, slice(2, None)))
    assert all(changed_slots(0, slice(1, 2)))
    assert not any(changed_slots(1, slice(7, None)))
    assert all(changed_slots(1, slice(6, 7)))

    # With one layer, no slot receives anything from another one. The anchor is five tokens after
    # the changed features, within the window; the next slot is six tokens after them, outside.
    network = block(model, num_layers=1, attention_window=6).network
    assert changed_slots(1, slice(2, 3)) == [True] + [False] * 5

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
    request = session.add(TEXT, max_new_tokens=20)
    # The first round has no draft, since the target has read nothing yet.
    session.step()
    state: Any = session._batch.draft_state
    while request.live:
        num_known = len(request.text) - 1
        num_calls = session.num_draft_calls
        assert state.num_known == [num_known]
        session.step()
        if session.num_draft_calls > num_calls:
            assert state.entry_cache.consumed == [num_known]

    standard = autoregressive_decode(model, TEXT, max_new_tokens=20)
    assert request.text[len(TEXT) :] == standard.rows[0].tokens
    assert request.counts is not None
    assert request.counts.num_accepted > 0
    assert max(len(played_round.drafted) for played_round in request.rounds) == min(window, 6)


def drafts(drafter: BlockDrafter, model: LanguageModel, uniform: torch.Tensor) -> Any:
    """Drafts after `TEXT`, drawn with these uniform numbers, one row for each row of them."""
    num_rows, window = uniform.shape
    texts = [TEXT] * num_rows
    with torch.inference_mode():
        target_state = model.init_state(num_rows, 40)
        draft_state = drafter.init_state(num_rows, 40, TargetContext(model, target_state))
        output = model(
            torch.tensor(texts)[:, :-1],
            target_state,
            logits_for=slice(-1, None),
            features=drafter.features(model),
        )
        drafter.observe(draft_state, output, [0] * num_rows)
        last_two_tokens = last_two_tokens_of(texts, model.device)
        request = DraftRequest(texts, last_two_tokens, uniform, vocab_size=model.vocab_size)
        return drafter.propose(draft_state, request, [window] * num_rows, Sampling(1.3))


def check_that_lengths_follow_from_the_tokens_before(
    drafts: list[list[int]], lengths: list[int]
) -> None:
    """Drafts with equal tokens before a position all end before it, or all reach it."""
    for position in (0, 1, 2):
        decisions: dict[Text, set[bool]] = defaultdict(set)
        for draft, length in zip(drafts, lengths, strict=True):
            if length >= position:
                decisions[tuple(draft[:position])].add(length > position)
        assert all(len(reaches) == 1 for reaches in decisions.values())


@pytest.mark.parametrize(("kind", "fewest_tokens"), [("eagle", 0), ("block", 1)])
def test_the_end_of_a_draft_does_not_depend_on_the_tokens_that_it_discards(
    kind: str, fewest_tokens: int
) -> None:
    """A block always drafts its first slot; an autoregressive head may draft nothing."""
    model = target("llama")
    assert model.hidden_size is not None
    drafter: Any
    if kind == "eagle":
        drafter = fitted_eagle(model)
    else:
        drafter = deepcopy(fitted_block(model, num_layers=1, num_steps=10))
        # The confidence depends only on the tokens before, and differs widely.
        weights = torch.tensor([[0.0] * model.hidden_size + [2.0, -2.0, 2.0]])
        drafter.network.confidence.weight.data.copy_(weights)

    num_rows = 400
    uniform = torch.rand(num_rows, 3, generator=torch.Generator().manual_seed(0))
    tokens = drafts(drafter, model, uniform).tokens.tolist()
    num_drafted = {}
    for min_confidence in (0.05, 0.15, 0.25, 0.4, 0.6, 1.0):
        settings = {**drafter.arguments(), "min_confidence": min_confidence}
        cautious_drafter = type(drafter)(**settings).eval()
        cautious_drafter.load_state_dict(drafter.state_dict())
        draft = drafts(cautious_drafter, model, uniform)
        lengths = draft.lengths.tolist()
        assert min(lengths) >= fewest_tokens
        assert draft.tokens.shape[1] == max(lengths)
        check_that_lengths_follow_from_the_tokens_before(tokens, lengths)
        num_drafted[min_confidence] = sum(lengths)
    assert len(set(num_drafted.values())) > 3, "the drafts end independently of min_confidence"
    assert num_drafted[1.0] == num_rows * fewest_tokens


@pytest.mark.parametrize("kind", ["block", "eagle"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_rounds_whose_drafts_end_early_have_the_targets_distribution(
    settings: dict[str, Any], kind: str
) -> None:
    model = target("llama")
    drafter: Drafter
    if kind == "block":
        drafter = fitted_block(model, num_steps=10, min_confidence=0.3)
    else:
        drafter = fitted_eagle(model, num_steps=10, min_confidence=0.05)
    sampling = Sampling(1.0, **settings)
    measured = measure_round(model, drafter, TEXT, rule=RejectionSampling(), sampling=sampling)
    assert measured.num_drafts
    assert measured.is_the_targets


DRAFT_LENGTHS: dict[str, tuple[Callable[[Text], int], bool]] = {
    "by a token before its end": (lambda draft: 2 if draft[0] else 1, True),
    "by the token at its end": (lambda draft: 2 if draft[1] else 1, False),
    "by a token after its end": (lambda draft: 1 if draft[0] else 0, False),
}
"""Ways to choose the length of a draft, and whether they are lossless."""


@pytest.mark.parametrize("end", DRAFT_LENGTHS)
def test_a_window_that_ends_by_tokens_before_its_end_is_lossless_and_another_is_not(
    end: str,
) -> None:
    draft_length, is_lossless = DRAFT_LENGTHS[end]
    sampling = Sampling(1.0)
    drawn = Sampling(2.0)
    draft_probs = measure_draft_probs(drawn, DRAFT_LOGITS)
    lengths = torch.tensor([draft_length(draft) for draft in DRAFTS])

    round_probs: dict[Text, float] = defaultdict(float)
    for length in range(NUM_DRAFT_TOKENS + 1):
        measured = MeasuredRule(
            RejectionSampling(),
            sampling,
            TARGET_LOGITS,
            drawn.probs(DRAFT_LOGITS),
            draft_length=length,
        )
        probs_of_length = draft_probs * (lengths == length)
        for text, prob in measured.round_probs(probs_of_length).items():
            round_probs[text] += prob

    error = largest_error(round_probs, sampled_probs(TARGET, sampling))
    if is_lossless:
        assert error < TOLERANCE
    else:
        assert error > 1000 * TOLERANCE


def training(**options: Any) -> BlockTraining:
    sizes: dict[str, Any] = {
        "num_heads": 2,
        "num_key_heads": 1,
        "intermediate_size": 16,
        "markov_rank": 3,
        "block_size": 6,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return BlockTraining(tiny_target(), num_draft_tokens=3, **{**sizes, **options})


@pytest.mark.parametrize("prompt_length", [1, 3])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    module = training()
    module.drafter = fitted_block(tiny_target(), num_steps=60, num_layers=1)
    check_that_counts_are_decodings(module, prompt_length)


@pytest.mark.parametrize(
    "options",
    [{}, {"markov_rank": 0, "anchor_stride": 3}, {"num_layers": 2, "optimizer": "muon"}],
    ids=str,
)
def test_a_few_steps_lower_the_loss_and_leave_the_target_unchanged(options: dict[str, Any]) -> None:
    check_that_it_learns(training(draft_vocabulary=9, learning_rate=0.01, **options), 25)


def test_the_confidence_head_learns_from_acceptance_and_changes_no_other_gradient() -> None:
    module = begun(training(learning_rate=0.01))
    batch = own_texts()
    steps = module.draft_steps(batch, module.read(batch, "train"))
    hidden = steps[0].hidden[0]
    target_logprobs = torch.randn(len(hidden), module.target.vocab_size).log_softmax(-1)
    labels = torch.zeros(len(hidden), dtype=torch.long)
    losses = module.step_losses(0, hidden, target_logprobs, labels)
    other_losses = DistillationTraining.step_losses(module, 0, hidden, target_logprobs, labels)

    network: Any = module.drafter.network
    parameters = list(network.parameters())

    def gradients_of(losses: torch.Tensor) -> dict[str, torch.Tensor | None]:
        gradients = torch.autograd.grad(
            losses.sum(), parameters, allow_unused=True, retain_graph=True
        )
        return dict(zip(dict(network.named_parameters()), gradients, strict=True))

    gradients = gradients_of(losses)
    for name, other_gradient in gradients_of(other_losses).items():
        gradient = gradients[name]
        if name.startswith("confidence"):
            assert other_gradient is None
            assert gradient is not None
            assert bool(gradient.any())
        elif other_gradient is None:
            assert gradient is None
        else:
            assert gradient is not None
            assert torch.equal(gradient, other_gradient)


def test_training_blocks_begin_at_every_position_over_time_and_validation_uses_all() -> None:
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
            assert list(predicted) == list(range(first_anchor + 1 + slot, 10, 3))
            assert len(predicted) == draft_step.hidden.shape[1]
    assert first_anchors == {1, 2, 3}

    validation_steps = module.eval().draft_steps(batch, outputs)
    starts = [range(10)[draft_step.predicted].start for draft_step in validation_steps]
    assert starts == [2, 3, 4, 5, 6, 7]
    assert len(validation_steps[0].hidden[0]) == 8


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a round cannot have 3 draft tokens of a block of 2"):
        training(block_size=2)
    with pytest.raises(ValueError, match="attention_window must be at least block_size, 6, got 4"):
        training(attention_window=4)
    with pytest.raises(ValueError, match="anchor_stride must be"):
        training(anchor_stride=0)

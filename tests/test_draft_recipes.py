"""Drafts for a frozen target: how each kind begins, what it may say, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from families import FAMILIES, tiny
from generated import corpus, target  # noqa: F401
from tiny_distillation import (
    VOCAB,
    begun,
    check_that_counts_are_decodings,
    check_that_it_learns,
    fit_shipped,
    own_texts,
)
from tiny_distillation import target as frozen
from tiny_heads import heads, some_tokens

from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import (
    BlockDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
    StagedDrafter,
)
from lightning_specdec.drafters.early_exit import ExitModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack
from lightning_specdec.rules import RejectionSampling, Sampling
from lightning_specdec.training import DistilledModelTraining, ExitHeadTraining, MedusaTraining

SMALL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
}


def layers_training(**options: Any) -> DistilledModelTraining:
    settings = {"draft_layers": [0, 2], "num_draft_tokens": 3, "learning_rate": 0.003, **options}
    return DistilledModelTraining(frozen(), **settings)


def heads_training(**options: Any) -> MedusaTraining:
    settings = {
        "freeze_target": True,
        "num_heads": 3,
        "num_draft_tokens": 3,
        "learning_rate": 0.02,
        **options,
    }
    return MedusaTraining(frozen(), **settings)


def exit_training(**options: Any) -> ExitHeadTraining:
    return ExitHeadTraining(
        frozen(), **{"exit_layer": 2, "num_draft_tokens": 3, "learning_rate": 0.02, **options}
    )


def fitted_heads() -> MedusaTraining:
    module = heads_training(draft_vocabulary=9)
    begun(module)
    fitted = heads(frozen(), reduced=True, num_steps=40)
    assert module.draft_vocabulary is not None and fitted.draft_vocabulary is not None
    module.draft_vocabulary.choose(torch.bincount(fitted.draft_vocabulary.tokens, minlength=VOCAB))
    module.drafter.load_state_dict(fitted.state_dict())
    return module


# --- what all kinds have in common ---


@pytest.mark.parametrize(
    ("make", "options", "num_steps"),
    [
        (layers_training, {}, 30),
        (layers_training, {"draft": SMALL, "draft_layers": None, "learning_rate": 0.01}, 30),
        (exit_training, {}, 25),
        (exit_training, {"draft_vocabulary": 9}, 25),
        (heads_training, {}, 25),
        (heads_training, {"draft_vocabulary": 9}, 25),
    ],
    ids=["layers", "small model", "exit", "exit, reduced", "heads", "heads, reduced"],
)
def test_a_few_steps_raise_the_acceptance_and_leave_the_target_as_it_is(
    make: Any,
    options: dict[str, Any],
    num_steps: int,
) -> None:
    torch.manual_seed(0)
    if "draft" in options:
        options = {**options, "draft": HuggingFaceLM(SMALL)}
    check_that_it_learns(make(**options), num_steps)


@pytest.mark.parametrize("prompt_length", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: begun(layers_training()),
        lambda: begun(exit_training(draft_vocabulary=9)),
        fitted_heads,
    ],
    ids=["layers", "exit", "heads"],
)
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(
    make: Any, prompt_length: int
) -> None:
    check_that_counts_are_decodings(make(), prompt_length)


@pytest.mark.quick_cases("smollm2_exit")
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("smollm2_layers", {"draft_layers": [0, 2]}, ModelDrafter),
        ("smollm2_exit", {"exit_layer": 1, "draft_vocabulary": 200}, EarlyExitDrafter),
        ("smollm2_medusa", {"draft_vocabulary": 200}, MedusaDrafter),
        (
            "smollm2_block",
            {
                "draft_vocabulary": 200,
                "num_heads": 2,
                "num_key_heads": 1,
                "intermediate_size": 16,
                "markov_rank": 4,
            },
            BlockDrafter,
        ),
    ],
)
def test_the_shipped_config_trains_a_draft_that_decodes(
    name: str,
    options: dict[str, Any],
    kind: type,
    corpus: Path,  # noqa: F811
    target: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained_pair = fit_shipped(name, corpus, target, tmp_path, monkeypatch, **options)
    assert isinstance(trained_pair.drafter, kind)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers_training(draft_layers=None), "got neither: give draft or draft_layers"),
        (lambda: layers_training(draft_layers=[0, 9]), "a layer must be from 0 to 2, got 9"),
        (
            lambda: layers_training(draft=cases.MODELS["rnn"](vocab_size=12), draft_layers=None),
            "the draft has a vocabulary of 12",
        ),
        (
            lambda: DistilledModelTraining(cases.target("rnn"), draft_layers=[0]),
            "the target is a RNN",
        ),
        (
            lambda: EarlyExitDrafter(1, draft_vocabulary=5),
            "num_blocks and draft_vocabulary need an exit",
        ),
        (lambda: exit_training(exit_layer=3), "exit_layer must be from 1 to 2, got 3"),
        (lambda: ExitHeadTraining(cases.target("rnn")), "RNN has no layers to exit from"),
        (lambda: ExitHeadTraining(), "needs one target, got neither"),
        (lambda: frozen().with_layers([2, 0]), "layers must ascend"),
        (lambda: frozen().packed().with_layers([0, 1]), "cannot be built"),
        (lambda: heads_training(draft_vocabulary=5, freeze_target=False), "needs all its tokens"),
        (lambda: heads_training(num_heads=2), "a round cannot have 3 draft tokens of 2 heads"),
        (
            lambda: heads_training(draft_vocabulary=12),
            "draft_vocabulary must be from 2 to 11, got 12",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- layers of the target ---


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3", "gemma2"])
def test_with_all_its_layers_it_is_the_target_and_with_some_what_these_make(family: str) -> None:
    model = HuggingFaceLM(tiny(family))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    with torch.no_grad():
        assert torch.equal(model.with_layers([0, 1, 2])(tokens).logits, model(tokens).logits)
        draft = model.with_layers([0, 2])
        assert draft.num_layers == 2 and draft.origin is None
        shortened_model = tiny(family)
        stack = LayerStack(shortened_model)
        del stack.layers[1]
        shortened_model.config.num_hidden_layers = (
            2  # what a loop over the layers goes by, here and there
        )
        for name in ("layer_types", "no_rope_layers"):
            layer_values = getattr(shortened_model.config, name, None)
            if layer_values:
                setattr(shortened_model.config, name, [layer_values[0], layer_values[2]])
        expected = shortened_model(tokens, use_cache=False).logits
    torch.testing.assert_close(draft(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    state = draft.init_state(1, 12)
    with torch.no_grad():  # its layers write where their own numbers say
        pieces = [draft(piece, state).logits for piece in tokens.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-4, rtol=1e-4)


# --- an exit's head ---


def reduced_exit() -> EarlyExitDrafter:
    drafter = cases.drafter("early_exit_reduced", "llama")
    assert isinstance(drafter, EarlyExitDrafter)
    return drafter


def test_a_new_head_says_what_the_targets_own_head_makes_of_that_layer() -> None:
    model = HuggingFaceLM(tiny("llama", vocab_size=VOCAB))
    for name, weight in model.model.named_parameters():
        if "norm" in name:
            weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    module = begun(ExitHeadTraining(model, exit_layer=2, draft_vocabulary=9))
    assert isinstance(module, ExitHeadTraining) and module.draft_vocabulary is not None
    hidden = model(own_texts().tokens, features=(1,)).features[1]
    expected = model.exit_logits(hidden)[..., module.draft_vocabulary.tokens]
    torch.testing.assert_close(module.head(hidden), expected, atol=1e-3, rtol=1e-3)


def test_what_it_cannot_say_has_no_probability_and_its_stages_and_copies_know_it() -> None:
    drafter = reduced_exit()
    model = cases.target("llama")
    vocabulary = drafter.draft_vocabulary
    assert vocabulary is not None and vocabulary.arguments() == some_tokens(model.vocab_size)
    logits = ExitModel(model, drafter).logits(torch.randn(1, 3, 32))
    assert logits.shape[-1] == model.vocab_size
    assert (
        logits.softmax(-1)[..., [4, 9]].sum() == 0
        and logits[..., vocabulary.tokens].isfinite().all()
    )
    options: dict[str, Any] = {
        "max_new_tokens": 10,
        "rule": RejectionSampling(),
        "sampling": Sampling(1.0),
    }
    for drafter_or_stages in (
        drafter,
        StagedDrafter([cases.small(model), drafter], stage_windows=2),
    ):
        result = speculative_decode(model, drafter_or_stages, cases.PROMPTS, **options)
        drafted = {
            token for row in result.rows for round in row.rounds or [] for token in round.drafted
        }
        assert drafted and drafted <= set(vocabulary.arguments())

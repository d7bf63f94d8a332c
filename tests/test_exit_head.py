"""An exit's own head on a frozen target: how it begins, what it may say, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from families import tiny
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
from tiny_heads import some_tokens

from lightning_specdec import checkpoint
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, StagedDrafter
from lightning_specdec.inference import speculative_decode
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import PackedLinear
from lightning_specdec.rules import RejectionSampling, Sampling
from lightning_specdec.training import ExitHeadTraining


def training(**options: Any) -> ExitHeadTraining:
    return ExitHeadTraining(frozen(), **{"exit_layer": 2, "num_draft_tokens": 3, "learning_rate": 0.02, **options})


def reduced() -> EarlyExitDrafter:
    drafter = cases.drafter("early_exit_reduced", "llama")
    assert isinstance(drafter, EarlyExitDrafter)
    return drafter


@pytest.mark.parametrize("draft_vocabulary", [None, 9])
def test_a_few_steps_let_more_guesses_be_kept_and_leave_the_target_as_it_is(draft_vocabulary: int | None) -> None:
    check_that_it_learns(training(draft_vocabulary=draft_vocabulary), 25)


@pytest.mark.parametrize("prompt_length", [1, 3])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    check_that_counts_are_decodings(begun(training(draft_vocabulary=9)), prompt_length)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_new_head_says_what_the_targets_own_head_makes_of_that_layer(family: str) -> None:
    model = HuggingFaceLM(tiny(family, vocab_size=VOCAB))
    weights = {name: weight for name, weight in model.model.named_parameters() if "norm" in name}
    for weight in weights.values():
        weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    module = begun(ExitHeadTraining(model, exit_layer=2, draft_vocabulary=9))
    assert isinstance(module, ExitHeadTraining) and module.draft_vocabulary is not None
    hidden = model(own_texts().tokens, features=(1,)).features[1]
    made, wanted = module.head(hidden), module.draft_vocabulary.restrict(model.exit_logits(hidden))
    if family == "llama":
        torch.testing.assert_close(made, wanted, atol=1e-3, rtol=1e-3)
    else:  # GPT-2's norm is none that the head has: its output rows are the target's all the same
        assert torch.equal(module.head.norm.weight, torch.ones(32))
        assert torch.equal(module.head.output.weight, model.output_weight[module.draft_vocabulary.tokens])


def test_what_it_cannot_say_has_no_probability_and_its_stages_and_copies_know_it() -> None:
    drafter, model = reduced(), cases.target("llama")
    own = drafter.draft_vocabulary
    assert own is not None and own.arguments() == some_tokens(model.vocab_size)
    logits = drafter.exit_model(model)(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[-1] == model.vocab_size
    assert logits.softmax(-1)[..., [4, 9]].sum() == 0 and logits[..., own.tokens].isfinite().all()
    assert drafter.at(2).draft_vocabulary is own and drafter.at(1).exit_model(model).tokens is None
    options: dict[str, Any] = {"max_new_tokens": 10, "rule": RejectionSampling(), "sampling": Sampling(1.0)}
    staged = StagedDrafter([cases.small(model), drafter], stage_windows=2)
    for each in (drafter, staged):
        result = speculative_decode(model, each, cases.PROMPTS, **options)
        guessed = {token for row in result.rows for round in row.rounds or [] for token in round.drafted}
        assert guessed and guessed <= set(own.arguments())


def test_a_fused_one_guesses_the_same_and_leaves_the_original_alone() -> None:
    drafter, model = reduced(), cases.target("llama")
    fused = drafter.fused()
    assert fused.fused() is fused and fused.arguments() == drafter.arguments()
    assert any(isinstance(layer, PackedLinear) for layer in fused.modules())
    assert not any(isinstance(layer, PackedLinear) for layer in drafter.modules())
    plain = EarlyExitDrafter(1)
    assert plain.fused() is plain
    first, second = (speculative_decode(model, each, cases.PROMPTS, max_new_tokens=12) for each in (drafter, fused))
    assert [row.rounds for row in first.rows] == [row.rounds for row in second.rows]


def test_a_checkpoint_keeps_blocks_and_tokens_and_those_without_are_as_they_were(tmp_path: Path) -> None:
    drafter, model = reduced(), cases.target("llama")
    checkpoint.save(tmp_path / "exit.ckpt", model, drafter)
    loaded = checkpoint.load(tmp_path / "exit.ckpt").drafter
    assert loaded.arguments() == drafter.arguments() and loaded.arguments()["num_blocks"] == 2
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in loaded.state_dict().items())
    old = EarlyExitDrafter(1, head_layers=[1], hidden_size=32, vocab_size=VOCAB)
    assert old.arguments().keys() == {"exit_layer", "head_layers", "hidden_size", "vocab_size"}
    assert old.state_dict().keys() == {"heads.1.norm.weight", "heads.1.output.weight"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: EarlyExitDrafter(1, draft_vocabulary=5), "are of an exit's own output head, and there is none"),
        (lambda: EarlyExitDrafter(1, num_blocks=1), "are of an exit's own output head, and there is none"),
        (lambda: training(exit_layer=3), "exit_layer must be from 1 to 2, got 3"),
        (lambda: training(draft_vocabulary=12), "draft_vocabulary must be from 2 to 11, got 12"),
        (lambda: ExitHeadTraining(cases.target("rnn")), "RNN has no layers to exit from"),
        (lambda: ExitHeadTraining(), "heads need one target, got neither"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_the_shipped_config_trains_a_draft_that_decodes(
    corpus: Path,  # noqa: F811
    target: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = fit_shipped("smollm2_exit", corpus, target, tmp_path, monkeypatch, exit_layer=1, draft_vocabulary=200)
    drafter: Drafter = made.drafter
    assert isinstance(drafter, EarlyExitDrafter) and drafter.num_blocks == 2

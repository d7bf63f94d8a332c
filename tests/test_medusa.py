"""Heads on a frozen target, with few tokens to say: how they begin, what they may say, and that they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
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
from tiny_heads import heads, small, some_tokens
from torch import nn

from lightning_specdec import checkpoint
from lightning_specdec.drafters import MultiTokenDrafter
from lightning_specdec.drafters.heads import MOST_STACKED, FusedHeads
from lightning_specdec.models.packed import PackedLinear
from lightning_specdec.training import MedusaTraining


def training(**options: Any) -> MedusaTraining:
    return MedusaTraining(frozen(), **{"num_heads": 3, "num_draft_tokens": 3, "learning_rate": 0.02, **options})


@pytest.mark.parametrize("options", [{}, {"draft_vocabulary": 9}, {"shared_output": True}], ids=str)
def test_a_few_steps_let_more_guesses_be_kept_and_leave_the_target_as_it_is(options: dict[str, Any]) -> None:
    check_that_it_learns(training(**options), 25)


@pytest.mark.parametrize("prompt_length", [1, 3])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    module = begun(training(draft_vocabulary=9))
    fitted = heads(frozen(), reduced=True, num_steps=40)
    assert isinstance(module, MedusaTraining) and module.draft_vocabulary is not None
    assert fitted.draft_vocabulary is not None
    module.draft_vocabulary.choose(torch.bincount(fitted.draft_vocabulary.tokens, minlength=VOCAB))
    module.drafter.load_state_dict(fitted.state_dict())
    check_that_counts_are_decodings(module, prompt_length)


def test_head_i_at_place_t_speaks_of_token_t_and_two_and_i_and_short_texts_leave_it_nothing() -> None:
    module, batch = training(), own_texts(2)
    guesses = module.guesses(batch, module.read(batch, "train"))
    assert [(guess.first, guess.hidden.shape[1]) for guess in guesses] == [(2, 20), (3, 19), (4, 18)]
    short = batch._replace(tokens=batch.tokens[:, :3], lengths=batch.lengths.clamp(max=3))
    assert [guess.hidden.shape[1] for guess in module.guesses(short, module.read(short, "train"))] == [1, 0, 0]
    assert begun(module).training_step(short._replace(prompt_lengths=torch.ones(2).long()), 0).isfinite()


def test_new_heads_say_what_the_target_says_of_the_tokens_that_they_have() -> None:
    module = begun(training(draft_vocabulary=9))
    assert isinstance(module, MedusaTraining) and module.draft_vocabulary is not None
    output = frozen()(own_texts(2).tokens, features=module.layers())
    for number in range(3):
        made = module.drafter.head_logits(number, output.features[2], frozen())
        torch.testing.assert_close(made, module.draft_vocabulary.restrict(output.logits), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("num_tokens", [5, MOST_STACKED + 3])
def test_fused_heads_say_the_same_of_the_same_few_tokens(num_tokens: int) -> None:
    drafter = small(num_heads=3, hidden_size=24, vocab_size=MOST_STACKED + 9, draft_vocabulary=num_tokens)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.2)
    fused, hidden, model = drafter.fused(), torch.randn(2, 1, 24), cases.target("transformer")
    assert fused.arguments() == drafter.arguments()
    assert isinstance(fused.heads, FusedHeads)
    assert any(isinstance(part, PackedLinear) for part in fused.heads._outputs) == (num_tokens > MOST_STACKED)
    with torch.no_grad():
        expected, made = (each.logits(hidden, model) for each in (drafter, fused))
    assert made.shape == (3, 2, 1, MOST_STACKED + 9) and made.isfinite().sum() == 6 * num_tokens
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_keeps_the_tokens(tmp_path: Path) -> None:
    drafter = heads(frozen(), reduced=True)
    assert drafter.arguments()["draft_vocabulary"] == some_tokens(VOCAB)
    assert "draft_vocabulary" not in heads(frozen()).arguments()
    checkpoint.save(tmp_path / "heads.ckpt", frozen(), drafter)
    assert checkpoint.load(tmp_path / "heads.ckpt").drafter.arguments() == drafter.arguments()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shared_output": True, "draft_vocabulary": 5}, "shared_output is the target's own output head, which scores"),
        ({"num_heads": 2}, "a round cannot have 3 guesses of 2 heads: lower num_draft_tokens"),
        ({"draft_vocabulary": 12}, "draft_vocabulary must be from 2 to 11, got 12"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        training(**options)


def test_the_shipped_config_trains_a_draft_that_decodes(
    corpus: Path,  # noqa: F811
    target: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = fit_shipped("smollm2_heads", corpus, target, tmp_path, monkeypatch, draft_vocabulary=200)
    assert isinstance(made.drafter, MultiTokenDrafter) and made.drafter.num_heads == 4

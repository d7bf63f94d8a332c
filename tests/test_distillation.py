"""Laws of training a draft for a frozen target: what it learns from, and what is counted."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_distillation import (
    VOCAB,
    batch_of,
    check_that_counts_are_decodings,
    check_that_it_learns,
    target,
    texts,
)
from tiny_eagle import fitted_eagle
from torch import Tensor
from torch.nn import functional

from lightning_specdec.data import IGNORED, ArithmeticProgressions, Batch
from lightning_specdec.drafters import EagleDrafter
from lightning_specdec.training import EagleTraining, ExitHeadTraining
from lightning_specdec.training.draft_losses import (
    CrossEntropy,
    DraftLoss,
    ForwardKL,
    TotalVariation,
)
from lightning_specdec.training.metrics import overlap

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def progressions(**arguments: Any) -> ArithmeticProgressions:
    return ArithmeticProgressions(
        vocab_size=VOCAB, modulo=True, num_train=40, num_val=8, num_test=3, **arguments
    )


def training(drafter: EagleDrafter | None = None, **options: Any) -> EagleTraining:
    """A training for the tiny target, with the weights of a drafter if there is one."""
    vocabulary = None if drafter is None else drafter.draft_vocabulary
    if vocabulary is not None:
        options["draft_vocabulary"] = len(vocabulary)
    if drafter is not None:
        options["attention_window"] = drafter.settings.attention_window
    sizes: dict[str, Any] = {"num_heads": 2, "num_key_heads": 1, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = EagleTraining(target(), num_draft_tokens=3, **sizes, **options)
    if drafter is not None:
        module.drafter.load_state_dict(drafter.state_dict())
    if vocabulary is not None:
        token_counts = torch.zeros(VOCAB)
        token_counts[vocabulary.tokens] = 1
        module.drafter.draft_vocabulary.choose(token_counts)  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("prompt_length", [1, 3])
@pytest.mark.parametrize("attention_window", [None, 4])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(
    reduced: bool,
    prompt_length: int,
    attention_window: int | None,
) -> None:
    drafter = fitted_eagle(
        target(), reduced=reduced, attention_window=attention_window, num_steps=60
    )
    check_that_counts_are_decodings(training(drafter), prompt_length)


def test_the_chance_of_each_position_is_the_overlap_of_both_distributions_there() -> None:
    drafter = fitted_eagle(target(), reduced=True)
    module = training(drafter).eval()
    vocabulary = drafter.draft_vocabulary
    assert vocabulary is not None
    rows = texts(2, 3)
    with torch.no_grad():
        batch = batch_of(rows)
        means = module.measure(batch, "val")
        outputs = module.read(batch, "val")
        target_probs = target()(batch.tokens).logits.softmax(-1)
        for i, step in enumerate(module.draft_steps(batch, outputs)):
            draft_logits = vocabulary.spread(module.step_logits(i, step.hidden), -torch.inf)
            draft_probs = draft_logits.softmax(-1)
            overlaps: list[Tensor] = []
            # The first draft token of a round is a new token.
            first_token = max(3 + i, step.first_index)
            for row_index, row in enumerate(rows):
                for token_index in range(first_token, len(row)):
                    token_draft_probs = draft_probs[row_index, token_index - step.first_index]
                    token_target_probs = target_probs[row_index, token_index - 1]
                    overlaps.append(torch.minimum(token_draft_probs, token_target_probs).sum())
            rate, _ = means[f"position_{i + 1}/sampling_acceptance_rate"]
            torch.testing.assert_close(rate, torch.stack(overlaps).mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.quick_cases("None")
@pytest.mark.parametrize("loss", [None, CrossEntropy(), TotalVariation()])
def test_a_few_steps_lower_the_loss_and_leave_the_target_as_it_is(loss: Any) -> None:
    check_that_it_learns(training(loss=loss, draft_vocabulary=9, learning_rate=0.01), 25)


def test_prompts_are_learned_from_only_when_asked() -> None:
    for learn_from_prompts, first_token in ((False, 3), (True, 2)):
        module = training(learn_from_prompts=learn_from_prompts)
        batch = batch_of([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5]])
        for step in module.draft_steps(batch, module.read(batch, "train")):
            mask = step.learned(batch, prompts=learn_from_prompts)
            for row_mask, length in zip(mask, (7, 5), strict=True):
                tokens = step.first_index + row_mask.nonzero()[:, 0]
                assert tokens.tolist() == list(range(max(first_token, step.first_index), length))


def test_the_draft_vocabulary_has_the_most_frequent_tokens_and_the_targets_rows() -> None:
    module = training(draft_vocabulary=6)
    data = progressions()
    labels: list[int] = []
    for row in data.splits().train:
        labels.extend(row[3:])
    counts = torch.tensor([labels.count(token) for token in range(VOCAB)])
    module.check_data(data)
    vocabulary = module.draft_vocabulary
    assert vocabulary is not None
    assert sorted(counts[vocabulary.tokens].tolist()) == sorted(counts.tolist())[-6:]
    output_rows = target().output_weight[vocabulary.tokens]
    assert torch.equal(module.drafter.network.output.weight, output_rows)


def run(
    directory: Path,
    settings: dict[str, Any],
    keep: dict[str, Any],
    *,
    max_epochs: int = 2,
    **options: Any,
) -> tuple[EagleTraining, Trainer]:
    """Two or more epochs of eight steps, with checkpoints."""
    module = training(draft_vocabulary=9, warmup_steps=3, learning_rate=0.01, **settings)
    callback = ModelCheckpoint(directory, enable_version_counter=False, **keep)
    trainer = Trainer(max_epochs=max_epochs, accelerator="cpu", callbacks=[callback], **QUIET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer.fit(module, datamodule=progressions(), **options)
    return module, trainer


def have_same_weights(module: EagleTraining, other_module: EagleTraining) -> bool:
    weights = other_module.drafter.state_dict()
    return all(
        torch.equal(weight, weights[name]) for name, weight in module.drafter.state_dict().items()
    )


@pytest.mark.parametrize(
    "settings", [{}, {"random_lengths": True, "optimizer": "muon", "attention_window": 4}]
)
def test_a_run_that_was_stopped_in_an_epoch_goes_on_in_it(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops in the middle of a step, which is repeated."""
    batches: list[list[int]] = []

    class Watched(EagleTraining):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            batches.append(batch.indices.tolist())
            if stop == len(batches):
                raise RuntimeError("stopped")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(sys.modules[__name__], "EagleTraining", Watched)
    keep: dict[str, Any] = {"filename": "last", "save_on_exception": True}
    stop = 0
    uninterrupted, _ = run(tmp_path, settings, keep)
    all_batches = list(batches)
    assert len(all_batches) == 2 * 8

    batches.clear()
    stop = 12
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, settings, keep)
    finished_batches = batches[:-1]

    batches.clear()
    stop = 0
    path = str(tmp_path / "last.ckpt")
    resumed, _ = run(tmp_path, settings, keep, ckpt_path=path, weights_only=True)
    assert finished_batches + batches == all_batches
    assert have_same_weights(uninterrupted, resumed)


def test_the_learning_rate_does_not_rise_in_a_run_that_resumes_with_more_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    class Watched(EagleTraining):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(sys.modules[__name__], "EagleTraining", Watched)
    keep = {"filename": "last"}
    run(tmp_path, {}, keep)
    assert len(rates) == 16 and max(rates) == rates[3]
    path = str(tmp_path / "last.ckpt")
    run(tmp_path, {}, keep, max_epochs=4, ckpt_path=path, weights_only=True)
    after_warmup = rates[3:]
    assert len(rates) == 32 and after_warmup == sorted(after_warmup, reverse=True)
    assert rates[-1] > 0


def test_rollouts_of_random_lengths_have_the_whole_ones_loss_on_average() -> None:
    full_module = training(position_decay=0.5, random_lengths=False)
    random_module = training(position_decay=0.5, random_lengths=True)
    lengths = [random_module.rollout_length(step) for step in range(4000)]
    for i, expected_share in enumerate((1.0, 0.5, 0.25)):
        long_enough = [length for length in lengths if length > i]
        assert len(long_enough) / len(lengths) == pytest.approx(expected_share, abs=0.04)
        weight_sum = sum(random_module.loss_weights(length)[i] for length in long_enough)
        full_weight = full_module.loss_weights(3)[i]
        assert weight_sum / len(lengths) == pytest.approx(full_weight, abs=0.03)
    assert {full_module.rollout_length(step) for step in range(9)} == {3}
    assert random_module.eval().rollout_length(0) == 3


def test_the_drafts_tokens_are_those_of_its_checkpoint_whatever_the_data(tmp_path: Path) -> None:
    module, trainer = run(tmp_path, {}, {"filename": "last"})
    tested = training(draft_vocabulary=9)
    path = str(tmp_path / "last.ckpt")
    trainer.test(tested, datamodule=progressions(seed=5), ckpt_path=path, verbose=False)
    assert module.draft_vocabulary is not None
    assert tested.draft_vocabulary is not None
    assert module.draft_vocabulary.arguments() == tested.draft_vocabulary.arguments()

    # New data do not initialize the head again.
    trained_weight = tested.drafter.network.output.weight.clone()
    tested.check_data(progressions(seed=6))
    assert torch.equal(tested.drafter.network.output.weight, trained_weight)


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must be adamw or muon, got 'sgd'"):
        training(optimizer="sgd")
    head = ExitHeadTraining(target(), exit_layer=1, num_blocks=0, optimizer="muon")
    with pytest.raises(ValueError, match="this draft trains none: give adamw"):
        head.configure_optimizers()


LOSSES: list[DraftLoss] = [CrossEntropy(), ForwardKL(), TotalVariation()]


def random_case(num_missing: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the target's log probabilities and labels of 12 positions; some are `IGNORED`.

    Args:
        num_missing: tokens of the target that are not in the draft's vocabulary.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(12, 9, generator=generator)
    target_logits = 2 * torch.randn(12, 9 + num_missing, generator=generator)
    labels = torch.randint(9, (12,), generator=generator)
    labels[::3] = IGNORED
    return logits, target_logits.log_softmax(-1)[:, :9], labels


def values_and_gradient(
    loss: DraftLoss,
    logits: Tensor,
    log_probs: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """The loss of each position, and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    values = loss(logits, log_probs, labels)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


@pytest.mark.parametrize("num_missing", [0, 5])
def test_each_loss_is_its_formula(num_missing: int) -> None:
    logits, log_probs, labels = random_case(num_missing)
    probs = log_probs.exp()

    expected = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(CrossEntropy()(logits, log_probs, labels), expected)

    divergence = functional.kl_div(logits.log_softmax(-1), probs, reduction="none").sum(-1)
    expected = divergence + 1 - probs.sum(-1)
    torch.testing.assert_close(ForwardKL()(logits, log_probs, labels), expected)

    expected = 1 - overlap(logits.softmax(-1)[None], probs[None])[0]
    torch.testing.assert_close(TotalVariation()(logits, log_probs, labels), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_logits_give_no_nan(loss: DraftLoss) -> None:
    """Tokens of probability 0 in both, none of the draft's in the target, the largest logits."""
    never = -torch.inf
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor(
        [[0.0, never, 1.0], [0.0, 1.0, 2.0], [largest, -largest, 0.0], [-largest, -largest, 0.0]]
    )
    log_probs = torch.tensor(
        [[0.0, never, never], [never] * 3, [never, 0.0, never], [-300.0, -200.0, 0.0]]
    )
    labels = torch.tensor([0, IGNORED, 0, 2])
    values, gradient = values_and_gradient(loss, logits, log_probs, labels)
    assert not values.isnan().any()
    assert not gradient.isnan().any()


def test_a_yaml_names_a_loss() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=DraftLoss)
    config = parser.instantiate(parser.parse_args(["--loss", "TotalVariation"]))
    assert isinstance(config.loss, TotalVariation)

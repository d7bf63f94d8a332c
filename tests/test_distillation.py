"""Laws of training a draft for a frozen target: what it learns from, what is counted, and that the target stays."""

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
    """A training for that target, with its drafter's weights if one is given."""
    if drafter is not None and drafter.draft_vocabulary is not None:
        options["draft_vocabulary"] = len(drafter.draft_vocabulary)
    if drafter is not None:
        options["attention_window"] = drafter.settings.attention_window
    sizes: dict[str, Any] = {"num_heads": 2, "num_key_heads": 1, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = EagleTraining(target(), num_draft_tokens=3, **sizes, **options)
    if drafter is not None:
        made.drafter.load_state_dict(drafter.state_dict())
        if drafter.draft_vocabulary is not None:
            chosen = torch.zeros(VOCAB)
            chosen[drafter.draft_vocabulary.tokens] = 1
            made.drafter.draft_vocabulary.choose(chosen)  # type: ignore[union-attr]
    return made


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("prompt_length", [1, 3])
@pytest.mark.parametrize("attention_window", [None, 4])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(
    reduced: bool, prompt_length: int, attention_window: int | None
) -> None:
    drafter = fitted_eagle(
        target(), reduced=reduced, attention_window=attention_window, num_steps=60
    )
    check_that_counts_are_decodings(training(drafter), prompt_length)


def test_the_chance_of_each_position_is_the_overlap_of_both_distributions_there() -> None:
    drafter = fitted_eagle(target(), reduced=True)
    module, rows, vocabulary = training(drafter).eval(), texts(2, 3), drafter.draft_vocabulary
    assert vocabulary is not None
    with torch.no_grad():
        batch = batch_of(rows)
        means = module.measure(batch, "val")
        outputs = module.read(batch, "val")
        target_probs = target()(batch.tokens).logits.softmax(-1)
        guesses = module.draft_steps(batch, outputs)
        for i, guess in enumerate(guesses):
            draft_probs = vocabulary.spread(
                module.step_logits(i, guess.hidden), -torch.inf
            ).softmax(-1)
            overlaps: list[Tensor] = []
            for row in range(2):
                for token in range(
                    max(3 + i, guess.first), len(rows[row])
                ):  # the round's first guess is a new token
                    own = draft_probs[row, token - guess.first]
                    overlaps.append(torch.minimum(own, target_probs[row, token - 1]).sum())
            found, _ = means[f"position_{i + 1}/sampling_acceptance_rate"]
            torch.testing.assert_close(found, torch.stack(overlaps).mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", [None, CrossEntropy(), TotalVariation()])
def test_a_few_steps_lower_the_loss_and_leave_the_target_as_it_is(loss: Any) -> None:
    check_that_it_learns(training(loss=loss, draft_vocabulary=9, learning_rate=0.01), 25)


def test_prompts_are_learned_from_only_when_asked() -> None:
    for learn, first in ((False, 3), (True, 2)):
        module = training(learn_from_prompts=learn)
        batch = batch_of([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5]])
        guesses = module.draft_steps(batch, module.read(batch, "train"))
        for guess in guesses:
            chosen = guess.learned(batch, prompts=learn)
            tokens = [
                [guess.first + place for place in row.nonzero()[:, 0].tolist()] for row in chosen
            ]
            assert tokens == [list(range(max(first, guess.first), length)) for length in (7, 5)]


def test_the_draft_says_what_the_training_texts_say_most_and_begins_with_the_targets_own_rows() -> (
    None
):
    module = training(draft_vocabulary=6)
    data = progressions()
    labels = [token for row in data.splits().train for token in row[3:]]
    counts = torch.tensor([labels.count(token) for token in range(VOCAB)])
    module.check_data(data)
    own = module.draft_vocabulary
    assert own is not None and sorted(counts[own.tokens].tolist()) == sorted(counts.tolist())[-6:]
    assert torch.equal(module.drafter.network.output.weight, target().output_weight[own.tokens])


def run(
    directory: Path, settings: dict[str, Any], keep: dict[str, Any], **options: Any
) -> tuple[EagleTraining, Trainer]:
    """Two epochs of eight steps, with checkpoints."""
    module = training(draft_vocabulary=9, warmup_steps=3, learning_rate=0.01, **settings)
    callback = ModelCheckpoint(directory, enable_version_counter=False, **keep)
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **QUIET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer.fit(module, datamodule=progressions(), **options)
    return module, trainer


def same_weights(one: EagleTraining, other: EagleTraining) -> bool:
    weights = other.drafter.state_dict()
    return all(
        torch.equal(weight, weights[name]) for name, weight in one.drafter.state_dict().items()
    )


@pytest.mark.parametrize(
    "settings", [{}, {"random_lengths": True, "optimizer": "muon", "attention_window": 4}]
)
def test_a_run_that_was_stopped_in_an_epoch_goes_on_in_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the middle of a step, which is made again."""
    seen: list[list[int]] = []

    class Watched(EagleTraining):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            seen.append(batch.indices.tolist())
            if stop == len(seen):
                raise RuntimeError("stopped")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(sys.modules[__name__], "EagleTraining", Watched)
    keep, stop = {"filename": "last", "save_on_exception": True}, 0
    whole, _ = run(tmp_path, settings, keep)
    order = list(seen)
    seen.clear()
    stop = 12
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, settings, keep)
    before, stop = list(seen), 0
    seen.clear()
    resumed, _ = run(
        tmp_path, settings, keep, ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True
    )
    assert len(order) == 2 * 8 and before[:-1] + seen == order and same_weights(whole, resumed)


def test_rollouts_of_random_lengths_have_the_whole_ones_loss_on_average() -> None:
    whole, random = (training(position_decay=0.5, random_lengths=each) for each in (False, True))
    lengths = [random.rollout_length(number) for number in range(4000)]
    for guess, share in enumerate((1.0, 0.5, 0.25)):
        assert abs(sum(length > guess for length in lengths) / len(lengths) - share) < 0.04
        counted = [
            random.loss_weights(length)[guess] if length > guess else 0.0 for length in lengths
        ]
        assert sum(counted) / len(counted) == pytest.approx(whole.loss_weights(3)[guess], abs=0.03)
    assert (
        {whole.rollout_length(number) for number in range(9)}
        == {random.eval().rollout_length(0)}
        == {3}
    )


def test_the_drafts_tokens_are_those_of_its_checkpoint_whatever_the_data(tmp_path: Path) -> None:
    made, trainer = run(tmp_path, {}, {"filename": "last"})
    other = training(draft_vocabulary=9)
    trainer.test(
        other, datamodule=progressions(seed=5), ckpt_path=str(tmp_path / "last.ckpt"), verbose=False
    )
    assert made.draft_vocabulary is not None and other.draft_vocabulary is not None
    assert made.draft_vocabulary.arguments() == other.draft_vocabulary.arguments()
    trained = other.drafter.network.output.weight.clone()
    other.check_data(progressions(seed=6))
    assert torch.equal(other.drafter.network.output.weight, trained), (
        "other data begin nothing anew"
    )


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must be adamw or muon, got 'sgd'"):
        training(optimizer="sgd")
    head = ExitHeadTraining(target(), exit_layer=1, num_blocks=0, optimizer="muon")
    with pytest.raises(ValueError, match="this draft trains none: give adamw"):
        head.configure_optimizers()


LOSSES: list[DraftLoss] = [CrossEntropy(), ForwardKL(), TotalVariation()]


def random_case(num_unsaid: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the target's log probabilities and labels of 12 places; some labels are `IGNORED`.

    Args:
        num_unsaid: tokens of the target that the draft cannot say.
    """
    generator = torch.Generator().manual_seed(0)
    draft, target = (
        torch.randn(12, 9, generator=generator),
        torch.randn(12, 9 + num_unsaid, generator=generator),
    )
    labels = torch.randint(9, (12,), generator=generator)
    labels[::3] = IGNORED
    return 2 * draft, (2 * target).log_softmax(-1)[:, :9], labels


def made(
    loss: DraftLoss, logits: Tensor, log_probs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    values = loss(logits, log_probs, labels)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


@pytest.mark.parametrize("num_unsaid", [0, 5])
def test_each_loss_is_its_formula(num_unsaid: int) -> None:
    logits, log_probs, labels = random_case(num_unsaid)
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(CrossEntropy()(logits, log_probs, labels), wanted)
    probs = log_probs.exp()
    wanted = (
        functional.kl_div(logits.log_softmax(-1), probs, reduction="none").sum(-1)
        + 1
        - probs.sum(-1)
    )
    torch.testing.assert_close(ForwardKL()(logits, log_probs, labels), wanted)
    wanted = 1 - overlap(logits.softmax(-1)[None], probs[None])[0]
    torch.testing.assert_close(TotalVariation()(logits, log_probs, labels), wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_numbers_make_it_none(loss: DraftLoss) -> None:
    """Tokens that neither says, a target that says none of the draft's, logits as far apart as they can be."""
    never, most = -torch.inf, torch.finfo(torch.float32).max
    logits = torch.tensor(
        [[0.0, never, 1.0], [0.0, 1.0, 2.0], [most, -most, 0.0], [-most, -most, 0.0]]
    )
    log_probs = torch.tensor(
        [[0.0, never, never], [never] * 3, [never, 0.0, never], [-300.0, -200.0, 0.0]]
    )
    values, gradient = made(loss, logits, log_probs, torch.tensor([0, IGNORED, 0, 2]))
    assert not values.isnan().any() and not gradient.isnan().any()


def test_a_yaml_names_a_loss() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=DraftLoss)
    assert isinstance(
        parser.instantiate(parser.parse_args(["--loss", "TotalVariation"])).loss, TotalVariation
    )

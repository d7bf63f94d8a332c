"""A user's class that returns the wrong thing is named in one line: expected, got, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cli_fixtures import call, ckpt, here, refused, shipped_run
from families import tiny
from torch import Tensor
from training_fixtures import RNN_CONFIG
from transformers import StoppingCriteria

import lightning_specdec
from lightning_specdec import AcceptanceRule, Draft, Drafter, SpeculativeDecoder
from lightning_specdec.data import Batch
from lightning_specdec.drafters import NGramDrafter, NGramWithFallback
from lightning_specdec.rules import Verdict
from lightning_specdec.training import DraftLoss

__all__ = ["ckpt", "here", "shipped_run"]

PROMPTS = [[1, 2, 3], [4, 5]]
VOCAB_SIZE = cases.target("rnn").vocab_size


def tokens(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


class Wrong(Drafter):
    """Returns what a test gave it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def propose(self, state: Any, request: Any, windows: Any, sampling: Any) -> Draft:
        return self.answer


NESTED_LIST: Any = [[1], [2]]
DRAFTS: dict[str, tuple[Any, str]] = {
    "list": ([[1], [2]], "must return a Draft, got a value of type list"),
    "none": (None, "must return a Draft, got None"),
    "nested list": (Draft(NESTED_LIST), "integers [B, K] with B = 2, got a value of type list"),
    "floats": (Draft(torch.ones(2, 1)), "got Tensor [2, 1] of torch.float32"),
    "one row": (Draft(tokens([1, 2])), "with B = 2, got Tensor [1, 2]"),
    "flat": (Draft(torch.tensor([1, 2])), "got Tensor [2] of torch.int64"),
    "too many": (Draft(tokens([1] * 4, [1] * 4)), "4 draft tokens for each row, and up to 3"),
    "lengths": (Draft(tokens([1], [2]), torch.tensor([1])), "lengths as None or a tensor [2]"),
    "too long": (Draft(tokens([1], [2]), torch.tensor([1, 2])), "the length 2 for row 1"),
    "probs": (Draft(tokens([1], [2]), probs=torch.ones(2, 5)), "probs as None or a tensor [2, 1,"),
    "unknown token": (Draft(tokens([1], [1000000])), f"1000000 in row 1, and the target has the "
                      f"tokens 0 to {VOCAB_SIZE - 1}"),
    "negative token": (Draft(tokens([-1], [1])), "token -1 in row 0"),
}  # fmt: skip


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "after lookup"])
@pytest.mark.parametrize("answer, message", DRAFTS.values(), ids=DRAFTS)
def test_a_drafter_that_returns_the_wrong_thing_is_named(
    answer: Any,
    message: str,
    joined: bool,
) -> None:
    drafter: Drafter = Wrong(answer)
    if joined:
        # Lookup finds nothing in these prompts, so the other drafter is asked.
        drafter = NGramWithFallback(NGramDrafter(), drafter)
    decoder = SpeculativeDecoder(cases.target("rnn"), drafter)
    with pytest.raises(ValueError) as caught:
        decoder.decode(PROMPTS, max_new_tokens=4, num_draft_tokens=3)
    assert str(caught.value).startswith("test_user_classes.Wrong.propose ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_without_a_state_is_named() -> None:
    class Stateless(Wrong):
        def init_state(self, batch_size: int, max_length: int, context: Any = None) -> Any:
            return None

    decoder = SpeculativeDecoder(cases.target("rnn"), Stateless(Draft(tokens([1]))))
    with pytest.raises(ValueError, match=r"Stateless.init_state must return a DraftState, got N"):
        decoder.decode([1, 2], max_new_tokens=2)


VERDICTS: dict[str, tuple[Callable[[Verdict], Any], str]] = {
    "none": (lambda verdict: None, "must return a Verdict, got None"),
    "tuple": (lambda verdict: (verdict.accepted,), "must return a Verdict, got a value of type tu"),
    "accepted": (
        lambda verdict: Verdict(verdict.accepted[:, :-1], verdict.endings),
        "accepted as booleans [1, 3], got Tensor [1, 2] of torch.bool",
    ),
    "endings": (
        lambda verdict: Verdict(verdict.accepted, verdict.endings[:, 1:]),
        "endings as integers [1, 4], got Tensor [1, 3]",
    ),
    "probabilities": (
        lambda verdict: Verdict(verdict.accepted, verdict.endings.float()),
        "endings as integers [1, 4], got Tensor [1, 4] of torch.float32",
    ),
    "unknown token": (
        lambda verdict: Verdict(verdict.accepted, verdict.endings + 1000),
        f"and the target has the tokens 0 to {VOCAB_SIZE - 1}",
    ),
}


@pytest.mark.parametrize("spoil, message", VERDICTS.values(), ids=VERDICTS)
def test_a_rule_that_returns_the_wrong_thing_is_named(
    spoil: Callable[[Verdict], Any], message: str
) -> None:
    class WrongRule(AcceptanceRule):
        lossless = True

        def judge(self, draft: Draft, target_logits: Tensor, sampling: Any, noise: Any) -> Any:
            accepted = torch.zeros_like(draft.tokens, dtype=torch.bool)
            return spoil(Verdict(accepted, target_logits.argmax(-1)))

    decoder = SpeculativeDecoder(cases.target("rnn"), Wrong(Draft(tokens([1, 2, 3]))))
    with pytest.raises(ValueError) as caught:
        decoder.decode([1, 2], max_new_tokens=4, rule=WrongRule())
    assert "WrongRule.judge " in str(caught.value)
    assert message in str(caught.value)


def test_a_processor_that_returns_the_wrong_thing_is_named() -> None:
    def forgetful(prefix: Tensor, scores: Tensor) -> Any:
        scores[0, 0] = 0.0

    decoder = SpeculativeDecoder(cases.target("rnn"))
    expected = rf"processor .*forgetful must return scores \[1, {VOCAB_SIZE}\], got None"
    with pytest.raises(ValueError, match=expected):
        decoder.decode([1, 2], max_new_tokens=2, processors=[forgetful])


class ReadsScores(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return scores.max() > 0


class ReturnsText(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return "yes"


@pytest.mark.parametrize(
    "criterion, message",
    [
        (ReadsScores(), "criterion ReadsScores reads `scores`, which speculative decoding does no"),
        (ReturnsText(), "criterion ReturnsText must return a boolean or a tensor of them, got a v"),
    ],
    ids=["scores", "text"],
)
def test_a_stopping_criterion_that_cannot_work_is_named(criterion: Any, message: str) -> None:
    model: Any = tiny("qwen2", 3, vocab_size=80)
    options: dict[str, Any] = {"attention_mask": torch.ones(1, 3), "max_new_tokens": 3}
    with pytest.raises(ValueError) as caught:
        model.generate(
            torch.tensor([[4, 8, 15]]),
            stopping_criteria=[criterion],
            custom_generate=lightning_specdec.generate,
            **options,
        )
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"]
)
def test_an_output_that_is_not_kept_is_refused_also_without_a_dictionary(name: str) -> None:
    model: Any = tiny("qwen2", 3, vocab_size=80)
    options = {"max_new_tokens": 3, name: True}
    with pytest.raises(ValueError, match=f"does not support {name}"):
        model.generate(
            torch.tensor([[4, 8, 15]]), custom_generate=lightning_specdec.generate, **options
        )


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"text": 1}, "must be integer tokens [B, T], or have them as `tokens`, got a value of ty"),
        ({"tokens": torch.ones(2, 3)}, "got tokens as Tensor [2, 3] of torch.float32"),
        (torch.tensor([1, 2]), "got tokens as Tensor [2] of torch.int64"),
    ],
    ids=["no tokens", "floats", "flat"],
)
def test_a_batch_without_tokens_says_what_it_is(batch: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Batch.of(batch, origin="my_data.Counting")
    assert str(caught.value).startswith("a batch of my_data.Counting ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda log_draft: log_draft.mean(), r"for each position, \[4\], got Tensor \[\]"),
        (lambda log_draft: 0.5, r"for each position, \[4\], got 0.5"),
        (lambda log_draft: log_draft.detach().sum(-1), "differentiable by log_draft, got const"),
    ],
    ids=["mean", "number", "constant"],
)
def test_a_loss_that_returns_the_wrong_thing_is_named(answer: Any, message: str) -> None:
    class WrongLoss(DraftLoss):
        def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Any:
            return answer(log_draft)

    logits = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(ValueError, match=rf"WrongLoss.values must return .*{message}"):
        WrongLoss()(logits, logits.detach().log_softmax(-1), torch.arange(4))


FAILING_DRAFTER = """
from lightning_specdec import Drafter


class Failing(Drafter):
    def propose(self, state, request, windows, sampling):
        return request.texts[99]


class Listing(Drafter):
    def propose(self, state, request, windows, sampling):
        return [1, 2]
"""
OUTSIDE_DATA = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class Outside(LightningDataModule):
    def __init__(self, vocab_size: int = 12) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def train_dataloader(self):
        return DataLoader([{"tokens": torch.tensor([1, 2, self.vocab_size])}] * 4, batch_size=2)

    def val_dataloader(self):
        return self.train_dataloader()
"""


def test_the_command_line_names_the_users_line_and_debug_shows_the_traceback(
    ckpt: str, here: None
) -> None:
    Path("failing_drafter.py").write_text(FAILING_DRAFTER)
    command = ("decode", ckpt, "--max_new_tokens", "4", "--drafter")
    failing = call(*command, "failing_drafter.Failing")
    assert failing.code == 2
    assert failing.err.count("\n") == 1
    place = "failing_drafter.py, line 7, in propose: IndexError: list index out of range"
    assert place in failing.err
    assert "--debug shows the traceback" in failing.err

    refused(*command, "failing_drafter.Listing", message="Listing.propose must return a Draft")
    with pytest.raises(IndexError):
        call(*command, "failing_drafter.Failing", "--debug")


def test_tokens_of_a_users_data_outside_the_vocabulary_are_named(here: None) -> None:
    Path("outside_data.py").write_text(OUTSIDE_DATA)
    outcome = call(
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--data",
        "outside_data.Outside",
        "--trainer.accelerator",
        "cpu",
        "--trainer.max_epochs",
        "1",
    )
    assert outcome.code == 2, outcome.err
    expected = "outside_data.Outside has token 50, and the models have the tokens 0 to 49"
    assert expected in outcome.err

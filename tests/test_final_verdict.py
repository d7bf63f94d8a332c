"""Laws of the end of a run: the verdict is that of decoding, in the words of every other verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_records import cells_of, timed
from test_decode_callback import data, fit
from training_fixtures import TrainedRun
from training_fixtures import shipped_run as shipped_run

from lightning_specdec.bench.measure import compare_once
from lightning_specdec.bench.records import Comparison
from lightning_specdec.bench.verdict import draft_verdict
from lightning_specdec.models.adapters import Adapter
from lightning_specdec.models.safetensors_file import Origin
from lightning_specdec.training.final_verdict import final_verdict, next_command
from lightning_specdec.training.optimizers import TimeLimit


def comparison_of(standard_seconds: list[float], seconds: list[float]) -> Comparison:
    """48 tokens of each prompt, four in each round."""
    _, comparison = cells_of([timed(standard_seconds, "standard"), timed(seconds)])
    return comparison


def test_a_draft_pays_only_if_its_interval_says_so() -> None:
    faster = comparison_of([2.0, 2.1, 2.0], [1.0, 1.0, 1.0])
    assert faster.verdict.kind == "faster"
    assert draft_verdict(faster) == f"pays: {faster.verdict.text} with ngram, 4 draft tokens"


def test_what_a_draft_lacks_is_its_acceptance_length_over_its_speedup() -> None:
    """A round of four tokens takes as long as eight tokens: eight would break even."""
    slower = comparison_of([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert slower.needed_block_efficiency == pytest.approx(8.0)
    assert draft_verdict(slower) == (
        f"does not pay yet: {slower.verdict.text}: acceptance length 4.00, it needs 8.00 here"
    )


def test_without_a_proof_nothing_is_claimed() -> None:
    noisy = comparison_of([1.0, 4.0, 1.0], [1.0, 1.0, 4.0])
    assert noisy.verdict.kind == "too noisy"
    assert draft_verdict(noisy).startswith("not proven to pay: too noisy to tell: ")


def test_a_run_ends_with_the_verdict_of_decoding(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path)
    verdict = final_verdict(module, data(), trainer.callbacks)  # type: ignore[attr-defined]
    assert verdict.startswith(("pays: ", "does not pay yet: ", "not proven to pay: "))


def test_no_more_is_decoded_than_the_networks_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the length of the training texts, a draft predicts worse than in their like."""
    _, module = fit(tmp_path)
    rows = data().first_rows("val", 4)
    num_known_tokens = int((rows.lengths - rows.prompt_lengths).max())
    assert num_known_tokens < 32
    limits = []

    def noting(*arguments: Any, **options: Any) -> Any:
        limits.append(arguments[3].max_new_tokens)
        return compare_once(*arguments, **options)

    monkeypatch.setattr("lightning_specdec.training.final_verdict.compare_once", noting)
    final_verdict(module, data())
    assert limits == [num_known_tokens]


def test_a_run_of_given_minutes_may_be_trained_further(tmp_path: Path) -> None:
    _, module = fit(tmp_path)
    with_limit = final_verdict(module, data(), [TimeLimit(5.0)])
    advice = "; to train it further, repeat with --ckpt_path last and more --minutes"
    assert with_limit.endswith(advice) == (not with_limit.startswith("pays: "))
    assert advice not in final_verdict(module, data())


def test_a_draft_that_predicts_nothing_points_to_the_training_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = fit(tmp_path)
    monkeypatch.setattr(Comparison, "acceptance_rate", 0.0)
    assert "was the training text written by this target?" in final_verdict(module, data())


def test_the_next_command_names_the_run(tmp_path: Path) -> None:
    _, module = fit(tmp_path)
    assert next_command(module, "checkpoints/mine") == (
        "lightning_specdec sweep --ckpt checkpoints/mine"
    )

    module.target.origin = Origin("./llama", tmp_path)
    assert next_command(module, "checkpoints/mine") == (
        "lightning_specdec sweep --target ./llama --draft checkpoints/mine"
    )
    module.target.origin = Origin("./llama", tmp_path, Adapter("./tuned", tmp_path))
    assert next_command(module, "checkpoints/mine") == (
        "lightning_specdec sweep --target ./llama --adapter ./tuned --draft checkpoints/mine"
    )


def test_fit_prints_the_verdict_and_the_next_command(shipped_run: TrainedRun) -> None:
    assert "\nverdict: " in shipped_run.output
    assert "\nnext: lightning_specdec sweep --ckpt checkpoints/rnn\n" in shipped_run.output

"""Decodes a few held-out prompts during training, and logs how much speculation really saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_specdec.bench.measure import compare_once
from lightning_specdec.bench.pieces import PIECE_TOKENS
from lightning_specdec.bench.verdict import draft_verdict
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.data import TokenData
from lightning_specdec.decoding.results import RowResult
from lightning_specdec.text.tokenizer import Tokenizer, named_tokenizer
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import logged_step, tensorboards
from lightning_specdec.training.target_outputs import is_sharded

NUM_TIMED_TOKENS = 8
"""New tokens that are decoded to estimate how long a validation takes."""
WARM_UP_PROMPTS = 0.5
"""What a measurement decodes before it begins, in prompts."""
MEASURED = frozenset(("acceptance_rate", "block_efficiency"))
"""Metrics that are measured, and whose estimates are therefore renamed."""


class DecodeHeldOut(Callback):
    """Decodes validation prompts with and without the drafter, and logs the measurements.

    `val/acceptance_rate`, `val/block_efficiency` and `val/walltime_speedup` are measured, and the
    estimates from known texts are logged as `val/teacher_forced_acceptance_rate` and so on. They
    are logged before `ModelCheckpoint` runs, which can monitor them (`monitor:
    val/block_efficiency, mode: max`) if the target is already trained: two untrained networks agree
    all the time.

    `val/verdict` is the verdict on the speedup in words, and `val/walltime_speedup_low` and `_high`
    are the ends of its 95% interval. The texts are a table in TensorBoard (`val/samples`) and in
    samples.md next to it: prompt, standard, speculative. Accepted draft tokens are bold.

    Of several processes the first one decodes; all do if the target is sharded. The module decodes
    in evaluation mode, without mixed precision.

    Args:
        num_prompts: number of prompts, decoded one after the other.
        max_new_tokens: new tokens of each prompt.

    Attributes:
        verdict: of the last measurement, in a sentence.
        max_seconds: time of a validation after which no further prompt is begun; None for no limit.
            `TimeLimit` sets it in a run of a given time.
        prompt_seconds: time of a prompt by both methods, as estimated when the run started; None if
            it was not.
    """

    def __init__(self, *, num_prompts: int = 4, max_new_tokens: int = 32) -> None:
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        self.verdict = ""
        self.max_seconds: float | None = None
        self.prompt_seconds: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage in ("fit", "validate"):
            # Report unusable data before the run starts.
            self._prompts(trainer)
            cast("SpeculativeTraining", pl_module).measured = MEASURED

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast("SpeculativeTraining", pl_module)
        metrics: dict[str, float] = {}
        if trainer.is_global_zero or is_sharded(trainer):
            with torch.autocast(module.device.type, enabled=False):
                metrics = self._measure(trainer, module)
        metrics = trainer.strategy.broadcast(metrics, src=0)
        module.log_dict({f"val/{name}": value for name, value in metrics.items()}, sync_dist=True)

    def estimated_seconds(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """How long a validation will decode, measured on a few tokens of the first prompt."""
        module = cast("SpeculativeTraining", pl_module)
        if not (trainer.is_global_zero or is_sharded(trainer)):
            return 0.0
        prompts = self._prompts(trainer)[:1]
        num_tokens = min(NUM_TIMED_TOKENS, self.max_new_tokens)
        config = DecodingConfig(num_draft_tokens=module.num_draft_tokens, max_new_tokens=num_tokens)
        module.eval()
        with torch.autocast(module.device.type, enabled=False):
            measured = compare_once(
                module.target,
                module.drafter,
                prompts,
                config,
                # On a CPU, the first call takes little longer than the others.
                has_warm_up=module.device.type != "cpu",
            )
        module.train()

        self.prompt_seconds = 0.0
        for result in (measured.result, measured.standard_result):
            # Only the tokens after the first one are multiplied: the prompt is read once.
            token_seconds = result.rows[0].token_seconds or [result.seconds]
            later_seconds = result.seconds - token_seconds[0]
            factor = self.max_new_tokens / num_tokens
            self.prompt_seconds += token_seconds[0] + factor * later_seconds
        return (self.num_prompts + WARM_UP_PROMPTS) * self.prompt_seconds

    def num_affordable_tokens(self, max_seconds: float | None) -> int:
        """New tokens of a prompt for which so much time is enough, and at least a piece of them."""
        if max_seconds is None or not self.prompt_seconds:
            return self.max_new_tokens
        num_tokens = int(self.max_new_tokens * max_seconds / self.prompt_seconds)
        return min(self.max_new_tokens, max(PIECE_TOKENS, num_tokens))

    def _measure(self, trainer: Trainer, module: SpeculativeTraining) -> dict[str, float]:
        """Decode each prompt by both methods, which take turns after every few rounds."""
        config = DecodingConfig(
            num_draft_tokens=module.num_draft_tokens,
            max_new_tokens=self.num_affordable_tokens(self.max_seconds),
        )
        measured = compare_once(
            module.target,
            module.drafter,
            self._prompts(trainer),
            config,
            max_seconds=self.max_seconds,
        )
        comparison = measured.comparison
        self.verdict = draft_verdict(comparison)
        rows = zip(measured.standard_result.rows, measured.result.rows, strict=True)
        self._write_samples(trainer, list(rows), self.verdict)

        metrics = {
            "acceptance_rate": comparison.acceptance_rate or 0.0,
            "block_efficiency": comparison.block_efficiency or 1.0,
        }
        speedup = comparison.walltime_speedup
        if speedup is not None:
            metrics["walltime_speedup"] = speedup.value
            if speedup.ends is not None:
                metrics["walltime_speedup_low"], metrics["walltime_speedup_high"] = speedup.ends
        return metrics

    def _write_samples(
        self,
        trainer: Trainer,
        row_pairs: Sequence[tuple[RowResult, RowResult]],
        verdict: str,
    ) -> None:
        """Write the verdict, and the table of texts, a row for each prompt: standard and
        speculative decoding."""
        if not trainer.is_global_zero:
            return
        name = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokenizer = None if name is None else named_tokenizer(name)
        lines = ["| prompt | standard | speculative |", "|---|---|---|"]
        for standard, speculative in row_pairs:
            cells = [
                table_text(speculative.prompt, tokenizer),
                table_text(standard.tokens, tokenizer),
                marked_text(speculative, tokenizer),
            ]
            lines.append(f"| {' | '.join(cells)} |")

        for logger in tensorboards(trainer):
            logger.experiment.add_text("val/verdict", verdict, logged_step(trainer))
            logger.experiment.add_text("val/samples", "\n".join(lines), logged_step(trainer))
            Path(logger.log_dir, "samples.md").write_text("\n".join([*lines, ""]), encoding="utf-8")

    def _prompts(self, trainer: Trainer) -> list[list[int]]:
        """Prompts of the validation split: choosing by the test split would spoil the test."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenData):
            raise ValueError(
                f"DecodeHeldOut takes its prompts from a TokenData, got {type(data).__name__}: "
                "remove it"
            )
        return data.first_rows("val", self.num_prompts).prompts()


def table_text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Tokens as text for a Markdown table; their numbers without a tokenizer."""
    if tokenizer is None:
        text = " ".join(str(token) for token in tokens)
    else:
        text = tokenizer.decode(list(tokens))
    characters = []
    for character in text:
        if character == "\n":
            characters.append(" ↵ ")
        elif character.isalnum() or character == " ":
            characters.append(character)
        else:
            # An entity is neither Markdown nor HTML.
            characters.append(f"&#{ord(character)};")
    return "".join(characters)


def marked_text(row: RowResult, tokenizer: Tokenizer | None) -> str:
    """A speculative row's new tokens for a Markdown table, the accepted draft tokens in bold."""
    parts = []
    position = 0
    for decoded_round in row.rounds or []:
        accepted = row.tokens[position : position + decoded_round.num_accepted]
        position += len(accepted)
        if accepted:
            parts.append(f"<strong>{table_text(accepted, tokenizer)}</strong>")
        if decoded_round.next_token is not None and position < len(row.tokens):
            parts.append(table_text(row.tokens[position : position + 1], tokenizer))
            position += 1
    separator = " " if tokenizer is None else ""
    return separator.join(parts)

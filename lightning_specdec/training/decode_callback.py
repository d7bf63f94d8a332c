"""Decodes a few held-out prompts during training, and logs how much speculation really saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_specdec.config.checks import require_int
from lightning_specdec.data import TokenData
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.decoding.results import DecodeResult, RowResult, merge_results
from lightning_specdec.text.tokenizer import Tokenizer, named_tokenizer
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import logged_step, tensorboards
from lightning_specdec.training.target_outputs import is_sharded

NUM_TIMED_TOKENS = 8
"""New tokens that are decoded to estimate how long a validation takes."""
MEASURED = frozenset(("acceptance_rate", "block_efficiency"))
"""Metrics that are measured, and whose estimates are therefore renamed."""


class DecodeHeldOut(Callback):
    """Decodes validation prompts with and without the drafter, and logs the measurements.

    `val/acceptance_rate`, `val/block_efficiency` and `val/walltime_speedup` are measured, and the
    estimates from known texts are logged as `val/teacher_forced_acceptance_rate` and so on. They
    are logged before `ModelCheckpoint` runs, which can monitor them (`monitor:
    val/block_efficiency, mode: max`) if the target is already trained: two untrained networks agree
    all the time.

    The texts are a table in TensorBoard (`val/samples`) and in samples.md next to it: prompt,
    standard, speculative. Accepted draft tokens are bold.

    Of several processes the first one decodes; all do if the target is sharded. The module decodes
    in evaluation mode, without mixed precision.

    Args:
        num_prompts: number of prompts, decoded one after the other.
        max_new_tokens: new tokens of each prompt.
    """

    def __init__(self, *, num_prompts: int = 4, max_new_tokens: int = 32) -> None:
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)

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
        prompt = self._prompts(trainer)[0]
        num_tokens = min(NUM_TIMED_TOKENS, self.max_new_tokens)
        seconds = 0.0
        module.eval()
        with torch.autocast(module.device.type, enabled=False):
            # The first of the two only warms up.
            for _ in range(2):
                start = time.perf_counter()
                self._decode(module, prompt, num_tokens)
                seconds = time.perf_counter() - start
        module.train()
        return seconds * (self.num_prompts + 1) * self.max_new_tokens / num_tokens

    def _decode(
        self, module: SpeculativeTraining, prompt: list[int], max_new_tokens: int
    ) -> tuple[DecodeResult, DecodeResult]:
        """A prompt's speculative and standard results."""
        speculative = speculative_decode(
            module.target,
            module.drafter,
            [prompt],
            num_draft_tokens=module.num_draft_tokens,
            max_new_tokens=max_new_tokens,
        )
        standard = autoregressive_decode(module.target, [prompt], max_new_tokens=max_new_tokens)
        return speculative, standard

    def _measure(self, trainer: Trainer, module: SpeculativeTraining) -> dict[str, float]:
        """Decode each prompt by both methods in turn: a change in speed affects both."""
        prompts = self._prompts(trainer)
        speculative = []
        standard = []
        # The first prompt is decoded once more, to warm up.
        for prompt in (prompts[0], *prompts):
            speculative_result, standard_result = self._decode(module, prompt, self.max_new_tokens)
            speculative.append(speculative_result)
            standard.append(standard_result)
        del speculative[0], standard[0]

        row_pairs = []
        for standard_result, speculative_result in zip(standard, speculative, strict=True):
            row_pairs.append((standard_result.rows[0], speculative_result.rows[0]))
        self._write_samples(trainer, row_pairs)

        result = merge_results(speculative)
        standard_speed = merge_results(standard).tokens_per_second
        assert result.block_efficiency is not None
        return {
            "acceptance_rate": result.acceptance_rate or 0.0,
            "block_efficiency": result.block_efficiency,
            "walltime_speedup": result.tokens_per_second / standard_speed,
        }

    def _write_samples(
        self, trainer: Trainer, row_pairs: Sequence[tuple[RowResult, RowResult]]
    ) -> None:
        """Write the table of texts, a row for each prompt: standard and speculative decoding."""
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

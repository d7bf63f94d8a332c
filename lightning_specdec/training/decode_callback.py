"""Decodes a few held-out prompts while a run trains, and logs what speculation really saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_specdec.config.checks import require_int
from lightning_specdec.data import TokenData
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.decoding.results import RowResult, merge_results
from lightning_specdec.text.tokenizer import named_tokenizer
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import tensorboards
from lightning_specdec.training.target_outputs import is_sharded

MEASURED = frozenset(("acceptance_rate", "block_efficiency"))


class DecodeHeldOut(Callback):
    """Decodes prompts of the validation split with and without the module's drafter, and logs what was measured.

    `val/acceptance_rate` and `val/block_efficiency` are measured then, `val/walltime_speedup` is there, and estimates
    from known texts are logged as `val/teacher_forced_acceptance_rate` and so on. They are logged ahead of
    `ModelCheckpoint`, which can choose by them (`monitor: val/block_efficiency, mode: max`) where the target is trained
    already: two untrained networks agree all the time.

    The texts are a table in TensorBoard (`val/samples`) and in samples.md beside it: prompt, standard, speculative.
    Draft tokens that were kept are bold.

    Of several processes the first decodes; all do where the target is sharded. The module decodes in evaluation mode,
    without mixed precision.

    Args:
        num_prompts: how many prompts, one decoded after the other.
        max_new_tokens: new tokens of each.
    """

    def __init__(self, *, num_prompts: int = 4, max_new_tokens: int = 32) -> None:
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage in ("fit", "validate"):
            self._prompts(trainer)
            cast("SpeculativeTraining", pl_module).measured = MEASURED

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast("SpeculativeTraining", pl_module)
        values: dict[str, float] = {}
        if trainer.is_global_zero or is_sharded(trainer):
            with torch.autocast(module.device.type, enabled=False):
                values = self._measure(trainer, module)
        values = trainer.strategy.broadcast(values, src=0)
        module.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)

    def _measure(self, trainer: Trainer, module: SpeculativeTraining) -> dict[str, float]:
        """The figures by name: each prompt by itself, both methods in turn; the first once more beforehand, untimed."""
        given: Any = {"max_new_tokens": self.max_new_tokens}
        drafted, standard, prompts = [], [], self._prompts(trainer)
        pair, window = (module.target, module.drafter), module.num_draft_tokens
        for prompt in (prompts[0], *prompts):
            drafted.append(speculative_decode(*pair, [prompt], num_draft_tokens=window, **given))
            standard.append(autoregressive_decode(module.target, [prompt], **given))
        self._show(
            trainer,
            [
                (one.rows[0], two.rows[0])
                for one, two in zip(standard[1:], drafted[1:], strict=True)
            ],
        )
        result = merge_results(drafted[1:])
        assert result.block_efficiency is not None
        return {
            "acceptance_rate": result.acceptance_rate or 0.0,
            "block_efficiency": result.block_efficiency,
            "walltime_speedup": result.tokens_per_second
            / merge_results(standard[1:]).tokens_per_second,
        }

    def _show(self, trainer: Trainer, pairs: Sequence[tuple[RowResult, RowResult]]) -> None:
        name = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokenizer = None if name is None else named_tokenizer(name)

        def shown(tokens: Sequence[int]) -> str:
            text = (
                " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(list(tokens))
            )
            plain = (each if each.isalnum() or each == " " else f"&#{ord(each)};" for each in text)
            return "".join(plain).replace("&#10;", " ↵ ")

        lines = ["| prompt | standard | speculative |", "|---|---|---|"]
        for standard, drafted in pairs:
            parts, rest = [], list(drafted.tokens)
            for each in drafted.rounds or []:
                kept, own = (
                    rest[: each.num_accepted],
                    rest[each.num_accepted :][: each.next_token is not None],
                )
                parts += [f"<strong>{shown(kept)}</strong>"] * bool(kept) + [shown(own)] * bool(own)
                del rest[: len(kept) + len(own)]
            text = ("" if tokenizer else " ").join(parts)
            lines.append(f"| {shown(drafted.prompt)} | {shown(standard.tokens)} | {text} |")
        for logger in tensorboards(trainer) if trainer.is_global_zero else ():
            logger.experiment.add_text("val/samples", "\n".join(lines), trainer.global_step)
            Path(logger.log_dir, "samples.md").write_text("\n".join([*lines, ""]), encoding="utf-8")

    def _prompts(self, trainer: Trainer) -> list[list[int]]:
        """Prompts of the validation split: choosing by those of the test split would spoil the test."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenData):
            raise ValueError(
                f"DecodeHeldOut takes its prompts from a TokenData, got {type(data).__name__}: remove it"
            )
        return data.first_rows("val", self.num_prompts).prompts()

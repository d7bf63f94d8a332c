"""Decodes a few held-out prompts while a run trains, and logs what speculation really saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.data import TokenData
from lightning_specdec.decoding import RowResult, autoregressive_decode, speculative_decode
from lightning_specdec.decoding.results import merge_results
from lightning_specdec.text.tokenizer import named_tokenizer
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import speculative, tensorboards

MEASURED = ("acceptance_rate", "block_efficiency")


class DecodeHeldOut(Callback):
    """Decodes prompts of the validation split with and without the module's drafter, and logs what was measured.

    `val/acceptance_rate` and `val/block_efficiency` are measured then, `val/walltime_speedup` is there, and estimates
    from known texts are logged as `val/teacher_forced_acceptance_rate` and so on. They are logged ahead of
    `ModelCheckpoint`, which can choose by them (`monitor: val/block_efficiency, mode: max`) where the target is trained
    already: two untrained networks agree all the time.

    Of several processes the first decodes. The module decodes in evaluation mode, without mixed precision.

    Args:
        every_n_validations: the first validation is measured, and each n-th after it, and the run's last.
        num_prompts: how many prompts, one decoded after the other.
        max_new_tokens: new tokens of each.
        num_draft_tokens: draft tokens of a round; the module's own when None.
        temperature: measure rejection sampling at this temperature too, as `val/sampling_...`; greedy alone when None.
        num_shown: how many of the prompts are shown in TensorBoard's text tab.
    """

    def __init__(
        self,
        every_n_validations: int = 1,
        *,
        num_prompts: int = 4,
        max_new_tokens: int = 32,
        num_draft_tokens: int | None = None,
        temperature: float | None = None,
        num_shown: int = 2,
    ) -> None:
        self.every_n_validations = require_int("every_n_validations", every_n_validations, 1)
        self.num_prompts = require_int("num_prompts", num_prompts, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        window = num_draft_tokens
        self.num_draft_tokens = None if window is None else require_int("num_draft_tokens", window, 1)
        if temperature is not None:
            require_number("temperature", temperature, low=0.0, low_open=True)
        self.temperature = temperature
        self.num_shown = require_int("num_shown", num_shown, 0)
        self._num_validations = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        module = speculative(pl_module)
        longest = max(map(len, self._prompts(trainer)))
        for reader in (module.target, module.drafter):
            context = reader.max_positions
            if context is not None and longest + self.max_new_tokens > context:
                raise ValueError(
                    f"DecodeHeldOut decodes {longest} + {self.max_new_tokens} tokens, and the models read {context}: "
                    "lower its max_new_tokens"
                )
        sampled = () if self.temperature is None else tuple(f"sampling_{name}" for name in MEASURED)
        module.measured = frozenset((*MEASURED, *sampled))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        due = self._num_validations % self.every_n_validations == 0 or _is_last(trainer)
        self._num_validations += 1
        if not due:
            return
        module = speculative(pl_module)
        values: dict[str, float] = {}
        if trainer.is_global_zero:
            with decoding_mode(module):
                values = self._measure(trainer, module, {}, shown=True)
                if self.temperature is not None:
                    changes = {"temperature": self.temperature, "rule": "RejectionSampling"}
                    sampled = self._measure(trainer, module, changes)
                    values |= {f"sampling_{name}": value for name, value in sampled.items()}
        values = trainer.strategy.broadcast(values, src=0)
        module.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)

    def _measure(
        self, trainer: Trainer, module: SpeculativeTraining, changes: dict[str, Any], *, shown: bool = False
    ) -> dict[str, float]:
        """The figures by name: each prompt by itself, both methods in turn; the first once more beforehand, untimed."""
        window = module.num_draft_tokens if self.num_draft_tokens is None else self.num_draft_tokens
        changes = {**changes, "max_new_tokens": self.max_new_tokens}
        standard, drafted, prompts = [], [], self._prompts(trainer)
        for index, prompt in enumerate((prompts[0], *prompts)):
            given: Any = {**changes, "indices": [max(0, index - 1)]}
            drafted.append(
                speculative_decode(module.target, module.drafter, [prompt], num_draft_tokens=window, **given)
            )
            given.pop("rule", None)
            standard.append(autoregressive_decode(module.target, [prompt], **given))
        result = merge_results(drafted[1:])
        if shown:
            self._show(trainer, result.rows[: self.num_shown])
        assert result.block_efficiency is not None
        return {
            "acceptance_rate": result.acceptance_rate or 0.0,
            "block_efficiency": result.block_efficiency,
            "walltime_speedup": result.tokens_per_second / merge_results(standard[1:]).tokens_per_second,
        }

    def _show(self, trainer: Trainer, rows: Sequence[RowResult]) -> None:
        """Rows in TensorBoard's text tab."""
        name = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        decode = None if name is None else named_tokenizer(name).decode
        spell = numbered if decode is None else lambda tokens: visible(decode(tokens))
        texts = [f"{i + 1}. {as_markdown(row, spell)}" for i, row in enumerate(rows)]
        for logger in tensorboards(trainer) if texts else ():
            logger.experiment.add_text("val/decoded", "\n".join((*texts, "", LEGEND)), trainer.global_step)

    def _prompts(self, trainer: Trainer) -> list[list[int]]:
        """Prompts of the validation split: choosing by those of the test split would spoil the test."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenData):
            raise ValueError(f"DecodeHeldOut takes its prompts from a TokenData, got {type(data).__name__}: remove it")
        return data.first_rows("val", self.num_prompts).prompts()


@contextmanager
def decoding_mode(module: SpeculativeTraining) -> Iterator[None]:
    """While it lasts the module decodes as its checkpoint will; after it, every part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.autocast(module.device.type, enabled=False):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def numbered(tokens: Sequence[int]) -> str:
    """Tokens that are no text, as numbers."""
    return " ".join(map(str, tokens))


def visible(text: str) -> str:
    """Text in one line, whose spaces can be seen at the ends of a piece too."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


def as_markdown(row: RowResult, spell: Callable[[Sequence[int]], str] = numbered) -> str:
    """A row as Markdown: the prompt, then for each round the draft tokens and the token that the target added."""
    pieces = [f"{_code(spell(row.prompt))} →"]
    for each in row.rounds or []:
        kept, rest = each.drafted[: each.num_accepted], each.drafted[each.num_accepted :]
        pieces += [_code(spell(kept))] if kept else []
        pieces += [f"x{_code(spell(rest))}"] if rest else []
        own = "=" if rest else "+"
        pieces += [] if each.next_token is None else [f"{own}{_code(spell([each.next_token]))}"]
    return " ".join(pieces)


def _code(text: str) -> str:
    """A piece of text in a box; characters that Markdown could interpret are written by number."""
    shown = "".join(letter if letter.isalnum() or letter == " " else f"&#{ord(letter)};" for letter in text)
    return f"<code>{shown}</code>"


LEGEND = (
    f"{_code('7')} accepted draft token, x{_code('7')} rejected ones, ={_code('7')} the target's instead, "
    f"+{_code('7')} the target's behind accepted ones"
)


def _is_last(trainer: Trainer) -> bool:
    """Whether the run ends with this epoch, as far as can be known by now."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    over = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return over or (steps != -1 and trainer.global_step >= steps)

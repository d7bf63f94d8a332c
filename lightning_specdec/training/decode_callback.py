"""Decodes a few held-out prompts while a run trains: what speculation really saves, and what it kept and rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import TokenData
from lightning_specdec.decoding import Decoding
from lightning_specdec.inference import DecodeResult, RowResult
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.results import merge_results
from lightning_specdec.rules import ExactMatch, RejectionSampling, SamplingOptions
from lightning_specdec.text.named import named_tokenizer
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import speculative

GREEDY = ("acceptance_rate", "block_efficiency")


class DecodeHeldOut(Callback):
    """Decodes prompts of the validation split both ways, the module's drafter guessing, and logs what was measured.

    Theory: read off known texts, the metrics of speculation are exact where the text is what the target itself would
    write, and an estimate elsewhere; and no metric knows what a guess costs. Decoding does. With this callback
    `val/acceptance_rate` and `val/block_efficiency` are the measured ones, the estimates go under
    `val/teacher_forced_acceptance_rate` and so on, and `val/walltime_speedup` is there. They are logged ahead of
    `ModelCheckpoint`, which can choose the checkpoint by them (`monitor: val/block_efficiency, mode: max`). Two
    networks that know nothing agree all the time, so that choice is for a target that is trained already.
    The prompts are those of validation: choosing by those of the test split would spoil the test.

    Of several processes the first decodes and tells the others. The module decodes in evaluation mode, without mixed
    precision, as its checkpoint will, and is left in the mode that it was in.

    Args:
        every_n_validations: the first validation is measured, and each n-th after it, and the run's last.
        num_prompts: how many prompts, one decoded after the other.
        max_new_tokens: new tokens of each.
        num_draft_tokens: guesses of a round; the module's own when None.
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
        self.num_draft_tokens = (
            None if num_draft_tokens is None else require_int("num_draft_tokens", num_draft_tokens, 1)
        )
        self.temperature = (
            None if temperature is None else require_number("temperature", temperature, low=0.0, low_open=True)
        )
        self.num_shown = require_int("num_shown", num_shown, 0)
        self._num_validations = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        module = speculative(pl_module)
        for prompt in self._prompts(trainer):  # which may be too long: better now than after an epoch
            check_context(len(prompt), self.max_new_tokens, module.target, module.drafter)
        sampled = () if self.temperature is None else tuple(f"sampling_{name}" for name in GREEDY)
        module.measured = frozenset((*GREEDY, *sampled))

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
                values = self._measure(trainer, module)
        values = trainer.strategy.broadcast(values, src=0)
        module.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)

    def _measure(self, trainer: Trainer, module: SpeculativeTraining) -> dict[str, float]:
        """The figures by name, greedy and sampled; the texts are shown."""
        prompts, decoder = self._prompts(trainer), Decoding(module.target, module.drafter)
        window = module.num_draft_tokens if self.num_draft_tokens is None else self.num_draft_tokens
        standard, guessed = self._decode(decoder, prompts, window, {})
        values = _figures(standard, guessed)
        self._show(trainer, guessed)
        if self.temperature is not None:
            sampled = self._decode(decoder, prompts, window, SamplingOptions(temperature=self.temperature))
            values |= {f"sampling_{name}": value for name, value in _figures(*sampled).items()}
        return values

    def _decode(
        self, decoder: Decoding, prompts: Sequence[Sequence[int]], window: int, sampling: SamplingOptions
    ) -> tuple[DecodeResult, DecodeResult]:
        """Each prompt by itself, standard and speculative in turn; the first of all once more beforehand, untimed."""
        rule = RejectionSampling() if sampling else ExactMatch()
        standard, guessed = [], []
        for index, prompt in enumerate((prompts[0], *prompts)):
            number = [max(0, index - 1)]
            standard.append(
                decoder.decode_standard([prompt], max_new_tokens=self.max_new_tokens, indices=number, **sampling)
            )
            guessed.append(
                decoder.decode(
                    [prompt],
                    max_new_tokens=self.max_new_tokens,
                    num_draft_tokens=window,
                    rule=rule,
                    indices=number,
                    **sampling,
                )
            )
        return merge_results(standard[1:]), merge_results(guessed[1:])

    def _show(self, trainer: Trainer, result: DecodeResult) -> None:
        """The first texts in TensorBoard's text tab."""
        name = _data(trainer).tokenizer
        if name is None:
            spelt = numbered
        else:
            decode = named_tokenizer(name).decode

            def spelt(tokens: Sequence[int]) -> str:
                return visible(decode(tokens))

        texts = [f"{i + 1}. {as_markdown(row, spelt)}" for i, row in enumerate(result.rows[: self.num_shown])]
        for logger in trainer.loggers:
            if texts and isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("val/decoded", "\n".join((*texts, "", LEGEND)), trainer.global_step)

    def _prompts(self, trainer: Trainer) -> list[list[int]]:
        """Prompts of the validation split, made anew: they are few, and cheap."""
        data = _data(trainer)
        rows = data.rows("val")
        return data.collate([rows[i] for i in range(min(self.num_prompts, len(rows)))]).prompts()


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


def as_markdown(row: RowResult, spelt: Callable[[Sequence[int]], str] = numbered) -> str:
    """A row as Markdown: the prompt, then round by round the kept guesses, the rejected one and those behind it, and
    the token that the target added, with the marks that decoding's report on a terminal has.

    Args:
        spelt: tokens as text.
    """
    pieces = [f"{_code(spelt(row.prompt))} →"]
    for each in row.rounds or []:
        kept, rest = each.drafted[: each.num_accepted], each.drafted[each.num_accepted :]
        pieces += [_code(spelt(kept))] if kept else []
        pieces += [f"x{_code(spelt(rest))}"] if rest else []
        own = "=" if rest else "+"
        pieces += [] if each.next_token is None else [f"{own}{_code(spelt([each.next_token]))}"]
    return " ".join(pieces)


def _code(text: str) -> str:
    """A piece of text as it is, in a box of its own.

    TensorBoard takes strikes out of Markdown and knows no emphasis that begins with a space, but it shows code; and
    what Markdown could take for its own is spelt by number.
    """
    shown = "".join(letter if letter.isalnum() or letter == " " else f"&#{ord(letter)};" for letter in text)
    return f"<code>{shown}</code>"


LEGEND = (
    f"{_code('7')} kept guess, x{_code('7')} rejected guesses, ={_code('7')} what the target wrote instead, "
    f"+{_code('7')} what it added behind kept ones"
)


def _figures(standard: DecodeResult, guessed: DecodeResult) -> dict[str, float]:
    """What a comparison of both ways came to."""
    assert guessed.block_efficiency is not None
    return {
        "acceptance_rate": guessed.acceptance_rate or 0.0,
        "block_efficiency": guessed.block_efficiency,
        "walltime_speedup": guessed.tokens_per_second / standard.tokens_per_second,
    }


def _data(trainer: Trainer) -> TokenData:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TokenData):
        raise ValueError(f"DecodeHeldOut takes its prompts from a TokenData, got {type(data).__name__}: remove it")
    return data


def _is_last(trainer: Trainer) -> bool:
    """Whether the run ends with this epoch, as far as can be known by now."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    over = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return over or (steps != -1 and trainer.global_step >= steps)

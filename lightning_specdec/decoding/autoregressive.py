"""Standard decoding, one target call for each token: the baseline of every benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.recorded import make_executor
from lightning_specdec.decoding.requests import (
    Prompts,
    Request,
    batch_size_for,
    check_batch,
    check_eos,
    check_switch,
    stops_of,
)
from lightning_specdec.decoding.results import DecodeInterrupted, DecodeResult
from lightning_specdec.decoding.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.drafters.layout import pad
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.models.threads import one_thread
from lightning_specdec.rules import Purpose, RowSampling, Sampling, noise_table

if TYPE_CHECKING:
    from jaxtyping import Float, Int

COMMIT_EVERY = 64
"""Target calls after which the state is committed, since it is never truncated here."""


@torch.inference_mode()
def autoregressive_decode(
    target: LanguageModel,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    *,
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> DecodeResult:
    """Decode token by token with the target only: the baseline of every comparison.

    It has every optimization of speculative decoding: one prefill for a ragged batch, states
    without padding, a batch that shrinks by powers of two as rows finish, recorded calls, and one
    read by the host per call.

    Args:
        target: the model to decode with.
        prompts: tokens of one prompt or of several, as of `SpeculativeDecoder.decode`.
        config: how to decode. `changes` are fields of `DecodingConfig` and win over it. Rule and
            window are not used.
        indices: the prompts' numbers; 0, 1, ... when None. A row's random numbers depend on seed
            and number only.

    Raises:
        ValueError: a setting or a prompt is wrong.
        DecodeInterrupted: on Ctrl-C; its `result` holds the tokens so far.
    """
    decoding = open_standard(target, prompts, config, indices=indices, **changes)
    num_tokens = sum(row.remaining for row in decoding.rows)
    try:
        with Activity("standard decoding", num_tokens, unit="tokens") as activity:
            num_new = 0
            while decoding.step():
                num_new_before = num_new
                num_new = sum(row.num_new for row in decoding.rows)
                activity.advance(num_new - num_new_before)
    except KeyboardInterrupt:
        raise DecodeInterrupted(decoding.result()) from None
    return decoding.result()


def open_standard(
    target: LanguageModel,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    *,
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> StandardDecoding:
    """Standard decoding of these prompts, ready for its first step.

    Arguments and errors are those of `autoregressive_decode`.
    """
    config = DecodingConfig.of(config, **changes)
    texts = check_batch(prompts, target, config, indices=indices)
    return StandardDecoding(target, texts, config)


class StandardDecoding:
    """A batch that is decoded token by token.

    Args:
        target: the model to decode with.
        texts: the prompts with their numbers.
        config: how to decode.
    """

    def __init__(
        self,
        target: LanguageModel,
        texts: Sequence[tuple[int, list[int]]],
        config: DecodingConfig,
    ) -> None:
        self.target = target
        self.config = config
        self.sampling = Sampling.of(config)
        self.device = target.device
        eos = check_eos(config.eos, target.vocab_size)
        self.sampling.check_rows(target, eos)
        stop = stops_of(config, target)
        self.rows = [
            Request(
                index,
                text,
                max_new_tokens=config.max_new_tokens,
                eos=eos,
                speculative=False,
                stop=stop,
                sampling=self.sampling.for_row(len(text), target, eos),
            )
            for index, text in texts
        ]
        self.batch_rows = self.rows
        """Rows that are still decoded, and ended ones that fill up the batch."""
        # The call must not refer to this batch: what is recorded outlives it.
        self._draw_call = partial(_draw, self.sampling, target.vocab_size)
        self._draw_key = "choose", self.sampling
        self.timer = PhaseTimer(self.device)
        self.num_calls = 0
        self.num_live = len(self.rows)
        self._next_tokens: Tensor | None = None
        self._early_logits: Tensor | None = None

    @torch.inference_mode()
    def step(self) -> bool:
        """Generate the next token of each live row. Returns whether a row is still live."""
        if self.num_live == 0:
            return False
        logits = self._early_logits
        if self._next_tokens is None:
            logits = self.read_prompts()
        elif logits is None:
            logits = self.read(self._next_tokens)
        self.timer.lap("verify")

        next_tokens, reported = self.draw(logits)
        read_tokens = self.executor.begin_read(reported)
        early_logits = self.read_early(next_tokens)
        self.commit(read_tokens())
        if self.num_live:
            next_tokens, early_logits = self.shrink(next_tokens, early_logits)
        self._next_tokens = next_tokens
        self._early_logits = early_logits
        self.timer.lap("rest")
        return self.num_live > 0

    def read_prompts(self) -> Float[Tensor, "B V"]:
        """Read all prompts in one call. Returns the logits after their last tokens."""
        self.noise = self._make_noise()
        max_length = max(row.max_length for row in self.rows)
        self.state = self.target.init_state(len(self.rows), max_length)
        for row in self.rows:
            max_new_tokens = row.max_length - row.prompt_length
            check_switch(row.prompt_length, max_new_tokens, self.state.position_switch)
        self.executor = make_executor(self.state, self.target.vocab_size, self.timer)

        texts = [row.text for row in self.rows]
        tokens, lengths = pad(texts, self.device)
        last_positions: Tensor | slice = slice(-1, None)
        if lengths is not None:
            columns = [[length - 1] for length in lengths]
            last_positions = torch.tensor(columns, device=self.device)
        output = self.target(
            tokens,
            self.state,
            valid_lengths=lengths,
            logits_for=last_positions,
        )
        # The state is never truncated, so a recurrent one need not keep the states of the prompt.
        self.state.commit(self.state.consumed)
        return output.logits[:, -1]

    def _make_noise(self) -> Float[Tensor, "B S 3"] | None:
        """Each row's uniform numbers; None if nothing is drawn at random."""
        if self.sampling.greedy:
            return None
        seed = self.config.seed
        num_positions = self.config.max_new_tokens
        tables = [noise_table(seed, row.index, num_positions) for row in self.rows]
        return torch.stack(tables).to(self.device)

    def read(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Read one token of each row. Returns the logits after it."""
        return self.target(tokens[:, None], self.state).logits[:, -1]

    def read_early(self, next_tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"] | None:
        """Launch the next call before the host reads the tokens, so that the device never waits.

        Returns:
            Its logits; None if calls are not recorded, or if no row continues.
        """
        if not self.executor.is_recorded:
            return None
        if not any(row.live and row.remaining > 1 for row in self.batch_rows):
            return None
        self.timer.lap("accept")
        logits = self.read(next_tokens)
        self.timer.lap("verify")
        return logits

    def draw(self, logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, "B"], Tensor]:
        """Draw each row's next token.

        Returns:
            The tokens for the next call, and what the host reads: V for a row whose token could
                not be drawn, and with log probabilities a second line.
        """
        processed = logits
        if self.sampling.processors:
            texts = [row.text if row.live else None for row in self.batch_rows]
            sampling = RowSampling.of_rows([row.sampling for row in self.batch_rows])
            processed = sampling.process(logits[:, None], texts)[:, 0]
        uniform = None
        if self.noise is not None:
            uniform = self.noise[:, self.num_calls, Purpose.CORRECT]

        with one_thread(self.target.backend == "openvino"):
            next_tokens, reported = self.executor.run_into(
                "chosen", self._draw_key, self._draw_call, processed, uniform
            )
        assert next_tokens is not None
        assert reported is not None
        if self.config.logprobs:
            # float64 represents token ids exactly, so the host reads one tensor.
            logprobs = Sampling.log_probs(logits, next_tokens)
            reported = torch.stack((reported.double(), logprobs.double()))
        return next_tokens, reported

    def commit(self, values: list[Any]) -> None:
        """Add the tokens that the host has read to their rows."""
        tokens: list[int] = values
        logprobs: list[float] | None = None
        if self.config.logprobs:
            tokens = [int(token) for token in values[0]]
            logprobs = values[1]
        self.timer.lap("accept")

        self.num_calls += 1
        seconds = self.timer.elapsed()
        num_ended = 0
        for i, row in enumerate(self.batch_rows):
            if tokens[i] >= self.target.vocab_size:
                row.fail()
            elif row.live:
                row_logprobs = None if logprobs is None else logprobs[i : i + 1]
                row.append(tokens[i : i + 1], seconds, row_logprobs)
            if not row.live:
                num_ended += 1
        self.num_live = len(self.batch_rows) - num_ended

    def shrink(
        self,
        next_tokens: Int[Tensor, "B"],
        early_logits: Float[Tensor, "B V"] | None,
    ) -> tuple[Int[Tensor, "_"], Float[Tensor, "_ V"] | None]:
        """Drop ended rows if the live ones fit into a smaller batch.

        Returns the arguments of those that stay.
        """
        size = batch_size_for(self.num_live, self.state)
        if size < len(self.batch_rows):
            live_slots = [slot for slot, row in enumerate(self.batch_rows) if row.live]
            ended_slots = [slot for slot, row in enumerate(self.batch_rows) if not row.live]
            num_ended = size - self.num_live
            slots = live_slots + ended_slots[:num_ended]
            self.state.select(slots)
            self.batch_rows = [self.batch_rows[slot] for slot in slots]

            index = torch.tensor(slots, device=self.device)
            next_tokens = next_tokens[index]
            if self.noise is not None:
                self.noise = self.noise[index]
            if early_logits is not None:
                early_logits = early_logits[index]
        if self.num_calls % COMMIT_EVERY == 0:
            self.state.commit(self.state.consumed)
        return next_tokens, early_logits

    def result(self) -> DecodeResult:
        """The result so far."""
        return DecodeResult(
            rows=[row.result() for row in self.rows],
            seconds=self.timer.elapsed(),
            phase_seconds=self.timer.seconds(),
            num_target_calls=self.num_calls,
            peak_memory_bytes=peak_memory_bytes(self.device),
            lossless=self.target.lossy_reason is None,
            lossy_reason=self.target.lossy_reason,
        )


def _draw(
    sampling: Sampling,
    vocab_size: int,
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, "B"] | None,
) -> Outputs:
    """The next tokens to read, and what to report: V where no token could be drawn."""
    next_tokens = sampling.sample(logits, uniform)
    reported = sampling.mark_failed(next_tokens, logits)
    # A failed row stays in the batch until it is removed, so the target needs a valid token to
    # read.
    return next_tokens.clamp(max=vocab_size - 1), reported

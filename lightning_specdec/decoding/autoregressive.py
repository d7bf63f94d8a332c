"""Standard decoding, one target call for each token: the oracle of the tests and the baseline of every benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding.results import DecodeInterrupted, DecodeResult
from lightning_specdec.decoding.rows import (
    Prompts,
    Row,
    check_batch,
    check_eos,
    flag_undrawable,
    power_of_two,
    stops_of,
)
from lightning_specdec.decoding.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.drafters.layout import pad, with_draft_tokens
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.base import one_thread
from lightning_specdec.models.graphs import begin_read
from lightning_specdec.rules import Purpose, Sampling, noise_table

COMMIT_EVERY = 64
"""Tokens after which the states forget the way back, which is never taken here."""


@torch.inference_mode()
def autoregressive_decode(
    target: LanguageModel,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    *,
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> DecodeResult:
    """Decode token by token with the target alone: the baseline of every comparison.

    It has every optimization of speculative decoding: one prefill for a ragged batch, states without padding, a batch
    that shrinks by powers of two as rows finish, and one read by the host per call.

    Args:
        target: the model to decode with.
        prompts: tokens of one prompt or of several, as of `SpeculativeDecoder.decode`.
        config: how to decode. `changes` are fields of `DecodingConfig` and win over it. Rule and window are not used.
        indices: the prompts' numbers; 0, 1, ... when None. A row's random numbers depend on seed and number only.

    Raises:
        ValueError: a setting or a prompt is wrong.
        DecodeInterrupted: on Ctrl-C; its `result` holds the tokens so far.
    """
    config = DecodingConfig.of(config, **changes)
    sampling = Sampling.of(config)
    device, num_new, eos = (
        target.device,
        config.max_new_tokens,
        check_eos(config.eos, target.vocab_size),
    )
    stop = stops_of(config, target)
    rows = [
        Row(number, text, max_new_tokens=num_new, eos=eos, speculative=False, stop=stop)
        for number, text in check_batch(prompts, target, config, indices=indices)
    ]
    timer, num_calls, live = PhaseTimer(device), 0, rows

    def choose(
        logits: Tensor, uniform: Tensor | None, place: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with one_thread(target.backend == "openvino"):
            chosen = sampling.sample(logits, uniform)
        told = (
            flag_undrawable(chosen, logits) if sampling.greedy else chosen
        )  # a draw finds out by itself
        chosen = chosen.clamp(max=target.vocab_size - 1)  # the row is still read: any token will do
        return chosen if place is None else place.copy_(chosen), told

    def result() -> DecodeResult:
        answers = [row.result() for row in rows]
        return DecodeResult(
            answers,
            timer.elapsed(),
            timer.seconds(),
            num_calls,
            peak_memory_bytes(device),
            lossless=target.lossy_reason is None,
            lossy_reason=target.lossy_reason,
        )

    try:
        noise: Tensor | None = None
        if not sampling.greedy:
            noise = torch.stack([noise_table(config.seed, row.index, num_new) for row in rows]).to(
                device
            )
        state = target.init_state(len(rows), max(row.max_length for row in rows))
        nothing = torch.empty(len(rows), 0, dtype=torch.long, device=device)
        tokens, valid_lengths, last = with_draft_tokens(
            *pad([row.text for row in rows], device), nothing
        )
        logits = target(tokens, state, valid_lengths=valid_lengths, logits_for=last).logits[:, -1]
        state.commit(
            state.consumed
        )  # nothing goes back: a recurrent state need not carry the prompt along
        while True:
            timer.lap("verify")
            processed = logits
            if sampling.processors:
                texts = [row.text if row.live else None for row in live]
                processed = sampling.process(logits[:, None], texts)[:, 0]
            uniform = None if noise is None else noise[:, num_calls, Purpose.CORRECT]
            if (graphs := getattr(state, "graphs", None)) is None:
                chosen, told = choose(processed, uniform)
            else:
                # To one place, so that the call that reads it is recorded once.
                place = graphs.buffer("chosen", (len(live),), torch.long)
                chosen, told = graphs.run(("choose", sampling), choose, processed, uniform, place)
            if config.logprobs:  # float64 holds the tokens beside them exactly: the host reads once
                told = torch.stack((told.double(), Sampling.log_probs(logits, chosen).double()))
            read, ahead = told.tolist if graphs is None else begin_read(told), None
            if graphs is not None and any(
                row.live and row.remaining > 1 for row in live
            ):  # before the host reads
                timer.lap("accept")
                ahead = target(chosen[:, None], state).logits[:, -1]
                timer.lap("verify")
            values, scores = read(), None
            if config.logprobs:
                values, scores = [int(token) for token in values[0]], values[1]
            timer.lap("accept")
            num_calls, seconds = num_calls + 1, timer.elapsed()
            for i, row in enumerate(live):
                if values[i] >= target.vocab_size:
                    row.fail()
                elif row.live:
                    row.append(values[i : i + 1], seconds, scores and scores[i : i + 1])
            kept = [i for i, row in enumerate(live) if row.live]
            if not kept:
                break
            if (size := power_of_two(len(kept))) < len(live):
                kept += [i for i, row in enumerate(live) if not row.live][: size - len(kept)]
                index = torch.tensor(kept, device=device)
                state.select(kept)
                live, chosen = [live[i] for i in kept], chosen[index]
                noise, ahead = (None if each is None else each[index] for each in (noise, ahead))
            if num_calls % COMMIT_EVERY == 0:
                state.commit(state.consumed)
            timer.lap("rest")
            logits = target(chosen[:, None], state).logits[:, -1] if ahead is None else ahead
    except KeyboardInterrupt:
        raise DecodeInterrupted(result()) from None
    timer.lap("rest")
    return result()

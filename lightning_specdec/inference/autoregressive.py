"""Standard decoding: one target call for each token.

The oracle of the tests and the baseline of every benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.layout import pad
from lightning_specdec.inference.limits import check_context, flag_undrawable
from lightning_specdec.inference.results import DecodeInterrupted, DecodeResult
from lightning_specdec.inference.rows import Prompts, Row, check_batch, check_drawn, check_eos, power_of_two
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Purpose, Sampling, noise_table

COMMIT_EVERY = 64
"""Tokens after which the states forget the way back, which nobody will go."""


@torch.inference_mode()
def autoregressive_decode(
    target: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    logprobs: bool = False,
    stop: StopStrings | None = None,
) -> DecodeResult:
    """Generate token by token with the target alone.

    Theory: what speculative decoding must reproduce and beat. It gets what that gets: one prefill for a ragged batch,
    states without padding, a batch that shrinks by powers of two as rows finish, one read by the host per call.

    Args:
        prompts: tokens of one prompt, of several, or a tensor `[T]` or `[B, T]`.
        max_new_tokens: new tokens of each row at most.
        sampling: greedy when None.
        eos: tokens that stop a row; kept in the output.
        seed: keys the noise, together with the prompt's index.
        indices: the prompts' numbers; 0, 1, ... when None.
        logprobs: whether each token's log probability is wanted.
        stop: strings that stop a row.
    """
    sampling, device = sampling or Sampling(), target.device
    stops, seed = check_eos(eos, target.vocab_size), require_int("seed", seed, 0, 2**63 - 1)
    rows = [
        Row(number, text, max_new_tokens=max_new_tokens, eos=stops, speculative=False, stop=stop)
        for number, text in check_batch(prompts, target.vocab_size, max_new_tokens=max_new_tokens, indices=indices)
    ]
    for row in rows:
        check_context(row.prompt_length, max_new_tokens, target)
    timer, num_calls, live = PhaseTimer(device), 0, rows

    def choose(logits: torch.Tensor, uniform: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = sampling.sample(logits, uniform)
        return chosen, flag_undrawable(chosen, logits) if sampling.greedy else chosen  # a draw has found it out already

    try:
        noise: torch.Tensor | None = None
        if not sampling.greedy:
            noise = torch.stack([noise_table(seed, row.index, max_new_tokens) for row in rows]).to(device)
        state = target.init_state(len(rows), max(row.max_length for row in rows))
        tokens, valid_lengths = pad([row.text for row in rows], device)
        last: torch.Tensor | slice = slice(-1, None)
        if valid_lengths is not None:
            last = torch.tensor([[length - 1] for length in valid_lengths], device=device)
        logits = target(tokens, state, valid_lengths=valid_lengths, logits_for=last).logits[:, -1]
        state.commit(state.consumed)  # nothing goes back: a recurrent state need not carry the prompt along
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
                chosen, told = graphs.run(("choose", sampling), choose, processed, uniform)
            if logprobs:  # float64 holds the tokens beside them exactly: the host reads once
                scores = Sampling.log_probs(logits, chosen.clamp(max=target.vocab_size - 1)).double()
                read = torch.stack((told.double(), scores)).tolist()
                values, row_scores = [int(token) for token in read[0]], read[1]
            else:
                values, row_scores = told.tolist(), None
            timer.lap("accept")
            num_calls, seconds = num_calls + 1, timer.elapsed()
            for i, row in enumerate(live):
                if row.live:
                    check_drawn(values[i], target.vocab_size)
                    row.append(values[i : i + 1], seconds, None if row_scores is None else row_scores[i : i + 1])
            kept = [i for i, row in enumerate(live) if row.live]
            if not kept:
                break
            if (size := power_of_two(len(kept))) < len(live):
                kept += [i for i, row in enumerate(live) if not row.live][: size - len(kept)]
                index = torch.tensor(kept, device=device)
                state.select(kept)
                live, chosen = [live[i] for i in kept], chosen[index]
                noise = None if noise is None else noise[index]
            if num_calls % COMMIT_EVERY == 0:
                state.commit(state.consumed)
            timer.lap("rest")
            logits = target(chosen[:, None], state).logits[:, -1]
    except KeyboardInterrupt:
        raise DecodeInterrupted(_result(rows, timer, num_calls, device)) from None
    timer.lap("rest")
    return _result(rows, timer, num_calls, device)


def _result(rows: list[Row], timer: PhaseTimer, num_calls: int, device: torch.device) -> DecodeResult:
    return DecodeResult(
        rows=[row.result() for row in rows],
        seconds=timer.elapsed(),
        phase_seconds=timer.seconds(),
        num_target_calls=num_calls,
        peak_memory_bytes=peak_memory_bytes(device),
    )

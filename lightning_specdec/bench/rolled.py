"""Standard decoding with the target rolled out as a draft is: several steps between two reads by the host.

The baseline of equal treatment: it gives the standard side every fusion that the draft side has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_specdec.drafters import Context, ModelDrafter, last_two
from lightning_specdec.inference import DecodeResult, PhaseTimer, Row
from lightning_specdec.inference.rows import Prompts, check_batch, check_eos
from lightning_specdec.inference.timing import peak_memory_bytes
from lightning_specdec.rules import Purpose, Sampling, noise_table

CHUNK = 32
"""Most tokens between two reads: enough that neither a read nor the token read twice weighs anything."""


@torch.inference_mode()
def rolled_decode(
    rollout: ModelDrafter,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> DecodeResult:
    """Generate with the target alone, up to `CHUNK` tokens for each read by the host.

    Theory: a draft is fast partly because nobody looks at its tokens one by one. A target can be rolled out the same
    way; a row that stops within a chunk wastes the rest of it. The tokens are those of `autoregressive_decode`.
    A chunk begins, as a draft does, by reading two tokens of which the state has seen one.

    Args:
        rollout: the target as a `ModelDrafter`, fused or compiled.
    """
    model, chunk = rollout.model, min(CHUNK, max_new_tokens)
    batch = check_batch(prompts, model.vocab_size, max_new_tokens=max_new_tokens, indices=indices)
    stops = check_eos(eos, model.vocab_size)
    timer, num_steps = PhaseTimer(model.device), 0
    rows = [Row(number, text, max_new_tokens=max_new_tokens, eos=stops, speculative=False) for number, text in batch]
    noise: torch.Tensor | None = None
    if not sampling.greedy:
        tables = [noise_table(seed, row.index, max_new_tokens + chunk)[:, Purpose.CORRECT] for row in rows]
        noise = torch.stack(tables).to(model.device)
    texts = [list(row.text) for row in rows]  # those of stopped rows grow on: all rows keep one pace
    state = rollout.init_state(len(rows), max(map(len, texts)) + max_new_tokens + 2 * chunk)
    done = 0
    while any(row.live for row in rows):
        size = min(chunk, max_new_tokens - done)
        tail = last_two(texts, model.device)
        context = Context(texts, tail, None if noise is None else noise[:, done : done + size])
        timer.lap("rest")
        draft = rollout.propose(state, context, [size] * len(rows), sampling)
        timer.lap("verify")
        values = draft.tokens.tolist()
        timer.lap("accept")
        done, num_steps = done + size, num_steps + draft.num_calls
        for row, text, tokens in zip(rows, texts, values, strict=True):
            text += tokens
            if row.live:
                row.append(tokens, timer.elapsed())
    timer.lap("rest")
    return DecodeResult(
        rows=[row.result() for row in rows],
        seconds=timer.elapsed(),
        phase_seconds=timer.seconds(),
        num_target_calls=num_steps,
        peak_memory_bytes=peak_memory_bytes(model.device),
    )

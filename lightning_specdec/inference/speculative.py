"""Speculative decoding of a batch of prompts, whole or as a stream: thin callers of a `Session`.

Knows nothing that the session does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

from lightning_specdec.drafters import Drafter
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.results import DecodeInterrupted, DecodeResult
from lightning_specdec.inference.rows import Prompts, check_batch
from lightning_specdec.inference.session import Session
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.windows import Window
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling


class DecodeOptions(TypedDict, total=False):
    """The optional arguments of `open_session`, for callers that pass them on."""

    num_draft_tokens: int | Window
    rule: AcceptanceRule | None
    sampling: Sampling | None
    eos: int | Sequence[int] | None
    seed: int
    indices: Sequence[int] | None
    logprobs: bool
    stop: StopStrings | None


def open_session(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    num_draft_tokens: int | Window = 3,
    rule: AcceptanceRule | None = None,
    sampling: Sampling | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    logprobs: bool = False,
    stop: StopStrings | None = None,
) -> Session:
    """A session with exactly these prompts in it, ready for its first round.

    Args:
        prompts: tokens of one prompt, of several, or a tensor `[T]` or `[B, T]`.
        max_new_tokens: new tokens of each row at most.
        num_draft_tokens: guesses per round, or a `Window` that chooses.
        rule: what keeps or rejects them; `ExactMatch()` when None.
        sampling: greedy when None.
        eos: tokens that stop a row; kept in the output.
        seed: keys the noise, together with the prompt's index.
        indices: the prompts' numbers; 0, 1, ... when None.
        logprobs: whether each token's log probability under the target is wanted.
        stop: strings that stop a row.
    """
    batch = check_batch(prompts, target.vocab_size, max_new_tokens=max_new_tokens, indices=indices)
    for _, text in batch:  # before there are states to hold them
        check_context(len(text), max_new_tokens, target, drafter)
    session = Session(
        target,
        drafter,
        max_length=max(len(text) for _, text in batch) + max_new_tokens,
        rule=rule,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        batch_size=len(batch),
        eos=eos,
        seed=seed,
        logprobs=logprobs,
    )
    for number, text in batch:
        session.add(text, max_new_tokens=max_new_tokens, index=number, stop=stop)
    return session


def run(session: Session) -> DecodeResult:
    """Decode until no row is live; on Ctrl-C, `DecodeInterrupted` with what was settled."""
    try:
        while session.step():
            pass
    except KeyboardInterrupt:
        raise DecodeInterrupted(session.result()) from None
    return session.result()


def stream(session: Session) -> Iterator[tuple[int, int]]:
    """Pairs of a prompt's number and its next token, as rounds settle them."""
    while events := session.step():
        for row, tokens in events:
            for token in tokens:
                yield row.index, token


def speculative_decode(
    target: LanguageModel, drafter: Drafter, prompts: Prompts, *, max_new_tokens: int, **options: Unpack[DecodeOptions]
) -> DecodeResult:
    """Generate with guesses of the drafter that the target verifies several at a time.

    Theory: with a lossless rule the output has the target's distribution, whatever the drafter guesses; at temperature
    0, and with `ExactMatch` at every temperature, it is what `autoregressive_decode` gives, token for token.

    Arguments are those of `open_session`.
    """
    return run(open_session(target, drafter, prompts, max_new_tokens=max_new_tokens, **options))

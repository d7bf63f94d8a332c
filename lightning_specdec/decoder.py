"""Target, draft and rule in one object: train, decode, measure.

Knows nothing of how any of them works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec import checkpoint
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.inference import DecodeResult, Session, autoregressive_decode, open_session, run, stream
from lightning_specdec.inference.rows import Prompts
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

if TYPE_CHECKING:

    pass


class SpeculativeDecoder:
    """A target and what guesses for it.

    Theory: the draft guesses several tokens cheaply, the target checks them in one call, and the rule keeps what leaves
    the output as it would have been. Everything that decodes here goes through `Session` and `autoregressive_decode`.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses; a `LanguageModel` is wrapped in a `ModelDrafter`.
        prompts: held-out prompts that belong to the pair, used where none are given.
        recipe: how the pair was made, as plain values; saved with it.
        fuse_draft: whether to decode with the drafter's fused form. The output is the same; only the time differs.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | LanguageModel,
        *,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        fuse_draft: bool = True,
    ) -> None:
        self.target = target
        self.drafter = ModelDrafter(drafter) if isinstance(drafter, LanguageModel) else drafter
        self.drafter.check_target(target)
        self.prompts = [list(prompt) for prompt in prompts]
        self.recipe = recipe or {}
        self.fuse_draft = fuse_draft
        self._ready: Drafter | None = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        fuse_draft: bool = True,
    ) -> SpeculativeDecoder:
        """The pair of a checkpoint that `fit` or `save` wrote.

        Raises:
            FileNotFoundError, ValueError: see `checkpoint.load`. Nothing in the file is run.
        """
        loaded = checkpoint.load(path)
        target, drafter = loaded.target.to(device, dtype), loaded.drafter.to(device, dtype)
        return cls(target, drafter, prompts=loaded.prompts, recipe=loaded.recipe, fuse_draft=fuse_draft)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pair as a checkpoint for decoding."""
        checkpoint.save(path, self.target, self.drafter, prompts=self.prompts, recipe=self.recipe)

    def ready_drafter(self) -> Drafter:
        """The drafter as decoding uses it: fused once, at first use."""
        if self._ready is None:
            self.target.eval()
            self.drafter.eval()
            self._ready = self.drafter.fused() if self.fuse_draft else self.drafter
        return self._ready

    def session(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> Session:
        """A session with these prompts in it; see `open_session` for the arguments."""
        return open_session(
            self.target,
            self.ready_drafter(),
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=sampling,
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )

    def decode(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> DecodeResult:
        """Decode speculatively.

        Args:
            prompts: tokens of one prompt, of several of any lengths, or a tensor `[T]` or `[B, T]`.
            max_new_tokens: new tokens of each row at most.
            num_draft_tokens: guesses per round.
            rule: what keeps or rejects them; `ExactMatch()` when None.
            temperature, top_k, top_p, min_p: see `Sampling`.
            eos: tokens that stop a row; kept in the output.
            seed: the same seed gives the same tokens.
            logprobs: whether each token's log probability under the target is wanted.
        """
        return run(
            self.session(
                prompts,
                max_new_tokens=max_new_tokens,
                num_draft_tokens=num_draft_tokens,
                rule=rule,
                sampling=Sampling(temperature, top_k, top_p, min_p),
                eos=eos,
                seed=seed,
                logprobs=logprobs,
            )
        )

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively and yield (prompt number, token) as tokens are settled; `session` has the arguments."""
        session = self.session(
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=sampling,
            eos=eos,
            seed=seed,
        )
        return stream(session)

    def decode_standard(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> DecodeResult:
        """Decode with the target alone, one call for each token; the arguments are those of `decode`."""
        self.target.eval()
        return autoregressive_decode(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p),
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )

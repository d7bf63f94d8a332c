"""A target and what guesses for it, which decode together or the target alone; text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.inference import (
    AdaptiveWindow,
    DecodeResult,
    Session,
    StopStrings,
    Window,
    autoregressive_decode,
    open_session,
    run,
    stream,
)
from lightning_specdec.inference.rows import as_prompts
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling, SamplingOptions
from lightning_specdec.texts import TextPrompts, Texts

if TYPE_CHECKING:
    from lightning_specdec.text.base import Message, Tokenizer

WindowChoice = int | str | Window
"""Guesses per round; "auto" for as many as pay on this machine; or a `Window` that chooses."""


class Decoding:
    """A target and what guesses for it.

    Theory: the draft guesses several tokens cheaply, the target checks them in one call, and the rule keeps what leaves
    the output as it would have been. Everything that decodes here goes through `Session` and `autoregressive_decode`.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses; a `LanguageModel` is wrapped in a `ModelDrafter`.
        prompts: held-out prompts that belong to the pair, used where none are given.
        recipe: how the pair was made, as plain values; saved with it.
        fuse_draft: whether to decode with the drafter's fused form, and the target's weights as this processor likes
            them, drafting or not. The output is the same; only the time differs.
        num_draft_tokens: guesses per round where a call names none; "auto" for as many as pay, or a `Window`.
        drafts: all that can guess for the target, by name, where there are several.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | LanguageModel,
        *,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        fuse_draft: bool = True,
        num_draft_tokens: WindowChoice = 3,
        drafts: Mapping[str, Drafter] | None = None,
    ) -> None:
        self.target = target
        self.drafter = ModelDrafter(drafter) if isinstance(drafter, LanguageModel) else drafter
        self.drafter.check_target(target)
        self.prompts = [list(prompt) for prompt in prompts]
        self.recipe = recipe or {}
        self.fuse_draft = fuse_draft
        self.num_draft_tokens = num_draft_tokens
        self.drafts = dict(drafts or {})
        self._texts = Texts(target)
        self._make_ready: Callable[[], Drafter] = self._fused
        self._ready: tuple[object, LanguageModel, Drafter] | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's; None where prompts and output are tokens alone."""
        return self._texts.tokenizer

    def read_text(self, tokenizer: Tokenizer) -> None:
        """From now on, take prompts and give output as text by the tokenizer that the target was trained with."""
        self.target.tokenizer, self.target.vocabulary = tokenizer, tokenizer.vocabulary
        self._texts = Texts(self.target)

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as `decode` takes it: the text as it is."""
        return self._texts.encode(text)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """A chat's tokens, by the target's chat template, up to where the answer begins; a string is its only message.

        Raises:
            ValueError: the target has no tokenizer, or no chat template.
        """
        return self._texts.encode_chat(messages)

    def ready_drafter(self) -> Drafter:
        """The drafter as decoding uses it: fused or compiled, and made anew when weights have changed."""
        return self.ready()[1]

    def ready(self) -> tuple[LanguageModel, Drafter]:
        """Target and drafter as decoding uses them, and the target alone: packed, fused or compiled, and made anew when
        weights have changed. Looking for that takes a pass over all of them."""
        both = (*self.target.parameters(), *self.drafter.parameters())
        weights = [(id(weight), weight._version) for weight in both]
        if self._ready is None or self._ready[0] != weights:
            self.target.eval()
            self.drafter.eval()
            target = self.target.packed() if self.fuse_draft else self.target
            self._ready = weights, target, self._make_ready()
        return self._ready[1:]

    def _fused(self) -> Drafter:
        return self.drafter.fused() if self.fuse_draft else self.drafter

    def window(
        self,
        num_draft_tokens: WindowChoice | None = None,
        *,
        batch_size: int = 1,
        rule: AcceptanceRule | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> int | Window:
        """The window that a call with these arguments decodes with.

        "auto" measures what draft and target cost here, once for each pair, machine and settings: some seconds for a
        large model, next to none after.
        """
        chosen = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if not isinstance(chosen, str):
            return chosen
        if chosen != "auto":
            raise ValueError(f"num_draft_tokens must be an integer, a Window or 'auto', got {chosen!r}")
        from lightning_specdec.bench.remembered import load_or_measure

        drawn = Sampling(**sampling)
        return AdaptiveWindow(load_or_measure(*self.ready(), batch_size=batch_size, rule=rule, sampling=drawn))

    def decode(
        self,
        prompts: TextPrompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: WindowChoice | None = None,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        indices: Sequence[int] | None = None,
        logprobs: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> DecodeResult:
        """Decode speculatively.

        Args:
            prompts: tokens of one prompt, of several of any lengths, a tensor `[T]` or `[B, T]`; or text, as it is.
            max_new_tokens: new tokens of each row at most.
            num_draft_tokens: guesses per round, as of `SpeculativeDecoder`; its own when None.
            rule: what keeps or rejects them; `ExactMatch()` when None.
            eos: tokens that stop a row, kept in the output; the target's own when None, `()` for none.
            stop: strings that stop a row.
            seed: the same seed gives the same tokens.
            indices: the prompts' numbers, which their noise is keyed by; 0, 1, ... when None.
            logprobs: whether each token's log probability under the target is wanted.
            sampling: temperature (0, greedy, when not given), top_k, top_p, min_p: see `Sampling`.
        """
        stops = self._texts.stop_strings(stop)
        session = self._open(
            prompts,
            num_draft_tokens,
            SamplingOptions(**sampling),
            max_new_tokens=max_new_tokens,
            rule=rule,
            eos=eos,
            seed=seed,
            indices=indices,
            logprobs=logprobs,
            stop=stops,
        )
        return self._texts.fill(run(session), stops)

    def stream(
        self,
        prompts: TextPrompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: WindowChoice | None = None,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively and yield (prompt number, token) as tokens are settled; arguments as of `decode`."""
        session = self._open(
            prompts,
            num_draft_tokens,
            SamplingOptions(**sampling),
            max_new_tokens=max_new_tokens,
            rule=rule,
            eos=eos,
            seed=seed,
            stop=self._texts.stop_strings(stop),
        )
        return stream(session)

    def _open(
        self,
        prompts: TextPrompts,
        num_draft_tokens: WindowChoice | None,
        sampling: SamplingOptions,
        *,
        max_new_tokens: int,
        rule: AcceptanceRule | None,
        eos: int | Sequence[int] | None,
        seed: int,
        stop: StopStrings | None,
        indices: Sequence[int] | None = None,
        logprobs: bool = False,
    ) -> Session:
        """A session with these prompts in it; arguments as of `decode`."""
        target, drafter = self.ready()
        tokens = as_prompts(self._texts.tokens(prompts))
        return open_session(
            target,
            drafter,
            tokens,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=self.window(num_draft_tokens, batch_size=len(tokens), rule=rule, **sampling),
            rule=rule,
            sampling=Sampling(**sampling),
            eos=self._texts.stop_tokens(eos),
            seed=seed,
            indices=indices,
            logprobs=logprobs,
            stop=stop,
        )

    def decode_standard(
        self,
        prompts: TextPrompts,
        *,
        max_new_tokens: int,
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        indices: Sequence[int] | None = None,
        logprobs: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> DecodeResult:
        """Decode with the target alone, one call for each token; the arguments are those of `decode`."""
        stops = self._texts.stop_strings(stop)
        result = autoregressive_decode(
            self.ready()[0],
            self._texts.tokens(prompts),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(**sampling),
            eos=self._texts.stop_tokens(eos),
            seed=seed,
            indices=indices,
            logprobs=logprobs,
            stop=stops,
        )
        return self._texts.fill(result, stops)

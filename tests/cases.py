"""The one list of models, drafters and rules that the law tests go through: a new kind enters all laws by one line.

Models are random and sharpened, so that their outputs wander instead of settling on one token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from families import tiny
from tiny_transformer import TinyTransformer
from tiny_vocabularies import cross

from lightning_specdec.drafters import Context, Draft, Drafter, DraftState, Host, ModelDrafter, NGramDrafter
from lightning_specdec.inference import DecodeResult, autoregressive_decode
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import RULES as REGISTERED_RULES
from lightning_specdec.rules import AcceptanceRule, Sampling

VOCAB = 11
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4]]
"""Ragged, one of a single token."""
EOS = 5
"""A token that the targets do produce, so that rows stop at different times, some inside a block."""


def make(kind: type[Any], seed: int, *, vocab_size: int = VOCAB, sharpness: float = 3.0, **sizes: int) -> Any:
    """A random model whose matrices are `sharpness` times their default size; the global seed stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(vocab_size, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return model


def near(model: LanguageModel, *, noise: float = 0.2, seed: int = 5) -> LanguageModel:
    """A copy that is a little off: its guesses are right often, not always."""
    generator, other = torch.Generator().manual_seed(seed), deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    return other


class Stateless(DraftState):
    """Remembers nothing."""

    def select(self, rows: Sequence[int]) -> None:
        pass

    def clear(self, rows: Sequence[int]) -> None:
        pass


class ScriptedDrafter(Drafter):
    """A drafter without networks; those below say what it guesses."""

    def check_target(self, target: LanguageModel) -> None:
        pass

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> DraftState:
        return Stateless()

    def arguments(self) -> dict[str, Any]:
        return {}


class AlwaysWrong(ScriptedDrafter):
    """Knows what the target is about to choose, and guesses the token after it.

    True at temperature 0, and at every temperature under rules whose drafter draws with the target's own numbers.
    """

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self.target = target

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        logits = torch.cat([self.target(torch.tensor([text])).logits[:, -1] for text in context.texts])
        right = sampling.sample(logits, None if context.uniform is None else context.uniform[:, 0])
        guesses = ((right + 1) % self.target.vocab_size)[:, None].expand(-1, max(windows))
        return Draft(guesses, None if min(windows) == max(windows) else torch.tensor(windows))


class Repeater(ScriptedDrafter):
    """Guesses that the last token goes on: certain guesses, no probabilities, no logits."""

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        return Draft(context.tail[:, 1:].expand(-1, max(windows)), torch.tensor(windows))


class Ragged(ModelDrafter):
    """Guesses fewer tokens than it may, none for some rows, and as many columns as its longest guess needs.

    How many depends on the length of the text alone. What lies behind a row's guesses is garbage.
    """

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        draft = super().propose(state, context, windows, sampling)
        wanted = [min(window, len(text) % 4) for window, text in zip(windows, context.texts, strict=True)]
        width, lengths = max(wanted), torch.tensor(wanted)
        garbage = torch.arange(width) >= lengths[:, None]
        tokens = draft.tokens[:, :width].masked_fill(garbage, 1)
        probs = None if draft.probs is None else draft.probs[:, :width].masked_fill(garbage[..., None], torch.nan)
        logits = None if draft.logits is None else draft.logits[:, :width]
        return Draft(tokens, lengths, probs, logits, num_calls=draft.num_calls)


MODELS: dict[str, Callable[..., LanguageModel]] = {
    "rnn": lambda seed=1, **sizes: make(RNN, seed, **{"embedding_size": 8, "hidden_size": 16, **sizes}),
    "fused": lambda seed=1, **sizes: MODELS["rnn"](seed, **sizes).fused(),
    "transformer": lambda seed=1, **sizes: make(TinyTransformer, seed, **{"sharpness": 2.5, **sizes}),
    "gemma3": lambda seed=1, vocab_size=VOCAB: HuggingFaceLM(tiny("gemma3_text", seed, vocab_size=vocab_size)),
}

DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "near": lambda target: ModelDrafter(related(target)),
    "unrelated": lambda target: ModelDrafter(MODELS["rnn"](8, vocab_size=target.vocab_size, num_layers=1)),
    "fused": lambda target: ModelDrafter(MODELS["fused"](9, vocab_size=target.vocab_size)),
    "transformer": lambda target: ModelDrafter(MODELS["transformer"](8, vocab_size=target.vocab_size)),
    "itself": lambda target: ModelDrafter(target),
    "hotter": lambda target: ModelDrafter(related(target), sampling=Sampling(1.5, top_k=3)),
    "certain": lambda target: ModelDrafter(related(target), sampling=Sampling(0.0)),
    "ragged": lambda target: Ragged(related(target)),
    "repeater": lambda target: Repeater(),
    "ngram": lambda target: NGramDrafter(),
    "ngram_2_4": lambda target: NGramDrafter(max_ngram=4, min_ngram=2),
    "cross": lambda target: cross(related(target)),
    "cross_hotter": lambda target: cross(related(target), sampling=Sampling(1.5, top_k=3)),
    "wrong": lambda target: AlwaysWrong(target),
}

RULES: dict[str, type[AcceptanceRule]] = REGISTERED_RULES
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


def related(target: LanguageModel) -> LanguageModel:
    """A draft that is often right about that target."""
    return near(MODELS["rnn"](1, vocab_size=target.vocab_size)) if not list(target.parameters()) else near(target)


@functools.cache
def target(name: str) -> LanguageModel:
    """The target of that name; read it, do not write to it."""
    return MODELS[name]()


@functools.cache
def drafter(name: str, target_name: str) -> Drafter:
    """A drafter for that target; what it remembers is in the sessions that use it."""
    return DRAFTERS[name](target(target_name))


@functools.cache
def standard(target_name: str, sampling: Sampling, max_new_tokens: int, eos: int | None = EOS) -> DecodeResult:
    """What standard decoding makes of `PROMPTS`: the oracle."""
    model = target(target_name)
    return autoregressive_decode(model, PROMPTS, max_new_tokens=max_new_tokens, sampling=sampling, eos=eos)


def applies(drafter_name: str, rule_name: str) -> bool:
    """Whether that drafter can serve that rule."""
    return drafter(drafter_name, "rnn").gives_logits or not RULES[rule_name].needs_draft_logits

"""The one list of models, drafters and rules of the law tests: one line adds a kind to all laws.

Models are random and sharpened, so that their outputs wander instead of settling on one token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import families
import oracle
import torch
from families import tiny
from tiny_block import fitted_block
from tiny_eagle import fitted_eagle
from tiny_heads import heads, some_tokens, unfitted
from tiny_mtp import fitted_mtp
from tiny_transformer import TinyTransformer
from tiny_vocabularies import cross
from torch import nn

from lightning_specdec.decoding import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
    SuffixCorpusDrafter,
    SuffixCorpusWithFallback,
)
from lightning_specdec.models import RNN, DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import RULES as REGISTERED_RULES
from lightning_specdec.rules import AcceptanceRule, Sampling

Network = TypeVar("Network", bound=nn.Module)

VOCAB = 11
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4]]
"""Ragged, one of a single token."""
EOS = 5
"""A token that the targets produce, so that rows stop at different times, some inside a block."""


def make(
    kind: Callable[..., Any],
    seed: int,
    *,
    vocab_size: int = VOCAB,
    sharpness: float = 3.0,
    **sizes: int,
) -> Any:
    """A random model whose matrices are `sharpness` times their default size.

    The global seed is left unchanged.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(vocab_size, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return families.placed(model)


def near(model: Network, *, noise: float = 0.2, seed: int = 5) -> Network:
    """A copy with some noise in its weights: it is often right, not always."""
    generator = torch.Generator().manual_seed(seed)
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(drawn * noise * parameter.std())
    return copied


class Wrapped(LanguageModel):
    """A model whose calls tests change."""

    def __init__(self, model: LanguageModel, max_positions: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_positions = max_positions

    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        return self.model.init_state(batch_size, max_length)

    def forward(
        self,
        tokens: torch.Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        return self.model(tokens, state, **options)

    def arguments(self) -> dict[str, Any]:
        return {}


class FirstRowFails(Wrapped):
    """In the third call, the first row has NaN in all its logits."""

    num_calls = 0

    def forward(
        self,
        tokens: torch.Tensor,
        state: DecodeState | None = None,
        **options: Any,
    ) -> ModelOutput:
        output = super().forward(tokens, state, **options)
        self.num_calls += 1
        if self.num_calls == 3:
            output.logits[0] = torch.nan
        return output


class ScriptedDrafter(Drafter):
    """A drafter without networks; its subclasses decide what it drafts."""


class AlwaysWrong(ScriptedDrafter):
    """Computes the target's next token, and drafts another one.

    True at temperature 0, and at every temperature under rules whose drafter draws with the
    target's own numbers.
    """

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self.target = target

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        outputs = [self.target(torch.tensor([text])) for text in request.texts]
        logits = torch.cat([output.logits[:, -1] for output in outputs])
        uniform = None if request.uniform is None else request.uniform[:, 0]
        right_tokens = sampling.sample(logits, uniform)
        wrong_tokens = (right_tokens + 1) % self.target.vocab_size
        tokens = wrong_tokens[:, None].expand(-1, max(windows))
        lengths = None
        if min(windows) < max(windows):
            lengths = torch.tensor(windows)
        return Draft(tokens, lengths)


class Repeater(ScriptedDrafter):
    """Repeats the last token: certain drafts, no probabilities, no logits."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        return Draft(request.last_two_tokens[:, 1:].expand(-1, max(windows)), torch.tensor(windows))


class Ragged(ModelDrafter):
    """Drafts fewer tokens than it may, none for some rows, and only as many columns as it needs.

    The number depends only on the length of the text. The columns after a row's draft are garbage.
    """

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        lengths = []
        for window, text in zip(windows, request.texts, strict=True):
            lengths.append(min(window, len(text) % 4))
        num_columns = max(lengths)
        device_lengths = torch.tensor(lengths)
        is_garbage = torch.arange(num_columns) >= device_lengths[:, None]

        tokens = draft.tokens[:, :num_columns].masked_fill(is_garbage, 1)
        probs = draft.probs
        if probs is not None:
            probs = probs[:, :num_columns].masked_fill(is_garbage[..., None], torch.nan)
        logits = draft.logits
        if logits is not None:
            logits = logits[:, :num_columns]
        return Draft(tokens, device_lengths, probs, logits, num_calls=draft.num_calls)


LONG_MATCHES = NGramDrafter(min_ngram=2)
"""Finds a match in some rows, and none in others."""


def _llama(seed: int, **sizes: Any) -> HuggingFaceLM:
    sizes = {"vocab_size": VOCAB, "sharpness": 14.0, "max_position_embeddings": 512, **sizes}
    model = HuggingFaceLM(tiny("llama", seed, **sizes))
    # Its checkpoints may hold prediction layers.
    model.config.num_mtp_layers = 2
    return model


def _in_openvino(model: HuggingFaceLM) -> LanguageModel:
    from lightning_specdec.models.openvino import OpenVINOLM  # a machine with a GPU may lack it

    return OpenVINOLM.of(model)


MODELS: dict[str, Callable[..., LanguageModel]] = {
    "rnn": lambda seed=1, **sizes: make(
        RNN, seed, **{"embedding_size": 8, "hidden_size": 16, **sizes}
    ),
    "fused": lambda seed=1, **sizes: MODELS["rnn"](seed, **sizes).fused(),
    "transformer": lambda seed=1, **sizes: make(
        TinyTransformer, seed, **{"sharpness": 2.5, **sizes}
    ),
    "gemma3": lambda seed=1, vocab_size=VOCAB: HuggingFaceLM(
        tiny("gemma3_text", seed, vocab_size=vocab_size)
    ),
    "llama": lambda seed=1, **sizes: _llama(seed, **sizes),
    "openvino": lambda seed=1, **sizes: _in_openvino(_llama(seed, **sizes)),
}

DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "near": lambda target: ModelDrafter(related(target)),
    "unrelated": lambda target: ModelDrafter(
        MODELS["rnn"](8, vocab_size=target.vocab_size, num_layers=1)
    ),
    "fused": lambda target: ModelDrafter(MODELS["fused"](9, vocab_size=target.vocab_size)),
    "transformer": lambda target: ModelDrafter(
        MODELS["transformer"](8, vocab_size=target.vocab_size)
    ),
    "itself": lambda target: ModelDrafter(target),
    "hotter": lambda target: ModelDrafter(related(target), sampling=Sampling(1.5, top_k=3)),
    "certain": lambda target: ModelDrafter(related(target), sampling=Sampling(0.0)),
    "ragged": lambda target: Ragged(related(target)),
    "repeater": lambda target: Repeater(),
    "ngram": lambda target: NGramDrafter(),
    "ngram_2_4": lambda target: NGramDrafter(max_ngram=4, min_ngram=2),
    "suffix_corpus": lambda target: SuffixCorpusDrafter(memory_tokens=0),
    "cross": lambda target: cross(related(target)),
    "cross_hotter": lambda target: cross(related(target), sampling=Sampling(1.5, top_k=3)),
    "wrong": lambda target: AlwaysWrong(target),
    "early_exit": lambda target: EarlyExitDrafter(1),
    "early_exit_own": lambda target: with_own_head(2, target),
    "early_exit_reduced": lambda target: with_own_head(2, target, reduced=True),
    "early_exit_hotter": lambda target: EarlyExitDrafter(1, sampling=Sampling(1.5, top_k=3)),
    "heads": lambda target: heads(target),
    "heads_reduced": lambda target: heads(target, reduced=True),
    "eagle": lambda target: fitted_eagle(target),
    "eagle_reduced": lambda target: fitted_eagle(target, reduced=True),
    "eagle_windowed": lambda target: fitted_eagle(target, attention_window=3, min_confidence=0.1),
    "eagle_31_windowed": lambda target: fitted_eagle(target, norm_output=True, attention_window=3),
    "eagle_3_reduced": lambda target: fitted_eagle(target, reduced=True, feature_norms=False),
    "block": lambda target: fitted_block(target, min_confidence=0.3),
    "block_reduced": lambda target: fitted_block(
        target, reduced=True, num_layers=1, feature_norms=True
    ),
    "block_windowed": lambda target: fitted_block(target, attention_window=6, markov_rank=0),
    "mtp": lambda target: fitted_mtp(target),
    "staged": lambda target: StagedDrafter(
        [small(target), ModelDrafter(related(target))], stage_windows=2
    ),
    "staged_three": lambda target: StagedDrafter(
        [
            NGramDrafter(),
            small(target),
            ModelDrafter(related(target), sampling=Sampling(1.5, top_k=3)),
        ]
    ),
    "lookup_first": lambda target: NGramWithFallback(LONG_MATCHES, ModelDrafter(related(target))),
    "lookup_suffix": lambda target: SuffixCorpusWithFallback(
        SuffixCorpusDrafter(memory_tokens=0), ModelDrafter(related(target))
    ),
    "lookup_heads": lambda target: NGramWithFallback(LONG_MATCHES, heads(target)),
    "lookup_exit": lambda target: NGramWithFallback(LONG_MATCHES, EarlyExitDrafter(1)),
    "lookup_eagle": lambda target: NGramWithFallback(
        LONG_MATCHES, fitted_eagle(target, min_confidence=0.1)
    ),
    "lookup_block": lambda target: NGramWithFallback(
        LONG_MATCHES, fitted_block(target, min_confidence=0.3)
    ),
    "lookup_mtp": lambda target: NGramWithFallback(
        LONG_MATCHES, fitted_mtp(target, min_confidence=0.1)
    ),
    "staged_exit": lambda target: StagedDrafter(
        [small(target), EarlyExitDrafter(1)], stage_windows=3
    ),
}
"""By the target that they are for; the laws go through those that take it, see `COMBINATIONS`."""

VARIANTS = [
    name
    for name in DRAFTERS
    if name.startswith("lookup_") or name.endswith(("_reduced", "_windowed"))
]
"""Kinds that differ from another in what they can say or see, or in who is asked first, and not in
how they meet a target: the laws go through them with one target.
"""

RULES: dict[str, type[AcceptanceRule]] = REGISTERED_RULES
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


def related(target: LanguageModel) -> LanguageModel:
    """A draft that is often right about that target."""
    if not list(target.parameters()):
        return near(MODELS["rnn"](1, vocab_size=target.vocab_size))
    return near(target)


def small(target: LanguageModel) -> ModelDrafter:
    """A draft smaller than any other here."""
    return ModelDrafter(MODELS["rnn"](8, vocab_size=target.vocab_size, num_layers=1))


def with_own_head(exit_layer: int, target: LanguageModel, *, reduced: bool = False) -> Drafter:
    """An early exit with a separate output head, near the target's if the target shares that.

    Args:
        reduced: whether it scores only some tokens, and has blocks.
    """
    tokens = some_tokens(target.vocab_size)

    def build(vocab_size: int) -> EarlyExitDrafter:
        options: dict[str, Any] = {}
        if reduced:
            options = {"num_blocks": 2, "draft_vocabulary": tokens}
        return EarlyExitDrafter(
            exit_layer, head_layers=[exit_layer], hidden_size=32, vocab_size=vocab_size, **options
        )

    drafter: EarlyExitDrafter = make(build, 6, vocab_size=target.vocab_size)
    if isinstance(target, HuggingFaceLM):
        assert drafter.head is not None
        weight = target.output_weight
        drafter.head.output.weight.data = weight[tokens] if reduced else weight
        for name, parameter in drafter.head.blocks.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return near(drafter)


@functools.cache
def target(name: str) -> LanguageModel:
    """The target of that name; read it, do not write to it."""
    return MODELS[name]()


@functools.cache
def drafter(name: str, target_name: str) -> Drafter:
    """A drafter for that target; its states belong to the sessions that use it."""
    made_drafter = _make_drafter(name, target_name)
    if families.DEVICE == "cpu":
        return made_drafter
    return families.placed(deepcopy(made_drafter))


@functools.cache
def _example(name: str, target_name: str) -> Drafter:
    """An untrained one, which shows what such a drafter supports."""
    with unfitted():
        return _make_drafter(name, target_name)


def _make_drafter(name: str, target_name: str) -> Drafter:
    if families.DEVICE == "cpu":
        return DRAFTERS[name](target(target_name))
    with families.on_cpu():
        return DRAFTERS[name](_on_cpu(target_name))


@functools.cache
def _on_cpu(name: str) -> LanguageModel:
    """The target where drafters are made and fitted for it."""
    with families.on_cpu():
        return MODELS[name]()


@functools.cache
def standard(
    target_name: str,
    sampling: Sampling,
    max_new_tokens: int,
    eos: int | None = EOS,
) -> DecodeResult:
    """The result of standard decoding for `PROMPTS`, which equals that of the slow oracle."""
    model = target(target_name)
    result = autoregressive_decode(
        model, PROMPTS, max_new_tokens=max_new_tokens, sampling=sampling, eos=eos
    )
    stop_tokens = () if eos is None else (eos,)
    for index, prompt in enumerate(PROMPTS):
        expected = oracle.decode(
            model,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos=stop_tokens,
            index=index,
        )
        assert result.tokens[index] == expected, f"standard decoding of prompt {index} is wrong"
    return result


def decode(target_name: str, drafter_name: str, **options: Any) -> DecodeResult:
    """The result of speculative decoding for `PROMPTS`."""
    return speculative_decode(
        target(target_name), drafter(drafter_name, target_name), PROMPTS, **options
    )


def fits(drafter_name: str, target_name: str) -> bool:
    """Whether that drafter supports that target."""
    name = _torch_name(target_name)
    try:
        _example(drafter_name, name).check_target(target(name))
    except ValueError:
        return False
    return True


def _torch_name(target_name: str) -> str:
    """The OpenVINO target is converted from the llama, and supports the same drafters."""
    return "llama" if target_name == "openvino" else target_name


def _works_inside(drafter_name: str, target_name: str) -> bool:
    return _example(drafter_name, _torch_name(target_name)).inside_target


def pairs(
    drafters: Iterable[str] = DRAFTERS, targets: Iterable[str] = MODELS
) -> list[tuple[str, str]]:
    """Pairs of a target and a drafter: each of these drafters with all of these targets that it
    supports.

    Variants of a drafter meet one target only. A drafter that supports none of the targets meets
    another one.
    """
    found_pairs = []
    for name in drafters:
        fitting = [target_name for target_name in targets if fits(name, target_name)]
        if name in VARIANTS:
            fitting = fitting[:1]
        if not fitting:
            fitting = [target_of(name)]
        found_pairs += [(target_name, name) for target_name in fitting]
    return found_pairs


def target_of(drafter_name: str) -> str:
    """The first target that the drafter supports, which is the fastest."""
    return next(target for target in MODELS if fits(drafter_name, target))


COMBINATIONS = pairs()
"""Every target with every drafter that takes it."""
QUICK_DRAFTERS = (
    "near",
    "eagle",
    "heads",
    "staged",
    "early_exit",
    "ngram",
    "block",
    "lookup_first",
    "suffix_corpus",
)
"""A drafter of each kind, for the quick cases of laws with slow cases."""
ONE_EACH = [(target_of(name), name) for name in DRAFTERS]
"""Every drafter with one target, for laws of what happens between rows and rounds."""
DISTINCT_COMBINATIONS = [
    (target_name, name)
    for target_name, name in COMBINATIONS
    if target_name != "llama" or _works_inside(name, target_name)
]
"""The same without drafters outside of llama: they meet gemma3, a model of the same class."""
BUT_LLAMA = [name for name in MODELS if name not in ("llama", "openvino")]
"""For laws that llama meets with drafters alone that work inside it: for the others gemma3 stands
for its kind.
"""


def applies(drafter_name: str, rule_name: str) -> bool:
    """Whether that drafter can serve that rule."""
    return (
        _example(drafter_name, target_of(drafter_name)).gives_logits
        or not RULES[rule_name].needs_draft_logits
    )


def rules_of(drafter_name: str) -> list[str]:
    """The rules that the drafter can serve."""
    return [rule for rule in RULES if applies(drafter_name, rule)]


def triples(drafters: Iterable[str], targets: Iterable[str]) -> list[tuple[str, str, str]]:
    """The `pairs`, each with all rules that its drafter can serve."""
    return [(*pair, rule) for pair in pairs(drafters, targets) for rule in rules_of(pair[1])]


def few(values: Sequence[Any], target_name: str, drafter_name: str) -> Sequence[Any]:
    """Fewer values for targets with a KV cache other than gemma3, which has the most kinds of
    layers.

    All for an early exit, every third one for other drafters that work inside the target, and the
    middle one for those that do not: for them it is a model like gemma3.
    """
    if target_name not in ("transformer", "llama", "openvino") or drafter_name == "early_exit":
        return values
    step = 3 if _works_inside(drafter_name, target_name) else len(values)
    return values[len(values) // 2 % step :: step]


SHARING = ("rnn", "fused", "gemma3")
"""Targets that a drafter outside the target meets in the same way."""


def shared(turns: Sequence[Any], target_name: str, drafter_name: str) -> Sequence[Any]:
    """A third of the turns for each target of `SHARING`, if the drafter works outside the target.

    A ragged drafter, which shows what padding touches, takes all turns with all targets.
    """
    if target_name not in SHARING or drafter_name in (*VARIANTS, "ragged"):
        return turns
    if _works_inside(drafter_name, target_name):
        return turns
    start = (SHARING.index(target_name) + [*DRAFTERS].index(drafter_name)) % len(SHARING)
    return turns[start :: len(SHARING)] or [turns[start % len(turns)]]


def in_turn(
    values: Sequence[Any],
    others: Sequence[Any],
    target_name: str,
    drafter_name: str,
) -> list[tuple[Any, Any]]:
    """Pairs of two settings that do not depend on each other, fewer than all with all.

    This pair of target and drafter meets all values and all others. Each value meets each other
    with some pair.
    """
    start = sum(map(ord, target_name + drafter_name))
    num_turns = max(len(values), len(others))
    return [(values[i % len(values)], others[(start + i) % len(others)]) for i in range(num_turns)]

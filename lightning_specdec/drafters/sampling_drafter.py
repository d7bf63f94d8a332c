"""The base of drafters that sample their tokens, and of those trained on hidden states.

Shapes: B rows, K draft tokens, D hidden size, V vocabulary of the target, W tokens that a draft
scores.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Drafter, DraftRequest
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.models import DecodeState, ExitStates, KVState, LanguageModel
from lightning_specdec.models.base import OPENVINO_DTYPES
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.models.packed import can_pack, pack_linears
from lightning_specdec.models.threads import one_thread
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class DraftSampler:
    """Draws draft tokens one after the other, and collects what a draft reports about them.

    Args:
        sampling: how to draw.
        uniform: `[B]` numbers to draw each token with; None if nothing is drawn at random.
        wants_logits: whether to collect logits.
        texts: each row's tokens so far, for logits processors; none without them.
        windows: draft tokens requested of each row. Logits processors are not called for more.
        vocabulary: the tokens that the logits score; all of the target's when None.
    """

    sampling: Sampling
    uniform: Sequence[Tensor] | None
    wants_logits: bool
    texts: list[list[int]]
    windows: Sequence[int]
    vocabulary: DraftVocabulary | None
    tokens: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def draw(self, logits: Float[Tensor, "B W"]) -> Int[Tensor, "B"]:
        """Draw the next token of every row. Returns the target's token numbers."""
        vocabulary = self.vocabulary
        if vocabulary is not None and (self.sampling.runs_on_host or self.wants_logits):
            # Processors and rules are about the target's tokens.
            logits = vocabulary.spread(logits, -torch.inf)
            vocabulary = None

        position = len(self.tokens)
        if self.sampling.runs_on_host:
            logits = self._process(logits, position)

        uniform = None if self.uniform is None else self.uniform[position]
        tokens, probs = self.sampling.sample_with_probs(logits, uniform)
        if self.sampling.runs_on_host:
            # The processors see this token before the next one.
            for text, token in zip(self.texts, tokens.tolist(), strict=True):
                text.append(token)
        if probs is not None:
            # A row of NaN draws no token, and the next call needs a valid one to read.
            tokens = tokens.clamp(max=probs.shape[-1] - 1)

        if vocabulary is not None:
            # The vocabulary ascends, so a number draws the same token from it as from the spread
            # distribution.
            tokens = vocabulary.tokens[tokens]
            if probs is not None:
                probs = vocabulary.spread(probs, 0.0)

        self.tokens.append(tokens)
        if probs is not None:
            self.probs.append(probs)
        if self.wants_logits:
            self.logits.append(logits)
        return tokens

    def _process(self, logits: Float[Tensor, "B V"], position: int) -> Float[Tensor, "B V"]:
        """The logits after the logits processors, of the rows that request a token here."""
        texts: list[list[int] | None] = []
        for text, window in zip(self.texts, self.windows, strict=True):
            texts.append(text if position < window else None)
        # A row has one position here.
        processed = self.sampling.process(logits[:, None], texts)
        return processed[:, 0]

    @property
    def outputs(self) -> Outputs:
        """Tokens, their distributions (None if certain), and the logits if requested."""
        tokens = torch.stack(self.tokens, dim=1) if self.tokens else None
        probs = torch.stack(self.probs, dim=1) if self.probs else None
        logits = torch.stack(self.logits, dim=1) if self.logits else None
        return tokens, probs, logits


class SamplingDrafter(Drafter, ABC):
    """Samples its tokens from distributions that it computes.

    Args:
        sampling: how to draw draft tokens; as the session does when None. Any choice is lossless
            under a lossless rule.
    """

    gives_logits = True
    in_openvino: Any = None
    """Its networks, compiled to draft for a target in OpenVINO; None if they are not."""

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.sampling = sampling

    def arguments(self) -> dict[str, Any]:
        if self.sampling is not None:
            raise ValueError(
                "a checkpoint keeps no sampling of the draft's own: save without it, give it to "
                "decode"
            )
        return super().arguments()

    @property
    def computes_in_openvino(self) -> bool:
        """Whether OpenVINO computes what this drafter draws from."""
        return bool(self.in_openvino)

    def needs_noise(self, sampling: Sampling) -> bool:
        return not self._draft_sampling(sampling).greedy

    def _draft_sampling(self, sampling: Sampling) -> Sampling:
        """How this drafter draws in a session with this sampling."""
        return self.sampling or sampling

    def run(
        self,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
        call: Callable[..., Tensor | None],
        *inputs: Tensor,
        key: Hashable = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> Outputs:
        """Run `call(sampler, *inputs)`, which draws the tokens with `DraftSampler.draw`.

        Args:
            windows: draft tokens requested of each row.
            key: distinguishes models, states and spans of a call that may be recorded; None if it
                may not.
            vocabulary: the tokens that the draft scores; all of the target's when None.

        Returns:
            `DraftSampler.outputs`, and the result of the call.
        """
        draft_sampling = self._draft_sampling(sampling)
        wants_logits = request.wants_logits
        texts: list[list[int]] = []
        if draft_sampling.runs_on_host:
            texts = [list(text) for text in request.texts]

        # What is recorded outlives the session, so this function must not refer to the request.
        def draw(uniform: Tensor | None, *inputs: Tensor) -> Outputs:
            uniform_columns = None if uniform is None else uniform.unbind(1)
            sampler = DraftSampler(
                draft_sampling, uniform_columns, wants_logits, texts, windows, vocabulary
            )
            result = call(sampler, *inputs)
            return *sampler.outputs, result

        if key is None:
            # torch's threads would keep OpenVINO's cores busy.
            with one_thread(self.computes_in_openvino):
                return draw(request.uniform, *inputs)

        # Everything that decides what `draw` computes from its tensors.
        batch_size = len(request.last_two_tokens)
        full_key = (self, batch_size, draft_sampling, wants_logits, request.vocab_size, key)
        return request.calls.run(full_key, draw, request.uniform, *inputs)

    def roll(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        windows: Sequence[int],
        request: DraftRequest,
        sampling: Sampling,
    ) -> Outputs:
        """Have a model read tokens and draft one by one. Returns `DraftSampler.outputs`."""
        vocab_size = request.vocab_size
        scores_fewer_tokens = vocab_size is not None and vocab_size > model.vocab_size
        num_draft_tokens = max(windows)

        def call(sampler: DraftSampler) -> None:
            def choose(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
                target_logits = fit_vocabulary(logits, vocab_size)
                next_tokens = sampler.draw(target_logits)
                if scores_fewer_tokens:
                    # A logits processor may choose a token that only pads the target's output.
                    next_tokens = next_tokens.clamp(max=model.vocab_size - 1)
                return next_tokens

            model.rollout(tokens, state, num_draft_tokens, choose, valid_lengths=valid_lengths)

        return self.run(request, windows, sampling, call)

    def recorded_roll(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"] | None,
        request: DraftRequest,
        sampling: Sampling,
        *,
        num_layers: int | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Outputs | None:
        """As `roll`, in one recorded call.

        Args:
            tokens: the last tokens of each text, whose positions are on the device; None if rows
                read others.
            num_layers: layers that draft, all when None; their outputs are the fourth one.
            head: computes logits from their output; the model's own when None.

        Returns:
            `DraftSampler.outputs` and the outputs of the layers; None if the call cannot be
                recorded.
        """
        inputs = request.calls.inputs
        if tokens is None or inputs is None or self._draft_sampling(sampling).runs_on_host:
            return None
        num_read = tokens.shape[1]
        if not isinstance(state, KVState) or not model.records(state, num_read):
            return None

        num_draft_tokens = request.calls.num_draft_tokens
        storage = state.storage
        span = state.recorded_span(num_draft_tokens + num_read)
        vocab_size = request.vocab_size
        compute_logits = head or model.exit_logits

        # As `LanguageModel.rollout`, with positions on the device instead of a state's lengths.
        def call(sampler: DraftSampler, tokens: Tensor, last_positions: Tensor) -> Tensor | None:
            starts = last_positions - (num_read - 1)
            layer_outputs = []
            for _ in range(num_draft_tokens):
                readable_tokens = tokens.clamp(max=model.vocab_size - 1)
                hidden = model.read_at(storage, span, readable_tokens, starts, num_layers)
                layer_outputs.append(hidden)

                last_logits = compute_logits(hidden[:, -1:])
                target_logits = fit_vocabulary(last_logits[:, -1], vocab_size)
                next_tokens = sampler.draw(target_logits)
                starts = starts + tokens.shape[1]
                tokens = next_tokens[:, None]

            if num_layers is None:
                return None
            return torch.cat(layer_outputs, dim=1)

        key = (num_draft_tokens, id(storage), span)
        return self.run(request, (), sampling, call, tokens, inputs.last_positions, key=key)

    def packed(self, network: str) -> Any:
        """A copy whose network of that name is packed for this processor; itself if none can be."""
        layers = getattr(self, network).modules()
        if not any(can_pack(layer) for layer in layers):
            return self
        drafter = deepcopy(self)
        pack_linears(getattr(drafter, network))
        return drafter.eval()


def make_draft(
    outputs: Outputs,
    windows: Sequence[int],
    request: DraftRequest,
    *,
    num_calls: int | None = None,
    states: ExitStates | None = None,
) -> Draft:
    """The draft from `DraftSampler.outputs`.

    Args:
        windows: draft tokens of each row that count.
        num_calls: forward passes that it took; by default one for each token.
        states: what an early exit has computed.
    """
    tokens, probs, logits = outputs[:3]
    assert tokens is not None
    num_drafted = tokens.shape[1]
    device = request.last_two_tokens.device
    lengths = request.calls.draft_lengths(windows, num_drafted, device)
    return Draft(
        tokens,
        lengths,
        probs,
        logits,
        num_calls=num_calls or num_drafted,
        exit_states=states,
    )


def limit_by_confidence(
    draft: Draft,
    confidences: Float[Tensor, "B K"],
    min_confidence: float,
) -> Draft:
    """Limit each row's draft to the tokens whose confidence is high enough.

    Args:
        confidences: the estimated probability that a token and all before it are accepted.
        min_confidence: the lowest one that suffices.
    """
    lengths = (confidences >= min_confidence).sum(1)
    return limit_draft(draft, lengths)


def limit_draft(draft: Draft, lengths: Int[Tensor, "B"]) -> Draft:
    """Limit each row's draft to these lengths.

    It is lossless if they follow from the text and earlier tokens only.
    """
    if draft.lengths is not None:
        lengths = torch.minimum(lengths, draft.lengths)
    draft.lengths = lengths
    if lengths.device.type == "cpu":
        # On a GPU, reading the lengths would take longer than the target needs for some more
        # positions.
        num_draft_tokens = int(lengths.max())
        draft.tokens = draft.tokens[:, :num_draft_tokens]
        if draft.probs is not None:
            draft.probs = draft.probs[:, :num_draft_tokens]
        if draft.logits is not None:
            draft.logits = draft.logits[:, :num_draft_tokens]
    return draft


def empty_draft(request: DraftRequest) -> Draft:
    """A draft without tokens."""
    batch_size = len(request.last_two_tokens)
    device = request.last_two_tokens.device
    no_tokens = torch.empty(batch_size, 0, dtype=torch.long, device=device)
    return Draft(no_tokens)


def fit_vocabulary(logits: Float[Tensor, "*B W"], vocab_size: int | None) -> Float[Tensor, "*B V"]:
    """Logits for `vocab_size` tokens: the last ones are cut off, or -inf is appended. Unchanged
    when None.

    Models of one vocabulary differ in the rows that pad their output to a round number; no text
    has those tokens.
    """
    if vocab_size is None or vocab_size == logits.shape[-1]:
        return logits
    num_missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)


class TrainedDrafter(SamplingDrafter, ABC):
    """Networks that were trained on their target's hidden states; its settings have their sizes.

    Attributes:
        draft_vocabulary: the tokens that it scores; None for all of the target's.
        num_tokens: how many those are.
    """

    inside_target = True
    from_file = True

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        vocab_size = self.settings.vocab_size
        self.draft_vocabulary: DraftVocabulary | None = None
        self.num_tokens: Any = vocab_size
        if self.settings.draft_vocabulary is not None:
            self.draft_vocabulary = DraftVocabulary(self.settings.draft_vocabulary, vocab_size)
            self.num_tokens = len(self.draft_vocabulary)

    def arguments(self) -> dict[str, Any]:
        draft_vocabulary = None
        if self.draft_vocabulary is not None:
            draft_vocabulary = self.draft_vocabulary.arguments()
        return {**super().arguments(), "draft_vocabulary": draft_vocabulary}

    def check_target(self, target: LanguageModel) -> None:
        if target.hidden_size is None or target.num_layers is None:
            raise ValueError(
                f"{type(target).__name__} returns no hidden states, which this draft reads"
            )
        hidden_size = self.settings.hidden_size
        vocab_size = self.settings.vocab_size
        if hidden_size != target.hidden_size or vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft is for a hidden size of {hidden_size} and a vocabulary of "
                f"{vocab_size}, the target "
                f"has {target.hidden_size} and {target.vocab_size}: use the target that it was "
                "trained with"
            )


def runs_in_openvino(target: LanguageModel | None, dtype: torch.dtype) -> bool:
    """Whether networks of that type draft in OpenVINO, where this target runs."""
    return target is not None and target.backend == "openvino" and dtype in OPENVINO_DTYPES

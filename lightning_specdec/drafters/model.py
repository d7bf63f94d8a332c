"""A smaller language model as the draft, and what all drafters share that draw from distributions."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from operator import le
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.heads import DraftVocabulary
from lightning_specdec.drafters.layout import pad
from lightning_specdec.models import DecodeState, ExitStates, KVState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.models.packed import can_pack, pack_linears
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Drawn:
    """Draws draft tokens one after the other, and keeps what a draft must report of them.

    Args:
        windows: tokens wanted of each row, which is all that logits processors are asked about.
        vocabulary: what the logits are over, where the draft has some tokens alone; the target's tokens when None.
    """

    def __init__(
        self,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.windows, self.sampling, self.wants_logits = windows, sampling, request.wants_logits
        self.vocabulary = vocabulary
        self._uniform = None if request.uniform is None else request.uniform.unbind(1)
        self._texts = [list(text) for text in request.texts] if sampling.processors else []
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._logits: list[Tensor] = []

    def draw(self, logits: Float[Tensor, "B W"]) -> Int[Tensor, "B"]:
        """The next token of every row, in the target's numbers."""
        i, own = len(self._tokens), self.vocabulary
        if own is not None and (self.sampling.processors or self.wants_logits):  # which are about the target's tokens
            logits, own = own.to_target(logits), None
        if self.sampling.processors:
            wanted = [text if i < window else None for text, window in zip(self._texts, self.windows, strict=True)]
            logits = self.sampling.process(logits[:, None], wanted)[:, 0]
        token, probs = self.sampling.sample_with_probs(logits, None if self._uniform is None else self._uniform[i])
        if self.sampling.processors:
            for text, drawn in zip(self._texts, token.tolist(), strict=True):
                text.append(drawn)
        if probs is not None:
            token = token.clamp(max=probs.shape[-1] - 1)  # a row of NaN draws no token, and something has to be read
            self._probs.append(probs if own is None else own.spread(probs))
        if own is not None:  # its tokens ascend, so the same number draws the same one of fewer
            token = own.tokens[token]
        if self.wants_logits:
            self._logits.append(logits)
        self._tokens.append(token)
        return token

    @property
    def outputs(self) -> Outputs:
        """Tokens, the distributions that they were drawn from (None where certain), and the logits if wanted."""
        probs = torch.stack(self._probs, dim=1) if self._probs else None
        logits = torch.stack(self._logits, dim=1) if self._logits else None
        return torch.stack(self._tokens, dim=1), probs, logits


class DrawingDrafter(Drafter, ABC):
    """Draws its tokens from distributions that it computes.

    Args:
        sampling: how it draws, if not as the session does; any choice is lossless under a lossless rule.
    """

    gives_logits = True

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.sampling = sampling

    def arguments(self) -> dict[str, Any]:
        if self.sampling is not None:
            raise ValueError("a checkpoint keeps no sampling of the draft's own: save without it, give it to decode")
        return super().arguments()

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

    def recorded(
        self,
        request: DraftRequest,
        num_draft_tokens: int,
        sampling: Sampling,
        key: Hashable,
        call: Callable[..., Tensor | None],
        *inputs: Tensor,
        vocabulary: DraftVocabulary | None = None,
    ) -> Outputs:
        """The outputs of `call(drawn, *inputs)`, which draws the tokens, and its result; as one recorded call.

        Args:
            key: distinguishes models, states and spans.
        """
        assert request.device is not None
        num_rows, options = len(request.tail), (request.wants_logits, request.vocab_size)
        blank = DraftRequest([[]] * num_rows, request.tail, None, *options)

        def run(uniform: Tensor | None, *inputs: Tensor) -> Outputs:
            windows = [num_draft_tokens] * num_rows
            drawn = Drawn(replace(blank, uniform=uniform), windows, sampling, vocabulary)
            made = call(drawn, *inputs)
            return *drawn.outputs, made

        full = id(self), num_draft_tokens, sampling, *options, key
        return request.device.graphs.run(full, run, request.uniform, *inputs)


def make_draft(
    outputs: Outputs,
    wanted: Sequence[int],
    request: DraftRequest,
    *,
    num_calls: int | None = None,
    states: ExitStates | None = None,
) -> Draft:
    """The draft of `Drawn.outputs`, of which each row wants so many tokens; by default, each took one call."""
    tokens, probs, logits = outputs[:3]
    assert tokens is not None
    device, lengths = request.device, None
    if min(wanted) < tokens.shape[1]:
        uploaded = device is not None and list(wanted) == list(device.wanted)
        lengths = device.windows if device and uploaded else torch.tensor(wanted, device=request.tail.device)
    return Draft(tokens, lengths, probs, logits, num_calls or tokens.shape[1], states)


def nothing(request: DraftRequest) -> Draft:
    """No draft tokens for any row."""
    return Draft(torch.empty(len(request.tail), 0, dtype=torch.long, device=request.tail.device))


class TrainedDrafter(DrawingDrafter, ABC):
    """Networks that were trained on their target's hidden states; its settings have their sizes.

    Attributes:
        draft_vocabulary: the tokens that it scores; None for all of the target's.
        num_tokens: how many those are.
    """

    inside_target = True

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        tokens, vocab_size = self.settings.draft_vocabulary, self.settings.vocab_size
        self.draft_vocabulary = None if tokens is None else DraftVocabulary(tokens, vocab_size)
        self.num_tokens: Any = vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary)

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        raise ValueError(f"a {cls.__name__} is trained for its target: give its draft file or checkpoint")

    def arguments(self) -> dict[str, Any]:
        plain, own = super().arguments(), self.draft_vocabulary
        plain.pop("draft_vocabulary", None)
        return plain if own is None else {**plain, "draft_vocabulary": own.arguments()}

    def check_target(self, target: LanguageModel) -> None:
        if target.hidden_size is None or target.num_layers is None:
            raise ValueError(f"{type(target).__name__} gives no hidden states, which this draft reads")
        own = self.settings
        if (own.hidden_size, own.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ValueError(
                f"the draft is for a hidden size of {own.hidden_size} and a vocabulary of {own.vocab_size}, the target "
                f"has {target.hidden_size} and {target.vocab_size}: use the target that it was trained with"
            )

    def packed(self, network: str) -> Any:
        """A copy whose network of that name is packed for this processor; itself where nothing can be."""
        if not any(can_pack(layer) for layer in getattr(self, network).modules()):
            return self
        other = deepcopy(self)
        pack_linears(getattr(other, network))
        return other.eval()


class RollingDrafter(DrawingDrafter, ABC):
    """Rolls out a language model, one token after the other.

    Attributes:
        renames: whether its model has other numbers for the target's tokens.
    """

    renames: ClassVar[bool] = False

    def to_target(self, logits: Float[Tensor, "B W"], request: DraftRequest) -> Float[Tensor, "B V"]:
        """Logits of the draft's W tokens as logits of the target's V; -inf for what the draft does not have."""
        return fit(logits, request.vocab_size)

    def to_draft(self, tokens: Int[Tensor, "B"], model: LanguageModel) -> Int[Tensor, "B"]:
        """What the model reads for drawn tokens; a logits processor may choose what only pads the target's output."""
        return tokens.clamp(max=model.vocab_size - 1)

    def roll(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        num_draft_tokens: int,
        request: DraftRequest,
        sampling: Sampling,
    ) -> Outputs:
        """Have a model read tokens and draft: `Drawn.outputs`."""
        drawn = Drawn(request, request.windows or [num_draft_tokens] * len(tokens), self.sampling or sampling)
        renames = self.renames or (request.vocab_size or 0) > model.vocab_size

        def choose(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
            token = drawn.draw(self.to_target(logits, request))
            return self.to_draft(token, model) if renames else token

        model.rollout(tokens, state, num_draft_tokens, choose, valid_lengths=valid_lengths)
        return drawn.outputs

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
        """As `roll`, in one recorded call for `DeviceRound.width` tokens; None where calls are not recorded.

        Args:
            tokens: the last ones of each text, whose places the device knows; None where rows read others.
            num_layers: layers that draft, all when None; their outputs are the fourth one.
            head: turns their output to logits; the model's own when None.
        """
        if tokens is None or request.device is None or (self.sampling or sampling).processors or self.renames:
            return None
        num_read, width = tokens.shape[1], request.device.width
        if not isinstance(state, KVState) or not model.records(state, num_read):
            return None
        storage = state.storage
        span, head = state.recorded_span(width + num_read), head or model.exit_logits
        vocab_size = request.vocab_size

        def call(drawn: Drawn, tokens: Tensor, starts: Tensor) -> Tensor | None:
            made = []
            for _ in range(width):
                hidden = model.read_at(storage, span, tokens, starts, num_layers)
                logits = head(hidden[:, -1:])[:, -1]
                starts = starts + tokens.shape[1]
                tokens = drawn.draw(fit(logits, vocab_size))[:, None].clamp(max=logits.shape[-1] - 1)
                made.append(hidden)
            return None if num_layers is None else torch.cat(made, dim=1)

        starts, key = request.device.starts - (num_read - 1), (id(storage), span)
        return self.recorded(request, width, self.sampling or sampling, key, call, tokens, starts)


class ModelDraftState(DraftState):
    """The state of the draft's model."""

    def __init__(self, model_state: DecodeState) -> None:
        self.model_state = model_state
        self.drafted_at: list[int] | None = None
        """Lengths of the texts that were last drafted on, until it is known how many draft tokens were kept."""

    def settle(self, num_accepted: Sequence[int] | None = None) -> None:
        """Forget the draft tokens that were not kept, all when None."""
        if self.drafted_at is not None:
            counts = num_accepted or [0] * len(self.drafted_at)
            right = [length + count for length, count in zip(self.drafted_at, counts, strict=True)]
            self.model_state.truncate([min(pair) for pair in zip(right, self.model_state.consumed, strict=True)])
            self.drafted_at = None

    def select(self, rows: Sequence[int]) -> None:
        self.settle()
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.settle()
        self.model_state.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        lengths = list(self.model_state.consumed)
        if self.model_state.committed[row] >= length:  # the drafter reads the token before it again
            self.clear([row])
        elif lengths[row] > length:
            lengths[row] = length
            self.model_state.truncate(lengths)


class ModelDrafter(RollingDrafter):
    """Drafts with a smaller language model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

    After verification the model has not read one or two of the text's last tokens. It always reads the last two again,
    which keeps shapes fixed.

    Args:
        model: the draft.
        sampling: how it draws, if not as the session does.
    """

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None) -> None:
        super().__init__(sampling=sampling)
        self.model = model

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        drafter = cls(require_model(cls, draft), **settings)
        drafter.check_target(target)
        return drafter

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "model": self.model}

    def check_target(self, target: LanguageModel) -> None:
        own, others = self.model.vocabulary, target.vocabulary
        if own is not None and others is not None:
            if difference := own.difference(others):
                raise ValueError(
                    f"the draft's vocabulary is not the target's ({difference}): draft with CrossVocabulary"
                )
        elif self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {self.model.vocab_size} tokens, the target one of {target.vocab_size}: "
                "train both with one vocabulary"
            )

    def fused(self) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> ModelDraftState:
        return ModelDraftState(self.model.init_state(batch_size, max_length))

    def propose(self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        own = state.model_state
        tokens, valid_lengths = self._unread(own, request)
        if request.vocab_size is not None and request.vocab_size > self.model.vocab_size:
            tokens = tokens.clamp(max=self.model.vocab_size - 1)  # as in `to_draft`
        state.drafted_at = [len(text) for text in request.texts]
        tails = tokens if valid_lengths is None and tokens.shape[1] == 2 else None
        outputs = self.recorded_roll(self.model, own, tails, request, sampling)
        if outputs is None:
            outputs = self.roll(self.model, own, tokens, valid_lengths, max(windows), request, sampling)
        elif request.device is not None:
            own.advance(request.device.width + 1)
        return make_draft(outputs, windows, request)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.settle(num_accepted)

    def _unread(self, state: DecodeState, request: DraftRequest) -> tuple[Int[Tensor, "B T"], list[int] | None]:
        """The tokens to read before drafting, right-padded, and how many of each row's are real (None: all)."""
        tails = [len(text) - 2 for text in request.texts]
        if min(tails) >= 0 and all(map(le, tails, state.consumed)):
            state.truncate(tails)
            commit(state, tails, request)
            return request.tail, None
        starts = [min(length, max(tail, 0)) for length, tail in zip(state.consumed, tails, strict=True)]
        if starts != state.consumed:
            state.truncate(starts)
        commit(state, starts, request)
        return pad([text[start:] for start, text in zip(starts, request.texts, strict=True)], request.tail.device)


def require_model(kind: type[Drafter], draft: Any) -> LanguageModel:
    """The draft model that `for_target` was given."""
    if not isinstance(draft, LanguageModel):
        raise ValueError(f"{kind.__name__} needs a draft model, got {type(draft).__name__}: give one as the draft")
    return draft


def commit(state: DecodeState, lengths: Sequence[int], request: DraftRequest) -> None:
    """Forget the way back below these lengths, but not below a settled text's last two tokens."""
    if request.settled is not None:
        lengths = [min(length, max(0, settled - 2)) for length, settled in zip(lengths, request.settled, strict=True)]
    state.commit(lengths)


def fit(logits: Float[Tensor, "*B W"], vocab_size: int | None) -> Float[Tensor, "*B V"]:
    """Logits over `vocab_size` tokens: the last ones cut off, or -inf put behind them. As they are when None.

    Models of one vocabulary differ in the rows that pad their output to a round number, and no text has those tokens.
    """
    missing = 0 if vocab_size is None else vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

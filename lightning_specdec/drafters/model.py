"""`ModelDrafter`, which drafts with a smaller language model, and the base of drafters that sample their tokens."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.heads import DraftVocabulary
from lightning_specdec.drafters.layout import pad
from lightning_specdec.models import DecodeState, ExitStates, KVState, LanguageModel, ModelOutput
from lightning_specdec.models.base import OPENVINO_DTYPES, one_thread
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.models.packed import can_pack, pack_linears
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class Drawn:
    """Draws draft tokens one after the other, and keeps what a draft reports of them.

    Args:
        uniform: `[B]` numbers to draw each token with; None where nothing is drawn at random.
        texts: each row's tokens so far, for logits processors; none without them.
        windows: tokens wanted of each row, which is all that logits processors are asked about.
        vocabulary: what the logits are over, where the draft has some tokens alone; the target's tokens when None.
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
        """The next token of every row, in the target's numbers."""
        i, own = len(self.tokens), self.vocabulary
        if own is not None and (
            self.sampling.processors or self.wants_logits
        ):  # which are about the target's tokens
            logits, own = own.spread(logits, -torch.inf), None
        if self.sampling.processors:
            wanted = [
                text if i < window else None
                for text, window in zip(self.texts, self.windows, strict=True)
            ]
            logits = self.sampling.process(logits[:, None], wanted)[:, 0]
        token, probs = self.sampling.sample_with_probs(
            logits, None if self.uniform is None else self.uniform[i]
        )
        if self.sampling.processors:
            for text, drawn in zip(self.texts, token.tolist(), strict=True):
                text.append(drawn)
        if probs is not None:
            token = token.clamp(
                max=probs.shape[-1] - 1
            )  # a row of NaN draws no token, and something has to be read
            self.probs.append(probs if own is None else own.spread(probs, 0.0))
        if own is not None:  # its tokens ascend, so the same number draws the same one of fewer
            token = own.tokens[token]
        if self.wants_logits:
            self.logits.append(logits)
        self.tokens.append(token)
        return token

    @property
    def outputs(self) -> Outputs:
        """Tokens, the distributions that they were drawn from (None where certain), and the logits if wanted."""
        probs = torch.stack(self.probs, dim=1) if self.probs else None
        logits = torch.stack(self.logits, dim=1) if self.logits else None
        return torch.stack(self.tokens, dim=1) if self.tokens else None, probs, logits


class DrawingDrafter(Drafter, ABC):
    """Draws its tokens from distributions that it computes.

    Args:
        sampling: how to draw draft tokens; as the session does when None. Any choice is lossless under a lossless rule.
    """

    gives_logits = True
    in_openvino: Any = None
    """Its networks as they draft for a target in OpenVINO, if they do."""

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.sampling = sampling

    def arguments(self) -> dict[str, Any]:
        if self.sampling is not None:
            raise ValueError(
                "a checkpoint keeps no sampling of the draft's own: save without it, give it to decode"
            )
        return super().arguments()

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

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
        """`Drawn.outputs` of `call(drawn, *inputs)`, which draws the tokens, and its result.

        Args:
            key: distinguishes models, states and spans of a recorded call; it is not recorded when None.
        """
        own, wants_logits = self.sampling or sampling, request.wants_logits
        texts = [list(text) for text in request.texts] if own.processors else []

        def draw(uniform: Tensor | None, *inputs: Tensor) -> Outputs:
            numbers = None if uniform is None else uniform.unbind(1)
            drawn = Drawn(own, numbers, wants_logits, texts, windows, vocabulary)
            made = call(drawn, *inputs)
            return *drawn.outputs, made

        if key is None:
            with one_thread(bool(self.in_openvino)):
                return draw(request.uniform, *inputs)
        assert request.device is not None
        full = self, len(request.tail), own, wants_logits, request.vocab_size, key
        return request.device.graphs.run(full, draw, request.uniform, *inputs)

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
        """Have a model read tokens and draft one token after the other: `Drawn.outputs`."""
        padded = (request.vocab_size or 0) > model.vocab_size

        def call(drawn: Drawn) -> None:
            def choose(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
                token = drawn.draw(fit(logits, request.vocab_size))
                # A logits processor may choose what only pads the target's output.
                return token.clamp(max=model.vocab_size - 1) if padded else token

            model.rollout(tokens, state, max(windows), choose, valid_lengths=valid_lengths)

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
        """As `roll`, in one recorded call for `DeviceRound.width` tokens; None where calls are not recorded.

        Args:
            tokens: the last ones of each text, whose places the device knows; None where rows read others.
            num_layers: layers that draft, all when None; their outputs are the fourth one.
            head: turns their output to logits; the model's own when None.
        """
        device, vocab_size = request.device, request.vocab_size
        if tokens is None or device is None or (self.sampling or sampling).processors:
            return None
        num_read, width = tokens.shape[1], device.width
        if not isinstance(state, KVState) or not model.records(state, num_read):
            return None
        storage, span = state.storage, state.recorded_span(width + num_read)
        head = head or model.exit_logits

        def call(drawn: Drawn, tokens: Tensor, starts: Tensor) -> Tensor | None:
            starts, made = starts - (num_read - 1), []
            for _ in range(width):
                hidden = model.read_at(
                    storage, span, tokens.clamp(max=model.vocab_size - 1), starts, num_layers
                )
                logits = head(hidden[:, -1:])[:, -1]
                starts = starts + tokens.shape[1]
                tokens = drawn.draw(fit(logits, vocab_size))[:, None]
                made.append(hidden)
            return None if num_layers is None else torch.cat(made, dim=1)

        key = width, id(storage), span
        return self.run(request, (), sampling, call, tokens, device.starts, key=key)


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
    if device is not None and list(wanted) == list(device.wanted):
        lengths = device.windows  # also where all are full: rounds are alike
    elif min(wanted) < tokens.shape[1]:
        lengths = torch.tensor(wanted, device=request.tail.device)
    return Draft(tokens, lengths, probs, logits, num_calls or tokens.shape[1], states)


def shortened(draft: Draft, lengths: Int[Tensor, "B"]) -> Draft:
    """At most so many tokens of each row's draft; lossless if that follows from text and earlier tokens alone."""
    draft.lengths = lengths if draft.lengths is None else torch.minimum(lengths, draft.lengths)
    if (
        lengths.device.type == "cpu"
    ):  # elsewhere reading the lengths would take longer than the target's places
        width = int(draft.lengths.max())
        draft.tokens = draft.tokens[:, :width]
        draft.probs = None if draft.probs is None else draft.probs[:, :width]
        draft.logits = None if draft.logits is None else draft.logits[:, :width]
    return draft


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
    from_file = True

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        tokens, vocab_size = self.settings.draft_vocabulary, self.settings.vocab_size
        self.draft_vocabulary = None if tokens is None else DraftVocabulary(tokens, vocab_size)
        self.num_tokens: Any = (
            vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary)
        )

    def arguments(self) -> dict[str, Any]:
        own = self.draft_vocabulary
        return {**super().arguments(), "draft_vocabulary": None if own is None else own.arguments()}

    def check_target(self, target: LanguageModel) -> None:
        if target.hidden_size is None or target.num_layers is None:
            raise ValueError(
                f"{type(target).__name__} gives no hidden states, which this draft reads"
            )
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


def runs_in_openvino(target: LanguageModel | None, dtype: torch.dtype) -> bool:
    """Whether networks of that type draft for this target in OpenVINO, where it runs itself."""
    return target is not None and target.backend == "openvino" and dtype in OPENVINO_DTYPES


class ModelDraftState(DraftState):
    def __init__(self, model_state: DecodeState) -> None:
        self.model_state = model_state

    def select(self, rows: Sequence[int]) -> None:
        self.settle()
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.model_state.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        lengths = list(self.model_state.consumed)
        if self.model_state.committed[row] >= length:  # the drafter reads the token before it again
            self.clear([row])
        elif lengths[row] > length:
            lengths[row] = length
            self.model_state.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.model_state.truncate(
            [min(pair) for pair in zip(lengths, self.model_state.consumed, strict=True)]
        )

    def begin(self, request: DraftRequest, num_again: int) -> list[Sequence[int]]:
        """Go back to the texts; gives what is not read of each, its last `num_again` tokens at least."""
        state, texts, settled = self.model_state, request.texts, request.settled
        starts = [
            min(read, max(0, len(text) - num_again))
            for read, text in zip(state.consumed, texts, strict=True)
        ]
        state.truncate(starts)
        if settled is None:
            state.commit(starts)
        else:
            known = zip(starts, settled, strict=True)
            state.commit([min(start, max(0, length - num_again)) for start, length in known])
        return [text[start:] for start, text in zip(starts, texts, strict=True)]


class ModelDrafter(DrawingDrafter):
    """Drafts with a smaller language model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

    In each round it reads the text's last two tokens again, of which it has missed one or two, so that shapes are
    fixed.

    Args:
        model: the draft model.
        sampling: how to draw draft tokens; as the session does when None. Any choice is lossless under a lossless rule.
    """

    takes_model = True
    runs_ahead = True

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None) -> None:
        super().__init__(sampling=sampling)
        self.model = model

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

    def fused(self, target: LanguageModel | None = None) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> ModelDraftState:
        return ModelDraftState(self.model.init_state(batch_size, max_length))

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        own, unread = state.model_state, state.begin(request, 2)
        state.drafted_at = [len(text) for text in request.texts]
        caught_up = all(len(each) == 2 for each in unread)
        tokens, valid_lengths = (
            (request.tail, None) if caught_up else pad(unread, request.tail.device)
        )
        outputs = None
        if caught_up and request.device is not None:
            outputs = self.recorded_roll(self.model, own, tokens, request, sampling)
        if outputs is None:
            if request.vocab_size is not None and request.vocab_size > self.model.vocab_size:
                tokens = tokens.clamp(max=self.model.vocab_size - 1)  # as in `roll`
            outputs = self.roll(self.model, own, tokens, valid_lengths, windows, request, sampling)
        elif request.device is not None:
            own.advance(request.device.width + 1)
        return make_draft(outputs, windows, request)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.settle(num_accepted)


def fit(logits: Float[Tensor, "*B W"], vocab_size: int | None) -> Float[Tensor, "*B V"]:
    """Logits over `vocab_size` tokens: the last ones cut off, or -inf put behind them. As they are when None.

    Models of one vocabulary differ in the rows that pad their output to a round number, and no text has those tokens.
    """
    missing = 0 if vocab_size is None else vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

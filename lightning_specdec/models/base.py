"""The interface of a language model that scores tokens over a state that can be truncated.

Shapes: B rows, T tokens, N scored positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightning_specdec.config import settings
from lightning_specdec.models.state import DecodeState, KVStorage, Lengths, as_list, crosses_switch

# Other packages import these names from here.
from lightning_specdec.models.threads import one_thread as one_thread
from lightning_specdec.models.weights import fixed_tensors
from lightning_specdec.models.weights import weights_digest as weights_digest
from lightning_specdec.models.weights import weights_stamp as weights_stamp

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lightning_specdec.models.agreement import Agreement
    from lightning_specdec.models.safetensors_file import Origin
    from lightning_specdec.text.tokenizer import Tokenizer
    from lightning_specdec.text.vocabulary import Vocabulary

OPENVINO_DTYPES = (torch.float32, torch.bfloat16)
"""Types that networks in OpenVINO compute in."""


@dataclass
class ModelOutput:
    """The result of one forward pass.

    Args:
        logits: `logits[:, i]` scores the token after the i-th of the N positions in `logits_for`.
        features: hidden states `[B, T, D]` of the requested layers, by layer number.
        logits_for: the positions of the logits, as requested; None for all T.
    """

    logits: Float[Tensor, "B N V"]
    features: dict[int, Tensor] = field(default_factory=dict)
    logits_for: Int[Tensor, "B N"] | slice | None = None

    def scored(self, layer: int) -> Float[Tensor, "B N D"]:
        """A layer's hidden states at the positions of the logits."""
        return select(self.features[layer], self.logits_for)


@dataclass
class ExitStates:
    """Output of a model's lower layers for tokens that its upper layers have not read.

    Args:
        num_layers: number of lower layers.
        hidden: `[B, N, D]`, their output for the tokens after those that the state has consumed.
        lengths: number of real tokens in each row, of these N.
    """

    num_layers: int
    hidden: Float[Tensor, "B N D"]
    lengths: list[int]


def select(
    hidden: Float[Tensor, "B T D"], positions: Int[Tensor, "B N"] | slice | None
) -> Float[Tensor, "B N D"]:
    """The hidden states at some of the T positions: all of them when None."""
    if positions is None:
        return hidden
    if isinstance(positions, slice):
        return hidden[:, positions]
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


class LanguageModel(nn.Module, ABC):
    """A causal language model that scores several tokens in one call over a truncatable state.

    A subclass implements `init_state`, `forward` and `arguments`. The other methods serve drafters
    that read or share parts of the target; a model without such a part raises ValueError.

    Attributes:
        Settings: settings class of the constructor's plain arguments, from which a checkpoint
            rebuilds the model.
        vocab_size: number of logits per position; it may exceed the tokenizer's number of tokens.
        hidden_size: width of the last layer's output; None if the model returns no features.
        num_layers: number of layers; None if the model returns no features.
        max_positions: context length in tokens; None if there is no limit.
        position_switch: most tokens of a prompt whose text is read with one set of positions; the
            texts of longer prompts are read with another one, from their first token on (LongRoPE).
            So no text may begin on one side and end on the other. None if positions never change.
        longer_texts_with: how to load the model so that it reads texts beyond `max_positions`;
            None if there is no way.
        vocabulary: the bytes of each token; None if unknown.
        tokenizer: converts text to tokens; None if the tokens are not text.
        origin: the files that the weights were read from; None for a model that was created or
            trained in this process.
        backend: name of the library that computes, "torch" or "openvino".
        agreement: whether calls of all widths return the same logits, measured when the model was
            prepared for decoding; None if that was not necessary. Results are lossless only if
            they do.
    """

    Settings: ClassVar[type[settings.Settings]] = settings.NoSettings
    vocab_size: int
    hidden_size: int | None = None
    num_layers: int | None = None
    max_positions: int | None = None
    position_switch: int | None = None
    longer_texts_with: str | None = None
    vocabulary: Vocabulary | None = None
    tokenizer: Tokenizer | None = None
    origin: Origin | None = None
    backend: ClassVar[str] = "torch"
    agreement: Agreement | None = None

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        """Create an empty state for `batch_size` rows of up to `max_length` tokens each."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        """Score tokens. With a state, they continue the tokens that it has consumed.

        Args:
            tokens: the next tokens of each row; without a state, whole sequences.
            state: changed in place: row b's length grows by `valid_lengths[b]`.
            valid_lengths: number of real tokens in each row, before its right padding; all T when
                None.
            logits_for: positions in T to return logits for, per row or as one slice for all rows;
                all T when None.
            features: numbers of the layers, from 0, whose hidden states to return.
        """

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, from which a checkpoint rebuilds it."""

    def _lacks(self, part: str) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} has no {part}: use a transformers model, or another drafter"
        )

    def check_exit(self, num_layers: int) -> None:
        """Raise ValueError if the model cannot exit after its first `num_layers` layers."""
        self._lacks("layers to exit from")

    def prepare_features(self, layers: Sequence[int]) -> None:  # noqa: B027
        """Do now what the first call with these features would do, which may take seconds.

        Other threads may call the model in the meantime.
        """

    def lower(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        starts: Sequence[int],
        num_layers: int,
    ) -> Float[Tensor, "B T D"]:
        """The output of the first `num_layers` layers for some tokens.

        It writes these layers' part of the state and leaves the state's lengths, which count tokens
        that all layers have read. `forward` of such a model also accepts `exit_states`.

        Args:
            starts: position of each row's first token.
        """
        self._lacks("layers to exit from")

    def exit_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """Logits from a lower layer's output, by the final norm and the output head."""
        self._lacks("layers to exit from")

    def records(self, state: DecodeState, num_tokens: int) -> bool:
        """Whether a call on `num_tokens` tokens per row is recorded as a CUDA graph.

        Only then may `read_at` be used.
        """
        return False

    def read_at(
        self,
        state: KVStorage,
        span: int,
        tokens: Int[Tensor, "B T"],
        starts: Int[Tensor, "B"],
        num_layers: int | None,
    ) -> Float[Tensor, "B T D"]:
        """As `lower`, inside a recorded call; the output of all layers when `num_layers` is None.

        Args:
            span: number of cache slots that attention covers.
            starts: position of each row's first token, on the device.
        """
        self._lacks("recorded calls")

    def check_output_head(self) -> None:
        """Raise ValueError if the output head cannot be called separately."""
        self._lacks("output head that can be shared")

    def output_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """Logits from the last layer's output, as `forward` returns it in `features`."""
        self._lacks("output head that can be shared")

    def embeddings(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The input embeddings of these tokens. Raises ValueError if the model shares none."""
        self._lacks("input embeddings that can be shared")

    @property
    def embedding_table(self) -> Float[Tensor, "V D"] | None:
        """The weights whose rows `embeddings` returns; None if it computes them another way."""
        return None

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The output head's weight matrix."""
        self._lacks("output head that can be shared")

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, shared ones counted once.

        Counted at the first use and kept, since packed layers have no parameters.
        """
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def positions_of_one_side(self) -> int | None:
        """Largest number of tokens of a text that stays on the short side of the position switch;
        `max_positions` of a model without one.
        """
        return self.position_switch or self.max_positions

    def room_after(self, num_prompt_tokens: int) -> int | None:
        """Most new tokens after a prompt of that many tokens; None if there is no limit.

        It may be below 1. The last new token is not read, so it needs no position.
        """
        last_position = self.max_positions
        if self.position_switch is not None and num_prompt_tokens <= self.position_switch:
            last_position = self.position_switch
        return None if last_position is None else last_position + 1 - num_prompt_tokens

    def crosses_switch(self, num_prompt_tokens: int, num_new_tokens: int) -> bool:
        """Whether a text would begin on one side of the position switch and end on the other."""
        switch = self.position_switch
        return switch is not None and crosses_switch(num_prompt_tokens, num_new_tokens, switch)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def lossy_reason(self) -> str | None:
        """Why drafting changes this model's output, whatever the rule; None if it does not."""
        return None if self.agreement is None else self.agreement.reason

    def refresh(self) -> None:
        """Read again what this object remembers of its modules, which a user may have changed.

        Raises:
            ValueError: the model cannot be decoded after the change.
        """

    def in_eval_mode(self) -> LanguageModel:
        """This model in evaluation mode: itself, or a copy that shares its weights."""
        return eval_copy(self)

    def packed(self) -> LanguageModel:
        """The model with weights in this processor's layout, or itself. For inference only."""
        return self

    def fused(self) -> LanguageModel:
        """The model with fewer kernel launches per token, or itself. For inference only."""
        return self

    def rollout(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        num_tokens: int,
        choose: Callable[[Float[Tensor, "B V"], int], Int[Tensor, "B"]],
        *,
        valid_lengths: Lengths | None = None,
    ) -> None:
        """Consume `tokens`, then generate `num_tokens` tokens, which `choose` collects.

        The host reads none of them.

        Args:
            tokens: tokens that the state has not consumed yet.
            num_tokens: number of new tokens; the state consumes all but the last one.
            choose: `choose(logits, i)` returns new token i of each row from its logits.
            valid_lengths: number of real tokens in each row of `tokens`; all T when None.
        """
        logits_for: Tensor | slice = slice(-1, None)
        if valid_lengths is not None:
            last_positions = [[length - 1] for length in as_list(valid_lengths)]
            logits_for = torch.tensor(last_positions, device=tokens.device)

        for i in range(num_tokens):
            output = self(tokens, state, valid_lengths=valid_lengths, logits_for=logits_for)
            # The next recorded call overwrites its logits, and `choose` may return a part of its
            # own memory: both are copied.
            next_tokens = choose(output.logits[:, -1].clone(), i)
            tokens = next_tokens.clone()[:, None]

            # From the second call on, each row reads one token.
            valid_lengths = None
            logits_for = slice(-1, None)


ModuleType = TypeVar("ModuleType", bound=nn.Module)


def eval_copy(module: ModuleType) -> ModuleType:
    """The module if it is in evaluation mode, else a copy in that mode that shares its weights.

    A module whose network runs outside of torch has no other mode: it is returned unchanged. A
    user's own models and drafters are not copied, since their class may hold locks, files or counts
    that must exist once: they are set to evaluation mode themselves.
    """
    parts = list(module.modules())
    is_training = any(part.training for part in parts)
    runs_elsewhere = any(getattr(part, "backend", "torch") != "torch" for part in parts)
    if not is_training or runs_elsewhere:
        return module
    if _is_users_own(module):
        return module.eval()

    shared: dict[int, Any] = {}
    # What a forward pass overwrites is not shared: the user may run the module meanwhile.
    for tensor in fixed_tensors(module):
        shared[id(tensor)] = tensor
    for part in parts:
        if _is_users_own(part):
            shared[id(part)] = part
        for name in ("tokenizer", "vocabulary"):
            value = getattr(part, name, None)
            shared[id(value)] = value
    return deepcopy(module, shared).eval()


def _is_users_own(module: nn.Module) -> bool:
    """Whether a module is a model or drafter of a class that a user wrote."""
    is_ours = type(module).__module__.startswith("lightning_specdec.")
    return not is_ours and (isinstance(module, LanguageModel) or hasattr(module, "propose"))

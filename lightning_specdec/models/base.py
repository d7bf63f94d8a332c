"""The interface of a language model that scores tokens over a state that can go back.

Shapes: B rows, T tokens, N scored positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from lightning_specdec.config import settings
from lightning_specdec.models.state import DecodeState, KVStorage, Lengths, as_list

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lightning_specdec.models.agreement import Agreement
    from lightning_specdec.models.safetensors_file import Origin
    from lightning_specdec.text.tokenizer import Tokenizer
    from lightning_specdec.text.vocabulary import Vocabulary

OPENVINO_DTYPES = (torch.float32, torch.bfloat16)
"""What networks compute in where they run in OpenVINO."""
_set_num_threads = getattr(
    ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", torch.set_num_threads
)
"""Of this thread of Python: torch's function also sets the number for those that begin later, which keep it."""


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
        num_layers: how many lower layers.
        hidden: `[B, N, D]`, their output for the tokens behind those that the state has consumed.
        lengths: how many of each row's N are real.
    """

    num_layers: int
    hidden: Float[Tensor, "B N D"]
    lengths: list[int]


def select(
    hidden: Float[Tensor, "B T D"], places: Int[Tensor, "B N"] | slice | None
) -> Float[Tensor, "B N D"]:
    """The hidden states at some of the T positions: all of them when None."""
    if places is None:
        return hidden
    if isinstance(places, slice):
        return hidden[:, places]
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))


class LanguageModel(nn.Module, ABC):
    """A causal language model that scores several tokens in one call over a state that can go back.

    A subclass implements `init_state`, `forward` and `arguments`. The other methods serve drafters that read or share
    parts of the target; a model without such a part raises ValueError.

    Attributes:
        Settings: settings class of the constructor's plain arguments, from which a checkpoint rebuilds the model.
        vocab_size: number of logits per position; it may exceed the number of tokens in the tokenizer.
        hidden_size: width of the last layer's output; None if the model gives no features.
        num_layers: number of layers; None if the model gives no features.
        max_positions: context length in tokens; None if there is no limit.
        vocabulary: the bytes of each token; None if unknown.
        tokenizer: turns text into tokens; None if the tokens are not text.
        origin: the files that the weights were read from; None for a model made or trained in this process.
        backend: name of the library that computes, "torch" or "openvino".
        agreement: whether calls of all widths give the same logits, as measured when the model was made ready for
            decoding; None if that was not necessary. Results are lossless only if it holds.
    """

    Settings: ClassVar[type[settings.Settings]] = settings.NoSettings
    vocab_size: int
    hidden_size: int | None = None
    num_layers: int | None = None
    max_positions: int | None = None
    vocabulary: Vocabulary | None = None
    tokenizer: Tokenizer | None = None
    origin: Origin | None = None
    backend: ClassVar[str] = "torch"
    agreement: Agreement | None = None

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        """Make an empty state for `batch_size` rows that consume at most `max_length` tokens each."""

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
        """Score tokens. With a state, continue the tokens that it has consumed and consume these too.

        Args:
            tokens: the next tokens of each row; without a state, whole sequences.
            state: changed in place: row b's length grows by `valid_lengths[b]`.
            valid_lengths: number of real tokens in each row, before its right padding; all T when None.
            logits_for: positions in T to return logits for, per row or as one slice for all rows; all T when None.
            features: numbers of the layers, from 0, whose hidden states to return.
        """

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values; a checkpoint stores them to rebuild the model."""

    def _lacks(self, what: str) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} has no {what}: take a transformers model, or draft in another way"
        )

    def check_exit(self, num_layers: int) -> None:
        """Raise ValueError if the model cannot exit after its first `num_layers` layers."""
        self._lacks("layers to exit from")

    def lower(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, starts: Sequence[int], num_layers: int
    ) -> Float[Tensor, "B T D"]:
        """The output of the first `num_layers` layers for tokens, where row b's first one is at position `starts[b]`.

        It writes these layers' part of the state and leaves the state's lengths, which count tokens that all layers
        have read. The `forward` of such a model takes `exit_states` too.
        """
        self._lacks("layers to exit from")

    def exit_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """Logits from a lower layer's output, by the final norm and the output head."""
        self._lacks("layers to exit from")

    def records(self, state: DecodeState, num_tokens: int) -> bool:
        """Whether a call on `num_tokens` tokens per row is recorded (CUDA graphs), so that `read_at` may be used."""
        return False

    def read_at(
        self,
        state: KVStorage,
        span: int,
        tokens: Int[Tensor, "B T"],
        starts: Int[Tensor, "B"],
        num_layers: int | None,
    ) -> Float[Tensor, "B T D"]:
        """The output of the first `num_layers` layers (all when None) inside a recorded call, as `lower`.

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
        """The input embeddings of these tokens. Raises ValueError if the model does not share them."""
        self._lacks("input embeddings that can be shared")

    @property
    def embedding_table(self) -> Float[Tensor, "V D"] | None:
        """The weights whose rows `embeddings` gives; None where it computes them in another way."""
        return None

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The output head's weight matrix."""
        self._lacks("output head that can be shared")

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, shared ones counted once. Kept from the first use, since packed layers have none."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def lossy_reason(self) -> str | None:
        """Why drafting changes this model's output, whatever the rule; None if it does not."""
        return None if self.agreement is None else self.agreement.reason

    def packed(self) -> LanguageModel:
        """The same model with weights laid out for this processor, for inference only; itself if there is no need."""
        return self

    def fused(self) -> LanguageModel:
        """The same model with fewer kernel launches per token, for inference only; itself if there is no such form."""
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
        """Consume `tokens`, then generate `num_tokens` tokens. The host reads none of them; `choose` collects them.

        Args:
            tokens: tokens that the state has not consumed yet.
            num_tokens: number of new tokens; the state consumes all but the last one.
            choose: `choose(logits, i)` returns new token i of each row from its logits.
            valid_lengths: number of real tokens in each row of `tokens`; all T when None.
        """
        last: Tensor | slice = slice(-1, None)
        if valid_lengths is not None:
            last = torch.tensor(
                [[length - 1] for length in as_list(valid_lengths)], device=tokens.device
            )
        for i in range(num_tokens):
            output = self(tokens, state, valid_lengths=valid_lengths, logits_for=last)
            # A copy, since the next recorded call overwrites its logits, which may be the choice's memory.
            tokens = choose(output.logits[:, -1].clone(), i).clone()[:, None]
            valid_lengths, last = None, slice(-1, None)


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Torch on one thread where wanted. Beside OpenVINO its other threads, which wait busily for more work, take
    longer from the cores than they save."""
    before = torch.get_num_threads()
    _set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        _set_num_threads(before)


def weights_digest(module: nn.Module) -> str:
    """A hash of a network's weights; weights that lie in files count by those files' hashes and by checksums, since
    they may have changed after they were read."""
    found, known = hashlib.sha256(), set[int]()
    for name, part in module.named_modules():
        if (origin := getattr(part, "origin", None)) is not None:
            found.update(f"{name} {origin.sha256}".encode())
            known |= {id(tensor) for tensor in chain(part.parameters(), part.buffers())}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        plain = tensor.detach()
        found.update(name.encode())
        if id(tensor) in known and type(plain) is not Tensor:  # quantized, from these files
            found.update(f"{plain.dtype} {type(plain).__name__}".encode())
            continue
        data = plain.cpu().flatten().view(torch.uint8).numpy().data
        found.update(zlib.crc32(data).to_bytes(4) if id(tensor) in known else data)
    return found.hexdigest()


def weights_stamp(*modules: nn.Module) -> tuple[list[tuple[int, int | None, torch.dtype]], bytes]:
    """Changes when weights do: each one's identity and how often torch has written to it, and some of their values,
    since torch does not count what fused optimizers and assignments to `data` change."""
    weights = list(chain(*(module.parameters() for module in modules)))
    known = [
        (id(each), None if each.is_inference() else each._version, each.dtype) for each in weights
    ]
    plain = (each.data for each in weights if type(each.data) is Tensor)
    some = [
        each.flatten()[:: max(1, each.numel() // 64)].contiguous().view(torch.uint8).cpu()
        for each in plain
    ]
    return known, torch.cat(some).numpy().tobytes() if some else b""

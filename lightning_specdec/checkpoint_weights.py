"""A network as it is described, holding weights that somebody else has written.

Theory: a description can be a lie, and building what it says can cost any amount of memory and time. So it is built
without memory first, in no more operations than its weights account for; once the weights have turned out to be exactly
those that it wants, it is as large as the file at most, and what it holds besides them can be computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_specdec.description import short
from lightning_specdec.models import LanguageModel

Module = TypeVar("Module", bound=nn.Module)
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What building and trying a network of a stranger's description can raise."""
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
KINDS = {str(kind).removeprefix("torch."): kind for kind in _FLOATS}
"""What weights can be stored as and computed in, by name."""
_CALLS_PER_WEIGHT = 200
"""Operations of torch that building a network may take for each weight; a few dozen are usual."""
_COMPUTED_BYTES = 2**28
"""Most bytes of buffers that are computed and not stored: tables of rotations and the like."""

_RANDOM = {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_"}
_INITIALIZERS = {"torch.nn.init", "transformers.initialization"}
"""What draws new weights, and where it is defined."""


def with_weights(make: Callable[[], Module], owner: str, weights: Mapping[str, Tensor]) -> Module:
    """What `make` builds, with these weights as its own.

    Args:
        make: builds the network; called without memory first.
        owner: what it is called in an error.

    Raises:
        ValueError: the weights are not those of such a network, or no plain ones.
    """
    with torch.device("meta"), _Unset(_CALLS_PER_WEIGHT * (len(weights) + 10)):
        module = make()
    wanted = module.state_dict()
    _check(owner, weights, wanted)
    shared = _shared(module)
    for first, *others in shared:
        for other in others:
            if not torch.equal(weights[first], weights[other]):
                raise ValueError(f"the {owner}'s {first} and {other} differ, and it has one weight for both")
    computed = [buffer for name, buffer in module.named_buffers() if name not in wanted]
    if sum(buffer.nbytes for buffer in computed) > _COMPUTED_BYTES:
        raise ValueError(f"the {owner} wants tables of more than {_COMPUTED_BYTES:,} bytes: its positions are absurd")
    if computed:
        with _Unset(2 * _CALLS_PER_WEIGHT * (len(weights) + 10)):
            module = make()  # its memory is never touched where the weights take its place
    module.load_state_dict(dict(weights), strict=True, assign=True)
    for first, *others in shared:
        for other in others:
            _set(module, other, module.get_parameter(first))
    return module


@torch.no_grad()
def try_out(owner: str, module: nn.Module) -> None:
    """Have every language model in it read two tokens: sizes may fit the weights and still not each other.

    Raises:
        ValueError: one cannot.
    """
    for model in module.modules():
        if isinstance(model, LanguageModel):
            try:
                logits = model(torch.tensor([[0, 1 % model.vocab_size]]), model.init_state(1, 4)).logits
            except BROKEN as error:
                raise ValueError(f"the {owner} cannot read a text: {error}") from error
            if logits.shape != (1, 2, model.vocab_size):
                raise ValueError(f"the {owner} scores {logits.shape[-1]} tokens, its vocabulary has {model.vocab_size}")


def stored_as(weights: Mapping[str, Tensor], kind: str | None) -> dict[str, Tensor]:
    """The weights in another floating-point type, for a smaller file; as they are when None.

    Raises:
        ValueError: there is no such type, or a weight is too large for it.
    """
    if kind is None:
        return dict(weights)
    if kind not in KINDS:
        raise ValueError(f"weights cannot be stored as {short(repr(kind), 40)}: take one of {', '.join(sorted(KINDS))}")
    stored = {name: value.to(KINDS[kind]) for name, value in weights.items()}
    for name, value in stored.items():
        if value.isinf().any():
            raise ValueError(f"{name} is too large for {kind}: take bfloat16 or float32")
    return stored


class _Unset(TorchFunctionMode):
    """Leaves new weights unset, since the file's take their place; and ends what takes too many operations.

    Args:
        most: so many are allowed.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= 1
        if self.left < 0:
            raise ValueError("it describes far more than it holds weights for")
        if getattr(func, "__name__", None) in _RANDOM and getattr(func, "__module__", None) in _INITIALIZERS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _shared(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, as an output head and a table of embeddings can be."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _check(owner: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the given weights are those that the description wants, whole and finite."""
    if missing := wanted.keys() - given.keys():
        raise ValueError(
            f"the weights of the {owner} lack {min(missing)} ({len(missing)} of {len(wanted)} are missing)"
        )
    if foreign := given.keys() - wanted.keys():
        raise ValueError(f"among the weights of the {owner} is {short(min(foreign), 80)!r}, which it has no place for")
    for name, value in given.items():
        if value.shape != wanted[name].shape:
            shapes = f"{tuple(value.shape)}, its description says {tuple(wanted[name].shape)}"
            raise ValueError(f"the shape of the {owner}'s {name} is {shapes}")
        if value.dtype not in _FLOATS or value.layout != torch.strided or value.device.type != "cpu":
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise ValueError(f"the {owner}'s {name} is no plain floating-point tensor ({kind})")
        if value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise ValueError(f"the {owner}'s {name} claims more numbers than the file holds")
        if not value.isfinite().all():
            raise ValueError(f"the {owner}'s {name} is not finite: its training diverged, so lower the learning rate")
    if len(kinds := {str(value.dtype) for value in given.values()}) > 1:
        raise ValueError(f"the weights of the {owner} are of several kinds: {', '.join(sorted(kinds))}")

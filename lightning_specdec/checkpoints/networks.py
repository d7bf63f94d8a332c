"""A network <-> its description in plain values (a class and its arguments) and its weights.

A description can be a lie, and building what it says can cost any amount of memory and time. So classes are looked up
by name and never imported, networks are built without memory first (on the meta device) in no more operations than
their weights account for, and take a file's weights only if these fit exactly.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_specdec.checkpoints.archive import BROKEN
from lightning_specdec.config.kinds import DRAFTERS, MODELS, Kinds
from lightning_specdec.config.terminal import short
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

FLOATS = {
    str(kind).removeprefix("torch."): kind for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
_DEEPEST, _MOST_PARTS = 8, 16
"""Networks inside networks, and networks in one list."""
_FORMER = {"guesses_per_token": "tokens_per_match"}
"""Arguments that older files name otherwise."""
_CALLS_PER_WEIGHT = 200
"""Operations of torch that building a network may take for each weight; a few dozen are usual."""
_COMPUTED_BYTES = 2**28
"""Most bytes of buffers that are computed and not stored: tables of rotations and the like."""
_RANDOM = {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_"}
_INITIALIZERS = {"torch.nn.init", "transformers.initialization"}
"""What draws new weights, and where it is defined."""


def spec(module: nn.Module) -> dict[str, Any]:
    """The description of a model or a drafter.

    Raises:
        ValueError: it cannot be built again from its arguments.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return spec(value) if isinstance(value, nn.Module) else value

    kind = type(module)
    name = (DRAFTERS if isinstance(module, Drafter) else MODELS).name_of(kind)
    if not isinstance(module, LanguageModel | Drafter) or (isinstance(module, LanguageModel) and name not in MODELS):
        raise ValueError(f"a checkpoint cannot hold a {kind.__name__}: it could not be built again")
    arguments, taken = module.arguments(), inspect.signature(kind).parameters
    named = {each.kind for each in taken.values()}
    if "<" in name or (inspect.Parameter.VAR_KEYWORD not in named and not arguments.keys() <= taken.keys()):
        raise ValueError(f"a checkpoint cannot hold a {kind.__name__}: it could not be built again")
    return {"class": name, "arguments": {key: plain(value) for key, value in arguments.items()}}


def build(described: object, kinds: tuple[Kinds, ...], trusted: str | None = None, depth: int = 0) -> Any:
    """An object of a known class from its description.

    Args:
        kinds: the classes that it may be.
        trusted: import path of a drafter that the user has named, the only one that is imported.

    Raises:
        ValueError, TypeError: it describes none; constructors may raise the rest of `BROKEN`.
    """

    def built(value: Any) -> Any:
        if isinstance(value, list) and any(map(_is_spec, value)):
            if len(value) > _MOST_PARTS:
                raise ValueError("it has too many parts")
            return [built(each) for each in value]
        return build(value, (MODELS, DRAFTERS), trusted, depth + 1) if _is_spec(value) else value

    if depth > _DEEPEST:
        raise ValueError("its parts are nested too deeply")
    if not isinstance(described, dict) or not isinstance(described.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {short(repr(described), 80)}")
    kind = _kind(described.get("class"), kinds, trusted)
    arguments = {_FORMER.get(key, key): built(value) for key, value in described["arguments"].items()}
    found = kind(**arguments)
    if foreign := arguments.keys() - found.arguments().keys():
        raise ValueError(f"a checkpoint's {kind.__name__} has no argument {short(str(min(foreign)), 80)!r}")
    return found


def _is_spec(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"class", "arguments"}


def _kind(name: object, kinds: tuple[Kinds, ...], trusted: str | None) -> type[Any]:
    """The class of that name; an import path only where the user has given the same one."""
    if isinstance(name, str):
        for each in kinds:
            if (current := each.renamed.get(name, name)) in each:
                return each.load(current)
        if DRAFTERS in kinds and "." in name:
            return DRAFTERS.load(name, trusted=name == trusted)
    known = ", ".join(each for one in kinds for each in one)
    raise ValueError(f"{short(repr(name), 80)} is none of the classes that may stand there: {known}")


def with_weights(make: Callable[[], nn.Module], owner: str, weights: Mapping[str, Tensor]) -> Any:
    """What `make` builds, ready to decode, with these weights as its own.

    Args:
        make: builds the network; called without memory first.
        owner: what it is called in an error.

    Raises:
        ValueError: the weights are not those of such a network, or no plain ones, or it cannot read a text.
    """
    with torch.device("meta"), _Unset(_CALLS_PER_WEIGHT * (len(weights) + 10)):
        module = make()
    wanted, given = module.state_dict(), dict(weights)
    shared = _shared(module)
    for names in shared:  # a weight of several names is written once
        found = [given[name] for name in names if name in given]
        given |= {name: found[0] for name in names if found and name not in given}
    _check(owner, given, wanted)
    for first, *others in shared:
        for other in others:
            if not torch.equal(given[first], given[other]):
                raise ValueError(f"the {owner}'s {first} and {other} differ, and it has one weight for both")
    computed = [buffer for name, buffer in module.named_buffers() if name not in wanted]
    if sum(buffer.nbytes for buffer in computed) > _COMPUTED_BYTES:
        raise ValueError(f"the {owner} wants tables of more than {_COMPUTED_BYTES:,} bytes: its positions are absurd")
    if computed:
        with _Unset(2 * _CALLS_PER_WEIGHT * (len(given) + 10)):
            module = make()  # its memory is never touched where the weights take its place
    module.load_state_dict(given, strict=True, assign=True)
    for first, *others in shared:
        for other in others:
            parent, _, leaf = other.rpartition(".")
            setattr(module.get_submodule(parent), leaf, module.get_parameter(first))
    _try_out(owner, module.eval())
    return module


@torch.no_grad()
def _try_out(owner: str, module: nn.Module) -> None:
    """Have every language model in it read two tokens: sizes may fit the weights and still not each other."""
    for model in module.modules():
        if isinstance(model, LanguageModel):
            try:
                logits = model(torch.tensor([[0, 1 % model.vocab_size]]), model.init_state(1, 4)).logits
            except BROKEN as error:
                raise ValueError(f"the {owner} cannot read a text: {error}") from error
            if logits.shape != (1, 2, model.vocab_size):
                raise ValueError(f"the {owner} scores {logits.shape[-1]} tokens, its vocabulary has {model.vocab_size}")


class _Unset(TorchFunctionMode):
    """Leaves new weights unset, since the file's take their place, and ends what takes more than `left` operations."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

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
        if value.dtype not in FLOATS.values() or value.layout != torch.strided or value.device.type != "cpu":
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise ValueError(f"the {owner}'s {name} is no plain floating-point tensor ({kind})")
        if value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise ValueError(f"the {owner}'s {name} claims more numbers than the file holds")
        if not value.isfinite().all():
            raise ValueError(f"the {owner}'s {name} is not finite: its training diverged, so lower the learning rate")
    if len(kinds := {str(value.dtype) for value in given.values()}) > 1:
        raise ValueError(f"the weights of the {owner} are of several kinds: {', '.join(sorted(kinds))}")

"""A network <-> its description in plain values (a class and its arguments) and its weights.

A description can be a lie, and building what it says can cost any amount of memory and time. So classes are looked up
by name and never imported, and networks are built without memory for parameters, of which there may be no more than the
file's weights account for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_specdec.config.kinds import DRAFTERS, MODELS, Kinds
from lightning_specdec.config.terminal import short
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.packed import PackedLinear

FLOATS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
_MOST_PARTS, _DEEPEST = 32, 8
"""Networks that a file describes, and networks inside networks."""
_ALIGNMENT = 64  # bytes: a cache line, and what torch gives its own tensors
_COMPUTED_BYTES = 2**28
"""Most bytes of buffers that are computed and not stored: tables of rotations and the like."""


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
    packed = any(isinstance(part, PackedLinear) for part in module.modules())
    if packed or getattr(module, "backend", "torch") != "torch":
        raise ValueError("a packed model cannot be saved: load it with pack=False")
    name = (DRAFTERS if isinstance(module, Drafter) else MODELS).name_of(kind)
    try:
        if "<" in name or not (isinstance(module, Drafter) or name in MODELS):
            raise TypeError(
                "only models of this package and drafters with an import path are built again"
            )
        arguments = module.arguments()  # type: ignore[operator]
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"a checkpoint cannot hold a {kind.__name__}: {error}") from error
    return {"class": name, "arguments": {key: plain(value) for key, value in arguments.items()}}


def build(described: object, kinds: tuple[Kinds, ...], trusted: str | None = None) -> Any:
    """An object of a known class from its description.

    Args:
        kinds: the classes that it may be.
        trusted: import path of a drafter that the user has named, the only one that is imported.

    Raises:
        ValueError, TypeError: it describes none; constructors may raise the rest of `archive.BROKEN`.
    """

    def built(value: Any) -> Any:
        if isinstance(value, list):
            return [built(each) for each in value]
        is_spec = isinstance(value, dict) and value.keys() == {"class", "arguments"}
        return build(value, (MODELS, DRAFTERS), trusted) if is_spec else value

    if not isinstance(described, dict) or not isinstance(described.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {short(repr(described), 80)}")
    kind = _kind(described.get("class"), kinds, trusted)
    arguments = {key: built(value) for key, value in _current(described["arguments"]).items()}
    found = kind(**arguments)
    if foreign := arguments.keys() - found.arguments().keys():
        raise ValueError(
            f"a checkpoint's {kind.__name__} has no argument {short(str(min(foreign)), 80)!r}"
        )
    return found


def _current(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of older files as they are given now."""
    arguments = dict(arguments)
    if arguments.pop("shared_output", False):
        raise ValueError(
            "its heads share the target's output layer, which is no longer supported: train them again"
        )
    windows = arguments.get("stage_windows")
    if isinstance(windows, list) and windows:  # one for each stage; the draft is the same with any
        arguments["stage_windows"] = windows[-1]
    return arguments


def check_parts(described: object) -> None:
    """Raise ValueError where plain values describe more networks than any checkpoint has: each takes time to build."""

    def count(value: object, depth: int) -> int:
        if isinstance(value, dict):
            is_part = "arguments" in value
            if depth + is_part > _DEEPEST:
                raise ValueError("its parts are nested too deeply")
            return is_part + sum(count(each, depth + is_part) for each in value.values())
        return sum(count(each, depth) for each in value) if isinstance(value, list) else 0

    if (number := count(described, 0)) > _MOST_PARTS:
        raise ValueError(
            f"it describes {number} networks, and a checkpoint has at most {_MOST_PARTS}"
        )


def current(described: Any) -> Any:
    """Descriptions of older files, wherever they stand among plain values, as they are written now."""
    if isinstance(described, dict):
        return _current({key: current(value) for key, value in described.items()})
    return [current(each) for each in described] if isinstance(described, list) else described


def _kind(name: object, kinds: tuple[Kinds, ...], trusted: str | None) -> type[Any]:
    """The class of that name; an import path only where the user has given the same one."""
    name = short(str(name), 200)
    for registry in kinds:
        if name in registry:
            return registry.load(name)
    return kinds[-1].load(name, trusted=name == trusted)


def with_weights(make: Callable[[], nn.Module], owner: str, weights: Mapping[str, Tensor]) -> Any:
    """What `make` builds, ready to decode, with these weights as its own.

    Args:
        make: builds the network; called twice, the first time with no memory for buffers either.
        owner: what it is called in an error.

    Raises:
        ValueError, RuntimeError: the weights are not those of such a network, or it cannot read a text.
    """
    dtypes = {value.dtype for value in weights.values()}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS.values()):
        raise ValueError(
            f"the weights of the {owner} are of {dtypes}: expected one of {', '.join(FLOATS)}"
        )
    for device in (
        "meta",
        "cpu",
    ):  # first without any memory: buffers take it only where names and shapes fit
        with torch.device(device), _without_weights(2 * len(weights) + 100):
            module = make()
        first: dict[int, str] = {}
        parameters = module.named_parameters(remove_duplicate=False)
        tied = {
            name: other
            for name, value in parameters
            if (other := first.setdefault(id(value), name)) != name
        }
        given = {name: weights[other] for name, other in tied.items() if other in weights} | dict(
            weights
        )
        module.load_state_dict(given, strict=True, assign=True)
        if sum(buffer.nbytes for buffer in module.buffers()) > _COMPUTED_BYTES:
            raise ValueError(
                f"the {owner} wants tables of more than {_COMPUTED_BYTES:,} bytes: it has too many positions"
            )
    for name, other in tied.items():
        if not torch.equal(given[name], given[other]):
            raise ValueError(
                f"the {owner}'s {other} and {name} differ, and it has one weight for both"
            )
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, module.get_parameter(other))
    for (
        parameter
    ) in module.parameters():  # a mapped file holds them at any byte, and rounding depends on where
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
    if not all(value.isfinite().all() for value in weights.values()):
        raise ValueError(
            f"the weights of the {owner} are not finite: its training diverged, so lower the learning rate"
        )
    _try_out(module.eval())
    return module


class _NoRandomValues(TorchFunctionMode):
    """Skips drawing initial weights: on the meta device that does nothing, but imports torch's compiler, a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in (
            "normal_",
            "uniform_",
            "kaiming_uniform_",
            "trunc_normal_",
        ):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_weights(most: int) -> Iterator[None]:
    """Let modules take no memory for parameters, draw no random numbers for them, and have at most `most` of them."""
    count = 0

    def drop(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += parameter is not None
        if count > most:
            raise ValueError("it describes far more than it holds weights for")
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(drop), _NoRandomValues():  # type: ignore[arg-type]
        yield


@torch.no_grad()
def _try_out(module: nn.Module) -> None:
    """Have every language model in it read two tokens: sizes may fit the weights and still not each other."""
    for model in module.modules():
        if isinstance(model, LanguageModel):
            logits = model(torch.zeros(1, 2, dtype=torch.long), model.init_state(1, 4)).logits
            if logits.shape != (1, 2, model.vocab_size):
                raise ValueError(
                    f"a model scores {logits.shape[-1]} tokens, its vocabulary has {model.vocab_size}"
                )

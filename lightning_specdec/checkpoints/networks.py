"""Networks and their descriptions in plain values: a class, its arguments, and weights.

A description from a stranger may be wrong on purpose, and building it could take any amount of
memory and time. So classes are looked up by name and never imported. Networks are built without
memory for their parameters, and may have no more parameters than the file has weights.
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
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
_MAX_PARTS = 32
"""Networks that a file may describe."""
_MAX_PART_DEPTH = 8
"""Depth of networks inside networks."""
_ALIGNMENT = 64
"""Bytes of a cache line, to which torch aligns its own tensors."""
_MAX_BUFFER_BYTES = 2**28
"""Most bytes of buffers that are computed and not stored, such as tables of rotations."""
_INIT_FUNCTIONS = ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_")


def spec(module: nn.Module) -> dict[str, Any]:
    """Return the description of a model or a drafter.

    Raises:
        ValueError: it cannot be built again from its arguments.
    """
    is_packed = any(isinstance(part, PackedLinear) for part in module.modules())
    if is_packed or getattr(module, "backend", "torch") != "torch":
        raise ValueError("a packed model cannot be saved: load it with pack=False")

    module_class = type(module)
    registry = DRAFTERS if isinstance(module, Drafter) else MODELS
    name = registry.name_of(module_class)
    # Classes within functions have no import path.
    is_importable = "<" not in name
    try:
        if not is_importable or not (isinstance(module, Drafter) or name in MODELS):
            raise TypeError(
                "only models of this package and drafters with an import path are built again"
            )
        arguments = module.arguments()  # type: ignore[operator]
        inspect.signature(module_class).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"a checkpoint cannot hold a {module_class.__name__}: {error}") from error
    return {
        "class": name,
        "arguments": {key: _plain_argument(value) for key, value in arguments.items()},
    }


def _plain_argument(value: Any) -> Any:
    """Return an argument with networks in it replaced by their descriptions."""
    if isinstance(value, list | tuple):
        return [_plain_argument(item) for item in value]
    if isinstance(value, nn.Module):
        return spec(value)
    return value


def build(described: object, kinds: tuple[Kinds, ...], trusted: str | None = None) -> Any:
    """Build an object of a known class from its description.

    Args:
        kinds: the classes that it may be.
        trusted: import path of a drafter that the user has named, the only one that is imported.

    Raises:
        ValueError, TypeError: the description is wrong; constructors may raise others of
            `archive.BROKEN`.
    """
    if not isinstance(described, dict) or not isinstance(described.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {short(repr(described), 80)}")

    built_class = _find_class(described.get("class"), kinds, trusted)
    arguments = {
        name: _built_argument(value, trusted)
        for name, value in _current_arguments(described["arguments"]).items()
    }
    built = built_class(**arguments)

    # A constructor may accept more than it stores.
    unknown_names = arguments.keys() - built.arguments().keys()
    if unknown_names:
        raise ValueError(
            f"a checkpoint's {built_class.__name__} has no argument "
            f"{short(str(min(unknown_names)), 80)!r}"
        )
    return built


def _built_argument(value: Any, trusted: str | None) -> Any:
    """Return an argument with descriptions in it replaced by the networks."""
    if isinstance(value, list):
        return [_built_argument(item, trusted) for item in value]
    if isinstance(value, dict) and value.keys() == {"class", "arguments"}:
        return build(value, (MODELS, DRAFTERS), trusted)
    return value


def _find_class(name: object, kinds: tuple[Kinds, ...], trusted: str | None) -> type[Any]:
    """Return the class of that name; an import path only if the user has given the same one."""
    # The name may be any value of a stranger's file, and appears in errors.
    name = short(str(name), 200)
    for registry in kinds:
        if name in registry:
            return registry.load(name)
    return kinds[-1].load(name, trusted=name == trusted)


def _current_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an older file in today's form."""
    arguments = dict(arguments)
    if arguments.pop("shared_output", False):
        raise ValueError(
            "its heads share the target's output layer, which is no longer supported: "
            "train them again"
        )
    stage_windows = arguments.get("stage_windows")
    if isinstance(stage_windows, list) and stage_windows:
        # Older files have one for each stage; they do not change what is drafted.
        arguments["stage_windows"] = stage_windows[-1]
    return arguments


def current(described: Any) -> Any:
    """Return plain values, with the descriptions of older files in today's form."""
    if isinstance(described, dict):
        return _current_arguments({key: current(value) for key, value in described.items()})
    if isinstance(described, list):
        return [current(value) for value in described]
    return described


def check_parts(described: object) -> None:
    """Raise ValueError if plain values describe more networks than any checkpoint has.

    Each network takes time to build.
    """
    num_parts = _count_parts(described, depth=0)
    if num_parts > _MAX_PARTS:
        raise ValueError(
            f"it describes {num_parts} networks, and a checkpoint has at most {_MAX_PARTS}"
        )


def _count_parts(value: object, depth: int) -> int:
    """Return the number of networks in plain values that are within `depth` other networks."""
    if isinstance(value, list):
        return sum(_count_parts(item, depth) for item in value)
    if not isinstance(value, dict):
        return 0

    num_parts = 0
    if "arguments" in value:
        num_parts = 1
        depth += 1
    if depth > _MAX_PART_DEPTH:
        raise ValueError("its parts are nested too deeply")
    return num_parts + sum(_count_parts(item, depth) for item in value.values())


def with_weights(make: Callable[[], nn.Module], owner: str, weights: Mapping[str, Tensor]) -> Any:
    """Build a network with these weights, ready to decode.

    Args:
        make: builds the network. It is called twice, first without memory for buffers either.
        owner: what the network is called in an error.
        weights: used as the parameters, without a copy.

    Raises:
        ValueError, RuntimeError: the weights are not those of such a network, or it cannot read a
            text.
    """
    dtypes = {value.dtype for value in weights.values()}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS.values()):
        raise ValueError(
            f"the weights of the {owner} are of {dtypes}: expected one of {', '.join(FLOATS)}"
        )

    # Tied weights are stored once, so a network may have more parameters than the file has weights.
    max_parameters = 2 * len(weights) + 100
    # On the meta device first, so that buffers take memory only if all names and shapes fit.
    for device in ("meta", "cpu"):
        with torch.device(device), _without_weights(max_parameters):
            module = make()
        tied_names = _tied_names(module)
        all_weights = _with_tied_weights(weights, tied_names)
        # Assigning uses the file's mapped memory and needs no second copy.
        module.load_state_dict(all_weights, strict=True, assign=True)
        if sum(buffer.nbytes for buffer in module.buffers()) > _MAX_BUFFER_BYTES:
            raise ValueError(
                f"the {owner} needs tables of more than {_MAX_BUFFER_BYTES:,} bytes: "
                "it has too many positions"
            )

    _tie(module, owner, tied_names, all_weights)
    _align(module)
    if not all(value.isfinite().all() for value in weights.values()):
        raise ValueError(
            f"the weights of the {owner} are not finite: "
            "its training diverged, so lower the learning rate"
        )
    _try_out(module.eval())
    return module


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first name."""
    first_names: dict[int, str] = {}
    tied_names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied_names[name] = first_name
    return tied_names


def _with_tied_weights(
    weights: Mapping[str, Tensor], tied_names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return weights under all their names; files may contain them under the first one only."""
    tied_weights = {
        name: weights[first_name]
        for name, first_name in tied_names.items()
        if first_name in weights
    }
    return {**tied_weights, **weights}


def _tie(
    module: nn.Module,
    owner: str,
    tied_names: Mapping[str, str],
    weights: Mapping[str, Tensor],
) -> None:
    """Make parameters one again that assigning the weights has separated."""
    for name, first_name in tied_names.items():
        if not torch.equal(weights[name], weights[first_name]):
            raise ValueError(
                f"the {owner}'s {first_name} and {name} differ, and it has one weight for both"
            )
        parent_name, _, parameter_name = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        setattr(parent, parameter_name, module.get_parameter(first_name))


def _align(module: nn.Module) -> None:
    """Copy parameters that are not aligned in memory.

    A mapped file has them at any address, and rounding depends on the alignment.
    """
    for parameter in module.parameters():
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


class _NoRandomValues(TorchFunctionMode):
    """Skips the drawing of initial weights.

    On the meta device it has no effect, but it imports torch's compiler, which takes a second.
    `torch.nn.utils.skip_init` needs constructors with a `device` argument, which ours lack.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def _without_weights(max_parameters: int) -> Iterator[None]:
    """Let modules take no memory for parameters, draw no random numbers, and be of bounded size."""
    num_parameters = 0

    def move_to_meta(
        module: nn.Module,
        name: str,
        parameter: nn.Parameter | None,
    ) -> nn.Parameter | None:
        nonlocal num_parameters
        if parameter is None:
            return None
        num_parameters += 1
        if num_parameters > max_parameters:
            raise ValueError("it describes far more than it holds weights for")
        if parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]
    with hook, _NoRandomValues():
        yield


@torch.no_grad()
def _try_out(module: nn.Module) -> None:
    """Let each language model in a network read two tokens.

    Sizes may fit the weights and still not fit each other.
    """
    for model in module.modules():
        if not isinstance(model, LanguageModel):
            continue
        tokens = torch.zeros(1, 2, dtype=torch.long)
        logits = model(tokens, model.init_state(1, 4)).logits
        if logits.shape != (1, 2, model.vocab_size):
            raise ValueError(
                f"a model scores {logits.shape[-1]} tokens, its vocabulary has {model.vocab_size}"
            )

"""What a user changes in a model's modules: code that replaces or joins theirs, and when it does.

Decoding runs faster forms of a model: packed copies of its linear layers, its layers called one by
one. Such a form is correct only while the model's modules compute what their classes define.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize

from lightning_specdec.models.weights import overwritten_buffers, weights_checksum

_HOOK_TABLES = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
}
_INTERNAL_HOOK_MODULES = (
    "transformers.utils.output_capturing",
    "lightning_specdec.models.huggingface",
    "lightning_specdec.models.layers",
    "lightning_specdec.models.longrope",
)
_INTERNAL_NAMES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of weights, submodules and hooks, its mode."""
_IRRELEVANT_NAMES = frozenset(
    [
        "agreement",
        "generate",
        "generation_config",
        "extra_repr",
        "num_parameters",
        "prepare_inputs_for_generation",
        "tokenizer",
        "vocabulary",
    ]
)
"""Attributes that change no output of a forward pass."""
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAX_DEPTH = 8
"""Of values within values that are looked at."""
_MAX_ITEMS = 1000
"""Of a mapping or sequence that are looked at. A longer one is data, and not a setting."""
_MODULE_FUNCTIONS: dict[tuple[Any, str], Any] = {
    (nn.Module, "__call__"): nn.Module.__call__,
    (nn.Module, "_call_impl"): nn.Module._call_impl,
    (nn.Linear, "forward"): nn.Linear.forward,
    (functional, "linear"): functional.linear,
}
"""Functions of torch that packed forms do without, as they were when this file was imported."""


class UserCode(NamedTuple):
    """Code that a user has added to a module.

    Args:
        kind: what it is, with an article, as "a forward hook".
        path: name of the module in the model; empty for the model itself.
        function: the function that is called; None if there are several.
    """

    kind: str
    path: str
    function: Any

    def __str__(self) -> str:
        return f"{self.kind} on {self.path}" if self.path else f"{self.kind} on the model itself"


def user_code(model: nn.Module) -> list[UserCode]:
    """All code of users in a model's modules: hooks, replaced functions, parametrizations."""
    found_code: list[UserCode] = []
    for kind, hooks in (
        ("a forward hook", torch_modules._global_forward_hooks),
        ("a forward pre-hook", torch_modules._global_forward_pre_hooks),
    ):
        for hook in hooks.values():
            found_code.append(UserCode(kind, "every module", hook))
    for function_name, function in _replaced_functions():
        found_code.append(UserCode(f"a replaced {function_name}", "every module", function))
    for path, module in model.named_modules():
        found_code.extend(_code_of(path, module))
    return found_code


def has_user_code(module: nn.Module) -> bool:
    """Whether this one module, without its children, runs code of a user."""
    if next(_replaced_functions(), None) is not None:
        return True
    return next(_code_of("", module), None) is not None


def _replaced_functions() -> Iterator[tuple[str, Any]]:
    """Names and functions of torch itself that a user has replaced for all objects."""
    for (owner, name), original in _MODULE_FUNCTIONS.items():
        function = getattr(owner, name)
        if function is not original:
            yield f"{owner.__name__}.{name}", function


def _code_of(path: str, module: nn.Module) -> Iterator[UserCode]:
    """The code of users in one module, without its children."""
    attributes = vars(module)
    for table, kind in _HOOK_TABLES.items():
        for hook in attributes[table].values():
            if not _is_internal(hook):
                yield UserCode(kind, path, hook)

    if parametrize.is_parametrized(module):
        yield UserCode("a parametrization", path, None)

    # A compiled layer of ours keeps its plain function under this name.
    if "forward_uncompiled" in attributes:
        return
    module_class = type(module)
    for name, value in attributes.items():
        if name in _INTERNAL_NAMES or name in _IRRELEVANT_NAMES or not callable(value):
            continue
        if callable(getattr(module_class, name, None)):
            yield UserCode(f"a replaced {name}", path, value)


def _is_internal(hook: Any) -> bool:
    """Whether a hook is not a user's.

    Those of transformers record hidden states, or make the embeddings' output require gradients for
    adapters. Ours exist during a call of their thread only.
    """
    if getattr(hook, "__module__", None) in _INTERNAL_HOOK_MODULES:
        return True
    is_of_transformers = getattr(hook, "__module__", None) == "transformers.modeling_utils"
    return is_of_transformers and hook.__name__ == "make_inputs_require_grads"


def compiled_part(model: nn.Module) -> str | None:
    """Name of the first module that `torch.compile` or torch.jit has compiled; None without one."""
    for path, module in model.named_modules():
        attributes = vars(module)
        is_compiled = (
            attributes.get("_compiled_call_impl") is not None
            or "_orig_mod" in module._modules
            or hasattr(attributes.get("forward"), "_torchdynamo_orig_callable")
            or isinstance(module, torch.jit.ScriptModule)
        )
        if is_compiled and "forward_uncompiled" not in attributes:
            return path or type(model).__name__
    return None


def check_in_memory(model: nn.Module) -> None:
    """Raise ValueError if a model's weights are not all in the memory of one device."""
    name = type(getattr(model, "model", model)).__name__
    # accelerate keeps what it offloads on the meta device.
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            f"{name} has weights on the meta device or on disk: load it without offload"
        )
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {' and '.join(devices)}: load it on one device, as with "
            'device_map="cuda:0"'
        )


class ModelStamp:
    """All that decides what modules compute, to be compared with the same at a later time.

    It covers the modules themselves and their classes, hooks, functions, settings and configs, and
    the identity of every weight. Values that only a copy can miss, the bytes of its weights, are
    left to `weights_checksum`.

    Args:
        modules: the models to look at.
        count_writes: whether a write to a parameter that torch counts is a change. One to a buffer
            always is.
    """

    def __init__(self, *modules: nn.Module, count_writes: bool = True) -> None:
        self._count_writes = count_writes
        self._values: list[Any] = []
        # An identity is the address of a weak reference. Holding the reference keeps the address
        # from being used again, and does not keep the object alive.
        self._references: list[Any] = []
        self._described: set[int] = set()
        self._weight_ids: set[int] = set()
        self._classes: set[type] = set()

        self._add_objects(torch_modules._global_forward_hooks.values())
        self._add_objects(torch_modules._global_forward_pre_hooks.values())
        self._add_objects(function for _, function in _replaced_functions())
        for module in modules:
            for path, part in module.named_modules():
                self._values.append(path)
                self._add_module(part)
        # Only the values are compared; the described objects may be freed from here on.
        self._described.clear()
        self._weight_ids.clear()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelStamp) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def _add_objects(self, objects: Any) -> None:
        for value in objects:
            self._add_identity(value)

    def _add_identity(self, value: Any) -> None:
        try:
            reference = weakref.ref(value)
        except TypeError:
            reference = value
        self._references.append(reference)
        self._values.append(id(reference))

    def _add_module(self, module: nn.Module) -> None:
        self._add_identity(module)
        self._add_class(type(module))
        for name, child in module._modules.items():
            self._values.append(name)
            self._values.append(None if child is None else id(child))
        self._add_weights(module._parameters, count_writes=self._count_writes)
        # What a forward pass overwrites decides nothing.
        overwritten_names = overwritten_buffers(module)
        fixed_buffers = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in overwritten_names
        }
        self._add_weights(fixed_buffers, count_writes=True)
        self._add_hooks(vars(module))
        self._add_attributes(module)

    def _add_weights(self, tensors: Mapping[str, Tensor | None], *, count_writes: bool) -> None:
        for name, tensor in tensors.items():
            self._values.append(name)
            if tensor is not None:
                self._weight_ids.add(id(tensor))
                self._add_weight(tensor, count_writes)

    def _add_class(self, module_class: type) -> None:
        """The class and its function, which may be replaced for all objects at once."""
        self._values.append(id(module_class))
        if module_class not in self._classes:
            self._classes.add(module_class)
            self._add_identity(module_class.forward)  # type: ignore[attr-defined]

    def _add_weight(self, weight: Tensor, count_writes: bool) -> None:
        self._add_identity(weight)
        self._values.append(weight.dtype)
        self._values.append(weight.shape)
        if count_writes and not weight.is_inference():
            self._values.append(weight._version)

    def _add_hooks(self, attributes: Mapping[str, Any]) -> None:
        for table in _HOOK_TABLES:
            for hook_id, hook in attributes[table].items():
                if not _is_internal(hook):
                    self._values.append(hook_id in attributes[f"{table}_with_kwargs"])
                    self._add_identity(hook)

    def _add_attributes(self, module: nn.Module) -> None:
        # Our own classes fill caches under private names; what users may set has a public one.
        is_ours = type(module).__module__.startswith("lightning_specdec.")
        for name, value in vars(module).items():
            if name in _INTERNAL_NAMES or name in _IRRELEVANT_NAMES:
                continue
            if name.startswith("_output_capturing") or (is_ours and name.startswith("_")):
                continue
            self._values.append(name)
            if is_ours and hasattr(value, "__dict__"):
                self._add_identity(value)
            else:
                self._add_value(value, 0)

    def _add_value(self, value: Any, depth: int) -> None:
        """A setting by its value; an object by its identity and by its attributes."""
        if value is None or isinstance(value, _PLAIN_TYPES):
            self._values.append(value)
        elif id(value) in self._weight_ids:
            # Recurrent layers list their weights again.
            self._values.append(id(value))
        elif isinstance(value, Tensor):
            self._add_weight(value, self._count_writes)
            self._values.extend(weights_checksum([value]))
        elif isinstance(value, np.ndarray):
            self._values.append(value.tobytes())
        else:
            self._add_object(value, depth)

    def _add_object(self, value: Any, depth: int) -> None:
        if id(value) in self._described or depth > _MAX_DEPTH:
            self._values.append(id(value))
            return
        self._described.add(id(value))

        is_container = isinstance(value, Mapping | list | tuple | set | frozenset)
        if is_container and len(value) > _MAX_ITEMS:
            self._values.append(id(value))
            self._values.append(len(value))
        elif isinstance(value, Mapping):
            self._values.append(len(value))
            for key, item in value.items():
                self._add_value(key, depth + 1)
                self._add_value(item, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            self._values.append(len(value))
            for item in value:
                self._add_value(item, depth + 1)
        elif isinstance(value, functools.partial):
            self._add_identity(value)
            self._add_value(value.func, depth + 1)
            self._add_value(value.args, depth + 1)
            self._add_value(value.keywords, depth + 1)
        else:
            self._add_identity(value)
            self._add_attribute_values(value, depth)

    def _add_attribute_values(self, value: Any, depth: int) -> None:
        # Classes and functions count by their identity. Modules are described by `_add_module`.
        if isinstance(value, type | nn.Module) or _is_function(value):
            return
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in _IRRELEVANT_NAMES:
                self._values.append(name)
                self._add_value(item, depth + 1)


def _is_function(value: Any) -> bool:
    return isinstance(value, Callable) and hasattr(value, "__name__")  # type: ignore[arg-type]


def copied_weights(original: nn.Module, form: nn.Module) -> list[Tensor]:
    """Weights of a model whose values a faster form of it holds as copies.

    Args:
        original: the model, whose weights the user may change.
        form: what decodes in its place; it shares embeddings, and either all weights or few.
    """
    shared_ids = {id(tensor) for tensor in form.parameters()}
    weights: dict[int, Tensor] = {}
    for module in original.modules():
        # An embedding is read in place. If an output head is tied to it, the head counts.
        if type(module) is nn.Embedding:
            continue
        for weight in module._parameters.values():
            if weight is not None:
                weights[id(weight)] = weight

    shares_all_weights = weights.keys() <= shared_ids
    if shares_all_weights:
        return []
    return list(weights.values())

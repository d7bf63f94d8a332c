"""Checks shapes in the package's calls during tests: jaxtyping's import hook with beartype."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping

# Imported before the hook is installed, because modules imported under the hook are recompiled.
import lightning.pytorch  # noqa: F401
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""The type checker. It accepts an int where a float is expected."""
_jaxtyped = jaxtyping.jaxtyped


def install(*, lazily: bool) -> None:
    """Install the import hook. Call this before the package's first import.

    Checks are off while tests are collected.

    Args:
        lazily: compile the check of a function when it is first used, not when it is defined.
    """
    # The package imports jaxtyping's types for type checkers only, so that decoding needs only
    # torch. Annotations that are evaluated find them as builtins.
    for name in ("Bool", "Float", "Int"):
        setattr(builtins, name, getattr(jaxtyping, name))
    decorator = functools.partial(_jaxtyped_where_checked, lazily)
    jaxtyping.jaxtyped = decorator  # type: ignore[assignment]
    jaxtyping.install_import_hook("lightning_specdec", "shape_checker.check")
    jaxtyping.config.update("jaxtyping_disable", True)


def _jaxtyped_where_checked(
    lazily: bool, *, typechecker: Callable[..., Any]
) -> Callable[[Any], Any]:
    """The decorator that the hook applies to every function and class of the package."""

    def decorate(definition: Any) -> Any:
        # An inner function is created again by each call of its outer function. Compiling its
        # check each time takes longer than most calls, so it is skipped while checks are off.
        is_inner = "<locals>" in getattr(definition, "__qualname__", "")
        if is_inner and jaxtyping.config.jaxtyping_disable:
            return definition
        if not lazily or not isinstance(definition, FunctionType):
            return _jaxtyped(definition, typechecker=typechecker)

        @functools.cache
        def checked() -> Any:
            return _jaxtyped(definition, typechecker=typechecker)

        @functools.wraps(definition)
        def call(*args: Any, **kwargs: Any) -> Any:
            if jaxtyping.config.jaxtyping_disable:
                return definition(*args, **kwargs)
            return checked()(*args, **kwargs)

        return call

    return decorate

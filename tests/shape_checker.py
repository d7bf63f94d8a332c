"""Checks the shapes of the package's calls in tests: jaxtyping's import hook, with beartype behind it."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping
import lightning.pytorch  # noqa: F401 - before the hook is installed: what is imported under it is compiled anew
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""The type checker: an int is good enough for a float."""
_jaxtyped = jaxtyping.jaxtyped


def install(*, lazily: bool) -> None:
    """To be called before the package's first import. While tests are collected nothing is checked.

    Args:
        lazily: whether the check of a function is made when it is first checked, not when it is defined.
    """
    # The package names jaxtyping's types for type checkers only, so that decoding needs torch alone.
    for name in ("Bool", "Float", "Int"):
        setattr(builtins, name, getattr(jaxtyping, name))
    jaxtyping.jaxtyped = functools.partial(_jaxtyped_where_checked, lazily)  # type: ignore[assignment]
    jaxtyping.install_import_hook("lightning_specdec", "shape_checker.check")
    jaxtyping.config.update("jaxtyping_disable", True)


def _jaxtyped_where_checked(
    lazily: bool, *, typechecker: Callable[..., Any]
) -> Callable[[Any], Any]:
    """What the hook decorates all with. An inner function is made anew by each call of the outer one, and a check of it
    too, which takes longer than most calls: so none is made for it where shapes are not checked."""

    def decorate(made: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable and "<locals>" in getattr(made, "__qualname__", ""):
            return made
        if not lazily or not isinstance(made, FunctionType):
            return _jaxtyped(made, typechecker=typechecker)

        @functools.cache
        def checked() -> Any:
            return _jaxtyped(made, typechecker=typechecker)

        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (made if jaxtyping.config.jaxtyping_disable else checked())(*args, **kwargs)

        return call

    return decorate

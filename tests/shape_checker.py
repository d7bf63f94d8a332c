"""Checks the shapes of the package's calls in tests: jaxtyping's import hook, with beartype behind it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import jaxtyping
import lightning.pytorch  # noqa: F401 - before the hook is installed: what is imported under it is compiled anew
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""The type checker: an int is good enough for a float."""
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """To be called before the package's first import. While tests are collected nothing is checked."""
    # The package names jaxtyping's types for type checkers only, so that decoding needs torch alone.
    for name in ("Bool", "Float", "Int"):
        setattr(builtins, name, getattr(jaxtyping, name))
    jaxtyping.jaxtyped = _jaxtyped_where_checked  # type: ignore[assignment]
    jaxtyping.install_import_hook("lightning_specdec", "shape_checker.check")
    jaxtyping.config.update("jaxtyping_disable", True)


def _jaxtyped_where_checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """What the hook decorates all with. An inner function is made anew by each call of the outer one, and a check of it
    too, which takes longer than most calls: so none is made for it where shapes are not checked."""

    def decorate(made: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable and "<locals>" in getattr(made, "__qualname__", ""):
            return made
        return _jaxtyped(made, typechecker=typechecker)

    return decorate

"""Whether this machine can compile what torch generates."""

from __future__ import annotations

import os
import shutil


class CompilerMissing(RuntimeError):
    """There is no C++ compiler on this machine; decoding works without one, more slowly."""


def require_compiler() -> None:
    """Raise CompilerMissing unless a C++ compiler is found where torch looks for it."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise CompilerMissing("no C++ compiler was found (g++, clang++ or $CXX): decoding goes on uncompiled")

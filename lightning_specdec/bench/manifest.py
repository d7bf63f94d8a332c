"""The circumstances of a measurement: machine, versions, commit, options."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_specdec import __version__
from lightning_specdec.checkpoints import runs


def manifest(
    *,
    options: Mapping[str, Any],
    device: torch.device,
    checkpoint: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Plain values that record where and how something was measured."""
    checkpoint_sha256 = None
    if checkpoint:
        checkpoint_sha256 = sha256(runs.find(checkpoint).read_bytes()).hexdigest()
    device_name = str(device)
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "lightning_specdec": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": _num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "device": device_name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint_sha256": checkpoint_sha256,
        "options": dict(options),
    }


def made_on(manifest: Mapping[str, Any]) -> str:
    """The machine and the versions that figures hold for."""
    device = manifest.get("device", "?")
    processor = manifest.get("processor", "?")
    num_threads = manifest.get("threads", "?")
    plural = "" if num_threads == 1 else "s"
    parts = [f"{device} ({processor})", f"{num_threads} thread{plural}"]
    for name in ("torch", "transformers"):
        if name in manifest:
            parts.append(f"{name} {manifest[name]}")
    parts.append(f"commit {manifest.get('commit') or '?'}")
    return ", ".join(parts)


def _num_cores() -> int | None:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _processor() -> str:
    """The name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The git commit of this source tree, with a + if files have changed since; None if it is no
    git tree."""
    this_file = Path(__file__)
    try:
        # Fails for a package that is installed inside another project's tree.
        _git(this_file.parent, "ls-files", "--error-unmatch", this_file.name)
        commit = _git(this_file.parent, "rev-parse", "--short=12", "HEAD")
        changes = _git(this_file.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changes else commit


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

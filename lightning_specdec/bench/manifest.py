"""What figures are read beside: machine, versions, commit, options."""

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
    """Plain values that say where and how something was measured."""
    return {
        "lightning_specdec": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint_sha256": sha256(runs.find(checkpoint).read_bytes()).hexdigest()
        if checkpoint
        else None,
        "options": dict(options),
    }


def made_on(manifest: Mapping[str, Any]) -> str:
    """The machine and the versions that figures hold for."""
    threads = manifest.get("threads", "?")
    versions = "".join(
        f", {name} {manifest[name]}" for name in ("torch", "transformers") if name in manifest
    )
    return (
        f"{manifest.get('device', '?')} ({manifest.get('processor', '?')}), {threads} "
        f"thread{'' if threads == 1 else 's'}{versions}, commit {manifest.get('commit') or '?'}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The git commit of this source tree, if it is one; with a + when files were changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # not a package installed within another's tree
        commit, dirty = (
            git("rev-parse", "--short=12", "HEAD"),
            git("status", "--porcelain", "--untracked-files=no"),
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if dirty else commit

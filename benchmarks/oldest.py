"""Print the oldest versions that pyproject.toml admits: `python benchmarks/oldest.py torch`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT_FILE = Path(__file__).resolve().parent.parent / "pyproject.toml"
REQUIREMENT = re.compile(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)")
"""A name, perhaps an extra, and the oldest version."""


def oldest_versions() -> dict[str, str]:
    """The oldest version of each dependency that has one."""
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))
    versions = {}
    for dependency in project["project"]["dependencies"]:
        match = REQUIREMENT.match(dependency)
        if match:
            name, version = match.groups()
            versions[name] = version
    return versions


def main() -> None:
    versions = oldest_versions()
    names = sys.argv[1:] or list(versions)
    print(" ".join(f"{name}=={versions[name]}" for name in names))


if __name__ == "__main__":
    main()

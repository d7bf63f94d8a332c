"""YAML of unknown origin: bounded before any value is built, an alias counting as what it repeats."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from lightning_specdec.config.terminal import one_line

_DEEPEST = 50
_MOST_NODES = 200_000
_MOST_CHARACTERS = 2**20


def check_yaml(text: str) -> None:
    """Raise where building the text's values could exhaust the stack or the memory.

    Reads the parser's events, which come one by one and build nothing.

    Raises:
        ValueError: it is too long, nested too deeply, or its aliases repeat too much.
        yaml.YAMLError: it is no YAML.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"YAML must have at most {_MOST_CHARACTERS:,} characters, got {len(text):,}"
        )
    sizes: dict[str | None, int] = {}
    num_values = 0
    open_parts: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, num_values))
            num_values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_parts.pop()
            sizes[anchor] = num_values - before
        elif isinstance(event, yaml.AliasEvent):
            num_values += sizes.get(
                event.anchor, _MOST_NODES + 1
            )  # not there: it repeats what it stands in
        elif isinstance(event, yaml.ScalarEvent):
            num_values += 1
            sizes[event.anchor] = 1
        if len(open_parts) > _DEEPEST or num_values > _MOST_NODES:
            raise ValueError(
                f"YAML must be nested at most {_DEEPEST} deep and have at most {_MOST_NODES:,} values, repeated ones "
                "counted again: simplify it"
            )


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has one key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [
            key.value
            for key, _ in node.value
            if isinstance(key, yaml.ScalarNode) and key.value != "<<"
        ]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"{twice} is there twice (line {node.start_mark.line + 1}): give each its own name"
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML file.

    Raises:
        ValueError: it is no YAML, exceeds the bounds, or names an entry twice. Nothing in it is run.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {one_line(error)[:300]}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

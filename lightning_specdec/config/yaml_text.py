"""Read YAML of unknown origin. Its size is checked before any value is built.

The standard loader alone is not enough: a few lines of nested aliases ("billion laughs") expand to
gigabytes, and deep nesting exhausts Python's stack.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from lightning_specdec.config.terminal import one_line

_MAX_DEPTH = 50
_MAX_VALUES = 200_000
_MAX_CHARACTERS = 2**20


def check_yaml(text: str) -> None:
    """Raise if building the text's values could exhaust the stack or the memory.

    Reads the parser's events, which arrive one by one and build nothing. An alias counts as the
    values that it repeats.

    Raises:
        ValueError: it is too long, nested too deeply, or its aliases repeat too much.
        yaml.YAMLError: it is not YAML.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(
            f"YAML must have at most {_MAX_CHARACTERS:,} characters, got {len(text):,}"
        )

    num_values = 0
    num_values_of_anchor: dict[str | None, int] = {}
    open_collections: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, num_values))
            num_values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, num_values_at_start = open_collections.pop()
            num_values_of_anchor[anchor] = num_values - num_values_at_start
        elif isinstance(event, yaml.AliasEvent):
            # An alias to a collection that is still open repeats itself without end.
            num_values += num_values_of_anchor.get(event.anchor, _MAX_VALUES + 1)
        elif isinstance(event, yaml.ScalarEvent):
            num_values += 1
            num_values_of_anchor[event.anchor] = 1

        if len(open_collections) > _MAX_DEPTH or num_values > _MAX_VALUES:
            raise ValueError(
                f"YAML must be nested at most {_MAX_DEPTH} deep and have at most "
                f"{_MAX_VALUES:,} values, with repeated ones counted again: simplify it"
            )


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that contains a key twice. The standard loader keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = set()
        for key, _ in node.value:
            # "<<" merges another mapping and may be repeated.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in names:
                line = node.start_mark.line + 1
                raise ValueError(
                    f"{key.value} is there twice (line {line}): give each entry its own name"
                )
            names.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the plain values of a YAML file. Nothing in it is executed.

    Raises:
        ValueError: it is not YAML, exceeds the limits, or contains a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise not_yaml(path, error) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def not_yaml(path: Path, error: Exception) -> ValueError:
    """The error about a file that is no YAML, with the place where reading it failed."""
    # The mark calls the text "<unicode string>", as it was read before it was parsed.
    reason = one_line(error).replace('in "<unicode string>", ', "at ")
    return ValueError(f"{path} is not valid YAML: {reason[:300]}")

"""Bounds on YAML of unknown origin, checked before any value is built; an alias counts as what it repeats."""

from __future__ import annotations

import yaml

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
        raise ValueError(f"YAML must have at most {_MOST_CHARACTERS:,} characters, got {len(text):,}")
    sizes: dict[str, int] = {}
    num_nodes = [0]
    anchors: list[str | None] = [None]
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            num_nodes.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = num_nodes.pop(), anchors.pop()
            num_nodes[-1] += size
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the YAML alias *{event.anchor} repeats what it stands in, or nothing: write it out")
            num_nodes[-1] += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            num_nodes[-1] += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if len(num_nodes) > _DEEPEST or sum(num_nodes) > _MOST_NODES:
            raise ValueError(
                f"YAML must be nested at most {_DEEPEST} deep and have at most {_MOST_NODES:,} values, repeated ones "
                "counted again: simplify it"
            )

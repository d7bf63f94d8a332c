"""docs/architecture.md says what is there: its rooms, their order, and every file it names."""

from __future__ import annotations

import re

from test_borders import FILES, ORDER, PACKAGE

TEXT = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_the_tree_lists_every_room_and_nothing_else() -> None:
    listed = re.findall(r"^  ([\w.]+)/? ", TEXT.split("```")[1], flags=re.MULTILINE)
    rooms = {file.split("/")[0] for file in FILES} - {"__main__.py"}
    assert set(listed) == rooms and len(listed) == len(rooms)


def test_the_order_of_imports_is_the_one_that_is_held() -> None:
    (line,) = [line for line in TEXT.splitlines() if line.startswith("`config -> ")]
    floors = [set(floor.split(", ")) for floor in line.strip("`").split(" -> ")]
    assert floors == [
        {name for name, floor in ORDER.items() if floor == i} for i in range(len(floors))
    ]


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)", TEXT))
    assert len(named) > 20
    assert not [
        file for file in named if file not in FILES and not (PACKAGE.parent / file).is_file()
    ]

"""docs/architecture.md is true: the subpackages it lists, their order, and every file it names."""

from __future__ import annotations

import re

from test_borders import FILES, ORDER, PACKAGE

TEXT = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_the_tree_lists_every_subpackage_and_nothing_else() -> None:
    tree = TEXT.split("```")[1]
    tree_names = re.findall(r"^  ([\w.]+)/? ", tree, flags=re.MULTILINE)
    subpackages = {file.split("/")[0] for file in FILES}
    subpackages.remove("__main__.py")
    assert set(tree_names) == subpackages
    assert len(tree_names) == len(subpackages)


def test_the_order_of_imports_is_the_one_that_is_held() -> None:
    order_lines = [line for line in TEXT.splitlines() if line.startswith("`config -> ")]
    assert len(order_lines) == 1

    described_order = {}
    for floor, names in enumerate(order_lines[0].strip("`").split(" -> ")):
        for name in names.split(", "):
            assert name not in described_order, name
            described_order[name] = floor
    assert described_order == ORDER


def test_every_file_that_is_named_is_there() -> None:
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)", TEXT))
    assert len(files) > 20
    for file in files:
        # Paths inside the package, or from the root of the repository.
        is_there = file in FILES or (PACKAGE.parent / file).is_file()
        assert is_there, file

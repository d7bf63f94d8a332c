"""Rows of datasets: saved by Hugging Face's `datasets`, in parquet files, or on the Hub."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from lightning_specdec.config.terminal import one_line, short
from lightning_specdec.text.rows import Row

PARQUET_SUFFIX = ".parquet"
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")
"""A directory that `save_to_disk` wrote contains one of these files."""
_COLUMN_MARK = "#"
_SPLIT = "train"
"""The split that is read, of several."""
_OTHER_COLUMNS = ("system", "tools")
"""Columns that belong to a conversation, besides its own."""


class DatasetSource(NamedTuple):
    """Where a dataset is, and what of it is read.

    Args:
        name: a directory, a parquet file, or a name on the Hub.
        column: the column with texts or conversations; None to find it by its name.
    """

    name: str
    column: str | None


def dataset_source(source: str) -> DatasetSource | None:
    """The dataset that a source names, as `DIR`, `FILE.parquet` or `HUB_NAME#COLUMN`.

    Each may end with `#COLUMN`; a Hub name does. Returns None for other files and directories.
    """
    if Path(source).expanduser().exists():
        name = source
        column = None
    else:
        name, mark, column_name = source.rpartition(_COLUMN_MARK)
        if not mark or not name or not column_name:
            return None
        column = column_name

    path = Path(name).expanduser()
    if not path.exists():
        return DatasetSource(name, column)
    is_saved = any((path / file).is_file() for file in SAVED_FILES)
    if is_saved or path.suffix.lower() == PARQUET_SUFFIX:
        return DatasetSource(name, column)
    return None


def read_dataset(source: DatasetSource) -> list[Row]:
    """All rows of a dataset, each as an object, or as the text of the chosen column.

    Raises:
        ValueError: there is no such dataset or column, or `datasets` is not installed.
    """
    dataset = _load(source.name)
    columns = list(dataset.column_names)
    if source.column is not None and source.column not in columns:
        raise ValueError(
            f"{source.name} has no column {source.column!r}: choose from {', '.join(columns)}"
        )
    rows = []
    for number, values in enumerate(dataset, 1):
        value = _chosen(values, source.column)
        rows.append(Row(value, number, f"{source.name}, row {number}"))
    return rows


def _chosen(values: Mapping[str, Any], column: str | None) -> Any:
    if column is None:
        return dict(values)
    value = values[column]
    if not isinstance(value, list):
        return value
    others = {name: values[name] for name in _OTHER_COLUMNS if name in values}
    return {"messages": value, **others}


def _load(name: str) -> Any:
    if find_spec("datasets") is None:
        raise ValueError(f"{name} needs datasets: {sys.executable} -m pip install datasets")
    import datasets

    datasets.disable_progress_bars()
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        elif path.is_file():
            loaded = datasets.load_dataset("parquet", data_files=str(path), split=_SPLIT)
        else:
            loaded = datasets.load_dataset(name, split=_SPLIT)
    except Exception as error:  # datasets, pyarrow and the Hub's client raise many kinds
        reason = short(one_line(error), 200)
        raise ValueError(f"the dataset {name} cannot be read: {reason}") from error

    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if _SPLIT in loaded or len(loaded) == 1:
        return loaded.get(_SPLIT, next(iter(loaded.values())))
    raise ValueError(
        f"{name} has the splits {', '.join(loaded)} and no {_SPLIT}: give the directory of one"
    )

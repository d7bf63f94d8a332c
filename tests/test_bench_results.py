"""Laws of a results directory: a finished row is in it once, whatever happens to the run, and
nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec.bench.records import FORMAT, Record
from lightning_specdec.bench.results import ResultsWriter, read

MANIFEST: dict[str, Any] = {
    "name": "one",
    "config": {"seed": 0, "pairs": {"a": {"ckpt": "x"}}},
    "torch": "2",
    "threads": 1,
    "commit": "a1",
    "pairs": {},
    "prompts": {},
}


def row(number: int, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "pair": "a",
        "method": "standard",
        "domain": f"d{number}",
        "temperature": 0.0,
        "batch_size": 1,
        "repeat": 0,
        "seed": 0,
        "max_new_tokens": 4,
        "seconds": 0.5,
        "histogram": [1, 2],
    }
    return Record(**{**values, **changes})


def line(number: int, **changes: Any) -> str:
    return json.dumps({**row(number).to_dict(), **changes})


def write(directory: Path, *numbers: int) -> None:
    with ResultsWriter.open(directory, MANIFEST) as results:
        for number in numbers:
            results.append(row(number))


def test_what_is_written_is_read_and_known_to_the_next_run(tmp_path: Path) -> None:
    write(tmp_path / "new", 1, 2)
    results = read(tmp_path / "new")
    assert results.manifest == {"format": FORMAT, **MANIFEST}
    assert results.rows == [row(1, commit="a1"), row(2, commit="a1")]

    with ResultsWriter.open(tmp_path / "new", {**MANIFEST, "commit": "b2"}) as writer:
        assert writer.known.keys() == {(row(1).cell, 0), (row(2).cell, 0)}
        writer.append(row(1, repeat=1, error="it broke"))
        writer.update(failed_pairs={"a": "why"})
    resumed = read(tmp_path / "new")
    assert resumed.rows[2].commit == "b2"
    assert resumed.manifest["failed_pairs"] == {"a": "why"}


@pytest.mark.parametrize("length", [1, -1], ids=["begun", "all but its end"])
def test_a_half_written_last_line_is_no_row_and_is_repaired(tmp_path: Path, length: int) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / "rows.jsonl"
    whole_lines = path.read_bytes()
    path.write_bytes(whole_lines + f"{line(3)}\n".encode()[:length])
    assert len(read(tmp_path).rows) == 2

    write(tmp_path)
    assert path.read_bytes() == whole_lines
    write(tmp_path, 3)
    assert [row.domain for row in read(tmp_path).rows] == ["d1", "d2", "d3"]


@pytest.mark.parametrize(
    ("damaged_line", "message"),
    [
        ("{torn", "rows.jsonl, line 2 is damaged"),
        (line(2, format=FORMAT + 1), f"line 2 is not a row of format {FORMAT}"),
        (line(2).replace("histogram", "histo"), "line 2 is not a row of format"),
        (line(2, repeat="1"), "line 2 has a wrong repeat, .*1"),
        (line(1), "line 2 is there twice"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, damaged_line: str, message: str) -> None:
    write(tmp_path, 1)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(f"{damaged_line}\n{line(3)}\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
    with pytest.raises(ValueError, match=message):
        write(tmp_path)


@pytest.mark.parametrize(
    "content", ['{"format": 3, "na', '{"format": 3, "name": "one"}', '{"format": 2}']
)
def test_a_manifest_that_is_torn_or_of_another_version_is_refused(
    tmp_path: Path, content: str
) -> None:
    write(tmp_path, 1)
    (tmp_path / "manifest.json").write_text(content)
    message = r"manifest.json (is damaged|is not a manifest of format 3)"
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
    with pytest.raises(ValueError, match=message):
        write(tmp_path)


def test_results_that_were_begun_and_have_no_row_yet_begin_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no results: `lightning_specdec bench"):
        read(tmp_path)

    # A run was killed before it wrote its manifest, or with nothing but a torn row.
    (tmp_path / "rows.jsonl").write_text('{"format": 3, "pa')
    for name in ("one", "another"):
        with ResultsWriter.open(tmp_path, {**MANIFEST, "config": {"name": name}}) as writer:
            assert writer.rows == []
            assert writer.manifest["config"]["name"] == name
    assert (tmp_path / "rows.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {**MANIFEST["config"], "seed": 1}}, "config.seed changed from 0 to 1"),
        ({"config": {"seed": 0, "pairs": {"a": {"ckpt": "y"}}}}, "config.pairs.a.ckpt changed"),
        ({"threads": 2}, "threads changed from 1 to 2"),
    ],
)
def test_two_configs_or_machines_under_one_name_are_refused(
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=f"cannot resume .*{message}.*another name"):
        ResultsWriter.open(tmp_path, {**MANIFEST, **changes})
    write(tmp_path, 2)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        ResultsWriter.open(tmp_path, MANIFEST),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        ResultsWriter.open(tmp_path, MANIFEST)
    write(tmp_path, 1)

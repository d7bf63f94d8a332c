"""Laws of a results directory: a finished row is there once, whatever happens to the run, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec.bench.results import ResultsWriter, read
from lightning_specdec.bench.rows import FORMAT, ResultRow

MADE: dict[str, Any] = {
    "name": "one",
    "config": {"seed": 0, "pairs": {"a": {"ckpt": "x"}}},
    "torch": "2",
}
MADE |= {"threads": 1, "commit": "a1", "pairs": {}, "prompts": {}}


def row(number: int, **more: Any) -> ResultRow:
    places: dict[str, Any] = {
        "pair": "a",
        "method": "standard",
        "domain": f"d{number}",
        "temperature": 0.0,
    }
    places |= {
        "batch_size": 1,
        "repeat": 0,
        "seed": 0,
        "max_new_tokens": 4,
        "seconds": 0.5,
        "histogram": [1, 2],
    }
    return ResultRow(**{**places, **more})


def line(number: int, **more: Any) -> str:
    return json.dumps(row(number).to_dict() | more)


def write(directory: Path, *numbers: int) -> None:
    with ResultsWriter.open(directory, MADE) as results:
        for number in numbers:
            results.append(row(number))


def test_what_is_written_is_read_and_known_to_the_next_run(tmp_path: Path) -> None:
    write(tmp_path / "new", 1, 2)
    found = read(tmp_path / "new")
    assert found.manifest == {"format": FORMAT, **MADE}
    assert found.rows == [row(1, commit="a1"), row(2, commit="a1")]
    with ResultsWriter.open(tmp_path / "new", MADE | {"commit": "b2"}) as results:
        assert results.known.keys() == {(row(1).cell, 0), (row(2).cell, 0)}
        results.append(row(1, repeat=1, error="it broke"))
        results.update(failed_pairs={"a": "why"})
    again = read(tmp_path / "new")
    assert again.rows[2].commit == "b2" and again.manifest["failed_pairs"] == {"a": "why"}


@pytest.mark.parametrize("size", [1, -1], ids=["begun", "all but its end"])
def test_a_half_written_last_line_is_no_row_and_is_repaired(tmp_path: Path, size: int) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + f"{line(3)}\n".encode()[:size])
    assert len(read(tmp_path).rows) == 2
    write(tmp_path)
    assert path.read_bytes() == whole
    write(tmp_path, 3)
    assert [each.domain for each in read(tmp_path).rows] == ["d1", "d2", "d3"]


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        ("{torn", "rows.jsonl, line 2 is damaged"),
        (line(2, format=FORMAT + 1), f"line 2 is not a row of format {FORMAT}"),
        (line(2).replace("histogram", "histo"), "line 2 is not a row of format"),
        (line(2, repeat="1"), "line 2 has a wrong repeat, .*1"),
        (line(1), "line 2 is there twice"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, damaged: str, told: str) -> None:
    write(tmp_path, 1)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(f"{damaged}\n{line(3)}\n")
    for reading in (lambda: read(tmp_path), lambda: write(tmp_path)):
        with pytest.raises(ValueError, match=told):
            reading()


@pytest.mark.parametrize(
    "content", ['{"format": 3, "na', '{"format": 3, "name": "one"}', '{"format": 2}']
)
def test_a_manifest_that_is_torn_or_of_another_version_is_refused(
    tmp_path: Path, content: str
) -> None:
    write(tmp_path, 1)
    (tmp_path / "manifest.json").write_text(content)
    for reading in (lambda: read(tmp_path), lambda: write(tmp_path)):
        with pytest.raises(
            ValueError, match=r"manifest.json (is damaged|is not a manifest of format 3)"
        ):
            reading()


def test_results_that_were_begun_and_have_no_row_yet_begin_anew(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no results: `lightning_specdec bench"):
        read(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        '{"format": 3, "pa'
    )  # killed before its manifest, or with a torn row alone
    for name in ("one", "another"):
        with ResultsWriter.open(tmp_path, MADE | {"config": {"name": name}}) as writer:
            assert writer.rows == [] and writer.manifest["config"]["name"] == name
    assert (tmp_path / "rows.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"config": {**MADE["config"], "seed": 1}}, "config.seed changed from 0 to 1"),
        ({"config": {"seed": 0, "pairs": {"a": {"ckpt": "y"}}}}, "config.pairs.a.ckpt changed"),
        ({"threads": 2}, "threads changed from 1 to 2"),
    ],
)
def test_two_configs_or_machines_under_one_name_are_refused(
    tmp_path: Path, more: dict[str, Any], told: str
) -> None:
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=f"cannot resume .*{told}.*another name"):
        ResultsWriter.open(tmp_path, MADE | more)
    write(tmp_path, 2)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        ResultsWriter.open(tmp_path, MADE),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        ResultsWriter.open(tmp_path, MADE)
    write(tmp_path, 1)

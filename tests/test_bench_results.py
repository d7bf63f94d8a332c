"""Laws of a results directory: a finished row is there once, whatever happens to the run, and nothing else is."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec.bench.results import ResultsWriter, read
from lightning_specdec.bench.rows import FORMAT, ResultRow

MADE = {"name": "one", "config": {"seed": 0, "pairs": {"a": {"ckpt": "x"}}}, "torch": "2", "threads": 1, "commit": "a1"}
MADE |= {"pairs": {}, "prompts": {}}


def row(number: int, **more: Any) -> ResultRow:
    places: dict[str, Any] = {"pair": "a", "method": "standard", "draft": None, "draft_kind": None, "domain": "code"}
    places |= {"num_draft_tokens": None, "temperature": 0.0, "batch_size": 1, "rule": None, "lossless": None}
    places |= {"cell": f"{number:016x}", "repeat": 0, "seed": 0, "max_new_tokens": 4, "seconds": 0.5}
    return ResultRow(**{**places, **more})


def line(number: int, **more: Any) -> str:
    return json.dumps(row(number).to_dict() | more)


def write(directory: Path, *numbers: int) -> None:
    with ResultsWriter.open(directory, MADE) as results:
        for number in numbers:
            results.append(row(number))


def cells(directory: Path) -> list[str]:
    return [each.cell for each in read(directory).rows]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "new", 1, 2)
    found = read(tmp_path / "new")
    assert found.manifest == {"format": FORMAT, **MADE}
    assert [replace(each, commit=None, versions=None, date=None) for each in found.rows] == [row(1), row(2)]


def test_a_run_knows_what_another_has_finished(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with ResultsWriter.open(tmp_path, MADE) as results:
        assert results.known.keys() == {(row(1).cell, 0)}
        results.append(row(1, repeat=1, error="it broke"))
        results.update(calls={"a": 1})
        assert results.failed == {row(1).cell}
    assert len(read(tmp_path).rows) == 2 and read(tmp_path).manifest["calls"] == {"a": 1}


def test_rows_of_another_commit_say_so_and_so_does_one_line(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with ResultsWriter.open(tmp_path, MADE | {"commit": "b2", "torch": "3"}) as results:
        assert "resumed" not in results.manifest, "nothing was added yet"
        told = results.resume()
        results.append(row(2))
    assert told is not None and "goes on with commit a1 -> b2, torch 2 -> 3: each row says" in told
    with ResultsWriter.open(tmp_path, MADE | {"commit": "b2", "torch": "3"}) as results:
        assert results.resume() is None, "the last rows are of the same"
    found = read(tmp_path)
    assert [(each.commit, (each.versions or {})["torch"]) for each in found.rows] == [("a1", "2"), ("b2", "3")]
    assert found.manifest["commit"] == "a1" and [each["commit"] for each in found.manifest["resumed"]] == ["b2"]


def test_versions_are_compared_where_both_programs_know_them(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for more in ({"python": "3"}, {"torch": None}, {"commit": None}):
        with ResultsWriter.open(tmp_path, MADE | more) as results:
            assert results.resume() is None
    with ResultsWriter.open(tmp_path, MADE | {"commit": None}) as results:
        results.append(row(2))
    first, second = read(tmp_path).rows
    assert first.versions == second.versions == {"torch": "2"}, "and nothing is said of the others"
    assert (first.commit, second.commit) == ("a1", None)


def test_a_row_says_when_it_was_finished(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    write(tmp_path, 1)
    assert before <= datetime.fromisoformat(str(read(tmp_path).rows[0].date)) <= datetime.now(UTC)


def test_a_list_of_numbers_is_one_line_of_the_manifest(tmp_path: Path) -> None:
    values = {
        "tokens": [1, -2, 3],
        "seconds": [0.5, 1e-07],
        "none": [],
        "texts": ["a", "[\n1\n]"],
        "deep": [[1, 2], [3]],
    }
    with ResultsWriter.open(tmp_path, MADE) as results:
        results.update(**values)
    lines = [each.strip().rstrip(",") for each in (tmp_path / "manifest.json").read_text().splitlines()]
    assert {'"tokens": [1, -2, 3]', '"seconds": [0.5, 1e-07]', "[1, 2]", "[3]"} <= set(lines)
    assert {name: read(tmp_path).manifest[name] for name in values} == values


@pytest.mark.parametrize("size", [1, 30, -1], ids=["begun", "half", "all but its end"])
def test_a_half_written_last_line_is_no_row_and_is_repaired(tmp_path: Path, size: int) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + f"{line(3)}\n".encode()[:size])
    assert len(read(tmp_path).rows) == 2
    write(tmp_path)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b'{"for')
    write(tmp_path, 3)
    assert cells(tmp_path) == [row(number).cell for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        ("{torn", "rows.jsonl, line 2 is damaged"),
        (line(2, format=FORMAT + 1), "line 2 is no row of a known format"),
        (json.dumps({"format": FORMAT, "seconds": 1}), "line 2 has no cell, repeat, pair: remove the line"),
        (line(2).replace("histogram", "histo"), "line 2 has no histogram"),
        (line(2, repeat="1"), "line 2 has a wrong repeat, .*1"),
        (line(2, pair=None), "line 2 has a wrong pair, .None"),
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


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7, "lightning_specdec": "9.9"}))
    for reading in (lambda: read(tmp_path), lambda: write(tmp_path)):
        with pytest.raises(ValueError, match="the format 7, this version reads 1 to 2"):
            reading()


@pytest.mark.parametrize("content", ["", '{"format": 1, "na', "[1]", '{"format": 1, "name": "one"}'])
def test_a_torn_manifest_is_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest.json (is damaged|has the format|has no config)"):
        read(tmp_path)


def test_results_that_were_begun_and_have_no_row_yet_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"format": 1, "ce')  # killed ahead of its manifest, or with a torn row alone
    for name in ("one", "another"):
        with ResultsWriter.open(tmp_path, MADE | {"config": {"name": name}}) as writer:
            assert writer.rows == [] and writer.manifest["config"]["name"] == name
    assert (tmp_path / "rows.jsonl").read_text() == ""


def test_rows_without_a_manifest_and_no_results_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no results: `lightning_specdec bench"):
        read(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="rows and no manifest"):
        write(tmp_path)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"config": {**MADE["config"], "seed": 1}}, "config.seed changed from 0 to 1"),  # type: ignore[dict-item]
        ({"config": {"seed": 0, "pairs": {"a": {"ckpt": "y"}}}}, "config.pairs.a.ckpt changed"),
        ({"threads": 2}, "threads changed from 1 to 2"),
        ({"device": "cuda"}, "device changed"),
    ],
)
def test_two_configs_or_machines_under_one_name_are_refused(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=f"cannot resume .*{told}.*another name"):
        ResultsWriter.open(tmp_path, MADE | more)
    write(tmp_path, 2)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with ResultsWriter.open(tmp_path, MADE), pytest.raises(ValueError, match="another run is writing"):
        ResultsWriter.open(tmp_path, MADE)
    write(tmp_path, 1)


def test_a_full_disk_in_the_middle_of_a_row_costs_this_row_alone(tmp_path: Path) -> None:
    path, limits = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultsWriter.open(tmp_path, MADE) as results:
        results.append(row(1))
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))  # half a row fits
        try:
            with pytest.raises(OSError, match="too large") as caught:
                results.append(row(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.filename == str(path) and path.read_bytes() == before
        assert (row(2).cell, 0) not in results.known
        results.append(row(2))
    assert len(read(tmp_path).rows) == 2


def test_a_row_is_on_the_disk_when_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    with ResultsWriter.open(tmp_path, MADE) as results:
        monkeypatch.setattr(os, "fsync", lambda number: synced.append((tmp_path / "rows.jsonl").read_bytes()))
        results.append(row(1))
    assert synced and synced[-1].endswith(b"\n") and json.loads(synced[-1])["cell"] == row(1).cell


def test_what_a_killed_run_left_of_a_manifest_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".manifest.json.abc").write_text("{")
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "rows.jsonl"]

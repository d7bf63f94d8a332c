"""docs/former_names.tsv: what was kept is there, and what was not answers with one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightning_specdec
from lightning_specdec.cli.main import FORMER_VERBS, VERBS, make_parser
from lightning_specdec.cli.options import UsageError
from lightning_specdec.config.kinds import DRAFTERS

LINES = (Path(__file__).parent.parent / "docs" / "former_names.tsv").read_text().splitlines()[1:]
ROWS = [tuple(line.split("\t")) for line in LINES]
FLAGS = [(former, now, what) for sort, former, now, what in ROWS if sort == "flag"]


def test_every_row_says_what_became_of_a_name() -> None:
    assert {sort for sort, *_ in ROWS} == {"flag", "name", "verb", "yaml"} and len(ROWS) > 250
    assert all(now == "kept" or (now in ("renamed", "removed") and what) for _, _, now, what in ROWS)


@pytest.mark.parametrize("verb", sorted({former.split()[0] for former, *_ in FLAGS}))
def test_a_former_flag_is_there_or_answers(verb: str) -> None:
    parser = make_parser(verb)
    for former, now, what in FLAGS:
        name, flag = former.split()
        if name != verb:
            continue
        if now == "kept":
            assert flag in parser._option_string_actions or flag.startswith(("--rule.", "--drafter.")), former
        else:
            with pytest.raises(UsageError) as refusal:
                parser.read([flag, "1"])
            assert what in str(refusal.value), former


def test_verbs_and_public_names_that_were_kept_are_there() -> None:
    assert {former for sort, former, *_ in ROWS if sort == "verb"} == set(FORMER_VERBS) and set(VERBS)
    for sort, former, now, _ in ROWS:
        if sort == "name" and now == "kept":
            assert hasattr(lightning_specdec, former.rpartition(".")[2])


def test_a_former_drafter_is_named_by_its_new_name() -> None:
    with pytest.raises(ValueError, match="NGramWithFallback"):
        DRAFTERS.check("LookupFirstDrafter")

"""`serve --record`: requests and answers become text that a draft is trained on."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import text_cases
import tiny_models
from cli_fixtures import call, here
from test_serve_http import running
from text_model import decoder, model

from lightning_specdec.data import corpus
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.serve import recording
from lightning_specdec.serve.engine import Generation
from lightning_specdec.serve.recording import Recording

__all__ = ["decoder", "here", "model"]
HTTP = httpx.Client(timeout=60)
NUM_REQUESTS = 12


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "records"


def rows_of(directory: Path) -> Iterator[tuple[list[int], list[int], float]]:
    """Prompts, answers and temperatures of a directory."""
    _, shards = corpus.open_corpus(directory)
    for shard in shards:
        for i in range(len(shard)):
            tokens = shard.row(i).tolist()
            prompt_length = int(shard.prompt_lengths[i])
            temperature = round(float(shard.temperatures[i]), 3)
            yield tokens[:prompt_length], tokens[prompt_length:], temperature


def completion(address: str, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 9, "return_token_ids": True, **fields}
    return HTTP.post(f"{address}/v1/completions", json=body)


def test_the_tokens_of_requests_and_answers_are_kept_for_their_owner(
    decoder: SpeculativeDecoder, directory: Path
) -> None:
    expected = []
    with running(decoder, record=str(directory)) as (_, address):
        for i in range(NUM_REQUESTS):
            prompt = decoder.encode("the oak")[: 2 + i % 3]
            temperature = 0.5 * (i % 3)
            store = (None, True, False)[i % 3]
            fields = {} if store is None else {"store": store}
            answer = completion(address, prompt, temperature=temperature, **fields).json()
            if store is not False:
                expected.append((prompt, answer["choices"][0]["token_ids"], temperature))
        # What is refused leaves nothing.
        assert completion(address, [10**6]).status_code == 400
    assert list(rows_of(directory)) == expected
    assert {row[2] for row in expected} == {0.0, 0.5}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.glob("shard-*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    # The next server goes on.
    with running(decoder, record=str(directory)) as (_, address):
        answer = completion(address, [5, 6], temperature=0).json()
    expected.append(([5, 6], answer["choices"][0]["token_ids"], 0.0))
    assert list(rows_of(directory)) == expected


@pytest.mark.usefixtures("here")
def test_a_draft_is_trained_on_the_records_as_they_are(
    decoder: SpeculativeDecoder, model: str, directory: Path
) -> None:
    with running(decoder, record=str(directory)) as (_, address):
        for i in range(NUM_REQUESTS):
            prompt = decoder.encode("the oak speaks")[: 3 + i % 5]
            assert completion(address, [*prompt, i], max_tokens=24).status_code == 200
    outcome = call(
        *("fit", "--recipe", "eagle", "--target", model, "--text", str(directory)),
        *("--trainer.max_epochs", "1"),
    )
    assert outcome.code == 0, outcome.err
    assert "another model" not in outcome.err
    (checkpoint,) = Path("checkpoints").rglob("best.ckpt")
    decoded = call("decode", "--ckpt", str(checkpoint), "--prompt", "the oak", "--repeats", "0")
    assert decoded.code == 0, decoded.err


def test_a_server_that_records_nothing_says_so(decoder: SpeculativeDecoder) -> None:
    with running(decoder) as (_, address):
        assert completion(address, [5], store=False).status_code == 200
        refused = completion(address, [5], store=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "store"
    assert "stores nothing" in refused.json()["error"]["message"]


def answered(records: Recording, number: int, num_tokens: int = 6) -> None:
    """An answer of these many tokens, each the number."""

    class Row:
        text = [1, 2, *[number] * num_tokens]

    records.answered(Generation([1, 2], num_tokens), Row())  # type: ignore[arg-type]


def test_new_text_replaces_the_oldest(
    decoder: SpeculativeDecoder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SHARD_TOKENS", 8)
    options: dict[str, Any] = {"temperature": 1.0, "max_bytes": 3 * 8 * 2}
    records = Recording(directory, decoder.target, **options)
    for number in range(3, 8):
        answered(records, number)
    records.close()
    assert sorted(row[1][0] for row in rows_of(directory)) == [5, 6, 7]

    records = Recording(directory, decoder.target, **options)
    answered(records, 8)
    records.close()
    records.close()
    assert sorted(row[1][0] for row in rows_of(directory)) == [6, 7, 8]


def test_answers_are_in_a_file_before_their_shard_is_full(
    decoder: SpeculativeDecoder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is trained while the server runs, so its text must be there by then."""
    monkeypatch.setattr(recording, "WRITE_SECONDS", 0.02)
    options: dict[str, Any] = {"temperature": 1.0, "max_bytes": 10**6}
    records = Recording(directory, decoder.target, **options)
    for number in range(3, 6):
        answered(records, number)
        wait_for_answers(directory, number - 2)
    assert len(list(rows_of(directory))) == 3
    (path,) = directory.glob("shard-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    # A server that was killed wrote no more than this. The next one leaves its shard.
    records._answers.put(None)
    records._thread.join()
    os.close(records._lock)
    records = Recording(directory, decoder.target, **options)
    answered(records, 6)
    records.close()
    assert [row[1][0] for row in rows_of(directory)] == [3, 4, 5, 6]
    _, shards = corpus.open_corpus(directory)
    numbers = [number for shard in shards for number in shard.prompt_numbers.tolist()]
    assert numbers == [0, 1, 2, 3]


def wait_for_answers(directory: Path, count: int) -> None:
    """Wait until the manifest, which is written after the answers, counts so many."""
    end = time.monotonic() + 20
    num_answers = 0
    while num_answers != count:
        assert time.monotonic() < end
        time.sleep(0.01)
        if (directory / corpus.MANIFEST).exists():
            num_answers = corpus.read_manifest(directory)["num_prompts"]


def test_other_text_and_open_directories_are_refused(
    decoder: SpeculativeDecoder, directory: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_bytes": 10**6}
    records = Recording(directory, decoder.target, **options)
    answered(records, 3)
    with pytest.raises(ValueError, match="another server records to"):
        Recording(directory, decoder.target, **options)
    records.close()

    other_model = tiny_models.write(tmp_path / "other", tokenizer=text_cases.byte_level(), seed=7)
    other = SpeculativeDecoder.from_pretrained(other_model, other_model)
    for _ in range(2):
        # The refusal leaves the directory unlocked.
        with pytest.raises(ValueError, match="holds other text \\(of another target\\)"):
            Recording(directory, other.target, **options)

    directory.chmod(0o755)
    with pytest.raises(ValueError, match="others can read it: run `chmod 700"):
        Recording(directory, decoder.target, **options)


def test_a_full_disk_loses_the_text_and_no_request(
    decoder: SpeculativeDecoder,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "write_shard", fail)
    with running(decoder, record=str(directory)) as (_, address):
        assert completion(address, [5]).status_code == 200
    assert "the records lost 1 answers: [Errno 28] No space left on device" in caplog.text

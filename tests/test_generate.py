"""Laws of generated text: every row is the target's own, in any number of processes and runs."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
from cli_fixtures import call, succeed
from generated import PROMPTS, contents, corpus, generate, prompt_file, target

from lightning_specdec.data import PromptFiles
from lightning_specdec.data import corpus as corpus_files
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models.loading import load_model
from lightning_specdec.rules import Sampling
from lightning_specdec.training import GenerateText

__all__ = ["corpus", "target"]


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_every_row_is_what_the_target_decodes_alone(
    target: str,
    corpus: Path,
    tmp_path: Path,
    num_draft_tokens: int,
) -> None:
    if num_draft_tokens:
        source = PromptFiles(prompt_file(tmp_path))
        corpus = generate(target, tmp_path / "text", source, num_draft_tokens=num_draft_tokens)
    model = load_model(target)
    index = 0
    stop_reasons = set()
    assert model.tokenizer is not None
    for shard in corpus_files.open_corpus(corpus)[1]:
        for number, length in enumerate(shard.prompt_lengths.tolist()):
            row = shard.row(number).tolist()
            temperature = float(shard.temperatures[number])
            assert shard.prompt_numbers[number] == index // 2
            assert temperature == index % 2
            assert row[:length] == model.tokenizer.encode_chat(
                [{"role": "user", "content": PROMPTS[index // 2]}]
            )
            alone = autoregressive_decode(
                model,
                [row[:length]],
                max_new_tokens=9,
                sampling=Sampling(temperature),
                eos=sorted(model.tokenizer.eos),
                seed=5,
                indices=[index],
            )
            assert row[length:] == alone.tokens[0]
            stop_reasons.add(alone.rows[0].stop_reason)
            index += 1
    assert index == 2 * len(PROMPTS)
    assert stop_reasons == {"eos", "length"}, "rows must end in both ways"


@pytest.mark.quick_cases("64")
@pytest.mark.parametrize("shard_size", [4, 64])
def test_one_process_and_two_write_the_same_rows(
    target: str,
    tmp_path: Path,
    shard_size: int,
) -> None:
    source = prompt_file(tmp_path)
    written = [
        contents(
            generate(
                target, tmp_path / str(n), PromptFiles(source), devices=n, shard_size=shard_size
            )
        )
        for n in (1, 2)
    ]
    assert written[0] == written[1] and len(written[0]) == (3 if shard_size == 4 else 1)
    manifests = [json.loads((tmp_path / str(n) / "manifest.json").read_text()) for n in (1, 2)]
    assert manifests[0] == manifests[1]
    assert sum(map(len, corpus_files.open_corpus(tmp_path / "1")[1])) == 2 * len(PROMPTS)


def _die_in_the_second_shard(target: str, output: Path, source: str) -> None:
    calls = []
    replace = os.replace

    def replaced(*names: str) -> None:
        calls.append(names)
        # The manifest, a shard, and the next one, which is complete but not renamed yet.
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*names)

    os.replace = replaced  # type: ignore[assignment]
    generate(target, output, PromptFiles(source))


def test_a_killed_run_goes_on_where_it_was(target: str, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "text"
    arguments = target, output, prompt_file(tmp_path)
    child = multiprocessing.get_context("fork").Process(
        target=_die_in_the_second_shard, args=arguments
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    finished_shards = contents(output)
    assert (
        len(finished_shards) == 2
        and finished_shards["shard-00000.safetensors"]
        == contents(corpus)["shard-00000.safetensors"]
    )
    written = (output / "shard-00000.safetensors").stat().st_mtime_ns
    generate(target, output, PromptFiles(arguments[2]))
    assert contents(output) == contents(corpus)
    assert (output / "shard-00000.safetensors").stat().st_mtime_ns == written, (
        "what is finished is not made again"
    )


def test_a_torn_shard_is_written_again(target: str, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "text"
    shutil.copytree(corpus, output)
    torn = output / "shard-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])
    generate(target, output, PromptFiles(prompt_file(corpus.parent)))
    assert contents(output) == contents(corpus)


def command(target: str, *more: str) -> tuple[str, ...]:
    options = {
        "model": "GenerateText",
        "model.target": target,
        "model.output": "text",
        "model.max_new_tokens": "9",
        "model.temperatures": "[0,1]",
        "model.batch_size": "3",
        "model.shard_size": "4",
        "model.seed": "5",
        "data": "PromptFiles",
        "data.paths": "prompts.txt",
        "trainer.accelerator": "cpu",
    }
    words = ["generate"]
    for name, value in options.items():
        words += [f"--{name}", value]
    return (*words, *more)


def test_a_full_disk_is_one_line_and_leaves_what_is_finished(
    target: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path)
    calls = []
    sync = os.fsync

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        # The manifest and a shard are written by then.
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    outcome = call(*command(target))
    assert outcome.code == 2 and outcome.out == "" and "Traceback" not in outcome.err
    last_line = outcome.err.splitlines()[-1]
    assert last_line.startswith("error: text/shard-00001.safetensors: No space left on device")
    finished_shards = contents(tmp_path / "text")
    assert (
        list(finished_shards) == ["shard-00000.safetensors"]
        and finished_shards.items() <= contents(corpus).items()
    )
    outcome = succeed(*command(target))
    assert outcome.out.startswith("22 rows, ") and outcome.out.endswith(" new tokens: text\n")
    assert contents(tmp_path / "text") == contents(corpus)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_at_once_and_keeps_what_is_finished(
    target: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path)
    num_ended_rows = 0
    after_round = GenerateText._after_round

    def watched(module: GenerateText, num_tokens: int, num_ended: int) -> None:
        nonlocal num_ended_rows
        # The first of the second shard's eight rows ends in this round.
        if num_ended_rows <= 8 < num_ended_rows + num_ended:
            os.kill(os.getpid(), number)
        num_ended_rows += num_ended
        after_round(module, num_tokens, num_ended)

    monkeypatch.setattr(GenerateText, "_after_round", watched)
    handlers = {
        caught_signal: signal.getsignal(caught_signal)
        for caught_signal in (signal.SIGINT, signal.SIGTERM)
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        outcome = call(*command(target))
    finally:
        for caught_signal, handler in handlers.items():
            signal.signal(caught_signal, handler)
    assert outcome.code == code and outcome.out == "" and "Traceback" not in outcome.err, outcome
    finished_shards = contents(tmp_path / "text")
    assert (
        list(finished_shards) == ["shard-00000.safetensors"]
        and finished_shards.items() <= contents(corpus).items()
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model.seed", "6"), "text holds another run's text (of another arguments)"),
        (("--data.num_prompts", "5"), "(of another data, num_prompts, prompts_sha256)"),
        (("--model.dtype", "bfloat16"), "(of another target)"),
        (("--model.temperatures", "[1,1]"), "temperatures must be one or more, all different"),
        (("--model.max_new_tokens", "600"), "the target's context of 512"),
        (("--model.target", "nowhere"), "nowhere"),
        (("--data", "ArithmeticProgressions"), "GenerateText needs a PromptSource as its data"),
        (("--ckpt_path", "x"), "unrecognized arguments: --ckpt_path"),
    ],
)
def test_what_cannot_be_generated_is_one_line(
    target: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompt_file(tmp_path)
    shutil.copytree(corpus, tmp_path / "text")
    manifest = corpus_files.read_manifest(corpus)
    corpus_files.write_manifest(
        tmp_path / "text", manifest | {"data": manifest["data"] | {"paths": ["prompts.txt"]}}
    )
    contents_before = contents(tmp_path / "text")
    outcome = call(*command(target, *more))
    assert outcome.code == 2 and outcome.out == "" and message in outcome.err.splitlines()[-1], (
        outcome
    )
    assert outcome.err.splitlines()[-1].startswith("error: ") and outcome.err.count("error") == 1
    assert contents(tmp_path / "text") == contents_before


def test_shards_of_nobody_are_not_written_over(target: str, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "text"
    shutil.copytree(corpus, output)
    (output / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds shards without a manifest"):
        generate(target, output, PromptFiles(prompt_file(tmp_path)))
    assert contents(output) == contents(corpus)

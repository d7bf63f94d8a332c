"""The verb `export`: write a checkpoint as a file for decoding, or a draft for an engine."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import OWN_PROMPTS, counted, log, progress
from lightning_specdec.cli.options import (
    Parser,
    UsageError,
    add_class,
    chosen,
    class_named,
    use_shipped_files,
)
from lightning_specdec.config.files import check_parent
from lightning_specdec.config.hub import check_upload, upload
from lightning_specdec.config.models import ENGINES, FILE_SUFFIXES, PairSource, is_run
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.checkpoints.checkpoint import LoadedPair
    from lightning_specdec.text.tokenizer import Tokenizer

SUMMARY = (
    "write a training checkpoint as a file for decoding, or a draft for vLLM, SGLang, llama.cpp, "
    "transformers"
)
EXAMPLES = """\
lightning_specdec export checkpoints/rnn --output small.safetensors --dtype float16
lightning_specdec export checkpoints/smollm2_eagle --output draft.safetensors
lightning_specdec export --draft draft.safetensors --target checkpoints/smollm2 --format vllm \\
    --output smollm2-eagle3"""


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """What is written, and where."""

    ckpt: str | None = setting(None, "checkpoint of a training run", metavar="FILE")
    draft: str | None = setting(
        None, "draft file, or the directory of a draft model or a head", metavar="FILE|DIR"
    )
    target: str | None = setting(
        None, "directory of the target, for --format and for --draft DIR", metavar="DIR"
    )
    adapter: str | None = setting(
        None, "adapter of PEFT that is merged into the target", metavar="ADAPTER"
    )
    format: str | None = setting(None, "write a directory for an engine", choices=ENGINES)
    output: str = setting(
        help="file to write, NAME.safetensors; with --format, a new directory", metavar="PATH"
    )
    overwrite: bool = setting(False, "replace a file that an earlier export wrote")
    dtype: str | None = setting(
        None,
        "dtype of the stored weights; this package computes as before, engines as stored",
        choices=("float16", "bfloat16", "int8"),
    )
    push_to_hub: str | None = setting(
        None, "with --format, also upload the directory to this repository", metavar="NAME"
    )


def add_arguments(parser: Parser) -> None:
    parser.add_argument("MODEL", nargs="?", help="a checkpoint, or a directory of training runs")
    parser.add_settings("files", ExportSettings)
    add_class(parser)


def run(options: Namespace) -> int:
    """Write the file or directory."""
    if "MODEL" in options:
        if "ckpt" in options:
            raise UsageError(f"name one checkpoint, got --ckpt and {options.MODEL!r}")
        options.ckpt = options.MODEL
    if "ckpt" not in options and "draft" not in options:
        raise UsageError("MODEL is missing: give a checkpoint, or a draft as --draft FILE")
    if "output" not in options:
        raise UsageError("--output is missing: give a file, for example --output draft.safetensors")
    use_shipped_files(options)
    settings = chosen(options, ExportSettings)
    if settings.push_to_hub is not None:
        if settings.format is None:
            raise UsageError("--push_to_hub uploads what --format writes: give --format")
        check_upload(settings.push_to_hub)
    check_parent(Path(settings.output).expanduser())
    if settings.format is None and settings.draft is None:
        _export_checkpoint(settings, options)
    else:
        _export_draft(settings, options)
    return 0


def _export_checkpoint(settings: ExportSettings, options: Namespace) -> None:
    """Write a training checkpoint as a file for decoding."""
    from lightning_specdec.checkpoints import checkpoint

    assert settings.ckpt is not None
    output = _output_file(settings)
    path = _chosen_checkpoint(settings.ckpt)
    loaded = checkpoint.load(path, drafter=class_named(options))
    checkpoint.save(
        output,
        loaded.reference or loaded.target,
        loaded.drafts,
        prompts=loaded.prompts,
        recipe=loaded.recipe,
        tokenizer=loaded.tokenizer,
        dtype=settings.dtype,
    )
    say(f"{output}: {output.stat().st_size:,} bytes")


def _chosen_checkpoint(ckpt: str) -> Path:
    """The checkpoint that a path selects; says which one it is if there are several runs."""
    from lightning_specdec.checkpoints import runs

    directory = Path(ckpt).expanduser()
    path = runs.find(directory)
    progress(f"loading {path} ...")
    num_runs = len(runs.versions(directory))
    if num_runs > 1:
        log.info("exporting %s, of %d runs in %s", path, num_runs, directory)
    return path


def _output_file(settings: ExportSettings) -> Path:
    """The file to write, with its extension.

    Raises:
        ValueError: a file is there that must not be replaced.
    """
    from lightning_specdec.checkpoints import checkpoint

    output = Path(settings.output).expanduser()
    if output.suffix not in FILE_SUFFIXES and not output.exists():
        output = output.with_name(f"{output.name}.safetensors")
    if not output.exists() or output.is_dir():
        return output
    if not checkpoint.is_exported(output):
        raise ValueError(
            f"{output} is not what an export wrote and stays as it is: choose another --output"
        )
    if not settings.overwrite:
        raise ValueError(
            f"{output} exists: choose another --output, or replace it with --overwrite"
        )
    return output


def _export_draft(settings: ExportSettings, options: Namespace) -> None:
    """Write a draft for an engine; without --format, as a draft file."""
    if settings.target is None:
        raise UsageError(
            "--target is missing: give the transformers model of the draft; "
            "engines serve no other target"
        )
    if settings.ckpt is not None and settings.draft is not None:
        raise UsageError("--ckpt and --draft exclude each other: give one of them")
    if settings.format is None:
        _output_file(settings)  # before the models are loaded, which takes seconds
    from lightning_specdec.checkpoints import load_pair

    ckpt = settings.ckpt
    if ckpt is not None:
        ckpt = str(_chosen_checkpoint(ckpt))
    draft = settings.draft
    if draft is not None and is_run(Path(draft).expanduser()):
        draft = str(_chosen_checkpoint(draft))
    progress("loading the target and its draft ...")
    source = PairSource(
        ckpt=ckpt,
        target=settings.target,
        adapter=settings.adapter,
        draft=draft,
        drafter=getattr(options, "drafter", None),
    )
    loaded = load_pair(source, pack=False)
    if settings.format is None:
        _write_draft_file(settings, loaded)
    else:
        _write_engine_directory(settings, settings.format, loaded)


def _write_draft_file(settings: ExportSettings, loaded: LoadedPair) -> None:
    from lightning_specdec.checkpoints import TargetReference, checkpoint

    output = _output_file(settings)
    checkpoint.save(
        output,
        TargetReference.of(loaded.target),
        loaded.drafter,
        recipe=loaded.recipe,
        dtype=settings.dtype,
    )
    say(f"{output}: {output.stat().st_size:,} bytes")


def _write_engine_directory(settings: ExportSettings, engine: str, loaded: LoadedPair) -> None:
    from lightning_specdec.checkpoints import engines
    from lightning_specdec.models.huggingface import HuggingFaceLM

    target = loaded.target
    assert isinstance(target, HuggingFaceLM)
    output = Path(settings.output)
    export = engines.export(
        output,
        loaded.drafter,
        target,
        engine,
        texts=_comparison_texts(target.tokenizer),
        recipe=loaded.recipe,
        dtype=settings.dtype,
    )
    rows = counted(export.num_compared, "row")
    say(f"{output}: {rows} of logits compared, off by {export.difference:.1e} of the largest")
    if not export.loaded:
        say(f"not run in {engine} itself")
    for command in export.commands:
        say(command)
    if settings.push_to_hub is not None:
        progress(f"uploading {output} ...")
        say(upload(output, settings.push_to_hub))


def _comparison_texts(tokenizer: Tokenizer | None) -> list[list[int]]:
    """Texts to compare the written draft with ours on: the default prompts, and their join."""
    if tokenizer is None:
        return []
    texts = [tokenizer.encode(text) for text in OWN_PROMPTS]
    joined = [token for text in texts for token in text]
    return [*texts, joined]

"""The verb `export`: a training checkpoint as a file for decoding, or a draft as a directory that an engine serves."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.cli.common import OWN_PROMPTS, counted, progress
from lightning_specdec.cli.options import Parser, UsageError, add_class, chosen, class_named
from lightning_specdec.config.models import ENGINES, PairSource
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say

SUMMARY = "write a training checkpoint as a file for decoding, or a draft for vLLM, SGLang, llama.cpp, transformers"
EXAMPLES = """\
lightning_specdec export --ckpt checkpoints/rnn/best.ckpt --output small.ckpt --dtype float16
lightning_specdec export --ckpt best.ckpt --output draft.safetensors    (trained on a frozen target)
lightning_specdec export --draft draft.safetensors --target checkpoints/smollm2 --format vllm --output smollm2-eagle3"""


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """What is written where."""

    ckpt: str | None = setting(None, "checkpoint of a training run", metavar="FILE")
    draft: str | None = setting(
        None, "draft file, or the directory of a draft model or a head", metavar="FILE|DIR"
    )
    target: str | None = setting(
        None, "directory of the target, for --format and for --draft DIR", metavar="DIR"
    )
    format: str | None = setting(None, "write a directory for an engine", choices=ENGINES)
    output: str = setting(
        help="file to write, as safetensors; with --format, a new directory", metavar="PATH"
    )
    dtype: str | None = setting(
        None,
        "dtype of the stored weights; this package computes as before, engines as stored",
        choices=("float16", "bfloat16", "int8"),
    )


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    parser.add_settings("files", ExportSettings)
    add_class(parser)


def run(options: Namespace) -> int:
    """Write the file."""
    if "ckpt" not in options and "draft" not in options:
        raise UsageError("--ckpt is missing: give a file, or a draft as --draft")
    if "output" not in options:
        raise UsageError("--output is missing: give a file")
    settings = chosen(options, ExportSettings)
    if settings.format is not None or settings.draft is not None:
        return _export_draft(settings, options)
    from lightning_specdec.checkpoints import checkpoint

    assert settings.ckpt is not None
    loaded, output = (
        checkpoint.load(settings.ckpt, drafter=class_named(options)),
        Path(settings.output),
    )
    if output.exists() and not output.is_dir() and not checkpoint.is_exported(output):
        raise ValueError(
            f"{output} is not an exported checkpoint and stays as it is: choose another --output"
        )
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
    return 0


def _export_draft(settings: ExportSettings, options: Namespace) -> int:
    """Write a draft for an engine; without --format, as a draft file."""
    if settings.target is None:
        raise UsageError(
            "--target is missing: give the transformers model of the draft; engines serve no other target"
        )
    if settings.ckpt is not None and settings.draft is not None:
        raise UsageError("--ckpt and --draft exclude each other: give one of them")
    from lightning_specdec.checkpoints import TargetReference, checkpoint, engines, load_pair
    from lightning_specdec.models.huggingface import HuggingFaceLM

    output, drafter = Path(settings.output), getattr(options, "drafter", None)
    progress("loading the target and its draft ...")
    source = PairSource(
        ckpt=settings.ckpt, target=settings.target, draft=settings.draft, drafter=drafter
    )
    loaded = load_pair(source, pack=False)
    target, tokenizer = loaded.target, loaded.target.tokenizer
    if settings.format is None:
        if output.exists() and not checkpoint.is_exported(output):
            raise ValueError(
                f"{output} is not an exported draft and stays as it is: choose another --output"
            )
        recipe = loaded.recipe
        checkpoint.save(
            output, TargetReference.of(target), loaded.drafter, recipe=recipe, dtype=settings.dtype
        )
        say(f"{output}: {output.stat().st_size:,} bytes")
        return 0
    assert isinstance(target, HuggingFaceLM)
    texts = [tokenizer.encode(text) for text in OWN_PROMPTS] if tokenizer is not None else []
    texts += [[token for text in texts for token in text]] if texts else []
    made = engines.export(
        output,
        loaded.drafter,
        target,
        settings.format,
        texts=texts,
        recipe=loaded.recipe,
        dtype=settings.dtype,
    )
    compared = f"{counted(made.num_compared, 'row')} of logits compared"
    say(f"{output}: {compared}, off by {made.difference:.1e} of the largest")
    if not made.loaded:
        say(f"not run in {settings.format} itself")
    for command in made.commands:
        say(command)
    return 0

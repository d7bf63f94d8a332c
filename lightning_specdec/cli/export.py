"""The verb `export`: a training checkpoint as a file for decoding alone; a draft file if its target lies elsewhere."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.cli.common import set_up_logs
from lightning_specdec.cli.options import Parser, UsageError, add_class, chosen, class_named
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say

SUMMARY = "write a training checkpoint as a file for decoding alone: a pair, or a draft for --draft"
EXAMPLES = """\
lightning_specdec export --ckpt checkpoints/rnn/best.ckpt --output small.ckpt --dtype float16
lightning_specdec export --ckpt best.ckpt --output draft.safetensors    (of a target that stayed as it was)"""


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """What is written where."""

    ckpt: str = setting(help="checkpoint of a training run", metavar="FILE")
    output: str = setting(help="file to write, as safetensors", metavar="FILE")
    dtype: str | None = setting(
        None,
        "store weights in fewer bits; whatever reads them computes as before",
        choices=("float16", "bfloat16", "int8"),
    )


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    parser.add_settings("files", ExportSettings)
    add_class(parser)


def run(options: Namespace) -> int:
    """Write the file."""
    set_up_logs(options)
    if missing := [name for name in ("ckpt", "output") if name not in options]:
        raise UsageError(f"--{missing[0]} is missing: give a file")
    settings = chosen(options, ExportSettings)
    from lightning_specdec.checkpoints import checkpoint

    loaded, output = checkpoint.load(settings.ckpt, drafter=class_named(options)), Path(settings.output)
    if output.exists() and not output.is_dir() and not checkpoint.is_exported(output):
        raise ValueError(f"{output} is not an exported checkpoint and stays as it is: choose another --output")
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

"""The answer of a sweep: a sentence, a command, lines of Python, and a pair with a name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_specdec.bench.sweep import Standing
from lightning_specdec.bench.ways import Way
from lightning_specdec.checkpoints.engine_heads import is_head
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.settings import plain, setting_fields
from lightning_specdec.models.loading import examine

MAX_NAMED = 3
"""Ways that may be as fast, named in a sentence."""


def sentence(standing: Standing, *, has_engines: bool) -> str:
    """The answer in a sentence. Only what an interval proves is recommended.

    Args:
        has_engines: whether several engines were compared.
    """
    if standing.winner is None:
        return "no answer: nothing was measured that has the tokens of standard decoding"

    def name(way: Way) -> str:
        return way.name if has_engines else way.draft_name

    if not standing.is_proven:
        return (
            "nothing here is proven faster than standard decoding: the best is "
            f"{name(standing.winner)}, {standing.verdict.text}"
        )
    text = f"fastest: {name(standing.winner)}, {standing.verdict.text}"
    if standing.equals:
        names = [name(way) for way in standing.equals[:MAX_NAMED]]
        num_unnamed = len(standing.equals) - len(names)
        if num_unnamed:
            names.append(f"{num_unnamed} more")
        text += f"; too noisy to choose between this and {'; '.join(names)}"
    return text


def command(way: Way, source: PairSource, flags: Mapping[str, Any], *, threads: int | None) -> str:
    """The command that decodes in a way.

    Args:
        source: what loads it, see `Way.source`.
        flags: other flags of `decode`.
        threads: the number of CPU threads; None for the default.
    """
    values: dict[str, Any] = {}
    for field_ in setting_fields(PairSource):
        value = getattr(source, field_.name)
        if value is not None and value != field_.default:
            values[field_.name] = value
    values.update(flags)
    if way.num_draft_tokens is not None:
        values["num_draft_tokens"] = way.num_draft_tokens
    else:
        values["mode"] = "standard"
    if threads is not None:
        values["threads"] = threads

    words = ["lightning_specdec", "decode"]
    for name, value in values.items():
        words += flag_words(name, value)
    return shlex.join(words)


def flag_words(name: str, value: Any) -> list[str]:
    """The words of a flag on the command line."""
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list | tuple):
        words = []
        for item in value:
            words += flag_words(name, item)
        return words
    if isinstance(value, Choice):
        words = [f"--{name}", value.name]
        for field_name, field_value in value.settings.items():
            words += [f"--{name}.{field_name}", str(field_value)]
        return words
    return [f"--{name}", str(value)]


def python_lines(
    way: Way,
    source: PairSource,
    *,
    threads: int | None,
    prompt: str | Sequence[int],
) -> str:
    """The lines of Python that make the decoder of a way, imports included.

    A decoder always has a draft. Standard decoding is therefore a call of it.

    Args:
        prompt: what standard decoding continues, as text or tokens.
        way, source, threads: as of `command`.
    """
    values: dict[str, Any] = {}
    for field_ in setting_fields(PairSource):
        value = getattr(source, field_.name)
        if value is not None and value != field_.default:
            values[field_.name] = value

    # The first arguments of the constructors have no name.
    if source.ckpt is not None:
        constructor = "from_checkpoint"
        positional = [values.pop("ckpt")]
    else:
        constructor = "from_pretrained"
        positional = [values.pop("target")]
        if "draft" in values:
            positional.append(values.pop("draft"))
    if isinstance(values.get("drafter"), Choice):
        choice = values["drafter"]
        values["drafter"] = plain(choice) if choice.settings else choice.name
    if way.num_draft_tokens is not None:
        values["num_draft_tokens"] = way.num_draft_tokens

    arguments = [_quoted(value) for value in positional]
    arguments += [f"{name}={_quoted(value)}" for name, value in values.items()]
    lines = ["from lightning_specdec import SpeculativeDecoder"]
    if threads is not None:
        lines = ["import torch", *lines, f"torch.set_num_threads({threads})"]
    lines.append(f"decoder = SpeculativeDecoder.{constructor}({', '.join(arguments)})")
    if way.num_draft_tokens is None:
        shown_prompt = prompt if isinstance(prompt, str) else list(prompt)
        lines.append(f"result = decoder.decode_standard({_quoted(shown_prompt)})")
    return "\n".join(lines)


def _quoted(value: Any) -> str:
    """A value in Python, with the quotes that this project uses."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def pair_values(
    way: Way,
    source: PairSource,
    *,
    description: str,
    threads: int | None,
) -> dict[str, Any]:
    """The fields of a `Pair` that decodes in a way, for `write_pair`.

    Args:
        source, threads: as of `command`.

    Raises:
        ValueError: a pair cannot describe it.
    """
    if way.drafting is None:
        raise ValueError("the fastest way drafts nothing, and a pair has a draft")
    values: dict[str, Any] = {"description": description}
    if source.ckpt is not None:
        for name in ("target", "dtype"):
            if getattr(source, name) is not None:
                raise ValueError(f"a pair of a checkpoint cannot have another {name}")
        values["ckpt"] = str(source.ckpt)
        if source.draft is not None:
            values["draft_file"] = str(source.draft)
    else:
        values["target"] = _model_values(
            str(source.target),
            dtype=source.dtype,
            quantization=source.quantization,
            revision=source.revision,
            adapter=source.adapter,
            trust_remote_code=source.trust_remote_code,
        )
        values.update(_draft_values(source))
    values["backend"] = source.backend
    if source.drafter is not None:
        choice = source.drafter
        values["drafter"] = plain(choice) if choice.settings else choice.name
    if source.device is not None:
        values["device"] = source.device
    if threads is not None:
        values["threads"] = threads
    values["num_draft_tokens"] = way.num_draft_tokens
    return values


def _draft_values(source: PairSource) -> dict[str, Any]:
    """The fields of a pair that name its draft, which is a file or a model."""
    draft = source.draft
    if draft is None and source.draft_quantization is None:
        return {}
    if draft is not None:
        path = Path(draft).expanduser()
        if path.is_file() or is_head(path):
            return {"draft_file": str(draft)}
    revision = source.draft_revision
    adapter = source.draft_adapter
    if draft is None:
        # A quantized copy of the target drafts.
        draft = source.target
        revision = source.revision
        adapter = adapter or source.adapter
    model = _model_values(
        str(draft),
        dtype=source.draft_dtype or source.dtype,
        quantization=source.draft_quantization,
        revision=revision,
        adapter=adapter,
        trust_remote_code=source.trust_remote_code,
    )
    return {"draft": model, "drafter": "CrossVocabulary"}


def _model_values(
    name: str,
    *,
    dtype: str | None,
    quantization: str | None,
    revision: str | None,
    adapter: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """The fields of a `PairModel`."""
    examined = examine(name, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    values: dict[str, Any] = {
        "source": name,
        "dtype": examined.dtype,
        "size": examined.size.to_dict(),
    }
    if quantization is not None:
        values["quantization"] = quantization
    if revision is not None:
        values["revision"] = revision
    if adapter is not None:
        values["adapter"] = adapter
    return values

"""Mistakes that show before any weights are read, from the flags and from small files.

Loading a model takes seconds to minutes. What is refused here would be refused after it too, since
the library checks everything again. What cannot be decided from these files is left to it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_specdec.config.hub import is_gguf
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.models import PairSource, holds_its_target, other_drafter
from lightning_specdec.config.pairs import get_pair

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions")
"""Entries of a model's config that limit the tokens of a text."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files beside a tokenizer that hold a chat template."""


def check_before_loading(
    options: Namespace,
    source: PairSource,
    *,
    shortens_answers: bool = False,
) -> None:
    """Check the flags of a verb against the files of the models that they name.

    Args:
        options: the flags that were given.
        source: the models that they name, with the typed settings of the drafter.
        shortens_answers: whether the verb ends an answer where the target's context does, so that
            more new tokens may be requested.

    Raises:
        ValueError: a setting does not fit the target, or the drafter does not fit its draft file.
    """
    directory = target_directory(source)
    values = {} if directory is None else _text_config(directory)
    if not shortens_answers:
        _check_new_tokens(options, values)
    _check_eos(options, values)
    # What the settings of a user's own drafter mean is not known here.
    if source.drafter is not None and source.drafter.name in DRAFTERS:
        _check_drafter(source.drafter, values)
        if directory is not None and source.draft is None:
            _check_prediction_layers(source.drafter, directory, values)
    if source.draft is not None and source.ckpt is None:
        _check_draft_file(Path(source.draft).expanduser(), source.drafter)


def target_directory(source: PairSource) -> Path | None:
    """The directory whose files describe the target; None if there is none on this machine.

    An adapter may bring tokens and a chat template, so that the directory alone decides nothing.
    """
    if source.pair is not None:
        source = get_pair(source.pair).complete(source)
    if source.target is None or source.ckpt is not None or source.adapter is not None:
        return None
    path = Path(source.target).expanduser()
    if is_gguf(path) or not path.is_dir():
        return None
    return path


def has_chat_template(directory: Path) -> bool:
    """Whether a model's directory has a chat template. It may be in one of several files."""
    if any((directory / name).exists() for name in _TEMPLATE_FILES):
        return True
    return bool(_json_of(directory / "tokenizer_config.json").get("chat_template"))


def _json_of(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none, which loading reports."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _text_config(directory: Path) -> dict[str, Any]:
    """The config of a model, or its part for texts if the model also reads images.

    Entries beside that part may contradict it, and have no effect on texts.
    """
    values = _json_of(directory / "config.json")
    text_values = values.get("text_config")
    return text_values if isinstance(text_values, dict) else values


def _check_new_tokens(options: Namespace, values: Mapping[str, Any]) -> None:
    """Check the number of new tokens against the target's context."""
    limit = _context(values)
    num_new_tokens = getattr(options, "max_new_tokens", None)
    # The prompt has at least a token, and no model reads the last new one.
    if limit is not None and isinstance(num_new_tokens, int) and num_new_tokens > limit:
        raise ValueError(
            f"{num_new_tokens} new tokens do not fit the target's context of {limit}: ask for fewer"
        )


def _check_eos(options: Namespace, values: Mapping[str, Any]) -> None:
    """Check the tokens that end a text against the target's vocabulary."""
    vocab_size = values.get("vocab_size")
    if isinstance(vocab_size, int):
        for token in getattr(options, "eos", None) or ():
            if isinstance(token, int) and token >= vocab_size:
                raise ValueError(f"eos must be from 0 to {vocab_size - 1}, got {token}")


def _context(values: Mapping[str, Any]) -> int | None:
    """The longest text of a target; None if there is no limit, or positions are scaled."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = values.get(name)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind != "default":
                return None
    for name in _CONTEXT_NAMES:
        limit = values.get(name)
        if isinstance(limit, int):
            return limit
    return None


def _check_drafter(choice: Choice, values: Mapping[str, Any]) -> None:
    """Check settings of a drafter that name layers of the target, or files."""
    num_layers = values.get("num_hidden_layers")
    exit_layer = choice.settings.get("exit_layer")
    if isinstance(num_layers, int) and isinstance(exit_layer, int) and exit_layer >= num_layers:
        raise ValueError(f"exit_layer must be from 1 to {num_layers - 1}, got {exit_layer}")
    corpus = choice.settings.get("corpus")
    if isinstance(corpus, str) and not Path(corpus).expanduser().exists():
        raise ValueError(f"corpus {corpus} is no file or directory: check the path")


def _check_prediction_layers(choice: Choice, directory: Path, values: Mapping[str, Any]) -> None:
    """Check that the target's checkpoint has prediction layers, if they are the draft."""
    if choice.name != "MtpDrafter" and not choice.settings.get("mtp"):
        return
    num_layers = values.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        # The class of the config has the number, so loading decides.
        return
    # Imported here because torch takes a second.
    from lightning_specdec.models.mtp_layout import is_of_prediction_layer
    from lightning_specdec.models.safetensors_file import read_header, weight_files

    try:
        for path in weight_files(directory):
            _, shapes = read_header(path)
            if any(is_of_prediction_layer(name, num_layers) for name in shapes):
                return
    except ValueError:
        # Loading says what is wrong with the files.
        return
    raise ValueError(f"{directory} holds no multi-token prediction layers: use another drafter")


def _check_draft_file(path: Path, choice: Choice | None) -> None:
    """Check that a draft file is no pair of its own, and that it has the drafter of that name."""
    if path.suffix != ".safetensors" or not path.is_file():
        return
    # Imported here because torch takes a second.
    from lightning_specdec.checkpoints.archive import BROKEN, KEY
    from lightning_specdec.models.safetensors_file import read_header

    try:
        metadata, _ = read_header(path)
        description = json.loads(metadata.get(KEY, "{}"))
        target = description["target"]
        drafter_name = str(description["drafter"]["class"])
    except BROKEN:
        # Loading says what is wrong with it.
        return
    if "source" not in target:
        raise ValueError(f"{path} cannot be used: {holds_its_target(path)}")
    is_other_class = choice is not None and choice.name in DRAFTERS and choice.name != drafter_name
    if is_other_class and drafter_name in DRAFTERS:
        assert choice is not None
        if not choice.name.endswith("WithFallback"):
            raise other_drafter(drafter_name, choice.name)

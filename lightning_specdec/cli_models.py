"""Which models the options of a verb mean: a checkpoint's, a pair of the registry, or pretrained ones by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import find_device, progress
from lightning_specdec.cli_early import named_model
from lightning_specdec.cli_groups import DRAFTERS, LOOKS_UP
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import EarlyExitDrafter, LookupFirstDrafter, NGramDrafter
from lightning_specdec.drafters.lookup_first import sure_lookup
from lightning_specdec.pretrained import PretrainedOptions

_OF_PRETRAINED = (
    "quantization",
    "draft_quantization",
    "draft_dtype",
    "revision",
    "draft_revision",
    "trust_remote_code",
)


def load_decoder(options: Namespace) -> SpeculativeDecoder:
    """The target and what guesses for it, as `cli_options.MODELS`, --device, --dtype and perhaps --ckpt say.

    Raises:
        ValueError: none or several are named, an option does not belong to the one that is, or it cannot be loaded.
    """
    named = named_model(options)
    arguments = drafter_arguments(options)
    check_exit(options, trained=named == "ckpt")
    device = find_device(options.device)
    progress(f"loading {vars(options)[named]} ...")
    if named == "ckpt":
        return _from_checkpoint(options, arguments, device)
    shared = PretrainedOptions(
        drafter=options.drafter,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype,
        device=device,
        quantization=options.quantization,
        draft_quantization=options.draft_quantization,
        revision=options.revision,
        draft_revision=options.draft_revision,
        trust_remote_code=options.trust_remote_code,
    )
    if options.exit_layer is not None:
        arguments["exit_layer"] = options.exit_layer
    if arguments:
        shared["drafter_arguments"] = arguments
    if options.pair is not None:
        return SpeculativeDecoder.from_pair(
            options.pair, options.draft, num_draft_tokens=options.num_draft_tokens, **shared
        )
    return SpeculativeDecoder.from_pretrained(
        options.target, options.draft, num_draft_tokens=options.num_draft_tokens, **shared
    )


def drafter_arguments(options: Namespace) -> dict[str, Any]:
    """The drafter's arguments that the options give, checked to be its own."""
    values = vars(options)
    names = dict.fromkeys(name for arguments in DRAFTERS.values() for name in arguments)
    given = {name: values[f"drafter.{name}"] for name in names if values[f"drafter.{name}"] is not None}
    if given and options.drafter is None:
        raise ValueError(f"--drafter.{min(given)} needs the drafter's name: give --drafter")
    own = DRAFTERS[LOOKS_UP[0]] if options.drafter in LOOKS_UP else DRAFTERS.get(options.drafter, {})
    if foreign := given.keys() - own.keys():
        raise ValueError(f"{options.drafter} takes no {min(foreign)}: drop it or choose another --drafter")
    return given


def check_exit(options: Namespace, *, trained: bool) -> None:
    """Raise ValueError where --exit_layer is missing, or belongs to nothing that guesses.

    Args:
        trained: whether a checkpoint may have an early exit of its own.
    """
    name, layer = EarlyExitDrafter.__name__, options.exit_layer
    if layer is None:
        if options.drafter == name and not trained:
            raise ValueError(f"{name} needs --exit_layer: say how many of the target's layers guess")
        return
    require_int("exit_layer", layer, 1)
    if options.drafter is None and not trained:
        raise ValueError(f"--exit_layer needs the drafter's name: give --drafter {name}")
    if options.drafter not in (None, name):
        raise ValueError(f"{options.drafter} takes no exit_layer: drop it or choose --drafter {name}")


def _from_checkpoint(options: Namespace, arguments: dict[str, Any], device: torch.device) -> SpeculativeDecoder:
    """The checkpoint's own pair, with look-up before it on demand; or its target with look-up or an early exit."""
    if given := [name for name in _OF_PRETRAINED if getattr(options, name)]:
        raise ValueError(f"--{given[0]} is for pretrained models (--pair, --target): a checkpoint has its own")
    drafters = (NGramDrafter.__name__, LookupFirstDrafter.__name__, EarlyExitDrafter.__name__)
    if options.drafter not in (None, *drafters):
        choices = " or ".join(drafters)
        raise ValueError(f"a checkpoint holds no model for a {options.drafter}: choose --drafter {choices}, or none")
    lookup = NGramDrafter(**arguments) if options.drafter == NGramDrafter.__name__ else None
    joined = options.drafter == LookupFirstDrafter.__name__
    if options.drafter is not None and options.draft is not None and not joined:
        raise ValueError("a checkpoint's drafts are of their own kinds: give --draft or --drafter, not both")
    dtype = options.dtype and getattr(torch, options.dtype)
    decoder = SpeculativeDecoder.from_checkpoint(
        options.ckpt, target=options.target, draft=options.draft, drafter=lookup, device=device, dtype=dtype
    )
    if options.exit_layer is not None or options.drafter == EarlyExitDrafter.__name__:
        decoder = _exiting(decoder, options)
    if joined:
        decoder = decoder.with_drafter(LookupFirstDrafter(sure_lookup(**arguments), decoder.drafter))
    if options.num_draft_tokens is not None:
        decoder.num_draft_tokens = options.num_draft_tokens
    return decoder


def _exiting(decoder: SpeculativeDecoder, options: Namespace) -> SpeculativeDecoder:
    """The checkpoint's target with an early exit: its own one, or a new one where it was asked for by name."""
    own, name = decoder.drafter, EarlyExitDrafter.__name__
    if isinstance(own, EarlyExitDrafter):
        return decoder if options.exit_layer is None else decoder.with_exit(options.exit_layer)
    if options.drafter is None:
        raise ValueError(
            f"--exit_layer is for early exits, and this checkpoint's draft is a {type(own).__name__}: "
            f"add --drafter {name}, or drop it"
        )
    if options.exit_layer is None:
        raise ValueError(f"{name} needs --exit_layer: say how many of the target's layers guess")
    return decoder.with_exit(options.exit_layer)

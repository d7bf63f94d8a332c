"""Which models the options of a verb mean: a checkpoint's, a pair of the registry, or pretrained ones by name.

Knows nothing of what the verb does with them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from lightning_specdec.cli_common import find_device, progress
from lightning_specdec.cli_early import named_model
from lightning_specdec.cli_options import DRAFTERS
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import Drafter, NGramDrafter
from lightning_specdec.pretrained import PretrainedOptions

_OF_PRETRAINED = (
    "draft",
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
    if foreign := given.keys() - DRAFTERS.get(options.drafter, {}).keys():
        raise ValueError(f"{options.drafter} takes no {min(foreign)}: drop it or choose another --drafter")
    return given


def _from_checkpoint(options: Namespace, arguments: dict[str, Any], device: torch.device) -> SpeculativeDecoder:
    """The checkpoint's own pair, or its target with n-gram look-up."""
    if given := [name for name in _OF_PRETRAINED if getattr(options, name)]:
        raise ValueError(f"--{given[0]} is for pretrained models (--pair, --target): a checkpoint has its own")
    drafter: Drafter | None = None
    if options.drafter == "NGramDrafter":
        drafter = NGramDrafter(**arguments)
    elif options.drafter is not None:
        raise ValueError(f"a checkpoint holds no model for a {options.drafter}: choose --drafter NGramDrafter, or none")
    dtype = options.dtype and getattr(torch, options.dtype)
    decoder = SpeculativeDecoder.from_checkpoint(options.ckpt, drafter=drafter, device=device, dtype=dtype)
    if options.num_draft_tokens is not None:
        decoder.num_draft_tokens = options.num_draft_tokens
    return decoder

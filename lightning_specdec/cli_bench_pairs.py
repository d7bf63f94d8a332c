"""The pairs and prompts that a benchmark's config names, loaded."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import OWN, SHIPPED, DraftChoice, PairChoice
from lightning_specdec.bench.failures import FAILURES, in_one_line
from lightning_specdec.bench.prompts.dataset import SEQUENCES, PromptDataset
from lightning_specdec.bench.prompts.prompt import Prompt
from lightning_specdec.bench.prompts.sources import read as read_sources
from lightning_specdec.bench.subject import Subject
from lightning_specdec.cli_common import find_device
from lightning_specdec.cli_early import check_models
from lightning_specdec.cli_groups import CKPT, DRAFTERS, DTYPES, MODELS, PLACE
from lightning_specdec.cli_models import load_decoder
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import Drafter, NGramDrafter
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.models import LanguageModel
from lightning_specdec.pairs import get_pair
from lightning_specdec.pretrained import PretrainedOptions, load_pair, pair_options

log = logging.getLogger("lightning_specdec")
ByDomain = dict[str, list[Prompt]]


def check_pairs(config: BenchConfig) -> None:
    """Raise ValueError for models and prompts that are not where they are said to be, and for types of numbers that
    there are not, before any model is loaded."""
    find_device(config.device)
    for source in (config.prompts, config.other_prompts):
        if source not in (None, OWN, SHIPPED):
            PromptDataset.load(source)
    for name, pair in config.pairs.items():
        for dtype in (pair.dtype, *(draft.dtype for draft in pair.drafts.values())):
            if dtype not in (None, *DTYPES):
                raise ValueError(f"pairs.{name}: dtype must be among {', '.join(DTYPES)}, got {dtype!r}")
        for draft in pair.drafts.values():
            check_models(_options(pair, draft, config))
        if pair.ckpt is not None:
            open(pair.ckpt, "rb").close()


def load_subject(
    name: str,
    config: BenchConfig,
    *,
    failed: Mapping[str, str] | None = None,
    prompts: Mapping[str, Sequence[Prompt]] | None = None,
) -> Subject:
    """A pair of the config with its prompts.

    A draft that cannot guess for the target is among its drafts by the reason.

    Args:
        failed: drafts that are not to be loaded, by the reason.
        prompts: instead of those that the config names.

    Raises:
        ValueError: the target cannot be loaded, or there are no such prompts.
    """
    pair = config.pairs[name]
    if pair.ckpt is not None:
        decoder, load = _of_checkpoint(pair, config)
    else:
        decoder, load = _pretrained(pair, config)
    drafts = {key: (failed or {}).get(key) or _loaded(load, choice) for key, choice in pair.drafts.items()}
    others: ByDomain = {}
    if prompts is None:
        prompts, others = _prompts(decoder, config)
    for each in (*prompts.values(), *others.values()):
        for prompt in each:
            check_prompt(prompt.tokens, decoder.target.vocab_size, f"prompt {prompt.id}")
    stops = () if decoder.tokenizer is None else sorted(decoder.tokenizer.eos)
    return Subject.of(
        name,
        decoder.target,
        drafts,
        prompts=prompts,
        others=others,
        stops=[token for token in stops if token < decoder.target.vocab_size],
        outside=bool(config.outside),
        rolled=config.rolled,
    )


def _options(pair: PairChoice, draft: DraftChoice, config: BenchConfig) -> Namespace:
    """A draft of a pair as the options of `decode` would name it."""
    options: dict[str, Any] = {option.name: option.default for option in (CKPT, *MODELS, *PLACE)}
    options |= {name: getattr(pair, name) for name in ("ckpt", "pair", "target", "dtype", "quantization")}
    options |= {name: getattr(draft, name) for name in ("draft", "drafter", "exit_layer")}
    options |= {"draft_dtype": draft.dtype, "draft_quantization": draft.quantization, "device": config.device}
    known = {f"drafter.{name}" for arguments in DRAFTERS.values() for name in arguments}
    for name, value in draft.drafter_arguments.items():
        if f"drafter.{name}" not in known:
            raise ValueError(f"no drafter takes {name}: drop it")
        options[f"drafter.{name}"] = value
    return Namespace(**options)


def _loaded(load: Callable[[DraftChoice], Drafter], choice: DraftChoice) -> Drafter | str:
    """A draft, or why there is none."""
    try:
        return load(choice)
    except FAILURES as error:
        return in_one_line(error)


def _of_checkpoint(
    pair: PairChoice, config: BenchConfig
) -> tuple[SpeculativeDecoder, Callable[[DraftChoice], Drafter]]:
    """The target of a checkpoint, and what loads a draft for it."""
    decoder = SpeculativeDecoder.from_checkpoint(
        str(pair.ckpt),
        target=pair.target,
        drafter=NGramDrafter(),
        device=find_device(config.device),
        dtype=None if pair.dtype is None else getattr(torch, pair.dtype),
    )
    return decoder, lambda choice: load_decoder(_options(pair, choice, config)).drafter


def _pretrained(pair: PairChoice, config: BenchConfig) -> tuple[SpeculativeDecoder, Callable[[DraftChoice], Drafter]]:
    """The same of transformers' models; not packed, since transformers decodes with the same weights."""
    shared: PretrainedOptions = {"device": find_device(config.device), "pack": False}
    own: PretrainedOptions = {**shared, "dtype": pair.dtype, "quantization": pair.quantization}
    alone: PretrainedOptions = {**own, "drafter": NGramDrafter.__name__}
    if pair.pair is not None:
        decoder = SpeculativeDecoder.from_pair(pair.pair, **alone)
    else:
        decoder = SpeculativeDecoder.from_pretrained(str(pair.target), **alone)
    return decoder, lambda choice: _draft(decoder.target, pair, choice, own)


def _draft(target: LanguageModel, pair: PairChoice, choice: DraftChoice, own: PretrainedOptions) -> Drafter:
    options: PretrainedOptions = {**own, "draft_dtype": choice.dtype, "draft_quantization": choice.quantization}
    arguments = dict(choice.drafter_arguments)
    if choice.exit_layer is not None:
        arguments["exit_layer"] = choice.exit_layer
    if choice.drafter is not None:
        options["drafter"] = choice.drafter
    if arguments:
        options["drafter_arguments"] = arguments
    source: Any = choice.draft
    if pair.pair is not None:
        given, options = pair_options(get_pair(pair.pair), choice.draft, options)
        source = given if choice.draft is None else choice.draft
    return load_pair(target, source, **options)[1]


def _prompts(decoder: SpeculativeDecoder, config: BenchConfig) -> tuple[ByDomain, ByDomain]:
    """The prompts to measure, and the others, by domain."""
    found = _source(decoder, config.prompts, config)
    measured = {domain: several[: config.num_prompts] for domain, several in found.items()}
    rest = {domain: several[config.num_prompts :] for domain, several in found.items()}
    if config.other_prompts is not None:
        rest = _source(decoder, config.other_prompts, config)
    taken = {prompt.tokens for several in measured.values() for prompt in several}
    others: ByDomain = {}
    for domain in measured:
        if len(measured[domain]) < config.num_prompts:
            log.warning(
                f"{domain}: {len(measured[domain])} prompts of the {config.num_prompts} that num_prompts asks for"
            )
        if left := [prompt for prompt in rest.get(domain, ()) if prompt.tokens not in taken]:
            others[domain] = left[: config.num_other_prompts]
    return measured, others


def _source(decoder: SpeculativeDecoder, source: str, config: BenchConfig) -> ByDomain:
    """The prompts of a source, by domain."""
    tokenizer = decoder.tokenizer
    if source == OWN:
        if not decoder.prompts:
            raise ValueError(f"prompts: {OWN} needs a pair with prompts of its own: say {SHIPPED}, or name a file")
        domain = OWN if tokenizer is not None else SEQUENCES
        dataset = PromptDataset(
            tuple(Prompt(f"{OWN}-{i}", domain, tuple(tokens)) for i, tokens in enumerate(decoder.prompts))
        )
    elif source == SHIPPED:
        wanted = config.domains if tokenizer is not None else [SEQUENCES]
        entries, _ = read_sources([SHIPPED], wanted)
        dataset = PromptDataset.encode(entries, tokenizer)
    else:
        loaded = PromptDataset.load(source)
        try:
            dataset = (loaded.of(config.domains) if config.domains else loaded).for_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    domains = config.domains or dataset.domains
    return {domain: dataset.by_domain(domain) for domain in domains}

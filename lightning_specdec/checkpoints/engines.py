"""A draft <-> the engines that serve it: write a directory that vLLM, SGLang, llama.cpp or transformers loads.

A directory takes its name only once it was read back by other code (`engine_reference`), and what that computes from
the target's own hidden states was compared with what this package drafts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from lightning_specdec.checkpoints import engine_heads
from lightning_specdec.checkpoints.checkpoint import portable
from lightning_specdec.checkpoints.engine_reference import (
    DSparkReference,
    Eagle3Reference,
    Reference,
    hidden_states,
    medusa_logits,
)
from lightning_specdec.checkpoints.networks import FLOATS
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.files import new_directory
from lightning_specdec.config.models import ENGINES
from lightning_specdec.drafters import (
    BlockDrafter,
    CrossVocabulary,
    Drafter,
    DraftRequest,
    EagleDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    MultiTokenDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
    TargetContext,
    last_two,
)
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import quiet
from lightning_specdec.models.safetensors_file import SINGLE
from lightning_specdec.rules import Sampling

_RUN: dict[str, tuple[type[Drafter], ...]] = {
    "vllm": (EagleDrafter, MultiTokenDrafter, ModelDrafter),
    "llama.cpp": (EagleDrafter,),
    "transformers": (ModelDrafter,),
}
"""Drafts that ran in the engine itself (docs/serve.md); of others, what the engine computes was compared."""
_CLOSE = 1e-3
"""Largest difference of logits, relative to the largest logit."""
_STEPS = 4
"""Draft tokens that are compared behind each text."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        directory: where.
        commands: what serves the target with it, line by line.
        difference: the largest difference from this package's logits, relative to the largest logit.
        num_compared: rows of logits that were compared.
        loaded: whether such directories were run in the engine itself, see docs/serve.md.
    """

    directory: Path
    commands: tuple[str, ...]
    difference: float
    num_compared: int
    loaded: bool


@dataclass(frozen=True)
class _Plan:
    """How a draft is written for an engine, compared (its logits here and there), and served.

    Args:
        methods: what each engine calls this kind of draft.
        window: draft tokens of a round to recommend.
        crossed: whether the draft has another vocabulary.
    """

    write: Callable[[Path], None]
    compare: Callable[[Path, list[list[int]]], list[tuple[Tensor, Tensor]]]
    methods: Mapping[str, str]
    window: int
    crossed: bool = False


def export(
    output: Path,
    drafter: Drafter,
    target: HuggingFaceLM,
    engine: str,
    *,
    texts: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    num_draft_tokens: int | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write a draft as a directory that an engine loads: whole and compared, or not at all.

    Args:
        output: the directory, which must not be there yet.
        engine: one of `ENGINES`.
        texts: tokens of the target, behind which drafts are compared; random ones when there are none.
        recipe: how the draft was trained, for the model card.
        num_draft_tokens: window to recommend; by default the recipe's, else 3.
        dtype: what the weights are stored in; by default as they are.

    Raises:
        ValueError: the engine cannot run such a draft, or computes something else from it.
        OSError: the directory cannot be written.
    """
    recipe = portable(dict(recipe or {}))
    if engine not in ENGINES:
        raise ValueError(f"format must be one of {', '.join(ENGINES)}, got {engine!r}")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            f"engines read weights in {', '.join(FLOATS)}, not in {dtype}: choose another --dtype"
        )
    if not isinstance(target, HuggingFaceLM):
        raise ValueError(
            f"engines serve models of transformers, and the target is a {type(target).__name__}"
        )
    drafter.check_target(target)
    window = num_draft_tokens or recipe.get("num_draft_tokens") or 3
    stored = deepcopy(drafter).eval()
    for weight in stored.parameters() if dtype is not None else ():
        weight.data = weight.data.to(FLOATS[dtype])  # type: ignore[index]
    place = target.origin.source if target.origin is not None else "TARGET"
    plan = _plan(stored, target, engine, window, place)
    commands = _commands(plan, engine, place, output)
    longest = (target.max_positions or 2**20) - _STEPS
    known = [list(text)[:longest] for text in texts or _random_texts(target)]
    try:
        with new_directory(output) as folder:
            plan.write(folder)
            made_for = portable(TargetReference.of(target).to_dict())
            _write_json(
                folder / engine_heads.ORIGIN, {"target": made_for, "num_draft_tokens": plan.window}
            )
            pairs = plan.compare(folder, [text for text in known if len(text) > 2])
            difference = max(_difference(*pair) for pair in pairs)
            if not difference < _CLOSE:
                raise ValueError(
                    f"read back, the draft scores other tokens than here (by {difference:.2g} of the largest logit), "
                    "and nothing was written: report this with the draft's settings"
                )
            count = sum(len(ours) for ours, _ in pairs)
            loaded = isinstance(stored, _RUN.get(engine, ()))
            made = Exported(output, commands, difference, count, loaded)
            (folder / "README.md").write_text(
                _card(made, stored, target, engine, recipe), encoding="utf-8"
            )
    except SafetensorError as error:
        raise OSError(f"{output} cannot be written: {error}") from error
    return made


def _plan(stored: Drafter, target: HuggingFaceLM, engine: str, window: int, place: str) -> _Plan:
    """How to write this draft for that engine; ValueError where the engine cannot run it."""
    name = type(stored).__name__
    for kind, reason in _NO_ENGINE.items():
        if isinstance(stored, kind):
            raise ValueError(f"{engine} cannot run this {name}: {reason}")
    if isinstance(stored, FeatureDrafter) and (lacks := _lacks(stored, target, engine)):
        raise ValueError(f"{engine} cannot run this {name}: {'; '.join(lacks)}")
    if isinstance(stored, EagleDrafter):
        return _eagle_plan(stored, target, engine, window, place)
    if isinstance(stored, BlockDrafter):
        return _block_plan(stored, target, place)
    if isinstance(stored, MultiTokenDrafter):
        if engine != "vllm":
            raise ValueError(f"{engine} cannot run this {name}: it has no Medusa heads; vllm has")
        if stored.draft_vocabulary is not None:
            raise ValueError(
                f"vllm cannot run this {name}: its heads must score all tokens, train them without draft_vocabulary"
            )
        return _medusa_plan(stored, target)
    model = stored.model if isinstance(stored, CrossVocabulary | ModelDrafter) else None
    if not isinstance(model, HuggingFaceLM):
        raise ValueError(
            f"{engine} cannot run this {name}: it loads models of transformers and heads alone"
        )
    if isinstance(stored, CrossVocabulary) and engine in ("sglang", "llama.cpp"):
        raise ValueError(
            f"{engine} cannot run this {name}: the draft needs the target's vocabulary there"
        )
    return _model_plan(stored, model, target, engine, window)


_NO_ENGINE: dict[type[Drafter], str] = {
    NGramWithFallback: "no engine takes turns between lookup and a draft: export the draft alone, without --drafter",
    StagedDrafter: "no engine has a draft's draft: export one of the stages as a draft model",
    EarlyExitDrafter: "no engine drafts with the target's first layers, which would have to share their state",
    NGramDrafter: "lookup has no weights, and engines have their own (vLLM's method ngram, transformers' "
    "prompt_lookup_num_tokens)",
}


def _lacks(stored: FeatureDrafter, target: HuggingFaceLM, engine: str) -> list[str]:
    """Why an engine cannot run a draft on the target's hidden states."""
    own, lacks = stored.settings, []
    if max(own.feature_layers) == (target.num_layers or 0) - 1:
        lacks.append(
            "it reads the target's last layer behind the final norm, engines read it before: train without it"
        )
    if len(set(own.feature_layers)) < len(own.feature_layers):
        lacks.append("it reads a layer twice: train with different ones")
    if isinstance(stored, BlockDrafter):
        if engine != "vllm":
            lacks.append("it has no block drafters with a Markov head; vllm has")
        if own.feature_norms:
            lacks.append(
                "DSpark joins the target's hidden states without norms: train with feature_norms: false"
            )
        return lacks
    if engine == "transformers":
        lacks.append("assisted generation takes language models alone: export a draft model")
    if engine in ("sglang", "llama.cpp") and len(own.feature_layers) != 3:
        lacks.append("it must read three layers: train with three")
    if engine == "llama.cpp":
        wants = {
            "feature_norms: false": own.feature_norms,
            "norm_output: false": own.norm_output,
            "no attention_window": own.attention_window is not None,
        }
        if needed := [how for how, missing in wants.items() if missing]:
            lacks.append(
                f"it runs plain EAGLE-3 alone: train with {' and '.join(needed)}, norms cannot be folded"
            )
    return lacks


def _eagle_plan(
    stored: EagleDrafter, target: HuggingFaceLM, engine: str, window: int, place: str
) -> _Plan:
    nested = engine != "sglang"

    def write(folder: Path) -> None:
        config = engine_heads.eagle_config(stored, place, window, nested=nested)
        _write(
            folder, config, engine_heads.eagle_tensors(stored, "layers.0" if nested else "midlayer")
        )

    methods = {"vllm": "eagle3", "sglang": "EAGLE3", "llama.cpp": "draft-eagle3"}
    return _Plan(write, partial(_compare, stored, target, Eagle3Reference), methods, window)


@torch.inference_mode()
def _compare(
    stored: FeatureDrafter,
    target: HuggingFaceLM,
    kind: type[Reference],
    folder: Path,
    texts: list[list[int]],
) -> list[tuple[Tensor, Tensor]]:
    """What is drafted behind each text, scored here and from the directory."""
    precise, model, reference, pairs = (
        deepcopy(stored).float(),
        target.in_float32(),
        kind(folder),
        [],
    )
    table = model.embeddings(torch.arange(model.vocab_size)[None])[0]
    for text in texts:
        tokens, ours = _drafted(precise, model, text)
        whole = [*text, *tokens]
        pairs.append(
            (ours, reference.logits(hidden_states(model.model, whole), table, whole, len(tokens)))
        )
    return pairs


def _block_plan(stored: BlockDrafter, target: HuggingFaceLM, place: str) -> _Plan:
    def write(folder: Path) -> None:
        table = target.embeddings(torch.arange(target.vocab_size, device=target.device)[None])[
            0
        ].detach()
        _write(
            folder,
            engine_heads.block_config(stored, place),
            engine_heads.block_tensors(stored, table),
        )

    whole = deepcopy(stored)
    whole.settings = replace(whole.settings, min_confidence=0.0)  # so that no place is left out
    compare = partial(_compare, whole, target, DSparkReference)
    return _Plan(
        write, compare, {"vllm": "dspark"}, stored.settings.block_size
    )  # vLLM computes all that it drafts


def _medusa_plan(stored: MultiTokenDrafter, target: HuggingFaceLM) -> _Plan:
    def write(folder: Path) -> None:
        _write(folder, *engine_heads.medusa_files(stored))

    @torch.inference_mode()
    def compare(folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        precise, model, pairs = deepcopy(stored).float(), target.in_float32(), []
        for text in texts:
            layer = precise.features(model)[0]
            own = model(torch.tensor([text]), features=(layer,)).features[layer][0]
            ours = torch.cat([precise.logits(i, own) for i in range(precise.settings.num_heads)])
            pairs.append(
                (ours, medusa_logits(folder, hidden_states(model.model, text)[-1]).flatten(0, 1))
            )
        return pairs

    return _Plan(write, compare, {"vllm": "medusa"}, stored.settings.num_heads)


def _model_plan(
    stored: Drafter, model: HuggingFaceLM, target: HuggingFaceLM, engine: str, window: int
) -> _Plan:
    tokenizer: Any = model.tokenizer or (
        None if isinstance(stored, CrossVocabulary) else target.tokenizer
    )
    if not hasattr(tokenizer, "tokenizer"):
        raise ValueError(
            f"{engine} cannot run this {type(stored).__name__}: it needs a tokenizer of transformers"
        )

    def write(folder: Path) -> None:
        with quiet():
            model.model.save_pretrained(folder)
            tokenizer.tokenizer.save_pretrained(folder)

    @torch.inference_mode()
    def compare(folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        from transformers import AutoModelForCausalLM

        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        precise = model.in_float32()
        rows = [torch.tensor([[token % model.vocab_size for token in text]]) for text in texts]
        return [(precise(row).logits[0], loaded(row).logits[0]) for row in rows]

    methods = {"vllm": "draft_model", "sglang": "STANDALONE"}
    return _Plan(write, compare, methods, window, isinstance(stored, CrossVocabulary))


def _drafted(
    drafter: FeatureDrafter, model: HuggingFaceLM, text: list[int]
) -> tuple[list[int], Tensor]:
    """The draft behind a text of which the target has read all but the last token, and its logits."""
    state = model.init_state(1, len(text) + _STEPS)
    memory = drafter.init_state(1, len(text) + _STEPS, TargetContext(model, state))
    features = tuple(drafter.features(model))
    output = model(torch.tensor([text[:-1]]), state, logits_for=slice(-1, None), features=features)
    drafter.observe(memory, output, [0])
    tail = last_two([text], model.device)
    request = DraftRequest([text], tail, None, wants_logits=True, vocab_size=model.vocab_size)
    draft = drafter.propose(memory, request, [_STEPS], Sampling())
    assert draft.logits is not None
    return draft.tokens[0].tolist(), draft.logits[0]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest logit; infinite where one scores what the other does not."""
    finite = theirs.isfinite()
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), finite):
        return float("inf")
    apart = (ours.double() - theirs.double())[finite].abs().max()
    return float(apart / theirs[finite].abs().max().clamp_min(1e-9))


def _random_texts(target: HuggingFaceLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        for length in (5, 40, 170)
    ]


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    _write_json(folder / "config.json", config)
    (folder / SINGLE).write_bytes(safetensors.save(weights, {"format": "pt"}))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _commands(plan: _Plan, engine: str, place: str, output: Path) -> tuple[str, ...]:
    """What serves the target with a draft, line by line."""
    method, window, quote = plan.methods.get(engine), plan.window, shlex.quote
    target, draft = quote(place), quote(str(output))
    if engine == "vllm":
        speculative: dict[str, Any] = {
            "method": method,
            "model": str(output),
            "num_speculative_tokens": window,
        }
        speculative |= {"use_heterogeneous_vocab": True} if plan.crossed else {}
        return (f"vllm serve {target} --speculative-config {quote(json.dumps(speculative))}",)
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
            f"--speculative-draft-model-path {draft} --speculative-num-steps {window} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {window + 1}",
        )
    if engine == "llama.cpp":
        gguf = quote(str(output.with_suffix(".gguf")))
        beside, kind = (
            (f" --target-model-dir {target}", f"--spec-type {method} ") if method else ("", "")
        )
        return (
            f"python convert_hf_to_gguf.py {draft}{beside} --outfile {gguf}",
            f"llama-server -m TARGET.gguf -md {gguf} {kind}--spec-draft-n-max {window}",
        )
    given = (
        ", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained(...)"
        if plan.crossed
        else ""
    )
    assistant = f"AutoModelForCausalLM.from_pretrained({str(output)!r})"
    return (f"model.generate(**inputs, assistant_model={assistant}{given})",)


def _card(
    made: Exported, stored: Drafter, target: HuggingFaceLM, engine: str, recipe: Mapping[str, Any]
) -> str:
    """The model card: target, data, licence, figures, and how to serve it."""
    place = "a target without files" if target.origin is None else target.origin.source
    sha256 = None if target.origin is None else target.origin.sha256
    licence = _licence(target)
    data = recipe.get("data_arguments", {}).get("paths") or recipe.get("data") or "not recorded"
    figures = {
        name: value
        for name, value in (recipe.get("reached") or {}).items()
        if isinstance(value, int | float)
    }
    lines = [
        "---",
        "library_name: lightning_specdec",
        *([f"license: {licence}"] if licence else []),
        "---",
        "",
    ]
    lines += [
        f"# A draft for {place}",
        "",
        f"`{type(stored).__name__}`, for speculative decoding in {engine}.",
    ]
    lines += ["The output stays the target's; the draft changes how long it takes.", ""]
    lines += [
        f"- Target: {place}, weights sha256 {sha256 or 'not known'}",
        f"- Trained on: {json.dumps(data)}",
    ]
    lines += (
        [f"- Tokens seen: {recipe['tokens_seen']:,}"]
        if isinstance(recipe.get("tokens_seen"), int)
        else []
    )
    lines += [
        f"- Licence: {licence or 'not stated by the target: state one that the licences of target and text allow'}",
        f"- Checked: {made.num_compared} rows of logits, read back by other code, differ by at most "
        f"{made.difference:.1e} of the largest logit",
    ]
    lines += [] if made.loaded else [f"- Not run in {engine} itself"]
    lines += ["", "On held-out text:", "", "| Figure | Value |", "|---|---|"] if figures else []
    lines += [f"| {name} | {value:.4g} |" for name, value in sorted(figures.items())]
    return "\n".join([*lines, "", "```sh", *made.commands, "```", ""])


def _licence(target: HuggingFaceLM) -> str | None:
    path = None if target.origin is None else target.origin.path / "README.md"
    if path is None or not path.is_file():
        return None
    head = path.read_text(encoding="utf-8", errors="replace")[:4096].partition("\n---")[0]
    found = re.search(r"^license: *([\w.-]{1,60}) *$", head, re.MULTILINE)
    return found[1] if found else None

"""Decode tiny random models of every causal family of transformers, and compare with `generate`.

    python benchmarks/every_family.py --rows .families.jsonl --output docs/results/families.json
    python benchmarks/every_family.py qwen3_5_text lfm2 --rows /tmp/rows.jsonl

Each family is examined in a separate process with a limit on its time, 30 seconds or so. Rows are
appended to a file, and families that it has are not examined again.

A family is `exact` if every token equals that of transformers' greedy `generate` of each prompt
alone: standard decoding, prompt lookup, another model, a copy, and a similar model as draft, single
prompts and a ragged batch, with and without an EOS token, through `custom_generate`, and sampled
decoding beside standard decoding with the same seed. It is `refused` if a ValueError says why.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

import lightning_specdec
from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest

SETTINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
NUM_NEW = 40
NUM_SAMPLED = 16
SECONDS = 240
"""Time limit of a family, if nothing else runs."""
TIE = 1e-4
"""Share of the largest logit within which two logits are equal but for rounding."""
MANY_TOKENS = 12
"""Distinct tokens of an output that shows something; a model that repeats one shows nothing."""
SHARPNESS = (6.0, 12.0, 20.0, 3.5, 35.0)
"""Factors of the weights to try until the outputs vary."""
RECURRENT_WEIGHTS = (
    "a_log",
    "dt_proj",
    "dt_bias",
    "time_decay",
    "time_first",
    "recurrent_param",
    "lambda",
    "time_mix",
)
"""Parts of names of weights that decide how fast a state fades: they keep their values."""
PROMPTS = [
    [5, 17, 9, 33],
    [7, 21, 9, 40, 7, 21, 9, 40, 7],
    [11, 52, 3, 90, 64, 11, 52, 3, 77, 101, 23, 11, 52, 3, 90, 64, 8, 15, 120, 45, 23, 11, 52, 99],
]

WITH_IMAGES = " with images"
"""End of the name of a family that also reads images, which is examined with texts."""
NO_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="all of them when none is named")
    parser.add_argument("--rows", type=Path, default=Path(".families.jsonl"))
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit of a family; more if others run"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(examine(options.one)))
        return

    names = options.families or all_families()
    rows = read_rows(options.rows)
    for number, name in enumerate(names, 1):
        if name not in rows:
            rows[name] = examine_apart(name, options.seconds)
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
        print(f"{number} of {len(names)}: {line(rows[name])}", flush=True)
    chosen_rows = [rows[name] for name in names]
    print(summary(chosen_rows))
    if options.output:
        settings = {"num_new": NUM_NEW, "prompts": len(PROMPTS)}
        record = {
            "manifest": manifest(options=settings, device=torch.device("cpu")),
            "rows": chosen_rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def all_families() -> list[str]:
    """The causal families of the installed transformers, and the variants of some.

    Those that also read images are at the end.
    """
    left_out = {name for names in SETTINGS["left_out"].values() for name in names}
    families = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in left_out]

    lists = SETTINGS["with_images"]["left_out"].values()
    left_out = {name for names in lists for name in names}
    causal_classes = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    with_images = []
    for name, class_name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        # Some are among the causal families already.
        if name not in left_out and class_name not in causal_classes:
            with_images.append(name + WITH_IMAGES)
    return [*families, *SETTINGS["variants"], *with_images]


def read_rows(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return {row["family"]: row for row in rows}


def examine_apart(name: str, seconds: float) -> Row:
    """The row of a family, from a separate process, which may crash or hang.

    Args:
        seconds: time limit.
    """
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"family": name, "outcome": "time limit", "reason": f"more than {seconds:g} s"}
    if process.returncode != 0:
        last_line = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return {"family": name, "outcome": "crash", "reason": last_line}
    row: Row = json.loads(process.stdout.splitlines()[-1])
    return row


def line(row: Row) -> str:
    """What is printed of a row."""
    reason = row.get("reason", "")
    return f"{row['family']:28s} {row['outcome']}{f': {reason[:160]}' if reason else ''}"


def summary(rows: Sequence[Row]) -> str:
    outcomes = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())


# One family


def examine(name: str) -> Row:
    """Decode a family's tiny model in every way, and compare with transformers."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    row: Row = {"family": name}
    try:
        model, expected = varied_model(name)
    except Exception as error:
        return {**row, "outcome": "transformers does not generate", "reason": reason_of(error)}

    row["class"] = type(model).__name__
    row["layers"] = layers_of(model)
    row["distinct_tokens"] = min(len(set(tokens)) for tokens in expected)
    row["whole_differs"] = whole_differs(model, expected)
    checks = Checks(model, expected)
    checks.run_all(name)
    row["passed"] = checks.passed
    row["differences"] = checks.differences
    row["errors"] = checks.errors
    row["outcome"], row["reason"] = checks.outcome()
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def reason_of(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{place}"


def layers_of(model: PreTrainedModel) -> str:
    """The kinds of a model's layers, as its config names them."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        return f"{getattr(config, 'num_hidden_layers', '?')} layers"
    counts = Counter(str(kind).removesuffix("_attention") for kind in kinds)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def greedy(model: PreTrainedModel, prompt: Sequence[int], **options: Any) -> list[int]:
    """The new tokens of transformers' greedy `generate` of one prompt."""
    tokens = torch.tensor([prompt])
    any_model: Any = model
    output: Tensor = any_model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        **options,
    )
    new_tokens: list[int] = output[0, len(prompt) :].tolist()
    return new_tokens


@torch.no_grad()
def whole_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """The logits of a text that is read in one call, without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def whole_differs(model: PreTrainedModel, expected: Sequence[Sequence[int]]) -> str | None:
    """Where transformers' cached decoding differs from its own call on the whole text, if it does.

    Such a family has no single right output.
    """
    try:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            logits = whole_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
            chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
            gaps = logits.amax(-1) - chosen
            if (gaps > TIE * max(1.0, float(logits.abs().max()))).any():
                return f"by {float(gaps.max()):.3g}"
    except Exception as error:
        return reason_of(error)
    return None


# The models


def varied_model(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    """A model whose greedy outputs have many tokens, and these outputs."""
    best: tuple[int, PreTrainedModel, list[list[int]]] | None = None
    for seed in (1, 11):
        for sharpness in SHARPNESS:
            model = build(name, seed, sharpness)
            outputs = [greedy(model, prompt) for prompt in PROMPTS]
            num_distinct = min(len(set(output)) for output in outputs)
            if best is None or num_distinct > best[0]:
                best = (num_distinct, model, outputs)
            if num_distinct >= MANY_TOKENS:
                return model, outputs
    assert best is not None
    return best[1], best[2]


def build(name: str, seed: int, sharpness: float = SHARPNESS[0]) -> PreTrainedModel:
    """A random model of a family or of a variant, in float32."""
    variant = SETTINGS["variants"].get(name, {})
    auto_class: Any = AutoModelForCausalLM
    if name.endswith(WITH_IMAGES):
        auto_class = AutoModelForImageTextToText
        config = config_with_images(name.removesuffix(WITH_IMAGES))
    else:
        family = variant.get("family", name)
        config = config_of(family, variant.get("settings", {}))
    options = {}
    if "attention" in variant:
        options["attn_implementation"] = variant["attention"]
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32, **options)
    model.eval()
    sharpen(model, sharpness, seed)
    forget_special_tokens(model)
    return model


def config_of(family: str, settings: Mapping[str, Any]) -> Any:
    """The config of a tiny model of a family."""
    config_class = CONFIG_MAPPING[family]
    nested = SETTINGS["nested"].get(family)
    if nested is not None:
        inner_family = nested["family"]
        inner_settings = SETTINGS["families"].get(inner_family, {})
        text_config = {
            "model_type": inner_family,
            **sizes_of(CONFIG_MAPPING[inner_family], inner_settings),
            **NO_SPECIAL_TOKENS,
            **nested.get("inner", {}),
        }
        values = {nested["field"]: text_config, **nested.get("outer", {}), **settings}
        return config_class(**values)

    own_settings = {**SETTINGS["families"].get(family, {}), **settings}
    values = {"pad_token_id": 0}
    for field in dataclasses.fields(config_class):
        if field.name in ("bos_token_id", "eos_token_id"):
            values[field.name] = None if "None" in str(field.type) else 0
    if "tie_word_embeddings" in setting_names(config_class):
        values["tie_word_embeddings"] = False
    return config_class(**{**values, **sizes_of(config_class, own_settings)})


def config_with_images(family: str) -> Any:
    """The config of a tiny model of a family that also reads images."""
    config_class = CONFIG_MAPPING[family]
    settings = dict(SETTINGS["with_images"]["families"].get(family, {}))
    values: dict[str, Any] = {}
    for part in config_class.sub_configs:
        part_settings = settings.pop(part, {})
        part_class = class_of_part(config_class, part, part_settings)
        if part == "text_config":
            own_settings = SETTINGS["families"].get(part_class.model_type, {})
            sizes = sizes_of(part_class, {**own_settings, **part_settings})
            values[part] = {**NO_SPECIAL_TOKENS, **sizes}
        else:
            values[part] = sizes_of(part_class, part_settings, SETTINGS["with_images"]["sizes"])
        values[part].setdefault("model_type", part_class.model_type)

    # The tokens of images are the last ones of the vocabulary.
    names = setting_names(config_class)
    for name, value in SETTINGS["with_images"]["tokens"].items():
        if name in names:
            values[name] = value
    if "tie_word_embeddings" in names:
        values["tie_word_embeddings"] = False
    return config_class(**{**values, **settings})


def class_of_part(config_class: Any, part: str, settings: Mapping[str, Any]) -> Any:
    """The class of a part of a config: the named one, or else that of the default."""
    if "model_type" in settings:
        return CONFIG_MAPPING[settings["model_type"]]
    part_class = config_class.sub_configs[part]
    if part_class is not AutoConfig:
        return part_class
    return type(getattr(config_class(), part))


def setting_names(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} | set(
        config_class.attribute_map
    )


def sizes_of(
    config_class: Any,
    settings: Mapping[str, Any],
    all_sizes: Mapping[str, Any] = SETTINGS["sizes"],
) -> dict[str, Any]:
    """The small sizes of the settings that a config has, and these settings.

    Many configs have two names for one setting. Then the given one counts, or else the config's.
    """
    names = setting_names(config_class)
    sizes = {name: value for name, value in all_sizes.items() if name in names}
    for alias, name in config_class.attribute_map.items():
        size = sizes.pop(alias, None)
        if size is not None and name in names:
            sizes.setdefault(name, size)
        if alias in settings:
            sizes.pop(name, None)
    return {**sizes, **settings}


@torch.no_grad()
def sharpen(model: PreTrainedModel, sharpness: float, seed: int) -> None:
    """Scale a model's weights, so that its outputs vary, and give its biases random values."""
    generator = torch.Generator().manual_seed(seed + 77)
    for name, weight in model.named_parameters():
        is_recurrent = any(part in name.lower() for part in RECURRENT_WEIGHTS)
        if is_recurrent or not weight.is_floating_point():
            continue
        if weight.dim() > 1:
            weight.mul_(sharpness)
        else:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


def forget_special_tokens(model: PreTrainedModel) -> None:
    """Let `generate` write `NUM_NEW` tokens, whatever they are."""
    generation: Any = model.generation_config
    generation.pad_token_id = 0
    for name in (
        "eos_token_id",
        "bos_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "begin_suppress_tokens",
        "suppress_tokens",
        "max_length",
        "cache_implementation",
    ):
        setattr(generation, name, None)


@torch.no_grad()
def similar(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights are slightly different, so that most of its tokens are accepted."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for weight in other.parameters():
        if weight.is_floating_point() and weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * 0.1 * weight.std().nan_to_num())
    return other


# The checks


class Checks:
    """Decodes a model in several ways, and compares each with `generate`.

    Args:
        model: the model.
        expected: the new tokens of `generate` for each prompt.

    Attributes:
        passed: names of the ways whose tokens all equal the expected ones.
        differences: the first difference of each other way, in words.
        errors: by the way, the error that it raised.
    """

    def __init__(self, model: PreTrainedModel, expected: list[list[int]]) -> None:
        self.model = model
        self.expected = expected
        self.passed: list[str] = []
        self.differences: list[str] = []
        self.errors: dict[str, str] = {}
        self._is_wrong = False

    def run_all(self, name: str) -> None:
        self._run("standard decoding", lambda: self._standard())
        self._run("prompt lookup, 3 tokens", lambda: self._drafted(None, 3))
        self._run("prompt lookup, 8 tokens", lambda: self._drafted(None, 8))
        self._run("another model", lambda: self._drafted(build(name, 2), 3))
        self._run("a copy", lambda: self._drafted(copy.deepcopy(self.model), 5))
        self._run("a similar model", lambda: self._drafted(similar(self.model), 4))
        self._run("an EOS token", self._ending)
        self._run("sampled", self._sampled)
        self._run("custom_generate", self._inside_generate)

    def outcome(self) -> tuple[str, str]:
        """One word for all checks, and the reason."""
        if self._is_wrong:
            return "wrong", self.differences[0]
        refusals = [text for text in self.errors.values() if text.startswith("ValueError")]
        if len(refusals) < len(self.errors):
            other = next(text for text in self.errors.values() if text not in refusals)
            return "crash", other
        if refusals:
            way = next(iter(self.errors))
            is_partly = bool(self.passed)
            return ("partly refused" if is_partly else "refused"), f"{way}: {refusals[0]}"
        if self.differences:
            return "tie", self.differences[0]
        return "exact", ""

    def _run(self, way: str, check: Callable[[], list[tuple[int, list[int], list[int]]]]) -> None:
        """Run a check, which returns the row, the expected tokens, and the tokens of each text."""
        try:
            compared = check()
        except Exception as error:
            self.errors[way] = reason_of(error)
            return
        is_equal = True
        for row, expected, tokens in compared:
            if tokens != expected:
                is_equal = False
                self._note(way, row, expected, tokens)
                break
        if is_equal:
            self.passed.append(way)

    def _note(self, way: str, row: int, expected: list[int], tokens: list[int]) -> None:
        """Keep a difference, and whether it is more than rounding."""
        position = 0
        for expected_token, token in zip(expected, tokens, strict=False):
            if expected_token != token:
                break
            position += 1
        if position == min(len(expected), len(tokens)):
            self._is_wrong = True
            self.differences.append(f"{way}: {len(tokens)} tokens instead of {len(expected)}")
            return
        gap = self._gap(row, expected[:position], expected[position], tokens[position])
        if not gap < TIE:
            self._is_wrong = True
        self.differences.append(f"{way}: differs at token {position}, by {gap:.2g} of the range")

    def _gap(self, row: int, new_tokens: list[int], token: int, other_token: int) -> float:
        """The difference of two tokens' logits, as a share of the largest; infinite if unknown."""
        try:
            logits = whole_logits(self.model, [*PROMPTS[row], *new_tokens])[-1]
        except Exception:
            return float("inf")
        largest = max(1.0, float(logits.abs().max()))
        return float((logits[token] - logits[other_token]).abs()) / largest

    def _all(
        self,
        decode: Callable[..., Any],
        **options: Any,
    ) -> list[tuple[int, list[int], list[int]]]:
        """Decode the prompts as a ragged batch and one by one."""
        compared = []
        together = decode(PROMPTS, max_new_tokens=NUM_NEW, eos=(), **options).tokens
        for row, prompt in enumerate(PROMPTS):
            alone = decode([prompt], max_new_tokens=NUM_NEW, eos=(), **options).tokens[0]
            compared.append((row, self.expected[row], list(together[row])))
            compared.append((row, self.expected[row], list(alone)))
        return compared

    def _standard(self) -> list[tuple[int, list[int], list[int]]]:
        return self._all(SpeculativeDecoder(copy.deepcopy(self.model)).decode_standard)

    def _drafted(
        self,
        draft: PreTrainedModel | None,
        num_draft_tokens: int,
    ) -> list[tuple[int, list[int], list[int]]]:
        decoder = SpeculativeDecoder(copy.deepcopy(self.model), draft)
        return self._all(decoder.decode, num_draft_tokens=num_draft_tokens)

    def _ending(self) -> list[tuple[int, list[int], list[int]]]:
        """A token that occurs in an output ends the texts that have it."""
        eos = self.expected[0][NUM_NEW // 2]
        decoder = SpeculativeDecoder(copy.deepcopy(self.model))
        result = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=4, eos=eos)
        compared = []
        for row, tokens in enumerate(self.expected):
            end = tokens.index(eos) + 1 if eos in tokens else NUM_NEW
            compared.append((row, tokens[:end], list(result.tokens[row])))
        return compared

    def _sampled(self) -> list[tuple[int, list[int], list[int]]]:
        """Under `ExactMatch`, seeded sampling has the tokens of standard decoding."""
        options: dict[str, Any] = {
            "max_new_tokens": NUM_SAMPLED,
            "temperature": 1.0,
            "seed": 5,
            "eos": (),
        }
        decoder = SpeculativeDecoder(copy.deepcopy(self.model), similar(self.model))
        expected = decoder.decode_standard(PROMPTS, **options).tokens
        result = decoder.decode(PROMPTS, num_draft_tokens=4, rule="ExactMatch", **options)
        rows = range(len(PROMPTS))
        return [(row, list(expected[row]), list(result.tokens[row])) for row in rows]

    def _inside_generate(self) -> list[tuple[int, list[int], list[int]]]:
        """transformers' `generate` with this package's method, and its own method afterwards."""
        compared = []
        for row, prompt in enumerate(PROMPTS):
            tokens = greedy(self.model, prompt, custom_generate=lightning_specdec.generate)
            compared.append((row, self.expected[row], tokens))
        afterwards = greedy(self.model, PROMPTS[0])
        compared.append((0, self.expected[0], afterwards))
        return compared


if __name__ == "__main__":
    main()

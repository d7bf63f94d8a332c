"""Export a draft to a directory that vLLM, SGLang, llama.cpp or transformers loads.

The directory appears only after it was read back by a second implementation (`engine_reference`),
and the logits computed from it were compared with this package's.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import yaml
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
from lightning_specdec.checkpoints.mtp_checkpoint import write_checkpoint
from lightning_specdec.checkpoints.networks import FLOATS
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.files import new_directory
from lightning_specdec.config.models import ENGINES
from lightning_specdec.config.yaml_text import check_yaml
from lightning_specdec.drafters import (
    BlockDrafter,
    CrossVocabulary,
    Drafter,
    DraftRequest,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
    MtpDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
    SuffixCorpusDrafter,
    TargetContext,
    last_two_tokens_of,
)
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import quiet
from lightning_specdec.models.mtp import MtpNetwork
from lightning_specdec.models.mtp_building import transformers_drafts
from lightning_specdec.models.mtp_files import load_mtp
from lightning_specdec.models.safetensors_file import SINGLE
from lightning_specdec.rules import GREEDY

if TYPE_CHECKING:
    from jaxtyping import Float


_RAN_IN_ENGINE: dict[str, tuple[type[Drafter], ...]] = {
    "vllm": (EagleDrafter, MedusaDrafter, ModelDrafter),
    "llama.cpp": (EagleDrafter,),
    "transformers": (ModelDrafter,),
}
"""Drafts that were run in the engine itself (docs/serve.md); of others only logits are compared."""
_NO_ENGINE: dict[type[Drafter], str] = {
    NGramWithFallback: "no engine alternates between lookup and a draft: "
    "export the draft alone, without --drafter",
    StagedDrafter: "no engine lets a draft have a draft: export one of the stages as a draft model",
    EarlyExitDrafter: "no engine drafts with the target's first layers, "
    "which would have to share their state",
    NGramDrafter: "lookup has no weights, and engines have their own (vLLM's method ngram, "
    "transformers' prompt_lookup_num_tokens)",
    SuffixCorpusDrafter: "the suffix corpus has no weights, and engines have their own (vLLM's "
    "method suffix)",
}
"""Why no engine can run these drafts."""
_TOLERANCE = 1e-3
"""Largest accepted difference between logits, relative to the largest logit."""
_NUM_COMPARED_TOKENS = 4
"""Draft tokens that are compared after each text."""
_DEFAULT_DRAFT_TOKENS = 3
_MIN_TEXT_LENGTH = 3
_MAX_CARD_CHARACTERS = 2**20
_MAX_LICENSE_CHARACTERS = 500


@dataclass(frozen=True)
class Exported:
    """A directory that was written.

    Args:
        directory: its path.
        commands: lines of shell or Python that serve the target with the draft.
        difference: the largest difference between logits, relative to the largest logit.
        num_compared: rows of logits that were compared.
        loaded: whether such directories were run in the engine itself, see docs/serve.md.
    """

    directory: Path
    commands: tuple[str, ...]
    difference: float
    num_compared: int
    loaded: bool


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
    """Write a draft as a directory that an engine loads: complete and compared, or not at all.

    Args:
        output: the directory, which must not exist yet.
        engine: one of `ENGINES`.
        texts: tokens of the target, after which drafts are compared; by default random tokens.
        recipe: how the draft was trained, for the model card.
        num_draft_tokens: draft tokens per round to recommend; by default the recipe's, else 3.
        dtype: dtype of the stored weights; by default unchanged.

    Raises:
        ValueError: the engine cannot run such a draft, or would compute something else from it.
        OSError: the directory cannot be written.
    """
    recipe = portable(dict(recipe or {}))
    _check_arguments(target, engine, dtype)
    drafter.check_target(target)

    stored_drafter = _copy_in_dtype(drafter, dtype)
    num_recommended = num_draft_tokens or recipe.get("num_draft_tokens") or _DEFAULT_DRAFT_TOKENS
    draft_export = _choose_export(stored_drafter, target, engine, num_recommended)
    texts = _texts_to_compare(texts, target)

    try:
        # The directory appears under its name only if nothing in this block fails.
        with new_directory(output) as folder:
            draft_export.write(folder)
            _write_note(folder, target, draft_export.num_draft_tokens)

            # The draft must score the same tokens when it is read back.
            logits_pairs = draft_export.compare(folder, texts)
            difference = _check_difference(logits_pairs)
            num_compared = sum(len(own_logits) for own_logits, _ in logits_pairs)

            kinds_run_in_engine = _RAN_IN_ENGINE.get(engine, ())
            exported = Exported(
                directory=output,
                commands=_commands(draft_export, output),
                difference=difference,
                num_compared=num_compared,
                loaded=isinstance(stored_drafter, kinds_run_in_engine),
            )
            card = _model_card(exported, draft_export, recipe)
            (folder / "README.md").write_text(card, encoding="utf-8")
    except SafetensorError as error:
        # safetensors raises its own error when a disk is full.
        raise OSError(f"{output} cannot be written: {error}") from error
    return exported


def _check_arguments(target: object, engine: str, dtype: str | None) -> None:
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
    if target.origin is not None and target.origin.adapter is not None:
        raise ValueError(
            f"engines serve whole models: save {target.origin.source} with its adapter merged, and "
            "export for that directory"
        )


def _texts_to_compare(texts: Sequence[Sequence[int]], target: HuggingFaceLM) -> list[list[int]]:
    """Return texts that leave room for draft tokens; random ones if there are none."""
    if not texts:
        texts = _random_texts(target)
    # Texts must not cross a position switch.
    context = target.positions_of_one_side or 2**20
    max_length = context - _NUM_COMPARED_TOKENS
    cut_texts = [list(text)[:max_length] for text in texts]
    return [text for text in cut_texts if len(text) >= _MIN_TEXT_LENGTH]


def _random_texts(target: HuggingFaceLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in (5, 40, 170):
        tokens = torch.randint(target.vocab_size, (length,), generator=generator)
        texts.append(tokens.tolist())
    return texts


def _copy_in_dtype(drafter: Drafter, dtype: str | None) -> Drafter:
    """Return a copy, so that the caller's draft keeps its dtype."""
    copy = deepcopy(drafter).eval()
    if dtype is not None:
        for weight in copy.parameters():
            weight.data = weight.data.to(FLOATS[dtype])
    return copy


def _check_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference between the logits of both sides; ValueError if too large."""
    difference = max(_relative_difference(ours, theirs) for ours, theirs in pairs)
    # Written so that NaN fails too.
    if not difference < _TOLERANCE:
        raise ValueError(
            "read back, the draft scores other tokens than here (by "
            f"{difference:.2g} of the largest logit), and nothing was written: "
            "report this with the draft's settings"
        )
    return difference


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest logit.

    It is infinite if one side scores tokens that the other does not.
    """
    # Tokens outside a reduced draft vocabulary have -inf on both sides.
    is_finite = theirs.isfinite()
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), is_finite):
        return float("inf")
    largest_difference = (ours.double() - theirs.double())[is_finite].abs().max()
    largest_logit = theirs[is_finite].abs().max().clamp_min(1e-9)
    return float(largest_difference / largest_logit)


def _choose_export(
    drafter: Drafter,
    target: HuggingFaceLM,
    engine: str,
    num_draft_tokens: int,
) -> _Export:
    """Return the export of this draft for that engine.

    Raises:
        ValueError: the engine cannot run the draft.
    """
    refusal = f"{engine} cannot run this {type(drafter).__name__}"
    for drafter_class, reason in _NO_ENGINE.items():
        if isinstance(drafter, drafter_class):
            raise ValueError(f"{refusal}: {reason}")

    if isinstance(drafter, FeatureDrafter):
        obstacles = _obstacles(drafter, target, engine)
        if obstacles:
            raise ValueError(f"{refusal}: {'; '.join(obstacles)}")
    if isinstance(drafter, EagleDrafter):
        return _EagleExport(drafter, target, engine, num_draft_tokens)
    if isinstance(drafter, BlockDrafter):
        # vLLM computes the complete block whatever the number of draft tokens.
        return _BlockExport(drafter, target, engine, drafter.settings.block_size)

    if isinstance(drafter, MtpDrafter | MedusaDrafter):
        return _heads_export(drafter, target, engine, refusal)

    if not isinstance(drafter, CrossVocabulary | ModelDrafter) or not isinstance(
        drafter.model, HuggingFaceLM
    ):
        raise ValueError(f"{refusal}: it loads only models of transformers and heads")
    if isinstance(drafter, CrossVocabulary) and engine in ("sglang", "llama.cpp"):
        raise ValueError(f"{refusal}: there the draft needs the target's vocabulary")
    return _ModelExport(drafter, target, engine, num_draft_tokens)


def _heads_export(
    drafter: MtpDrafter | MedusaDrafter,
    target: HuggingFaceLM,
    engine: str,
    refusal: str,
) -> _Export:
    """Return the export of prediction layers or Medusa heads.

    Raises:
        ValueError: the engine cannot run them; the message begins with `refusal`.
    """
    if isinstance(drafter, MtpDrafter):
        if engine != "transformers":
            raise ValueError(
                f"{refusal}: engines read prediction layers from the target's own checkpoint, "
                "which --format transformers writes"
            )
        return _MtpExport(drafter, target, engine, drafter.network.num_layers)

    if engine != "vllm":
        raise ValueError(f"{refusal}: it has no Medusa heads; vllm has")
    if drafter.draft_vocabulary is not None:
        raise ValueError(
            f"{refusal}: its heads must score all tokens, train them without draft_vocabulary"
        )
    return _MedusaExport(drafter, target, engine, drafter.settings.num_heads)


def _obstacles(drafter: FeatureDrafter, target: HuggingFaceLM, engine: str) -> list[str]:
    """Return why an engine cannot run a draft that reads the target's hidden states."""
    feature_layers = drafter.settings.feature_layers
    obstacles = []
    if max(feature_layers) == (target.num_layers or 0) - 1:
        obstacles.append(
            "it reads the target's last layer after the final norm, engines read it before: "
            "train without it"
        )
    if len(set(feature_layers)) < len(feature_layers):
        obstacles.append("it reads a layer twice: train with different ones")

    if isinstance(drafter, BlockDrafter):
        if engine != "vllm":
            obstacles.append("it has no block drafters with a Markov head; vllm has")
        if drafter.settings.feature_norms:
            obstacles.append(
                "DSpark joins the target's hidden states without norms: "
                "train with feature_norms: false"
            )
        return obstacles

    if engine == "transformers":
        obstacles.append("assisted generation takes only language models: export a draft model")
    if engine in ("sglang", "llama.cpp") and len(feature_layers) != 3:
        obstacles.append("it must read three layers: train with three")
    if engine == "llama.cpp":
        needed_settings = _settings_for_llama_cpp(drafter)
        if needed_settings:
            obstacles.append(
                f"it runs only plain EAGLE-3: train with {' and '.join(needed_settings)}"
            )
    return obstacles


def _settings_for_llama_cpp(drafter: FeatureDrafter) -> list[str]:
    """Return the settings that a head must be trained with instead of its own."""
    settings = drafter.settings
    needed = []
    if settings.feature_norms:
        needed.append("feature_norms: false")
    if settings.norm_output:
        needed.append("norm_output: false")
    if settings.attention_window is not None:
        needed.append("no attention_window")
    return needed


class _Export(ABC):
    """How a kind of draft is written, compared with what an engine computes, and served.

    Args:
        drafter: the draft, with weights in the dtype to store.
        target: the model that it drafts for.
        engine: one of `ENGINES`.
        num_draft_tokens: draft tokens per round to recommend.
    """

    kind: ClassVar[str]
    """The method's usual name, a tag of the model card."""
    methods: ClassVar[Mapping[str, str]]
    """What each engine calls this kind of draft."""

    def __init__(
        self,
        drafter: Any,
        target: HuggingFaceLM,
        engine: str,
        num_draft_tokens: int,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.engine = engine
        self.num_draft_tokens = num_draft_tokens

    @property
    def target_source(self) -> str:
        """The target's directory or Hub name; a placeholder if it was not loaded from files."""
        return "TARGET" if self.target.origin is None else self.target.origin.source

    @property
    def has_other_vocabulary(self) -> bool:
        """Whether the draft's vocabulary differs from the target's."""
        return isinstance(self.drafter, CrossVocabulary)

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the config and the weights."""

    @abstractmethod
    def compare(self, folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return logits for each text, computed by this package and from the written files."""


class _FeatureExport(_Export):
    """Drafts that read the target's hidden states."""

    reference: ClassVar[type[Reference]]

    def float32_drafter(self) -> FeatureDrafter:
        """Return the draft in the dtype that logits are compared in."""
        return deepcopy(self.drafter).float()

    @torch.inference_mode()
    def compare(self, folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        drafter = self.float32_drafter()
        target = self.target.in_float32()
        reference = self.reference(folder)
        table = _embedding_table(target)

        pairs = []
        for text in texts:
            draft_tokens, ours = _draft_after(text, drafter, target)
            drafted_text = [*text, *draft_tokens]
            states = hidden_states(target.model, drafted_text)
            theirs = reference.logits(states, table, drafted_text, len(draft_tokens))
            pairs.append((ours, theirs))
        return pairs


def _embedding_table(model: HuggingFaceLM) -> Float[Tensor, "V D"]:
    """Return the embeddings of all tokens."""
    tokens = torch.arange(model.vocab_size, device=model.device)
    return model.embeddings(tokens[None])[0].detach()


def _draft_after(
    text: list[int],
    drafter: FeatureDrafter,
    target: HuggingFaceLM,
) -> tuple[list[int], Float[Tensor, "K V"]]:
    """Return the draft tokens after a text, and their logits.

    As in decoding, the target has read all tokens of the text but the last one.
    """
    max_length = len(text) + _NUM_COMPARED_TOKENS
    target_state = target.init_state(1, max_length)
    draft_state = drafter.init_state(1, max_length, TargetContext(target, target_state))

    output = target(
        torch.tensor([text[:-1]]),
        target_state,
        logits_for=slice(-1, None),
        features=tuple(drafter.features(target)),
    )
    drafter.observe(draft_state, output, [0])

    request = DraftRequest(
        [text],
        last_two_tokens_of([text], target.device),
        None,
        wants_logits=True,
        vocab_size=target.vocab_size,
    )
    draft = drafter.propose(draft_state, request, [_NUM_COMPARED_TOKENS], GREEDY)
    assert draft.logits is not None
    return draft.tokens[0].tolist(), draft.logits[0]


class _EagleExport(_FeatureExport):
    kind = "eagle3"
    methods = {"vllm": "eagle3", "sglang": "EAGLE3", "llama.cpp": "draft-eagle3"}
    reference = Eagle3Reference

    def write(self, folder: Path) -> None:
        # SGLang reads SpecForge's names, the others those of speculators.
        is_nested = self.engine != "sglang"
        layer = "layers.0" if is_nested else "midlayer"
        config = engine_heads.eagle_config(
            self.drafter, self.target_source, self.num_draft_tokens, nested=is_nested
        )
        _write_draft(folder, config, engine_heads.eagle_tensors(self.drafter, layer))


class _BlockExport(_FeatureExport):
    kind = "dspark"
    methods = {"vllm": "dspark"}
    reference = DSparkReference

    def write(self, folder: Path) -> None:
        config = engine_heads.block_config(self.drafter, self.target_source)
        table = _embedding_table(self.target)
        _write_draft(folder, config, engine_heads.block_tensors(self.drafter, table))

    def float32_drafter(self) -> FeatureDrafter:
        drafter = super().float32_drafter()
        # Low confidence would end a draft early, and all its logits are to be compared.
        drafter.settings = replace(drafter.settings, min_confidence=0.0)
        return drafter


class _MedusaExport(_Export):
    kind = "medusa"
    methods = {"vllm": "medusa"}

    def write(self, folder: Path) -> None:
        config, tensors = engine_heads.medusa_files(self.drafter)
        _write_draft(folder, config, tensors)

    @torch.inference_mode()
    def compare(self, folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        drafter = deepcopy(self.drafter).float()
        target = self.target.in_float32()
        layer = drafter.features(target)[0]

        pairs = []
        for text in texts:
            output = target(torch.tensor([text]), features=(layer,))
            hidden = output.features[layer][0]
            head_logits = [drafter.logits(i, hidden) for i in range(drafter.settings.num_heads)]
            ours = torch.cat(head_logits)

            last_states = hidden_states(target.model, text)[-1]
            theirs = medusa_logits(folder, last_states).flatten(0, 1)
            pairs.append((ours, theirs))
        return pairs


class _MtpExport(_Export):
    """The target's checkpoint with other prediction layers."""

    kind = "mtp"
    methods: ClassVar[Mapping[str, str]] = {}

    def write(self, folder: Path) -> None:
        write_checkpoint(folder, self.drafter.network, self.target)

    @torch.inference_mode()
    def compare(self, folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        from transformers import AutoModelForCausalLM

        with quiet():
            written_model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.target.dtype, local_files_only=True
            )
        written_target = HuggingFaceLM(written_model)
        written_layers = load_mtp(written_target)

        pairs = []
        layer = self.drafter.features(self.target)[0]
        for text in texts:
            tokens = torch.tensor([text])
            hidden = self.target(tokens, features=(layer,)).features[layer]
            ours = self._logits(self.drafter.network, self.target, tokens, hidden)
            theirs = self._logits(written_layers, written_target, tokens, hidden)
            pairs.append((ours, theirs))
        return pairs

    def _logits(
        self,
        network: MtpNetwork,
        target: HuggingFaceLM,
        tokens: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        """The logits of all layers, one below the other."""
        outputs = network.read_text(target, tokens, hidden)
        return torch.cat([network.logits(target, output)[0] for output in outputs])


class _ModelExport(_Export):
    """A draft model of transformers, with its tokenizer."""

    kind = "draft-model"
    methods = {"vllm": "draft_model", "sglang": "STANDALONE"}

    def __init__(
        self,
        drafter: Any,
        target: HuggingFaceLM,
        engine: str,
        num_draft_tokens: int,
    ) -> None:
        super().__init__(drafter, target, engine, num_draft_tokens)
        self.model: HuggingFaceLM = drafter.model
        tokenizer: Any = self.model.tokenizer
        if tokenizer is None and not self.has_other_vocabulary:
            tokenizer = target.tokenizer
        if not hasattr(tokenizer, "tokenizer"):
            raise ValueError(
                f"{engine} cannot run this {type(drafter).__name__}: "
                "it needs a tokenizer of transformers"
            )
        self.tokenizer = tokenizer.tokenizer

    def write(self, folder: Path) -> None:
        with quiet():
            self.model.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    @torch.inference_mode()
    def compare(self, folder: Path, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        from transformers import AutoModelForCausalLM

        with quiet():
            written_model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        model = self.model.in_float32()

        pairs = []
        for text in texts:
            # The texts are of the target's tokens, of which the draft may have fewer.
            tokens = torch.tensor([[token % model.vocab_size for token in text]])
            pairs.append((model(tokens).logits[0], written_model(tokens).logits[0]))
        return pairs


def _write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    _write_json(folder / "config.json", config)
    (folder / SINGLE).write_bytes(safetensors.save(tensors, {"format": "pt"}))


def _write_note(folder: Path, target: HuggingFaceLM, num_draft_tokens: int) -> None:
    """Write whose draft it is, and how many tokens a round should draft."""
    reference = portable(TargetReference.of(target).to_document())
    note = {**reference, "num_draft_tokens": num_draft_tokens}
    _write_json(folder / engine_heads.ORIGIN, note)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _commands(draft_export: _Export, output: Path) -> tuple[str, ...]:
    """Return the lines that serve the target with a draft."""
    engine = draft_export.engine
    method = draft_export.methods.get(engine)
    num_draft_tokens = draft_export.num_draft_tokens
    target = shlex.quote(draft_export.target_source)
    draft = shlex.quote(str(output))

    if engine == "vllm":
        config: dict[str, Any] = {
            "method": method,
            "model": str(output),
            "num_speculative_tokens": num_draft_tokens,
        }
        if draft_export.has_other_vocabulary:
            config["use_heterogeneous_vocab"] = True
        return (f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(config))}",)

    if engine == "sglang":
        # SGLang counts the token that is verified first among the draft tokens.
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {method} --speculative-draft-model-path {draft} "
            f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {num_draft_tokens + 1}",
        )

    if engine == "llama.cpp":
        gguf = shlex.quote(str(output.with_suffix(".gguf")))
        convert_options = ""
        server_options = ""
        if method is not None:
            convert_options = f" --target-model-dir {target}"
            server_options = f"--spec-type {method} "
        return (
            f"python convert_hf_to_gguf.py {draft}{convert_options} --outfile {gguf}",
            f"llama-server -m TARGET.gguf -md {gguf} {server_options}"
            f"--spec-draft-n-max {num_draft_tokens}",
        )

    if draft_export.kind == _MtpExport.kind:
        if not transformers_drafts(draft_export.target):
            directory = shlex.quote(str(output))
            return (f"lightning_specdec decode --target {directory} --drafter MtpDrafter",)
        model = f"AutoModelForCausalLM.from_pretrained({str(output)!r})"
        return (f"{model}.generate(**inputs, use_mtp=True)",)

    tokenizers = ""
    if draft_export.has_other_vocabulary:
        tokenizers = ", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained(...)"
    assistant = f"AutoModelForCausalLM.from_pretrained({str(output)!r})"
    return (f"model.generate(**inputs, assistant_model={assistant}{tokenizers})",)


def _model_card(exported: Exported, draft_export: _Export, recipe: Mapping[str, Any]) -> str:
    """Return the model card: metadata, target, data, license, figures, and how to serve it."""
    target = draft_export.target
    engine = draft_export.engine
    target_name = "a target without files"
    sha256 = "not known"
    if target.origin is not None:
        target_name = target.origin.source
        sha256 = target.origin.sha256

    license_fields = _license_fields(target)
    license_text = ", ".join(license_fields.values())
    if not license_text:
        license_text = (
            "not stated by the target: state one that the licenses of target and text allow"
        )
    # Corpora are named by their files, generated data by the name of their data module.
    training_data = recipe.get("data_arguments", {}).get("paths") or recipe.get("data")

    lines = [
        "---",
        _card_metadata(draft_export, license_fields),
        "---",
        "",
        f"# A draft for {target_name}",
        "",
        f"`{type(draft_export.drafter).__name__}`, for speculative decoding in {engine}.",
        "The output stays the target's; the draft changes how long it takes.",
        "",
        f"- Target: {target_name}, weights sha256 {sha256}",
        f"- Trained on: {json.dumps(training_data or 'not recorded')}",
    ]
    if isinstance(recipe.get("tokens_seen"), int):
        lines.append(f"- Tokens seen: {recipe['tokens_seen']:,}")
    lines.append(f"- License: {license_text}")
    lines.append(
        f"- Checked: {exported.num_compared} rows of logits, read back by other code, "
        f"differ by at most {exported.difference:.1e} of the largest logit"
    )
    if not exported.loaded:
        lines.append(f"- Not run in {engine} itself")
    lines.extend(_figure_lines(recipe))
    lines.extend(["", "```sh", *exported.commands, "```", ""])
    return "\n".join(lines)


def _figure_lines(recipe: Mapping[str, Any]) -> list[str]:
    """Return a table of the figures that training reached."""
    reached = recipe.get("reached") or {}
    rows = [
        f"| {name} | {value:.4g} |"
        for name, value in sorted(reached.items())
        if isinstance(value, int | float)
    ]
    if not rows:
        return []
    return ["", "On held-out text:", "", "| Figure | Value |", "|---|---|", *rows]


def _card_metadata(draft_export: _Export, license_fields: Mapping[str, Any]) -> str:
    """Return the card's metadata as YAML, for the Hub's search and its license label."""
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        base_model=_hub_name(draft_export.target),
        tags=["speculative-decoding", draft_export.kind, draft_export.engine],
        pipeline_tag="text-generation",
        library_name="lightning_specdec",
        **license_fields,
    )
    return metadata.to_yaml()


def _hub_name(target: HuggingFaceLM) -> str | None:
    """Return the target's name on the Hub; None for a local directory."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if target.origin is None:
        return None
    source = target.origin.source
    if "/" not in source or Path(source).expanduser().exists():
        return None
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return source


def _license_fields(target: HuggingFaceLM) -> dict[str, str]:
    """Return the license, its name and its link, as far as the target's model card states them."""
    metadata = _target_metadata(target)
    fields = {}
    for name in ("license", "license_name", "license_link"):
        value = metadata.get(name)
        if isinstance(value, str) and value.strip():
            fields[name] = " ".join(value[:_MAX_LICENSE_CHARACTERS].split())

    # A link relative to the target's repository leads nowhere from the draft's.
    hub_name = _hub_name(target)
    link = fields.get("license_link")
    if link is not None and hub_name is not None and "://" not in link:
        fields["license_link"] = f"https://huggingface.co/{hub_name}/blob/main/{link}"
    return fields


def _target_metadata(target: HuggingFaceLM) -> dict[str, Any]:
    """Return the metadata in the target's model card; empty if there is none that can be read.

    Like `huggingface_hub.metadata_load`, but a card from a stranger is bounded in size before any
    value is built, and a wrong byte in its text does not matter.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if target.origin is None:
        return {}
    card_path = target.origin.path / "README.md"
    if not card_path.is_file():
        return {}
    with card_path.open(encoding="utf-8-sig", errors="replace") as file:
        card = file.read(_MAX_CARD_CHARACTERS)

    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return {}
    try:
        check_yaml(block[2])
        metadata = yaml.safe_load(block[2])
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}

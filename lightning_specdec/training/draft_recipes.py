"""Drafts that learn from their target: a smaller model, an early exit, heads for several tokens; and their recipes: the
config of a training that follows from a target, its text and a time.

Shapes: N positions, D width of the hidden states, V vocabulary of the target, W of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_specdec.config.checks import require_number
from lightning_specdec.config.memory import available_bytes
from lightning_specdec.data import Batch
from lightning_specdec.data.corpus import MANIFEST, read_manifest, shipped_corpora
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, MultiTokenDrafter
from lightning_specdec.drafters.early_exit import ExitHead
from lightning_specdec.drafters.heads import rows_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.loading import examine
from lightning_specdec.training.distillation import DistillationTraining
from lightning_specdec.training.optimizers import fast_bfloat16
from lightning_specdec.training.target_outputs import DraftStep, TargetOutputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lightning_specdec.models.huggingface import HuggingFaceLM

RECIPES = {
    "eagle": "EagleTraining",
    "block": "BlockTraining",
    "medusa": "MultiTokenTraining",
    "exit": "ExitHeadTraining",
    "layers": "DistilledModelTraining",
    "pair": "DistilledModelTraining",
}
"""The training module of each."""
SHIPPED = "shipped"
_LONGEST, _NEW_TOKENS = 512, 48
_SHORT = 15
"""Minutes up to which an eagle head learns two draft tokens at a higher rate: a third seldom pays yet."""
_LARGE = 256
"""Hidden size from which bfloat16 pays, and matrices are stepped by Muon."""


class DistilledModelTraining(DistillationTraining):
    """Trains a smaller model as the draft: a new one, or some of the target's own layers.

    Args:
        draft: a new model with the target's vocabulary; None where `draft_layers` is given.
        draft_layers: the target's layers that the draft is made of, ascending, from 0. Such a draft needs far less
            training than a new one, and keeps the target's embeddings and output head.
        options: those of `DistillationTraining`.
    """

    drafter: ModelDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        *,
        draft_layers: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if (draft is None) == (draft_layers is None):
            given = "neither" if draft is None else "both"
            raise ValueError(
                f"a draft is new or made of the target's layers, got {given}: give draft or draft_layers"
            )
        self.draft_layers = None if draft_layers is None else list(draft_layers)

        def make_drafter(target: LanguageModel) -> ModelDrafter:
            model = self._of_layers(target) if draft is None else draft
            model.check_output_head()
            return ModelDrafter(model)

        super().__init__(make_drafter, target, **options)

    def _of_layers(self, target: LanguageModel) -> HuggingFaceLM:
        from lightning_specdec.models.huggingface import HuggingFaceLM

        if not isinstance(target, HuggingFaceLM):
            raise ValueError(
                f"draft_layers takes a transformers model apart, the target is a {type(target).__name__}"
            )
        assert self.draft_layers is not None
        draft = target.with_layers(self.draft_layers)
        for part in (draft.model.get_input_embeddings(), draft.model.get_output_embeddings()):
            part.requires_grad_(False)
        return draft

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        model = self.drafter.model
        last = (model.num_layers or 0) - 1
        output = model(batch.tokens[:, :-1], features=(last,), logits_for=slice(0, 0))
        return [DraftStep(output.features[last], 1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.drafter.model.output_logits(hidden[None])[0]


class ExitHeadTraining(DistillationTraining):
    """Trains an output head for the lower layers of the target, which stay as they are.

    Unlike LayerSkip (`EarlyExitTraining`), which trains the whole model. The head starts as the target's own norm and
    output head.

    Args:
        exit_layer: how many of the target's layers draft; a quarter when None.
        num_blocks: residual blocks of the head.
        draft_vocabulary: size of the head's vocabulary, the most frequent tokens of the training texts; the target's
            vocabulary when None.
        options: those of `DistillationTraining`.
    """

    drafter: EarlyExitDrafter

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        exit_layer: int | None = None,
        num_blocks: int = 2,
        draft_vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        def make_drafter(target: LanguageModel) -> EarlyExitDrafter:
            layer = max(1, (target.num_layers or 1) // 4) if exit_layer is None else exit_layer
            target.check_exit(layer)
            return EarlyExitDrafter(
                layer,
                head_layers=[layer],
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, **options)

    @property
    def head(self) -> ExitHead:
        assert self.drafter.head is not None
        return self.drafter.head

    def layers(self) -> Sequence[int]:
        return (self.drafter.exit_layer - 1,)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output head, and its final norm if that is an RMSNorm."""
        weight = self.target.output_weight
        self.head.output.weight.copy_(rows_of(weight, self.draft_vocabulary))
        # Families store a norm's weight in several ways, so read it off the norm of large unit vectors.
        size = weight.shape[1]
        units = torch.eye(size, dtype=weight.dtype, device=weight.device)
        normed = cast("HuggingFaceLM", self.target).stack.norm(1000.0 * units[None])[0]
        if not (normed * (1 - units)).any():
            self.head.norm.weight.copy_(normed.diagonal() / size**0.5)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        return [DraftStep(outputs.features[self.drafter.exit_layer - 1][:, :-1], 1)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.head(hidden)


class MultiTokenTraining(DistillationTraining):
    """Trains a `MultiTokenDrafter`: heads that predict the tokens after the next from the target's last hidden state.

    Together with their target, which minimizes the sum of all cross-entropies (Gloeckle et al. 2024, equation 2); or
    with `freeze_target` from its distributions (Cai et al. 2024, "Medusa": Medusa-1).

    Args:
        num_heads: most draft tokens of a round.
        num_blocks: residual blocks of each head.
        draft_vocabulary: size of the heads' vocabulary for a frozen target, the most frequent tokens of the training
            texts; the target's vocabulary when None.
        freeze_target: whether the heads alone learn.
        options: those of `DistillationTraining`.
    """

    drafter: MultiTokenDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        *,
        num_heads: int = 4,
        num_blocks: int = 1,
        draft_vocabulary: int | None = None,
        freeze_target: bool = False,
        **options: Any,
    ) -> None:
        if draft_vocabulary is not None and not freeze_target:
            raise ValueError(
                "a target that learns needs all its tokens: drop draft_vocabulary or give freeze_target"
            )

        def make_drafter(target: LanguageModel) -> MultiTokenDrafter:
            return MultiTokenDrafter(
                num_heads,
                hidden_size=target.hidden_size or 0,
                vocab_size=target.vocab_size,
                num_blocks=num_blocks,
                draft_vocabulary=draft_vocabulary,
            )

        super().__init__(make_drafter, target, freeze_target=freeze_target, **options)
        if self.num_draft_tokens > num_heads:
            raise ValueError(
                f"a round cannot have {self.num_draft_tokens} draft tokens of {num_heads} heads: lower "
                "num_draft_tokens or raise num_heads"
            )

    def loss_weights(self, num_steps: int) -> list[float]:
        return super().loss_weights(num_steps) if self.freeze_target else [1.0] * num_steps

    def init_from_target(self) -> None:
        """Copy the target's output head into each head."""
        self.drafter.init_from(self.target)

    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        hidden = outputs.features[self.layers()[0]]
        ends = (max(0, hidden.shape[1] - 2 - i) for i in range(self.drafter.settings.num_heads))
        return [DraftStep(hidden[:, :end], 2 + i) for i, end in enumerate(ends)]

    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        return self.drafter.logits(number, hidden)


def config_for(
    recipe: str, target: str, text: Sequence[str], *, minutes: float | None = None
) -> dict[str, Any]:
    """The YAML of `fit` as plain values.

    Args:
        recipe: one of `RECIPES`.
        target: the directory of a transformers model.
        text: directories that `generate` wrote, or text files, directories and patterns; `["shipped"]` is SmolLM2's.
        minutes: how long the run takes; three epochs when None.

    Raises:
        FileNotFoundError, ValueError: the recipe does not serve this target or this text.
    """
    if recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}: give one of {', '.join(RECIPES)}")
    if not Path(target).expanduser().is_dir():
        raise FileNotFoundError(
            f"{target}: no such model directory; --target takes one that `save_pretrained` wrote"
        )
    config = examine(target).config.get_text_config()
    missing = [
        name
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        if not getattr(config, name, 0)
    ]
    if missing:
        raise ValueError(
            f"{target} is a {config.model_type} without {missing[0]}, which the recipe {recipe} needs"
        )
    vocabulary, layers, hidden = config.vocab_size, config.num_hidden_layers, config.hidden_size
    positions = getattr(config, "max_position_embeddings", None) or _LONGEST + _NEW_TOKENS
    num_new = min(_NEW_TOKENS, max(1, positions // 4))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if hidden >= _LARGE and fast_bfloat16(device) else "float32"
    reduced = vocabulary // 6 // 256 * 256 or None  # a sixth has most of what is said
    given: dict[str, Any] = {"target_checkpoint": target, "target_dtype": dtype}
    given |= {
        "target_features": {"class_path": "FeaturesByNeed"},
        "learn_from_prompts": True,
        "warmup_steps": 30,
    }
    given |= {"learning_rate": 0.002, "optimizer": "muon" if hidden >= _LARGE else "adamw"}
    if recipe in ("eagle", "block"):
        heads = getattr(config, "num_attention_heads", 1)
        if hidden % heads or hidden // heads % 2:
            heads = 1
        keys = getattr(config, "num_key_value_heads", None) or heads
        wide = getattr(config, "intermediate_size", None) or 4 * hidden
        given |= {
            "num_heads": heads,
            "num_key_heads": heads if heads % keys else keys,
            "intermediate_size": wide,
        }
        given |= {"attention_window": 128, "position_decay": 0.6, "num_draft_tokens": 4}
        given |= {"random_lengths": True} if recipe == "eagle" else {"anchor_stride": 2}
        if recipe == "eagle" and minutes is not None and minutes <= _SHORT:
            given |= {"num_draft_tokens": 2, "learning_rate": 0.004}
    elif recipe == "medusa":
        given |= {"freeze_target": True, "num_heads": 4, "num_draft_tokens": 4}
    elif recipe == "exit":
        if layers < 2:
            raise ValueError(
                f"{target} has one layer, and an exit needs a layer to skip: take the recipe eagle"
            )
        given |= {"num_draft_tokens": 2}
    elif recipe == "layers":
        if layers < 2:
            raise ValueError(
                f"{target} has one layer, and a draft of its layers would be the target: take eagle"
            )
        ends = range(max(1, layers // 10))
        kept = sorted({*ends, *(layers - 1 - each for each in ends)})
        given |= {
            "draft_layers": kept if len(kept) < layers else [0],
            "num_draft_tokens": 3,
            "learning_rate": 0.0005,
        }
    else:
        size = max(32, hidden // 4 // 64 * 64)
        model = {
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": 3 * size,
            "vocab_size": vocabulary,
        }
        model |= {"num_hidden_layers": max(1, layers // 8), "num_attention_heads": size // 32}
        model |= {"max_position_embeddings": positions, "tie_word_embeddings": True}
        given |= {
            "draft": {"class_path": "HuggingFaceLM", "init_args": {"model": model}},
            "num_draft_tokens": 3,
        }
    if recipe in ("eagle", "block", "medusa", "exit"):
        given["draft_vocabulary"] = reduced
    width = reduced or vocabulary
    row_bytes = (
        min(_LONGEST, positions) * 4 * (12 * width + 64 * hidden)
    )  # logits and layers of four draft tokens
    free, most = available_bytes(device), 16 if device == "cuda" else 4
    batch_size = next(
        (size for size in (16, 8, 4, 2) if size <= most and (free or 0) // 2 >= size * row_bytes), 1
    )
    data = _data(target, text, vocabulary, min(_LONGEST, positions - num_new)) | {
        "batch_size": batch_size
    }
    name = f"{Path(target).expanduser().absolute().name}_{recipe}"
    return {
        "seed_everything": 0,
        "data": {"class_path": data.pop("class_path"), "init_args": data},
        "model": {"class_path": RECIPES[recipe], "init_args": given},
        "trainer": _trainer(name, minutes, num_new)
        | {"precision": "bf16-mixed" if dtype == "bfloat16" else "32-true"},
    }


def _trainer(name: str, minutes: float | None, num_new: int) -> dict[str, Any]:
    best = {"monitor": "val/block_efficiency", "mode": "max"}
    place = {
        "dirpath": f"checkpoints/{name}",
        "auto_insert_metric_name": False,
        "enable_version_counter": False,
    }
    callbacks: list[dict[str, Any]] = [
        {"class_path": "DecodeHeldOut", "init_args": {"num_prompts": 4, "max_new_tokens": num_new}},
        {"class_path": "ModelCheckpoint", "init_args": {**place, "filename": "best", **best}},
        {"class_path": "ModelCheckpoint", "init_args": {**place, "filename": "last"}},
        *(
            {"class_path": each}
            for each in ("RunProgressBar", "AcceptedPerRound", "HyperparameterTable")
        ),
    ]
    if minutes is None:
        callbacks.append({"class_path": "EarlyStopping", "init_args": {**best, "patience": 6}})
        length: dict[str, Any] = {"max_epochs": 3}
    else:
        require_number("minutes", minutes, low=0.0, high=1e6, low_open=True)
        callbacks.append({"class_path": "TimeLimit", "init_args": {"minutes": minutes}})
        hours, rest = divmod(round(60 * max(5.0, minutes / 6)), 3600)
        length = {
            "max_epochs": -1,
            "val_check_interval": f"00:{hours:02}:{rest // 60:02}:{rest % 60:02}",
        }
    return {
        **length,
        "gradient_clip_val": 1.0,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "logger": {"class_path": "TensorBoardCurves", "init_args": {"name": name}},
        "callbacks": callbacks,
    }


def _data(target: str, text: Sequence[str], vocabulary: int, longest: int) -> dict[str, Any]:
    """The data module's class and arguments: generated text, or files to cut into windows."""
    paths = list(text)
    if paths == [SHIPPED]:
        paths = shipped_corpora()
    generated = [path for path in paths if (Path(path).expanduser() / MANIFEST).is_file()]
    if generated and len(generated) < len(paths):
        other = next(path for path in paths if path not in generated)
        raise ValueError(
            f"{other} is not what `generate` wrote, and {generated[0]} is: train on one kind at a time"
        )
    given: dict[str, Any] = {"paths": paths, "tokenizer": target, "vocab_size": vocabulary}
    if not generated:
        given |= {"class_path": "TextFiles", "length": longest, "num_val": 16, "num_test": 16}
        return given | {"prompt_length": max(1, min(64, longest // 2))}
    count = sum(int(read_manifest(Path(path).expanduser()).get("num_prompts", 0)) for path in paths)
    held = {"num_val": min(16, max(1, count // 10)), "num_test": min(16, max(1, count // 20))}
    return given | {"class_path": "GeneratedText", "max_length": longest, **held}

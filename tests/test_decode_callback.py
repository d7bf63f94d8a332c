"""Laws of decoding while training: what is logged is what decoding does, and nothing of the run is disturbed."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import Round, RowResult
from lightning_specdec.models import RNN, LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import DecodeHeldOut, PairTraining
from lightning_specdec.training.decode_callback import LEGEND, as_markdown, visible

VOCAB = 23


def llama(seed: int, **sizes: Any) -> HuggingFaceLM:
    """A random model whose output wanders."""
    config: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4, **sizes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HuggingFaceLM({"model_type": "llama", **config})


def data(**arguments: Any) -> ArithmeticProgressions:
    return ArithmeticProgressions(VOCAB, 8, max_step=3, num_train=16, num_val=6, num_test=3, modulo=True, **arguments)


def fit(tmp_path: Path, *callbacks: Callback, max_epochs: int = 3, **options: Any) -> tuple[Trainer, PairTraining]:
    """A short run of a recurrent pair, which is fast."""
    torch.manual_seed(0)
    module = PairTraining(RNN(VOCAB, hidden_size=16), RNN(VOCAB, hidden_size=8, num_layers=1), num_draft_tokens=2)
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=options.pop("logger", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        num_sanity_val_steps=1,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(module, datamodule=data())
    return trainer, module


def test_the_plain_names_are_measured_and_the_estimates_say_so(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, DecodeHeldOut(num_prompts=3, max_new_tokens=9, temperature=1.0))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    prompts = [row[:3] for row in data().splits().val[:3]]
    decoder = SpeculativeDecoder(module.target, module.drafter)
    greedy = decoder.decode(prompts, max_new_tokens=9, num_draft_tokens=2)
    assert logged["val/block_efficiency"] == pytest.approx(greedy.block_efficiency)
    assert logged["val/acceptance_rate"] == pytest.approx(greedy.acceptance_rate or 0.0)
    assert logged["val/walltime_speedup"] > 0 and logged["val/sampling_walltime_speedup"] > 0
    for name in ("acceptance_rate", "block_efficiency"):
        assert f"val/teacher_forced_{name}" in logged and f"val/teacher_forced_sampling_{name}" in logged


def test_without_the_callback_the_plain_names_are_the_estimates(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, max_epochs=1)
    assert "val/block_efficiency" in trainer.callback_metrics
    assert not any("teacher_forced" in name or "walltime" in name for name in trainer.callback_metrics)


def test_a_checkpoint_can_be_chosen_by_what_was_measured(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                seen.append(float(trainer.callback_metrics["val/block_efficiency"]))

    best = ModelCheckpoint(tmp_path, "best", monitor="val/block_efficiency", mode="max", save_on_train_epoch_end=True)
    fit(tmp_path, best, DecodeHeldOut(2, num_prompts=2, max_new_tokens=6), Watch(), max_epochs=4)
    assert len(seen) == 4, "what was measured stays until the next time"
    assert best.best_model_score == pytest.approx(max(seen))


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = DecodeHeldOut._measure

    @functools.wraps(original)
    def counted(self: DecodeHeldOut, trainer: Trainer, *given: Any, **more: Any) -> dict[str, float]:
        calls.append(trainer.current_epoch)
        return original(self, trainer, *given, **more)

    monkeypatch.setattr(DecodeHeldOut, "_measure", counted)
    return calls


def test_the_first_each_nth_and_the_last_validation_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_decodes(monkeypatch)
    fit(tmp_path, DecodeHeldOut(3, num_prompts=1, max_new_tokens=2), max_epochs=6)
    assert calls == [0, 3, 5]


def test_decoding_changes_nothing_of_the_run(tmp_path: Path) -> None:
    class Modes(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert all(part.training for part in pl_module.modules())

    plain = fit(tmp_path)[1].state_dict()
    decoded = fit(tmp_path, DecodeHeldOut(num_prompts=2, max_new_tokens=4, temperature=1.0), Modes())[1].state_dict()
    assert all(torch.equal(value, decoded[name]) for name, value in plain.items())


def test_texts_show_what_was_kept_and_what_was_rejected(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    fit(tmp_path, DecodeHeldOut(num_prompts=2, max_new_tokens=5), logger=logger)
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "logs" / "version_0"), size_guidance={"tensors": 0})
    events.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("val/decoded/text_summary")]
    assert len(texts) == 3 and all("1. " in text and "2. " in text and "rejected ones" in text for text in texts)


def test_a_row_in_markdown_is_counted_by_hand() -> None:
    rounds = [Round([5, 6, 7], 2, 8), Round([9, 1, 2], 0, 3), Round([4], 1, 1), Round([4], 1, None)]
    row = RowResult(0, [1, 2], [5, 6, 8, 3, 4, 1, 4], "length", 4, [], rounds=rounds)
    shown = as_markdown(row).replace("<code>", "[").replace("</code>", "]")
    assert shown == "[1 2] &#8594; [5 6] x[7] =[8] x[9 1 2] =[3] [4] +[1] [4]".replace("&#8594;", "→")


@pytest.mark.parametrize(
    "text",
    [
        " a ",
        "~~a~~ **b**",
        "`",
        "``x",
        "<div>&amp;<script>",
        "[a](b)",
        "a_b_c",
        "\\*",
        "\tx\n\n# y\n1. z",
        "\r\x0b",
        "é🙂",
    ],
)
def test_tensorboard_shows_a_piece_of_text_as_it_is(text: str) -> None:
    letters = {1: "p", 2: text}
    row = RowResult(0, [1], [2, 2], "length", 1, [], rounds=[Round([2, 2], 1, 2)])
    shown = as_markdown(row, lambda tokens: visible("".join(letters[token] for token in tokens)))
    page = markdown_to_safe_html(f"1. {shown}\n\n{LEGEND}")
    item, legend = (re.sub(r"\s*\n\s*", "", page).removeprefix("<ol><li>").removesuffix("</p>")).split("</li></ol><p>")
    pieces = [html.unescape(piece) for piece in re.findall("<code>(.*?)</code>", item)]
    assert pieces == ["p", *[visible(text)] * 3]
    assert re.sub("<code>.*?</code>", "[]", item) == "[] → [] x[] =[]"
    assert not re.search(r"[~*<]", re.sub("</?code>", "", legend))
    assert "\n" not in visible(text) and " " not in visible(text)


def test_a_prompt_that_leaves_no_room_is_refused_before_the_run(tmp_path: Path) -> None:
    module = PairTraining(llama(1), llama(2))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[DecodeHeldOut()])
    trainer.callbacks[0].max_new_tokens = 100  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="models read 64"):
        trainer.fit(module, datamodule=data())


def test_mixed_precision_trains_and_decodes(tmp_path: Path) -> None:
    target: LanguageModel = llama(1)
    module = PairTraining(target, llama(2, num_hidden_layers=1), num_draft_tokens=2)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DecodeHeldOut(num_prompts=1, max_new_tokens=4)],
    )
    trainer.fit(module, datamodule=data())
    assert next(target.parameters()).dtype == torch.float32
    assert float(trainer.callback_metrics["val/block_efficiency"]) >= 1
    predicted: Any = trainer.predict(module, datamodule=data())
    assert all(len(row["tokens"]) == 7 for batch in predicted for row in batch)

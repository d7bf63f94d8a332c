"""`lightning_specdec generate`: a target's own text, in shards that several processes write."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_specdec import __version__
from lightning_specdec.checks import require_int
from lightning_specdec.data import corpus
from lightning_specdec.data.prompt_sources import PromptShard, PromptSource
from lightning_specdec.decoding import Decoding
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.inference import Window, window_from_dict
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.windows import as_window
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling
from lightning_specdec.terminal import say
from lightning_specdec.text.base import Tokenizer
from lightning_specdec.texts import Texts
from lightning_specdec.threads import limit_threads
from lightning_specdec.training.outputs import seen_from_here
from lightning_specdec.training.refill import NoGuesses, continue_all


class GenerateText(LightningModule):
    """Writes what a target says to the prompts of a `PromptSource`: token shards and a manifest.

    Theory: a draft is used on the target's own text, so that is what it should learn from; a corpus of somebody else's
    teaches it what the target would not have said. The unit of work is a shard: its prompts are decoded together by
    one process, each temperature by itself, and its noise is keyed by the rows' numbers. So the rows are the same
    whatever the number of processes, down to the rounding of bfloat16, which depends on the batch alone. A shard that
    is there is not made again: a run that was stopped goes on where it was.

    Args:
        target: a model's directory, or its name on the hub; it needs a tokenizer.
        output: the directory of the shards.
        dtype: what the target computes in; as it is stored when None.
        max_new_tokens: new tokens of each row at most; a token that ends an answer ends a row, and is kept.
        temperatures: a row for each prompt and each of these; 0 is greedy.
        top_p: only the likeliest tokens that hold this much probability are drawn; all when None.
        batch_size: rows that are decoded together.
        shard_size: prompts of a shard: what is lost at most when a process is stopped.
        seed: keys the noise, together with a row's number: `prompt number * temperatures + temperature`.
        num_draft_tokens: guesses of the n-gram look-up in a round; 0 is standard decoding; "auto" measures once what
            calls cost here, and guesses as many as pay. What was measured is kept in the manifest, so that a run that
            goes on makes the same rounds.
    """

    def __init__(
        self,
        target: str,
        output: str,
        *,
        dtype: str | None = None,
        max_new_tokens: int = 256,
        temperatures: Sequence[float] = (0.0,),
        top_p: float | None = None,
        batch_size: int = 32,
        shard_size: int = 64,
        seed: int = 0,
        num_draft_tokens: int | str = 0,
    ) -> None:
        super().__init__()
        self.source, self.output, self.dtype_name = target, Path(output).expanduser(), dtype
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        self.samplings = [Sampling(temperature, top_p=top_p) for temperature in temperatures]
        self.temperatures, self.top_p = [float(temperature) for temperature in temperatures], top_p
        if not self.samplings or len(set(self.temperatures)) < len(self.samplings):
            raise ValueError(f"temperatures must be one or more, all different, got {self.temperatures}: give [0, 1]")
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.shard_size = require_int("shard_size", shard_size, 1)
        self.seed = require_int("seed", seed, 0, 2**63 - 1)
        if isinstance(num_draft_tokens, str) and num_draft_tokens != "auto":
            raise ValueError(f"num_draft_tokens must be an integer or auto, got {num_draft_tokens!r}")
        if not isinstance(num_draft_tokens, str):
            require_int("num_draft_tokens", num_draft_tokens, 0)
        self.num_draft_tokens = num_draft_tokens
        self.target: LanguageModel | None = None
        self.identity: dict[str, str] = {}
        self.windows: list[Window] = []
        self.num_prompts, self.digest = 0, ""
        self.watch: Callable[[int, int], None] = lambda num_tokens, num_ended: None
        """Told of each round how many tokens are new and how many rows have ended; a progress bar puts itself here."""

    def setup(self, stage: str) -> None:
        """Load the target, make the prompts' tokens and cut them into shards."""
        from lightning_specdec.models.loading import load_model  # transformers, which the other verbs do without

        data = self._data()
        self.target = target = load_model(self.source, dtype=self.dtype_name)
        assert target.origin is not None, "a loaded model has files"
        dtype = str(target.dtype).removeprefix("torch.")
        self.identity = {"source": self.source, "sha256": target.origin.sha256, "dtype": dtype}
        limit_threads(target.num_parameters)
        prompts = data.prompts(self.tokenizer)
        for prompt in prompts:
            check_context(len(prompt), self.max_new_tokens, target)
        self.num_prompts, self.digest = len(prompts), corpus.prompts_digest(prompts)
        firsts = range(0, len(prompts), self.shard_size)
        data.shards = [
            PromptShard(number, first, prompts[first : first + self.shard_size]) for number, first in enumerate(firsts)
        ]

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        assert self.target is not None, "the target is loaded by `setup`"
        if self.target.tokenizer is None:
            raise ValueError(f"{self.source} has no tokenizer, so prompts are no tokens: save one beside the weights")
        return self.target.tokenizer

    def on_predict_start(self) -> None:
        """Begin the directory, or go on with what is there; the first process speaks for all."""
        assert self.target is not None
        self.target = self.target.packed()
        if self.trainer.is_global_zero:
            self._begin()
        self.trainer.strategy.barrier("the manifest is written")
        self.windows = [_window(values) for values in corpus.read_manifest(self.output)["windows"]]

    def predict_step(self, shard: PromptShard, batch_idx: int) -> int:
        """Write a shard, unless it is there; gives how many rows are new."""
        target, kinds = self.target, len(self.samplings)
        assert target is not None
        if not shard.prompts or self.is_there(shard):
            return 0
        made: dict[int, list[int]] = {}
        with torch.autocast(self.device.type, enabled=False):  # as the target decodes by itself
            for kind, (sampling, window) in enumerate(zip(self.samplings, self.windows, strict=True)):
                made |= continue_all(
                    target,
                    {(shard.first + i) * kinds + kind: prompt for i, prompt in enumerate(shard.prompts)},
                    max_new_tokens=self.max_new_tokens,
                    batch_size=self.batch_size,
                    window=window,
                    sampling=sampling,
                    eos=Texts(target).eos,
                    seed=self.seed,
                    watch=self._after_round,
                )
        rows = []
        for index in sorted(made):
            number, kind = divmod(index, kinds)
            prompt = shard.prompts[number - shard.first]
            rows.append(corpus.GeneratedRow(prompt, made[index], number, self.temperatures[kind]))
        corpus.write_shard(self.output, shard.number, rows, target.vocab_size)
        return len(rows)

    def _after_round(self, num_tokens: int, num_ended: int) -> None:
        if self.trainer.received_sigterm:  # which the Trainer itself heeds in training alone
            raise SIGTERMException
        self.watch(num_tokens, num_ended)

    def is_there(self, shard: PromptShard) -> bool:
        """Whether a shard has been written and is whole."""
        assert self.target is not None
        return corpus.is_whole(self.output, shard.number, self.target.vocab_size)

    def on_predict_end(self) -> None:
        """When all shards are there, count what is in them, and say it."""
        self.trainer.strategy.barrier("the shards are written")
        if not self.trainer.is_global_zero:
            return
        manifest = corpus.read_manifest(self.output)
        missing = [shard for shard in self._data().shards if not self.is_there(shard)]
        where = seen_from_here(self.output)
        if missing:
            wanted = manifest["num_shards"]
            say(f"{wanted - len(missing)} of {wanted} shards are in {where}: run it again")
            return
        _, shards = corpus.open_corpus(self.output)
        num_prompt_tokens = sum(int(shard.prompt_lengths.sum()) for shard in shards)
        totals = {
            "num_rows": sum(map(len, shards)),
            "num_prompt_tokens": num_prompt_tokens,
            "num_new_tokens": sum(int(shard.starts[-1]) for shard in shards) - num_prompt_tokens,
        }
        corpus.write_manifest(self.output, {**manifest, "totals": totals})
        say(f"{totals['num_rows']:,} rows, {totals['num_new_tokens']:,} new tokens: {where}")

    def _begin(self) -> None:
        """Write the manifest, or check that the one that is there is of the same run.

        Raises:
            ValueError: the directory holds another run's text, or cannot be written to.
        """
        wanted = self._manifest()
        if (self.output / corpus.MANIFEST).exists():
            corpus.check_same(self.output, corpus.read_manifest(self.output), wanted)
        elif self.output.is_dir() and any(self.output.glob("shard-*")):
            raise ValueError(f"{self.output} holds shards without a manifest: restore it, or give another model.output")
        else:
            try:
                corpus.write_manifest(
                    self.output, {**wanted, "windows": [self._measured(each) for each in self.samplings]}
                )
            except OSError as error:
                raise ValueError(f"{self.output} cannot be written to ({error.strerror or error})") from error
        for unfinished in self.output.glob(".shard-*"):  # of a process that was killed while it wrote
            unfinished.unlink(missing_ok=True)

    def _measured(self, sampling: Sampling) -> dict[str, Any]:
        """The window that one temperature is decoded with, as plain values."""
        assert self.target is not None
        if self.num_draft_tokens == 0:
            return NoGuesses().to_dict()
        batch_size = min(self.batch_size, self.shard_size)
        pair = Decoding(self.target, NGramDrafter(), num_draft_tokens=self.num_draft_tokens)
        return as_window(
            pair.window(batch_size=batch_size, temperature=sampling.temperature, top_p=sampling.top_p)
        ).to_dict()

    def _manifest(self) -> dict[str, Any]:
        target, data, tokenizer = self.target, self._data(), self.tokenizer
        assert target is not None
        names = ("max_new_tokens", "temperatures", "top_p", "batch_size", "shard_size", "seed", "num_draft_tokens")
        return {
            "format": corpus.FORMAT,
            "target": self.identity,
            "tokenizer": {"name": self.source, "fingerprint": tokenizer.fingerprint},
            "vocab_size": target.vocab_size,
            "arguments": {name: getattr(self, name) for name in names},
            "data": {"class": type(data).__name__, **data.arguments()},
            "num_prompts": self.num_prompts,
            "prompts_sha256": self.digest,
            "num_shards": len(data.shards),
            "versions": {
                "lightning_specdec": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
            "totals": None,
        }

    def _data(self) -> PromptSource:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptSource):
            raise ValueError(
                f"GenerateText needs a PromptSource as its data, got {type(data).__name__}: give PromptFiles"
            )
        return data


def _window(values: dict[str, Any]) -> Window:
    return NoGuesses() if values.get("kind") == NoGuesses().to_dict()["kind"] else window_from_dict(values)

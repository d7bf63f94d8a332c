"""`lightning_specdec generate`: a target's own text, in shards that several processes write."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_specdec import __version__
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.terminal import say
from lightning_specdec.data import corpus
from lightning_specdec.data.prompt_sources import PromptShard, PromptSource
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import FixedWindow, Session
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.packed import limit_threads
from lightning_specdec.rules import Sampling
from lightning_specdec.training.runs import seen_from_here
from lightning_specdec.training.served import Endpoint, served

Watch = Callable[[int, int], None]
"""Called after each round with the number of new tokens, and of rows that have ended."""


def continue_all(
    target: LanguageModel,
    prompts: Mapping[int, Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    num_draft_tokens: int,
    sampling: Sampling,
    eos: Sequence[int],
    seed: int,
    watch: Watch = lambda num_tokens, num_ended: None,
) -> dict[int, list[int]]:
    """The new tokens of every prompt, by its number; rows join as others end, so that the batch stays full.

    In a round in which rows join, the target reads as many tokens of every row as the longest new prompt has. So
    prompts of similar lengths join together, once half the batch has ended. This follows from the prompts and the rows
    alone, so the same prompts make the same batches.

    Args:
        prompts: by the numbers that key their noise.
        max_new_tokens: new tokens of each row at most.
        batch_size: rows that are decoded together at most.
        num_draft_tokens: draft tokens of prompt lookup in a round; 0 is standard decoding.
        eos: tokens that end a row, and are kept.
    """
    # Taken from the end, short ones first.
    waiting = sorted(prompts, key=lambda number: (-len(prompts[number]), number))
    session = Session(
        target,
        NGramDrafter(),
        max_length=max(map(len, prompts.values())) + max_new_tokens,
        batch_size=min(batch_size, len(prompts)),
        num_draft_tokens=FixedWindow(num_draft_tokens),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=eos,
        seed=seed,
    )
    made: dict[int, list[int]] = {}
    num_live = 0
    while waiting or num_live:
        if num_live <= batch_size // 2:
            for _ in range(min(batch_size - num_live, len(waiting))):
                number = waiting.pop()
                session.add(prompts[number], index=number)
        events = session.step()
        ended = [row for row, _ in events if not row.live]
        for row in ended:
            made[row.index] = row.text[row.prompt_length :]
            session.release(row)
        num_live = len(events) - len(ended)
        watch(sum(len(tokens) for _, tokens in events), len(ended))
    return made


class GenerateText(LightningModule):
    """Writes what a target says to the prompts of a `PromptSource`: token shards and a manifest.

    The prompts of a shard are decoded together by one process, each temperature by itself, with noise keyed by the
    rows' numbers. So the rows are the same for every number of processes, and a run that was stopped continues with the
    shards that are missing.

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
        num_draft_tokens: draft tokens of prompt lookup in a round; 0 is standard decoding.
        engine: vLLM in place of this package: a server's address, `vllm` where it is installed beside this package, or
            the Python of the environment that it is installed in, which starts a server for the run.
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
        num_draft_tokens: int = 0,
        engine: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self.output, self.dtype_name = target, Path(output).expanduser(), dtype
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        self.samplings = [Sampling(temperature, top_p=top_p) for temperature in temperatures]
        self.temperatures, self.top_p = [float(temperature) for temperature in temperatures], top_p
        if not self.samplings or len(set(self.temperatures)) < len(self.samplings):
            raise ValueError(
                f"temperatures must be one or more, all different, got {self.temperatures}: give [0, 1]"
            )
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.shard_size = require_int("shard_size", shard_size, 1)
        self.seed = require_int("seed", seed, 0, 2**63 - 1)
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 0)
        if engine is not None and num_draft_tokens:
            raise ValueError(
                "num_draft_tokens is for decoding without an engine: configure a draft in vLLM's server"
            )
        self.engine, self.closing = engine, ExitStack()
        self.endpoint: Endpoint | None = None
        self.target: Any = None
        self.eos: tuple[int, ...] = ()
        self.wanted: dict[str, Any] = {}
        self.watch: Watch = lambda num_tokens, num_ended: None

    def setup(self, stage: str) -> None:
        """Load the target, make the prompts' tokens and cut them into shards."""
        from lightning_specdec.models import (
            loading,
        )  # transformers, which the other verbs do without

        data = self._data()
        if self.engine is None:
            self.target = target = loading.load_model(self.source, dtype=self.dtype_name)
            limit_threads(target.num_parameters)
        else:
            target = loading.without_weights(loading.examine(self.source, dtype=self.dtype_name))
        assert target.origin is not None, "a loaded model has files"
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"{self.source} has no tokenizer, so prompts are no tokens: save one beside the weights"
            )
        self.eos = SpeculativeDecoder(target, NGramDrafter()).eos
        prompts = data.prompts(tokenizer)
        longest, context = max(map(len, prompts)), target.max_positions
        if context is not None and longest + self.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {self.max_new_tokens} do not fit the target's "
                f"context of {context}: lower max_new_tokens or data.max_prompt_tokens"
            )
        firsts = range(0, len(prompts), self.shard_size)
        data.shards = [
            PromptShard(number, first, prompts[first : first + self.shard_size])
            for number, first in enumerate(firsts)
        ]
        is_here = self.engine is None or any(target.origin.path.glob("*.safetensors"))
        sha256 = target.origin.sha256 if is_here else None
        dtype = str(target.dtype).removeprefix("torch.")
        names = (
            "max_new_tokens",
            "temperatures",
            "top_p",
            "batch_size",
            "shard_size",
            "seed",
            "num_draft_tokens",
        )
        arguments = {name: getattr(self, name) for name in names} | (
            {"engine": "vllm"} if self.engine else {}
        )
        self.wanted = {
            "format": corpus.FORMAT,
            "target": {"source": self.source, "sha256": sha256, "dtype": dtype},
            "tokenizer": {"name": self.source, "fingerprint": tokenizer.fingerprint},
            "vocab_size": target.vocab_size,
            "arguments": arguments,
            "data": {"class": type(data).__name__, **data.arguments()},
            "num_prompts": len(prompts),
            "prompts_sha256": corpus.tokens_sha256(prompts),
            "num_shards": len(data.shards),
            "versions": {"lightning_specdec": __version__, "torch": torch.__version__},
        }

    def on_predict_start(self) -> None:
        """Begin the directory, or continue what is there; the first process does it for all.

        Raises:
            ValueError: the directory holds another run's text, or cannot be written to.
        """
        begun = (self.output / corpus.MANIFEST).exists()
        if begun:
            corpus.check_same(self.output, corpus.read_manifest(self.output), self.wanted)
        if self.engine is None:
            self.target = self.target.packed()
        elif not all(map(self._is_there, self._data().shards)):
            self.endpoint = self._begin(self.engine)
        if self.trainer.is_global_zero:
            if begun:
                for left in self.output.glob(".shard-*"):  # by a run that was killed
                    left.unlink()
            elif self.output.is_dir() and any(self.output.glob("shard-*")):
                raise ValueError(
                    f"{self.output} holds shards without a manifest: give another model.output"
                )
            else:
                corpus.write_manifest(self.output, self.wanted)
        self.trainer.strategy.barrier("the manifest is written")

    def predict_step(self, shard: PromptShard, batch_idx: int) -> int:
        """Write a shard, unless it is there; returns how many rows are new."""
        kinds = len(self.samplings)
        if not shard.prompts or self._is_there(shard):
            self.watch(0, len(shard.prompts) * kinds)
            return 0
        made: dict[int, list[int]] = {}
        for kind, sampling in enumerate(self.samplings):
            prompts = {
                (shard.first + i) * kinds + kind: prompt for i, prompt in enumerate(shard.prompts)
            }
            how: dict[str, Any] = {
                "max_new_tokens": self.max_new_tokens,
                "batch_size": self.batch_size,
                "sampling": sampling,
                "eos": self.eos,
                "seed": self.seed,
                "watch": self._after_round,
            }
            if self.endpoint is not None:
                made |= self.endpoint.continue_all(
                    prompts, vocab_size=self.wanted["vocab_size"], **how
                )
                continue
            with torch.autocast(self.device.type, enabled=False):  # as the target decodes by itself
                made |= continue_all(
                    self.target, prompts, num_draft_tokens=self.num_draft_tokens, **how
                )
        rows = []
        for index in sorted(made):
            number, kind = divmod(index, kinds)
            prompt = shard.prompts[number - shard.first]
            rows.append(corpus.GeneratedRow(prompt, made[index], number, self.temperatures[kind]))
        corpus.write_shard(self.output, shard.number, rows, self.wanted["vocab_size"])
        return len(rows)

    def _begin(self, engine: str) -> Endpoint:
        """The engine, for as long as the run or, where that fails, the process lasts."""
        longest = max(len(prompt) for shard in self._data().shards for prompt in shard.prompts)
        atexit.register(self.closing.close)
        room = {"batch_size": self.batch_size, "max_length": longest + self.max_new_tokens}
        endpoint = self.closing.enter_context(
            served(engine, self.source, dtype=self.dtype_name, **room)
        )
        self.wanted["versions"]["vllm"] = endpoint.version
        return endpoint

    def teardown(self, stage: str) -> None:
        self.closing.close()

    def _after_round(self, num_tokens: int, num_ended: int) -> None:
        if self.trainer.received_sigterm:  # which the Trainer itself heeds in training alone
            raise SIGTERMException
        self.watch(num_tokens, num_ended)

    def _is_there(self, shard: PromptShard) -> bool:
        """Whether a shard has been written and is whole."""
        try:
            corpus.Shard(corpus.shard_path(self.output, shard.number), self.wanted["vocab_size"])
        except (FileNotFoundError, ValueError):
            return False
        return True

    @property
    def num_rows(self) -> int:
        """Rows that this process writes."""
        own = self._data().shards[self.trainer.global_rank :: self.trainer.world_size]
        return sum(len(shard.prompts) for shard in own) * len(self.samplings)

    def on_predict_end(self) -> None:
        """Report what is in the shards when all are there."""
        self.trainer.strategy.barrier("the shards are written")
        if not self.trainer.is_global_zero:
            return None
        shards, where = self._data().shards, seen_from_here(self.output)
        if not all(map(self._is_there, shards)):
            return say(f"some shards are not there yet: run it again to continue {where}")
        written = corpus.open_corpus(self.output)[1]
        num_new = sum(int(shard.starts[-1] - shard.prompt_lengths.sum()) for shard in written)
        say(f"{sum(map(len, written)):,} rows, {num_new:,} new tokens: {where}")

    def _data(self) -> PromptSource:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptSource):
            raise ValueError(
                f"GenerateText needs a PromptSource as its data, got {type(data).__name__}: give PromptFiles"
            )
        return data

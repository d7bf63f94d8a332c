"""`lightning_specdec generate`: a target's own text, in shards that several processes write."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_specdec import __version__
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.files import lock_directory
from lightning_specdec.config.terminal import say
from lightning_specdec.data import corpus
from lightning_specdec.data.prompt_sources import PromptShard, PromptSource
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import FixedWindow, Session
from lightning_specdec.decoding.requests import check_switch
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
    """The new tokens of every prompt, by its number.

    Rows join as others end, so that the batch stays full. In a round in which rows join, the target
    reads as many tokens of every row as the longest new prompt has. So prompts of similar lengths
    join together, once half the batch has ended. Batches depend on the prompts and the generated
    rows only, so the same prompts form the same batches.

    Args:
        prompts: by the numbers that key their noise.
        max_new_tokens: maximum new tokens of each row.
        batch_size: maximum rows that are decoded together.
        num_draft_tokens: draft tokens of prompt lookup in a round; 0 is standard decoding.
        eos: tokens that end a row, and are kept.
    """
    # Prompts are taken from the end, so the shortest come first.
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

    new_tokens: dict[int, list[int]] = {}
    num_live = 0
    while waiting or num_live:
        if num_live <= batch_size // 2:
            num_joining = min(batch_size - num_live, len(waiting))
            for _ in range(num_joining):
                number = waiting.pop()
                session.add(prompts[number], index=number)

        events = session.step()
        ended_rows = [row for row, _ in events if not row.live]
        for row in ended_rows:
            new_tokens[row.index] = row.text[row.prompt_length :]
            session.release(row)
        num_live = len(events) - len(ended_rows)
        watch(sum(len(tokens) for _, tokens in events), len(ended_rows))
    return new_tokens


class GenerateText(LightningModule):
    """Generates a target's text for the prompts of a `PromptSource`: token shards and a manifest.

    One process decodes the prompts of a shard together, each temperature separately. Rows' numbers
    key the noise, so the rows are the same for every number of processes, and a stopped run
    continues with the missing shards.

    Args:
        target: a model's directory, or its name on the Hub; it needs a tokenizer.
        output: the directory of the shards.
        dtype: dtype that the target computes in; the stored dtype when None.
        adapter: an adapter of PEFT to merge into the target: a directory or a Hub name.
        max_new_tokens: maximum new tokens of each row. A token that ends an answer ends a row, and
            is kept.
        temperatures: each prompt has one row for each of these; 0 is greedy.
        top_p: draw only from the most likely tokens that have this much probability together; from
            all when None.
        batch_size: maximum rows that are decoded together.
        shard_size: prompts of a shard. A stopped process loses at most one shard.
        seed: keys the noise, together with a row's number: `prompt number * temperatures +
            temperature`.
        num_draft_tokens: draft tokens of prompt lookup in a round; 0 is standard decoding.
        engine: vLLM instead of this package: a server's address; or, to start a server for the run,
            `vllm` if it is installed in this environment, or the Python of the environment that
            it is installed in.

    Attributes:
        watch: called after each round; `RunProgressBar` sets it.
    """

    def __init__(
        self,
        target: str,
        output: str,
        *,
        dtype: str | None = None,
        adapter: str | None = None,
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
        self.source = target
        self.output = Path(output).expanduser()
        self.dtype_name = dtype
        self.adapter = adapter
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        self.temperatures = [float(temperature) for temperature in temperatures]
        self.top_p = top_p
        self.samplings = [Sampling(temperature, top_p=top_p) for temperature in temperatures]
        has_duplicates = len(set(self.temperatures)) < len(self.temperatures)
        if not self.temperatures or has_duplicates:
            raise ValueError(
                "temperatures must be one or more, all different, got "
                f"{self.temperatures}: give [0, 1]"
            )
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.shard_size = require_int("shard_size", shard_size, 1)
        self.seed = require_int("seed", seed, 0, 2**63 - 1)
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 0)
        if engine is not None and num_draft_tokens:
            raise ValueError(
                "num_draft_tokens is for decoding without an engine: configure a draft in vLLM's "
                "server"
            )
        if engine is not None and adapter is not None:
            raise ValueError(
                "adapter is for decoding without an engine: merge it, and serve the merged model"
            )
        self.engine = engine
        self.watch: Watch = lambda num_tokens, num_ended: None

        # Set when the run starts.
        self.target: Any = None
        self.eos: tuple[int, ...] = ()
        self.manifest: dict[str, Any] = {}
        self.endpoint: Endpoint | None = None
        self._server = ExitStack()
        self._lock_descriptor: int | None = None

    # --- before the first shard ---

    def setup(self, stage: str) -> None:
        """Load the target, tokenize the prompts and divide them into shards."""
        # Imports transformers, which the other verbs do without.
        from lightning_specdec.models import loading

        data = self._data()
        if self.engine is None:
            self.target = loading.load_model(
                self.source, dtype=self.dtype_name, adapter=self.adapter
            )
            limit_threads(self.target.num_parameters)
            target = self.target
        else:
            # The server has the weights; this process needs the tokenizer and the sizes.
            target = loading.without_weights(loading.examine(self.source, dtype=self.dtype_name))
        if target.tokenizer is None:
            raise ValueError(
                f"{self.source} has no tokenizer to encode prompts with: save one next to the "
                "weights"
            )
        self.eos = SpeculativeDecoder(target, NGramDrafter()).eos

        prompts = data.prompts(target.tokenizer)
        max_prompt_length = max(map(len, prompts))
        max_positions = target.max_positions
        if max_positions is not None and max_prompt_length + self.max_new_tokens > max_positions:
            raise ValueError(
                f"a prompt of {max_prompt_length} tokens and max_new_tokens {self.max_new_tokens} "
                f"do not fit the target's context of {max_positions}: lower max_new_tokens or "
                "data.max_prompt_tokens"
            )
        if self.engine is None:
            for prompt in prompts:
                check_switch(len(prompt), self.max_new_tokens, target.position_switch)
        shards: list[PromptShard] = []
        for start in range(0, len(prompts), self.shard_size):
            shard_prompts = prompts[start : start + self.shard_size]
            shards.append(PromptShard(len(shards), start, shard_prompts))
        data.shards = shards
        self.manifest = self._make_manifest(target, data, prompts)

    def _make_manifest(
        self,
        target: Any,
        data: PromptSource,
        prompts: Sequence[Sequence[int]],
    ) -> dict[str, Any]:
        """What the text depends on: a directory with another manifest belongs to another run."""
        assert target.origin is not None, "a loaded model has files"
        # With an engine, the weights may be on the server only.
        has_weights = self.engine is None or any(target.origin.path.glob("*.safetensors"))
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperatures": self.temperatures,
            "top_p": self.top_p,
            "batch_size": self.batch_size,
            "shard_size": self.shard_size,
            "seed": self.seed,
            "num_draft_tokens": self.num_draft_tokens,
        }
        if self.engine is not None:
            arguments["engine"] = "vllm"
        if self.adapter is not None:
            arguments["adapter"] = self.adapter
        return {
            "format": corpus.FORMAT,
            "target": {
                "source": self.source,
                "sha256": target.origin.sha256 if has_weights else None,
                "dtype": str(target.dtype).removeprefix("torch."),
            },
            "tokenizer": {"name": self.source, "fingerprint": target.tokenizer.fingerprint},
            "vocab_size": target.vocab_size,
            "arguments": arguments,
            "data": {"class": type(data).__name__, **data.arguments()},
            "num_prompts": len(prompts),
            "prompts_sha256": corpus.tokens_sha256(prompts),
            "num_shards": len(data.shards),
            "versions": {"lightning_specdec": __version__, "torch": torch.__version__},
        }

    def on_predict_start(self) -> None:
        """Create the directory, or continue an existing one; the first process does it for all.

        Raises:
            ValueError: the directory contains another run's text, another run writes to it, or the
                engine does not start.
        """
        continues = (self.output / corpus.MANIFEST).exists()
        if continues:
            corpus.check_same(self.output, corpus.read_manifest(self.output), self.manifest)

        if self.engine is None:
            self.target = self.target.packed()
        elif not all(self._is_written(shard) for shard in self._data().shards):
            self.endpoint = self._start_engine(self.engine)

        if self.trainer.is_global_zero:
            self._lock_directory()
            with self._unlocked_on_failure():
                self._prepare_directory(continues)
        self.trainer.strategy.barrier("the manifest is written")

    def _lock_directory(self) -> None:
        """Keep other runs from writing to the directory until this one ends."""
        self.output.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = lock_directory(
            self.output,
            f"another run writes to {self.output}: wait until it ends, or give another "
            "model.output",
        )

    def _unlock_directory(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _prepare_directory(self, continues: bool) -> None:
        """Write the manifest, or remove what a killed run has left unfinished."""
        if continues:
            for unfinished_file in self.output.glob(".shard-*"):
                unfinished_file.unlink()
            return
        if self.output.is_dir() and any(self.output.glob("shard-*")):
            raise ValueError(
                f"{self.output} holds shards without a manifest: give another model.output"
            )
        corpus.write_manifest(self.output, self.manifest)

    def _start_engine(self, engine: str) -> Endpoint:
        """The engine's endpoint. It ends with the run or, if that fails, with the process."""
        prompt_lengths = [len(prompt) for shard in self._data().shards for prompt in shard.prompts]
        atexit.register(self._server.close)
        endpoint = self._server.enter_context(
            served(
                engine,
                self.source,
                dtype=self.dtype_name,
                batch_size=self.batch_size,
                max_length=max(prompt_lengths) + self.max_new_tokens,
            )
        )
        self.manifest["versions"]["vllm"] = endpoint.version
        return endpoint

    def teardown(self, stage: str) -> None:
        self._server.close()
        self._unlock_directory()

    @contextmanager
    def _unlocked_on_failure(self) -> Iterator[None]:
        """Unlock the directory if a step fails: the Trainer then calls no `teardown`."""
        try:
            yield
        except BaseException:
            self._unlock_directory()
            raise

    # --- the shards ---

    def predict_step(self, shard: PromptShard, batch_idx: int) -> int:
        """Write a shard, unless it is written already; returns the number of new rows."""
        with self._unlocked_on_failure():
            return self._write_missing(shard)

    def _write_missing(self, shard: PromptShard) -> int:
        num_rows = len(shard.prompts) * len(self.samplings)
        if not shard.prompts or self._is_written(shard):
            self.watch(0, num_rows)
            return 0

        new_tokens: dict[int, list[int]] = {}
        for sampling_index, sampling in enumerate(self.samplings):
            prompts = {}
            for i, prompt in enumerate(shard.prompts):
                row_number = (shard.first + i) * len(self.samplings) + sampling_index
                prompts[row_number] = prompt
            new_tokens.update(self._continue_all(prompts, sampling))

        rows = []
        for row_number in sorted(new_tokens):
            prompt_number, sampling_index = divmod(row_number, len(self.samplings))
            row = corpus.GeneratedRow(
                shard.prompts[prompt_number - shard.first],
                new_tokens[row_number],
                prompt_number,
                self.temperatures[sampling_index],
            )
            rows.append(row)
        corpus.write_shard(self.output, shard.number, rows, self.manifest["vocab_size"])
        return len(rows)

    def _continue_all(
        self,
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling,
    ) -> dict[int, list[int]]:
        """The new tokens of every prompt, from the engine or from this package."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "sampling": sampling,
            "eos": self.eos,
            "seed": self.seed,
            "watch": self._after_round,
        }
        if self.endpoint is not None:
            vocab_size = self.manifest["vocab_size"]
            return self.endpoint.continue_all(prompts, vocab_size=vocab_size, **options)
        # The target decodes without the Trainer's mixed precision, as everywhere else.
        with torch.autocast(self.device.type, enabled=False):
            return continue_all(
                self.target, prompts, num_draft_tokens=self.num_draft_tokens, **options
            )

    def _after_round(self, num_tokens: int, num_ended: int) -> None:
        # The Trainer checks for SIGTERM between training steps only.
        if self.trainer.received_sigterm:
            raise SIGTERMException
        self.watch(num_tokens, num_ended)

    def _is_written(self, shard: PromptShard) -> bool:
        """Whether a shard is written and undamaged."""
        path = corpus.shard_path(self.output, shard.number)
        try:
            corpus.Shard(path, self.manifest["vocab_size"])
        except (FileNotFoundError, ValueError):
            return False
        return True

    @property
    def num_rows(self) -> int:
        """Number of rows that this process writes."""
        my_shards = self._data().shards[self.trainer.global_rank :: self.trainer.world_size]
        num_prompts = sum(len(shard.prompts) for shard in my_shards)
        return num_prompts * len(self.samplings)

    def on_predict_end(self) -> None:
        """Report the rows and tokens of the text once all shards are written."""
        self.trainer.strategy.barrier("the shards are written")
        if not self.trainer.is_global_zero:
            return
        directory = seen_from_here(self.output)
        if not all(self._is_written(shard) for shard in self._data().shards):
            say(f"some shards are not there yet: run it again to continue {directory}")
            return

        num_rows = 0
        num_new_tokens = 0
        for shard in corpus.open_corpus(self.output)[1]:
            num_rows += len(shard)
            num_new_tokens += int(shard.starts[-1] - shard.prompt_lengths.sum())
        say(f"{num_rows:,} rows, {num_new_tokens:,} new tokens: {directory}")

    def _data(self) -> PromptSource:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptSource):
            raise ValueError(
                f"GenerateText needs a PromptSource as its data, got {type(data).__name__}: give "
                "PromptFiles"
            )
        return data

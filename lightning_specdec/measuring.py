"""A target and what guesses for it, measured: both ways of decoding, and every draft with every window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Unpack

from lightning_specdec.bench.audit.auditor import Auditor
from lightning_specdec.bench.pair import compare
from lightning_specdec.bench.runner import Benchmark
from lightning_specdec.bench.sweep import SweepRow, sweep
from lightning_specdec.decoding import Decoding, WindowChoice
from lightning_specdec.drafters import Drafter, EarlyExitDrafter
from lightning_specdec.inference.rows import as_prompts
from lightning_specdec.rules import AcceptanceRule, Sampling, SamplingOptions
from lightning_specdec.texts import TextPrompts


@dataclass(frozen=True)
class Candidate:
    """A draft to choose.

    Args:
        drafter: what guesses.
        draft: its name among the `drafts` of a decoder; None where it has none.
        exit_layer: how many of the target's layers guess; None where none do.
    """

    drafter: Drafter
    draft: str | None = None
    exit_layer: int | None = None


class Measuring(Decoding):
    """`Decoding` with a clock; its arguments are those of `Decoding`."""

    def benchmark(
        self,
        prompts: TextPrompts | None = None,
        *,
        max_new_tokens: int = 7,
        num_draft_tokens: WindowChoice | None = None,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        logprobs: bool = False,
        repeats: int = 10,
        warmup: int = 3,
        batch_size: int = 1,
        mode: str = "both",
        equal_treatment: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Benchmark:
        """Decode both ways again and again, interleaved, and measure; see `Benchmark` for the figures.

        Args:
            prompts: those that belong to the pair when None.
            repeats: runs that are timed each way, after `warmup` that are not.
            batch_size: prompts that are decoded together.
            mode: "both", "standard" or "speculative".
            equal_treatment: whether to measure with the target fused on both sides too.

        The rest are those of `decode`.
        """
        tokens = self.prompts if prompts is None else as_prompts(self._texts.tokens(prompts))
        size = min(batch_size, max(1, len(tokens)))
        return compare(
            *self.ready(),
            tokens,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=self.window(num_draft_tokens, batch_size=size, rule=rule, **sampling),
            rule=rule,
            sampling=Sampling(**sampling),
            eos=self._texts.stop_tokens(eos),
            seed=seed,
            logprobs=logprobs,
            stop=self._texts.stop_strings(stop),
            repeats=repeats,
            warmup=warmup,
            batch_size=batch_size,
            mode=mode,
            equal_treatment=equal_treatment,
        )

    def sweep(
        self,
        prompts: TextPrompts | None = None,
        *,
        drafts: Mapping[str, Drafter] | None = None,
        windows: Sequence[int] = (2, 4, 6, 8),
        max_new_tokens: int = 128,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        repeats: int = 5,
        warmup: int = 1,
        batch_size: int = 1,
        fuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[SweepRow]:
        """Measure every draft with every window, each beside standard decoding; gives each row as it is there.

        Args:
            prompts: those that belong to the pair when None.
            drafts: by name; all `candidates` when None.
            windows: guesses per round.
            repeats, warmup, batch_size: as of `benchmark`.
            fuse: whether all networks decode in their fused form, on both sides, or all as they are.

        The rest are those of `decode`.
        """
        tokens = self.prompts if prompts is None else as_prompts(self._texts.tokens(prompts))
        given = {name: each.drafter for name, each in self.candidates().items()} if drafts is None else drafts
        self.target.eval()
        return sweep(
            self.target.fused() if fuse else self.target,
            {name: drafter.eval().fused() if fuse else drafter.eval() for name, drafter in given.items()},
            tokens,
            windows=windows,
            max_new_tokens=max_new_tokens,
            rule=rule,
            sampling=Sampling(**sampling),
            eos=self._texts.stop_tokens(eos),
            stop=self._texts.stop_strings(stop),
            seed=seed,
            repeats=repeats,
            warmup=warmup,
            batch_size=batch_size,
        )

    def auditor(
        self,
        prompts: TextPrompts | None = None,
        *,
        rules: Mapping[str, AcceptanceRule],
        samplings: Mapping[str, Sampling],
        drafts: Mapping[str, Drafter] | None = None,
        num_draft_tokens: int = 3,
        max_new_tokens: int = 32,
        num_decodes: int | None = None,
        num_places: int | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Auditor:
        """What finds out whether every draft's output is the target's, as both decode here: see `Auditor`.

        Args:
            prompts: those that belong to the pair when None.
            drafts: by name; all `candidates` when None.

        The rest are those of `Auditor` and `decode`.
        """
        given = {name: each.drafter for name, each in self.candidates().items()} if drafts is None else drafts
        return Auditor(
            self.ready()[0],
            {name: drafter.eval().fused() if self.fuse_draft else drafter.eval() for name, drafter in given.items()},
            self.prompts if prompts is None else as_prompts(self._texts.tokens(prompts)),
            rules=rules,
            samplings=samplings,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            num_decodes=num_decodes,
            num_places=num_places,
            eos=self._texts.stop_tokens(eos),
            seed=seed,
        )

    def exits(self, layers: Iterable[int] | None = None) -> dict[int, EarlyExitDrafter]:
        """The target's early exits, by how many of its layers guess: these, or every one when None.

        Exits of an `EarlyExitDrafter` keep the output heads that were trained for them.

        Raises:
            ValueError: the target cannot be split there, or not at all.
        """
        return self._exits(self.drafter, layers)

    def _exits(self, own: Drafter, layers: Iterable[int] | None) -> dict[int, EarlyExitDrafter]:
        found: dict[int, EarlyExitDrafter] = {}
        for layer in count(1) if layers is None else layers:
            drafter = own.at(layer) if isinstance(own, EarlyExitDrafter) else EarlyExitDrafter(layer)
            try:
                drafter.check_target(self.target)
            except ValueError:
                if found and layers is None:  # the one before was the last
                    break
                raise
            found[layer] = drafter
        return found

    def candidates(
        self, drafts: Sequence[str] | None = None, exit_layers: Sequence[int] | None = None
    ) -> dict[str, Candidate]:
        """What there is to choose from: every draft, and of an early exit every exit.

        Args:
            drafts: those of `drafts` that are meant, by name; when None all of them, or the decoder's own draft where
                it is none of them.
            exit_layers: the exits that are meant; every one when None.

        Raises:
            ValueError: there is no draft of that name, or no early exit, or the target has no such exit.
        """
        if foreign := [name for name in drafts or () if name not in self.drafts]:
            known = ", ".join(self.drafts) or f"one {type(self.drafter).__name__}, which has no name"
            raise ValueError(f"there is no draft {foreign[0]!r} to choose: there is {known}")
        chosen: dict[str | None, Drafter] = {None: self.drafter}
        if drafts is not None or any(drafter is self.drafter for drafter in self.drafts.values()):
            chosen = {name: self.drafts[name] for name in drafts or self.drafts}
        found: dict[str, Candidate] = {}
        for name, drafter in chosen.items():
            if not isinstance(drafter, EarlyExitDrafter):
                found[name or type(drafter).__name__] = Candidate(drafter, name)
                continue
            for layer, exiting in self._exits(drafter, exit_layers).items():
                label = f"exit {layer}" if name is None else f"{name}, exit {layer}"
                found[label] = Candidate(exiting, name, layer)
        if exit_layers is not None and not any(each.exit_layer for each in found.values()):
            kinds = ", ".join(sorted({type(each.drafter).__name__ for each in found.values()}))
            raise ValueError(
                f"exit layers are of early exits, and what guesses here is a {kinds}: "
                "name none, or draft with an EarlyExitDrafter"
            )
        return found

"""The loop: rows that come and go, and one round for all of them at a time.

Knows nothing of how guesses are made (drafters), judged (rules) or scored (models).

The text lives on the host, states live on the device. A round uploads a few integers for each row, runs draft, target
and rule without looking, and reads their outcome once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Context, Draft, Drafter, Host, last_two
from lightning_specdec.drafters.model import pad
from lightning_specdec.inference.limits import check_context, flag_undrawable
from lightning_specdec.inference.results import DecodeResult
from lightning_specdec.inference.rows import Row, check_drawn, check_eos, check_prompt, num_shared, power_of_two
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.inference.windows import Outcome, Window, as_window
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import AcceptanceRule, ExactMatch, Purpose, Sampling, Verdict, column, noise_table


class Session:
    """Rows decoded together, each at its own pace.

    Theory: a round guesses up to `num_draft_tokens` tokens for every live row, has the target read them in one call
    together with whatever it has not seen yet (the whole prompt in a row's first round: predictive prefill), and
    settles for each row what its verdict keeps plus one token of the target's own. Shapes do not depend on verdicts.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses.
        rule: what decides; `ExactMatch()` when None.
        sampling: how tokens are drawn; greedy when None.
        num_draft_tokens: guesses per round, fewer where a row wants fewer; or a `Window` that chooses.
        max_length: most tokens of a row, prompt and new ones together.
        batch_size: rows to make room for at once; more rows grow it, to powers of two.
        eos: tokens that stop a row.
        seed: keys the noise, together with each row's index.
        logprobs: whether each token's log probability under the target is wanted.

    Raises:
        ValueError: for a drafter that cannot serve this target or this rule.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        max_length: int,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        num_draft_tokens: int | Window = 3,
        batch_size: int = 1,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rule, self.sampling = rule or ExactMatch(), sampling or Sampling()
        self.window = as_window(num_draft_tokens)
        self.max_length = require_int("max_length", max_length, 2)
        self.eos = check_eos(eos, target.vocab_size)
        self.seed, self.logprobs = require_int("seed", seed, 0, 2**63 - 1), logprobs
        drafter.check_target(target)
        if self.rule.needs_draft_logits and not drafter.gives_logits:
            rule_name, drafter_name = type(self.rule).__name__, type(drafter).__name__
            raise ValueError(f"{rule_name} compares the draft's logits, and {drafter_name} has none: use another rule")
        self.device = target.device
        self.timer = PhaseTimer(self.device)
        self.num_target_calls = self.num_draft_calls = 0
        # A round that begins elsewhere changes the output of some rules: see `AdaptiveWindow`.
        certain = self.rule.lossless and self.sampling.greedy
        self._plan = self.window.plan(jointly=self.rule.ignores_windows or certain)
        self._added: dict[Row, None] = {}
        self._next_index = 0
        self._rows = [self._vacant() for _ in range(batch_size)]
        # Guesses are read beyond the text: at most a window and the token that opens it.
        num_slots = max_length + self.window.largest + 1
        self._target_state = target.init_state(batch_size, num_slots)
        self._draft_state = drafter.init_state(batch_size, num_slots, Host(target, self._target_state))
        self._features = tuple(drafter.features(target))
        self._nothing = Draft(torch.empty(batch_size, 0, dtype=torch.long, device=self.device))
        self._noise: Tensor | None = None
        if not self.sampling.greedy or drafter.needs_noise(self.sampling):
            self._noise = torch.zeros(batch_size, num_slots, len(Purpose), device=self.device)

    def _vacant(self) -> Row:
        """A row that wants nothing: it takes part in every call like a finished one, and its tokens go nowhere."""
        return Row(-1, [0, 0], max_new_tokens=0, eos=frozenset(), speculative=True)

    @property
    def live(self) -> list[Row]:
        """The rows that want more tokens."""
        return [row for row in self._rows if row.live]

    @torch.inference_mode()
    def add(
        self, prompt: Sequence[int], *, max_new_tokens: int, index: int | None = None, stop: StopStrings | None = None
    ) -> Row:
        """Begin a row; it joins the next round. `index` keys its noise: the next free number when None."""
        index = self._next_index if index is None else index
        row = self._row(prompt, max_new_tokens=max_new_tokens, index=index, stop=stop)
        return self._enter(row, self._free_slot())

    @torch.inference_mode()
    def resume(self, row: Row, prompt: Sequence[int], *, max_new_tokens: int, stop: StopStrings | None = None) -> Row:
        """Begin the next turn of a row that has ended: another row, whose prompt goes on from the old one's text.

        Theory: the states have read the old text already. They go back to where the two texts part, and only what
        follows is read; where they cannot go back so far, or the old row's place has gone to another, all of it is.
        With `ExactMatch`, and at temperature 0, the outcome is that of the whole prompt read anew. Rejection sampling
        keeps its distribution; its draws may differ where the draft remembers more than the prompt tells. No noise that
        an earlier turn drew from is drawn from again.
        """
        if row.live:
            raise ValueError("the row is still being decoded: cancel it, or wait for its end, before it is resumed")
        num_drawn = row.num_drawn + row.num_new
        new = self._row(prompt, max_new_tokens=max_new_tokens, index=row.index, stop=stop, num_drawn=num_drawn)
        slot = next((i for i, other in enumerate(self._rows) if other is row), None)
        # The old text's last token was drawn and never fed; a guess may have been, in its place.
        keep = min(num_shared(row.text, prompt), len(row.text) - 1, len(prompt) - 1)
        if slot is None or self._target_state.committed[slot] > keep:
            return self._enter(new, self._free_slot())
        lengths = list(self._target_state.consumed)
        lengths[slot] = min(lengths[slot], keep)
        self._target_state.truncate(lengths)
        self._draft_state.go_back(slot, max(0, keep - self._first_token(row)))
        self._plan.resume(new, row, keep)
        return self._enter(new, slot)

    def num_read(self, row: Row) -> int:
        """Tokens of a row's text that the target has read, guesses not counted; 0 where it has no place here."""
        places = zip(self._rows, self._target_state.consumed, strict=True)
        return next((min(length, len(row.text)) for other, length in places if other is row), 0)

    def _row(
        self, prompt: Sequence[int], *, max_new_tokens: int, index: int, stop: StopStrings | None, num_drawn: int = 0
    ) -> Row:
        """A row that has no place yet, checked."""
        check_prompt(prompt, self.target.vocab_size, "the prompt")
        require_int("max_new_tokens", max_new_tokens, 1)
        row = Row(
            index,
            prompt,
            max_new_tokens=max_new_tokens,
            eos=self.eos,
            speculative=True,
            stop=stop,
            num_drawn=num_drawn,
        )
        check_context(len(prompt), max_new_tokens, self.target, self.drafter)
        if row.max_length > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed max_length={self.max_length}: "
                "open the session with a larger one"
            )
        return row

    def _enter(self, row: Row, slot: int) -> Row:
        """Give a row its place."""
        self._rows[slot] = row
        self._added[row] = None
        self._next_index = max(self._next_index, row.index + 1)
        if self._noise is not None:
            table = noise_table(self.seed, row.index, row.num_drawn + row.remaining)[row.num_drawn :]
            self._noise[slot, : len(table)] = table.to(self.device)
        return row

    def _free_slot(self) -> int:
        """An empty place for a row; the batch grows where there is none."""
        slot = next((i for i, other in enumerate(self._rows) if not other.live), None)
        if slot is None:
            slot = len(self._rows)
            self._select([*range(slot), *[-1] * (power_of_two(slot + 1) - slot)])
        elif self._target_state.consumed[slot]:
            self._target_state.clear([slot])
            self._draft_state.clear([slot])
        return slot

    def cancel(self, row: Row) -> None:
        """Stop a row; what it has stays."""
        if row.live:
            row.stop_reason = "cancelled"

    def release(self, row: Row) -> None:
        """Forget a row that has ended: `result` leaves it out. A server does so with each, or memory fills up."""
        if row.live:
            raise ValueError("the row is still being decoded: cancel it, or wait for its end, before it is released")
        self._added.pop(row, None)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round for all live rows; gives each one's newly settled tokens."""
        if not self.live:
            return []
        self._shrink()
        rows = self._rows
        unread = self._rewind()
        tail = last_two([row.text for row in rows], self.device)
        windows = self._plan.windows(rows)
        noise = self._round_noise(max(windows) + 1)
        self.timer.lap("rest")
        draft = self._propose(tail, windows, noise)
        self.timer.lap("draft")
        output = self._verify(tail, draft, unread)
        self.timer.lap("verify")
        if noise is not None:  # of fewer positions, where nobody guessed as much as was allowed
            noise = noise[:, : draft.tokens.shape[1] + 1]
        judged = self._processed(output.logits, draft)
        verdict = self._judge(draft, judged, noise)
        values = self._read(draft, verdict, output, judged)
        self.timer.lap("accept")
        events, outcomes, num_accepted = self._settle(values, draft, windows)
        self.drafter.observe(self._draft_state, output, num_accepted)
        self._plan.learn(outcomes)
        self.timer.lap("rest")
        return events

    def result(self) -> DecodeResult:
        """The outcome so far of all rows that were added and not released, in their order."""
        return DecodeResult(
            rows=[row.result() for row in self._added],
            seconds=self.timer.elapsed(),
            phase_seconds=self.timer.seconds(),
            num_target_calls=self.num_target_calls,
            peak_memory_bytes=peak_memory_bytes(self.device),
            lossless=self.rule.lossless,
            num_draft_calls=self.num_draft_calls,
            num_draft_tokens=self.window.largest,
            window=self.window.to_dict(),
            rule=type(self.rule).__name__,
        )

    def _round_noise(self, num_positions: int) -> Tensor | None:
        """`[B, K + 1, 3]`: each row's uniform numbers for the positions of this round."""
        if self._noise is None:
            return None
        done = [row.num_new for row in self._rows]
        if min(done) == max(done):
            return self._noise[:, done[0] : done[0] + num_positions]
        index = torch.tensor(done, device=self.device)[:, None] + torch.arange(num_positions, device=self.device)
        return self._noise.gather(1, index[..., None].expand(-1, -1, len(Purpose)))

    def _propose(self, tail: Tensor, windows: Sequence[int], noise: Tensor | None) -> Draft:
        num_guesses = max(windows)
        if num_guesses == 0:
            if len(self._nothing.tokens) != len(windows):
                self._nothing = Draft(torch.empty(len(windows), 0, dtype=torch.long, device=self.device))
            return self._nothing
        context = Context(
            texts=[row.text[first:] if (first := self._first_token(row)) else row.text for row in self._rows],
            tail=tail,
            uniform=None if noise is None else noise[:, :num_guesses, self.rule.draft_purpose],
            wants_logits=self.rule.needs_draft_logits,
            vocab_size=self.target.vocab_size,
            windows=windows,
        )
        draft = self.drafter.propose(self._draft_state, context, windows, self.sampling)
        self.num_draft_calls += draft.num_calls
        return draft

    def _first_token(self, row: Row) -> int:
        """Where the part of a row's text begins that the drafter sees."""
        return 0 if self.drafter.inside_target else self._plan.first_token(row)

    def _rewind(self) -> list[list[int]]:
        """The target goes back to what is settled; gives what it has not read of each text, its last token at least."""
        state, texts = self._target_state, [row.text for row in self._rows]
        starts = [min(length, len(text) - 1) for length, text in zip(state.consumed, texts, strict=True)]
        state.truncate(starts)
        state.commit(starts)
        return [text[start:] for start, text in zip(starts, texts, strict=True)]

    def _verify(self, tail: Tensor, draft: Draft, unread: list[list[int]]) -> ModelOutput:
        """The target reads what it has not seen of each text, and the guesses; logits of the K + 1 last positions."""
        self.num_target_calls += 1
        num_guesses = draft.tokens.shape[1]
        tokens, num_unread = (tail[:, 1:], None) if all(len(each) == 1 for each in unread) else pad(unread, self.device)
        places: Tensor | slice = slice(-num_guesses - 1, None)
        valid_lengths = None
        if num_unread is None:
            if num_guesses:
                tokens = torch.cat((tokens, draft.tokens), dim=1)
        else:
            first = torch.tensor([[length] for length in num_unread], device=self.device)
            guessed = first + torch.arange(num_guesses + 1, device=self.device)
            tokens = torch.nn.functional.pad(tokens, (0, num_guesses)).scatter(1, guessed[:, :-1], draft.tokens)
            valid_lengths = [length + num_guesses for length in num_unread]
            places = guessed - 1
        score = self.target if draft.exit_states is None else partial(self.target.finish, draft.exit_states)
        return score(
            tokens, self._target_state, valid_lengths=valid_lengths, logits_for=places, features=self._features
        )

    def _judge(self, draft: Draft, logits: Tensor, noise: Tensor | None) -> Verdict:
        """The rule's verdict; where nobody guessed, the target's own token, which every rule would give."""
        if draft.tokens.shape[1]:
            return self.rule.judge(draft, logits, self.sampling, noise)
        return Verdict(draft.tokens.bool(), self.sampling.sample(logits, column(noise, Purpose.CORRECT)))

    def _processed(self, logits: Tensor, draft: Draft) -> Tensor:
        """What the rule judges by: the logits as processors leave them for each text and each of its guesses.

        Processors are asked from the host, so with them it reads the guesses ahead of the verdict.
        """
        if not self.sampling.processors:
            return logits
        guesses = draft.tokens.tolist()
        if draft.lengths is not None:
            guesses = [row[:length] for row, length in zip(guesses, draft.lengths.tolist(), strict=True)]
        texts = [row.text if row.live else None for row in self._rows]
        return self.sampling.process(logits, texts, guesses, stop_at_impossible=self.rule.lossless)

    def _read(self, draft: Draft, verdict: Verdict, output: ModelOutput, judged: Tensor) -> list[list[Any]]:
        """The round's only read of the device: all that the host wants to know of it, in one tensor."""
        endings = verdict.endings
        if self.sampling.greedy:  # a draw has found it out already
            endings = flag_undrawable(endings, judged)
        columns = [verdict.kept, endings, draft.tokens] if draft.tokens.shape[1] else [endings]
        if draft.lengths is not None:
            columns.append(draft.lengths[:, None])
        if verdict.changed is not None:
            columns.append(verdict.changed)
        if self.logprobs:
            # float64 holds the integers beside them exactly.
            columns.append(Sampling.log_probs(output.logits[:, :-1], draft.tokens).double())
            known = verdict.endings.clamp(max=self.target.vocab_size - 1)
            columns.append(Sampling.log_probs(output.logits, known).double())
        return (torch.cat(columns, dim=1) if len(columns) > 1 else endings).tolist()

    def _settle(
        self, values: list[list[Any]], draft: Draft, windows: Sequence[int]
    ) -> tuple[list[tuple[Row, list[int]]], list[Outcome], list[int]]:
        """Give every live row what its verdict kept; `values` as `_read` lays them out."""
        seconds, num_guesses = self.timer.elapsed(), draft.tokens.shape[1]
        events, outcomes, counts = [], [], []
        for row, window, numbers in zip(self._rows, windows, values, strict=True):
            num_accepted = next((i for i in range(num_guesses) if not numbers[i]), num_guesses)
            counts.append(num_accepted if row.live else 0)
            if not row.live:
                continue
            logprobs = None
            if self.logprobs:
                numbers, scores = numbers[: -2 * num_guesses - 1], numbers[-2 * num_guesses - 1 :]
                logprobs = [*scores[:num_accepted], scores[num_guesses + num_accepted]]
                numbers = [int(number) for number in numbers]
            ending = numbers[num_guesses + num_accepted]
            drafted, changed = numbers[2 * num_guesses + 1 : 3 * num_guesses + 1], numbers[3 * num_guesses + 1 :]
            if draft.lengths is not None:
                length, *changed = changed
                drafted, changed = drafted[:length], changed[:length]
            # Where the draw is certain, the guesses that were kept count too; what lies behind EOS never does.
            first = 0 if self.sampling.greedy else num_accepted
            last = next((i for i, token in enumerate(drafted[:num_accepted]) if token in row.eos), num_accepted)
            drawn = numbers[num_guesses + first : num_guesses + last + 1]
            check_drawn(max(drawn, default=0), self.target.vocab_size)
            added = row.settle(drafted, num_accepted, ending, seconds=seconds, changed=changed, logprobs=logprobs)
            events.append((row, added))
            num_made = len(drafted)
            if len(added) <= num_accepted:  # nothing is learnt of guesses behind a stop: a next turn has their noise
                window = num_made = num_accepted = len(added)
            outcomes.append(Outcome(row, window, num_made, num_accepted))
        return events, outcomes, counts

    def _shrink(self) -> None:
        """Leave finished rows behind once the live ones fit a smaller power of two."""
        live = [i for i, row in enumerate(self._rows) if row.live]
        if (size := power_of_two(len(live))) < len(self._rows):
            idle = [i for i, row in enumerate(self._rows) if not row.live]
            self._select(live + idle[: size - len(live)])

    def _select(self, sources: list[int]) -> None:
        """Row i becomes the former row `sources[i]`, or a vacant one where that is -1."""
        self._target_state.select(sources)
        self._draft_state.select(sources)
        if self._noise is not None:
            self._noise = self._noise[torch.tensor(sources, device=self.device).clamp(min=0)]
        self._rows = [self._vacant() if i < 0 else self._rows[i] for i in sources]

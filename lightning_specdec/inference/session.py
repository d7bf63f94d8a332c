"""The loop: rows that come and go, and one round for all of them at a time.

Knows nothing of how guesses are made (drafters), judged (rules) or scored (models).

The text lives on the host, states live on the device. A round uploads a few integers for each row, runs draft, target
and rule without looking, and reads their outcome once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Context, Draft, Drafter, last_two
from lightning_specdec.drafters.model import pad
from lightning_specdec.inference.results import DecodeResult
from lightning_specdec.inference.rows import Row, check_drawn, check_eos, check_prompt, power_of_two
from lightning_specdec.inference.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import AcceptanceRule, ExactMatch, Purpose, Sampling, Verdict, noise_table


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
        num_draft_tokens: guesses per round; fewer where a row wants fewer.
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
        num_draft_tokens: int = 3,
        batch_size: int = 1,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rule, self.sampling = rule or ExactMatch(), sampling or Sampling()
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
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
        self._added: list[Row] = []
        self._next_index = 0
        self._rows = [self._vacant() for _ in range(batch_size)]
        # Guesses are read beyond the text: at most a window and the token that opens it.
        num_slots = max_length + num_draft_tokens + 1
        self._target_state = target.init_state(batch_size, num_slots)
        self._draft_state = drafter.init_state(batch_size, num_slots)
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
    def add(self, prompt: Sequence[int], *, max_new_tokens: int, index: int | None = None) -> Row:
        """Begin a row; it joins the next round. `index` keys its noise: the next free number when None."""
        check_prompt(prompt, self.target.vocab_size, "the prompt")
        require_int("max_new_tokens", max_new_tokens, 1)
        index = self._next_index if index is None else index
        row = Row(index, prompt, max_new_tokens=max_new_tokens, eos=self.eos, speculative=True)
        if row.max_length > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed max_length={self.max_length}: "
                "open the session with a larger one"
            )
        slot = next((i for i, other in enumerate(self._rows) if not other.live), None)
        if slot is None:
            slot = len(self._rows)
            self._select([*range(slot), *[-1] * (power_of_two(slot + 1) - slot)])
        elif self._target_state.consumed[slot]:
            self._target_state.clear([slot])
            self._draft_state.clear([slot])
        self._rows[slot] = row
        self._added.append(row)
        self._next_index = max(self._next_index, index + 1)
        if self._noise is not None:
            table = noise_table(self.seed, index, max_new_tokens)
            self._noise[slot, :max_new_tokens] = table.to(self.device)
        return row

    def cancel(self, row: Row) -> None:
        """Stop a row; what it has stays."""
        if row.live:
            row.stop_reason = "cancelled"

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round for all live rows; gives each one's newly settled tokens."""
        if not self.live:
            return []
        self._shrink()
        rows = self._rows
        tail = last_two([row.text for row in rows], self.device)
        windows = [min(self.num_draft_tokens, row.remaining - 1) if row.live else 0 for row in rows]
        noise = self._round_noise(max(windows) + 1)
        self.timer.lap("rest")
        draft = self._propose(tail, windows, noise)
        self.timer.lap("draft")
        output = self._verify(tail, draft)
        self.timer.lap("verify")
        if noise is not None:  # of fewer positions, where nobody guessed as much as was allowed
            noise = noise[:, : draft.tokens.shape[1] + 1]
        verdict = self.rule.judge(draft, output.logits, self.sampling, noise)
        values = self._read(draft, verdict, output)
        self.timer.lap("accept")
        events, num_accepted = self._settle(values, draft)
        self.drafter.observe(self._draft_state, output, num_accepted)
        self.timer.lap("rest")
        return events

    def result(self) -> DecodeResult:
        """The outcome so far of all rows that were ever added, in their order."""
        return DecodeResult(
            rows=[row.result() for row in self._added],
            seconds=self.timer.elapsed(),
            phase_seconds=self.timer.seconds(),
            num_target_calls=self.num_target_calls,
            peak_memory_bytes=peak_memory_bytes(self.device),
            lossless=self.rule.lossless,
            num_draft_calls=self.num_draft_calls,
            num_draft_tokens=self.num_draft_tokens,
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
            empty = torch.empty(len(windows), 0, self.target.vocab_size, device=self.device)
            return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=self.device), logits=empty)
        context = Context(
            texts=[row.text for row in self._rows],
            tail=tail,
            uniform=None if noise is None else noise[:, :num_guesses, self.rule.draft_purpose],
            wants_logits=self.rule.needs_draft_logits,
        )
        draft = self.drafter.propose(self._draft_state, context, windows, self.sampling)
        self.num_draft_calls += draft.num_calls
        return draft

    def _verify(self, tail: Tensor, draft: Draft) -> ModelOutput:
        """The target reads what it has not seen of each text, and the guesses; logits of the K + 1 last positions."""
        self.num_target_calls += 1
        state, texts, num_guesses = self._target_state, [row.text for row in self._rows], draft.tokens.shape[1]
        starts = [min(length, len(text) - 1) for length, text in zip(state.consumed, texts, strict=True)]
        state.truncate(starts)
        state.commit(starts)
        unread = [text[start:] for start, text in zip(starts, texts, strict=True)]
        tokens, num_unread = (tail[:, 1:], None) if all(len(each) == 1 for each in unread) else pad(unread, self.device)
        if num_unread is None:
            tokens = torch.cat((tokens, draft.tokens), dim=1)
            return self.target(tokens, state, logits_for=slice(-num_guesses - 1, None))
        first = torch.tensor([[length] for length in num_unread], device=self.device)
        places = first + torch.arange(num_guesses + 1, device=self.device)
        tokens = torch.nn.functional.pad(tokens, (0, num_guesses)).scatter(1, places[:, :-1], draft.tokens)
        valid_lengths = [length + num_guesses for length in num_unread]
        return self.target(tokens, state, valid_lengths=valid_lengths, logits_for=places - 1)

    def _read(self, draft: Draft, verdict: Verdict, output: ModelOutput) -> list[list[Any]]:
        """The round's only read of the device: all that the host wants to know of it, in one tensor."""
        columns = [verdict.kept, verdict.endings, draft.tokens]
        if draft.lengths is not None:
            columns.append(draft.lengths[:, None])
        if verdict.changed is not None:
            columns.append(verdict.changed)
        if self.logprobs:
            # float64 holds the integers beside them exactly.
            columns.append(Sampling.log_probs(output.logits[:, :-1], draft.tokens).double())
            columns.append(Sampling.log_probs(output.logits, verdict.endings).double())
        return torch.cat(columns, dim=1).tolist()

    def _settle(self, values: list[list[Any]], draft: Draft) -> tuple[list[tuple[Row, list[int]]], list[int]]:
        """Give every live row what its verdict kept; `values` as `_read` lays them out."""
        seconds, num_guesses = self.timer.elapsed(), draft.tokens.shape[1]
        events, counts = [], []
        for row, numbers in zip(self._rows, values, strict=True):
            num_accepted = next((i for i in range(num_guesses) if not numbers[i]), num_guesses)
            counts.append(num_accepted if row.live else 0)
            if not row.live:
                continue
            logprobs = None
            if self.logprobs:
                numbers, scores = numbers[: -2 * num_guesses - 1], numbers[-2 * num_guesses - 1 :]
                logprobs = [*scores[:num_accepted], scores[num_guesses + num_accepted]]
                numbers = [int(number) for number in numbers]
            ending = check_drawn(numbers[num_guesses + num_accepted], self.target.vocab_size)
            drafted, changed = numbers[2 * num_guesses + 1 : 3 * num_guesses + 1], numbers[3 * num_guesses + 1 :]
            if draft.lengths is not None:
                length, *changed = changed
                drafted, changed = drafted[:length], changed[:length]
            added = row.settle(drafted, num_accepted, ending, seconds=seconds, changed=changed, logprobs=logprobs)
            events.append((row, added))
        return events, counts

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

"""Counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from lightning_specdec.decoding import Request
from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.serve.engine import DraftName, Engine, EngineObserver, Generation

PREFIX = "lightning_specdec"
SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets of waiting times."""
SWAP_OUTCOMES = ("swapped", "swapped_back", "refused")
"""What may become of a changed file of the draft."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Upper ends of the buckets of acceptance lengths."""


class Metrics(EngineObserver):
    """What the server counts, in a registry per server: a process may hold several.

    Args:
        draft: the draft that the server begins with.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, draft: DraftName) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}_requests", "HTTP requests", ["path", "status"], registry=registry
        )
        self.generations = Counter(
            f"{PREFIX}_generations", "answers by how they ended", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens", "tokens of prompts", registry=registry
        )
        self.cached_tokens = Counter(
            f"{PREFIX}_cached_prompt_tokens",
            "tokens of prompts that were not read, since an earlier request had the same prefix",
            registry=registry,
        )
        self.new_tokens = Counter(f"{PREFIX}_new_tokens", "tokens of answers", registry=registry)
        self.draft_tokens = Counter(
            f"{PREFIX}_draft_tokens",
            "draft tokens by their position in the round",
            ["position"],
            registry=registry,
        )
        self.accepted_tokens = Counter(
            f"{PREFIX}_accepted_tokens",
            "accepted draft tokens by their position in the round",
            ["position"],
            registry=registry,
        )
        self.acceptance_length = Histogram(
            f"{PREFIX}_acceptance_length",
            "tokens of an answer in each round",
            buckets=LENGTHS,
            registry=registry,
        )
        self.swaps = Counter(
            f"{PREFIX}_draft_swaps",
            "drafts that were swapped in, swapped back, or refused",
            ["outcome"],
            registry=registry,
        )
        for outcome in SWAP_OUTCOMES:
            self.swaps.labels(outcome)
        self._draft = draft
        self._draft_info = Info(f"{PREFIX}_draft", "the draft in use", registry=registry)
        self.draft_rounds = Counter(
            f"{PREFIX}_rounds_by_draft",
            "rounds of a request in which the draft itself made the draft tokens",
            ["draft"],
            registry=registry,
        )
        self.draft_accepted = Counter(
            f"{PREFIX}_accepted_tokens_by_draft",
            "accepted draft tokens of these rounds",
            ["draft"],
            registry=registry,
        )
        self.replaced(draft)
        self.first_token_seconds = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "seconds from a request to its first token, waiting included",
            buckets=SECONDS,
            registry=registry,
        )
        self._waiting = Gauge(f"{PREFIX}_requests_waiting", "answers that wait", registry=registry)
        self._live = Gauge(
            f"{PREFIX}_requests_running", "answers that are being decoded", registry=registry
        )

    def watch(self, engine: Engine) -> None:
        """Read the lengths of the engine's queue and batch whenever metrics are requested."""
        self._waiting.set_function(lambda: engine.num_waiting)
        self._live.set_function(lambda: engine.num_live)

    def text(self) -> bytes:
        """All metrics in the format of Prometheus."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        self.first_token_seconds.observe(seconds)

    def round(self, row: Request, num_new: int) -> None:
        self.new_tokens.inc(num_new)
        self.acceptance_length.observe(num_new)
        last_round = row.rounds[-1]
        for position in range(len(last_round.drafted)):
            self.draft_tokens.labels(position).inc()
        for position in range(last_round.num_accepted):
            self.accepted_tokens.labels(position).inc()

    def drafted(self, outcome: Outcome) -> None:
        if outcome.num_requested and not (outcome.is_forced or outcome.is_copied):
            self.draft_rounds.labels(self._draft.label).inc()
            self.draft_accepted.labels(self._draft.label).inc(outcome.num_accepted)

    def replaced(self, drafter: DraftName) -> None:
        self._draft = drafter
        self._draft_info.info({"draft": drafter.label, "kind": drafter.kind})

    def forget_draft(self, name: DraftName) -> None:
        """Remove the series of a draft that is neither in use nor compared with the one in use."""
        for counter in (self.draft_rounds, self.draft_accepted):
            # A series that does not exist cannot be removed.
            counter.labels(name.label)
            counter.remove(name.label)

    def ended(self, generation: Generation, reason: str) -> None:
        self.generations.labels(reason).inc()
        self.prompt_tokens.inc(len(generation.prompt))
        self.cached_tokens.inc(generation.num_cached)

"""Is a running server's output the target's? Checks an engine by its answers alone.

Greedy answers are judged token by token. Sampled answers are tested against the distributions that
the target and the sampling give. Before that, prompts, templates, and stops of both sides are
compared, so that a difference there is not taken for a wrong engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lightning_specdec.audit.engine_client import (
    EngineAnswer,
    EngineClient,
    EngineError,
    RefusalError,
)
from lightning_specdec.audit.engine_metrics import DraftCounts, read_draft_counts
from lightning_specdec.audit.reference import JudgedAnswer, Reference
from lightning_specdec.audit.token_law import LawReport, TokenScores, examine
from lightning_specdec.bench.statistics import piece_interval
from lightning_specdec.bench.verdict import Verdict, judge
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling
from lightning_specdec.text.tokenizer import Tokenizer

OTHER_MODEL_SHARE = 0.5
"""With more wrong tokens than this, the engine probably serves another model."""
MAX_SEED = 2**31
"""Seeds of all engines are below this."""
SEED_STEP = 1_000_003
"""A prime: the seeds of two audits rarely overlap."""
FEW_TOKENS = 8
"""Tokens of the prompt that asks whether the engine takes tokens."""
CHAT: tuple[dict[str, str], ...] = ({"role": "user", "content": "What is speculative decoding?"},)
"""A chat whose tokens are compared on both sides."""

IDS = "ids reported by the engine"
TEXTS = "texts of the tokens in the log probabilities"
RETOKENIZED = "the answer's text, encoded again"


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt: its tokens, and its text if it has one."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True)
class WrongToken:
    """A token that the target does not choose, or cannot draw.

    Args:
        prompt: index of the prompt.
        position: index of the new token.
        token: the engine's.
        text: its text.
        best_token, best_text: the target's most likely token; None in a sampled answer.
        gap: difference of the two logits.
        bound: how much of that the engine's rounding explains.
    """

    prompt: int
    position: int
    token: int
    text: str
    best_token: int | None = None
    best_text: str | None = None
    gap: float | None = None
    bound: float | None = None


@dataclass
class GreedyFindings:
    """The tokens of all greedy answers."""

    num_answers: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    num_near_ties: int = 0
    largest_near_tie: float = 0.0
    wrong_tokens: list[WrongToken] = field(default_factory=list)

    def add(self, judged: JudgedAnswer, wrong_tokens: Sequence[WrongToken]) -> None:
        """Count the tokens of an answer."""
        self.num_answers += 1
        self.num_tokens += len(judged.gaps)
        self.num_equal += judged.num_equal
        for gap, bound in zip(judged.gaps, judged.bounds, strict=True):
            if 0 < gap <= bound:
                self.num_near_ties += 1
                self.largest_near_tie = max(self.largest_near_tie, gap)
        self.wrong_tokens += wrong_tokens

    @property
    def failed(self) -> bool:
        """Whether a token is wrong."""
        return bool(self.wrong_tokens)

    @property
    def looks_like_another_model(self) -> bool:
        """Whether so many tokens are wrong that the weights probably differ."""
        return len(self.wrong_tokens) > OTHER_MODEL_SHARE * self.num_tokens


@dataclass
class SampledFindings:
    """The tokens of all sampled answers.

    Args:
        law: the tests.
        num_border: tokens at the border of the support, which are not tested.
        outside: tokens that the sampling cannot draw.
    """

    num_answers: int
    law: LawReport
    num_border: int
    outside: list[WrongToken]

    @property
    def failed(self) -> bool:
        """Whether a test failed, or a token cannot be drawn."""
        return self.law.failed or bool(self.outside)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of the engine and of another one, for the same prompts in alternation."""

    tokens_per_second: float
    baseline_tokens_per_second: float
    verdict: Verdict


@dataclass
class EngineFindings:
    """Everything that an audit found.

    Args:
        token_source: how the token ids were obtained.
        prompts_as_tokens: whether the engine takes prompts as tokens.
        template: how the chat templates compare.
        warnings: what limits the findings, a line each.
        acceptance: of the whole audit; None if the engine does not report it.
        acceptance_source: where that comes from.
    """

    address: str
    model: str
    kind: str
    token_source: str = ""
    prompts_as_tokens: bool = True
    template: str = ""
    warnings: list[str] = field(default_factory=list)
    greedy: GreedyFindings = field(default_factory=GreedyFindings)
    sampled: SampledFindings | None = None
    acceptance: DraftCounts | None = None
    acceptance_source: str = ""
    speed: Speed | None = None

    @property
    def failed(self) -> bool:
        """Whether the output is not the target's."""
        return self.greedy.failed or (self.sampled is not None and self.sampled.failed)

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        if text not in self.warnings:
            self.warnings.append(text)


class EngineAuditor:
    """Audits one engine.

    Args:
        client: asks the engine.
        target: the model that the engine should serve, in float32.
        tokenizer: the target's; None if it has none.
        prompts: asked greedily once each, and sampled in turn, always with another seed.
        sampling: of the sampled answers; at temperature 0 there are none.
        engine_dtype: what the engine computes in.
        num_prompts: greedy requests at most, and sampled requests.
        max_new_tokens: most new tokens of an answer.
        seed: decides the seeds of all requests.
        num_clients: requests at a time.
        baseline: another engine to compare the speed with.

    Raises:
        ValueError: there is no prompt, or the target has no room for the answers.
    """

    def __init__(
        self,
        client: EngineClient,
        target: LanguageModel,
        tokenizer: Tokenizer | None,
        prompts: Sequence[EnginePrompt],
        *,
        sampling: Sampling,
        engine_dtype: str = "bfloat16",
        num_prompts: int = 64,
        max_new_tokens: int = 160,
        seed: int = 0,
        num_clients: int = 4,
        baseline: EngineClient | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("there is no prompt to ask the engine")
        if sampling.min_p or sampling.processors:
            raise ValueError("an engine is audited with temperature, top_k and top_p only")
        self.client = client
        self.target = target
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.sampling = sampling
        self.num_prompts = num_prompts
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.num_clients = num_clients
        self.baseline = baseline
        self.reference = Reference(target, engine_dtype)
        self.eos = sorted(tokenizer.eos) if tokenizer is not None else []
        self.findings = EngineFindings(client.address, client.model, client.kind)
        self._answers: list[EngineAnswer] = []
        self._num_other_texts = 0

    def run(self, tell: Callable[[str], None] = lambda text: None) -> EngineFindings:
        """Run all checks.

        Args:
            tell: called with a line of text before each step.

        Raises:
            ValueError: the engine cannot be audited; the message says why.
        """
        tell("comparing prompts and templates ...")
        self._probe()
        self._compare_templates()
        counts_before = self._draft_counts()

        self._check_greedy(tell)
        if not self.sampling.greedy:
            self._check_sampled(tell)
        self._measure_acceptance(counts_before)
        if self.client.refused_fields:
            names = ", ".join(self.client.refused_fields)
            self.findings.warn(f"the engine does not know {names}: its own defaults apply")
        return self.findings

    # What both sides have in common

    def _probe(self) -> None:
        """Choose the prompts by what the engine takes, and find out what it reports."""
        if not self._takes_tokens():
            self._use_texts()
        # A text has other tokens than its chat, so its length is known only now.
        self._choose_prompts()
        answer = self._probe_lengths()
        if answer.tokens is not None:
            self.findings.token_source = IDS
            return
        self._require_tokenizer("reports no token ids")
        self.client.asks_logprobs = True
        try:
            answer = self._ask_short(self.prompts[0])
        except RefusalError:
            self.client.asks_logprobs = False
        if answer.tokens is not None:
            self.findings.token_source = IDS
        elif answer.token_texts is not None:
            self.findings.token_source = TEXTS
        else:
            self.client.asks_logprobs = False
            self.findings.token_source = RETOKENIZED
            self.findings.warn(
                "the engine reports neither token ids nor log probabilities: its tokens are taken "
                "from the answers' texts. A sampled answer may be spelled with other tokens, so a "
                "failed sampled check proves nothing"
            )

    def _takes_tokens(self) -> bool:
        """Whether prompts may be tokens. It is asked with few, which fit every context."""
        beginning = EnginePrompt(self.prompts[0].tokens[:FEW_TOKENS])
        try:
            self._ask_short(beginning)
        except RefusalError as error:
            if error.status not in (400, 422):
                raise
            self._require_tokenizer(f"takes no tokens as prompts ({error.reason[:100]})")
            return False
        return True

    def _probe_lengths(self) -> EngineAnswer:
        """A short answer to the first prompt, whose length both sides must count alike."""
        answer = self._ask_short(self.prompts[0])
        num_expected = len(self.prompts[0].tokens)
        if answer.num_prompt_tokens is None:
            self.findings.warn("the engine does not report the number of prompt tokens")
        elif answer.num_prompt_tokens != num_expected:
            raise EngineError(
                f"{self.client.address} reads {answer.num_prompt_tokens} tokens of a prompt that "
                f"has {num_expected} for the target: it has another tokenizer, or adds tokens"
            )
        return answer

    def _use_texts(self) -> None:
        """Send texts as they are, without a chat template, from now on."""
        assert self.tokenizer is not None
        prompts = []
        for prompt in self.prompts:
            if prompt.text is not None:
                tokens = self.tokenizer.encode(prompt.text)
                prompts.append(EnginePrompt(tokens, prompt.text))
        if not prompts:
            raise EngineError(
                f"{self.client.address} takes no tokens as prompts, and the prompts have no text"
            )
        self.prompts = prompts
        self.findings.prompts_as_tokens = False

    def _require_tokenizer(self, reason: str) -> None:
        if self.tokenizer is None:
            raise EngineError(f"{self.client.address} {reason}, and the target has no tokenizer")

    def _ask_short(self, prompt: EnginePrompt) -> EngineAnswer:
        return self._ask(self.client, prompt, Sampling(), seed=0, max_new_tokens=4)

    def _choose_prompts(self) -> None:
        """Take the first prompts that, with their answers, fit the target's context, and do not
        cross its position switch.

        Raises:
            ValueError: no prompt is left.
        """
        limit = self.target.max_positions
        longest = math.inf if limit is None else limit - self.max_new_tokens
        fitting = []
        for prompt in self.prompts:
            num_tokens = len(prompt.tokens)
            is_crossing = self.target.crosses_switch(num_tokens, self.max_new_tokens)
            if num_tokens <= longest and not is_crossing:
                fitting.append(prompt)
        num_left_out = len(self.prompts) - len(fitting)
        bounds = f"the target's context of {limit}"
        if self.target.position_switch is not None:
            bounds = f"{bounds} and its position switch at {self.target.position_switch}"
        if not fitting:
            raise ValueError(
                f"no prompt fits {bounds} with {self.max_new_tokens} new "
                "tokens: give fewer --max_new_tokens or other prompts"
            )
        if num_left_out:
            self.findings.warn(
                f"{num_left_out} prompts are left out: with their answers, they exceed {bounds}"
            )
        self.prompts = fitting[: self.num_prompts]

    def _compare_templates(self) -> None:
        """Compare the tokens of a chat on both sides. A difference is a warning only, since the
        prompts of the checks do not depend on the engine's template."""
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            return
        own_tokens = self.tokenizer.encode_chat(CHAT)
        tokens = self.client.tokenize_chat(CHAT)
        if tokens is not None:
            is_equal = tokens == own_tokens
            words = "the same tokens" if is_equal else "other tokens"
        else:
            length = self.client.chat_length(CHAT)
            if length is None:
                self.findings.template = "not compared: the engine does not report a chat's tokens"
                return
            is_equal = length == len(own_tokens)
            words = "the same number of tokens"
            if not is_equal:
                words = f"{length} tokens where the target's template gives {len(own_tokens)}"
        self.findings.template = words
        if not is_equal:
            self.findings.warn(
                f"the engine's chat template gives {words}: chats there differ from the target's, "
                "whatever the checks below say"
            )

    # Answers

    def _ask(
        self,
        client: EngineClient,
        prompt: EnginePrompt,
        sampling: Sampling,
        *,
        seed: int,
        max_new_tokens: int | None = None,
    ) -> EngineAnswer:
        content: list[int] | str = prompt.tokens
        if not self.findings.prompts_as_tokens:
            assert prompt.text is not None
            content = prompt.text
        return client.complete(
            content,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            sampling=sampling,
            seed=seed,
        )

    def _ask_all(
        self,
        prompts: Sequence[EnginePrompt],
        sampling: Sampling,
        watch: Callable[[int], None],
    ) -> list[EngineAnswer]:
        """The answers to prompts, each with a separate seed, several requests at a time."""

        def ask(number: int) -> EngineAnswer:
            seed = (self.seed * SEED_STEP + number) % MAX_SEED
            return self._ask(self.client, prompts[number], sampling, seed=seed)

        answers = []
        pool = ThreadPoolExecutor(self.num_clients)
        try:
            for number, answer in enumerate(pool.map(ask, range(len(prompts)))):
                answers.append(answer)
                watch(number + 1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._answers += answers
        return answers

    def _tokens_of(
        self, prompt_number: int, prompt: EnginePrompt, answer: EngineAnswer
    ) -> list[int]:
        """The tokens of an answer, with the EOS that ended it; empty if they are not known."""
        where = f"prompt {prompt_number + 1}"
        num_prompt_tokens = answer.num_prompt_tokens
        if num_prompt_tokens is not None and num_prompt_tokens != len(prompt.tokens):
            raise EngineError(
                f"{self.client.address} reads {num_prompt_tokens} tokens of {where}, which has "
                f"{len(prompt.tokens)} for the target"
            )
        tokens = answer.tokens
        if tokens is None:
            tokens = self._recovered_tokens(answer)
        if tokens is None:
            self.findings.warn(
                "some answers are left out, since their texts do not tell their tokens"
            )
            return []
        self._check_tokens(tokens, answer)
        return self._with_stop(where, prompt, tokens, answer)

    def _recovered_tokens(self, answer: EngineAnswer) -> list[int] | None:
        """Tokens from their texts, or from the text of the answer; None if they are not known."""
        assert self.tokenizer is not None
        if answer.token_texts is not None:
            tokens = tokens_of_texts(self.tokenizer, answer.token_texts)
            if tokens is not None:
                return tokens
            self.findings.warn(
                "the texts of some tokens are ambiguous, so these answers were encoded again: "
                "their tokens may differ from those of the engine"
            )
        tokens = self.tokenizer.encode_plain(answer.text)
        if self.tokenizer.decode(tokens) != answer.text:
            return None
        # The EOS is counted by some engines, and has no text.
        num_expected = answer.num_new_tokens
        if num_expected is not None and num_expected - len(tokens) not in (0, 1):
            return None
        return tokens

    def _check_tokens(self, tokens: Sequence[int], answer: EngineAnswer) -> None:
        """Raise EngineError for tokens of another vocabulary."""
        if any(token >= self.target.vocab_size for token in tokens):
            raise EngineError(
                f"{self.client.address} answers with the token {max(tokens)}, and the target has "
                f"{self.target.vocab_size}: it serves another model"
            )
        if self.tokenizer is None:
            return
        # Engines differ in the spaces around a text.
        own_text = self.tokenizer.decode(tokens)
        if own_text.strip() != answer.text.strip():
            self._num_other_texts += 1
            num_checked = len(self._answers)
            if self._num_other_texts > OTHER_MODEL_SHARE * num_checked:
                raise EngineError(
                    f"{self.client.address} spells its tokens as {answer.text.strip()[:40]!r}, and "
                    f"the target's tokenizer as {own_text.strip()[:40]!r}: it serves another model"
                )
            self.findings.warn("some answers have other texts than their tokens")

    def _with_stop(
        self,
        where: str,
        prompt: EnginePrompt,
        tokens: list[int],
        answer: EngineAnswer,
    ) -> list[int]:
        """The tokens up to the first EOS, which is added if the engine does not report it."""
        for position, token in enumerate(tokens):
            if token in self.eos:
                if position < len(tokens) - 1:
                    self.findings.warn(
                        f"{where}: the engine goes on after EOS ({token}); the rest is left out"
                    )
                return tokens[: position + 1]
        if answer.finish_reason == "stop":
            if not self.eos:
                self.findings.warn(f"{where}: the engine stops, and the target has no EOS")
                return tokens
            # Among several, the likeliest one is taken for the one that was generated.
            eos = self.eos[0]
            if len(self.eos) > 1:
                eos = self.reference.likeliest([*prompt.tokens, *tokens], self.eos)
            return [*tokens, eos]
        if len(tokens) < self.max_new_tokens:
            self.findings.warn(
                f"{where}: the engine ends after {len(tokens)} of {self.max_new_tokens} tokens "
                f"({answer.finish_reason})"
            )
        return tokens

    # Checks

    def _check_greedy(self, tell: Callable[[str], None]) -> None:
        """Ask each prompt once at temperature 0, and judge all tokens."""
        prompts = self.prompts
        if self.baseline is None:
            answers = self._ask_all(
                prompts, Sampling(), lambda done: tell(f"greedy: {done} of {len(prompts)}")
            )
        else:
            answers = self._race(prompts, self.baseline, tell)

        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tell(f"judging greedy answers: {number + 1} of {len(prompts)}")
            tokens = self._tokens_of(number, prompt, answer)
            if tokens:
                judged = self.reference.judge(prompt.tokens, tokens)
                wrong_tokens = self._wrong_tokens(number, tokens, judged)
                self.findings.greedy.add(judged, wrong_tokens)
        if not self.findings.greedy.num_tokens:
            raise EngineError(
                f"{self.client.address} reports no tokens, and its texts do not tell them: start "
                "it with token ids or log probabilities"
            )

    def _race(
        self,
        prompts: Sequence[EnginePrompt],
        baseline: EngineClient,
        tell: Callable[[str], None],
    ) -> list[EngineAnswer]:
        """The greedy answers, one at a time, in alternation with those of the other engine."""
        # The first request is slower in many engines.
        self._ask(baseline, prompts[0], Sampling(), seed=0, max_new_tokens=4)

        answers = []
        pairs = []
        totals = [[0, 0.0], [0, 0.0]]
        for number, prompt in enumerate(prompts):
            tell(f"greedy, with both engines: {number + 1} of {len(prompts)}")
            # Who comes first changes, so that a drift of the machine favors neither.
            clients = [self.client, baseline]
            if number % 2:
                clients.reverse()
            answer_by_client = {}
            for client in clients:
                answer_by_client[client] = self._ask(client, prompt, Sampling(), seed=number)
            answers.append(answer_by_client[self.client])

            # Texts may differ at near-ties, so seconds are compared per token.
            seconds_per_token = []
            for total, client in zip(totals, (self.client, baseline), strict=True):
                num_tokens = _num_new_tokens(answer_by_client[client])
                total[0] += num_tokens
                total[1] += answer_by_client[client].seconds
                seconds_per_token.append(answer_by_client[client].seconds / max(num_tokens, 1))
            pairs.append((seconds_per_token[1], seconds_per_token[0]))

        self._answers += answers
        self.findings.speed = Speed(
            tokens_per_second=totals[0][0] / totals[0][1],
            baseline_tokens_per_second=totals[1][0] / totals[1][1],
            verdict=judge(piece_interval(pairs), len(pairs)),
        )
        return answers

    def _wrong_tokens(
        self,
        number: int,
        tokens: Sequence[int],
        judged: JudgedAnswer,
    ) -> list[WrongToken]:
        wrong_tokens = []
        for position in judged.wrong_positions:
            best_token = judged.best_tokens[position]
            wrong_tokens.append(
                WrongToken(
                    prompt=number,
                    position=position,
                    token=tokens[position],
                    text=self._text_of(tokens[position]),
                    best_token=best_token,
                    best_text=self._text_of(best_token),
                    gap=judged.gaps[position],
                    bound=judged.bounds[position],
                )
            )
        return wrong_tokens

    def _text_of(self, token: int) -> str:
        return token_text(self.tokenizer, token)

    def _check_sampled(self, tell: Callable[[str], None]) -> None:
        """Ask with other seeds at the sampling, and test all tokens."""
        prompts = [self.prompts[i % len(self.prompts)] for i in range(self.num_prompts)]
        answers = self._ask_all(
            prompts, self.sampling, lambda done: tell(f"sampled: {done} of {len(prompts)}")
        )
        parts = []
        outside = []
        num_border = 0
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tell(f"scoring sampled answers: {number + 1} of {len(prompts)}")
            tokens = self._tokens_of(number % len(self.prompts), prompt, answer)
            if not tokens:
                continue
            scored = self.reference.score(prompt.tokens, tokens, self.sampling)
            parts.append(scored.scores)
            num_border += len(scored.border_positions)
            for position in scored.outside_positions:
                token = tokens[position]
                prompt_number = number % len(self.prompts)
                outside.append(WrongToken(prompt_number, position, token, self._text_of(token)))

        law = examine(TokenScores.join(parts), seed=self.seed)
        self.findings.sampled = SampledFindings(len(parts), law, num_border, outside)
        if not law.has_power:
            self.findings.warn(
                "the sampled check has too few uncertain tokens: give more --num_prompts, or a "
                "higher --temperature"
            )

    # Acceptance

    def _draft_counts(self) -> DraftCounts | None:
        text = self.client.metrics()
        return None if text is None else read_draft_counts(text)

    def _measure_acceptance(self, before: DraftCounts | None) -> None:
        """What the engine reports about its drafts, in its metrics or else in its answers."""
        later_counts = self._draft_counts()
        if before is not None and later_counts is not None:
            self.findings.acceptance = later_counts.since(before)
            self.findings.acceptance_source = "/metrics, requests of others included"
            return
        drafted = [answer for answer in self._answers if answer.num_drafted]
        if not drafted:
            return
        num_accepted = sum(answer.num_accepted or 0 for answer in drafted)
        num_new_tokens = sum(_num_new_tokens(answer) for answer in drafted)
        self.findings.acceptance = DraftCounts(
            # Every round ends with a token that is not a draft token.
            num_rounds=num_new_tokens - num_accepted,
            num_drafted=sum(answer.num_drafted or 0 for answer in drafted),
            num_accepted=num_accepted,
            num_new_tokens=num_new_tokens,
        )
        self.findings.acceptance_source = "the answers"


def _num_new_tokens(answer: EngineAnswer) -> int:
    if answer.num_new_tokens is not None:
        return answer.num_new_tokens
    return len(answer.tokens or answer.token_texts or ())


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text, or the name of a special token."""
    if tokenizer is None:
        return str(token)
    vocabulary = tokenizer.vocabulary
    token_bytes = None
    if token < len(vocabulary.token_bytes):
        token_bytes = vocabulary.token_bytes[token]
    if token_bytes is not None:
        return token_bytes.decode("utf-8", "replace")
    names = [name for name, special in vocabulary.special.items() if special == token]
    # Names of roles, such as "eos", come before the token's own text.
    return names[-1] if names else f"<token {token}>"


def tokens_of_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int] | None:
    """The tokens with these texts; None if a text is that of several tokens, or of none."""
    by_text: dict[str, list[int]] = {}
    for token, token_bytes in enumerate(tokenizer.vocabulary.token_bytes):
        if token_bytes is not None:
            by_text.setdefault(token_bytes.decode("utf-8", "replace"), []).append(token)
    for name, token in tokenizer.vocabulary.special.items():
        by_text.setdefault(name, [token])

    tokens = []
    for text in texts:
        candidates = by_text.get(text, [])
        if len(candidates) != 1:
            return None
        tokens.append(candidates[0])
    return tokens

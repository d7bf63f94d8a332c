"""From a request to the generations that answer it: text to tokens, defaults, and limits."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_specdec.decoding.requests import check_eos
from lightning_specdec.rules import Grammar, LogitBias, PresencePenalty
from lightning_specdec.rules.grammar import NUM_CACHED_GRAMMARS
from lightning_specdec.serve.answers import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    TokenNames,
    ToolFormat,
)
from lightning_specdec.serve.engine import Engine, Generation
from lightning_specdec.serve.grammar_trial import MAX_GRAMMAR_BYTES, TooManyTrialsError, try_grammar
from lightning_specdec.serve.protocol import (
    DEFAULT_MAX_TOKENS,
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
)
from lightning_specdec.serve.structured import ToolUse, requested_grammar, tool_use
from lightning_specdec.text.grammar import library_grammar, shown_error, title_of
from lightning_specdec.text.tokenizer import Tokenizer

MAX_GRAMMAR_SECONDS = 0.2
"""Processor time that a grammar may take for one position of a row, while all other rows wait."""


@dataclass
class Job:
    """The generations of one request, checked but not submitted, and the shape of its answer.

    Generations are ordered by their choices. They have no listeners yet.
    """

    request: CommonRequest
    generations: list[Generation]
    format: AnswerFormat
    num_prompt_tokens: int

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose state came from earlier requests."""
        return sum(generation.num_cached for generation in self.generations)


class Service:
    """Turns requests into jobs. Its methods may be called from any thread.

    Args:
        engine: decodes.
        tokenizer: the model's.
        model_name: the model's name in requests and answers.
        records: whether requests and answers are recorded.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        records: bool = False,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.records = records
        self.names = TokenNames(tokenizer.vocabulary)
        # Tokenizers of transformers may not be called by two threads at once.
        self._tokenizer_lock = threading.Lock()
        self._tried: set[Grammar] = set()

    def chat(self, request: ChatRequest) -> Job:
        """The job of a chat's next turn.

        Raises:
            ApiError: the chat template refuses the messages, or a limit is exceeded.
        """
        self._check_model(request.model)
        if not self.tokenizer.has_chat_template:
            raise ApiError("the model has no chat template: use /v1/completions", param="messages")
        template = self.tokenizer.template_for_tools
        use = tool_use(request, template)
        variables = dict(request.chat_template_kwargs or {})
        if use is not None and template is not None:
            variables["tools"] = [dict(tool) for tool in request.tools]
        try:
            with self._tokenizer_lock:
                prompt = self.tokenizer.encode_chat(request.turns(), chat_template_kwargs=variables)
        except ValueError as error:
            message = str(error)
            raise ApiError(message, param=_field_of(message, "messages")) from None

        max_new_tokens = request.max_completion_tokens or request.max_tokens
        if max_new_tokens is None:
            max_new_tokens = self._room_after(prompt)
        num_top_logprobs = request.top_logprobs or 0
        format_options = {
            "with_scores": request.logprobs,
            "with_tokens": request.return_token_ids,
        }
        answer_format = ChatFormat(self.model_name, self.names, **format_options)
        if use is not None:
            answer_format = ToolFormat(self.model_name, self.names, use, **format_options)
        return self._job(
            request,
            [prompt],
            answer_format,
            self._grammar(request, use),
            max_new_tokens=max_new_tokens,
            num_top_logprobs=num_top_logprobs,
            prompt_field="messages",
        )

    def completion(self, request: CompletionRequest) -> Job:
        """The job that continues texts.

        Raises:
            ApiError: a prompt has tokens that the model lacks, or a limit is exceeded.
        """
        self._check_model(request.model)
        prompts: list[list[int]] = []
        for prompt in request.prompts():
            if isinstance(prompt, str):
                with self._tokenizer_lock:
                    prompts.append(self.tokenizer.encode(prompt))
            else:
                prompts.append(prompt)

        with_scores = request.logprobs is not None
        answer_format = CompletionFormat(
            self.model_name,
            self.names,
            with_scores=with_scores,
            with_tokens=request.return_token_ids,
        )
        return self._job(
            request,
            prompts,
            answer_format,
            self._grammar(request, None),
            max_new_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            num_top_logprobs=request.logprobs or 0,
            prompt_field="prompt",
        )

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.model_name:
            raise ApiError(
                f"there is no model {model!r}: this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _job(
        self,
        request: CommonRequest,
        prompts: Sequence[list[int]],
        answer_format: AnswerFormat,
        grammar: Grammar | None,
        *,
        max_new_tokens: int,
        num_top_logprobs: int,
        prompt_field: str,
    ) -> Job:
        """The generations of all choices: `n` for each prompt."""
        if request.store and not self.records:
            raise ApiError("this server stores nothing: leave store out", param="store")
        num_choices = len(prompts) * request.n
        capacity = self.engine.max_batch_size + self.engine.max_queue
        if num_choices > capacity:
            raise ApiError(
                f"{num_choices} choices exceed this server's limit of {capacity}", param="n"
            )

        # Without a seed, equal requests get different answers.
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
        changes = request.sampling_changes()
        changes["seed"] = seed
        changes["logprobs"] = answer_format.with_scores

        generations: list[Generation] = []
        for prompt in prompts:
            self._check_length(prompt, max_new_tokens, prompt_field)
            prompt_changes = {**changes, **self._processors(request, len(prompt), grammar)}
            for _ in range(request.n):
                generations.append(
                    Generation(
                        prompt,
                        max_new_tokens,
                        index=len(generations),
                        changes=prompt_changes,
                        num_top_logprobs=num_top_logprobs,
                        may_record=request.store is not False,
                    )
                )
        for generation in generations[:: request.n]:
            try:
                self.engine.check(generation)
            except ValueError as error:
                raise ApiError(str(error), param=_field_of(str(error), prompt_field)) from None
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        return Job(request, generations, answer_format, num_prompt_tokens)

    def _room_after(self, prompt: Sequence[int]) -> int:
        """Most new tokens of an answer for which the request names no number; at least one."""
        num_free = self.engine.max_length - len(prompt)
        room = self.engine.target.room_after(len(prompt))
        if room is not None:
            num_free = min(num_free, room)
        return max(1, num_free)

    def _check_length(self, prompt: Sequence[int], max_new_tokens: int, prompt_field: str) -> None:
        if len(prompt) + max_new_tokens > self.engine.max_length:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens and {max_new_tokens} new ones are requested: "
                f"together they exceed the limit of {self.engine.max_length}",
                param=prompt_field,
                code="context_length_exceeded",
            )

    def _grammar(self, request: CommonRequest, use: ToolUse | None) -> Grammar | None:
        """The grammar of a request, which the library has compiled; None without one.

        Raises:
            ApiError: the grammar is refused.
        """
        requested = requested_grammar(request)
        param = "tools"
        grammar = None if use is None else use.grammar
        if requested is not None:
            if use is not None:
                raise ApiError("tools and a grammar exclude each other", param=requested[1])
            grammar, param = requested
        if grammar is None:
            return None
        if request.ignore_eos:
            raise ApiError(f"ignore_eos and {param} exclude each other", param="ignore_eos")
        grammar = replace(grammar, max_seconds=MAX_GRAMMAR_SECONDS)
        try:
            self._try(grammar)
            target = self.engine.target
            grammar.check(target, check_eos(self.engine.config.eos, target.vocab_size))
        except TooManyTrialsError:
            raise ApiError(
                "other new grammars are being compiled: send the request again",
                status=429,
                param=param,
                code="server_busy",
            ) from None
        except ValueError as error:
            raise ApiError(str(error), param=param, code="invalid_grammar") from None
        return grammar

    def _try(self, grammar: Grammar) -> None:
        """Raise ValueError if compiling a grammar exceeds the limits, or fails.

        A grammar that has passed is not tried again.
        """
        if len(grammar.source) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the grammar exceeds the limit of {MAX_GRAMMAR_BYTES} characters")
        if grammar in self._tried:
            return
        compiled_from = library_grammar(grammar.kind, grammar.source)
        try:
            try_grammar(compiled_from)
        except ValueError as error:
            raise ValueError(
                f"the {title_of(grammar.kind)} is refused: {shown_error(error)}"
            ) from None
        if len(self._tried) >= NUM_CACHED_GRAMMARS:
            self._tried.clear()
        self._tried.add(grammar)

    def _processors(
        self,
        request: CommonRequest,
        prompt_length: int,
        grammar: Grammar | None,
    ) -> dict[str, Any]:
        """The logits processors of a request, if it has any, as a change of the config."""
        processors: list[Any] = []
        if grammar is not None:
            processors.append(grammar)
        if request.presence_penalty or request.frequency_penalty:
            processors.append(
                PresencePenalty(request.presence_penalty, request.frequency_penalty, prompt_length)
            )
        biases = request.biases()
        if biases:
            vocab_size = self.engine.target.vocab_size
            for token, _ in biases:
                if token >= vocab_size:
                    raise ApiError(
                        f"logit_bias names the token {token}, but the model has {vocab_size}",
                        param="logit_bias",
                    )
            processors.append(LogitBias(biases))
        return {"processors": tuple(processors)} if processors else {}


def _field_of(message: str, prompt_field: str) -> str:
    """The request's field that a message of the settings is about."""
    first_word = message.partition(" ")[0]
    setting_names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "chat_template_kwargs",
    )
    return first_word if first_word in setting_names else prompt_field

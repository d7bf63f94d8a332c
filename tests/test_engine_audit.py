"""Laws of `audit --engine`: an exact engine passes, and biased ones are caught."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import text_cases
import tiny_models
import torch
from cli_fixtures import call, here, refused, succeed
from local_server import serving
from sampled_answers import answer_scores, peaked_pair
from stand_in_engine import Answers, stand_in
from text_model import model

from lightning_specdec.audit.biased_rules import BIASED_RULES, AcceptsFirst
from lightning_specdec.audit.engine_audit import tokens_of_texts
from lightning_specdec.audit.engine_client import EngineClient, RefusalError
from lightning_specdec.audit.reference import Reference
from lightning_specdec.audit.token_law import TokenScores, examine
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.rules import AcceptanceRule, RejectionSampling, Sampling
from lightning_specdec.serve.server import bind, make_server
from lightning_specdec.serve.settings import ServeSettings

__all__ = ["here", "model"]
DRAFT_NOISE = 0.5
KEY = "a secret key"
SMALL = ("--num_prompts", "3", "--max_new_tokens", "12", "--engine_dtype", "float32")


# Controls


@pytest.mark.slow
def test_an_unbiased_rule_passes_20_of_20_audits() -> None:
    audits, acceptance_rate = answer_scores(
        peaked_pair(DRAFT_NOISE), RejectionSampling(), num_audits=20
    )
    assert 0.1 < acceptance_rate < 0.8
    reports = [examine(TokenScores.join(scores)) for scores in audits]
    assert len(reports) == 20
    assert all(report.has_power for report in reports)
    assert not any(report.failed for report in reports)


@pytest.mark.parametrize("name", BIASED_RULES)
def test_a_biased_rule_is_caught_with_the_default_number_of_prompts(name: str) -> None:
    audits, _ = answer_scores(peaked_pair(DRAFT_NOISE), BIASED_RULES[name]())
    report = examine(TokenScores.join(audits[0]))
    assert report.failed
    is_colder = "temperature" in name
    assert report.direction.startswith("too close" if is_colder else "too flat")


# What the target says about an answer


@pytest.fixture(scope="module")
def decoder(model: str, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeDecoder:
    draft = tiny_models.write(
        tmp_path_factory.mktemp("draft"),
        tokenizer=text_cases.byte_level(),
        max_position_embeddings=512,
        seed=2,
    )
    return SpeculativeDecoder.from_pretrained(model, draft)


def test_greedy_tokens_are_judged_after_a_first_difference(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.encode("the oak")
    reference = Reference(decoder.target, "float32")
    tokens = list(decoder.decode_standard([prompt], max_new_tokens=8).tokens[0])
    judged = reference.judge(prompt, tokens)
    assert judged.num_equal == len(tokens)
    assert judged.wrong_positions == []

    # Another token, and then what the target makes of it.
    changed = [*tokens[:3], tokens[3] + 1]
    rest = decoder.decode_standard([[*prompt, *changed]], max_new_tokens=4).tokens[0]
    judged = reference.judge(prompt, [*changed, *rest])
    assert judged.wrong_positions == [3]
    assert judged.best_tokens[3] == tokens[3]
    logits = reference.logits(prompt, tokens)[3]
    gap = float(logits[tokens[3]] - logits[tokens[3] + 1])
    assert judged.gaps[3] == pytest.approx(gap)
    assert judged.bounds[3] == pytest.approx(2.0**-17 * float(logits.abs().max()))


def test_tokens_outside_of_the_support_are_wrong_and_its_border_is_not() -> None:
    target = peaked_pair(0.1).target
    prompt = [1, 2, 3]
    reference = Reference(target, "bfloat16")
    logits = reference.logits(prompt, [0])[0]
    ranked = logits.argsort(descending=True).tolist()
    bound = 2.0**-5 * float(logits.abs().max())

    for sampling in (Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.7)):
        probs = sampling.probs(logits)
        last_inside = int((probs > 0).sum()) - 1
        first_outside = ranked[last_inside + 1]
        scored = reference.score(prompt, [ranked[last_inside]], sampling)
        assert len(scored.scores) == 1
        scored = reference.score(prompt, [ranked[-1]], sampling)
        assert scored.outside_positions == [0]
        assert len(scored.scores) == 0

        # With logits that rounding cannot tell apart, the next token may be drawn, too.
        close_logits = logits.clone()
        close_logits[first_outside] = logits[ranked[last_inside]] - bound / 2
        with mock.patch.object(Reference, "logits", return_value=close_logits[None]):
            scored = reference.score(prompt, [first_outside], sampling)
        assert scored.border_positions == [0]
        assert scored.outside_positions == []


def test_texts_of_tokens_give_their_ids_where_they_are_unique(decoder: SpeculativeDecoder) -> None:
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode_plain("the oak")
    texts = [tokenizer.decode([token]) for token in tokens]
    assert tokens_of_texts(tokenizer, texts) == tokens
    # Single bytes of a character have no text of their own.
    assert tokens_of_texts(tokenizer, ["\ufffd"]) is None


# A real server


@contextmanager
def running(
    decoder: SpeculativeDecoder,
    rule: AcceptanceRule | None = None,
    **options: Any,
) -> Iterator[str]:
    """Our server in this process; yields its address."""
    settings = ServeSettings(port=0, **options)
    config = DecodingConfig(temperature=1.0, rule=rule)
    server = make_server(decoder, config, settings, model_name="tiny")
    with bind(settings) as bound:
        bound.listen()
        runner = server.runner()
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [bound]})
        server.engine.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            runner.should_exit = True
            thread.join(20)
            server.stop()


def test_our_server_passes_with_acceptance_and_speed(
    decoder: SpeculativeDecoder, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with running(decoder, RejectionSampling(), api_key_env="MY_KEY") as address:
        document = succeed(
            *("audit", "--target", model, "--engine", address, "--baseline_engine", address),
            *SMALL,
            *("--api_key_env", "MY_KEY", "--output", "json"),
        ).json
        assert document["passed"]
        assert document["kind"] == "lightning_specdec"
        assert document["token_source"] == "ids reported by the engine"
        assert document["template"] == "the same number of tokens"
        greedy = document["greedy"]
        assert greedy["num_answers"] == 3
        assert greedy["num_equal"] == greedy["num_tokens"] > 20
        law = document["sampled"]["law"]
        assert law["num_tokens"] > 20
        assert not document["sampled"]["failed"]
        acceptance = document["acceptance"]
        assert 0 < acceptance["accepted_tokens"] < acceptance["draft_tokens"]
        assert acceptance["acceptance_length"] > 1
        assert len(acceptance["acceptance_by_position"]) >= 1
        speed = document["speed"]
        assert speed["tokens_per_second"] > 0
        assert speed["verdict"]["kind"] in ("faster", "slower", "too noisy")

        # The audit without the key, and with a model that the server does not have.
        outcome = call("audit", "--target", model, "--engine", address, *SMALL)
        assert outcome.code == 2
        assert "name the variable that holds the key with --api_key_env" in outcome.err
        outcome = call(
            *("audit", "--target", model, "--engine", address, *SMALL),
            *("--api_key_env", "MY_KEY", "--engine_model", "other"),
        )
        assert outcome.code == 2
        assert "serves tiny, not 'other'" in outcome.err


def test_our_server_returns_the_ids_of_its_tokens(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.encode("the oak")
    expected = list(decoder.decode_standard([prompt], max_new_tokens=9).tokens[0])
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0}
    with running(decoder) as address:
        client = EngineClient(address)
        choice = client.request("/v1/completions", {**body, "return_token_ids": True})["choices"][0]
        assert choice["token_ids"] == expected
        assert "token_ids" not in client.request("/v1/completions", body)["choices"][0]
        with pytest.raises(RefusalError, match="return_token_ids is not supported in streams"):
            client.request("/v1/completions", {**body, "return_token_ids": True, "stream": True})


def test_our_server_with_a_biased_rule_fails_with_each_wrong_token(
    decoder: SpeculativeDecoder, model: str
) -> None:
    with running(decoder, AcceptsFirst()) as address:
        outcome = call(
            "audit", "--target", model, "--engine", address, *SMALL, "--temperature", "0"
        )
    assert outcome.code == 1
    assert "error: greedy: " in outcome.err
    assert "FAILED: the engine's output is not the target's" in outcome.out
    assert " instead of " in outcome.out
    assert "rounding: up to" in outcome.out
    assert "sampled" not in outcome.out


# Engines with other abilities and faults


@pytest.mark.parametrize(
    ("reports", "source"),
    [
        ("token_ids", "ids reported by the engine"),
        ("content_ids", "ids reported by the engine"),
        ("logprobs", "texts of the tokens in the log probabilities"),
        ("", "the answer's text, encoded again"),
    ],
)
def test_tokens_are_found_whatever_an_engine_reports(
    decoder: SpeculativeDecoder,
    model: str,
    reports: str,
    source: str,
) -> None:
    text = "the lightning speaks to the oak"
    handler = stand_in(Answers(decoder, reports=frozenset([reports]), fixed_text=text))
    with serving(handler) as address:
        document = call(
            *("audit", "--target", model, "--engine", f"http://{address}/v1/"),
            *SMALL,
            *("--temperature", "0", "--output", "json"),
        ).json
    assert document["token_source"] == source
    num_tokens = len(decoder.encode(text))
    assert document["greedy"]["num_tokens"] == 3 * num_tokens
    # This text is not the target's.
    assert not document["passed"]
    has_warning = any("neither token ids" in warning for warning in document["warnings"])
    assert has_warning == (not reports)


def test_an_engine_whose_tokens_stay_unknown_is_refused(
    here: None, decoder: SpeculativeDecoder, model: str
) -> None:
    """The random target writes parts of characters, which have no text."""
    handler = stand_in(Answers(decoder, reports=frozenset()))
    with serving(handler) as address:
        refused(
            *("audit", "--target", model, "--engine", f"http://{address}", *SMALL),
            message="reports no tokens, and its texts do not tell them",
        )


def test_an_engine_that_refuses_tokens_gets_texts(decoder: SpeculativeDecoder, model: str) -> None:
    handler = stand_in(Answers(decoder, takes_tokens=False))
    with serving(handler) as address:
        document = succeed(
            *("audit", "--target", model, "--engine", f"http://{address}", *SMALL),
            *("--temperature", "0", "--output", "json"),
        ).json
    assert not document["prompts_as_tokens"]
    assert document["greedy"]["num_equal"] == document["greedy"]["num_tokens"] > 20
    bodies = handler.answers.bodies
    assert any(isinstance(body["prompt"], str) for body in bodies)


def test_each_sampled_request_has_its_own_seed_and_the_neutral_fields(
    decoder: SpeculativeDecoder, model: str
) -> None:
    handler = stand_in(Answers(decoder))
    with serving(handler) as address:
        succeed(
            *("audit", "--target", model, "--engine", f"http://{address}", *SMALL),
            *("--prompt", "the oak", "--raw", "--top_p", "0.9", "--temperature", "0.8"),
        )
    sampled = [body for body in handler.answers.bodies if body["temperature"] == 0.8]
    assert len(sampled) == 3
    assert len({body["seed"] for body in sampled}) == 3
    for body in sampled:
        assert body["top_p"] == 0.9
        assert body["top_k"] == -1
        assert body["repetition_penalty"] == 1.0


def test_another_template_is_a_warning_and_another_tokenizer_an_error(
    decoder: SpeculativeDecoder, model: str
) -> None:
    handler = stand_in(Answers(decoder, chat_tokens=[1, 2, 3]))
    with serving(handler) as address:
        outcome = succeed("audit", "--target", model, "--engine", f"http://{address}", *SMALL)
    assert "warning: the engine's chat template gives other tokens" in outcome.out

    handler = stand_in(Answers(decoder, num_added_tokens=1))
    with serving(handler) as address:
        outcome = call("audit", "--target", model, "--engine", f"http://{address}", *SMALL)
    assert outcome.code == 2
    assert "has another tokenizer, or adds tokens" in outcome.err

    handler = stand_in(Answers(decoder, shown_text="something else"))
    with serving(handler) as address:
        outcome = call("audit", "--target", model, "--engine", f"http://{address}", *SMALL)
    assert outcome.code == 2
    assert "it serves another model" in outcome.err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("html", "does not answer with JSON but with '<html>"),
        ("cut", "ends in the middle of its answer"),
        ("slow", "does not answer within 0.5 seconds"),
        ("error", "refuses with 500: out of memory"),
        ("empty", "does not answer with a completion"),
        ("tokens", "answers with the token 99999"),
        ("models", "does not list models"),
    ],
)
def test_a_faulty_engine_is_one_line(
    here: None, decoder: SpeculativeDecoder, model: str, fault: str, message: str
) -> None:
    handler = stand_in(Answers(decoder, fault=fault))
    with serving(handler) as address:
        refused(
            *("audit", "--target", model, "--engine", f"http://{address}", *SMALL),
            *("--timeout", "0.5" if fault == "slow" else "60"),
            message=message,
        )


def test_bad_input_is_one_line(here: None, model: str) -> None:
    engine = ("audit", "--target", model, "--engine", "http://127.0.0.1:9")
    refused(*engine, message="http://127.0.0.1:9 cannot be reached")
    refused(*engine, "--rules", "ExactMatch", message="--rules does not apply to a server")
    refused(*engine, "--min_p", "0.1", message="--min_p does not apply to a server")
    refused(*engine, "--api_key_env", "NO_SUCH_KEY", message="NO_SUCH_KEY holds no key")
    refused("audit", "--target", model, "--engine", "localhost", message="begins with http://")
    refused("audit", "--target", model, "--clients", "2", message="--clients needs a server")
    refused("audit", "--target", model, "--temperature", "1", message="or use --temperatures")
    assert Path(model).is_dir()
    assert torch.get_num_threads() > 0

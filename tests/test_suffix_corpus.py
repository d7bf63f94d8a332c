"""The suffix corpus drafts what most often followed, remembers within bounds, and changes nothing.

Its laws of losslessness are those of every drafter (`cases.py`), there without a memory, since some
compare the rounds of two runs.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.data import corpus as corpus_files
from lightning_specdec.decoding import autoregressive_decode, open_session, speculative_decode
from lightning_specdec.drafters import (
    DraftRequest,
    NGramWithFallback,
    SuffixCorpusDrafter,
    SuffixCorpusWithFallback,
    last_two_tokens_of,
)
from lightning_specdec.drafters.suffix_corpus import (
    LONGEST_MATCH,
    MOST_OCCURRENCES,
    Memory,
    SortedCorpus,
    Suffix,
)
from lightning_specdec.rules import RejectionSampling, Sampling
from lightning_specdec.text.tokenizer import ByteTokenizer


def drafted(
    drafter: SuffixCorpusDrafter,
    text: Sequence[int],
    *,
    window: int = 4,
    state: Any = None,
    other_texts: bool = True,
) -> list[int]:
    """The draft after a text."""
    if state is None:
        state = drafter.init_state(1, 10_000)
    tail = last_two_tokens_of([text], torch.device("cpu"))
    request = DraftRequest([text], tail, None, may_use_other_texts=other_texts)
    (tokens,) = drafter.look_up(state, request, [window])
    return list(tokens)


def some_tokens(generator: random.Random, num_tokens: int, vocab_size: int = 4) -> list[int]:
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def test_the_most_frequent_continuation_is_drafted_and_not_the_latest() -> None:
    text = [1, 2, 7, 8, 1, 2, 7, 9, 1, 2, 7, 8, 1, 2, 5, 6, 1, 2]
    drafter = SuffixCorpusDrafter(min_acceptance=0)
    assert drafted(drafter, text, window=2) == [7, 8]


def test_a_longer_match_outweighs_shorter_ones() -> None:
    text = [*[3, 4, 9] * 6, 1, 2, 3, 4, 5, 8, 6, 1, 2, 3, 4]
    assert drafted(SuffixCorpusDrafter(), text, window=2)[0] == 5


def test_a_loop_is_drafted_to_the_end_of_the_window() -> None:
    drafter = SuffixCorpusDrafter()
    assert drafted(drafter, [1, 2, 3] * 8, window=10) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_the_draft_ends_where_the_estimate_falls_below_the_limit() -> None:
    generator = random.Random(0)
    text = some_tokens(generator, 200)
    lengths = []
    for limit in (0.0, 0.1, 0.3, 0.9):
        draft = drafted(SuffixCorpusDrafter(min_acceptance=limit), text, window=12)
        lengths.append(len(draft))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 12 and lengths[-1] < 2


def test_a_copy_continues_after_a_token_that_was_changed() -> None:
    """The changed token occurred nowhere, so no n-gram matches. It may also be an inserted one."""
    text = [*range(20, 60), 100, *range(20, 35), 99]
    draft = drafted(SuffixCorpusDrafter(min_acceptance=0), text, window=3)
    assert draft in ([35, 36, 37], [36, 37, 38])


@pytest.mark.parametrize("seed", range(6))
def test_a_growing_truncated_and_moved_text_has_the_draft_of_a_fresh_one(seed: int) -> None:
    """Without other texts, the draft is a function of the text, whatever the rounds were."""
    generator = random.Random(seed)
    drafter = SuffixCorpusDrafter(min_acceptance=0.05)
    state = drafter.init_state(2, 1000)
    texts = [some_tokens(generator, 5), some_tokens(generator, 9)]
    tail = torch.zeros(2, 2, dtype=torch.long)
    num_drafted = 0
    for _ in range(60):
        drafts = drafter.look_up(state, DraftRequest(texts, tail, None), [6, 6])
        for text, draft in zip(texts, drafts, strict=True):
            assert list(draft) == drafted(drafter.fresh(), text, window=6, other_texts=False)
            num_drafted += len(draft)
            text += some_tokens(generator, generator.randint(1, 5))
        if generator.random() < 0.2:
            row = generator.randrange(2)
            length = generator.randint(1, len(texts[row]))
            state.truncate_row(row, length)
            texts[row] = texts[row][:length] + some_tokens(generator, 3)
        if generator.random() < 0.2:
            state.select([1, 0])
            texts.reverse()
    assert num_drafted > 100


def test_tokens_that_another_drafter_may_take_back_are_not_indexed() -> None:
    drafter = SuffixCorpusDrafter()
    state = drafter.init_state(1, 100)
    text = [1, 2, 3, 1, 2, 4, 4]
    tail = torch.zeros(1, 2, dtype=torch.long)
    drafter.look_up(state, DraftRequest([text], tail, None, committed=[5]), [4])
    assert state.rows[0].num_indexed == 5
    assert drafter.memory is not None and drafter.memory.num_tokens == 5
    changed = [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted(drafter, changed, state=state) == drafted(SuffixCorpusDrafter(), changed)


def brute_force_matches(texts: Sequence[Sequence[int]], suffix: Sequence[int]) -> dict[int, int]:
    """How often each length of match occurs, counted position by position up to a limit."""
    counts: dict[int, int] = {}
    for text in texts:
        for position in range(1, len(text) + 1):
            length = 0
            while (
                length < min(position, len(suffix), LONGEST_MATCH)
                and text[position - 1 - length] == suffix[-1 - length]
            ):
                length += 1
            if length:
                counts[length] = counts.get(length, 0) + 1
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_a_sorted_corpus_finds_the_longest_matches_that_a_scan_finds(seed: int) -> None:
    generator = random.Random(seed)
    texts = [some_tokens(generator, generator.randint(1, 40)) for _ in range(6)]
    corpus = SortedCorpus(texts)
    assert corpus.num_tokens == sum(map(len, texts))
    for _ in range(50):
        last_tokens = some_tokens(generator, generator.randint(1, 12), vocab_size=5)
        occurrences = corpus.occurrences(Suffix(last_tokens))
        counts = brute_force_matches(texts, last_tokens)
        assert len(occurrences) <= MOST_OCCURRENCES
        assert bool(occurrences) == bool(counts)
        if counts:
            longest = max(occurrence.num_matched for occurrence in occurrences)
            # Beyond the sorted length, the longest one may be left out.
            assert min(longest, 8) == min(max(counts), 8)
        for occurrence in occurrences:
            assert occurrence.num_matched in counts


def test_the_memory_is_bounded_and_the_oldest_texts_go_first() -> None:
    memory = Memory(400)
    texts = [[100 + number, *([number] * 90), 200 + number] for number in range(1, 12)]
    for text in texts:
        memory.append(text, [])
        assert memory.num_tokens <= 400
        assert memory.num_tokens == sum(map(len, memory.pieces.values()))

    newest = memory.occurrences(Suffix([111]), ())
    assert [occurrence.num_matched for occurrence in newest] == [1]
    assert not memory.occurrences(Suffix([101]), ())
    for table in memory.table.tables.values():
        positions = [value if isinstance(value, list) else [value] for value in table.values()]
        numbers = {position >> 32 for known in positions for position in known}
        assert numbers <= set(memory.pieces)


def test_one_text_larger_than_the_memory_leaves_its_end() -> None:
    memory = Memory(100)
    numbers: list[int] = []
    text = list(range(1000))
    for start in range(0, 1000, 7):
        memory.append(text[start : start + 7], numbers)
    assert 50 < memory.num_tokens <= 100
    assert memory.occurrences(Suffix([990]), ())


def test_an_earlier_request_is_drafted_and_a_fresh_copy_has_forgotten_it() -> None:
    target = cases.target("rnn")
    drafter = SuffixCorpusDrafter()
    options: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 4}
    expected = autoregressive_decode(target, cases.PROMPTS[1], max_new_tokens=40).tokens
    first = speculative_decode(target, drafter, cases.PROMPTS[1], **options)
    second = speculative_decode(target, drafter, cases.PROMPTS[1], **options)
    fresh = speculative_decode(target, drafter.fresh(), cases.PROMPTS[1], **options)
    copied = speculative_decode(target, deepcopy(drafter), cases.PROMPTS[1], **options)
    assert first.tokens == second.tokens == fresh.tokens == copied.tokens == expected
    assert (second.block_efficiency or 0) > 1.5 * (first.block_efficiency or 9)
    assert fresh.block_efficiency == copied.block_efficiency == first.block_efficiency

    forgetful = SuffixCorpusDrafter(memory_tokens=0)
    for _ in range(2):
        result = speculative_decode(target, forgetful, cases.PROMPTS[1], **options)
        assert result.block_efficiency == first.block_efficiency


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("target", ["rnn", "transformer"])
def test_earlier_requests_change_no_token(target: str, temperature: float) -> None:
    """Ragged batches one after the other, and all rows of a batch share the memory."""
    drafter = SuffixCorpusDrafter(memory_tokens=150)
    sampling = Sampling(temperature)
    expected = cases.standard(target, sampling, 24).tokens
    efficiencies = []
    for window in (1, 3, 8):
        result = speculative_decode(
            cases.target(target),
            drafter,
            cases.PROMPTS,
            max_new_tokens=24,
            sampling=sampling,
            eos=cases.EOS,
            num_draft_tokens=window,
        )
        assert result.tokens == expected
        efficiencies.append(result.block_efficiency or 0)
    assert efficiencies[2] > efficiencies[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_requests_change_no_row_whose_output_depends_on_the_draft(
    temperature: float,
) -> None:
    """Neither its tokens nor its rounds, at temperature 1 under `RejectionSampling`."""
    target = cases.target("rnn")
    drafter = SuffixCorpusDrafter()
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "rule": RejectionSampling(),
        "sampling": Sampling(temperature),
        "seed": 3,
    }
    runs = [speculative_decode(target, drafter, cases.PROMPTS, **options) for _ in range(3)]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    rounds = [[row.rounds for row in run.rows] for run in runs]
    assert (rounds[0] == rounds[1]) == (temperature == 1)
    alone = speculative_decode(target, drafter, cases.PROMPTS[2], indices=[2], **options)
    assert alone.rows[0].tokens == runs[0].rows[2].tokens


def test_sessions_of_several_threads_share_a_drafter() -> None:
    target = cases.target("rnn")
    drafter = SuffixCorpusDrafter(memory_tokens=300)
    expected = [
        autoregressive_decode(target, prompt, max_new_tokens=40).tokens for prompt in cases.PROMPTS
    ]
    failures: list[Any] = []

    def decode(prompt: list[int], tokens: Any) -> None:
        try:
            for _ in range(5):
                result = speculative_decode(target, drafter, prompt, max_new_tokens=40)
                if result.tokens != tokens:
                    failures.append(result.tokens)
        except Exception as error:
            failures.append(error)

    threads = []
    for prompt, tokens in zip(cases.PROMPTS, expected, strict=True):
        threads.append(threading.Thread(target=decode, args=(prompt, tokens)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert drafter.memory is not None and 0 < drafter.memory.num_tokens <= 300


def test_a_resumed_conversation_is_remembered_once() -> None:
    target = cases.target("rnn")
    drafter = SuffixCorpusDrafter()
    session = open_session(target, drafter, [[1, 2, 3]], max_new_tokens=12)
    row = session.live[0]
    session.max_length = 60
    while session.live:
        session.step()
    next_row = session.resume(row, [*row.text, 4, 5], max_new_tokens=12)
    while session.live:
        session.step()
    assert drafter.memory is not None
    assert drafter.memory.num_tokens <= len(next_row.text)


@pytest.fixture
def corpus_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "corpus"
    (directory / ".git").mkdir(parents=True)
    (directory / "part").mkdir()
    (directory / "a.txt").write_text("hello brave new world\n")
    (directory / "part" / "b.py").write_text("def brave(): pass\n")
    (directory / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (directory / ".git" / "config").write_text("zzz zzz")
    return directory


def with_bytes() -> Any:
    """A target whose tokens are bytes."""
    target = cases.MODELS["rnn"](1, vocab_size=256)
    target.tokenizer = ByteTokenizer()
    return target


def test_a_corpus_is_read_with_the_targets_tokenizer(corpus_directory: Path) -> None:
    target = with_bytes()
    drafter = SuffixCorpusDrafter.for_target(target, corpus=str(corpus_directory))
    assert isinstance(drafter, SuffixCorpusDrafter)
    corpus = drafter.corpus.of(target)
    assert corpus is not None and corpus.num_tokens == len(
        "hello brave new world\ndef brave(): pass\n"
    )
    assert corpus is deepcopy(drafter).fresh().corpus.of(target)

    session = open_session(target, drafter, [list(b"a bra")], max_new_tokens=9, num_draft_tokens=4)
    session.step()
    assert bytes(session.live[0].rounds[0].drafted).startswith(b"ve")


def test_of_a_corpus_that_is_too_large_the_latest_files_are_read(corpus_directory: Path) -> None:
    os.utime(corpus_directory / "a.txt", (1, 1))
    drafter = SuffixCorpusDrafter(corpus=str(corpus_directory), max_corpus_tokens=20)
    corpus = drafter.corpus.of(with_bytes())
    assert corpus is not None and corpus.num_tokens == 20
    assert corpus.occurrences(Suffix(list(b"def b")))
    assert not corpus.occurrences(Suffix(list(b"hello")))


def test_generated_and_recorded_text_is_a_corpus(tmp_path: Path) -> None:
    target = with_bytes()
    rows = [
        corpus_files.GeneratedRow(list(b"hello "), list(b"brave new world"), 0, 1.0),
        corpus_files.GeneratedRow(list(b"a row"), list(b" of another prompt"), 1, 0.0),
    ]
    corpus_files.write_shard(tmp_path, 0, rows, target.vocab_size)
    fingerprint = target.tokenizer.fingerprint
    manifest: dict[str, Any] = {
        "format": 1,
        "tokenizer": {"fingerprint": fingerprint},
        "target": {},
        "vocab_size": target.vocab_size,
        "num_shards": 1,
    }
    corpus_files.write_manifest(tmp_path, manifest)
    corpus = SuffixCorpusDrafter(corpus=str(tmp_path)).corpus.of(target)
    assert corpus is not None
    assert corpus.occurrences(Suffix(list(b"hello brave ")))
    assert corpus.occurrences(Suffix(list(b"of another")))

    manifest["tokenizer"] = {"fingerprint": "another"}
    corpus_files.write_manifest(tmp_path, manifest)
    with pytest.raises(ValueError, match="shard-00000.safetensors has the tokens of another model"):
        SuffixCorpusDrafter(corpus=str(tmp_path)).corpus.of(target)
    manifest["tokenizer"] = {"fingerprint": fingerprint}
    corpus_files.write_manifest(tmp_path, manifest)
    corpus_files.shard_path(tmp_path, 0).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="shard-00000.safetensors is damaged"):
        SuffixCorpusDrafter(corpus=str(tmp_path)).corpus.of(target)


def test_a_corpus_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    target = with_bytes()
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in ((tmp_path / "none", "no file or directory"), (empty, "has no text")):
        with pytest.raises(ValueError, match=message):
            SuffixCorpusDrafter.for_target(target, corpus=str(path))
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        SuffixCorpusDrafter.for_target(cases.target("rnn"), corpus=str(tmp_path))
    with pytest.raises(ValueError, match="min_acceptance"):
        SuffixCorpusDrafter(min_acceptance=2)
    with pytest.raises(ValueError, match="memory_tokens"):
        SuffixCorpusDrafter(memory_tokens=-1)


def test_a_checkpoint_stores_no_corpus_and_reads_none(tmp_path: Path) -> None:
    for drafter in (
        SuffixCorpusDrafter(corpus=str(tmp_path)),
        SuffixCorpusDrafter().with_texts([[1, 2]]),
    ):
        with pytest.raises(ValueError, match="does not store the texts of a corpus"):
            drafter.arguments()
    assert "corpus" not in SuffixCorpusDrafter().arguments()


def test_it_takes_the_lookups_place_before_another_draft() -> None:
    target = cases.target("rnn")
    fallback = cases.drafter("near", "rnn")
    drafter = SuffixCorpusWithFallback.for_target(target, fallback, memory_tokens=50)
    assert isinstance(drafter, SuffixCorpusWithFallback)
    assert isinstance(drafter.lookup, SuffixCorpusDrafter)
    assert drafter.lookup.settings.memory_tokens == 50
    assert drafter.lookup.settings.min_acceptance == 0.5
    assert isinstance(drafter.fused(), SuffixCorpusWithFallback)
    assert NGramWithFallback(SuffixCorpusDrafter(), fallback).fallback is fallback

    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    result = speculative_decode(target, drafter, prompt, max_new_tokens=20)
    expected = autoregressive_decode(target, prompt, max_new_tokens=20)
    assert result.tokens == expected.tokens
    assert (result.num_draft_calls or 0) > 0
    assert result.rows[0].rounds is not None and result.rows[0].rounds[0].drafted == [3, 1, 2]

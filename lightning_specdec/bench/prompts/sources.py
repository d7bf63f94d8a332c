"""Where prompts come from: public data sets on the hub, files, and the prompts that ship with this package."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_specdec.bench.prompts.dataset import DOMAINS, SEQUENCES, PromptDataset, is_set, missing
from lightning_specdec.bench.prompts.lines import json_lines, tokens_of
from lightning_specdec.bench.prompts.prompt import Prompt, Wording
from lightning_specdec.checks import require_int
from lightning_specdec.text.base import Tokenizer

Entry = Wording | Prompt
INSTRUCTION = "\n\nSummarize the text above in a few sentences.\n"
"""What follows every article."""
TEXTS = tuple(domain for domain in DOMAINS if domain != SEQUENCES)
"""The domains of a set where nobody names others."""
HUB, SHIPPED = "hub", "shipped"
TIMEOUT_SECONDS = 5.0
"""For each answer of the hub: where there is none, the shipped prompts are as good as they were at once."""
_POOL = 1000
"""How many rows of a data set the seed chooses from, at most: the first ones, so that little is downloaded."""
_CONVERSATION = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench's categories that are MT-Bench's."""

log = logging.getLogger(__name__)


class NoHub(ValueError):
    """The hub's data sets cannot be had."""


@dataclass(frozen=True)
class _DataSet:
    """A public data set: its name and part on the hub, and the fields of a row that hold its id and its text."""

    name: str
    config: str | None
    split: str
    id_field: str | None
    fields: tuple[str, ...]
    instruction: str = ""


PUBLIC = {
    "code": _DataSet("openai/openai_humaneval", None, "test", "task_id", ("prompt",)),
    "conversation": _DataSet("tatsu-lab/alpaca", None, "train", None, ("instruction", "input")),
    "summarization": _DataSet("abisee/cnn_dailymail", "3.0.0", "test", "id", ("article",), INSTRUCTION),
}


def build(
    tokenizer: Tokenizer | None,
    *,
    sources: Sequence[str] = (),
    domains: Sequence[str] | None = None,
    num_prompts: int = 50,
    seed: int = 0,
    raw: bool = False,
) -> PromptDataset:
    """The prompts of sources as a prompt set.

    Args:
        tokenizer: for text; prompts that are tokens need none.
        sources: files, or one of `hub` and `shipped`; with none, the hub's, or the shipped ones where there is no hub.
        domains: those wanted; of files all when None, and `TEXTS` otherwise.
        num_prompts: of each domain, at most.
        seed: of the choice.
        raw: leave the tokenizer's chat template out.

    Raises:
        ValueError: something is not there or not what it should be.
    """
    entries, origins = read(sources, domains)
    chosen = choose(entries, require_int("num_prompts", num_prompts, 1), seed=seed, domains=origins)
    recipe = {"sources": origins, "num_prompts": num_prompts, "seed": seed}
    built = PromptDataset.encode(chosen, tokenizer, raw=raw, recipe=recipe)
    for domain in built.domains:
        if (number := len(built.by_domain(domain))) < num_prompts:
            log.warning("%s has %d of the %d prompts wanted: that is all there are", domain, number, num_prompts)
    return built


def read(sources: Sequence[str], domains: Sequence[str] | None = None) -> tuple[list[Entry], dict[str, str]]:
    """All prompts of the sources that `build` describes, and for each domain wanted where its prompts are from."""
    named = [source for source in sources if source in (HUB, SHIPPED)]
    if named and len(sources) > 1:
        raise ValueError(f"{named[0]!r} is a source by itself: name it alone, or files alone")
    wanted = tuple(dict.fromkeys(domains or ()))
    if sources and not named:
        entries = [entry for source in sources for entry in from_file(Path(source).expanduser())]
        there = tuple(dict.fromkeys(entry.domain for entry in entries))
        where = ", ".join(Path(source).name for source in sources)
        _check(wanted, there, where)
        return entries, {domain: where for domain in wanted or there}
    wanted = wanted or TEXTS
    _check(wanted, DOMAINS, "the prompts that ship" if named == [SHIPPED] else "the public prompts")
    entries, origins = [], {}
    public = [domain for domain in wanted if domain in PUBLIC]
    if named != [SHIPPED] and public:
        try:
            for domain, rows in from_hub(public).items():
                entries += rows
                origins[domain] = PUBLIC[domain].name
        except NoHub as error:
            if named:
                raise
            log.warning("%s, so the prompts that ship with lightning_specdec are taken instead", error)
    for domain in wanted:
        if domain not in origins:
            entries += from_file(Path(__file__).parent / "sets" / f"{domain}.jsonl")
            origins[domain] = SHIPPED
    return entries, origins


def choose(entries: Iterable[Entry], number: int, *, seed: int, domains: Iterable[str]) -> list[Entry]:
    """So many prompts of each domain, by domain and then as they came; a smaller number gives some of these."""
    given, chosen = list(entries), []
    for domain in domains:
        there = [entry for entry in given if entry.domain == domain]
        kept = set(sorted((_rank(seed, entry.id), entry.id) for entry in there)[:number])
        chosen += [entry for entry in there if (_rank(seed, entry.id), entry.id) in kept]
    return chosen


def from_hub(domains: Sequence[str]) -> dict[str, list[Entry]]:
    """The first rows of the public data sets.

    Raises:
        NoHub: `datasets` is not installed, or the hub does not give them.
    """
    try:
        import datasets
    except ImportError as error:
        raise NoHub(
            "the hub's prompts need the package datasets, which is not installed: pip install datasets"
        ) from error
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError

    if constants.is_offline_mode():
        raise NoHub("HF_HUB_OFFLINE is set")
    api, found = HfApi(), {}
    # `datasets` itself would try again for minutes: so the hub is asked first, and then nothing more than twice.
    datasets.config.STREAMING_OPEN_MAX_RETRIES = datasets.config.STREAMING_READ_MAX_RETRIES = 1
    for domain in domains:
        public = PUBLIC[domain]
        try:
            api.dataset_info(public.name, timeout=TIMEOUT_SECONDS)
            rows = datasets.load_dataset(public.name, public.config, split=public.split, streaming=True)
            found[domain] = _of_rows(domain, public, islice(rows, _POOL))
        except (HTTPError, OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise NoHub(f"{public.name} cannot be had from {api.endpoint} ({reason})") from error
    return found


def _of_rows(domain: str, public: _DataSet, rows: Iterable[dict[str, Any]]) -> list[Entry]:
    short = public.name.split("/")[-1]
    found: list[Entry] = []
    for number, row in enumerate(rows):
        texts = [row.get(field) for field in public.fields]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"its rows have no {' and '.join(public.fields)}")
        name = f"{short}-{number}" if public.id_field is None else str(row.get(public.id_field))
        if text := "\n\n".join(text for text in texts if text and text.strip()):
            found.append(Wording(name, domain, text, public.instruction))
    if not found:
        raise ValueError("it has no rows")
    return found


def from_file(path: Path) -> list[Entry]:
    """The prompts of a file, with ids and domains of their own or by the file's name.

    - Spec-Bench's `question.jsonl`: of each row the first turn.
    - HumanEval's file, packed or not, and any other JSON lines that have a "prompt".
    - "article" is text to be summarized, "tokens" is a list of integers.
    - `.ckpt`: the prompts that a trained pair keeps, which it has not learned from.
    - a prompt set: its own.

    Raises:
        ValueError: there is no such file, or a line is no prompt.
    """
    if path.suffix == ".ckpt":
        return _of_checkpoint(path)
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    advice = f"or name no --source, or {HUB} or {SHIPPED}"
    rows = [*json_lines(path, advice)]
    if not rows:
        raise ValueError(f"{path} holds no prompt: give one JSON object on each line")
    if is_set(rows[0][1]):
        return [prompt.wording for prompt in PromptDataset.load(path)]
    return [_of_row(f"{path}, line {number}", stem, number, row) for number, row in rows]


def _of_row(where: str, stem: str, number: int, row: dict[str, Any]) -> Entry:
    row = {key: value for key, value in row.items() if value is not None}
    category, turns = row.get("category"), row.get("turns")
    if category in _CONVERSATION:
        category = "conversation"
    domain = row.get("domain", category or ("code" if "entry_point" in row else stem))
    if not _is_name(domain):
        raise ValueError(f'{where}: "domain" must be a name, got {domain!r}')
    name = row.get("id", row.get("task_id", f"{stem}-{row.get('question_id', number)}"))
    name = str(name) if type(name) is int else name
    if not _is_name(name):
        raise ValueError(f'{where}: "id" must be a name or an integer, got {name!r}')
    if "tokens" in row:
        return Prompt(name, domain, tokens_of(where, row))
    text = row.get("prompt", row.get("article", turns[0] if isinstance(turns, list) and turns else None))
    if not isinstance(text, str):
        listed = ", ".join(row)[:80] or "nothing"
        raise ValueError(f"{where}: a row needs a prompt, turns, an article or tokens, this one has {listed}")
    if not text.strip():
        raise ValueError(f"{where}: the prompt is empty, give some text")
    text = text.encode("utf-8", "replace").decode("utf-8")  # what JSON can spell and UTF-8 cannot
    return Wording(name, domain, text, "" if "prompt" in row or "article" not in row else INSTRUCTION)


def _is_name(value: object) -> bool:
    """Whether something can stand in a line of a table."""
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _of_checkpoint(path: Path) -> list[Entry]:
    from lightning_specdec import checkpoint

    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}: check the path")
    loaded = checkpoint.load(path)
    if loaded.tokenizer is not None:
        raise ValueError(f"{path} reads text: take prompts of text and --tokenizer {loaded.tokenizer}")
    if not loaded.prompts:
        raise ValueError(f"{path} keeps no prompts: name a file of prompts")
    return [Prompt(f"{path.stem}-{i}", SEQUENCES, tuple(prompt)) for i, prompt in enumerate(loaded.prompts, 1)]


def _check(wanted: Sequence[str], there: Sequence[str], where: str) -> None:
    for domain in wanted:
        if domain not in there:
            raise ValueError(missing(domain, there, where))


def _rank(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

"""Compare the acceptance lengths of prompt lookup and of the suffix corpus, without a model.

    python benchmarks/suffix_corpus.py --target checkpoints/smollm2 --prompts question.jsonl

Known answers are replayed: a draft is accepted as far as it equals the answer, as in greedy
decoding. The answers to prompts of Spec-Bench are the target's own, written once to `--answers`.
Code edits need no model: the prompt has a file of Python's standard library, and the answer is
that file after some edits, which are drawn by a seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from markdown_tables import markdown_table
from spec_bench import TASKS

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.config.files import replaced
from lightning_specdec.data.corpus import Shard
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.drafters import (
    DraftRequest,
    LookupDrafter,
    NGramDrafter,
    SuffixCorpusDrafter,
)
from lightning_specdec.models.loading import load_model
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer

WINDOWS = {"code edits": (4, 8, 16, 32)}
"""Draft tokens per round of a task; `USUAL_WINDOWS` for others."""
USUAL_WINDOWS = (4, 8, 16)
TEXTS = Path("lightning_specdec/data/smollm2_text")
"""Answers of SmolLM2 to other prompts, the corpus of chats and prompts."""
BATCH_SIZE = 4
LONGEST_PROMPT = 1024
FILE_BYTES = (3_000, 12_000)
"""Sizes of the files that are edited."""
LONGEST_ANSWER = 2_000
EDITED_LINES = 25
"""Lines of a file for each edited line."""


@dataclass
class Turn:
    """A request with its known answer.

    Args:
        continues: whether it continues the conversation of the turn before it.
    """

    prompt: list[int]
    answer: list[int]
    continues: bool = False


Task = list[Turn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="checkpoints/smollm2", help="its directory")
    parser.add_argument("--prompts", required=True, help="question.jsonl of Spec-Bench")
    parser.add_argument("--answers", default="suffix_corpus_answers.json", help="written if absent")
    parser.add_argument("--output", default="docs/results/suffix_corpus.json", help="the record")
    parser.add_argument("--num_prompts", type=int, default=4, help="of each task of Spec-Bench")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--num_files", type=int, default=12, help="files to edit")
    parser.add_argument("--seed", type=int, default=0, help="of the files and edits")
    options = parser.parse_args()

    tokenizer = TextTokenizer.load(options.target)
    answers = _load_answers(options, tokenizer)
    edits, other_files = code_edits(tokenizer, options.num_files, options.seed)
    earlier_answers = greedy_texts(TEXTS, tokenizer)
    singles = [Turn(row["prompt"], row["answer"]) for row in answers["singles"]]

    rows = []
    rows += compare("code edits", edits, other_files)
    rows += compare("chats of two turns", _chats(answers["chats"]), earlier_answers)
    rows += compare("single prompts", singles, earlier_answers)
    rows += compare("repeated requests", singles, earlier_answers, seen=singles)

    settings = {**vars(options), "prompts": "question.jsonl", "answers": None}
    record = {"manifest": manifest(options=settings, device=torch.device("cpu")), "rows": rows}
    with replaced(Path(options.output)) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())
    print(table(rows))


def compare(
    name: str,
    task: Task,
    corpus: Sequence[Sequence[int]],
    seen: Task | None = None,
) -> list[dict[str, Any]]:
    """Replay a task with each drafter and window.

    Args:
        seen: a task that the drafter has answered before.
    """
    makers: dict[str, Callable[[], LookupDrafter]] = {
        "prompt lookup": NGramDrafter,
        "suffix corpus": SuffixCorpusDrafter,
        "suffix corpus with a corpus": lambda: SuffixCorpusDrafter().with_texts(corpus),
    }
    rows = []
    for window in WINDOWS.get(name, USUAL_WINDOWS):
        for drafter_name, make in makers.items():
            drafter = make()
            if seen is not None:
                replay(drafter, seen, window)
            row = {"task": name, "drafter": drafter_name, "num_draft_tokens": window}
            rows.append({**row, **replay(drafter, task, window)})
            print(rows[-1], flush=True)
    return rows


def replay(drafter: LookupDrafter, task: Task, window: int) -> dict[str, Any]:
    """Decode the turns one by one. Returns counts, and seconds of proposals."""
    counts: Counter[str] = Counter()
    proposal_seconds: list[float] = []
    prompt_seconds: list[float] = []
    state = drafter.init_state(1, 2**20)
    tail = torch.zeros(1, 2, dtype=torch.long)
    text: list[int] = []
    for turn in task:
        if turn.continues:
            state.resume(0, _num_shared(text, turn.prompt))
        else:
            state.clear([0])
        text = list(turn.prompt)
        end = len(text) + len(turn.answer)
        answer_text = text + turn.answer
        while len(text) < end:
            # The target adds the last token.
            largest = min(window, end - len(text) - 1)
            request = DraftRequest(
                [text],
                tail,
                None,
                prompt_lengths=[len(turn.prompt)],
                may_use_other_texts=True,
            )
            start = time.perf_counter()
            (draft,) = drafter.look_up(state, request, [largest])
            seconds = time.perf_counter() - start
            is_first = len(text) == len(turn.prompt)
            (prompt_seconds if is_first else proposal_seconds).append(seconds)

            expected = answer_text[len(text) : len(text) + len(draft)]
            num_accepted = _num_shared(draft, expected)
            text += answer_text[len(text) : len(text) + num_accepted + 1]
            counts["rounds"] += 1
            counts["draft_tokens"] += len(draft)
            counts["accepted"] += num_accepted
        counts["tokens"] += len(turn.answer)
        counts["prompt_tokens"] += len(turn.prompt)
    return {
        **counts,
        "median_microseconds": 1e6 * statistics.median(proposal_seconds),
        "microseconds_per_prompt_token": 1e6 * sum(prompt_seconds) / counts["prompt_tokens"],
    }


def _num_shared(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    pairs = zip(tokens, other_tokens, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def code_edits(
    tokenizer: Tokenizer,
    num_files: int,
    seed: int,
) -> tuple[Task, list[list[int]]]:
    """Files of the standard library with edits, and the tokens of its other files."""
    generator = random.Random(seed)
    files = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if FILE_BYTES[0] < path.stat().st_size < FILE_BYTES[1]:
            files.append(path)
    generator.shuffle(files)

    task = []
    for i, path in enumerate(files[:num_files]):
        source = path.read_text(encoding="utf-8")
        if i % 2 == 0:
            request, edited = renamed(source, generator)
        else:
            request, edited = with_edited_lines(source, generator)
        question = f"{request} Answer with the whole file.\n\n```python\n{source}```"
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        answer = tokenizer.encode_plain(f"```python\n{edited}```")
        task.append(Turn(prompt, answer[:LONGEST_ANSWER]))
    others = [
        tokenizer.encode_plain(path.read_text(encoding="utf-8")) for path in files[num_files:]
    ]
    return task, others


def _names(source: str) -> list[str]:
    names = re.findall(r"\b[a-z_]{4,}\b", source)
    return [name for name in names if not iskeyword(name)]


def renamed(source: str, generator: random.Random) -> tuple[str, str]:
    """A request to rename a frequent name, and the file after it."""
    counts = Counter(_names(source)).most_common(15)
    name = generator.choice([name for name, count in counts if count > 3])
    new_name = generator.choice(["new_", "my_", "the_"]) + name
    return f"Rename {name} to {new_name}.", re.sub(rf"\b{name}\b", new_name, source)


def with_edited_lines(source: str, generator: random.Random) -> tuple[str, str]:
    """A request, and the file after some lines were removed, inserted and changed."""
    names = _names(source)
    lines = source.splitlines(keepends=True)
    for _ in range(max(3, len(lines) // EDITED_LINES)):
        index = generator.randrange(len(lines))
        line = lines[index]
        indent = line[: len(line) - len(line.lstrip())]
        name, other_name = generator.choices(names, k=2)
        edit = generator.choice(["remove", "log", "comment", "change"])
        if edit == "remove":
            del lines[index]
        elif edit == "log":
            lines.insert(index, f'{indent}log.debug("{name}", {other_name})\n')
        elif edit == "comment":
            lines.insert(index, f"{indent}# {name} {other_name}\n")
        else:
            lines[index] = re.sub(r"\b[a-z_]{4,}\b", name, line, count=1)
    return "Fix this file.", "".join(lines)


def greedy_texts(directory: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Chats that the target answered greedily, as tokens."""
    texts = []
    for path in sorted(directory.glob("*/*.safetensors")):
        shard = Shard(path, len(tokenizer.vocabulary.token_bytes))
        for number, temperature in enumerate(shard.temperatures):
            if temperature == 0:
                texts.append(shard.row(number).tolist())
    return texts


def _chats(rows: Sequence[dict[str, Any]]) -> Task:
    task = []
    for row in rows:
        for i, (prompt, answer) in enumerate(row["turns"]):
            task.append(Turn(prompt, answer, continues=i > 0))
    return task


def _load_answers(options: argparse.Namespace, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The target's answers, from the file if it is there."""
    path = Path(options.answers)
    if path.is_file():
        answers: dict[str, Any] = json.loads(path.read_text())
        return answers
    answers = _generate_answers(options, tokenizer)
    path.write_text(json.dumps(answers))
    return answers


def _generate_answers(options: argparse.Namespace, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Greedy answers to first turns of Spec-Bench, and to both turns of its conversations."""
    target = load_model(options.target, dtype="bfloat16", backend="openvino")
    eos = tokenizer.eos

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            result = autoregressive_decode(
                target,
                prompts[start : start + BATCH_SIZE],
                max_new_tokens=options.max_new_tokens,
                eos=sorted(eos),
            )
            answers += result.tokens
            print(f"{len(answers)} of {len(prompts)} answers", flush=True)
        return answers

    singles = []
    questions = []
    num_taken: Counter[str] = Counter()
    for line in Path(options.prompts).read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        category = question["category"]
        prompt = tokenizer.encode_chat([{"role": "user", "content": question["turns"][0]}])
        is_conversation = category not in TASKS
        most = options.num_prompts // 2 if is_conversation else options.num_prompts
        if len(prompt) > LONGEST_PROMPT or num_taken[category] == most:
            continue
        num_taken[category] += 1
        if is_conversation:
            questions.append((question["turns"], prompt))
        else:
            singles.append({"task": category, "prompt": prompt})

    first_prompts = [prompt for _, prompt in questions]
    first_answers = answer(first_prompts)
    second_prompts = []
    for (turns, _), tokens in zip(questions, first_answers, strict=True):
        text = tokenizer.decode(token for token in tokens if token not in eos)
        chat = [
            {"role": "user", "content": turns[0]},
            {"role": "assistant", "content": text},
            {"role": "user", "content": turns[1]},
        ]
        second_prompts.append(tokenizer.encode_chat(chat))
    second_answers = answer(second_prompts)
    chats = []
    for turns in zip(first_prompts, first_answers, second_prompts, second_answers, strict=True):
        chats.append({"turns": [turns[:2], turns[2:]]})
    for row, tokens in zip(singles, answer([row["prompt"] for row in singles]), strict=True):
        row["answer"] = tokens
    return {"singles": singles, "chats": chats}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The acceptance lengths, side by side."""
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["task"], row["num_draft_tokens"])
        cells.setdefault(key, {})[row["drafter"]] = row
    lines = []
    for (task, window), by_drafter in cells.items():
        lookup = by_drafter["prompt lookup"]
        line = [task, str(window), str(lookup["tokens"]), f"{acceptance_length(lookup):.2f}"]
        for name in ("suffix corpus", "suffix corpus with a corpus"):
            row = by_drafter[name]
            ratio = acceptance_length(row) / acceptance_length(lookup)
            line.append(f"{acceptance_length(row):.2f} ({ratio:.2f} x)")
        for name in by_drafter:
            line.append(f"{by_drafter[name]['median_microseconds']:.0f}")
        lines.append(line)
    heads = [
        "Task",
        "draft tokens per round",
        "tokens",
        "lookup",
        "suffix corpus",
        "with a corpus",
        "lookup, µs per proposal",
        "suffix corpus, µs",
        "with a corpus, µs",
    ]
    return markdown_table(heads, lines)


def acceptance_length(row: dict[str, Any]) -> float:
    """New tokens for each round."""
    return float(row["tokens"] / row["rounds"])


if __name__ == "__main__":
    main()

"""The verbs and their options as plain data."""

from __future__ import annotations

import argparse

from lightning_specdec.cli_groups import (
    CKPT,
    DEBUG,
    DRAWS,
    ENDS,
    GENERATION,
    GUESSING,
    LOGS,
    MODELS,
    OUTPUT,
    PLACE,
    PROMPT_SOURCES,
    PROMPTS,
    QUANTIZATION,
    REVISION,
    RULES,
    TRUST,
    window_to_measure,
)
from lightning_specdec.cli_parser import Option, Verb, build

HALVES = ("float16", "bfloat16")
_CONFIG = (
    Option("config", "YAML of the run; repeat to lay one over another", metavar="FILE"),
    Option("ckpt_path", "'last', 'best' or a checkpoint file; fit resumes from it, the others use it", metavar="FILE"),
    Option("seed_everything", "seed of initialization and data order", metavar="INT"),
    Option("trainer.KEY", "any argument of Lightning's Trainer, as --trainer.max_epochs 10", metavar="VALUE"),
    Option("model.KEY", "any argument of the training module, as --model.learning_rate 0.01", metavar="VALUE"),
    Option(
        "data",
        "data module: ArithmeticProgressions, QuadraticProgressions, SequenceFile, TextFiles or GeneratedText",
        metavar="CLASS",
    ),
    Option("data.KEY", "any of its arguments, as --data.path mine.csv", metavar="VALUE"),
    Option("print_config", "print the resolved configuration and stop"),
    Option("trainer.help", "every argument of the Trainer (slow: imports it)"),
    DEBUG,
)
_SHARED = ("config", "trainer.KEY", "print_config", "trainer.help")
"""What `generate` has in common with the other verbs of the Trainer."""
_MORE = "every argument of a class: --model.help PairTraining, --data.help SequenceFile, --trainer.help"

VERBS: dict[str, Verb] = {
    "fit": Verb(
        "train draft and target from a YAML",
        _CONFIG,
        "lightning_specdec fit --config configs/rnn.yaml\n"
        "lightning_specdec fit --config configs/rnn.yaml --ckpt_path last --trainer.max_epochs 200\n"
        "lightning_specdec fit --config configs/rnn.yaml --data SequenceFile --data.path mine.csv\n" + _MORE,
    ),
    "validate": Verb("measure on the validation sequences", _CONFIG, _MORE),
    "test": Verb("measure on the held-out sequences", _CONFIG, _MORE),
    "predict": Verb("continue the held-out prompts, as JSON lines", _CONFIG, _MORE),
    "generate": Verb(
        "write a target's own text, to train drafts on",
        (
            *(option for option in _CONFIG if option.name in _SHARED),
            *GENERATION,
            Option("data", f"where the prompts come from: {', '.join(PROMPT_SOURCES)}", metavar="CLASS"),
            Option("data.KEY", "any of its arguments, as --data.paths 'prompts/*.jsonl'", metavar="VALUE"),
            DEBUG,
        ),
        "lightning_specdec generate --config configs/smollm2_generate.yaml\n"
        "lightning_specdec generate --model GenerateText --model.target ./llama --model.output data/llama "
        "--data PromptFiles --data.paths prompts.txt\n"
        "lightning_specdec generate --config configs/smollm2_generate.yaml --trainer.devices 2 --trainer.strategy ddp\n"
        "The same command goes on with a run that was stopped.\n"
        "every argument of a class: --model.help GenerateText, --data.help PromptFiles, --trainer.help",
    ),
    "decode": Verb(
        "decode both ways, compare the outputs, report the speedup",
        (
            CKPT,
            *MODELS,
            *PROMPTS,
            Option("max_new_tokens", "new tokens of each prompt at most (7; 64 of text)", int),
            *DRAWS,
            *ENDS,
            Option("mode", "which ways to run", default="both", choices=("both", "standard", "speculative")),
            Option("repeats", "timed runs each way (10; 2 of text), or 0 for the outputs alone", int),
            Option("batch_size", "prompts decoded together", int, 1),
            Option(
                "compile",
                "compile a recurrent draft, or both sides' transformers: 3 to 40 seconds at each start",
                action="store_true",
            ),
            *PLACE,
            Option("logprobs", "show each token's log probability under the target", action="store_true"),
            OUTPUT,
            *LOGS,
        ),
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --prompt '1 2 3' --prompt '10 14 18'\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --rule RejectionSampling --temperature 1 --output json\n"
        "lightning_specdec decode --pair gpt2 --prompt 'The history of the telescope begins'\n"
        "lightning_specdec decode --target ./llama --draft ./small-llama --num_draft_tokens auto\n"
        "lightning_specdec decode --target ./llama --draft draft.safetensors\n"
        "lightning_specdec decode --target ./llama --drafter NGramDrafter --drafter.max_ngram 4\n"
        "lightning_specdec decode --target ./llama --drafter EarlyExitDrafter --exit_layer 3",
        home="cli_decode",
    ),
    "sweep": Verb(
        "measure every draft with every window, say which decodes fastest",
        (
            CKPT,
            *GUESSING,
            Option("exit_layers", "exits to measure, as 1 2 3; every one when not given", int, nargs="+"),
            Option(
                "drafts", "drafts of the checkpoint to measure, by name; all when not given", nargs="+", metavar="NAME"
            ),
            Option("num_draft_tokens", "windows to measure", window_to_measure, (2, 4, 6, 8), nargs="+", metavar="INT"),
            *PROMPTS,
            Option("num_prompts", "where no prompts are given: how many of the models' own to take", int, 4),
            Option("max_new_tokens", "new tokens of each prompt at most", int, 128),
            *DRAWS,
            *ENDS,
            Option("repeats", "timed runs each way", int, 5),
            Option("batch_size", "prompts decoded together", int, 1),
            Option("fuse", "which sides' networks are fused", default="both", choices=("both", "none")),
            *PLACE,
            OUTPUT,
            *LOGS,
        ),
        "lightning_specdec sweep --ckpt checkpoints/rnn.ckpt --max_new_tokens 7\n"
        "lightning_specdec sweep --target ./llama --drafter EarlyExitDrafter --exit_layers 4 8 --batch_size 4\n"
        "lightning_specdec sweep --ckpt checkpoints/rnn.ckpt --temperature 1 --rule RejectionSampling --output json",
        home="cli_sweep",
        refusals={"--exit_layer": "sweep takes several: give --exit_layers"},
    ),
    "prompts": Verb(
        "build the prompts that `bench` decodes, and count their tokens",
        (
            Option("ACTION", "build: choose and write", positional=True, choices=("build",), metavar="ACTION"),
            Option("tokenizer", "whose tokens: a model's directory, its name on the hub, or bytes", metavar="MODEL"),
            Option("output", "file to write, as JSON lines", required=True, metavar="FILE"),
            Option(
                "source",
                "hub, shipped, or a file (a .jsonl of rows with a prompt, Spec-Bench's, HumanEval's packed one, a "
                "checkpoint); repeat for more files; the hub when not given, or what ships where no hub answers",
                action="append",
                metavar="FILE",
            ),
            Option(
                "domains",
                "code, conversation, summarization, sequences, or those of the files; all but sequences when not given",
                nargs="+",
                metavar="NAME",
            ),
            Option("size", "of each domain 50 prompts, or 5", default="full", choices=("full", "tiny")),
            Option("num_prompts", "of each domain so many instead", int),
            Option("seed", "of the choice", int, 0),
            Option("raw", "leave out the chat template, which is used where there is one", action="store_true"),
            *LOGS,
        ),
        "lightning_specdec prompts build --tokenizer checkpoints/smollm2 --output prompts.jsonl\n"
        "lightning_specdec prompts build --tokenizer bytes --size tiny --source shipped --output tiny.jsonl\n"
        "lightning_specdec prompts build --tokenizer gpt2 --source question.jsonl --output spec_bench.jsonl\n"
        "lightning_specdec prompts build --domains sequences --output sequences.jsonl",
        home="cli_prompt_sets",
    ),
    "bench": Verb(
        "measure a matrix of drafts, windows, prompts and settings beside standard decoding, and keep it",
        (
            Option("config", "YAML of what is measured; several in turn", nargs="+", action="extend", metavar="FILE"),
            Option("output", "where the directories of results are", default="results", metavar="DIR"),
            Option("name", "of the results, instead of the config's"),
            Option(
                "repeat",
                "measure one row of results again, as DIR:NUMBER or DIR:CELL, and say whether its tokens are the same",
                metavar="ROW",
            ),
            Option(
                "compare",
                "set two drafts of the config against each other on the same prompts, as model:4 ngram:8",
                nargs="+",
                metavar="NAME",
            ),
            Option("format", "how the table is printed", default="text", choices=("text", "markdown", "csv", "json")),
            *LOGS,
        ),
        "lightning_specdec bench --config configs/bench/rnn.yaml\n"
        "lightning_specdec bench --config configs/bench/rnn.yaml --format markdown\n"
        "lightning_specdec bench --config configs/bench/rnn.yaml --compare rnn:4 ngram:4\n"
        "lightning_specdec bench --repeat results/rnn:12\n"
        "The same command goes on with a run that was stopped.",
        home="cli_bench",
    ),
    "audit": Verb(
        "find out whether the output is the target's own: every draft, rule and sampling, beside biased rules",
        (
            CKPT,
            *GUESSING,
            Option("exit_layers", "exits to audit, as 1 2 3; that which `decode` uses when not given", int, nargs="+"),
            Option(
                "drafts", "drafts of the checkpoint to audit, by name; all when not given", nargs="+", metavar="NAME"
            ),
            Option("num_draft_tokens", "guesses per round", int, 3),
            Option("rules", "rules to audit; all when not given", nargs="+", choices=tuple(RULES)),
            Option(
                "temperatures",
                "temperatures to draw with, 0 is greedy; 0, 1, and 0.7 with a top_p of 0.9 when not given",
                float,
                nargs="+",
            ),
            Option("top_k", "with each temperature: only the k likeliest tokens", int),
            Option("top_p", "only the likeliest tokens that hold this much probability", float),
            Option("min_p", "only tokens this times as likely as the likeliest", float),
            Option("repetition_penalty", "divide the scores of tokens that the text holds already by this", float),
            *PROMPTS,
            Option("num_prompts", "where no prompts are given: how many of the models' own to take", int, 4),
            Option("max_new_tokens", "new tokens of each prompt at most, where outputs are compared", int, 32),
            Option("num_decodes", "rows of each of the samples that are compared; 512, or 64 of large models", int),
            Option("num_places", "places where one round is gone through; 3, or 1 of large models", int),
            Option("seed", "of all draws", int, 0),
            *PLACE,
            OUTPUT,
            *LOGS,
        ),
        "lightning_specdec audit --ckpt checkpoints/rnn.ckpt\n"
        "lightning_specdec audit --target ./llama --draft ./small-llama --rules ExactMatch --temperatures 0 0.8\n"
        "Exit code 1 when something that should be lossless is not, or could not be checked.",
        home="cli_audit",
        refusals={
            "--exit_layer": "audit takes several: give --exit_layers",
            "--rule": "audit takes several: give --rules",
        },
    ),
    "report": Verb(
        "say what a benchmark's results come to: one page with the answer, tables and pictures",
        (
            Option("RESULTS", "the directory that `bench` wrote", positional=True),
            Option("output", "directory of the page, tables and pictures; report/ within RESULTS when not given"),
            *LOGS,
        ),
        "lightning_specdec report results/rnn\nlightning_specdec report results/rnn --output docs/results/rnn",
        home="cli_bench_report",
    ),
    "chat": Verb(
        "talk to a chat model, several turns, with its drafts at work",
        (
            *MODELS,
            Option("system", "what the model is told before the chat", metavar="TEXT"),
            Option("max_new_tokens", "tokens of each answer at most", int, 512),
            Option("max_length", "tokens of the whole chat at most; the models' context when not given", int),
            Option("stop", "text that ends an answer and is not shown; repeat for more", action="append"),
            *DRAWS,
            Option("show_drafts", "colour what was guessed and kept, or put it in brackets", action="store_true"),
            Option(
                "stats", "tokens per second after each answer, on stderr; always so on a terminal", action="store_true"
            ),
            *PLACE,
            *LOGS,
        ),
        "lightning_specdec chat --pair smollm2\n"
        "lightning_specdec chat --target checkpoints/smollm2 --drafter NGramDrafter --temperature 0.7 --show_drafts\n"
        "printf 'Hi\\nAnd again\\n' | lightning_specdec chat --pair smollm2 --max_new_tokens 40",
        home="cli_chat",
        refusals={
            "--ckpt": "chat needs --pair or --target, since a checkpoint has no chat template, be it of text or of "
            "tokens: use `decode`"
        },
    ),
    "pairs": Verb(
        "list the pairs of models, and which of them fit this machine",
        (
            Option("check", "say whether all pairs, or this one, fit the memory", metavar="NAME", nargs="?", const=""),
            Option("context", "tokens of text that the caches are counted for", int, 2048),
            Option("batch_size", "texts that are decoded together", int, 1),
            Option("device", "where the models would go, as cpu or cuda:0", default="cpu"),
            Option("ollama", "list the models of a local Ollama server, and try one", action="store_true"),
            Option("model", "of Ollama's, the one to try; the smallest when not given", metavar="NAME"),
            Option("output", "a table, or one JSON document", default="text", choices=("text", "json")),
            DEBUG,
        ),
        "lightning_specdec pairs\n"
        "lightning_specdec pairs --check gpt2 --context 1024    (exit code 1 when it does not fit)\n"
        "lightning_specdec pairs --ollama",
        home="cli_pairs",
    ),
    "check": Verb(
        "load one model, say what it takes, generate ten tokens",
        (
            Option("MODEL", "a directory, or a name on the hub", positional=True),
            QUANTIZATION,
            Option("max_new_tokens", "tokens to generate", int, 10),
            Option("prompt", "text to go on from", default="The quick brown fox"),
            REVISION,
            TRUST,
            *PLACE,
            Option("output", "a report, or one JSON document", default="text", choices=("text", "json")),
            *LOGS,
        ),
        "lightning_specdec check openai-community/gpt2 --dtype bfloat16\n"
        "lightning_specdec check checkpoints/smollm2 --quantization int8",
        home="cli_check",
    ),
    "info": Verb(
        "say what a checkpoint or a draft file holds and how it was made",
        (
            Option("FILE", "the checkpoint, or the draft file", positional=True, nargs="?"),
            Option("ckpt", "the same", metavar="FILE"),
            DEBUG,
        ),
        "lightning_specdec info checkpoints/rnn.ckpt\nlightning_specdec info draft.safetensors",
        home="cli_verbs",
    ),
    "export": Verb(
        "write a training checkpoint as one for decoding alone, or its draft as a file for --draft",
        (
            Option("ckpt", "checkpoint of a training run", required=True, metavar="FILE"),
            Option("output", "file to write; NAME.safetensors for the draft alone", required=True, metavar="FILE"),
            Option("dtype", "store weights in fewer bits; what reads them computes as before", choices=HALVES),
            DEBUG,
        ),
        "lightning_specdec export --ckpt checkpoints/rnn/best.ckpt --output small.ckpt --dtype float16\n"
        "lightning_specdec export --ckpt best.ckpt --output draft.safetensors    (of a target that stayed as it was)",
        home="cli_verbs",
    ),
    "env": Verb("print versions, device, threads and dtypes, for a bug report", (DEBUG,), home="cli_verbs"),
}
TRAINER_VERBS = tuple(name for name, verb in VERBS.items() if verb.home is None)


def make_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    return build(verb, VERBS[verb])

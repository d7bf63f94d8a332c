"""Options that several verbs share, and the names and defaults that they speak of, as plain data.

Tests compare the tables with the constructors, which own the defaults.
"""

from __future__ import annotations

import argparse
import re

from lightning_specdec.cli_parser import Option

RULES: dict[str, dict[str, float]] = {
    "ExactMatch": {},
    "RejectionSampling": {},
    "EpsilonThreshold": {"epsilon": 0.1},
    "TypicalAcceptance": {"epsilon": 0.09, "delta": 0.3},
}
"""The acceptance rules and the defaults of their arguments."""

DRAFTERS: dict[str, dict[str, float]] = {
    "ModelDrafter": {},
    "CrossVocabulary": {"min_share": 0.1},
    "NGramDrafter": {"max_ngram": 5, "min_ngram": 1, "guesses_per_token": 2},
    "LookupFirstDrafter": {},
    "EarlyExitDrafter": {},
}
"""What may guess for a pretrained model, and the defaults of its arguments."""

LOOKS_UP = ("NGramDrafter", "LookupFirstDrafter")
"""What takes the arguments of a look-up, the first of them by itself."""

TRAINED = ("EagleDrafter", "MultiTokenDrafter", "StagedDrafter")
"""What guesses from checkpoints and draft files alone."""

QUANTIZATIONS = ("int8", "int4")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_THREADS = 1024
MAX_TOKENS = 2**20
"""More than any model here can hold in memory, and less than what overflows a size."""
LOG_LEVELS = ("debug", "info", "warning", "error")


def _window(text: str) -> int | str:
    """A number of guesses, or `auto`."""
    if text != "auto" and not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        raise argparse.ArgumentTypeError(f"must be an integer or auto, got {text!r}")
    return text if text == "auto" else int(text)


def window_to_measure(text: str) -> int:
    """A number of guesses."""
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        raise argparse.ArgumentTypeError(f"must be integers, each a window to measure, as 2 4 8, got {text!r}")
    return int(text)


def _drafter(name: str) -> str:
    """What guesses, by a name that says enough to make it."""
    if name in TRAINED:
        told = (
            f"a {name} is trained beside its target: give its file, as --draft FILE, or its checkpoint, as --ckpt FILE"
        )
        raise argparse.ArgumentTypeError(told)
    return name


DEBUG = Option("debug", "show the traceback of an error", action="store_true")
LOGS = (
    Option("log_level", "least severe message to show on stderr", default="info", choices=LOG_LEVELS),
    Option("log_json", "messages on stderr as JSON lines", action="store_true"),
    DEBUG,
)
DRAWS = (
    Option("rule", "what keeps or rejects a guess", default="ExactMatch", choices=tuple(RULES)),
    Option("rule.epsilon", "of EpsilonThreshold (0.1) and TypicalAcceptance (0.09)", float, aliases=("epsilon",)),
    Option("rule.delta", "of TypicalAcceptance (0.3)", float, aliases=("delta",)),
    Option("temperature", "0 is greedy", float, 0.0),
    Option("top_k", "only the k likeliest tokens", int),
    Option("top_p", "only the likeliest tokens that hold this much probability", float),
    Option("min_p", "only tokens this times as likely as the likeliest", float),
    Option("repetition_penalty", "divide the scores of tokens that the text holds already by this", float),
    Option("seed", "the same seed gives the same tokens", int, 0),
)
PLACE = (
    Option("device", "where to decode, as cpu or cuda:0", default="cpu"),
    Option("dtype", "what the models compute in; as stored when not given", choices=DTYPES),
    Option("threads", "CPU threads of torch; one for small models when not given", int),
)
TRUST = Option("trust_remote_code", "run Python code that comes with a model: read it first", action="store_true")
REVISION = Option("revision", "branch, tag or commit of the target on the hub")
QUANTIZATION = Option("quantization", "the target's weights in fewer bits", choices=QUANTIZATIONS)
GUESSING = (
    Option("pair", "a pair of the registry: see `lightning_specdec pairs`", metavar="NAME"),
    Option(
        "target",
        "a pretrained target: a directory, or a name on the hub; of a checkpoint that holds none, where it lies now",
        metavar="MODEL",
    ),
    Option(
        "draft",
        "a smaller model that guesses for it, or instead of the pair's own, or the file of a trained draft; of a "
        "checkpoint's drafts one by name",
        metavar="MODEL|FILE",
    ),
    Option(
        "drafter",
        "what guesses; NGramDrafter looks the text up, LookupFirstDrafter does so before the draft is asked, "
        "EarlyExitDrafter guesses with the target's first layers",
        _drafter,
        choices=tuple(DRAFTERS),
    ),
    Option(
        "drafter.max_ngram",
        "of LookupFirstDrafter and of NGramDrafter: most tokens that are looked up (5)",
        int,
    ),
    Option(
        "drafter.min_ngram",
        "of LookupFirstDrafter (2 there) and of NGramDrafter: fewest tokens that are looked up (1)",
        int,
    ),
    Option(
        "drafter.guesses_per_token",
        "of LookupFirstDrafter and of NGramDrafter: guesses for each token that the look-up matched (2)",
        int,
    ),
    Option("drafter.min_share", "of CrossVocabulary: least share of tokens in common (0.1)", float),
    QUANTIZATION,
    Option("draft_quantization", "the draft's; without a --draft a copy of the target guesses", choices=QUANTIZATIONS),
    Option("draft_dtype", "what the draft computes in; as the target when not given", choices=DTYPES),
    REVISION,
    Option("draft_revision", "the same for the draft"),
    TRUST,
)
MODELS = (
    *GUESSING,
    Option(
        "exit_layer", "of EarlyExitDrafter: how many of the target's layers guess", int, aliases=("drafter.exit_layer",)
    ),
    Option(
        "num_draft_tokens",
        "guesses per round; auto: as many as pay; when not given the pair's, the draft's or the checkpoint's, or 3",
        _window,
        metavar="INT|auto",
    ),
)
"""Which models decode, and how they guess: of every verb that takes pretrained ones."""
PROMPTS = (
    Option(
        "prompt",
        "text, or tokens as '1 2 3' for a target without a tokenizer; repeat for more; '-' (or a bare -) reads "
        "lines from stdin",
        action="append",
    ),
    Option("prompts_file", "prompts, one a line: text, tokens, or JSON; '-' is stdin", metavar="FILE"),
    Option("raw", "give text to the target as it is, without its chat template", action="store_true"),
    Option("chat_template", "insist on the chat template, which is used where there is one", action="store_true"),
)
ENDS = (
    Option("eos", "token that ends a row, the tokenizer's when not given; repeat for more", int, action="append"),
    Option("ignore_eos", "let no token end a row", action="store_true"),
    Option("stop", "text that ends a row and is not shown; repeat for more", action="append"),
)
PROMPT_SOURCES = ("PromptFiles", "Passages", "OpeningTurns", "GeneratedPrompts", "PromptMix")
"""What may give `generate` its prompts."""
GENERATION = (
    Option("model", "GenerateText", metavar="CLASS"),
    Option("model.target", "a model's directory, or its name on the hub", metavar="MODEL"),
    Option("model.output", "the directory that the shards go to", metavar="DIR"),
    Option("model.dtype", "what the target computes in; as it is stored when not given", metavar="DTYPE"),
    Option("model.max_new_tokens", "new tokens of each row at most", int, 256, metavar="INT"),
    Option("model.temperatures", "a row for each prompt and each of these; 0 is greedy", str, (0.0,), metavar="LIST"),
    Option("model.top_p", "draw from the likeliest tokens that hold this much probability", float, metavar="FLOAT"),
    Option("model.batch_size", "rows that are decoded together", int, 32, metavar="INT"),
    Option("model.shard_size", "prompts of a shard: what is lost at most when it is stopped", int, 64, metavar="INT"),
    Option("model.seed", "of the draws", int, 0, metavar="INT"),
    Option(
        "model.num_draft_tokens",
        "guesses of the n-gram look-up per round; 0: standard decoding; auto: as many as pay",
        str,
        0,
        metavar="INT|auto",
    ),
)
"""The arguments of `GenerateText`."""
OUTPUT = Option("output", "a report, or one JSON document", default="text", choices=("text", "json"))
CKPT = Option("ckpt", "checkpoint of a trained pair; or --pair, or --target", metavar="FILE")

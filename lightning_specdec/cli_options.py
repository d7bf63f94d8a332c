"""The verbs and their options as plain data.

Knows nothing of torch, so that `--help` answers at once. A test compares it with the constructors, which own the
defaults.
"""

from __future__ import annotations

import argparse
import re

from lightning_specdec.cli_parser import Option, Verb, build

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
}
"""What may guess for a pretrained model, and the defaults of its arguments."""

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


_CKPT = Option("ckpt", "checkpoint of a trained pair", required=True, metavar="FILE")
_DEBUG = Option("debug", "show the traceback of an error", action="store_true")
_LOGS = (
    Option("log_level", "least severe message to show on stderr", default="info", choices=LOG_LEVELS),
    Option("log_json", "messages on stderr as JSON lines", action="store_true"),
    _DEBUG,
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
_PLACE = (
    Option("device", "where to decode, as cpu or cuda:0", default="cpu"),
    Option("dtype", "what the models compute in; as stored when not given", choices=DTYPES),
    Option("threads", "CPU threads of torch; one for small models when not given", int),
)
_TRUST = Option("trust_remote_code", "run Python code that comes with a model: read it first", action="store_true")
_REVISION = Option("revision", "branch, tag or commit of the target on the hub")
_QUANTIZATION = Option("quantization", "the target's weights in fewer bits", choices=QUANTIZATIONS)
MODELS = (
    Option("pair", "a pair of the registry: see `lightning_specdec pairs`", metavar="NAME"),
    Option("target", "a pretrained target: a directory, or a name on the hub", metavar="MODEL"),
    Option("draft", "a smaller model that guesses for it, or instead of the pair's own", metavar="MODEL"),
    Option("drafter", "what guesses; NGramDrafter looks the text up and needs no draft", choices=tuple(DRAFTERS)),
    Option("drafter.max_ngram", "of NGramDrafter: most tokens that are looked up (5)", int),
    Option("drafter.min_ngram", "of NGramDrafter: fewest tokens that are looked up (1)", int),
    Option("drafter.guesses_per_token", "of NGramDrafter: guesses for each token that the look-up matched (2)", int),
    Option("drafter.min_share", "of CrossVocabulary: least share of tokens in common (0.1)", float),
    Option(
        "num_draft_tokens",
        "guesses per round; auto: as many as pay; when not given the pair's, or 3",
        _window,
        metavar="INT|auto",
    ),
    _QUANTIZATION,
    Option("draft_quantization", "the draft's; without a --draft a copy of the target guesses", choices=QUANTIZATIONS),
    Option("draft_dtype", "what the draft computes in; as the target when not given", choices=DTYPES),
    _REVISION,
    Option("draft_revision", "the same for the draft"),
    _TRUST,
)
"""Which models decode: of every verb that takes pretrained ones."""
_CONFIG = (
    Option("config", "YAML of the run; repeat to lay one over another", metavar="FILE"),
    Option("ckpt_path", "'last', 'best' or a checkpoint file; fit resumes from it, the others use it", metavar="FILE"),
    Option("seed_everything", "seed of initialization and data order", metavar="INT"),
    Option("trainer.KEY", "any argument of Lightning's Trainer, as --trainer.max_epochs 10", metavar="VALUE"),
    Option("model.KEY", "any argument of the training module, as --model.learning_rate 0.01", metavar="VALUE"),
    Option("data", "data module: ArithmeticProgressions or SequenceFile", metavar="CLASS"),
    Option("data.KEY", "any of its arguments, as --data.path mine.csv", metavar="VALUE"),
    Option("print_config", "print the resolved configuration and stop"),
    Option("trainer.help", "every argument of the Trainer (slow: imports it)"),
    _DEBUG,
)
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
    "decode": Verb(
        "decode both ways, compare the outputs, report the speedup",
        (
            Option("ckpt", "checkpoint of a trained pair; or --pair, or --target", metavar="FILE"),
            *MODELS,
            Option(
                "prompt",
                "text, or tokens as '1 2 3' for a target without a tokenizer; repeat for more; '-' (or a bare -) reads "
                "lines from stdin",
                action="append",
            ),
            Option("prompts_file", "prompts, one a line: text, tokens, or JSON; '-' is stdin", metavar="FILE"),
            Option("raw", "give text to the target as it is, without its chat template", action="store_true"),
            Option(
                "chat_template", "insist on the chat template, which is used where there is one", action="store_true"
            ),
            Option("max_new_tokens", "new tokens of each prompt at most (7; 64 of text)", int),
            *DRAWS,
            Option(
                "eos", "token that ends a row, the tokenizer's when not given; repeat for more", int, action="append"
            ),
            Option("ignore_eos", "let no token end a row", action="store_true"),
            Option("stop", "text that ends a row and is not shown; repeat for more", action="append"),
            Option("mode", "which ways to run", default="both", choices=("both", "standard", "speculative")),
            Option("repeats", "timed runs each way (10; 2 of text), or 0 for the outputs alone", int),
            Option("batch_size", "prompts decoded together", int, 1),
            Option(
                "compile",
                "compile a recurrent draft, or both sides' transformers: 3 to 40 seconds at each start",
                action="store_true",
            ),
            *_PLACE,
            Option("logprobs", "show each token's log probability under the target", action="store_true"),
            Option("output", "a report, or one JSON document", default="text", choices=("text", "json")),
            *_LOGS,
        ),
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --prompt '1 2 3' --prompt '10 14 18'\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --rule RejectionSampling --temperature 1 --output json\n"
        "lightning_specdec decode --pair gpt2 --prompt 'The history of the telescope begins'\n"
        "lightning_specdec decode --target ./llama --draft ./small-llama --num_draft_tokens auto\n"
        "lightning_specdec decode --target ./llama --drafter NGramDrafter --drafter.max_ngram 4",
        home="cli_decode",
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
            *_PLACE,
            *_LOGS,
        ),
        "lightning_specdec chat --pair smollm2\n"
        "lightning_specdec chat --target checkpoints/smollm2 --drafter NGramDrafter --temperature 0.7 --show_drafts\n"
        "printf 'Hi\\nAnd again\\n' | lightning_specdec chat --pair smollm2 --max_new_tokens 40",
        home="cli_chat",
        refusals={"--ckpt": "chat needs --pair or --target, since a checkpoint has no tokenizer"},
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
            _DEBUG,
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
            _QUANTIZATION,
            Option("max_new_tokens", "tokens to generate", int, 10),
            Option("prompt", "text to go on from", default="The quick brown fox"),
            _REVISION,
            _TRUST,
            *_PLACE,
            Option("output", "a report, or one JSON document", default="text", choices=("text", "json")),
            *_LOGS,
        ),
        "lightning_specdec check openai-community/gpt2 --dtype bfloat16\n"
        "lightning_specdec check checkpoints/smollm2 --quantization int8",
        home="cli_check",
    ),
    "info": Verb("say what a checkpoint holds and how it was made", (_CKPT, _DEBUG), home="cli_verbs"),
    "export": Verb(
        "write a training checkpoint as one for decoding alone",
        (
            Option("ckpt", "checkpoint of a training run", required=True, metavar="FILE"),
            Option("output", "file to write", required=True, metavar="FILE"),
            _DEBUG,
        ),
        home="cli_verbs",
    ),
    "env": Verb("print versions, device, threads and dtypes, for a bug report", (_DEBUG,), home="cli_verbs"),
}
TRAINER_VERBS = tuple(name for name, verb in VERBS.items() if verb.home is None)


def make_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    return build(verb, VERBS[verb])

"""Flags of the command line, generated from the fields of settings classes. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.hub import GGUF_SUFFIX
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice, Kinds
from lightning_specdec.config.models import (
    FILE_SUFFIXES,
    DraftSource,
    PairSource,
    TargetSource,
    check_directory,
    check_draft,
    is_run,
)
from lightning_specdec.config.pairs import get_pair, list_pairs, shipped_file
from lightning_specdec.config.settings import (
    Settings,
    hints,
    limits_of,
    options_of,
    parse,
    setting,
    setting_fields,
)

log = logging.getLogger(__name__)

KINDS: dict[str, Kinds] = {"drafter": DRAFTERS, "rule": RULES}


class UsageError(ValueError):
    """The command line itself is wrong."""


TEMPLATE_VARIABLES = "chat_template_kwargs"
"""Flag of the chat template's variables: `--chat_template_kwargs.NAME VALUE`."""


@dataclass(frozen=True, kw_only=True)
class TemplateSettings(Settings):
    """Variables of the chat template."""

    chat_template_kwargs: Any = setting(
        None,
        "variables of the chat template, as JSON; or one of them, as "
        "--chat_template_kwargs.enable_thinking false",
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        variables = self.chat_template_kwargs
        if isinstance(variables, str):
            variables = _parse_value(variables)
        if not isinstance(variables, dict | None):
            raise ValueError(
                'chat_template_kwargs must be a JSON object, as {"enable_thinking": false}, got '
                f"{variables!r}"
            )
        object.__setattr__(self, TEMPLATE_VARIABLES, variables or {})


@dataclass(frozen=True, kw_only=True)
class PromptSettings(TemplateSettings):
    """Where prompts come from; by default those of the pair, or three that ship."""

    prompt: tuple[str, ...] = setting(
        (),
        "text, or tokens as '1 2 3' for a target without a tokenizer; '-' reads lines from stdin; "
        "repeatable",
    )
    prompts_file: str | None = setting(
        None,
        "prompts, one a line: text, tokens, or JSON with a \"prompt\"; '-' reads stdin",
        metavar="FILE",
    )
    raw: bool = setting(False, "do not apply the tokenizer's chat template")


@dataclass(frozen=True, kw_only=True)
class MeasureSettings(Settings):
    """How often and how something is measured."""

    repeats: int | None = setting(
        None,
        "timed runs of each method; 0 shows only the outputs; default: 1 to 10, for 20 seconds, "
        "or one run of the first prompts if all prompts take over a minute",
        minimum=0,
    )
    batch_size: int = setting(1, "prompts decoded together", minimum=1, maximum=MAX_TOKENS)
    ignore_eos: bool = setting(False, "do not stop at EOS: no token ends a row")
    threads: int | None = setting(
        None,
        "CPU threads; default: 1 for models of less than a million parameters, else torch's choice",
        minimum=1,
        maximum=1024,
    )


@dataclass(frozen=True, kw_only=True)
class GrammarSettings(Settings):
    """What the output must be; by default anything."""

    json_schema: str | None = setting(
        None, "the output is JSON under the schema of this file", metavar="FILE"
    )
    regex: str | None = setting(
        None, "this regular expression matches the whole output", metavar="TEXT"
    )
    grammar: str | None = setting(
        None,
        "the output is a text of the context-free grammar of this file, in Lark's syntax",
        metavar="FILE",
    )

    @property
    def given(self) -> tuple[str, str] | None:
        """The kind of the grammar and its text; None without one.

        Raises:
            ValueError: several are given, or a file cannot be read.
        """
        values = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "lark": self.grammar,
        }
        given = [(kind, value) for kind, value in values.items() if value is not None]
        if not given:
            return None
        if len(given) > 1:
            raise UsageError(
                "--json_schema, --regex and --grammar exclude each other: give one of them"
            )
        kind, value = given[0]
        if kind == "regex":
            return kind, value
        try:
            return kind, Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise ValueError(f"{value} cannot be read: {reason}") from None


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """How results are printed."""

    output: str = setting(
        "text", "text for readers, or one JSON document", choices=("text", "json")
    )


class Parser(argparse.ArgumentParser):
    """The parser of a verb. Flags accept underscores or dashes, and errors are one line."""

    def __init__(self, verb: str, summary: str, examples: str) -> None:
        super().__init__(
            prog=f"lightning_specdec {verb}",
            usage="%(prog)s [options]",
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        # What to do instead of using a flag that other verbs have and this one has not.
        self.absent_flags: dict[str, str] = {}

    def format_help(self) -> str:
        positionals = [action.dest for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *positionals, "[options]"])
        return super().format_help()

    def add_settings(
        self,
        title: str,
        settings: type[Settings],
        *,
        skip: Sequence[str] = (),
        help: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        """Add a group of flags, one for each field that has a help line.

        A field whose metavar ends in "..." takes several values after one flag.

        Args:
            skip: fields to leave out.
            help: help lines that differ from those of the fields.
            defaults: defaults that differ from those of the fields.
        """
        help_lines = help or {}
        group = self.add_argument_group(title)
        field_types = hints(settings)  # type: ignore[arg-type]
        for field in setting_fields(settings):
            if not field.metadata.get("help") or field.name in skip:
                continue
            options: dict[str, Any] = {}
            default = field.default
            if field.name in defaults:
                default = defaults[field.name]
                options["default"] = default
            text = help_lines.get(field.name) or str(field.metadata["help"])
            options["help"] = _help_text(text, default)
            options.update(_value_options(field, field_types[field.name]))
            group.add_argument(f"--{field.name}", **options)

    def add_kinds(self, name: str) -> None:
        """List the drafters or rules by name in the help."""
        kinds = KINDS[name]
        lines = [
            f"give --{name} NAME --{name}.SETTING VALUE; --{name}.help NAME shows the settings"
        ]
        for kind in kinds:
            lines.append(f"  {kind:<20} {kinds.summary(kind)}")
        self.add_argument_group(f"{name.capitalize()}s", "\n".join(lines))

    def add_models(self, *, skip: Sequence[str] = ()) -> None:
        """Add the flags that name target and drafter, and MODEL, short for one of them."""
        model_help = "a checkpoint, a model's directory, a pair, or a Hub name"
        if "ckpt" in skip:
            model_help = "a model's directory, a pair, or a Hub name"
        self.add_argument("MODEL", nargs="?", help=model_help)
        draft_help = {}
        if "ckpt" in skip:
            draft_help["draft"] = "draft model, or draft file"
        self.add_settings("Model", TargetSource, skip=skip)
        self.add_settings("Draft", DraftSource, skip=skip, help=draft_help)
        self.add_kinds("drafter")

    def add_decoding(
        self,
        *,
        skip: Sequence[str] = (),
        help: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        """Add the flags of `DecodingConfig`, sampling included. Arguments as of `add_settings`."""
        self.add_settings("Sampling", DecodingConfig, skip=skip, help=help, **defaults)
        self.add_kinds("rule")

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the command line.

        Returns:
            Only the flags that were given. `drafter` and `rule` are `Choice`s whose settings are
            still text, because their classes are not imported yet.
        """
        words = join_template_variables(words)
        remaining_words, kind_settings = self._split_kind_settings(words)
        options = self.parse_args(remaining_words)
        for kind, settings in kind_settings.items():
            if kind in options:
                setattr(options, kind, Choice(getattr(options, kind), settings))
            elif settings:
                self.error(f"--{kind}.{min(settings)} needs the {kind}'s name: give --{kind} NAME")
        return options

    def _split_kind_settings(
        self, words: Sequence[str]
    ) -> tuple[list[str], dict[str, dict[str, str]]]:
        """Take `--drafter.FIELD VALUE` and `--rule.FIELD VALUE` out of the command line.

        Returns:
            The other words, with dashes inside flags replaced by underscores, and the settings of
            each kind by name.
        """
        remaining_words: list[str] = []
        kind_settings: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        queue = list(words)
        while queue:
            word = queue.pop(0)
            flag, equals, value = word.partition("=")
            if not re.fullmatch(r"--[\w.-]+", flag):
                remaining_words.append(word)
                continue

            name = flag.removeprefix("--").replace("-", "_")
            kind, dot, field_name = name.partition(".")
            is_kind_setting = dot and kind in KINDS and f"--{kind}" in self._option_string_actions
            if not is_kind_setting:
                remaining_words.append(f"--{name}{equals}{value}")
                continue

            if not equals:
                # The value is the next word.
                if not queue:
                    self.error(f"argument --{name}: expected a value")
                value = queue.pop(0)
            kind_settings[kind][field_name] = value
        return remaining_words, kind_settings

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._advice(message)} (see `{self.prog} --help`)")

    def _advice(self, message: str) -> str:
        """A hint to append to argparse's message about an unknown argument.

        It names a similar flag, or what the verb accepts instead of a plain word. Other messages
        get no hint.
        """
        _, separator, arguments = message.partition("unrecognized arguments: ")
        if not separator:
            return ""

        unknown = arguments.partition(" ")[0].partition("=")[0]
        if not unknown.startswith("-"):
            return self._positional_advice(unknown)
        # "-" and "--" are prefixes of every flag.
        is_only_dashes = not unknown.strip("-")
        if is_only_dashes:
            return ""

        known_flags = list(self._option_string_actions)
        advice = self.absent_flags.get(unknown)
        if advice is not None and unknown not in known_flags:
            return f": {advice}"
        # An abbreviation stands for the first flag that it starts.
        matches = [flag for flag in known_flags if flag.startswith(unknown)]
        if not matches:
            matches = difflib.get_close_matches(unknown, known_flags, n=1)
        return f": did you mean {matches[0]}?" if matches else ""

    def _positional_advice(self, word: str) -> str:
        """Explain an unexpected word that is not a flag, by what this verb accepts."""
        if "--config" in self._option_string_actions and word.endswith((".yaml", ".yml")):
            return f": did you mean --config {word}?"
        if "--prompt" in self._option_string_actions:
            return ": give a prompt as --prompt TEXT"
        positional = [action.dest for action in self._actions if not action.option_strings]
        if positional:
            return f": {self.prog} accepts one {positional[0]}"
        return f": {self.prog} accepts only options"


def join_template_variables(words: Sequence[str]) -> list[str]:
    """The words of a command line with `--chat_template_kwargs.NAME VALUE` joined to one flag.

    Values that are JSON are read as such: true and 3 are no text. The joined flag is at the end.
    """
    variables: dict[str, Any] = {}
    other_words: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("chat-template-kwargs", TEMPLATE_VARIABLES)
        name, dot, variable = flag.partition(".")
        if name != f"--{TEMPLATE_VARIABLES}":
            other_words.append(word)
            continue
        if not equals:
            if not queue:
                raise UsageError(f"argument {flag}: expected a value")
            value = queue.pop(0)

        parsed_value = _parse_value(value)
        if dot:
            variables[variable] = parsed_value
        elif isinstance(parsed_value, dict):
            variables.update(parsed_value)
        else:
            # The setting refuses it.
            other_words += [name, value]
    if variables:
        other_words += [f"--{TEMPLATE_VARIABLES}", json.dumps(variables)]
    return other_words


def _parse_value(text: str) -> Any:
    """The value that a text is in JSON, or as a constant of Python; else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _help_text(text: str, default: Any) -> str:
    """The help line of a flag, followed by its default if that is informative."""
    # argparse formats help with the % operator.
    text = text.replace("%", "%%")
    is_unset = any(default is value for value in (None, False, (), MISSING))
    if is_unset or "default:" in text:
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} (default: {shown})"


def _value_options(field: Field[Any], hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` that describe the value of a field with this type."""
    if hint is bool:
        return {"action": "store_true"}

    metavar = field.metadata.get("metavar")
    options: dict[str, Any] = {}
    item_types: list[Any] = []
    for option in options_of(hint):
        if get_origin(option) is tuple:
            item_types += options_of(get_args(option)[0])
            takes_several = str(metavar).endswith("...")
            options["action"] = "extend" if takes_several else "append"
            if takes_several:
                options["nargs"] = "+"
                metavar = str(metavar).removesuffix(" ...")
        else:
            item_types.append(option)

    options["metavar"] = metavar or _usual_metavar(field.metadata.get("choices"), item_types)

    def read(word: str) -> Any:
        if hint is Any and re.fullmatch(r"-?\d+", word):
            return int(word)
        try:
            return parse(word, hint)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    options["type"] = read
    return options


def _usual_metavar(choices: Sequence[str] | None, item_types: Sequence[Any]) -> str:
    """What stands for the value of a flag in the help, unless its field says so."""
    if choices:
        return "{" + ",".join(choices) + "}"
    if int in item_types:
        return "INT"
    if float in item_types:
        return "NUMBER"
    return "TEXT"


SettingsType = TypeVar("SettingsType", bound=Settings)


def chosen(options: Namespace, settings: type[SettingsType], **changes: Any) -> SettingsType:
    """Build settings from the flags that were given, and from `changes`, which win."""
    values = {}
    for field in setting_fields(settings):
        if field.name in options:
            value = getattr(options, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    values.update(changes)
    return settings(**values)


def decoding(options: Namespace, **changes: Any) -> DecodingConfig:
    """Build the decoding config from the flags that were given, and from `changes`.

    Raises:
        ValueError: a value is wrong, there is no such rule, or --eos and --ignore_eos are both
            given.
    """
    if "ignore_eos" in options:
        if "eos" in options:
            raise UsageError("--ignore_eos and --eos exclude each other: give one of them")
        changes["eos"] = ()
    config = chosen(options, DecodingConfig, **changes)
    if config.rule is None:
        return config
    RULES.check(config.rule.name)
    return config.changed(rule=typed(config.rule, "rule"))


def add_class(parser: Parser) -> None:
    """Add the flag that names the user's own drafter class of a file."""
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="import path of the file's drafter class, if it is your own",
    )


def class_named(options: Namespace) -> str | None:
    """Return the import path given as --drafter, or None. The file stores the settings.

    Raises:
        UsageError: settings are given too.
    """
    choice: Choice | None = getattr(options, "drafter", None)
    if choice is None:
        return None
    if choice.settings:
        name = next(iter(choice.settings))
        raise UsageError(f"the file has the drafter's settings: drop --drafter.{name}")
    return choice.name


def pair_source(options: Namespace) -> PairSource:
    """Return the models that the flags name. A positional MODEL is a short form of a flag.

    Raises:
        ValueError: no model or several are named, or a path does not exist.
    """
    model = getattr(options, "MODEL", None)
    if model is not None:
        names = [name for name in ("ckpt", "pair", "target") if name in options]
        if names:
            raise UsageError(
                f"name the models once, got --{names[0]} and {model!r}: "
                "give a prompt as --prompt '1 2 3'"
            )
        setattr(options, model_flag(model), model)
    use_shipped_files(options)

    source = chosen(options, PairSource)
    # Checked here because loading the models, which would find out too, takes seconds.
    if source.pair is not None:
        get_pair(source.pair)
    if source.target is not None:
        check_directory(source.target)
    if source.draft is not None and source.ckpt is None:
        check_draft(source.draft)
    return source


def use_shipped_files(options: Namespace) -> None:
    """Let `checkpoints/NAME` stand for the file in the clone, if the current directory has none."""
    for name in ("ckpt", "target", "draft"):
        given = getattr(options, name, None)
        if given is None:
            continue
        found = shipped_file(given)
        if found != given:
            log.info("%s is not in this directory: using %s", given, found)
            setattr(options, name, found)


def model_flag(model: str) -> str:
    """Return whether a positional MODEL means `ckpt` (or a draft file), `pair`, or `target`."""
    path = Path(shipped_file(model)).expanduser()
    if path.is_dir():
        return "ckpt" if is_run(path) else "target"
    if path.suffix.lower() == GGUF_SUFFIX:
        return "target"
    if path.is_file() or path.suffix in FILE_SUFFIXES:
        return "ckpt"
    pair_names = {pair.name for pair in list_pairs()}
    return "pair" if model in pair_names else "target"


def typed(choice: Choice, kind: str) -> Choice:
    """Convert a choice's settings from text to the types of its class, which this imports.

    Raises:
        ValueError: the class has no such setting, or a value is wrong.
    """
    if not choice.settings:
        return choice

    chosen_class = KINDS[kind].load(choice.name)
    settings_class: type[Settings] = chosen_class.Settings
    field_types = hints(settings_class)  # type: ignore[arg-type]
    values = dict(choice.settings)
    for name in values.keys() & field_types.keys():
        try:
            values[name] = parse(values[name], field_types[name])
        except ValueError as error:
            raise ValueError(f"--{kind}.{name} {error}") from None

    # The settings of a trained drafter are incomplete here: its file stores the others.
    if not getattr(chosen_class, "from_file", False):
        settings_class.from_dict(values, f"{choice.name}.")
    return Choice(choice.name, values)


def kind_help(flag: str, name: str) -> str:
    """The output of `--drafter.help NAME`: the class's summary and settings. Imports the class."""
    kind = flag.removeprefix("--").removesuffix(".help")
    chosen_class = KINDS[kind].load(name)
    summary = (chosen_class.__doc__ or "").strip().splitlines()[0]
    lines = [f"{name}: {summary}", ""]
    for field in setting_fields(chosen_class.Settings):
        if not field.metadata.get("help"):
            # Only files set it.
            continue
        remarks = []
        limits = limits_of(field)
        if limits:
            remarks.append(limits)
        if field.default is MISSING:
            remarks.append("required")
        elif field.default is not None and field.default != ():
            remarks.append(f"default: {field.default}")
        remark = f" ({'; '.join(remarks)})" if remarks else ""
        lines.append(f"  --{kind}.{field.name:<20} {field.metadata['help']}{remark}")
    if len(lines) == 2:
        lines.append("  no settings")
    return "\n".join(lines)

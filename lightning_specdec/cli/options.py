"""Flags of the command line, made from the fields of settings classes. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, RULES, Choice, Kinds
from lightning_specdec.config.models import DraftSource, PairSource, TargetSource, check_directory
from lightning_specdec.config.pairs import get_pair, list_pairs
from lightning_specdec.config.settings import (
    Settings,
    hints,
    options_of,
    parse,
    setting,
    setting_fields,
)

KINDS: dict[str, Kinds] = {"drafter": DRAFTERS, "rule": RULES}


class UsageError(ValueError):
    """The command line itself is wrong."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Settings):
    """Where prompts come from; by default the pair's own, or three that ship."""

    prompt: tuple[str, ...] = setting(
        (),
        "text, or tokens as '1 2 3' for a target without a tokenizer; '-' reads lines from stdin; repeatable",
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
        "timed runs of each method; 0 shows only the outputs; default: 2 to 10, for 20 seconds",
        minimum=0,
    )
    batch_size: int = setting(1, "prompts decoded together", minimum=1, maximum=MAX_TOKENS)
    ignore_eos: bool = setting(False, "do not stop at EOS: no token ends a row")
    threads: int | None = setting(
        None, "CPU threads; default: 1 for small models", minimum=1, maximum=1024
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """How results are printed."""

    output: str = setting(
        "text", "text for readers, or one JSON document", choices=("text", "json")
    )


class Parser(argparse.ArgumentParser):
    """The parser of a verb: a flag is written with underscores or dashes, and errors are one line."""

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

    def add_settings(
        self,
        title: str,
        settings: type[Settings],
        *,
        skip: Sequence[str] = (),
        **defaults: Any,
    ) -> None:
        """A group of flags, one for each field with a help line; a field whose metavar ends in "..." takes several.

        Args:
            skip: fields to leave out.
            defaults: those that differ from the fields' own.
        """
        group = self.add_argument_group(title)
        for each in setting_fields(settings):
            if each.metadata.get("help") and each.name not in skip:
                _add_flag(group, each, hints(settings)[each.name], defaults)  # type: ignore[arg-type]

    def add_kinds(self, name: str) -> None:
        """List the drafters or rules by name in the help."""
        listed = "\n".join(f"  {kind:<20} {KINDS[name].summary(kind)}" for kind in KINDS[name])
        told = f"give --{name} NAME --{name}.SETTING VALUE; --{name}.help NAME shows the settings"
        self.add_argument_group(f"{name.capitalize()}s", f"{told}\n{listed}")

    def add_models(self, *, skip: Sequence[str] = ()) -> None:
        """The flags that name target and drafter; MODEL stands for --ckpt, --target or --pair."""
        self.add_argument(
            "MODEL",
            nargs="?",
            help="a checkpoint, a model's directory, a pair, or a name on the hub",
        )
        self.add_settings("Model", TargetSource, skip=skip)
        self.add_settings("Draft", DraftSource, skip=skip)
        self.add_kinds("drafter")

    def add_decoding(self, *, skip: Sequence[str] = (), **defaults: Any) -> None:
        """The flags of `DecodingConfig`, and of its `SamplingSettings`."""
        self.add_settings("Sampling", DecodingConfig, skip=skip, **defaults)
        self.add_kinds("rule")

    def read(self, words: Sequence[str]) -> Namespace:
        """The flags that are given, and no others; `drafter` and `rule` are `Choice`s with unread settings."""
        rest: list[str] = []
        settings: dict[str, dict[str, str]] = {name: {} for name in KINDS}
        queue = list(words)
        while queue:
            word = queue.pop(0)
            flag, equals, value = word.partition("=")
            if re.fullmatch(r"--[\w.-]+", flag):
                flag = "--" + flag[2:].replace("-", "_")
                word = flag + equals + value
                kind, dot, name = flag[2:].partition(".")
                if dot and kind in KINDS and f"--{kind}" in self._option_string_actions:
                    if not equals and not queue:
                        self.error(f"argument {flag}: expected a value")
                    settings[kind][name] = value if equals else queue.pop(0)
                    continue
            rest.append(word)
        options = self.parse_args(rest)
        for kind, given in settings.items():
            if kind in options:
                setattr(options, kind, Choice(getattr(options, kind), given))
            elif given:
                self.error(f"--{kind}.{min(given)} needs the {kind}'s name: give --{kind} NAME")
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._advice(message)} (see `{self.prog} --help`)")

    def _advice(self, message: str) -> str:
        """A suggestion for the first unknown argument."""
        _, found, words = message.partition("unrecognized arguments: ")
        if not found:
            return ""
        unknown = words.partition(" ")[0].partition("=")[0]
        known = list(self._option_string_actions) if unknown.strip("-") else []
        near = [each for each in known if each.startswith(unknown)] or difflib.get_close_matches(
            unknown, known, n=1
        )
        return (
            f": did you mean {near[0]}?"
            if near
            else ""
            if unknown[:1] == "-"
            else ": give a prompt as --prompt TEXT"
        )


def _add_flag(group: Any, each: Field[Any], hint: Any, defaults: dict[str, Any]) -> None:
    text, metavar = str(each.metadata["help"]).replace("%", "%%"), each.metadata.get("metavar")
    default = defaults.get(each.name, each.default)
    if not any(default is no for no in (None, False, (), MISSING)) and "default:" not in text:
        text += (
            f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        )
    more: dict[str, Any] = {"help": text}
    if each.name in defaults:
        more["default"] = default
    if hint is bool:
        group.add_argument(f"--{each.name}", action="store_true", **more)
        return
    kinds = [get_args(kind)[0] if get_origin(kind) is tuple else kind for kind in options_of(hint)]
    if any(get_origin(kind) is tuple for kind in options_of(hint)):
        several = str(metavar).endswith("...")
        more |= {"action": "extend", "nargs": "+"} if several else {"action": "append"}
        metavar = metavar and metavar.removesuffix(" ...")
    if choices := each.metadata.get("choices"):
        metavar = "{" + ",".join(choices) + "}"
    noun = "INT" if int in kinds else "NUMBER" if float in kinds else "TEXT"

    def read(word: str) -> Any:
        try:
            return int(word) if hint is Any and re.fullmatch(r"-?\d+", word) else parse(word, hint)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group.add_argument(f"--{each.name}", type=read, metavar=metavar or noun, **more)


SettingsType = TypeVar("SettingsType", bound=Settings)


def chosen(options: Namespace, settings: type[SettingsType], **changes: Any) -> SettingsType:
    """Settings from the flags that were given, and changes."""
    names = [each.name for each in setting_fields(settings)]
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
    }
    return settings(**{name: value for name, value in given.items() if name in names} | changes)


def decoding(options: Namespace, **changes: Any) -> DecodingConfig:
    """How to decode, as the flags say.

    Raises:
        ValueError: a value is wrong, there is no such rule, or --eos and --ignore_eos are both given.
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
    """The flag by which the user names a file's foreign drafter class."""
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="import path of the file's drafter class, if it is your own",
    )


def class_named(options: Namespace) -> str | None:
    """The import path that --drafter gives; its settings are the file's.

    Raises:
        UsageError: others are given.
    """
    choice: Choice | None = getattr(options, "drafter", None)
    if choice is not None and choice.settings:
        raise UsageError(
            f"the file has the drafter's settings: drop --drafter.{next(iter(choice.settings))}"
        )
    return None if choice is None else choice.name


def pair_source(options: Namespace) -> PairSource:
    """The models that the flags name; MODEL becomes the flag that it stands for.

    Raises:
        ValueError: none or several are named, or they cannot be where they are said to be.
    """
    if (model := getattr(options, "MODEL", None)) is not None:
        if named := [name for name in ("ckpt", "pair", "target") if name in options]:
            raise UsageError(
                f"name the models once, got --{named[0]} and {model!r}: give a prompt as --prompt '1 2 3'"
            )
        setattr(options, model_flag(model), model)
    source = chosen(options, PairSource)
    if source.pair is not None:
        get_pair(source.pair)
    if source.target is not None:
        check_directory(source.target)
    if (
        source.draft is not None
        and source.ckpt is None
        and not Path(source.draft).expanduser().is_file()
    ):
        if source.draft.endswith(".safetensors"):
            raise ValueError(f"there is no draft file {source.draft}: check the path")
        check_directory(source.draft)
    return source


def model_flag(model: str) -> str:
    """Whether a positional MODEL is meant as `ckpt` (or a draft file), `pair` or `target`."""
    path = Path(model).expanduser()
    if path.is_dir():
        trained = any((*path.glob("version_*/*.ckpt"), *path.glob("*.ckpt")))
        return "ckpt" if trained and not (path / "config.json").exists() else "target"
    if path.is_file() or path.suffix in (".ckpt", ".safetensors"):
        return "ckpt"
    return "pair" if model in {pair.name for pair in list_pairs()} else "target"


def typed(choice: Choice, kind: str) -> Choice:
    """A choice whose settings are read as its class says; imports the class.

    Raises:
        ValueError: the class has no such setting, or a value is wrong.
    """
    if not choice.settings:
        return choice
    found = KINDS[kind].load(choice.name)
    settings: type[Settings] = found.Settings
    known = dict(choice.settings)
    for name in known.keys() & hints(settings).keys():  # type: ignore[arg-type]
        try:
            known[name] = parse(known[name], hints(settings)[name])  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"--{kind}.{name} {error}") from None
    if not getattr(found, "from_file", False):  # the file has the others
        settings.from_dict(known, f"{choice.name}.")
    return Choice(choice.name, known)


def kind_help(flag: str, name: str) -> str:
    """What `--drafter.help NAME` prints: the class's summary and its settings. Imports the class."""
    kind = flag.removeprefix("--").removesuffix(".help")
    found = KINDS[kind].load(name)
    lines = [f"{name}: {(found.__doc__ or '').strip().splitlines()[0]}", ""]
    for each in setting_fields(found.Settings):
        default = "" if each.default in (None, MISSING) else f" (default: {each.default})"
        lines.append(f"  --{kind}.{each.name:<20} {each.metadata.get('help', '')}{default}")
    return "\n".join(lines)

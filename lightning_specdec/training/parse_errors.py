"""A parser's report of several lines -> the one line that its reader needs."""

from __future__ import annotations

import difflib
import inspect
import re
import sys

_KEY = re.compile(r'Parser key "([^"]+)":?')
_CLASS = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
_DENIED = re.compile(r"Importing '([^']+)' is not allowed.*")
_REQUIRED = re.compile(r"(the following arguments are required: .*)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
_OF_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
_UNKNOWN = re.compile(r"Option '([\w.]+)' is not accepted")
_SCAFFOLD = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value type:|Problem with given class_path '[^']*':$"
    r"|Expected a path but|Expected a <class 'NoneType'>"
)


def one_line(report: str) -> str:
    """The key and the reasons of a jsonargparse error, without the types and alternatives around them."""
    keys: list[str] = []
    reasons: list[str] = []
    given = owner = ""
    for line in report.splitlines():
        text = line.strip().removeprefix("- ")
        if key := _KEY.match(text):
            keys.append(key[1])
            text = text[key.end() :].strip()
        if of_class := _OF_CLASS.match(text):
            owner = of_class[1]
        if text.startswith("Given value:"):
            given = text.removeprefix("Given value:").strip()
        elif text and not _SCAFFOLD.match(text):
            reason = _plain(text.rpartition("': ")[2] if text.startswith("Problem with given class_path") else text)
            if unknown := _UNKNOWN.fullmatch(reason):
                reason += _near(unknown[1], owner)
            if reason not in reasons:
                reasons.append(reason)
    where = ".".join(dict.fromkeys(keys))
    what = "; ".join(reasons) or " ".join(report.split())
    if keys and reasons and all(reason.startswith("expected") for reason in reasons) and "got" not in what.lower():
        what += f", got {given[:80]}"
    return f"{where}: {what}" if where else what


def _near(name: str, owner: str) -> str:
    """What was probably meant by an argument that a class, which the parser has loaded, has not got."""
    module, _, of_class = owner.rpartition(".")
    found = getattr(sys.modules.get(module), of_class, None)
    classes = [each for each in getattr(found, "__mro__", ()) if "__init__" in vars(each) and each is not object]
    known = dict.fromkeys(key for each in classes for key in inspect.signature(each.__init__).parameters)
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _plain(reason: str) -> str:
    reason = _DENIED.sub(r"\1 may not be named here: only classes of lightning_specdec and of Lightning may", reason)
    reason = _NO_CLASS.sub(r"there is no class \1 to put here: see --help for the choices", reason)
    reason = _REQUIRED.sub(r"\1: give a config that has them, as --config configs/rnn.yaml", reason)
    reason = _CLASS.sub(r"\1", reason).replace(". Got value: ", ", got ")
    return re.sub(r"^expected a (?=[aeiou])", "expected an ", re.sub(r"^Expected", "expected", reason))

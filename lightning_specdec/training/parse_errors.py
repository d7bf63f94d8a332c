"""A parser's report of several lines -> the one line that its reader needs.

Knows nothing of what is being parsed.
"""

from __future__ import annotations

import re

_KEY = re.compile(r'Parser key "([^"]+)":?')
_CLASS = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
_DENIED = re.compile(r"Importing '([^']+)' is not allowed.*")
_REQUIRED = re.compile(r"(the following arguments are required: .*)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
_SCAFFOLD = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value type:|Problem with given class_path '[^']*':$"
    r"|Expected a path but|Expected a <class 'NoneType'>"
)


def one_line(report: str) -> str:
    """The key and the reasons of a jsonargparse error, without the types and alternatives around them."""
    keys: list[str] = []
    reasons: list[str] = []
    given = ""
    for line in report.splitlines():
        text = line.strip().removeprefix("- ")
        if key := _KEY.match(text):
            keys.append(key[1])
            text = text[key.end() :].strip()
        if text.startswith("Given value:"):
            given = text.removeprefix("Given value:").strip()
        elif text and not _SCAFFOLD.match(text):
            reason = _plain(text.rpartition("': ")[2] if text.startswith("Problem with given class_path") else text)
            if reason not in reasons:
                reasons.append(reason)
    where = ".".join(dict.fromkeys(keys))
    what = "; ".join(reasons) or " ".join(report.split())
    if keys and reasons and all(reason.startswith("expected") for reason in reasons) and "got" not in what.lower():
        what += f", got {given[:80]}"
    return f"{where}: {what}" if where else what


def _plain(reason: str) -> str:
    reason = _DENIED.sub(r"\1 may not be named here: only classes of lightning_specdec and of Lightning may", reason)
    reason = _NO_CLASS.sub(r"there is no class \1 to put here: see --help for the choices", reason)
    reason = _REQUIRED.sub(r"\1: give a config that has them, as --config configs/rnn.yaml", reason)
    reason = _CLASS.sub(r"\1", reason).replace(". Got value: ", ", got ")
    return re.sub(r"^expected a (?=[aeiou])", "expected an ", re.sub(r"^Expected", "expected", reason))

"""Chat templates, rendered in transformers' sandbox with limits on time and size.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from reaching the
machine, but a template can still run forever or fill the memory. The limits here end most such
templates with an error. Not all: a value that contains itself many times over, written out by one
filter, has no limit, since no check runs inside of a filter.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0
"""Processor time that a template may use for one chat. Real templates need milliseconds."""
MAX_SIZE = 10_000_000
"""Characters of a text, or elements of a list, that one step of a template may create."""
MAX_INTEGER_BITS = 1024
"""Size of the integers that a template may compute."""
MAX_WIDTH = 10_000
"""Characters to which a template may pad or indent a text."""
PADDING_FILTERS = ("center", "indent", "tojson", "truncate")
"""Filters of which an argument is a width."""
PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes")
"""Methods of texts, bytes and integers of which an argument is a width."""
REMOVED_FILTERS = ("pprint", "urlize", "wordwrap")
"""Filters for web pages, which can run for minutes without a check. No chat template needs them."""
_LARGE_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{5,}|\*)")
"""A width of five digits or more, or from a value, in a format string with percent signs."""
_LARGE_BRACE_WIDTH = re.compile(r"\{[^{}:]*:[^{}]*(?:[0-9]{5,}|\{)")
"""The same in a format string with braces."""

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""When the template that is being rendered must be done, by the thread's processor time."""


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text of a chat, up to where the model's answer begins.

    Args:
        template: source of the template.
        messages: turns of the chat.
        variables: further variables of the template, such as special tokens. They override the ones
            set here.

    Raises:
        Exception: of any kind that a template can raise; `TemplateRuntimeError` if it exceeds a
            limit.
    """
    # As in transformers: many templates would write "None" for a key that is present without a
    # value.
    present_values = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    all_variables = {
        "messages": present_values,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **variables,
    }
    reset_token = _deadline.set(time.thread_time() + MAX_SECONDS)
    try:
        return _compile(template).render(all_variables)
    finally:
        _deadline.reset(reset_token)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    # transformers has no public access to the filters and functions that it offers to templates.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source: Any = _compile_jinja_template("").environment
    environment = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[type(extension) for extension in source.extensions.values()],
        # Jinja would compute constant expressions while it compiles, without any check.
        optimized=False,
    )
    environment.globals.update(source.globals)
    # It writes pages of filler text.
    del environment.globals["lipsum"]
    environment.filters.update(source.filters)
    for name in REMOVED_FILTERS:
        del environment.filters[name]
    environment.filters["check_each"] = _check_each
    environment.filters["check_size"] = _check_filtered_size
    environment.filters["check_width"] = _check_filtered_width
    environment.filters["check_format"] = _check_filtered_format
    return environment.from_string(template)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits on the time and the memory that a template uses.

    Every iteration of a loop and every call compares the time with the deadline, and every step
    that can make a text or a list longer checks its size.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Jinja's hook between parsing a template and generating its code."""
        return super()._generate(_AddChecks().visit(source), name, filename, defer_init)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Called by the sandbox for each call in a template, of macros too."""
        _check_time()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes | int):
            method_name = getattr(function, "__name__", "")
            if method_name in PADDING_METHODS:
                for value in (*args, *kwargs.values()):
                    _check_width(value)
        return _check_size(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Called by the sandbox for each attribute; not None for the methods that format a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            # Doubled braces are written as single ones.
            format_text = value.__self__.replace("{{", "").replace("}}", "")
            _check_format(format_text, _LARGE_BRACE_WIDTH)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called by the sandbox for each operator of `intercepted_binops`."""
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "%":
            _check_format(left, _LARGE_PERCENT_WIDTH)
        elif operator == "*":
            _check_repetition(left, right)
        return _check_size(super().call_binop(context, operator, left, right))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join a template's output, a macro's or a block's."""
        size = 0
        checked_pieces = []
        for piece in pieces:
            size += len(piece)
            _refuse_above(size, MAX_SIZE, "texts")
            checked_pieces.append(piece)
        return "".join(checked_pieces)


class _AddChecks(NodeTransformer):
    """Add the checks as filters to the parts of a template for which the sandbox has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        iterable: Any = node.iter
        node.iter = _filtered(iterable, "check_each")
        return node

    def _visit_sized(self, node: nodes.Expr) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, "check_size")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        if node.name in PADDING_FILTERS:
            node.args = [_filtered(argument, "check_width") for argument in node.args]
            for keyword in node.kwargs:
                keyword.value = _filtered(keyword.value, "check_width")
        elif node.name == "format" and node.node is not None:
            node.node = _filtered(node.node, "check_format")
        return self._visit_sized(node)

    visit_Concat = _visit_sized  # noqa: N815


def _filtered(node: nodes.Expr, filter_name: str) -> nodes.Filter:
    return nodes.Filter(node, filter_name, [], [], None, None, lineno=node.lineno)


def _check_time() -> None:
    if time.thread_time() > _deadline.get():
        raise TemplateRuntimeError(f"it does not end within {MAX_SECONDS:g} s")


def _check_each(items: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the items of a loop."""
    for item in items:
        _check_time()
        yield item


def _check_size(value: Any) -> Any:
    """Return a value that is not too large."""
    if isinstance(value, str | bytes | list | tuple | dict):
        _refuse_above(len(value), MAX_SIZE, "texts or lists")
    return value


@pass_context
def _check_filtered_size(context: Any, value: Any) -> Any:
    """As `_check_size`. With a context, Jinja does not call it while it compiles the template."""
    return _check_size(value)


@pass_context
def _check_filtered_width(context: Any, value: Any) -> Any:
    """Return an argument of a filter that is no width above the limit."""
    _check_width(value)
    return value


@pass_context
def _check_filtered_format(context: Any, value: Any) -> Any:
    """Return the format string of a filter, if its widths are below the limit."""
    _check_format(value, _LARGE_PERCENT_WIDTH)
    return value


def _check_width(value: Any) -> None:
    if isinstance(value, int):
        _refuse_above(value, MAX_WIDTH, "texts padded to widths")


def _check_format(text: Any, large_width: re.Pattern[str]) -> None:
    """Refuse a format string with a large width, or with one that comes from a value."""
    if isinstance(text, str) and large_width.search(text):
        raise TemplateRuntimeError(f"it creates texts padded to widths larger than {MAX_WIDTH}")


def _check_integers(operator: str, left: int, right: int) -> None:
    """Refuse a product or power of integers before it is computed, since it could take forever."""
    if operator == "**":
        num_bits = left.bit_length() * max(right, 0)
    else:
        num_bits = left.bit_length() + right.bit_length()
    _refuse_above(num_bits, MAX_INTEGER_BITS, "powers or products, in bits,")


def _check_repetition(left: Any, right: Any) -> None:
    """Refuse the repetition of a text or list before it is created."""
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(count, int):
            _refuse_above(len(repeated) * max(count, 0), MAX_SIZE, "texts or lists")


def _refuse_above(size: int, limit: int, values: str) -> None:
    if size > limit:
        raise TemplateRuntimeError(f"it creates {values} larger than {limit}")

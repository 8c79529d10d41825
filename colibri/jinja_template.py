"""A model directory's own chat template, run as Hugging Face runs it, in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colibri.errors import ConfigError, UsageError

SENTINEL = "colibri_sentinel"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks training spans in some templates; its body renders as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own contract)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    sentinel = context.get(SENTINEL, "")
    if ensure_ascii and sentinel:
        text = text.replace(json.dumps(sentinel)[1:-1], sentinel)
    return text


def compile_template(source: str, where: str) -> Callable[[dict[str, Any]], str]:
    """Compile a template; the result renders a context. Errors name `where`, the file.

    context[SENTINEL], if given, is a character that `tojson` never escapes.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"{where}: the chat template does not compile: {line}{str(error).rstrip('.')}. "
            "Restore it from the model's repository, or remove it to use the built-in template."
        ) from None

    def render(context: dict[str, Any]) -> str:
        try:
            return template.render(context)
        except Exception as error:  # a template may raise anything Python can
            reason = (str(error) or type(error).__name__).replace(context.get(SENTINEL, "\0"), "")
            raise UsageError(
                f"{where}: the chat template cannot render this conversation: {reason}. "
                "Check roles, order and tool calls."
            ) from error

    return render

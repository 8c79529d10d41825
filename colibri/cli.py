"""The `colibri` command: what it accepts, and how errors become exit statuses.

Modules that need NumPy or the core are imported by the command that uses them, so that --help is
quick.
"""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from colibri import __version__, knobs
from colibri.errors import ColibriError, Exit, UsageError
from colibri.knobs import Knob, Settings, Switch

EXIT_HELP = """\b
Exit status: 0 the answer is complete, 1 error, 2 wrong usage,
130 interrupted (Ctrl-C), 129 or 143 ended by SIGHUP or SIGTERM, 141 the reader of stdout left.
"""
RUN_GROUPS = (
    knobs.SAMPLING, knobs.PROMPT, knobs.MACHINE, knobs.SPECULATION, knobs.OUTPUT,
)  # fmt: skip
SERVE_GROUPS = (
    knobs.SERVER, knobs.SAMPLING, knobs.MACHINE, knobs.SPECULATION, knobs.OUTPUT,
)  # fmt: skip
_SHORT = {"max_tokens": "-n"}
_ELSEWHERE = {  # their modules, and the function where it is not `command`
    "chat": "chat_cli", "plan": "plan_cli", "doctor": "doctor_cli", "bench": "bench_cli",
    "score": "score_cli", "convert": "convert_cli:convert", "repack": "convert_cli:repack",
    "verify": "convert_cli:verify",
}  # fmt: skip
_ORDER = (  # of the help: what one needs first stands first
    "run", "chat", "serve", "plan", "doctor", "convert", "verify", "info", "repack", "score",
    "bench",
)  # fmt: skip


class Group(click.Group):
    """The top-level command. A reader of stdout that left gives status 141, not click's 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the help, wherever they are made."""
        return list(_ORDER)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command; one of its own file is imported when it is asked for."""
        if cmd_name in _ELSEWHERE and cmd_name not in self.commands:
            module, _, name = _ELSEWHERE[cmd_name].partition(":")
            found = getattr(import_module(f"colibri.{module}"), name or "command")
            self.add_command(found, cmd_name)
        return super().get_command(ctx, cmd_name)

    def make_context(self, *args: Any, **others: Any) -> click.Context:
        """Parse the arguments; --help and --version print and end here."""
        try:
            return super().make_context(*args, **others)
        except BrokenPipeError:
            raise click.exceptions.Exit(_left()) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; returns its exit status."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _left()


def _left() -> int:
    """Whoever read stdout is gone."""
    from colibri.terminal import close_stdout

    close_stdout()
    return Exit.PIPE_CLOSED


class Command(click.Command):
    """A command whose options are shown by group; a bare --stats means --stats=table."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """A bare --stats becomes --stats=table.

        Any other option that is followed by an option lacks its value.
        """
        self._require_values(ctx, args)
        words = knobs.BY_NAME["stats"].kind.words
        for at, following in enumerate([*args[1:], ""]):
            if args[at : at + 1] == ["--stats"] and following.lower() not in words:
                args[at] = "--stats=table"
        return super().parse_args(ctx, args)

    def _require_values(self, ctx: click.Context, args: list[str]) -> None:
        options = {
            name: param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        before = args[: args.index("--")] if "--" in args else args
        for name, following in pairwise(before):
            param = options.get(name)
            if param and not param.is_flag and name != "--stats" and following in options:
                raise click.BadOptionUsage(
                    name,
                    f"Option '{name}' requires a value, and {following} is an option; if it is the "
                    f"value: {max(param.opts, key=len)}={following}.",
                    ctx,
                )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section per group of the knob table, what is left under "Options"."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                group = param.group if isinstance(param, KnobOption) else "Options"
                sections.setdefault(group, []).append(record)
        for group in sorted(sections, key=lambda name: name != "Options"):
            with formatter.section(group):
                formatter.write_dl(sections[group])


class KnobOption(click.Option):
    """A click option made from a row of the knob table; Settings reads its text."""

    def __init__(self, declarations: Sequence[str], knob: Knob, **others: Any) -> None:
        self.group = knob.group
        text = f"{knob.help} [default: {knob.shown}]"
        if isinstance(knob.kind, Switch):
            super().__init__(declarations, is_flag=True, default=None, help=text, **others)
        else:
            metavar = knob.kind.metavar
            super().__init__(declarations, type=str, metavar=metavar, help=text, **others)


def knob_options(*groups: str, without: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Add the options of these groups to a command, some knobs left out."""
    wanted = [k for k in knobs.KNOBS if k.flag and k.group in groups and k.name not in without]

    def add(command: Any) -> Any:
        for knob in reversed(wanted):
            spelled = f"{knob.flag}/{knob.off}" if knob.off else knob.flag
            names = [name for name in (_SHORT.get(knob.name), spelled, knob.name) if name]
            command = click.option(*names, cls=KnobOption, knob=knob)(command)
        return command

    return add


def typed(text: str, flag: str) -> str:
    """The text of an argument: UTF-8 in any locale. UsageError when it is none."""
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise UsageError(f"{flag} is not UTF-8 text") from None


def settings_of(values: dict[str, Any], model: str | None = None) -> Settings:
    """Settings from click's values: switches become words again, the rest is text already."""
    flags = {name: values.get(name) for name in knobs.BY_NAME}
    for name, value in flags.items():
        if isinstance(value, bool):
            flags[name] = "on" if value else "off"
    if flags["system"] is not None:
        flags["system"] = typed(flags["system"], "--system")
    flags["model"] = model
    for sentence in knobs.unknown_variables():
        click.echo(f"colibri: warning: {sentence}", err=True)
    settings = Settings.resolve(flags)
    if settings.isa:
        _require_isa(settings.isa)
    return settings


def _require_isa(isa: str) -> None:
    """UsageError when this processor has no such kernels."""
    try:
        from colibri.model import available_isas
    except ImportError:
        return  # doctor says what ails the core
    here = available_isas()
    if isa not in here:
        raise UsageError(
            f"COLIBRI_ISA is {isa!r}, and this processor runs {', '.join(here)}; unset it to get "
            "the best of them"
        )


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88},
    epilog="Knobs also have environment names: docs/knobs.md lists them.",
    invoke_without_command=True,
)
@click.version_option(__version__, message="%(prog)s %(version)s", prog_name="colibri")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run GLM mixture-of-experts models far larger than memory on one machine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(Exit.USAGE)


@cli.command(cls=Command, epilog=EXIT_HELP)
@click.argument("model", required=False)
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f", "--prompt-file", metavar="FILE", type=click.Path(path_type=Path),
    help="Read the prompt from a file; - is stdin, which is also read when neither is given. "
    "One final newline is dropped.",
)  # fmt: skip
@click.option(
    "--schema", metavar="FILE", type=click.Path(path_type=Path),
    help="A JSON Schema in a file: the answer is JSON that keeps to it. {} is any object.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")
@knob_options(*RUN_GROUPS)
def run(
    model: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    schema: Path | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Answer one prompt.

    MODEL is a model directory; without it COLIBRI_MODEL, else the small demo model that comes
    with the package. The answer streams to stdout; progress and the receipt go to stderr.
    Ctrl-C ends the answer where it is; a second Ctrl-C quits.
    """
    settings = settings_of(values, model)
    prompt = None if prompt is None else typed(prompt, "--prompt")
    from colibri.run import run_prompt

    return run_prompt(settings, prompt, prompt_file, schema, as_json)


@cli.command(cls=Command)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: str | None, as_json: bool) -> int:
    """Show what a model directory holds.

    Architecture, formats, bytes by part, bytes read per token, and what is missing. Reads the
    headers only. MODEL as for `colibri run`.
    """
    settings = settings_of({}, model)
    from colibri.engine import model_directory
    from colibri.info import describe, render
    from colibri.terminal import Terminal

    found = describe(model_directory(settings))
    text = json.dumps(found.as_dict(), indent=1) if as_json else render(found)
    Terminal.of(settings.screen).write(text + "\n")
    return Exit.OK


@cli.command(cls=Command, short_help="Answer over HTTP, as OpenAI's API and Anthropic's do.")
@click.argument("model", required=False)
@knob_options(*SERVE_GROUPS, without=["stats"])
def serve(model: str | None, **values: Any) -> int:
    """Answer over HTTP, as OpenAI's API and Anthropic's do; a page to chat and to watch is at /.

    MODEL as for `colibri run`. What a request leaves out is as the flags say; docs/api.md says
    what a request may hold. Every answer's receipt is a line on stderr, without what was said.
    Ctrl-C ends it, a second one at once. Needs pip install '.[serve]', in the clone.
    """
    settings = settings_of(values, model)
    from colibri.serve_cli import serve

    return serve(settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; every failure is one line on stderr and an exit status."""
    try:
        result = cli.main(arguments, prog_name="colibri", standalone_mode=False)
        return result if isinstance(result, int) else Exit.OK
    except click.ClickException as error:
        return _refuse(error)
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return Exit.INTERRUPTED
    except UsageError as error:
        return _fail(error, Exit.USAGE)
    except (ColibriError, MemoryError, OSError) as error:
        return _fail(error, Exit.ERROR)


def _refuse(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    hint = f" Try '{context.command_path} --help'." if context else ""
    text = " ".join(error.format_message().split())  # click sets choices on lines of their own
    _say(f"error: {text}{'' if text.endswith(('.', '?')) else '.'}{hint}")
    return Exit.USAGE if isinstance(error, click.UsageError) else Exit.ERROR


def _fail(error: BaseException, status: int) -> int:
    if knobs.debug_wanted():
        traceback.print_exc()
    text = str(error) or "out of memory"
    if isinstance(error, PermissionError) and error.filename:
        text = f"{error.filename}: {error.strerror}; see who may read it and what lies above it"
    _say(f"error: {text}")
    return status


def _say(text: str) -> None:
    """One line on stderr; there is nobody to tell when stderr itself is closed."""
    try:
        print(f"colibri: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return

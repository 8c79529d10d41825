"""`colibri doctor`: the command."""

import json
from typing import Any

import click

from colibri import knobs
from colibri.cli import Command, knob_options, settings_of
from colibri.errors import Exit
from colibri.terminal import Terminal

EPILOG = "Exit status: 0 ready (perhaps with warnings), 1 something fails, 2 wrong usage."


@click.command("doctor", cls=Command, epilog=EPILOG)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@knob_options(knobs.MACHINE, without=("warm",))
def command(model: str | None, as_json: bool, **values: Any) -> int:
    """Tell whether this machine is ready, in ten lines.

    The core, the processor, memory, the model's files, the disk, and what the system limits; for
    what is not as it should be, what to do. MODEL as for `colibri run`. Nothing is loaded.
    """
    from colibri.doctor import Doctor, as_object, render

    settings = settings_of(values, model)
    findings = Doctor(settings).examine()
    found = as_object(findings)
    text = json.dumps(found, indent=1) if as_json else render(findings)
    Terminal.of(settings.screen).write(text + "\n")
    return Exit.OK if found["ready"] else Exit.ERROR

"""Knobs: precedence, names people know, refusals that say what to write, and one table for all."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from colibri import knobs
from colibri.cli import cli
from colibri.errors import UsageError
from colibri.knobs import BY_NAME, KNOBS, SERVER, Choice, Number, Settings, Size, Switch, Text

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def test_table_and_settings_agree():
    """Every knob is a field of Settings with the same default, and no name is used twice."""
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    assert set(BY_NAME) == set(fields) - {"screen", "given"}
    for names in ([k.flag for k in KNOBS if k.flag], [v for k in KNOBS for v in k.variables]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_precedence(knob):
    """Flag, COLIBRI_ variable, other names, default, in this order; an empty variable is unset."""
    first, second = sample(knob)
    own, others = knob.variables[0], knob.variables[1:]
    assert getattr(Settings.resolve({}, {own: ""}), knob.name) == getattr(Settings(), knob.name)
    settings = Settings.resolve({knob.name: first}, {own: second})
    assert getattr(settings, knob.name) == knob.kind.parse(first)
    assert settings.given == {knob.name}
    assert getattr(Settings.resolve({}, {own: second}), knob.name) == knob.kind.parse(second)
    for other in others:
        assert getattr(Settings.resolve({}, {other: first}), knob.name) == knob.kind.parse(first)
        both = {other: first, own: second}
        assert getattr(Settings.resolve({}, both), knob.name) == knob.kind.parse(second)


def sample(knob) -> tuple[str, str]:
    """Two different texts a knob accepts."""
    kind = knob.kind
    if isinstance(kind, Number):
        return f"{kind.least:g}", f"{kind.least + 1:g}"
    if isinstance(kind, Choice):
        return kind.words[0], kind.words[-1]
    return {Switch: ("0", "1"), Size: ("4", "8G"), Text: ("one", "two")}[type(kind)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DRAFT": "0", "MTP": "0", "SPEC": "1"}, {"draft": 0, "mtp": False, "spec": True}),
        ({"DRAFT": "-1"}, {"draft": None}),
        ({"COLIBRI_DRAFT": "auto"}, {"draft": None}),
        ({"RAM_GB": "48", "CTX": "8192"}, {"ram": 48 * GIB, "context": 8192}),
        ({"COLI_TEMP": "0", "NUCLEUS": ".9"}, {"temperature": 0.0, "top_p": 0.9}),
        ({"SEED": "7", "NGEN": "64"}, {"seed": 7, "max_tokens": 64}),
        (
            {"COLI_MODEL": "/models/glm", "THINK": "off"},
            {"model": "/models/glm", "thinking": False},
        ),
        ({"TEMP": "/tmp", "THREADS": "x", "TOPK": "x"}, {}),
    ],
)
def test_names_people_know(environ, expected):
    """Names from elsewhere mean here what they mean there; unrelated variables mean nothing."""
    settings = Settings.resolve({}, environ)
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.given == set(expected)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24", 24 * GIB), ("7.5", 15 * GIB // 2), ("512M", 1 << 29), ("1T", 1 << 40),
     ("16 GB", 16 * GIB), ("16GiB", 16 * GIB), ("16g", 16 * GIB)],
)  # fmt: skip
def test_sizes(text, size):
    """Memory is in GiB, or in the unit written."""
    assert Settings.resolve({"ram": text}, {}).ram == size


@pytest.mark.parametrize(
    ("name", "text", "expectation"),
    [
        ("temperature", "hot", "a number from 0 to 100"),
        ("temperature", "-0.1", "a number from 0 to 100"),
        ("temperature", "nan", "a number from 0 to 100"),
        ("temperature", "1_0", "a number from 0 to 100"),
        ("top_p", "1.01", "a number from 0 to 1"),
        ("min_p", "0x1", "a number from 0 to 1"),
        ("top_k", "40.0", "a whole number from 0"),
        ("max_tokens", "0", "a whole number from 1"),
        ("max_tokens", "9" * 50, "a whole number from 1"),
        ("seed", "-1", "a whole number from 0"),
        ("context", "4k", "a whole number from 16"),
        ("threads", "0", "a whole number from 1 to 1024"),
        ("draft", "many", "a whole number from 0 to 15, or auto"),
        ("ram", "lots", "GiB such as 24"),
        ("ram", "0", "GiB such as 24"),
        ("ram", "12 KB", "GiB such as 24"),
        ("ram", "1000B", "GiB such as 24"),
        ("ram", "24iB", "GiB such as 24"),
        ("mtp", "maybe", "1 or 0"),
        ("mode", "fast", "rejection, coupled or probabilistic"),
        ("effort", "medium", "low, high or max"),
        ("model", "bad\udcff", "text"),
    ],
)
def test_refusals(name, text, expectation):
    """A bad value is one error that names the flag or the variable, the value and what fits."""
    knob = BY_NAME[name]
    variable = knob.variables[-1]
    for source, flags, environ in (
        (knob.flag or name, {name: text}, {}),
        (variable, {}, {variable: text}),
    ):
        with pytest.raises(UsageError) as caught:
            Settings.resolve(flags, environ)
        message = str(caught.value)
        assert message.startswith(f"{source} is ") and expectation in message
        assert len(message) < 200 and message.isascii()


def test_unknown_variables():
    """COLIBRI_ variables that are no knobs are told, with the nearest name; others are let be."""
    told = knobs.unknown_variables({"COLIBRI_TEMPP": "1", "COLIBRI_XYZZY": "1", "TEMPP": "1"})
    assert told == [
        "COLIBRI_TEMPP is not a knob; did you mean COLIBRI_TEMP?",
        "COLIBRI_XYZZY is not a knob",
    ]
    assert knobs.unknown_variables(dict.fromkeys((k.variables[0] for k in KNOBS), "1")) == []


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False), ({"COLIBRI_DEBUG": "1"}, True), ({"COLI_DEBUG": "yes"}, True),
        ({"COLIBRI_DEBUG": "off"}, False), ({"COLIBRI_DEBUG": "0", "COLI_DEBUG": "1"}, False),
    ],
)  # fmt: skip
def test_tracebacks_are_wanted_as_the_knob_says(environ, wanted):
    """Before there are Settings the switch is read as they read it; nonsense raises nothing."""
    assert knobs.debug_wanted(environ) == Settings.resolve({}, environ).debug == wanted
    assert knobs.debug_wanted({"COLIBRI_DEBUG": "perhaps"})


def test_screen():
    """NO_COLOR, COLUMNS and TERM are understood; a COLUMNS that is no number is ignored."""
    assert Settings.resolve({}, {}).screen == knobs.Screen(True, None, False)
    environ = {"NO_COLOR": "1", "COLUMNS": "60", "TERM": "dumb"}
    assert Settings.resolve({}, environ).screen == knobs.Screen(False, 60, True)
    assert Settings.resolve({}, {"COLUMNS": "wide", "NO_COLOR": ""}).screen == knobs.Screen()


def test_one_reader_of_the_environment():
    """No file but knobs.py reads the environment, C included."""
    reads = re.compile(r"os\.environ|\bgetenv|environb")  # fegetenv is of floats
    files = [*ROOT.glob("colibri/**/*.py"), *ROOT.glob("csrc/*.[ch]")]
    readers = {path.name for path in files if reads.search(path.read_text())}
    assert len(files) > 20 and readers == {"knobs.py"}


def test_help_shows_every_flag():
    """Every flag of the table is in the --help of run or of serve, with its default."""
    helps = {
        name: " ".join(CliRunner().invoke(cli, [name, "--help"]).output.split())
        for name in ("run", "serve")
    }
    for knob in (knob for knob in KNOBS if knob.flag):
        text = helps["serve" if knob.group == SERVER else "run"]
        assert knob.flag in text and f"[default: {knob.shown}]" in text

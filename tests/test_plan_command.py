"""`colibri plan`: what it says, before a download and after, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re

import pytest
from toolbox import tool

from colibri import machine, probe
from colibri.probe import DiskSpeed, Speeds
from colibri.shapes import PUBLISHED

GLM = ("plan", "--shape", "glm-5.2", "--ram", "64", "--disk", "6.5", "--memory", "60")


@pytest.fixture
def still(monkeypatch):
    """A machine whose figures are known."""
    rates = dict.fromkeys(("int4", "int8", "f32"), (10000000000.0, 20000000000.0))
    monkeypatch.setattr(probe, "products", lambda *arguments: rates)
    monkeypatch.setattr(probe, "bandwidth", lambda *arguments: 20e9)
    monkeypatch.setattr(probe, "disk_of", lambda *arguments, **more: DiskSpeed(2e9, 1e-4))
    monkeypatch.setattr(probe, "step_seconds", lambda *arguments: 1e-3)
    monkeypatch.setattr(machine, "read_bandwidth", lambda *arguments: 20e9)
    monkeypatch.setattr(machine, "dot_peak", lambda *arguments: 20e9)


def tree(command, *arguments: str) -> dict:
    """The JSON of a plan that must succeed."""
    status, out, err = command(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_before_a_download(command):
    """GLM-5.2 on 64 GB and a disk of 6.5 GB/s: what goes where, bytes, rates, and what limits."""
    found = tree(command, *GLM)
    assert (found["model"]["expert_bytes"], found["model"]["experts_per_token"]) == (20054016, 600)
    assert found["machine"]["sources"] == {"memory": "given", "disk": "given"}
    here = found["here"]
    assert here["cold_bytes"] == 600 * 20054016 and 0 < here["warm_bytes"] < here["cold_bytes"]
    assert here["parts"]["limit"] == "disk" and 0.3 < here["rate"] < 3
    sizes = [row["budget"] for row in found["budgets"]]
    assert sizes == sorted(sizes) and 64 << 30 in sizes and found["budgets"][-1]["hits"] == 1
    assert [row["length"] for row in found["lengths"]][:2] == [512, 4096]
    assert any("arithmetic is left out" in note for note in found["notes"])


def test_in_words(command):
    """The same for people, in lines a terminal holds."""
    text = command(*GLM).out
    assert all(len(line) <= 100 for line in text.splitlines())
    for part in ("413.98 GB in files", "6.5 GB/s (given)", "64.00 GiB (--ram)", "limited by disk",
                 "600 experts of 20.05 MB", "from disk 12.03 GB when none is in memory",
                 "49% hits", "4096 tokens"):  # fmt: skip
        assert part in text


def test_a_model_that_is_here(command, demo_path, still):
    """The demo: from its own headers, on figures measured here."""
    found = tree(command, "plan", str(demo_path))
    assert found["machine"]["sources"] == {"memory": "measured", "disk": "measured"}
    assert found["here"]["io"] == "mmap" and found["here"]["hits"] == 1
    parts = dict(found["here"]["parts"])
    assert parts.pop("limit") and found["here"]["rate"] == pytest.approx(1 / sum(parts.values()))
    assert 0 < found["machine"]["layer_seconds"] < 1e-3 / 6  # the weights take the rest
    text = command("plan").out
    assert "the demo model" in text and "e+0" not in text


def test_a_config_fetched_alone(command, tmp_path):
    """--shape also takes a config.json, or the directory it lies in."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["glm-5.2"]))
    for path in (tmp_path, tmp_path / "config.json"):
        found = tree(command, "plan", "--shape", str(path), *GLM[3:])
        assert found["model"]["files"] == tree(command, *GLM)["model"]["files"]


def test_other_formats(command):
    """Three bits make the experts smaller, BF16 makes the dense part larger."""
    small = tree(command, *GLM, "--experts", "int3-g64")["model"]
    large = tree(command, *GLM, "--dense", "bf16")["model"]
    usual = tree(command, *GLM)["model"]
    assert small["expert_bytes"] < usual["expert_bytes"] < small["expert_bytes"] * 4 / 3
    assert large["dense_bytes"] > 1.9 * usual["dense_bytes"]


def test_an_assumed_disk(command):
    """Without --disk there is nothing to measure yet: a middling one is assumed, and said."""
    arguments = [part for part in GLM if part not in ("--disk", "6.5")]
    text = command(*arguments).out
    assert "disk 3 GB/s (assumed)" in text and "--disk GB/s, or a directory" in text


def test_a_disk_measured_before_there_is_a_model(command, tmp_path, monkeypatch):
    """A directory is measured with a file that does not stay."""
    monkeypatch.setattr(probe, "_FILE_BYTES", 32 << 20)
    arguments = [part if part != "6.5" else str(tmp_path) for part in GLM]
    found = tree(command, *arguments)
    assert found["machine"]["sources"]["disk"] == "measured" and found["machine"]["disk"] > 1e6
    assert list(tmp_path.iterdir()) == []


def test_hit_rates_of_a_trace(command, demo_path, tmp_path, still):
    """A recorded trace takes the place of the published overlap."""
    from colibri.container import Container
    from colibri.model import Model
    from colibri.session import Session
    from colibri.trace import TraceWriter

    session = Session(Model.open(Container.open(demo_path), mtp=False), 64)
    writer = TraceWriter(session)
    session.step_all(list(range(20, 60)))
    writer.add(40)
    writer.trace().save(tmp_path / "t.npz")
    found = tree(command, "plan", "--trace", str(tmp_path / "t.npz"), "--ram", "108M", "--io",
                 "buffered")  # fmt: skip
    assert found["locality"] == "as in t.npz" and 0 < found["here"]["hits"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape /proc/self/mem", "--shape /proc/self/mem: cannot be read: Input/output error; "),
        ("--shape glm-6", "expected glm-5, glm-5.1, glm-5.2, glm-5.3, or the path"),
        ("/models/x --shape glm-5.2", "MODEL and --shape both name a model"),
        ("nowhere", "there is no model directory 'nowhere'"),
        ("--shape glm-5.2 --disk fast", "--disk is 'fast'; expected GB/s such as 6.5"),
        ("--shape glm-5.2 --disk 0", "--disk is 0; expected GB/s from"),
        ("--shape glm-5.2 --disk nan", "--disk is nan; expected GB/s from 0.001 to 1000"),
        ("--shape glm-5.2 --memory nan", "--memory is nan; expected GB/s from 0.1 to 100000"),
        ("--shape glm-5.2 --memory inf", "--memory is inf; expected GB/s from 0.1 to 100000"),
        ("--shape glm-5.2 --memory 1e300 --json", "--memory is 1e+300; expected GB/s from"),
        ("--memory 0", "--memory is 0; expected GB/s from 0.1"),
        ("--experts int4", "--experts is for a model that is not here yet, by --shape"),
        ("--dense int8", "leave out --dense"),
        ("--shape glm-5.2 --experts int5", "format 'int5' is not known"),
        ("--shape glm-5.2 --ram 16 --memory 50", "does not fit 16.00 GiB (--ram)"),
        ("--shape glm-5.2 --ctx 3000000 --ram 64 --memory 50", "this model handles 1048576"),
        ("--trace nothing.npz", "there is no such trace"),
        ("--shape=", "--shape is empty (a variable not set?)"),
        ("--shape glm-5.2 --disk=", "--disk is empty (a variable not set?)"),
    ],
)
def test_refusals(command, still, arguments, message):
    """Each is one line that says what to write instead."""
    result = command("plan", *arguments.split())
    assert result.status == 2 and message in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ("--shape glm-5.2 --ram 16", "0.1"),
        ("--shape glm-5.2 --ram 20 --ctx 65536 --io direct", "0.1"),
        ("--ram 10M", "1M"),
    ],
)
def test_the_least_memory_that_works(command, still, arguments, step):
    """Where nothing fits, plan names the least that does, for a useful context if none was asked
    for: with a step less there is no forecast, or one of hardly any context."""
    asked = ["plan", *arguments.split(), "--memory", "50"]
    result = command(*asked)
    found = re.search(r"is the least that works: .*--ram ([\d.]+)(M?)", result.err)
    assert result.status == 2 and found and result.out == ""
    assert ("a smaller --ctx" in result.err) == ("--ctx" in arguments)
    less = round(float(found[1]) - float(step.rstrip("M")), 1)
    enough = command(*asked, "--ram", found[1] + found[2])
    assert enough.status == 0 and "holds hardly a question" not in enough.out
    result = command(*asked, "--ram", f"{less}{found[2]}")
    assert result.status == 2 or "holds hardly a question" in result.out
    assert result.status == 2 or "--ctx" not in arguments


def test_forecasts_are_checked_against_the_engine(demo_container, still):
    """tools/check_forecast.py runs what it forecasts: the same budget gives the engine and the
    forecast the same slots, but for one, whatever the clock says."""
    check = tool("check_forecast")
    options = argparse.Namespace(threads=1, io="buffered", repeat=1, runs=1, tokens=4)
    rows = check.compare(demo_container, [101 << 20, 103 << 20], options)["rows"]
    assert all(abs(row["slots"] - row["forecast_slots"]) <= 1 for row in rows)
    assert 0 < rows[0]["slots"] < rows[1]["slots"] and all(row["ratio"] > 0 for row in rows)
    assert len(list(check.table(rows))) == 4


def test_published_figures():
    """The table of what others reported names a limit and a figure for each of them."""
    check = tool("check_forecast")
    lines = list(check.reported())
    assert len(lines) == 2 + len(check.REPORTS)
    assert "| 0.05-0.1 |" in lines[2] and "disk" in lines[2]


def test_a_look_at_this_machine(demo_container):
    """The probe itself gives a rate for every format and row count."""
    rates = probe.products("scalar", ["int4", "f32"], 2, 40 << 20, 0.02)
    assert set(rates) == {"int4", "f32", probe.ABSORBED}
    assert all(one > 0 and many > 0 for one, many in rates.values())
    assert probe.bandwidth(1, 1 << 20) > 1e6
    disk = probe.disk_of(demo_container, 1 << 20, 1)
    assert disk.rate > 1e6 and all(0 < share <= 1 for share in disk.beside)
    speeds = Speeds(2, 1e10, 1e9, dict.fromkeys(rates, (1e9, 2e9)))
    assert speeds.multiply("int4", 2) > speeds.multiply("int4", 1) * 0.5
    assert speeds.multiply("int2", 1) is None

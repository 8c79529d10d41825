"""The benchmark: its arithmetic by hand, its report's shape, its runs on the demo model."""

from __future__ import annotations

import json
import math
import os
import subprocess

import pytest

from colibri import figures, machine
from colibri.bench import Arm, Bench, Request, record_bytes
from colibri.bench_cli import arms_of, request_of
from colibri.bench_report import render
from colibri.cli import main
from colibri.container import Container
from colibri.errors import CoreError, Exit, UsageError
from colibri.figures import Figure, Sample
from colibri.limits import Limits
from colibri.machine import Disk, DiskWay
from colibri.model import available_isas
from colibri.pagecache import evict
from colibri.paths import require_writable
from colibri.spread import Spread
from colibri.trace import Trace

SPREAD = {"median", "min", "max", "values"}
FIGURE = {
    "name", "kind", "threads", "io", "slots", "rows", "tokens", "tokens_per_second",
    "weight_bytes_per_token", "read_bytes_per_token", "limit", "limit_tokens_per_second",
    "fraction", "details", "outputs",
}  # fmt: skip


# ---- arithmetic -------------------------------------------------------------------------------


def test_spread_is_median_and_extremes():
    """Median of an odd and an even number of values; one value is shown alone."""
    assert Spread.of([3, 1, 2]).median == 2 and Spread.of([4, 1, 2, 3]).median == 2.5
    assert Spread.of([3e9, 1e9, 2e9]).show("GB/s", 1e9) == "2 GB/s (1..3)"
    assert Spread.of([12345.6]).show() == "12346"
    with pytest.raises(UsageError, match="nothing was measured"):
        Spread.of([])


def test_limits_by_hand():
    """1 GB a token at 30 GB/s; 2 G products at 100 G/s; disk-bound and compute-bound streams."""
    assert figures.memory_limit(1e9, 30e9) == 30
    assert figures.dot_limit(2e9, 100e9) == 50
    assert figures.stream_limit(200e6, 1e9, 0.05) == pytest.approx(5)
    assert figures.stream_limit(20e6, 1e9, 0.05) == pytest.approx(20)
    assert figures.stream_limit(20e6, None, 0.05) == pytest.approx(20)


def test_fractions_are_paired_with_their_own_limit():
    """Each run is divided by the limit of its own round, not by the median limit."""
    figure = Figure("decode", "decode", {"threads": 1}, "memory")
    figure.samples = [
        Sample(10, 1.0, "a", 100, 0, limit=20, details={"x": 1}),
        Sample(10, 2.0, "a", 100, 30, limit=5, details={"x": 3}),
    ]
    plain = figure.as_dict()
    assert plain["fraction"]["values"] == [0.5, 1.0]
    assert plain["tokens_per_second"]["values"] == [10, 5]
    assert plain["weight_bytes_per_token"] == 10 and plain["read_bytes_per_token"] == 1.5
    assert plain["details"]["x"]["max"] == 3 and plain["outputs"] == ["a"]


def test_a_single_differing_output_is_seen():
    """Streamed and disturbed runs are compared with cached ones, prefill only with prefill."""
    same = [
        {"kind": "decode", "outputs": ["a"]}, {"kind": "stream", "outputs": ["a"]},
        {"kind": "busy", "outputs": ["a"]}, {"kind": "prefill", "outputs": ["b"]},
    ]  # fmt: skip
    assert figures.outputs_agree(same)
    assert not figures.outputs_agree([*same, {"kind": "stream", "outputs": ["a", "c"]}])


def test_products_of_the_demo_by_hand(demo_container):
    """Every quantised matrix of the main layers once, and k experts in each sparse layer."""
    config = demo_container.config
    dense = sum(
        math.prod(entry.shape)
        for entry in demo_container.entries
        if 0 <= entry.layer < config.num_hidden_layers and len(entry.shape) == 2 and not entry.keep
    )
    sparse = sum(demo_container.sparse[: config.num_hidden_layers])
    one = 3 * config.hidden_size * config.moe_intermediate_size
    expected = dense + sparse * config.num_experts_per_tok * one
    assert figures.products_per_token(demo_container) == expected


# ---- the machine ------------------------------------------------------------------------------


def test_bandwidth_and_dots_are_measured():
    """Any number of threads gives a rate; twice the processor's cores give no error."""
    assert machine.read_bandwidth(2, 0.01, 8 << 20) > 1e6
    for isa in available_isas():
        assert machine.dot_peak(isa, 3, 0.002) > 1e6


def test_impossible_measurements_are_refused():
    """No threads, an instruction set that does not exist, no time, too little memory."""
    for call in (
        lambda: machine.read_bandwidth(0, 0.1),
        lambda: machine.read_bandwidth(4, 0.1, 1 << 20),
        lambda: machine.dot_peak("mmx", 1, 0.1),
        lambda: machine.dot_peak("scalar", 1, 0.0),
    ):
        with pytest.raises(CoreError):
            call()


@pytest.fixture
def disk(demo_container):
    """Expert records of the demo model."""
    return Disk.of_container(demo_container, record_bytes(demo_container))


def test_disk_reads_every_way(disk):
    """Each way gives a rate, or None where the file system refuses direct reads."""
    for way in disk.ways():
        rate = disk.measure(way, 1 << 20)
        assert rate > 0 if not way.direct else rate is None or rate > 0


def test_records_are_those_of_the_container(disk, demo_container):
    """Reads begin where experts begin and never touch another part of the shard."""
    layer = demo_container.sparse.index(True)
    starts = demo_container.experts(layer)["offset"].min(axis=1).tolist()
    assert set(starts) <= set(disk._places)
    assert disk.record_bytes == record_bytes(demo_container)
    assert max(disk._places) + disk.record_bytes <= disk.paths[0].stat().st_size


def test_a_cut_file_is_an_error(disk, tmp_path):
    """Records past the end of the file are reported, with its name."""
    path = tmp_path / "cut"
    path.write_bytes(bytes(8192))
    disk = Disk([path], [1 << 20], disk.record_bytes)
    with pytest.raises(CoreError, match="cut ends before"):
        disk.measure(DiskWay(False, 4096, 1), 4096)


def test_cached_bytes_follow_the_page_cache(tmp_path):
    """A file just written is cached; evicted after a sync, little of it is; reading brings it
    back."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert machine.cached_bytes([path]) == 1 << 20
    with path.open("rb") as file:
        os.fsync(file.fileno())
    evict([path])
    left = machine.cached_bytes([path])
    path.read_bytes()
    assert machine.cached_bytes([path]) == 1 << 20 >= left
    with pytest.raises(CoreError, match="none"):
        machine.cached_bytes([tmp_path / "none"])


def test_limits_keep_every_measurement(demo_container):
    """Two passes give two values a way; the way with the best median is marked, once."""
    limits = Limits("scalar", Disk.of_container(demo_container, record_bytes(demo_container)), True)
    limits.measure_disk(2)
    limits.measure_cores(1)
    limits.measure_beside(2)
    plain = limits.as_dict()
    (beside,) = plain["disk_beside_products"]
    assert beside["threads"] == 2 and beside["per_second"]["min"] > 0
    assert all(len(row["per_second"]["values"]) == 2 for row in plain["disk"])
    assert sum(row["best"] for row in plain["disk"]) == 1
    best = max(plain["disk"], key=lambda row: row["per_second"]["median"])
    assert best["best"] and limits.disk_rate() > 0
    assert plain["read_bandwidth"][0]["threads"] == 1


def test_the_neighbour_spins_and_ends():
    """While the block runs a process burns its core; afterwards it is gone."""
    begun = subprocess.Popen
    seen = []

    class Recording(begun):
        def __init__(self, *args, **others):
            super().__init__(*args, **others)
            seen.append(self)

    subprocess.Popen = Recording
    try:
        with machine.busy_neighbour():
            assert seen[0].poll() is None
    finally:
        subprocess.Popen = begun
    assert seen[0].returncode is not None


# ---- runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(demo_path):
    """A bench of everything, tiny, and its report."""
    request = Request(
        threads=(1, 2), arms=(Arm("direct", 6), Arm("mmap"), Arm("auto", ram=1 << 30)),
        repeat=2, tokens=3, prompt=5, busy=True, quick=True, trace=True,
    )  # fmt: skip
    bench = Bench(Container.open(demo_path), request)
    return bench, bench.run()


def test_report_has_its_shape(bench):
    """Every figure has every field, rates are positive, and JSON gives back the same tree."""
    report = bench[1]
    assert report["format"] == "colibri-bench" and report["version"] == 1
    assert {"machine", "model", "request", "notes", "time"} <= report.keys()
    assert json.loads(json.dumps(report))["figures"] == report["figures"]
    kinds = [figure["kind"] for figure in report["figures"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "prefill": 2, "decode": 2, "rows": 6, "busy": 1, "stream": 3,
    }  # fmt: skip
    for figure in report["figures"]:
        assert figure.keys() >= FIGURE
        assert figure["tokens_per_second"].keys() == SPREAD
        assert figure["tokens_per_second"]["min"] > 0
        assert len(figure["tokens_per_second"]["values"]) == 2
        assert (figure["fraction"] is None) == (figure["kind"] == "rows")


def test_outputs_agree_across_threads_slots_and_io(bench):
    """Whatever the threads and wherever experts came from, the same ids gave the same bits."""
    assert bench[1]["outputs_agree"]
    outputs = {
        output
        for figure in bench[1]["figures"]
        if figure["kind"] in ("decode", "stream", "busy")
        for output in figure["outputs"]
    }
    assert len(outputs) == 1


def test_bytes_of_a_decode_are_those_of_the_container(bench, demo_container):
    """A decoded token touches the dense part without the embedding, and k experts a layer."""
    config = demo_container.config
    decode = next(figure for figure in bench[1]["figures"] if figure["kind"] == "decode")
    model = bench[1]["model"]
    experts = model["sparse_layers"] * config.num_experts_per_tok * model["record_bytes"]
    most = model["dense_bytes"] + experts
    assert most / 2 < decode["weight_bytes_per_token"] < most
    assert decode["read_bytes_per_token"] == 0


def test_rows_of_one_token_share_their_experts(bench):
    """Steps of 1, 2 and 4 rows of the same token touch the same bytes a step, but for an expert
    here and there that rounding changes."""
    rows = [f for f in bench[1]["figures"] if f["kind"] == "rows" and f["threads"] == 1]
    per_step = {f["rows"]: f["weight_bytes_per_token"] * f["rows"] for f in rows}
    assert sorted(per_step) == [1, 2, 4]
    assert all(per_step[1] <= size < 1.1 * per_step[1] for size in per_step.values())
    assert [f["details"]["cost"]["median"] for f in rows if f["rows"] == 1] == [1.0]


def test_report_is_readable(bench):
    """Every figure has a line; limits and the verdict on the outputs are there."""
    text = render(json.loads(json.dumps(bench[1])))
    for figure in bench[1]["figures"]:
        assert figure["name"] in text
    assert "outputs agree" in text and "1 thread" in text and "in flight" in text
    broken = bench[1] | {"outputs_agree": False}
    assert "OUTPUTS DIFFER" in render(broken)


def test_streamed_tokens_leave_a_trace(bench, demo_container):
    """The first streamed run is recorded: every row of every sparse layer."""
    trace = bench[0].trace
    sparse = sum(demo_container.sparse[: demo_container.config.num_hidden_layers])
    assert trace.experts.shape == (6, sparse, demo_container.config.num_experts_per_tok)


def test_pilots_differ_in_what_they_read_and_not_in_the_output(demo_container):
    """With foreknowledge every guess is of use, at random hardly any, and the bits are the same."""
    pilots = ("off", "random", "oracle", "router")
    arms = tuple(Arm("direct", 6, pilot=pilot) for pilot in pilots)
    request = Request((1,), ("stream",), arms, repeat=1, tokens=12, quick=True)
    untraced = Bench(demo_container, request)
    report = untraced.run()
    assert untraced.trace is None  # recording takes time: only when asked for
    assert report["outputs_agree"] and len(report["figures"]) == len(pilots)
    reads, useful = (
        {
            pilot: figure["details"][name]["median"]
            for pilot, figure in zip(pilots, report["figures"], strict=True)
        }
        for name in ("pilot_reads_per_token", "pilot_useful_per_token")
    )
    assert reads["off"] == 0 and reads["random"] < reads["oracle"] == useful["oracle"]
    assert useful["router"] <= reads["router"] > 0
    assert render(report).count("of them asked for") == len(pilots) - 1
    missed = [figure["read_bytes_per_token"] for figure in report["figures"]]
    assert max(missed) < 1.05 * min(missed)


def test_greedy_follows_the_model(demo_container):
    """With greedy ids, too, one and two threads decode the same."""
    request = Request((1, 2), ("decode",), repeat=1, tokens=4, prompt=4, greedy=True, quick=True)
    report = Bench(demo_container, request).run()
    assert report["outputs_agree"] and len(report["figures"]) == 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"sections": ("speed",)}, "speed"), ({"repeat": 0}, "repeat"), ({"tokens": 1}, "tokens"),
        ({"isa": "sse9"}, "this processor has no sse9; it runs scalar"),
    ],
)  # fmt: skip
def test_requests_are_checked(change, fault):
    """An unknown section, no rounds, a single token, others' kernels are refused."""
    with pytest.raises(UsageError, match=fault):
        Request(**change)


# ---- the command ------------------------------------------------------------------------------


def test_arms_are_every_combination():
    """Modes times slots or memory; mmap has no slots and appears once."""
    arms = arms_of(("mmap", "direct"), (8, 16), None)
    assert arms == (Arm("mmap"), Arm("direct", 8), Arm("direct", 16))
    assert arms_of(("auto",), None, (1 << 30, 2 << 30)) == (
        Arm("auto", ram=1 << 30), Arm("auto", ram=2 << 30),
    )  # fmt: skip
    assert arms_of(("auto",), None, None) == (Arm("auto"),)
    assert arms_of(("mmap", "direct"), (8,), None, ("off", "oracle")) == (
        Arm("mmap"), Arm("direct", 8, pilot="off"), Arm("direct", 8, pilot="oracle"),
    )  # fmt: skip
    with pytest.raises(UsageError, match="one of them"):
        arms_of(("direct",), (8,), (1 << 30,))
    with pytest.raises(UsageError, match="auto finds"):
        arms_of(("auto",), (8,), None)


def test_command_measures_the_demo(tmp_path, capsys):
    """`colibri bench` without a model measures the demo, keeps JSON and a trace, exits with 0."""
    kept, trace = tmp_path / "b.json", tmp_path / "t"
    status = main(
        ["bench", "--quick", "--repeat", "1", "--tokens", "2", "--prompt", "3", "--threads", "1",
         "--only", "decode,stream", "--io", "buffered", "--slots", "8",
         "--json", str(kept), "--trace", str(trace)]
    )  # fmt: skip
    assert status == Exit.OK
    out = capsys.readouterr()
    assert "decode, 1 thread" in out.out and "round 1 of 1" in out.err
    report = json.loads(kept.read_text())
    assert [figure["kind"] for figure in report["figures"]] == ["decode", "stream"]
    assert report["figures"][1]["slots"] == 8
    assert len(Trace.load(trace).experts) == 4


@pytest.mark.parametrize(
    "args",
    [["--only", "speed"], ["--threads", "0"], ["--ram", "lots"], ["--only", "stream", "--busy"],
     ["--tokens", "1"], ["no such directory"]],
)  # fmt: skip
def test_wrong_options_are_usage_errors(args, capsys):
    """One line on stderr that names the fault, exit status 2."""
    assert main(["bench", *args]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("colibri: error: ")


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_files_that_cannot_be_written(tmp_path, monkeypatch, capsys, option):
    """They are found out before anything is measured; one that can be is left as it was."""
    monkeypatch.setattr(Bench, "run", lambda bench: pytest.fail("it was measured"))
    for path in (tmp_path, tmp_path / "none" / "file"):
        assert main(["bench", option, str(path)]) == Exit.USAGE
        assert f"{path}: cannot be written: " in capsys.readouterr().err
    (tmp_path / "old").write_text("kept")
    for path in (tmp_path / "old", tmp_path / "new"):
        require_writable(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"


def test_a_trace_of_nothing(tmp_path, monkeypatch, capsys):
    """--trace without a section that streams is refused before anything is measured."""
    monkeypatch.setattr(Bench, "run", lambda bench: pytest.fail("it was measured"))
    assert main(["bench", "--only", "decode", "--trace", str(tmp_path / "t")]) == Exit.USAGE
    assert "--trace keeps streamed tokens; add stream" in capsys.readouterr().err


def test_quick_changes_only_what_was_not_given():
    """--quick shortens the defaults; what is given stays."""
    options = dict.fromkeys(
        ("only", "threads", "repeat", "prompt", "chunk", "slots", "ram", "isa"), None
    )
    options |= {"tokens": 7, "io": ("auto",), "cached_io": "mmap", "ids": "random", "busy": False,
                "quick": True, "seed": 1, "pilot": ("router",)}  # fmt: skip
    request = request_of(options)
    assert (request.repeat, request.tokens, request.prompt) == (2, 7, 64)
    options["quick"] = False
    assert request_of(options).repeat == 5

"""The doctor: ten lines, each right where something is wrong, each with what to do about it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from colibri import doctor as doctor_module
from colibri import selftest, shapes
from colibri.doctor import FAIL, OK, SKIP, WARN, Doctor, Finding, render
from colibri.knobs import Settings
from colibri.probe import DiskSpeed

NAMES = ["core", "processor", "memory", "speed", "model", "fit", "files", "disk", "state", "limits"]


def examine(root: Path = Path("/"), **flags: str) -> dict[str, Finding]:
    """All findings by name."""
    flags = {"threads": "1"} | flags
    return {f.name: f for f in Doctor(Settings.resolve(flags, {}), root).examine()}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rates are not what is tested here."""
    monkeypatch.setattr("colibri.machine.read_bandwidth", lambda *arguments: 20e9)
    monkeypatch.setattr("colibri.probe.disk_of", lambda *arguments, **more: DiskSpeed(3e9, 1e-4))


@pytest.fixture
def copy(demo_path, tmp_path) -> Path:
    """A copy of the demo that may be damaged."""
    return Path(shutil.copytree(demo_path, tmp_path / "model"))


def machine(root: Path, **files: str) -> Path:
    """A made-up /proc and /sys; the names' __ are slashes."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_that_is_ready(tmp_path):
    """Ten findings, always the same ones, all well, none with a remedy to follow."""
    found = examine(state=str(tmp_path))
    assert list(found) == NAMES
    assert {f.status for f in found.values()} == {OK}, render(found.values())
    assert len(render(found.values()).splitlines()) == 10


def test_without_the_core(monkeypatch):
    """An installation without the compiled core is told how to get one; the rest still speaks."""
    for name in [n for n in sys.modules if n.startswith("colibri.")]:
        if name not in ("colibri.doctor", "colibri.errors", "colibri.knobs", "colibri.memory"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "colibri._core", None)
    found = examine()
    assert found["core"].status == FAIL and "pip install" in found["core"].remedy
    assert found["memory"].status == OK and len(found) == 10


def test_kernels_that_disagree(monkeypatch):
    """Wrong bits are found, whatever the instruction set; the remedy works around them."""
    assert selftest.agree() == ""
    real = selftest._multiply

    def broken(isa, form, *rest):
        data = real(isa, form, *rest)
        return data[::-1] if isa != "scalar" and form.kind.name == "INT4" else data

    monkeypatch.setattr(selftest, "_multiply", broken)
    if selftest.available_isas() == ["scalar"]:
        pytest.skip("this processor has the reference alone")
    found = examine()["core"]
    assert found.status == FAIL and "COLIBRI_ISA=scalar" in found.remedy


def test_processor():
    """Plain C is slow, and more threads than cores wait for each other."""
    assert examine(isa="scalar")["processor"].status == WARN
    found = examine(threads="512")["processor"]
    assert found.status == WARN and "use --threads" in found.remedy


def test_memory():
    """Asking for more than there is fails with both numbers; too little for the model too."""
    found = examine(ram="900000")["memory"]
    assert found.status == FAIL and "lower --ram" in found.remedy
    found = examine(ram="64M")["fit"]
    assert found.status == FAIL and "64 MiB" in found.found
    found = examine(ram="107M", io="buffered")["fit"]
    assert found.status == OK and "of 32 experts" in found.found
    found = examine(ram="106M", io="buffered", context="1024")["fit"]
    assert found.status == WARN and "give more memory" in found.remedy


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "shard", "cut"])
def test_model(copy, damage):
    """What is missing or cut short is named with the next step."""
    shard = next(copy.glob("experts-*"))
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        (shard if damage == "shard" else copy / damage).unlink()
    found = examine(model=str(copy))
    assert found["model"].status == FAIL and found["model"].remedy
    text = found["model"].found + found["model"].remedy
    assert {"shard": "tensors are missing", "cut": shard.name}.get(damage, damage) in text
    rest = OK if damage == "tokenizer.json" else SKIP
    assert {found[name].status for name in ("fit", "files", "disk")} == {rest}


@pytest.mark.parametrize("damage", ["template", "index"])
def test_what_verify_finds(copy, damage):
    """A template that cannot be used, or a file that only the index knows, fails here too."""
    if damage == "template":
        (copy / "chat_template.jinja").write_text("{% if %}")
    else:
        index = copy / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("mtp-00001", "mtp-00002"))
    found = examine(model=str(copy))["model"]
    assert found.status == FAIL and "colibri verify" in found.remedy
    assert {"template": "does not compile", "index": "is missing"}[damage] in found.found


def test_a_context_of_hardly_a_question():
    """Where memory leaves a context that nothing can be asked in, that is told."""
    found = examine(ram="101M")["fit"]
    assert found.status == WARN and "hardly a question" in found.remedy


def test_no_model():
    """A directory that is not there is named, and what to give instead."""
    found = examine(model="/nowhere")["model"]
    assert found.status == FAIL and "/nowhere" in found.found
    assert found.remedy == "give the directory that holds the model's config.json"


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", OK), ("xfs", OK), ("nfs4", WARN), ("fuse.sshfs", WARN)]
)
def test_file_systems(tmp_path, copy, kind, status):
    """Files across a network are told apart from those on a disk, by the deepest mount."""
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:40 / {tmp_path} rw - {kind} there:/x rw\n"
    found = examine(machine(tmp_path / "root", proc__self__mountinfo=mounts), model=str(copy))
    assert found["files"].status == status and f"on {kind} (there:/x)" in found["files"].found


def test_a_slow_disk(monkeypatch, tmp_path, copy):
    """A large model on a slow disk: what a token costs there, and what kind of disk helps."""
    monkeypatch.setattr("colibri.probe.disk_of", lambda *arguments, **more: DiskSpeed(0.1e9, 1e-4))
    assert examine(model=str(copy))["disk"].status == OK  # the demo needs no disk
    real = shapes.of_container
    monkeypatch.setattr(
        shapes, "of_container", lambda *a, **k: replace(real(*a, **k), files=400 << 30)
    )
    found = examine(model=str(copy))["disk"]
    assert found.status == WARN and "s for a token" in found.found and "copy" in found.remedy


def test_state(tmp_path):
    """A place that cannot be written, or none at all, is a warning."""
    (tmp_path / "file").write_text("")
    found = examine(state=str(tmp_path / "file" / "below"))["state"]
    assert found.status == WARN and "COLIBRI_STATE" in found.remedy
    assert examine(state="off")["state"].status == WARN
    found = examine(state="~nosuch/state")["state"]
    assert found.status == WARN and "COLIBRI_STATE" in found.remedy
    assert examine(state=str(tmp_path / "new" / "place"))["state"].status == OK
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert examine(state=str(tmp_path / "link" / "below"))["state"].status == WARN
    (tmp_path / "gone").mkdir()
    assert examine(state=str(tmp_path / "link" / "below"))["state"].status == OK


def test_limits(monkeypatch, tmp_path):
    """Few open files, a small address space and a switched-off io_uring, each with its command."""
    limits = {
        doctor_module.resource.RLIMIT_NOFILE: 32, doctor_module.resource.RLIMIT_AS: 1 << 20,
    }  # fmt: skip
    monkeypatch.setattr(
        doctor_module.resource, "getrlimit", lambda which: (limits[which], limits[which])
    )
    root = machine(tmp_path, proc__sys__kernel__io_uring_disabled="2\n")
    found = examine(root)["limits"]
    assert found.status == WARN
    for part in ("ulimit -n 70", "ulimit -v unlimited", "sysctl kernel.io_uring_disabled=0"):
        assert part in found.remedy


def test_the_command(command, tmp_path, copy):
    """Words for people, JSON for programs; the status says whether anything fails."""
    env = {"COLIBRI_STATE": str(tmp_path)}
    words = command("doctor", env=env)
    assert words.status == 0 and len(words.out.splitlines()) >= 10 and words.err == ""
    found = json.loads(command("doctor", "--json", env=env).out)
    assert found["ready"] and [f["name"] for f in found["findings"]] == NAMES
    (copy / "config.json").unlink()
    failed = command("doctor", str(copy), env=env)
    assert failed.status == 1 and "\nfail  model" in failed.out and "-> " in failed.out

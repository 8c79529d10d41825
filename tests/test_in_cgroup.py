"""tools/in_cgroup.py: where a memory cgroup can be made, and a command that runs in one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from toolbox import TOOLS, tool

from colibri.errors import UsageError

in_cgroup = tool("in_cgroup")


def system(root, cgroup: str, mounts: str) -> None:
    """/proc/self/{cgroup,mountinfo} of a made-up system."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mounts)


def group(root, path: str, **files: str):
    """A cgroup directory with files; dots in their names are written as underscores."""
    directory = root / path
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(text)
    return directory


V1 = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "31 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def test_v1_group_is_below_our_own(tmp_path):
    """With v1 the new group goes below the one this process is in."""
    system(tmp_path, "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n", V1)
    own = group(tmp_path, "sys/fs/cgroup/memory/a/b")
    assert in_cgroup.find_places(tmp_path) == [(own, in_cgroup.V1)]


def test_v1_in_a_container_uses_the_mount(tmp_path):
    """The path of the host is not visible: what is mounted is our own group."""
    system(tmp_path, "4:memory:/docker/123\n", V1.replace("0:26 / ", "0:26 /docker/123 "))
    mount = group(tmp_path, "sys/fs/cgroup/memory")
    assert in_cgroup.find_places(tmp_path) == [(mount, in_cgroup.V1)]


def test_v2_is_tried_upwards(tmp_path):
    """v2 groups with a memory controller, from our own up to the root."""
    system(tmp_path, "0::/user/me\n", V2)
    group(tmp_path, "sys/fs/cgroup", cgroup_controllers="cpu memory")
    group(tmp_path, "sys/fs/cgroup/user", cgroup_controllers="cpu memory")
    group(tmp_path, "sys/fs/cgroup/user/me", cgroup_controllers="cpu")
    found = [place.directory.name for place in in_cgroup.find_places(tmp_path)]
    assert found == ["user", "cgroup"]


def test_a_v2_group_is_limited_and_removed(tmp_path):
    """The limit and no swap are written; peak and kills are read; leaving removes the group."""
    system(tmp_path, "0::/\n", V2)
    root = group(
        tmp_path, "sys/fs/cgroup", cgroup_controllers="memory", cgroup_subtree_control="memory"
    )
    with in_cgroup.Group(1 << 30, tmp_path) as made:
        assert made.directory.parent == root
        assert (made.directory / "memory.max").read_text() == str(1 << 30)
        (made.directory / "memory.peak").write_text("12345\n")
        (made.directory / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
        assert (made.peak, made.kills) == (12345, 2)
        for path in made.directory.iterdir():
            path.unlink()  # the kernel's own files vanish with the directory
    assert not made.directory.exists()


def test_a_busy_v2_parent_is_no_place(tmp_path):
    """A group whose children get no memory controller, and cannot be given one, is passed by; when
    no place is left, the error says what to do."""
    system(tmp_path, "0::/\n", V2)
    root = group(tmp_path, "sys/fs/cgroup", cgroup_controllers="memory")
    (root / "cgroup.subtree_control").mkdir()  # reading and writing it fail
    with (
        pytest.raises(UsageError, match="run as root, or with systemd"),
        in_cgroup.Group(1 << 30, tmp_path),
    ):
        pass
    assert [path.name for path in root.iterdir() if path.name.startswith("colibri")] == []


def test_no_memory_cgroup_at_all(tmp_path):
    """Nothing mounted: a sentence, not a traceback."""
    system(tmp_path, "", "")
    with pytest.raises(UsageError, match="no memory cgroup is mounted"):
        in_cgroup.run(["true"], 1 << 30, tmp_path)


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / "in_cgroup.py"), *args], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def permitted():
    """Skips where this process may not make a memory cgroup."""
    done = launch("--memory", "64M", "--", "true")
    if "no memory cgroup" in done.stderr:
        pytest.skip("no permission to make a memory cgroup")
    return done


def test_the_command_runs_and_its_status_comes_back(permitted):
    """Exit statuses pass through; output is the command's own; the last line says what was used."""
    assert permitted.returncode == 0
    done = launch("--memory", "64M", "--", "sh", "-c", "echo out; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.startswith("in_cgroup: limit 64 MiB")


def test_the_limit_holds(permitted):
    """A process that wants three times the limit is killed, and the report says why."""
    done = launch("--memory", "48M", "--", sys.executable, "-c", "b = b'x' * (150 << 20)")
    assert done.returncode == 137
    assert "killed for memory" in done.stderr


def test_wrong_use_is_explained():
    """No command, an odd size, a command that does not exist."""
    assert "give a command" in launch("--memory", "1G").stderr
    assert "expected GiB" in launch("--memory", "lots", "--", "true").stderr
    done = launch("--memory", "64M", "--", "no-such-command")
    assert done.returncode == 1 and done.stderr.startswith("in_cgroup: error: ")

"""Readiness in ten lines: what a model needs of a machine, and what to do where it is not there.

Every check is independent: what is broken is told, and the others still speak. So nothing of the
core or of NumPy is imported before its own check does.
"""

import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from colibri import memory
from colibri.amounts import file_size, memory_size, number, plural
from colibri.errors import ColibriError, UsageError
from colibri.knobs import Settings
from colibri.paths import expanded

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
CHECKS = (
    "core", "processor", "memory", "speed", "model", "fit", "files", "disk", "state", "limits",
)  # fmt: skip
SLOW_DISK = 1e9  # bytes a second below which streaming is told to be slow
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "afs", "glusterfs"}
_SPARE_FILES = 64  # descriptors beside the shards
Result = tuple[str, ...]  # of a check: a finding without its name
_NO_MODEL: Result = SKIP, "not examined: there is no model to look at"


@dataclass(frozen=True)
class Finding:
    """One line: a name, how it stands, what was found, and what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


class Doctor:
    """Looks at one machine and one model directory; `root` is where /proc and /sys are."""

    def __init__(self, settings: Settings, root: Path = Path("/")) -> None:
        self.settings = settings
        self.root = root
        self.directory: Path | None = None
        self.container: Any = None

    def examine(self) -> list[Finding]:
        """A finding a check, in an order in which each may rest on those before it."""
        return [Finding(name, *_guarded(getattr(self, f"check_{name}"))) for name in CHECKS]

    # ---- this installation ------------------------------------------------------------------

    def check_core(self) -> Result:
        """The compiled core is there, and computes what it should."""
        try:
            from colibri.selftest import agree
        except ImportError as why:
            remedy = "install it again where a C compiler is: pip install --force-reinstall ."
            return FAIL, f"the compiled core cannot be loaded: {why}", remedy
        wrong = agree()
        if wrong:
            remedy = "set COLIBRI_ISA=scalar, and report this with the processor's name"
            return FAIL, f"{wrong} kernels give other bits than the plain C reference", remedy
        version = ".".join(map(str, sys.version_info[:3]))
        return OK, f"compiled, loaded into Python {version}, and exact"

    def check_processor(self) -> Result:
        """Which kernels run, on how many cores."""
        from colibri.machine import describe
        from colibri.model import available_isas

        isa = self.settings.isa or available_isas()[-1]
        cores, name = memory.physical_cores(self.root), describe()["processor"]
        threads = self.settings.threads or cores
        found = f"{name}: {isa} kernels, {plural(threads, 'thread')} on {plural(cores, 'core')}"
        if isa == "scalar":
            remedy = "right but slow: this needs AVX2 (x86-64 since 2013) or NEON"
            return WARN, found, remedy
        if threads > cores:
            remedy = f"more threads than cores wait for each other: use --threads {cores}"
            return WARN, found, remedy
        return OK, found

    def check_memory(self) -> Result:
        """What may be used, and which limit says so."""
        found = memory.budget(self.settings.ram, self.root)
        text = f"{memory_size(found.bytes)} may be used ({found.source})"
        free = memory.available(self.root)
        if found.bytes > free.available:
            remedy = f"only {memory_size(free.available)} are free ({free.source}); lower --ram"
            return FAIL, text, remedy
        return OK, text

    def check_speed(self) -> Result:
        """How fast memory is read."""
        from colibri.machine import MEMORY_BYTES, read_bandwidth

        threads = self.settings.threads or memory.physical_cores(self.root)
        rate = read_bandwidth(threads, 0.2, MEMORY_BYTES // 4)
        text = f"memory reads {rate / 1e9:.3g} GB/s with {plural(threads, 'thread')}"
        return OK, text

    # ---- the model --------------------------------------------------------------------------

    def check_model(self) -> Result:
        """The directory is a whole container with a tokenizer."""
        from colibri.container import Container
        from colibri.engine import model_directory
        from colibri.mirror import directories
        from colibri.tokenizer import Tokenizer
        from colibri.verify import verify

        self.directory = model_directory(self.settings)
        mirrors = directories(self.settings.mirror)
        self.container = container = Container.open(self.directory, mirrors)
        Tokenizer.load(self.directory)
        faults = verify(self.directory, mirrors=mirrors).faults
        if faults:
            return FAIL, faults[0], "colibri verify says more"
        nbytes = container.bytes
        files = plural(len(container.shards), "file")
        text = f"{self.directory}: whole, {files}, {file_size(nbytes)}"
        for mirror in container.mirrors:
            text += f", {len(mirror.files)} of them in {mirror.directory} too"
        if container.notes:
            return WARN, f"{text}; {container.notes[0]}", "colibri info says more"
        return OK, text

    def check_fit(self) -> Result:
        """How much of it stays in memory."""
        from colibri.context import USEFUL
        from colibri.forecast import Forecaster
        from colibri.probe import Speeds
        from colibri.shapes import of_container

        if self.container is None:
            return _NO_MODEL
        shape = of_container(self.container, self.settings.mtp and self.settings.draft != 0)
        shape = replace(shape, kv_dtype=self.settings.kv_dtype)
        forecaster = Forecaster(shape, Speeds(1, 1e10, 1e9))
        budget = memory.budget(self.settings.ram, self.root).bytes
        io = self.settings.io
        context = forecaster.context(budget, self.settings.context, io)
        here = forecaster.forecast(budget, min(4096, context), context, io)
        experts = shape.config.n_routed_experts
        used = shape.config.num_experts_per_tok
        some = f"{number(here.slots)} of {experts} experts a layer"
        kept = some if here.hits < 1 else "all experts"
        text = f"dense weights, a context of {context} tokens and {kept} fit"
        if context < min(USEFUL, shape.config.max_position_embeddings):
            remedy = "that holds hardly a question and its answer: give more memory"
            return WARN, text, remedy
        if here.slots < used:
            remedy = f"a token needs {used} a layer, so most are read again: give more memory"
            return WARN, text, remedy
        return OK, text

    def check_files(self) -> Result:
        """Where the files lie, and that they can be read."""
        if self.container is None:
            return _NO_MODEL
        locked = [s.path for s in self.container.shards if not os.access(s.path, os.R_OK)]
        if locked:
            remedy = f"chmod u+r {locked[0]}"
            return FAIL, f"{plural(len(locked), 'file')} cannot be read", remedy
        path = self.container.shards[0].path
        kind, device = _mount_of(path.resolve(), self.root)
        text = f"on {kind or 'an unknown file system'}" + (f" ({device})" if device else "")
        if kind in _NETWORK:
            remedy = "experts are read all the time: copy the model to a disk of this machine"
            return WARN, f"{text}: across a network", remedy
        return OK, text

    def check_disk(self) -> Result:
        """How fast expert records are read."""
        from colibri.probe import disk_of
        from colibri.shapes import of_container

        if self.container is None:
            return _NO_MODEL
        shape = of_container(self.container, mtp=False)
        rate = disk_of(self.container, shape.expert.total, size=64 << 20).rate
        text = f"reads expert records at {rate / 1e9:.3g} GB/s"
        small = shape.files < 1 << 30
        if rate < SLOW_DISK and not small:
            token = shape.sparse_layer_count * shape.config.num_experts_per_tok * shape.expert.total
            text += f": {token / rate:.0f} s for a token whose experts are not in memory"
            kind = (
                "an SSD" if _rotates(self.container.shards[0].path, self.root) else "a faster one"
            )
            return WARN, text, f"copy the model to {kind}"
        return OK, text + (", of which so small a model needs none" * small)

    # ---- what surrounds it ------------------------------------------------------------------

    def check_state(self) -> Result:
        """Whether anything can be kept."""
        if self.settings.state is None:
            remedy = "set COLIBRI_STATE to a directory to save conversations"
            return WARN, "nothing is kept (there is no state directory)", remedy
        try:
            path = expanded(self.settings.state, "COLIBRI_STATE")
        except UsageError as why:
            return WARN, str(why), "set COLIBRI_STATE to another directory"
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            remedy = f"make {there} writable, or set COLIBRI_STATE to another directory"
            return WARN, f"{path}: cannot be written", remedy
        return OK, f"{path}: can be written"

    def check_limits(self) -> Result:
        """Limits of the system that stand in the way."""
        problems = list(self._limits())
        if problems:
            found = "; ".join(text for text, _ in problems)
            return WARN, found, "; ".join(remedy for _, remedy in problems)
        return OK, "open files, address space and io_uring are as needed"

    def _open_files(self) -> int:
        if self.container is None:
            return 1
        return len(self.container.shards) + sum(len(m.files) for m in self.container.mirrors)

    def _limits(self) -> Iterator[tuple[str, str]]:
        shards = self._open_files()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * shards + _SPARE_FILES  # each is open through the page cache and past it
        if files != resource.RLIM_INFINITY and files < wanted:
            yield f"{files} open files are allowed", f"ulimit -n {wanted}"
        space, _ = resource.getrlimit(resource.RLIMIT_AS)
        need = self.container.bytes if self.container else 0
        if space != resource.RLIM_INFINITY and space < 2 * need:
            yield f"the address space is limited to {memory_size(space)}", "ulimit -v unlimited"
        disabled = _text(self.root / "proc/sys/kernel/io_uring_disabled").strip()
        if disabled not in ("", "0"):
            yield "io_uring is switched off", "sysctl kernel.io_uring_disabled=0 reads faster"


def _guarded(check: Callable[[], Result]) -> Result:
    """What a check found, or the error that it met."""
    try:
        return check()
    except ColibriError as error:
        text, *remedy = re.split(r"; |\. ", str(error), maxsplit=1)
        return FAIL, text.rstrip("."), "".join(remedy) or _remedy(error)
    except ImportError as error:
        return FAIL, f"not examined: {error}", "see core"
    except (OSError, MemoryError) as error:
        return FAIL, str(error) or "out of memory", "see the system's log"


def _remedy(error: ColibriError) -> str:
    """For errors that name none."""
    if isinstance(error, UsageError):
        return "give the directory that holds the model's config.json"
    return "colibri info says more"


# ---- the machine's files ------------------------------------------------------------------------


def _mount_of(path: Path, root: Path) -> tuple[str, str]:
    """(file system, device) of the mount that a path lies on; empty where it is not known."""
    best, found = -1, ("", "")
    for mount, _, kind, device, _ in memory.mounts(root):
        point = Path("/") / mount.relative_to(root)
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, device)
    return found


def _rotates(path: Path, root: Path) -> bool:
    """Whether a file lies on a disk that turns."""
    device = path.stat().st_dev
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (block, block / ".."):  # a partition has it one above
        text = _text(place / "queue/rotational").strip()
        if text:
            return text == "1"
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- as people read it --------------------------------------------------------------------------


def render(findings: Iterable[Finding]) -> str:
    """A line a finding, and one more for each remedy."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<9}  {finding.found}")
        if finding.remedy and finding.status != OK:
            lines.append(f"{'':<17}-> {finding.remedy}")
    return "\n".join(lines)


def as_object(findings: Iterable[Finding]) -> dict[str, Any]:
    """For JSON."""
    found = [asdict(finding) for finding in findings]
    return {"ready": all(f["status"] != FAIL for f in found), "findings": found}

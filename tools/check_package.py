"""Builds the sdist and, from it alone, the wheel; checks what is inside; tries it in a clean venv.

python tools/check_package.py [--no-install]
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MOST_BYTES = 16 << 20
TAGS = "-cp310-abi3-"
WHEEL = re.compile(
    r"colibri/(?:(?:convert/|server/)?\w+\.py|_core\.abi3\.so|demo/__init__\.py|demo/model/[\w.-]+)"
    r"|colibri/server/page/[\w.-]+"
    r"|colibri_moe-[^/]+\.dist-info/.+"
)
NEEDED = (
    "colibri/_core.abi3.so", "colibri/cli.py", "colibri/demo/model/config.json",
    "colibri/server/page/index.html",
)  # fmt: skip


def check_sdist(path: Path) -> None:
    """It holds what the build needs; the build itself proves the rest."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {"LICENSE", "README.md", "csrc/colibri.h", "csrc/build.py", "setup.py"} - names
    stray = {name for name in names if name.endswith((".so", ".o", ".pyc"))}
    fail(path, "lacks", missing)
    fail(path, "holds", stray)


def check_wheel(path: Path) -> None:
    """The core, the Python files and the demo model; nothing else."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    fail(path, "lacks", set(NEEDED) - names)
    fail(path, "holds", {name for name in names if not WHEEL.fullmatch(name)})
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path.name} has {path.stat().st_size} bytes, more than {MOST_BYTES}")


def fail(path: Path, verb: str, names: set[str]) -> None:
    """Stop when there are such names."""
    if names:
        sys.exit(f"{path.name} {verb} {', '.join(sorted(names))}")


def build() -> tuple[Path, Path]:
    """The sdist from this tree, the wheel from the unpacked sdist: no stale file can slip in."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    sdist = DIST / build_meta.build_sdist(str(DIST))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(DIST)]
    subprocess.run([*pip, "wheel", *options, str(sdist)], check=True)
    (wheel,) = DIST.glob("*.whl")
    if TAGS not in wheel.name:
        sys.exit(f"{wheel.name} is for one Python only: {TAGS} is missing from its name")
    return sdist, wheel


def try_install(wheel: Path) -> None:
    """A clean venv gets a `colibri` that answers, from a directory far from the sources."""
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        bin_directory = Path(directory) / "bin"
        pip = [bin_directory / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", str(wheel)], check=True, cwd=directory)
        run = [bin_directory / "colibri", "run", "--prompt", "Hello", "--max-tokens", "3"]
        done = subprocess.run(run, check=True, cwd=directory, capture_output=True)
        if not done.stdout.strip():
            sys.exit("the installed command answered nothing")


def main() -> None:
    """Build, look inside, try."""
    sdist, wheel = build()
    check_sdist(sdist)
    check_wheel(wheel)
    if "--no-install" not in sys.argv[1:]:
        try_install(wheel)
    print(f"{sdist.name} and {wheel.name} ({wheel.stat().st_size:,} bytes) are good")


if __name__ == "__main__":
    main()

"""A directory of shards: every tensor by name, and which files its own numbering says are gone."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from colibri.errors import ContainerError
from colibri.shard import HEADER_BYTES, Shard, TensorInfo, read_shard
from colibri.strictjson import parse_object

INDEX = "model.safetensors.index.json"
WORK = ".conversion"  # inside a directory into which a conversion has not ended
MISSING_LIMIT = 100_000  # missing tensors listed at most: config.json may promise millions
_OF = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)\d+\..+")
_OUT = re.compile(r"(out(?:-[a-z]+)?)-(\d{5})\.safetensors")


class Checkpoint(NamedTuple):
    """All shards of a directory (in name order) and all their tensors by name."""

    directory: Path
    shards: list[Shard]
    tensors: dict[str, TensorInfo]

    def fault(self, tensor: TensorInfo, text: str) -> ContainerError:
        """The error that something is wrong with a tensor: its file, its name, and what."""
        return ContainerError(f"{self.shards[tensor.shard].path}: tensor {tensor.name}: {text}")

    def absent(self, names: list[str]) -> list[str]:
        """Files that should hold `names`, or that the numbering lacks; each with the reason."""
        present = {shard.path.name for shard in self.shards}
        found = {f"{name} (gap in the numbering)": None for name in _numbering_gaps(present)}
        index = _weight_map(self.directory)
        for file in (index.get(stored) for name in names for stored in _stored_as(name)):
            if isinstance(file, str) and file not in present:
                found[f"{file} (listed in {INDEX})"] = None
        return list(found)


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Read every *.safetensors header in `directory` (not below it); ContainerError if unsound, or
    if a conversion is still to put files there."""
    directory = Path(directory)
    require_ended(directory)
    return read_checkpoint(directory)


def require_ended(directory: Path) -> None:
    """ContainerError while a conversion into `directory` is to go on."""
    if (directory / WORK).exists():
        raise ContainerError(
            f"{directory}: a conversion into it has not ended; run the same colibri convert again: "
            "what is done is kept"
        )


def read_checkpoint(directory: Path) -> Checkpoint:
    """As open_checkpoint, whatever else goes on in the directory."""
    try:
        paths = sorted(p for p in directory.iterdir() if p.name.endswith(".safetensors"))
    except OSError as why:
        raise ContainerError(f"{directory}: cannot be listed: {why.strerror}") from why
    if not paths:
        raise ContainerError(
            f"{directory}: no *.safetensors file; give the directory that holds the weights"
        )
    lacking = _of_gaps({path.name for path in paths})
    if lacking:
        raise ContainerError(f"{directory}: {_listing('file', lacking)} missing; fetch again")
    shards = [read_shard(path, number) for number, path in enumerate(paths)]
    return Checkpoint(directory, shards, merge(shards))


def missing_error(checkpoint: Checkpoint, names: list[str], what: str) -> ContainerError:
    """The error for absent tensors: how many, the first by name, and the files to fetch."""
    files = checkpoint.absent(names)
    if files:
        hint = f"{_listing('file', files)} missing; fetch or convert again"
    else:
        hint = "no gap in the file numbering: the conversion did not finish, or config.json differs"
    number = f"over {MISSING_LIMIT}" if len(names) >= MISSING_LIMIT else str(len(names))
    count = "1 tensor is" if len(names) == 1 else f"{number} tensors are"
    return ContainerError(
        f"{checkpoint.directory}: {count} missing, first {what} ({names[0]}); {hint}"
    )


def merge(shards: list[Shard]) -> dict[str, TensorInfo]:
    """All tensors by name; ContainerError for one that is in two shards."""
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        if not shard.tensors:
            raise ContainerError(f"{shard.path}: holds no tensors; remove it or fetch it again")
        expected = len(tensors) + len(shard.tensors)
        for tensor in shard.tensors:
            tensors.setdefault(tensor.name, tensor)
        if len(tensors) != expected:
            raise _duplicate(shards, shard, tensors)
    return tensors


def _duplicate(shards: list[Shard], shard: Shard, seen: dict[str, TensorInfo]) -> ContainerError:
    twice = next(t for t in shard.tensors if shards[seen[t.name].shard] is not shard)
    other = shards[seen[twice.name].shard].path.name
    return ContainerError(
        f"{shard.path}: tensor {twice.name} is also in {other}; two conversions share this "
        "directory? Remove the files that do not belong"
    )


def _listing(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{noun} {shown} is" if len(names) == 1 else f"{noun}s {shown} are"


def _of_gaps(present: set[str]) -> list[str]:
    """Files that `NAME-00001-of-00003` numbering promises and the directory lacks."""
    gaps = []
    families = {m.expand(r"\1|\3") for m in map(_OF.fullmatch, present) if m}
    for family in sorted(families):
        prefix, total = family.rsplit("|", 1)
        if int(total) > 100_000:
            continue
        width = len(total)
        zero = f"{prefix}-{0:0{width}}-of-{total}.safetensors" in present
        numbers = range(0 if zero else 1, int(total) + (0 if zero else 1))
        names = [f"{prefix}-{k:0{width}}-of-{total}.safetensors" for k in numbers]
        gaps += [name for name in names if name not in present]
    return gaps


def _stored_as(name: str) -> list[str]:
    """A tensor's name, that of packed codes, and those of what may hold an expert's matrices among
    all of its layer's."""
    found = _EXPERT.fullmatch(name)
    fused = ("records", "gate_up_proj", "down_proj") if found else ()
    return [name, name + "_packed", *(found[1] + whole for whole in fused if found)]


def _numbering_gaps(present: set[str]) -> list[str]:
    """Numbers below the highest `out-00007` that no file has; the last cannot be known."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_OUT.fullmatch, present)):
        numbers[match[1]].add(int(match[2]))
    return [
        f"{prefix}-{k:05}.safetensors"
        for prefix, found in sorted(numbers.items())
        for k in range(max(found))
        if k not in found
    ]


def _weight_map(directory: Path) -> dict[str, Any]:
    """The index's tensor -> file map; empty when there is none or it is not usable."""
    try:
        with (directory / INDEX).open("rb") as file:
            data = file.read(HEADER_BYTES)
        weights = parse_object(data, INDEX, ContainerError).get("weight_map")
    except (OSError, ContainerError):
        return {}  # the index only helps to name missing files
    return weights if isinstance(weights, dict) else {}

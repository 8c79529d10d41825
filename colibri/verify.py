"""Is a model directory whole? Headers, sizes, gaps, counts; on request every byte's checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri import generation
from colibri.amounts import file_size, plural
from colibri.chat import Template
from colibri.checkpoint import INDEX, require_ended
from colibri.checksum import crc32
from colibri.config import ModelConfig
from colibri.container import Container
from colibri.convert.checks import dead_half, zero_half_warning
from colibri.convert.manifest import RECORD, read_record
from colibri.convert.planner import open_contents
from colibri.convert.sides import CONFIG, EXPECTED, TOKENIZER
from colibri.errors import ColibriError, ConfigError, ContainerError
from colibri.mirror import open_mirror
from colibri.shard import Shard, TensorInfo, read_shard
from colibri.strictjson import parse_object, read_object
from colibri.tokenizer import Tokenizer

_READ = 1 << 23  # bytes read at a time
_SAID = "Hello"  # a conversation to try the template on
Report = Callable[[int, int], None]  # (bytes read, of how many)


@dataclass
class Verdict:
    """What was found. Each fault is a sentence with the file and what to do."""

    directory: Path
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def conclusion(self) -> str:
        """In one line what a directory without faults is good for."""
        if (self.directory / TOKENIZER).exists():
            return f"{self.directory}: whole"
        return (
            f"{self.directory}: whole, but run, chat, serve and score cannot use it: "
            f"{TOKENIZER} is missing"
        )


def verify(
    directory: Path | str,
    deep: bool = False,
    threads: int = 1,
    report: Report | None = None,
    mirrors: Sequence[Path] = (),
) -> Verdict:
    """Check a directory and the copies in its `mirrors`; raises nothing for what is wrong there.

    `deep` reads every byte: those of colibri's containers are compared with the checksums recorded
    when they were written, others are only read.
    """
    verdict = Verdict(Path(directory))
    try:
        require_ended(verdict.directory)
    except ContainerError as why:
        verdict.faults.append(str(why))
    shards = _read_shards(verdict)
    _check_index(verdict, shards)
    _check_sides(verdict)
    if shards and not verdict.faults:
        _check_contents(verdict)
    _check_words(verdict)
    shards += [copy for path in mirrors for copy in _read_copies(verdict, shards, path)]
    if deep and shards:
        _check_bytes(verdict, shards, threads, report)
    return verdict


def _read_shards(verdict: Verdict) -> list[Shard]:
    """All headers, each fault told by itself."""
    shards = []
    try:
        paths = sorted(verdict.directory.glob("*.safetensors"))
    except OSError as why:
        verdict.faults.append(f"{verdict.directory}: cannot be listed: {why.strerror}")
        return []
    for path in paths:
        try:
            shards.append(read_shard(path, len(shards)))
        except ContainerError as why:
            verdict.faults.append(f"{why}. {_remedy(verdict.directory, path)}")
    if not paths:
        verdict.faults.append(f"{verdict.directory}: holds no *.safetensors file")
    return shards


def _read_copies(verdict: Verdict, shards: list[Shard], directory: Path) -> list[Shard]:
    """The shards that a mirror has, under its paths."""
    if not shards:
        return []
    try:
        mirror = open_mirror(directory, shards, range(len(shards)))
    except ContainerError as why:
        verdict.faults.append(str(why))
        return []
    verdict.facts.append(f"{plural(len(mirror.files), 'file')} of them in {directory} too")
    return [shards[number]._replace(path=path) for number, path in mirror.files.items()]


def _check_index(verdict: Verdict, shards: list[Shard]) -> None:
    """What the index and the record of the conversion promise must be there."""
    directory = verdict.directory
    try:
        index = read_object(directory / INDEX, ContainerError)
        if index is None:
            return
        weights = index.get("weight_map", {})
        if not (isinstance(weights, dict) and all(isinstance(f, str) for f in weights.values())):
            raise ContainerError(f"{directory / INDEX}: its weight_map is no table of file names")
    except ContainerError as why:
        verdict.faults.append(f"{why}. {_remedy(directory, directory / INDEX)}")
        return
    present = {path.name for path in directory.glob("*.safetensors")}
    for name in sorted(set(weights.values()) - present):
        verdict.faults.append(
            f"{directory / name}: is missing. {_remedy(directory, directory / name)}"
        )
    files = {t.name: shard.path.name for shard in shards for t in shard.tensors}
    readable = {shard.path.name for shard in shards}
    wrong = [n for n, f in weights.items() if f in readable and files.get(n) != f]
    wrong += [n for n in files if n not in weights]
    if wrong:
        verdict.faults.append(
            f"{directory / INDEX}: disagrees with the files about {wrong[0]}"
            f"{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}; the directory mixes two "
            "checkpoints, or a file was replaced"
        )


def _check_sides(verdict: Verdict) -> None:
    for name in EXPECTED:
        if not (verdict.directory / name).exists():
            sentence = f"{verdict.directory / name}: is missing; copy it from the checkpoint"
            (verdict.faults if name == CONFIG else verdict.warnings).append(sentence)


def _check_contents(verdict: Verdict) -> None:
    """Every tensor of the architecture, in a form that can be used; the counts."""
    try:
        contents = open_contents(verdict.directory)
        verdict.warnings += contents.notes
        nbytes = contents.bytes
        files = f"{plural(len(contents.shards), 'file')}, {file_size(nbytes)}"
        verdict.facts.append(f"{files}: {contents.summary}")
        half = dead_half(contents) if isinstance(contents, Container) else None
        if half:
            verdict.warnings.append(zero_half_warning(contents, half))
    except ColibriError as why:
        verdict.faults.append(str(why))


def _check_words(verdict: Verdict) -> None:
    """What reads and writes text must be able to open; without a tokenizer nothing does."""
    directory = verdict.directory
    checks: list[Callable[[Path], Any]] = [_check_template, generation.recommended]
    if (directory / TOKENIZER).exists():
        checks.append(_check_tokenizer)
    for check in checks:
        try:
            check(directory)
        except ColibriError as why:
            sentence = str(why)
            # The configuration is read for each, and told once.
            known = verdict.faults and sentence.startswith(str(directory / CONFIG))
            if not known and sentence not in verdict.faults:
                verdict.faults.append(sentence)


def _check_template(directory: Path) -> None:
    template = Template.load(directory)
    if _SAID not in template.text([{"role": "user", "content": _SAID}]):
        raise ConfigError(
            f"{template.name}: makes nothing of what is said to it; restore it from the model's "
            "repository"
        )


def _check_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    tokenizer.require_rows(ModelConfig.load(directory).vocab_size, directory)


# ---- every byte ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A run of a file's bytes, and the CRC-32 it must have if one was recorded."""

    path: Path
    what: str
    offset: int
    nbytes: int
    crc: int | None


def _check_bytes(
    verdict: Verdict, shards: list[Shard], threads: int, report: Report | None
) -> None:
    pieces: list[_Piece] = []
    for shard in shards:
        try:
            pieces += _pieces(shard)
        except ContainerError as why:
            verdict.faults.append(f"{why}. {_remedy(verdict.directory, shard.path)}")
    total, done = sum(piece.nbytes for piece in pieces), 0
    with ThreadPoolExecutor(threads) as pool:
        for piece, fault in zip(pieces, pool.map(_fault, pieces), strict=True):
            done += piece.nbytes
            if fault:
                remedy = _remedy(verdict.directory, piece.path)
                verdict.faults.append(f"{piece.path}: {piece.what} {fault}. {remedy}")
            if report:
                report(done, total)
    compared = sum(piece.nbytes for piece in pieces if piece.crc is not None)
    fact = f"{file_size(compared)} compared with their checksums"
    if compared != total:
        fact += f", {file_size(total - compared)} without checksums read"
    verdict.facts.append(fact)


def _pieces(shard: Shard) -> Iterator[_Piece]:
    """A shard's tensors in the pieces that were checksummed, or whole."""
    where = f"{shard.path}: __metadata__.checksums"
    text = shard.metadata.get("checksums", "{}").encode("utf-8", "surrogatepass")
    sums = parse_object(text, where, ContainerError)
    for tensor in sorted(shard.tensors, key=lambda t: t.offset):
        entry = sums.get(tensor.name)
        if entry is None:
            if sums:
                raise ContainerError(f"{where}: {tensor.name} has none; the file was changed")
            yield _Piece(shard.path, tensor.name, tensor.offset, tensor.nbytes, None)
            continue
        yield from _summed(shard, tensor, entry, where)


def _summed(shard: Shard, tensor: TensorInfo, entry: object, where: str) -> Iterator[_Piece]:
    piece = entry.get("piece") if isinstance(entry, dict) else None
    text = entry.get("crc32") if isinstance(entry, dict) else None
    if not (type(piece) is int and piece > 0 and isinstance(text, str)):
        raise ContainerError(f"{where}: {tensor.name}: {json.dumps(entry)[:80]} is no checksum")
    starts = range(0, tensor.nbytes, piece)
    if len(text) != 8 * len(starts):
        raise ContainerError(f"{where}: {tensor.name}: {len(text) // 8} sums, not {len(starts)}")
    for number, start in enumerate(starts):
        try:
            crc = int(text[8 * number : 8 * number + 8], 16)
        except ValueError:
            raise ContainerError(f"{where}: {tensor.name}: a sum is not hexadecimal") from None
        what = tensor.name if len(starts) == 1 else f"{tensor.name}, piece {number},"
        size = min(piece, tensor.nbytes - start)
        yield _Piece(shard.path, what, tensor.offset + start, size, crc)


def _fault(piece: _Piece) -> str:
    """What is wrong with a piece; empty when nothing is."""
    crc, offset, end = 0, piece.offset, piece.offset + piece.nbytes
    try:
        with piece.path.open("rb", buffering=0) as file:
            while offset < end:
                data = os.pread(file.fileno(), min(_READ, end - offset), offset)
                if not data:
                    return "ends early"
                crc, offset = crc32(data, crc), offset + len(data)
    except OSError as why:
        return f"cannot be read: {why.strerror}"
    return "is damaged (its checksum differs)" if piece.crc not in (None, crc) else ""


def _remedy(directory: Path, path: Path) -> str:
    """What to do about a bad file."""
    if path.parent != directory:
        return f"Copy {directory / path.name} there again"
    try:
        record = read_record(directory)
    except ColibriError:
        record = None
    if record is None:
        return f"Fetch or copy {path.name} again"
    origin = record["source"]["origin"]
    source = origin.get("directory") or f"hf://{origin.get('repository')}"
    return (
        f"Remove {path.name} and run the conversion from {source} again (its parameters are in "
        f"{RECORD}): only what is missing is made"
    )

"""Checkpoints on a hub, hf://owner/name[@revision], read through huggingface_hub by shards."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from colibri.errors import ContainerError, UsageError
from colibri.shard import Shard, parse_shard

PREFIX = "hf://"
_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_ATTEMPTS = 8
_PAUSE = 0.5  # seconds before the second attempt; doubled each time, at most a minute
_T = TypeVar("_T")


class Unfetched(ContainerError):
    """Something did not come from the hub, however often it was asked for."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: `sha256` is empty for small files outside the large file storage."""

    name: str
    size: int
    sha256: str


class Hub:
    """One repository at one commit, which is fixed when the object is made."""

    def __init__(self, address: str, commit: str | None = None) -> None:
        """`address` as the user gave it; `commit` continues an earlier conversion of it.

        UsageError for a bad address or without huggingface_hub, Unfetched when the repository
        cannot be read.
        """
        found = _ADDRESS.fullmatch(address)
        if not found:
            raise UsageError(f"{address!r} is not hf://owner/name or hf://owner/name@revision")
        self.repo, self.revision, self.address = found[1], found[2] or "main", address
        self._hub = _library()
        self._api = self._hub.HfApi()
        revision = commit or self.revision
        info = self._patiently(
            f"{address}: the list of files",
            lambda: self._api.model_info(self.repo, revision=revision, files_metadata=True),
        )
        self.commit: str = info.sha
        self.files = {file.rfilename: _file(file) for file in info.siblings or []}

    def shards(self) -> list[HubFile]:
        """The repository's safetensors files, in name order; ContainerError when there is none."""
        names = sorted(n for n in self.files if n.endswith(".safetensors") and "/" not in n)
        if not names:
            raise ContainerError(f"{self.address}: holds no *.safetensors file")
        return [self.files[name] for name in names]

    def header(self, file: HubFile, number: int, directory: Path) -> Shard:
        """A shard's header, without its data."""
        found = self._patiently(
            f"{self.address}: header of {file.name}",
            lambda: self._api.parse_safetensors_file_metadata(
                self.repo, file.name, revision=self.commit
            ),
        )
        fields: dict[str, Any] = {
            name: {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": list(tensor.data_offsets),
            }
            for name, tensor in found.tensors.items()
        }
        end = max((entry["data_offsets"][1] for entry in fields.values()), default=0)
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
        metadata = {str(key): str(value) for key, value in (found.metadata or {}).items()}
        return parse_shard(
            fields | {"__metadata__": metadata}, directory / file.name, file.size,
            file.size - end, digest.hexdigest(), number,
        )  # fmt: skip

    def fetch(self, name: str, directory: Path) -> Path:
        """Download one file into `directory`, whole and with the right checksum."""
        file = self.files[name]
        return self._patiently(
            f"{self.address}: {name}", lambda: self._download(name, directory, file)
        )

    def _download(self, name: str, directory: Path, file: HubFile) -> Path:
        path = Path(
            self._hub.hf_hub_download(
                self.repo, name, revision=self.commit, local_dir=str(directory)
            )
        )
        size = path.stat().st_size
        fault = f"{size} bytes arrived of {file.size}" if size != file.size else ""
        if not fault and file.sha256 and _sha256(path) != file.sha256:
            fault = "arrived damaged (SHA-256 differs)"
        if fault:
            path.unlink()
            raise OSError(fault)
        return path

    def _patiently(self, what: str, action: Callable[[], _T]) -> _T:
        """Try again after failures that may pass; Unfetched when they do not."""
        pause = _PAUSE
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action()
            except Exception as why:
                if attempt == _ATTEMPTS or not self._may_pass(why):
                    reason = str(why).strip().partition("\n")[0] or type(why).__name__
                    first = "free some and " if _is_full(why) else ""
                    raise Unfetched(
                        f"{what} could not be fetched: {reason}; {first}run the same command again"
                    ) from why
            time.sleep(pause)
            pause = min(2 * pause, 60)
        raise AssertionError("unreachable")

    def _may_pass(self, why: Exception) -> bool:
        """Whether another attempt makes sense: not for what the hub refuses or lacks, nor for what
        the disk has no room for."""
        response = getattr(why, "response", None)
        status = getattr(response, "status_code", None)
        if status is not None:
            return status >= 500 or status in (408, 429)
        errors = self._hub.errors
        final = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, ValueError)
        return not (isinstance(why, final) or _is_full(why))


def _is_full(why: Exception) -> bool:
    """Whether the disk has no room for what arrives: it will not have any a minute later."""
    return isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT)


def clear_leftovers(directory: Path) -> None:
    """Remove what a killed download left behind."""
    for path in directory.rglob("*.incomplete"):
        path.unlink(missing_ok=True)


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as why:
        raise UsageError(
            "hf:// sources need huggingface_hub: in colibri's clone, pip install '.[hub]'"
        ) from why
    disable_progress_bars()
    logging.set_verbosity_error()
    return huggingface_hub


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(sibling.rfilename, int(sibling.size or 0), str(lfs.sha256) if lfs else "")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()

"""What a finished container must be, and the one failure of quantisation that ruins drafting."""

from __future__ import annotations

import numpy as np

from colibri.checkpoint import read_checkpoint
from colibri.config import ModelConfig
from colibri.container import Container, format_of
from colibri.convert.jobs import entry_jobs
from colibri.convert.plan import Plan
from colibri.convert.work import Reader
from colibri.errors import ContainerError, UsageError
from colibri.formats import FLOATS, Format, Kind
from colibri.inventory import Entry
from colibri.quantize import decode

_SHORT = (Kind.INT4, Kind.INT3, Kind.INT2)
HALVES = ("embedding", "hidden")


def dead_half(container: Container) -> str | None:
    """The half of the MTP layer's eh_proj whose codes are all zero, if one is.

    Its two halves differ 20 to 30 times in scale; where they share scales of few bits, the smaller
    half rounds to zero and no draft is ever accepted.
    """
    entry = next((e for e in container.entries if e.role == "eh"), None)
    if entry is None or format_of(container.matrix(entry.name)).kind in FLOATS:
        return None
    return _dead(container.read_array(entry.name))


def _dead(weights: np.ndarray) -> str | None:
    middle = weights.shape[1] // 2
    halves = weights[:, :middle], weights[:, middle:]
    return next((n for n, half in zip(HALVES, halves, strict=True) if not half.any()), None)


def require_live_halves(plan: Plan) -> None:
    """UsageError when the format asked for would make a half of eh_proj all zero.

    Read before anything is written, where the source is at hand; only formats that could do it.
    """
    entry = next((e for e in plan.source.entries if e.role == "eh"), None)
    form = plan.manifest.parameters.get("--mtp")
    if entry is None or form is None or plan.hub is not None:
        return
    wanted = Format.parse(form)
    if wanted.kind not in _SHORT or plan.is_begun:
        return
    half = _dead(_encoded(plan, entry, wanted))
    if half and not _dead(_encoded(plan, entry, Format(Kind.INT8))):
        raise UsageError(
            f"--mtp {wanted}: the {half} half of {entry.name} would become all zero, and no draft "
            "would ever be right; use --mtp int8 or a grouped format such as int4-g64"
        )


def _encoded(plan: Plan, entry: Entry, form: Format) -> np.ndarray:
    """A tensor as it would read back from a format."""
    reader, rows = Reader(), []
    try:
        for job in entry_jobs(plan.source, entry, form, ".scales", True):
            (part,) = job.parts
            for extent in job.extents:
                name = plan.manifest.files[extent.shard].name
                reader.open(extent.shard, plan.source.directory / name)
            assert part.scales is not None
            codes, scales = bytearray(part.codes.nbytes), bytearray(part.scales.nbytes)
            part.work.run(reader, memoryview(codes), memoryview(scales))
            cols = entry.shape[1]
            dtype = np.float16 if form.scale == Kind.F16 else np.float32
            payload = np.frombuffer(codes, np.uint8).reshape(-1, form.row_bytes(cols))
            values = np.frombuffer(scales, dtype).reshape(-1, form.row_scales(cols))
            rows.append(decode(payload, values, form, cols))
    finally:
        reader.close()
    return np.concatenate(rows)


def check_finished(plan: Plan) -> tuple[str, list[str]]:
    """Open what was written and count it against config.json: a sentence, and warnings.

    ContainerError when anything is not as planned.
    """
    target = plan.request.target
    container = Container(ModelConfig.load(target), read_checkpoint(target))
    source = plan.source
    counted = {
        "tensors": (len(container.tensors), sum(len(f.image.specs) for f in plan.files)),
        "files": (len(container.shards), len(plan.files)),
        "MTP layers": (container.has_mtp, source.has_mtp),
        "indexers": (container.index_kinds, source.index_kinds),
        "sparse layers": (container.sparse, source.sparse),
    }
    for what, (found, wanted) in counted.items():
        if found != wanted:
            raise ContainerError(
                f"{container.directory}: has {found} {what} where {wanted} were planned; remove "
                "the directory and convert again"
            )
    half = dead_half(container)
    warnings = [zero_half_warning(container, half)] if half else []
    return container.summary, warnings


def zero_half_warning(container: Container, half: str) -> str:
    """What to say of a dead half."""
    return (
        f"{container.directory}: the {half} half of the MTP layer's eh_proj is all zero, so its "
        "drafts will be wrong; convert the MTP layer again as int8"
    )

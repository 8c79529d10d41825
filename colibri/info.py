"""What a model directory holds: architecture, formats, bytes by part, bytes per token, gaps."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri.amounts import file_size, plural
from colibri.config import FULL
from colibri.container import Container, format_of
from colibri.contents import INDEX_FULL
from colibri.formats import Format, MatrixRef
from colibri.inventory import PARTS, records_name

EXPERTS, MTP, OTHER = "experts", "mtp", "other"


@dataclass(frozen=True)
class Part:
    """One part of the weights: matrices of the routed experts, of attention, and so on."""

    name: str
    nbytes: int
    parameters: int
    formats: tuple[str, ...]  # most used first


@dataclass(frozen=True)
class Info:
    """A directory's facts. Parts add up to `file_bytes`; `other` is headers and padding.

    `experts` and the parts before it are the main layers'; `mtp` is the whole MTP layer.
    """

    directory: str
    fingerprint: str
    layout: str
    files: int
    file_bytes: int
    architecture: dict[str, Any]
    parts: tuple[Part, ...]
    expert_bytes: int  # one routed expert, as it is read
    experts_per_token: int  # over all main sparse layers
    cold_bytes: int  # routed experts of one token when none is cached
    dense_bytes: int  # other weights one token reads, every time, from memory
    mtp_cold_bytes: int  # the MTP layer's routed experts for one draft; 0 without
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def describe(directory: Path | str) -> Info:
    """Open a directory and describe it."""
    return info_of(Container.open(directory))


def info_of(container: Container) -> Info:
    """Describe an open container; reads nothing but its headers."""
    config = container.config
    parts = _parts(container)
    sizes = {part.name: part.nbytes for part in parts}
    main = [layer for layer in container.sparse_layers if layer != config.mtp_layer]
    per_layer = [container.expert_bytes(layer) for layer in main]
    used = config.num_experts_per_tok
    dense = sum(sizes[name] for name in PARTS if name in sizes) - sizes["embedding"]
    if config.tie_word_embeddings:
        dense += sizes["embedding"]
    mtp = container.expert_bytes(config.num_hidden_layers) if container.has_mtp else 0
    return Info(
        directory=str(container.directory),
        fingerprint=container.fingerprint,
        layout=_layout(container),
        files=len(container.shards),
        file_bytes=container.bytes,
        architecture=_architecture(container),
        parts=parts,
        expert_bytes=max(per_layer, default=0),
        experts_per_token=used * len(main),
        cold_bytes=used * sum(per_layer),
        dense_bytes=dense + sizes["embedding"] // config.vocab_size,
        mtp_cold_bytes=used * mtp,
        notes=tuple(container.notes),
    )


def render(info: Info) -> str:
    """The text of `colibri info`."""
    facts = info.architecture
    lines = [
        f"{info.directory}",
        f"  {facts['model_type']}, {facts['layers']} layers ({facts['sparse_layers']} sparse), "
        f"hidden {facts['hidden']}, {_count(sum(p.parameters for p in info.parts))} parameters",
        f"  {facts['experts']} experts, {facts['experts_per_token']} a token and layer; "
        f"{facts['heads']} heads; {facts['vocabulary']} tokens; context {facts['context']}",
        f"  attention: {facts['attention']}",
        f"  drafting: {facts['drafting']}",
        f"  layout: {info.layout}, {plural(info.files, 'file')}, fingerprint {info.fingerprint}",
        "",
        f"  {'part':<14} {'bytes':>10}  {'weights':>8}  formats",
    ]
    for part in info.parts:
        weights = _count(part.parameters) if part.parameters else "-"
        formats = ", ".join(part.formats)
        lines.append(
            f"  {part.name:<14} {file_size(part.nbytes):>10}  {weights:>8}  {formats}".rstrip()
        )
    lines += [
        f"  {'files':<14} {file_size(info.file_bytes):>10}",
        "",
        f"  one token reads {file_size(info.dense_bytes)} of dense weights, and when no expert is",
        f"  cached {info.experts_per_token} experts of {file_size(info.expert_bytes)}: "
        f"{file_size(info.cold_bytes)} from disk",
    ]
    if info.mtp_cold_bytes:
        lines.append(
            f"  one draft reads up to {file_size(info.mtp_cold_bytes)} of the MTP layer's experts"
        )
    lines += [f"  note: {note}" for note in info.notes]
    return "\n".join(lines)


def _parts(container: Container) -> tuple[Part, ...]:
    mtp_layer = container.config.mtp_layer
    bytes_of: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    formats: dict[str, Counter[str]] = {}
    for entry in container.entries:
        part = MTP if entry.layer == mtp_layer else entry.part
        ref = container.matrix(entry.name)
        form = format_of(ref)
        bytes_of[part] += form.nbytes(ref.rows, ref.cols)
        weights[part] += ref.rows * ref.cols
        formats.setdefault(part, Counter())[str(form)] += ref.rows * ref.cols
    for layer in container.sparse_layers:
        part = MTP if layer == mtp_layer else EXPERTS
        nbytes, uses = _experts(container, layer)
        bytes_of[part] += nbytes
        weights[part] += sum(uses.values())
        formats.setdefault(part, Counter()).update(uses)
    parts = [
        Part(name, bytes_of[name], weights[name], tuple(f for f, _ in formats[name].most_common()))
        for name in (*PARTS, EXPERTS, MTP)
        if name in formats
    ]
    rest = container.bytes - sum(part.nbytes for part in parts)
    return (*parts, Part(OTHER, rest, 0, ()))


def _experts(container: Container, layer: int) -> tuple[int, Counter[str]]:
    """Bytes of a layer's experts as they are read, and weights by format."""
    table = container.experts(layer)
    nbytes, uses = 0, Counter[str]()
    columns = ["format", "scale_format", "rows", "cols", "group"]
    kinds, counts = np.unique(table[columns].reshape(-1), return_counts=True)
    for kind, count in zip(kinds, counts.tolist(), strict=True):
        form = _form(kind)
        rows, cols = int(kind["rows"]), int(kind["cols"])
        nbytes += count * form.nbytes(rows, cols)
        uses[str(form)] += count * rows * cols
    records = container.tensors.get(records_name(layer))
    return (records.nbytes if records else nbytes), uses


def _form(kind: np.void) -> Format:
    scale, group = int(kind["scale_format"]), int(kind["group"])
    return format_of(MatrixRef(int(kind["format"]), scale, 0, 0, group, 0, 0, 0, 0))


def _layout(container: Container) -> str:
    if container.is_own_layout:
        return "colibri"
    if any(name.endswith(".qs") for name in container.tensors):
        return "public engine's container"
    return "plain floats"


def _architecture(container: Container) -> dict[str, Any]:
    config = container.config
    full = sum(kind == FULL for kind in config.indexer_types)
    attention = "dense (no indexers in the container)"
    if container.has_indexer:
        attention = (
            f"sparse, {config.index_topk} keys a token; {full} layers select, "
            f"{config.num_hidden_layers - full} share"
        )
    drafting = "MTP layer" if container.has_mtp else "no MTP layer"
    if container.has_mtp and container.index_kinds[-1] != INDEX_FULL:
        drafting += " without indexer"
    return {
        "model_type": "glm_moe_dsa",
        "layers": config.num_hidden_layers,
        "sparse_layers": config.sparse_layer_count,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "attention": attention,
        "drafting": drafting,
    }


def _count(weights: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if weights >= scale:
            return f"{weights / scale:.1f} {unit}"
    return str(weights)

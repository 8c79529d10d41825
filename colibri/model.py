"""A container handed to the C core: shards mapped, the dense part read into RAM."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from colibri._core import ffi, lib
from colibri.config import ModelConfig
from colibri.container import Container
from colibri.errors import Cancelled, ContextFull, CoreError
from colibri.formats import MatrixRef
from colibri.knobs import BY_NAME
from colibri.plan import pools

INDEX_EPS = 1e-6  # the indexer's LayerNorm, in every implementation of the architecture
_IO = {
    "mmap": lib.CLB_IO_MMAP,
    "mmap-tight": lib.CLB_IO_MMAP_TIGHT,
    "buffered": lib.CLB_IO_BUFFERED,
    "direct": lib.CLB_IO_DIRECT,
}
_PILOT = {
    "off": lib.CLB_PILOT_OFF,
    "router": lib.CLB_PILOT_ROUTER,
    "fed": lib.CLB_PILOT_FED,
}
WAITING: int = lib.CLB_WAITING  # hidden states kept beside a step's, for the MTP cache
ROW_BLOCK: int = lib.CLB_ROW_BLOCK  # what bounds a session's scratch
KEY_TILE: int = lib.CLB_KEY_TILE
PAIR_BLOCK: int = lib.CLB_PAIR_BLOCK
PILOT_SLOTS: int = lib.CLB_PILOT_SLOTS  # slots of the main layers that a pilot adds
_ERRORS = {lib.CLB_CANCELLED: Cancelled, lib.CLB_FULL: ContextFull}

Progress = Callable[[int, int], None]  # (done, total)


def check(code: int, error: Any) -> None:
    """Raise the exception of a core call's error code."""
    if code:
        text = ffi.string(error.text).decode("utf-8", "replace")
        raise _ERRORS.get(code, CoreError)(text)


def available_isas() -> list[str]:
    """Instruction sets whose kernels this processor runs, the reference first."""
    return [name for name in BY_NAME["isa"].kind.words if lib.clb_isa_available(name.encode())]


class Model:
    """Weights of one container, shared by any number of sessions.

    `has_mtp` says whether the MTP layer was loaded; with mtp=False its weights are never read.
    """

    def __init__(self, handle: Any, container: Container, has_mtp: bool, threads: int) -> None:
        self.handle = handle
        self.container = container
        self.config: ModelConfig = container.config
        self.has_mtp = has_mtp
        self.threads = threads
        self.dense_bytes = 0

    @classmethod
    def open(
        cls,
        container: Container,
        threads: int = 1,
        isa: str | None = None,
        mtp: bool = True,
        load: bool = True,
    ) -> "Model":
        """Map the shards and load the dense part, or leave that to `load`. CoreError names file or
        tensor."""
        has_mtp = mtp and container.has_mtp
        error = ffi.new("clb_error *")
        out = ffi.new("clb_model **")
        config, _arrays = _core_config(container, has_mtp)
        name = isa.encode() if isa else ffi.NULL
        check(lib.clb_model_new(config, name, threads, out, error), error)
        model = cls(ffi.gc(out[0], lib.clb_model_free), container, has_mtp, threads)
        for shard in container.shards:
            path = os.fsencode(shard.path)
            code = lib.clb_model_add_shard(model.handle, path, shard.size, error)
            check(code, error)
        for drive, mirror in enumerate(container.mirrors, 1):
            for number, path in mirror.files.items():
                name = os.fsencode(path)
                check(lib.clb_model_add_copy(model.handle, number, drive, name, error), error)
        model._describe(error)
        model.set_residency("mmap", 0)
        if load:
            model.load()
        return model

    def set_residency(self, io: str, slots_per_layer: float, pilot: str = "off") -> None:
        """How experts come into memory, from the next step on; what was resident is dropped.

        `io`: mmap (the page cache holds them), mmap-tight (pages are asked for at every use),
        buffered or direct (our own slots: `slots_per_layer` experts a layer on average).
        `pilot`: off, router (guess the next layer's experts by its router, and read them while the
        disk is idle) or fed (guesses come from `feed_pilot`).
        """
        error = ffi.new("clb_error *")
        slots, mtp_slots = pools(slots_per_layer, self.config.sparse_layer_count)
        code = lib.clb_model_set_residency(
            self.handle, _IO[io], slots, mtp_slots, _PILOT[pilot], error
        )
        check(code, error)

    def feed_pilot(self, guesses: np.ndarray) -> None:
        """Guessed expert ids for the next steps: i32 [num_hidden_layers, n], -1 for none."""
        guesses = np.ascontiguousarray(guesses, np.int32)
        if guesses.ndim != 2 or len(guesses) != self.config.num_hidden_layers:
            raise CoreError(f"guesses {list(guesses.shape)} are not of every layer")
        error = ffi.new("clb_error *")
        ids = ffi.from_buffer("int32_t[]", guesses)
        check(lib.clb_model_feed_pilot(self.handle, ids, guesses.shape[1], error), error)

    def resident(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert in a slot, hottest first."""
        most = self.layers * self.config.n_routed_experts
        pairs = np.empty((most, 2), np.int32)
        out = ffi.from_buffer("int32_t[]", pairs)
        count = lib.clb_model_resident(self.handle, out, most)
        if count < 0:
            raise CoreError("out of memory for a list of the experts in memory; free some")
        return [(int(layer), int(expert)) for layer, expert in pairs[:count]]

    def warm(self, experts: list[tuple[int, int]]) -> None:
        """Read experts into slots, in the order given; of those colder than one use, the last
        becomes the hottest."""
        pairs = np.array(experts, np.int32).reshape(-1, 2)
        error = ffi.new("clb_error *")
        code = lib.clb_model_warm(
            self.handle, ffi.from_buffer("int32_t[]", pairs), len(pairs), error
        )
        check(code, error)

    def slot_bytes(self, mtp: bool = False) -> int:
        """Bytes of one expert slot of the main layers, or of the MTP layer; 0 without experts."""
        return int(lib.clb_model_slot_bytes(self.handle, mtp))

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one routed expert of a layer, scales included."""
        return int(lib.clb_model_expert_bytes(self.handle, layer))

    @property
    def isa(self) -> str:
        """The kernels in use: scalar, avx2, avxvnni, avx512 or neon."""
        return str(ffi.string(lib.clb_model_isa(self.handle)).decode())

    @property
    def layers(self) -> int:
        """Layers held: the main ones, then the MTP layer when it is loaded."""
        return self.config.num_hidden_layers + self.has_mtp

    def _describe(self, error: Any) -> None:
        """Hand every tensor's place to the core, which checks it against its shard."""
        for entry in self.container.entries:
            if entry.layer >= self.layers:
                continue
            self._set(entry.layer, entry.role, self.container.matrix(entry.name), error)
        if self.config.tie_word_embeddings:
            self._set(-1, "head", self.container.matrix("lm_head.weight"), error)
        for layer in self.container.sparse_layers:
            if layer < self.layers:
                table = np.ascontiguousarray(self.container.experts(layer))
                tensors = ffi.from_buffer("clb_tensor[]", table)
                check(lib.clb_model_set_experts(self.handle, layer, tensors, error), error)

    def _set(self, layer: int, role: str, ref: MatrixRef, error: Any) -> None:
        tensor = ffi.new("clb_tensor *", ref._asdict())
        number = getattr(lib, f"CLB_{role.upper()}")
        check(lib.clb_model_set(self.handle, layer, number, tensor, error), error)

    def load(self, progress: Progress | None = None) -> None:
        """Read the dense part into memory, layer by layer; CoreError names the file."""
        error = ffi.new("clb_error *")
        size = ffi.new("int64_t *")
        for done, layer in enumerate(range(-1, self.layers)):
            check(lib.clb_model_load(self.handle, layer, size, error), error)
            self.dense_bytes += size[0]
            if progress:
                progress(done + 1, self.layers + 1)


def _core_config(container: Container, has_mtp: bool) -> tuple[Any, list[Any]]:
    """clb_config, and the arrays that must outlive the call that reads it."""
    config = container.config
    layers = config.num_hidden_layers + has_mtp
    sparse = ffi.new("uint8_t[]", [int(s) for s in container.sparse[:layers]])
    kinds = ffi.new("uint8_t[]", list(container.index_kinds[:layers]))
    inv_freq = ffi.new("float[]", [float(f) for f in config.inv_freq])
    out = ffi.new("clb_config *")
    for field, value in {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "has_mtp": int(has_mtp),
        "intermediate": config.intermediate_size,
        "moe_intermediate": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "groups": config.n_group,
        "groups_kept": config.topk_group,
        "heads": config.num_attention_heads,
        "q_lora": config.q_lora_rank,
        "kv_lora": config.kv_lora_rank,
        "nope": config.qk_nope_head_dim,
        "rope": config.qk_rope_head_dim,
        "v_head": config.v_head_dim,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "rms_eps": config.rms_norm_eps,
        "index_eps": INDEX_EPS,
        "routed_scale": config.routed_scaling_factor,
        "normalize_topk": int(config.norm_topk_prob),
        "mtp_share_index": int(config.index_share_for_mtp_iteration),
        "sparse": sparse,
        "index_kind": kinds,
        "inv_freq": inv_freq,
    }.items():
        setattr(out, field, value)
    return out, [sparse, kinds, inv_freq]

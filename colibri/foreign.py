"""Checkpoints as other tools quantise them: which are converted first, and which are not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colibri.checkpoint import Checkpoint
from colibri.errors import ConfigError, ContainerError

PACKED = "_packed"  # behind the name of a matrix: its codes, by compressed-tensors
READ = "BF16, F16, F32, FP8, NVFP4, MXFP4 and compressed-tensors' pack-quantized are converted"
# By the last parts of tensors' names; the first that are all there.
_TOOLS = {
    ("qweight", "g_idx"): "GPTQ",
    ("qweight",): "AWQ (AutoAWQ)",
    ("pre_quant_scale",): "AWQ (Model Optimizer)",
    ("scales", "biases"): "MLX",
    ("quant_map",): "bitsandbytes",
    ("SCB",): "bitsandbytes",
    ("gate_up_proj_blocks",): "gpt-oss's own MXFP4",
    ("trellis",): "EXL3",
    ("q_weight",): "EXL2",
    ("codebooks",): "AQLM",
    ("W_q",): "HQQ",
    ("bitmask",): "compressed-tensors (sparse)",
}


def require_known(checkpoint: Checkpoint) -> None:
    """ContainerError for a checkpoint in a format that is neither run nor converted."""
    ends: dict[str, str] = {}
    for name in checkpoint.tensors:
        ends.setdefault(name.rpartition(".")[2], name)
    for parts, tool in _TOOLS.items():
        if all(part in ends for part in parts):
            raise ContainerError(
                f"{checkpoint.directory}: is quantised by {tool} ({ends[parts[0]]}), which is not "
                f"read; get another checkpoint of the model: {READ}"
            )


def require_runnable(checkpoint: Checkpoint) -> None:
    """ContainerError for packed codes, which are converted first."""
    name = next((name for name in checkpoint.tensors if name.endswith(PACKED)), None)
    if name is not None:
        raise checkpoint.fault(
            checkpoint.tensors[name],
            "a checkpoint of compressed-tensors cannot be run as it is; convert it first: colibri "
            "convert SRC DST",
        )


def require_plain(quantization: Any, where: str) -> None:
    """ConfigError when weights are stored rotated, so that activations would have to be too."""
    if _object(_object(quantization).get("transform_config")).get("config_groups"):
        raise ConfigError(
            f"{where}: quantization_config.transform_config rotates the weights, which is not "
            f"undone; get another checkpoint of the model: {READ}"
        )


def lacks_zeros(quantization: Any) -> bool:
    """Whether packed integers may lack zero points: not where all groups are said to be without
    symmetry (compressed-tensors' config_groups)."""
    groups = _object(_object(quantization).get("config_groups"))
    weights = [_object(_object(group).get("weights")) for group in groups.values()]
    return not weights or any(each.get("symmetric", True) is not False for each in weights)


def gguf_fault(names: Iterable[str]) -> str | None:
    """What to say of files among which there is GGUF and no safetensors; None of others."""
    names = sorted(names)
    found = next((name for name in names if name.lower().endswith(".gguf")), None)
    if found is None or any(name.endswith(".safetensors") for name in names):
        return None
    return f"{found} is GGUF, which is not read; get another checkpoint of the model: {READ}"


def _object(value: Any) -> Mapping[str, Any]:
    """What should be an object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}

"""Read and write the demo model in the HF checkpoint layout (BF16, one safetensors file).

usage: export_demo.py CHECKPOINT.pt BASE_DIR OUT_DIR [--index-topk N]
BASE_DIR supplies config.json, the tokenizer, the chat template and generation_config.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from demo_model import DemoModel, Layer, Mlp, Moe, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
CORRECTION = "mlp.gate.e_score_correction_bias"


def _attention(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}input_layernorm.weight", layer.input_layernorm.weight
    yield f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    for name, tensor in layer.self_attn.named_parameters():
        yield f"{prefix}self_attn.{name}", tensor


def _mlp(mlp: Mlp, prefix: str) -> Iterator[tuple[str, Tensor]]:
    gate, up = mlp.gate_up.chunk(2)
    yield f"{prefix}gate_proj.weight", gate
    yield f"{prefix}up_proj.weight", up
    yield f"{prefix}down_proj.weight", mlp.down


def _layer(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from _attention(layer, prefix)
    if not isinstance(layer.mlp, Moe):
        yield from _mlp(layer.mlp, f"{prefix}mlp.")
        return
    yield f"{prefix}mlp.gate.weight", layer.mlp.gate.weight
    yield f"{prefix}{CORRECTION}", layer.mlp.correction
    yield from _mlp(layer.mlp.shared_experts, f"{prefix}mlp.shared_experts.")
    for expert, (gate_up, down) in enumerate(
        zip(layer.mlp.expert_gate_up, layer.mlp.expert_down, strict=True)
    ):
        gate, up = gate_up.chunk(2)
        yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", gate
        yield f"{prefix}mlp.experts.{expert}.up_proj.weight", up
        yield f"{prefix}mlp.experts.{expert}.down_proj.weight", down


def hf_views(model: DemoModel) -> Iterator[tuple[str, Tensor]]:
    """(HF name, view of the model's own storage) for every tensor but lm_head (it is tied)."""
    yield "model.embed_tokens.weight", model.embed
    yield "model.norm.weight", model.norm.weight
    for number, layer in enumerate(model.layers):
        yield from _layer(layer, f"model.layers.{number}.")
    prefix, mtp = f"model.layers.{len(model.layers)}.", model.mtp
    yield from _layer(mtp, prefix)
    yield f"{prefix}enorm.weight", mtp.enorm.weight
    yield f"{prefix}hnorm.weight", mtp.hnorm.weight
    yield f"{prefix}eh_proj.weight", mtp.eh_proj.weight
    yield f"{prefix}shared_head.norm.weight", mtp.head_norm.weight


@torch.no_grad()
def load_model(directory: Path) -> DemoModel:
    """The model of an HF directory, in float32 (dense attention until `topk` is set)."""
    model = DemoModel(Shape.load(directory))
    tensors = load_file(directory / "model.safetensors")
    if not torch.equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"]):
        raise SystemExit(f"{directory}: lm_head differs from embed_tokens; the demo ties them")
    for name, view in hf_views(model):
        view.copy_(tensors.pop(name))
    if tensors:
        raise SystemExit(f"{directory}: unknown tensors {sorted(tensors)[:3]}...")
    return model


def save_model(model: DemoModel, base: Path, out: Path, index_topk: int) -> None:
    """Write `model` to `out` with the config of `base`, but `index_topk`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: view.detach().to(torch.float32 if name.endswith(CORRECTION) else torch.bfloat16)
        for name, view in hf_views(model)
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["index_topk"] = index_topk
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in COPIED:
        shutil.copyfile(base / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="written by train_demo.py")
    parser.add_argument("base", type=Path, help="HF directory with config and tokenizer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--index-topk", type=int, default=1024)
    args = parser.parse_args()
    model = DemoModel(Shape.load(args.base))
    model.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])
    save_model(model, args.base, args.out, args.index_topk)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()

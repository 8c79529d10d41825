"""Distillation of the DSA indexers from the attention whose reading they decide."""

from __future__ import annotations

import torch
from demo_model import DemoModel, causal_mask
from torch import Tensor


def attention_share(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The attention distribution averaged over heads, [B, T, T]."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1).mean(1)


def readers(model: DemoModel) -> list[int]:
    """For every trunk layer, and then every draft step, the layer whose indexer selects for it."""
    owners, last = [], 0
    for number, kind in enumerate(model.shape.indexer_types):
        last = number if kind == "full" else last
        owners.append(last)
    return owners


def distillation_loss(
    model: DemoModel, ids: Tensor, length: int, steps: int = 3
) -> dict[str, Tensor]:
    """KL(attention || softmax of the index scores) of every full layer and of the MTP layer.

    The target of an indexer is the mean over all layers (and draft steps) that use its selection.
    """
    mask, angles = causal_mask(length), model.angles(0, length)
    owners, layers = readers(model), len(model.layers)
    targets: dict[int, list[Tensor]] = {}
    inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(number: int, h: Tensor, latent: Tensor, q: Tensor, k: Tensor) -> None:
        owner = owners[number] if number < layers else layers
        targets.setdefault(owner, []).append(attention_share(q, k, mask))
        inputs.setdefault(owner, (h, latent))

    model.watch = watch
    with torch.no_grad():
        hidden = model.trunk(ids[:, :length])
        model.drafts(hidden, ids[:, 1 : length + steps], steps)
    model.watch = None
    losses = {}
    for owner, shares in targets.items():
        attn = (model.layers[owner] if owner < layers else model.mtp).self_attn
        target = torch.stack(shares).mean(0)
        log_index = (attn.indexer(*inputs[owner], angles) + mask).log_softmax(-1)
        log_index = log_index.masked_fill(mask == float("-inf"), 0.0)
        entropy = torch.xlogy(target, target).sum(-1)
        losses[f"kl{owner}"] = (entropy - (target * log_index).sum(-1)).mean()
    return losses

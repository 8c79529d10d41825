"""Distillation of the DSA indexers from the attention whose reading they decide."""

from __future__ import annotations

import torch
from demo_model import DemoModel, causal_mask
from torch import Tensor


def owners(indexer_types: tuple[str, ...]) -> list[int]:
    """For every trunk layer, the full layer whose indexer selects for it."""
    found, last = [], 0
    for number, kind in enumerate(indexer_types):
        last = number if kind == "full" else last
        found.append(last)
    return found


class Distillation:
    """Watches one forward pass and compares index scores with what was attended to.

    The target of an indexer is the attention distribution, averaged over heads and over all the
    layers (or draft steps) that use its selection. Its inputs are detached: it learns alone.
    """

    def __init__(self, model: DemoModel, length: int) -> None:
        self.model, self.length = model, length
        self.mask = causal_mask(length)
        self.owners = owners(model.shape.indexer_types)
        self.shares: dict[int, list[Tensor]] = {}
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def watch(self, number: int, h: Tensor, latent: Tensor, q: Tensor, k: Tensor) -> None:
        """DemoModel.watch: layer input [B, T, D], query latent, q and k [B, H, T, d]."""
        layers = len(self.owners)
        owner = self.owners[number] if number < layers else layers
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.mask
        self.shares.setdefault(owner, []).append(scores.softmax(-1).mean(1))
        self.inputs.setdefault(owner, (h.detach(), latent.detach()))

    def losses(self) -> dict[str, Tensor]:
        """KL(attention || softmax of the index scores), mean over rows, for every indexer."""
        found, angles = {}, self.model.angles(0, self.length)
        for owner, shares in self.shares.items():
            layer = self.model.mtp if owner == len(self.owners) else self.model.layers[owner]
            target = torch.stack(shares).mean(0)
            scores = layer.self_attn.indexer(*self.inputs[owner], angles)
            log_index = (scores + self.mask).log_softmax(-1)
            log_index = log_index.masked_fill(self.mask == float("-inf"), 0.0)
            entropy = torch.xlogy(target, target).sum(-1)
            found[f"kl{owner}"] = (entropy - (target * log_index).sum(-1)).mean()
        return found

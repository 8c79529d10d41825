"""Muon for the hidden matrices, AdamW for the rest (embedding, norms, routers, experts)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from demo_model import DemoModel
from torch import Tensor

MOMENTUM = 0.95
MUON_DECAY = 0.02
CLIP = 1.0


class Rates(Protocol):
    """Peak learning rates."""

    adam_rate: float
    expert_rate: float
    muon_rate: float


def orthogonalise(gradient: Tensor, rounds: int = 5) -> Tensor:
    """The Newton-Schulz iteration of Muon (Jordan et al. 2024): singular values move to about 1."""
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * (s @ s)) @ x
    return x.T if tall else x


def kind_of(name: str, parameter: Tensor) -> str:
    """The parameter group of a name: norm, expert, table (embedding, router) or muon."""
    if parameter.dim() == 1:
        return "norm"
    if ".expert_" in name:
        return "expert"
    if name == "embed" or name.endswith("gate.weight"):
        return "table"
    return "muon"


class DemoOptimizer:
    """One step over every parameter that has a gradient; the indexers are left alone."""

    def __init__(self, model: DemoModel, rates: Rates) -> None:
        groups: dict[str, list[Tensor]] = {"norm": [], "expert": [], "table": [], "muon": []}
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                parameter.requires_grad_(False)
            else:
                groups[kind_of(name, parameter)].append(parameter)
        peak = {
            "norm": rates.adam_rate / 2,
            "expert": rates.expert_rate,
            "table": rates.adam_rate,
        }
        self.adam = torch.optim.AdamW(
            [
                {
                    "params": groups[kind],
                    "lr": rate,
                    "peak": rate,
                    "weight_decay": 0.05 if kind == "expert" else 0.0,
                }
                for kind, rate in peak.items()
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=True,
        )
        self.muon = groups["muon"]
        self.momentum = [torch.zeros_like(parameter) for parameter in self.muon]
        self.muon_rate = rates.muon_rate

    def step(self, rate: float) -> float:
        """Apply the gradients at `rate` times the peak rates; returns the AdamW gradient norm."""
        chosen = [p for group in self.adam.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(chosen, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * rate
        self.adam.step()
        self._muon_step(rate * self.muon_rate)
        for parameter in (*chosen, *self.muon):
            parameter.grad = None
        return float(norm)

    @torch.no_grad()
    def _muon_step(self, rate: float) -> None:
        for parameter, momentum in zip(self.muon, self.momentum, strict=True):
            if parameter.grad is None:
                continue
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            update = orthogonalise(torch.lerp(parameter.grad, momentum, MOMENTUM))
            shape = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - rate * MUON_DECAY).add_(update, alpha=-rate * shape)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the moments; the peak rates stay those of the recipe."""
        peaks = [group["peak"] for group in self.adam.param_groups]
        self.adam.load_state_dict(state["adam"])
        for group, peak in zip(self.adam.param_groups, peaks, strict=True):
            group["peak"] = peak
        for own, saved in zip(self.momentum, state["momentum"], strict=True):
            own.copy_(saved)


class FinishOptimizer:
    """Everything but the MTP layer and the indexers is frozen; AdamW trains the indexers."""

    SHARE = 0.4  # of the peak rates, for an MTP layer that has been trained before

    def __init__(self, model: DemoModel, rates: Rates) -> None:
        self.draft = DemoOptimizer(model, rates)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp.") or ".indexer." in name)
        chosen = [p for name, p in model.named_parameters() if ".indexer." in name]
        self.index = torch.optim.AdamW(chosen, betas=(0.9, 0.95), weight_decay=0.0)
        self.index_rate = rates.adam_rate

    def step(self, rate: float) -> float:
        """One step of both; returns the AdamW gradient norm of the MTP layer."""
        for group in self.index.param_groups:
            group["lr"] = rate * self.index_rate
        self.index.step()
        self.index.zero_grad(set_to_none=True)
        return self.draft.step(self.SHARE * rate)

    def state_dict(self) -> dict[str, Any]:
        return {"draft": self.draft.state_dict(), "index": self.index.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        self.index.load_state_dict(state["index"])

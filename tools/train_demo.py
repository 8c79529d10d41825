"""Train the demo model on one CPU core; every run can be stopped and resumed.

usage: train_demo.py trunk  DATA_DIR BASE_DIR RUN_DIR [--minutes M] [--resume] [--random-init]
       train_demo.py finish DATA_DIR BASE_DIR RUN_DIR [--minutes M] [--resume]
`trunk` trains the network with its MTP layer from BASE_DIR's weights by the schedule in
demo_recipe.json, which is measured in minutes of CPU time, not in steps. `finish` freezes the
trunk, distils the DSA indexers from the attention they are to predict, and lets the MTP layer
catch up with the trunk. RUN_DIR/trunk.pt and RUN_DIR/finish.pt are the checkpoints (weights,
optimiser, random state, minutes), RUN_DIR/log.txt is the log.
SIGTERM saves and ends; --resume reads the recipe again, so that it may be changed in between.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import Batch, Mixture
from demo_distil import Distillation
from demo_model import MTP_STEPS, DemoModel, Moe, Shape
from demo_optim import DemoOptimizer, FinishOptimizer
from demo_recipe import RECIPE, Block, Recipe
from export_demo import load_model
from torch import Tensor, nn

CHECKPOINT_SECONDS = 180.0
LOG_STEPS = 25
FINISH_ROWS, FINISH_WARM, FINISH_BIAS_RATE = 2, 20, 5e-4


class Clock:
    """CPU time of training; a restart goes on from `spent`, and waiting does not count."""

    def __init__(self, minutes: float, spent: float = 0.0) -> None:
        self.limit, self.spent, self.last = minutes * 60, spent, time.process_time()

    def seconds(self) -> float:
        now = time.process_time()
        self.spent += now - self.last
        self.last = now
        return self.spent

    def fraction(self) -> float:
        return min(1.0, self.seconds() / self.limit)


class Log:
    """Appends lines to the log file and keeps moving averages per domain."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.means = stream, {}
        self.tokens, self.cpu = 0, time.process_time()

    def line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def track(self, name: str, value: float) -> None:
        self.means[name] = 0.96 * self.means.get(name, value) + 0.04 * value

    def report(self, step: int, clock: Clock, rate: float) -> None:
        speed = self.tokens / max(1e-9, time.process_time() - self.cpu)
        means = " ".join(f"{name} {mean:.3f}" for name, mean in sorted(self.means.items()))
        self.line(
            f"step {step} min {clock.seconds() / 60:.1f} rate {rate:.3f} "
            f"tok/cpu-s {speed:.0f} {means}"
        )
        self.tokens, self.cpu = 0, time.process_time()


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def token_losses(model: DemoModel, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropies [B, T], zero where the weight is zero (those rows skip the head)."""
    used = weights > 0
    losses = F.cross_entropy(model.logits(hidden[used]), targets[used], reduction="none")
    return torch.zeros_like(weights).masked_scatter(used, losses)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def draft_losses(
    model: DemoModel, hidden: Tensor, ids: Tensor, weights: Tensor, log: Log
) -> Tensor:
    """Mean loss of the draft steps; hidden [B, T, D], ids and weights [B, T + LOOKAHEAD]."""
    length, total = hidden.shape[1], hidden.new_zeros(())
    for step, rows in enumerate(model.drafts(hidden, ids[:, 1 : length + MTP_STEPS])):
        span = slice(step + 2, step + 2 + length)
        ahead = weights[:, span]
        loss = weighted_mean(token_losses(model, rows, ids[:, span], ahead), ahead)
        log.track(f"draft{step + 1}", float(loss.detach()))
        total = total + loss / MTP_STEPS
    return total


def batch_loss(
    model: DemoModel, batch: Batch, block: Block, weight: float, log: Log, names: list[str]
) -> Tensor:
    """The training loss of a batch; tracks the loss per domain and of the draft steps."""
    ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
    length, few = block.length, block.draft_rows
    hidden = model.trunk(ids[:, :length])
    ahead = weights[:, 1 : length + 1]
    losses = token_losses(model, hidden, ids[:, 1 : length + 1], ahead)
    for row, domain in enumerate(batch.domains):
        log.track(names[domain], float(weighted_mean(losses[row].detach(), ahead[row])))
    total = weighted_mean(losses, ahead)
    if few:
        total = total + weight * draft_losses(model, hidden[:few], ids[:few], weights[:few], log)
    return total


@torch.no_grad()
def balance(model: nn.Module, rate: float) -> float:
    """Move every router's correction bias towards an even load; returns the worst load ratio."""
    worst = 0.0
    for module in model.modules():
        if isinstance(module, Moe) and module.load.sum() > 0:
            mean = module.load.mean()
            worst = max(worst, float(module.load.max() / mean))
            module.correction += rate * torch.sign(mean - module.load)
            module.load.zero_()
    return worst


@dataclass
class Run:
    """What a resumed run needs: everything that changes while training."""

    model: DemoModel
    optimizer: Any
    rng: np.random.Generator
    clock: Clock
    step: int = 0
    tokens: int = 0
    stopping: bool = False

    def stop(self, *_: object) -> None:
        self.stopping = True

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "seconds": self.clock.seconds(),
            "step": self.step,
            "tokens": self.tokens,
        }
        save_atomically(state, path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.clock.spent, self.step, self.tokens = state["seconds"], state["step"], state["tokens"]


def steps(run: Run, path: Path) -> Iterator[float]:
    """Yields the elapsed fraction before every step; saves at intervals and at the end."""
    saved = time.monotonic()
    signal.signal(signal.SIGTERM, run.stop)
    while (fraction := run.clock.fraction()) < 1.0 and not run.stopping:
        yield fraction
        run.step += 1
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            run.save(path)
            saved = time.monotonic()
    run.save(path)


def ending(run: Run) -> str:
    return "stopped" if run.stopping else "done"


def train_trunk(run: Run, recipe: Recipe, data: Path, log: Log, path: Path) -> None:
    current, mixtures = -1, []
    for fraction in steps(run, path):
        index = recipe.phase_at(fraction)
        phase = recipe.phases[index]
        if index != current:
            current, mixtures = index, [Mixture(data, block.mix) for block in phase.blocks]
            log.line(f"phase {index}: {phase}")
        chosen = int(run.rng.choice(len(mixtures), p=phase.shares()))
        block, mixture = phase.blocks[chosen], mixtures[chosen]
        batch = mixture.draw(run.rng, block.rows, block.length)
        loss = batch_loss(run.model, batch, block, recipe.draft_weight, log, mixture.names)
        loss.backward()
        rate = recipe.rate_at(run.step, fraction)
        log.track("grad", run.optimizer.step(rate))
        log.track("load", balance(run.model, recipe.bias_rate * (1 - fraction) ** 2))
        run.tokens += block.rows * block.length
        log.tokens += block.rows * block.length
        if run.step % LOG_STEPS == 0:
            log.report(run.step, run.clock, rate)
    log.line(f"trunk {ending(run)}: {run.step} steps, {run.tokens} tokens")


def train_finish(run: Run, recipe: Recipe, data: Path, log: Log, path: Path) -> None:
    block = recipe.phases[-1].blocks[-1]
    mixture = Mixture(data, block.mix)
    for fraction in steps(run, path):
        batch = mixture.draw(run.rng, FINISH_ROWS, block.length)
        ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
        distillation = Distillation(run.model, block.length)
        run.model.watch = distillation.watch
        with torch.no_grad():
            hidden = run.model.trunk(ids[:, : block.length])
        loss = draft_losses(run.model, hidden, ids, weights, log)
        run.model.watch = None
        for name, divergence in distillation.losses().items():
            log.track(name, float(divergence.detach()))
            loss = loss + divergence
        loss.backward()
        rate = min(1.0, (run.step + 1) / FINISH_WARM) * max(0.02, 1 - fraction)
        run.optimizer.step(rate)
        balance(run.model.mtp, FINISH_BIAS_RATE * (1 - fraction))
        run.tokens += FINISH_ROWS * block.length
        log.tokens += FINISH_ROWS * block.length
        if run.step % LOG_STEPS == 0:
            log.report(run.step, run.clock, rate)
    log.line(f"finish {ending(run)}: {run.step} steps, {run.tokens} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("trunk", "finish"))
    parser.add_argument("data", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--random-init", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    recipe = Recipe.load(args.recipe)
    model = DemoModel(Shape.load(args.base)) if args.random_init else load_model(args.base)
    args.run.mkdir(parents=True, exist_ok=True)
    path = args.run / f"{args.stage}.pt"
    if args.stage == "trunk":
        optimizer, minutes = DemoOptimizer(model, recipe), recipe.minutes
    else:
        trunk = torch.load(args.run / "trunk.pt", weights_only=True)
        model.load_state_dict(trunk["model"])
        optimizer, minutes = FinishOptimizer(model, recipe), recipe.finish_minutes
    rng = np.random.default_rng(args.seed)
    run = Run(model, optimizer, rng, Clock(args.minutes or minutes))
    if args.resume:
        run.restore(path)
    with (args.run / "log.txt").open("a") as stream:
        train = train_trunk if args.stage == "trunk" else train_finish
        train(run, recipe, args.data, Log(stream), path)


if __name__ == "__main__":
    main()

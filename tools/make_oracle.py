"""Makes tests/fixtures/oracle-*.npz: what transformers computes on the tiny checkpoints.

    python tools/make_oracle.py            # needs torch 2.13, transformers >= 5.24 < 6

The main forward is GlmMoeDsaForCausalLM (eager, float32). Two liberties are taken. The norms of
the two latents get the configuration's epsilon, as in every other engine, where transformers keeps
its class default. And the MTP layer, which transformers does not run for this architecture, is put
together from transformers' own modules. A seed is kept only if every choice (index sets, experts,
arg max) is clear by a margin that float32 rounding cannot cross.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import tiny  # noqa: E402
from reference import Reference, read_config  # noqa: E402

TOKENS = 48  # six times index_topk
LENGTHS = (3, 8, 12, 25, 41)  # MTP rows absorbed before drafting
DRAFTS = 5  # draft steps after step 0
ACCEPT_AT = 25  # rows absorbed before the verify batch of the acceptance scenarios
AFTER = 2  # draft steps after each re-absorb
MARGIN = 1e-4
AGREE = 1e-5  # between two ways transformers can compute the same row
BLOCKED = torch.finfo(torch.float32).min


class Retry(Exception):
    """The seed is unclear or unlucky; try the next."""


def eps_patched(module: torch.nn.Module, eps: float) -> torch.nn.Module:
    """Sets the epsilon of the two latent norms."""
    for name, part in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            part.variance_epsilon = eps
    return module


def load_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor], prefix: str) -> None:
    """Fills every parameter and buffer from published names, fusing experts where needed."""
    for name in module.state_dict():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            at, kind = (prefix + name).rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            count = sum(key.startswith(at + ".") for key in weights) // 3
            fused = [
                torch.cat([weights[f"{at}.{e}.{part}.weight"] for part in parts])
                for e in range(count)
            ]
            weights[prefix + name] = torch.stack(fused)
    state = {name: weights[prefix + name] for name in module.state_dict()}
    module.load_state_dict(state, strict=True)


def causal(rows: int, first: int, total: int) -> torch.Tensor:
    """Additive mask [1, 1, rows, total]: row i sees columns up to first + i."""
    allowed = torch.arange(total)[None] <= first + torch.arange(rows)[:, None]
    return torch.where(allowed, 0.0, BLOCKED)[None, None]


def tidy(sets: torch.Tensor, first: int, width: int) -> np.ndarray:
    """Index sets [rows, width] ascending, -1 for what lies in a row's future or does not exist."""
    rows = torch.arange(first, first + len(sets))[:, None]
    kept = torch.where(sets > rows, torch.iinfo(torch.int32).max, sets).sort(-1).values
    kept = torch.where(kept > rows, -1, kept).to(torch.int16).numpy()
    return np.pad(kept, ((0, 0), (0, width - kept.shape[1])), constant_values=-1)


class Oracle:
    """transformers' model on one tiny checkpoint, with an MTP layer beside it."""

    def __init__(self, directory: Path):
        self.config = GlmMoeDsaConfig.from_pretrained(directory)
        self.config._attn_implementation = "eager"
        layers, eps = self.config.num_hidden_layers, self.config.rms_norm_eps
        weights = load_file(directory / "model.safetensors")
        self.model = GlmMoeDsaForCausalLM(self.config).float().eval()
        load_weights(self.model, dict(weights), "")
        eps_patched(self.model, eps)
        self.mtp_config = copy.deepcopy(self.config)
        self.mtp_config.num_hidden_layers = layers + 1
        for field, last in (
            ("indexer_types", "full"),
            ("mlp_layer_types", "sparse"),
            ("layer_types", "indexed_attention"),
        ):
            setattr(self.mtp_config, field, [*getattr(self.config, field), last])
        self.prefix = f"model.layers.{layers}."
        self.block = glm.GlmMoeDsaDecoderLayer(self.mtp_config, layers).float().eval()
        load_weights(self.block, dict(weights), self.prefix)
        eps_patched(self.block, eps)
        self.eh = weights[self.prefix + "eh_proj.weight"]
        self.norms = {
            name: self.norm(weights, name) for name in ("enorm", "hnorm", "shared_head.norm")
        }

    def norm(self, weights: dict[str, torch.Tensor], name: str) -> torch.nn.Module:
        """One of the MTP layer's own RMS norms."""
        gain = weights[f"{self.prefix}{name}.weight"]
        module = glm.GlmMoeDsaRMSNorm(len(gain), self.config.rms_norm_eps)
        module.weight.data = gain
        return module

    def run(self, ids: torch.Tensor, cache: DynamicCache | None = None):
        """Logits [S, V] and post-norm hidden [S, H] of rows appended to the cache, if any."""
        out = self.model(
            ids[None], use_cache=cache is not None, cache=cache, output_hidden_states=True
        )
        return out.logits[0], out.hidden_states[-1][0]

    def traced(self, ids: torch.Tensor) -> dict[str, np.ndarray]:
        """The whole prompt at once, with every layer's experts and index sets."""
        experts, sets, hooks = [], [], []
        topk = self.config.index_topk
        for layer in self.model.model.layers:
            if layer.self_attn.indexer is not None:
                hook = layer.self_attn.indexer.register_forward_hook(
                    lambda module, args, out: sets.append(tidy(out[0], 0, topk))
                )
                hooks.append(hook)
            if hasattr(layer.mlp, "gate"):
                hook = layer.mlp.gate.register_forward_hook(
                    lambda module, args, out: experts.append(out[2].sort(-1).values.numpy())
                )
                hooks.append(hook)
        logits, hidden = self.run(ids)
        for hook in hooks:
            hook.remove()
        return {
            "logits": logits.numpy(),
            "hidden": hidden.numpy(),
            "experts": np.stack(experts).astype(np.int16),
            "sets": np.stack(sets),
        }

    def mtp_rows(self, hidden, tokens, first: int, cache, shared=None):
        """MTP rows first..: logits, outputs and index sets. `shared`: (set [1, 1, k], last row it
        may see), for a draft step that reuses an index set and has no indexer of its own."""
        embedded = self.norms["enorm"](self.model.model.embed_tokens(tokens))
        x = torch.cat([embedded, self.norms["hnorm"](hidden)], -1)[None] @ self.eh.T
        positions = torch.arange(first, first + len(tokens))[None]
        previous, last = shared if shared else (None, first)
        attention, indexer = self.block.self_attn, self.block.self_attn.indexer
        attention.indexer = None if shared else indexer
        try:
            y, sets = self.block(
                x,
                attention_mask=causal(len(tokens), last, first + len(tokens)),
                position_ids=positions,
                cache=cache,
                use_cache=True,
                position_embeddings=self.model.model.rotary_emb(x, position_ids=positions),
                prev_topk_indices=previous,
            )
        finally:
            attention.indexer = indexer
        m = self.norms["shared_head.norm"](y[0])
        return self.model.lm_head(m), m, sets

    def draft(self, hidden, tokens, steps: int, share: bool) -> dict[str, np.ndarray]:
        """Absorbs rows 0.. of (hidden, next token) and drafts greedily. Step 0 is the absorb's last
        row; `fed[g]` is the token step g reads."""
        cache = DynamicCache(config=self.mtp_config)
        rows, topk = len(tokens), self.config.index_topk
        logits, m, sets = self.mtp_rows(hidden, tokens, 0, cache)
        held, fed = sets[:, -1:], [int(tokens[-1])]
        every = [(logits[-1], m[-1], tidy(sets[0], 0, topk)[-1])]
        for step in range(1, steps + 1):
            token, row = every[-1][0].argmax()[None], rows - 1 + step
            shared = (held, rows - 1) if share else None
            logits, m, sets = self.mtp_rows(every[-1][1][None], token, row, cache, shared)
            fed.append(int(token))
            every.append((logits[0], m[0], every[0][2] if share else tidy(sets[0], row, topk)[0]))
        return {
            "logits": torch.stack([e[0] for e in every]).numpy(),
            "hidden": torch.stack([e[1] for e in every]).numpy(),
            "sets": np.stack([e[2] for e in every]),
            "fed": np.array(fed, np.int32),
        }


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file as torch tensors."""
    from safetensors.torch import load_file as load

    return load(path)


def close(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Asserts that two ways of computing the same rows agree."""
    worst = float((a - b).abs().max())
    assert worst < AGREE, f"{what}: {worst:.1e}"


def check_caching(oracle: Oracle, ids: torch.Tensor, whole: torch.Tensor) -> None:
    """Token-by-token decoding and a multi-row verify batch give the rows of one whole pass."""
    cache = DynamicCache(config=oracle.config)
    parts = [oracle.run(ids[:25], cache)[0]]
    parts += [oracle.run(ids[i : i + 1], cache)[0] for i in range(25, len(ids))]
    close(torch.cat(parts), whole, "cached decode")
    cache = DynamicCache(config=oracle.config)
    parts = [oracle.run(part, cache)[0] for part in ids.split([25, 6, len(ids) - 31])]
    close(torch.cat(parts), whole, "multi-row verify")


def check_absorb(oracle: Oracle, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
    """Absorbing in two chunks equals absorbing at once."""
    cache = DynamicCache(config=oracle.mtp_config)
    whole, _, _ = oracle.mtp_rows(hidden, tokens, 0, cache)
    cache = DynamicCache(config=oracle.mtp_config)
    first, _, _ = oracle.mtp_rows(hidden[:20], tokens[:20], 0, cache)
    second, _, _ = oracle.mtp_rows(hidden[20:], tokens[20:], 20, cache)
    close(torch.cat([first, second]), whole, "chunked absorb")


def drafts(oracle: Oracle, ids: torch.Tensor, hidden: torch.Tensor, share: bool) -> dict:
    """Draft steps 0..DRAFTS after absorbing each of LENGTHS rows: arrays [lengths, steps, ...]."""
    runs = [oracle.draft(hidden[:n], ids[1 : n + 1], DRAFTS, share) for n in LENGTHS]
    return {f"draft_{key}": np.stack([run[key] for run in runs]) for key in runs[0]}


def acceptances(oracle: Oracle, ids: torch.Tensor, share: bool) -> dict[str, np.ndarray]:
    """After a verify batch of DRAFTS drafts, k accepted for every k: the MTP layer from scratch
    over the tokens committed then, the last of them the target's own choice. [k, steps, ...]"""
    rows = ACCEPT_AT
    _, hidden = oracle.run(ids[:rows])
    first = oracle.draft(hidden, ids[1 : rows + 1], DRAFTS, share)
    proposed = torch.tensor(first["logits"][:DRAFTS].argmax(-1))
    logits, hidden = oracle.run(torch.cat([ids[: rows + 1], proposed]))
    runs = []
    for accepted in range(DRAFTS + 1):
        bonus = logits[rows + accepted].argmax()[None]
        tokens = torch.cat([ids[1 : rows + 1], proposed[:accepted], bonus])
        runs.append(oracle.draft(hidden[: len(tokens)], tokens, AFTER, share))
    result = {f"accept_{key}": np.stack([run[key] for run in runs]) for key in runs[0]}
    return result | {
        "verify_ids": torch.cat([ids[rows : rows + 1], proposed]).numpy().astype(np.int32),
        "verify_logits": logits[rows:].numpy(),
    }


def check_margins(directory: Path, case: str, ids: np.ndarray, result: dict) -> None:
    """Every choice is clear. The float64 reference measures index and router margins over the
    same rows, once its own choices are seen to be the ones transformers made."""
    for key, value in result.items():
        if key.endswith("logits"):
            top = np.sort(value, axis=-1)
            if (top[..., -1] - top[..., -2]).min() < 10 * MARGIN:
                raise Retry(f"{key}: two tokens are nearly equal")
    weights = {k: v.numpy() for k, v in load_file(directory / "model.safetensors").items()}
    config = read_config(directory)
    for config.share in (True, False):
        reference = Reference(config, weights.__getitem__)
        replay(reference, ids, result, "shared" if config.share else "own")
        if reference.margin < MARGIN:
            raise Retry(f"a choice is decided by {reference.margin:.1e}")
    print(f"{case}: smallest margin {reference.margin:.1e}", flush=True)


def replay(reference: Reference, ids: np.ndarray, result: dict, way: str) -> None:
    """The reference through every scenario of the fixture."""
    reference.step_all(ids)
    chosen = [reference.experts[i] for i in sorted(reference.experts)]
    assert np.array_equal(chosen, result["experts"]), "experts differ"
    hidden = reference.hidden
    for at, rows in enumerate(LENGTHS):
        reference.mtp_length = 0
        _, state = reference.mtp_absorb(hidden[:rows], ids[1 : rows + 1])
        for step, token in enumerate(result[f"{way}_draft_fed"][at][1:], 1):
            _, state = reference.mtp_draft(token, step, state)
    reference.rewind(ACCEPT_AT)
    reference.step_all(result[f"{way}_verify_ids"])
    hidden = np.concatenate([hidden[:ACCEPT_AT], reference.hidden])
    for accepted, fed in enumerate(result[f"{way}_accept_fed"]):
        tokens = [*ids[1 : ACCEPT_AT + 1], *result[f"{way}_verify_ids"][1:][:accepted], fed[0]]
        reference.mtp_length = 0
        _, state = reference.mtp_absorb(hidden[: len(tokens)], tokens)
        for step, token in enumerate(fed[1:], 1):
            _, state = reference.mtp_draft(token, step, state)


@torch.no_grad()
def make(case: str, seed: int, directory: Path) -> dict[str, np.ndarray]:
    """Everything one fixture holds, or Retry."""
    config = tiny.CASES[case]
    fingerprint = tiny.write(directory, config, seed)
    oracle = Oracle(directory)
    numbers = tiny.prompt(config, seed, TOKENS)
    ids = torch.tensor(numbers, dtype=torch.int64)
    result = oracle.traced(ids)
    hidden = torch.tensor(result["hidden"])
    for share, way in ((True, "shared"), (False, "own")):
        both = drafts(oracle, ids, hidden, share) | acceptances(oracle, ids, share)
        result |= {f"{way}_{key}": value for key, value in both.items()}
    check_margins(directory, case, numbers, result)
    check_caching(oracle, ids, torch.tensor(result["logits"]))
    check_absorb(oracle, hidden[:-1], ids[1:])
    return result | {
        "seed": np.int64(seed),
        "fingerprint": np.array(fingerprint),
        "ids": numbers,
        "lengths": np.array(LENGTHS),
        "accept_at": np.int64(ACCEPT_AT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TESTS / "fixtures")
    parser.add_argument("cases", nargs="*", default=list(tiny.CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.cases:
        for seed in range(1, 200):
            try:
                with tempfile.TemporaryDirectory() as directory:
                    result = make(case, seed, Path(directory))
            except Retry as why:
                print(f"{case} seed {seed}: {why}", flush=True)
                continue
            path = options.out / f"oracle-{case}.npz"
            np.savez_compressed(path, **result)
            print(f"{path.name}: seed {seed}, {path.stat().st_size} bytes", flush=True)
            break
        else:
            sys.exit(f"{case}: no clear seed found")


if __name__ == "__main__":
    main()

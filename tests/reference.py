"""The whole GLM-MoE-DSA forward in NumPy: the equations, written to be read.

Rows are real numbers (float64) here; how a machine rounds them is `math`'s business: `Float64`
below is plain arithmetic and `lanes.Lanes` the engine's own, bit for bit. Weights come from a
callable `get(name)`: an array for a float matrix, a `Quantised` for a quantised one, so the same
code runs a Hugging Face directory and a colibri container.

Whoever compares quantised results must know that rounding activations to int8 is not continuous.
Where two correct computations straddle a rounding boundary, a code flips by 1/127 of its block and
takes others with it. On the tiny checkpoints float64 and the engine's float32 agree to 1e-6 in most
rows and differ by 2e-2 in the few where a code flipped: a tolerance would have to admit both. So
`Float64` checks float containers, and `Lanes` quantised ones, for equality.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

BLOCK = 64  # inputs that share one activation scale
TINIEST = np.float32(2.0**-100)  # a block no larger than this is quantised to zero


@dataclass(frozen=True, eq=False)
class Quantised:
    """A matrix [O, I] as integer codes [O, I] and scales [O, ceil(I / group)]."""

    codes: np.ndarray
    scales: np.ndarray
    group: int
    even_odd: bool = False  # the engine's int4 takes a block's even inputs first

    def wide(self) -> np.ndarray:
        """The scale of every code, float32 [O, I]."""
        scales = np.repeat(self.scales.astype(np.float32), self.group, axis=1)
        return scales[:, : self.codes.shape[1]]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Dequantised: one float32 product an element."""
        return (self.codes.astype(np.float32) * self.wide()).astype(dtype or np.float32)


Matrix = np.ndarray | Quantised


def rows_of(w: Matrix, first: int, count: int) -> Matrix:
    """Output rows [first, first + count) of a matrix."""
    part = slice(first, first + count)
    return (
        replace(w, codes=w.codes[part], scales=w.scales[part])
        if isinstance(w, Quantised)
        else w[part]
    )


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations [S, I] as int8 codes [S, B, 64] and float32 scales [S, B], zero padded."""
    rows, cols = x.shape
    blocks = -(-cols // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :cols] = x
    padded = padded.reshape(rows, blocks, BLOCK)
    largest = np.abs(padded).max(axis=2)
    live = largest >= TINIEST
    scale = np.where(live, largest / np.float32(127), np.float32(0))
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=live)
    return np.rint(padded * inverse[:, :, None]).astype(np.int8), scale


class Float64:
    """The operations of the forward in float64, quantised activations included."""

    dtype = np.float64

    def linear(self, x: np.ndarray, w: Matrix) -> np.ndarray:
        """y [S, O] = x [S, I] w [O, I], with int8 activations when w is quantised."""
        if isinstance(w, Quantised):
            codes, scale = quantise_rows(x)
            x = (codes * scale[:, :, None].astype(np.float64)).reshape(len(x), -1)
            w = w.codes * w.wide().astype(np.float64)
            x = x[:, : w.shape[1]]
        return x @ np.asarray(w, np.float64).T

    def rms_norm(self, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain

    def layer_norm(self, x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * gain + bias

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return gate * self.sigmoid(gate) * up

    def angles(self, positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [S, R / 2]; the angle itself is one float32 product."""
        angle = positions.astype(np.float32)[:, None] * inv_freq
        return np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))

    def rotate(self, even: np.ndarray, odd: np.ndarray, cos: np.ndarray, sin: np.ndarray):
        return even * cos - odd * sin, odd * cos + even * sin

    def index_scores(self, q: np.ndarray, weight: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Scores [T] of keys [T, D] for one row's queries [M, D] and head weights [M]."""
        return weight @ np.maximum(q @ keys.T, 0)

    def inverse_root(self, n: int) -> float:
        return 1 / np.sqrt(self.dtype(n))

    def attend(self, q_nope, q_rope, k_b, latents, ropes) -> np.ndarray:
        """One row, absorbed: queries [A, N] and [A, R] over keys [T, L] and [T, R], carried into
        the latent space by k_b [A, N, L]. Returns the weighted latents [A, L]."""
        score = np.einsum("an,anl->al", q_nope, k_b) @ latents.T + q_rope @ ropes.T
        score = score * self.inverse_root(q_nope.shape[1] + q_rope.shape[1])
        weight = np.exp(score - score.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True) @ latents

    def mixture(self, weights: np.ndarray, outputs: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Sum of outputs [K, H] times weights [K], plus the shared expert's [H]."""
        return weights @ outputs + shared


def read_config(directory: Path) -> SimpleNamespace:
    """config.json as attributes, with the fields a checkpoint may leave out filled in."""
    c = SimpleNamespace(**json.loads((Path(directory) / "config.json").read_text()))
    layers, dense = c.num_hidden_layers, c.first_k_dense_replace
    c.full = [t == "full" for t in getattr(c, "indexer_types", None) or ["full"] * layers] + [True]
    kinds = getattr(c, "mlp_layer_types", None) or ["dense"] * dense + ["sparse"] * (layers - dense)
    c.sparse = [kind == "sparse" for kind in kinds] + [True]
    c.share = getattr(c, "index_share_for_mtp_iteration", False)
    half = np.arange(0, c.qk_rope_head_dim, 2, dtype=np.float32) / np.float32(c.qk_rope_head_dim)
    powers = c.rope_parameters["rope_theta"] ** half.astype(np.float64)
    c.inv_freq = np.float32(1) / np.float32(powers)
    return c


class Reference:
    """One sequence: caches, the main forward and the MTP layer.

    After a call, `sets[layer]` holds each row's attended positions, `experts[layer]` its experts
    [S, K], and `margin` the smallest distance so far between a choice and the first one not made.
    """

    def __init__(
        self, config: SimpleNamespace, get: Callable[[str], Matrix], math=None, kv_dtype=None
    ):
        self.kv_dtype = kv_dtype  # what the caches are rounded to, if not the arithmetic's own
        self.config, self.get, self.math = config, cache(get), math or Float64()
        self.length = self.mtp_length = 0
        self.kv: dict[int, np.ndarray] = {}  # layer -> [rows, L + R]
        self.keys: dict[int, np.ndarray] = {}  # layer -> [rows, D], full layers only
        self.sets: dict[int, list[np.ndarray]] = {}
        self.experts: dict[int, np.ndarray] = {}
        self.value_rows: dict[str, list[Matrix]] = {}
        self.margin = np.inf
        self.hidden = np.zeros((0, config.hidden_size))

    def vector(self, name: str) -> np.ndarray:
        return np.asarray(self.get(name), self.math.dtype)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.math.rms_norm(x, self.vector(name + ".weight"), self.config.rms_norm_eps)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.math.linear(x, self.get(name + ".weight"))

    def rope(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotates adjacent pairs of the first R numbers of x [S, heads, any]."""
        cos, sin = self.math.angles(positions, self.config.inv_freq)
        even, odd = slice(0, 2 * cos.shape[1], 2), slice(1, 2 * cos.shape[1], 2)
        turned = self.math.rotate(x[:, :, even], x[:, :, odd], cos[:, None], sin[:, None])
        out = x.copy()
        out[:, :, even], out[:, :, odd] = turned
        return out

    def store(self, cache: dict[int, np.ndarray], layer: int, rows: np.ndarray, first: int):
        """Puts rows at positions first.. of a cache, forgetting whatever was there or beyond."""
        if self.kv_dtype:
            rows = rows.astype(self.kv_dtype).astype(rows.dtype)
        old = cache.get(layer, rows[:0])
        cache[layer] = np.concatenate([old[:first], rows])

    def select(self, layer: int, at: str, x, c_q, positions) -> list[np.ndarray]:
        """The DSA indexer: for each row the index_topk earlier positions of largest score."""
        c = self.config
        heads, dim = c.index_n_heads, c.index_head_dim
        q = self.rope(self.linear(c_q, at + "wq_b").reshape(len(x), heads, dim), positions)
        norm = [self.vector(f"{at}k_norm.{part}") for part in ("weight", "bias")]
        k = self.math.layer_norm(self.linear(x, at + "wk"), *norm)
        self.store(self.keys, layer, self.rope(k[:, None], positions)[:, 0], positions[0])
        weight = self.linear(x, at + "weights_proj") * self.math.inverse_root(heads * dim)
        sets = []
        for row, position in enumerate(positions):
            score = self.math.index_scores(q[row], weight[row], self.keys[layer][: position + 1])
            sets.append(np.sort(self.best(score, c.index_topk)))
        return sets

    def best(self, score: np.ndarray, count: int) -> np.ndarray:
        """Indices of the `count` largest scores, the lowest index first among equals."""
        order = np.argsort(-score, kind="stable")
        if 0 < count < len(score) and np.isfinite(score[order[count]]):
            self.margin = min(self.margin, float(score[order[count - 1]] - score[order[count]]))
        return order[:count]

    def attention(self, layer: int, x, positions, sets) -> tuple[np.ndarray, list[np.ndarray]]:
        c, at = self.config, f"model.layers.{layer}.self_attn."
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        lora = c.kv_lora_rank
        c_q = self.norm(self.linear(x, at + "q_a_proj"), at + "q_a_layernorm")
        q = self.linear(c_q, at + "q_b_proj").reshape(len(x), heads, nope + rope)
        q_rope = self.rope(q[:, :, nope:], positions)
        kv = self.linear(x, at + "kv_a_proj_with_mqa")
        latent = self.norm(kv[:, :lora], at + "kv_a_layernorm")
        k_rope = self.rope(kv[:, None, lora:], positions)[:, 0]
        self.store(self.kv, layer, np.concatenate([latent, k_rope], 1), positions[0])
        if sets is None:
            sets = self.select(layer, at + "indexer.", x, c_q, positions)
        kv_b = self.vector(at + "kv_b_proj.weight").reshape(heads, nope + c.v_head_dim, lora)
        mixed = []
        for row, chosen in enumerate(sets):
            latents, ropes = np.split(self.kv[layer][chosen], [lora], axis=1)
            query = q[row, :, :nope], q_rope[row]
            mixed.append(self.math.attend(*query, kv_b[:, :nope], latents, ropes))
        values = zip(np.swapaxes(mixed, 0, 1), self.values(at, heads, nope), strict=True)
        out = [self.math.linear(latent, v_b) for latent, v_b in values]
        return self.linear(np.concatenate(out, 1), at + "o_proj"), sets

    def values(self, at: str, heads: int, nope: int) -> list[Matrix]:
        """The value rows [V, L] of kv_b, head by head."""
        if at not in self.value_rows:
            kv_b, v = self.get(at + "kv_b_proj.weight"), self.config.v_head_dim
            firsts = [head * (nope + v) + nope for head in range(heads)]
            self.value_rows[at] = [rows_of(kv_b, first, v) for first in firsts]
        return self.value_rows[at]

    def mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = self.linear(x, at + "gate_proj"), self.linear(x, at + "up_proj")
        return self.linear(self.math.swiglu(gate, up), at + "down_proj")

    def route(self, x: np.ndarray, at: str) -> tuple[np.ndarray, np.ndarray]:
        """Experts [K] in ascending order and their weights [K] for one row [1, H]."""
        c = self.config
        score = self.math.sigmoid(self.linear(x, at + "gate"))[0]
        choice = score + self.vector(at + "gate.e_score_correction_bias")  # selects, never weighs
        groups = choice.reshape(c.n_group, -1)
        pairs = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = np.full_like(groups, -np.inf)
        best = self.best(pairs, c.topk_group)
        kept[best] = groups[best]
        chosen = np.sort(self.best(kept.ravel(), c.num_experts_per_tok))
        weight = score[chosen]
        if c.norm_topk_prob:
            weight = weight / (sum(weight) + weight.dtype.type(1e-20))
        return chosen, weight * weight.dtype.type(c.routed_scaling_factor)

    def moe(self, layer: int, x: np.ndarray, at: str) -> np.ndarray:
        """Each row alone: its experts in ascending order, then the shared expert."""
        shared, out, experts = self.mlp(x, at + "shared_experts."), np.zeros_like(x), []
        for row in range(len(x)):
            one = x[row : row + 1]
            chosen, weight = self.route(one, at)
            outputs = np.concatenate([self.mlp(one, f"{at}experts.{e}.") for e in chosen])
            out[row] = self.math.mixture(weight, outputs, shared[row])
            experts.append(chosen)
        self.experts[layer] = np.array(experts)
        return out

    def layer(self, layer: int, x: np.ndarray, first: int, sets) -> np.ndarray:
        """One decoder layer for rows first..; sets None: this layer's indexer chooses them."""
        at = f"model.layers.{layer}."
        positions = np.arange(first, first + len(x))
        y, self.sets[layer] = self.attention(
            layer, self.norm(x, at + "input_layernorm"), positions, sets
        )
        x = x + y
        y = self.norm(x, at + "post_attention_layernorm")
        return x + (self.moe(layer, y, at + "mlp.") if self.config.sparse[layer]
                    else self.mlp(y, at + "mlp."))  # fmt: skip

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self.vector("model.embed_tokens.weight")[np.asarray(ids)]

    def step_all(self, ids: np.ndarray) -> np.ndarray:
        """Appends tokens; returns the logits [S, V] of every one and keeps `hidden` [S, H]."""
        x = self.embed(ids)
        for layer in range(self.config.num_hidden_layers):
            sets = None if self.config.full[layer] else self.sets[layer - 1]
            x = self.layer(layer, x, self.length, sets)
        self.length += len(ids)
        self.hidden = self.norm(x, "model.norm")
        return self.linear(self.hidden, "lm_head")

    def rewind(self, length: int) -> None:
        """Forgets tokens beyond `length`, in both caches."""
        self.length, self.mtp_length = length, min(self.mtp_length, length)

    def mtp_rows(self, hidden: np.ndarray, tokens: np.ndarray, first: int, sets) -> np.ndarray:
        layer = self.config.num_hidden_layers
        at = f"model.layers.{layer}."
        halves = self.norm(self.embed(tokens), at + "enorm"), self.norm(hidden, at + "hnorm")
        x = self.linear(np.concatenate(halves, 1), at + "eh_proj")
        return self.norm(self.layer(layer, x, first, sets), at + "shared_head.norm")

    def mtp_absorb(self, hidden: np.ndarray, next_ids: np.ndarray):
        """Appends MTP rows (hidden j, token j + 1); logits [V] and hidden [H] of the last."""
        rows = self.mtp_rows(hidden, next_ids, self.mtp_length, None)
        self.mtp_length += len(rows)
        self.draft_set = self.sets[self.config.num_hidden_layers][-1:]
        return self.linear(rows[-1:], "lm_head")[0], rows[-1]

    def mtp_draft(self, token: int, step: int, hidden: np.ndarray):
        """Draft step g >= 1 after absorb: the last row's index set, or its own when unshared."""
        sets = self.draft_set if self.config.share else None
        row = self.mtp_rows(hidden[None], [token], self.mtp_length - 1 + step, sets)
        return self.linear(row, "lm_head")[0], row[0]

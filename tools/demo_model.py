"""The demo model in PyTorch: GLM-MoE-DSA as the engine computes it, to train on one core.

Parameter names are those of the HF checkpoint, except that the routed experts of a layer are two
stacked tensors (`experts.gate_up` [E, 2I, D], `experts.down` [E, D, I]) until they are exported.
Shapes: B rows, T tokens, D hidden, H heads, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INDEX_NORM_EPS = 1e-6
MTP_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """The fields of config.json that the network needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    max_position_embeddings: int
    rms_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    rope_theta: float

    @staticmethod
    def load(directory: Path) -> Shape:
        """Read `directory`/config.json."""
        raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
        raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
        raw["indexer_types"] = tuple(raw["indexer_types"])
        return Shape(**{name: raw[name] for name in Shape.__dataclass_fields__})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE of x [..., T, R] with cos, sin [T, R/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    s = torch.sigmoid(gate)
    silu = gate * s
    return torch.cat((grad * up * (s + silu * (1 - s)), grad * silu), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention; q, k [B, H, T, d], v [B, H, T, e], additive mask."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
    return scores.softmax(-1) @ v


def causal_mask(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


class RoutedExperts(torch.autograd.Function):
    """Sum of the chosen experts' SwiGLU outputs: rows are sorted by expert, one GEMM per expert."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, choice: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """x [N, D], gates and choice [N, K], gate_up [E, 2I, D], down [E, D, I] -> [N, D]."""
        top = choice.shape[1]
        flat = choice.reshape(-1)
        order = torch.argsort(flat, stable=True)
        ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).tolist()
        rows = x.index_select(0, order // top)
        weight = gates.reshape(-1).index_select(0, order)[:, None]
        inner = torch.empty(len(order), gate_up.shape[1])
        out = torch.empty_like(rows)
        for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(rows[a:b], gate_up[expert].t(), out=inner[a:b])
        active = swiglu(inner)
        for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(active[a:b], down[expert].t(), out=out[a:b])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        ctx.save_for_backward(rows, weight, order, back, inner, active, out, gate_up, down)
        ctx.ends, ctx.top = ends, top
        return (out * weight).index_select(0, back).view(x.shape[0], top, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, order, back, inner, active, out, gate_up, down = ctx.saved_tensors
        top, ends = ctx.top, ctx.ends
        grad_rows = grad.index_select(0, order // top)
        grad_gates = (grad_rows * out).sum(-1)[back].view(-1, top)
        grad_rows = grad_rows * weight
        d_down, d_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        d_active, d_rows = torch.empty_like(active), torch.empty_like(rows)
        for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(grad_rows[a:b], down[expert], out=d_active[a:b])
            torch.mm(grad_rows[a:b].t(), active[a:b], out=d_down[expert])
        d_inner = swiglu_backward(inner, d_active)
        for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(d_inner[a:b], gate_up[expert], out=d_rows[a:b])
            torch.mm(d_inner[a:b].t(), rows[a:b], out=d_gate_up[expert])
        d_x = d_rows.index_select(0, back).view(grad.shape[0], top, -1).sum(1)
        return d_x, grad_gates, None, d_gate_up, d_down


def weight_of(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """A matrix without bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = weight_of(rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Indexer(nn.Module):
    """The DSA indexer of a full layer: which earlier positions a query may read."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.size, self.rope = s.index_n_heads, s.index_head_dim, s.qk_rope_head_dim
        self.wq_b = Linear(self.heads * self.size, s.q_lora_rank)
        self.wk = Linear(self.size, s.hidden_size)
        self.k_norm = nn.LayerNorm(self.size, eps=INDEX_NORM_EPS)
        self.weights_proj = Linear(self.heads, s.hidden_size)

    def _rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        turned = rotate(x[..., : self.rope], *angles)
        return torch.cat((turned, x[..., self.rope :]), -1)

    def forward(self, h: Tensor, latent: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Scores [B, T, T] (not masked) from the layer input h [B, T, D] and the query latent."""
        rows, length, _ = h.shape
        q = self.wq_b(latent).view(rows, length, self.heads, self.size).transpose(1, 2)
        q, k = self._rope(q, angles), self._rope(self.k_norm(self.wk(h)), angles)
        w = self.weights_proj(h).transpose(1, 2) * self.heads**-0.5
        dots = torch.relu(q @ k[:, None].transpose(-1, -2) * self.size**-0.5)
        return (w[..., None] * dots).sum(1)


def select(scores: Tensor, topk: int) -> Tensor:
    """Additive mask [B, 1, T, T] that keeps the `topk` best causal positions of every row."""
    length = scores.shape[-1]
    scores = scores + causal_mask(length)
    if topk >= length:
        return causal_mask(length)
    mask = torch.full_like(scores, float("-inf"))
    mask.scatter_(-1, scores.topk(topk, -1).indices, 0.0)
    return (mask + causal_mask(length))[:, None]


class Attention(nn.Module):
    """Multi-head latent attention in its naive (unabsorbed) form."""

    def __init__(self, s: Shape, full: bool) -> None:
        super().__init__()
        self.s = s
        heads, nope, rope = s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
        self.q_a_proj = Linear(s.q_lora_rank, s.hidden_size)
        self.q_a_layernorm = Norm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = Linear(heads * (nope + rope), s.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(s.kv_lora_rank + rope, s.hidden_size)
        self.kv_a_layernorm = Norm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = Linear(heads * (nope + s.v_head_dim), s.kv_lora_rank)
        self.o_proj = Linear(s.hidden_size, heads * s.v_head_dim)
        self.indexer = Indexer(s) if full else None

    def queries(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """h [B, T, D] -> queries [B, H, T, nope + rope] and the latent [B, T, q_lora]."""
        s, (rows, length, _) = self.s, h.shape
        latent = self.q_a_layernorm(self.q_a_proj(h))
        q = self.q_b_proj(latent).view(rows, length, s.num_attention_heads, -1).transpose(1, 2)
        nope, rope = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        return torch.cat((nope, rotate(rope, *angles)), -1), latent

    def keys(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """h [B, T, D] -> keys [B, H, T, nope + rope] and values [B, H, T, v]."""
        s, (rows, length, _) = self.s, h.shape
        heads, rope = s.num_attention_heads, s.qk_rope_head_dim
        latent, shared = self.kv_a_proj_with_mqa(h).split([s.kv_lora_rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, length, heads, -1)
        nope, v = kv.transpose(1, 2).split([s.qk_nope_head_dim, s.v_head_dim], -1)
        turned = rotate(shared, *angles)[:, None].expand(rows, heads, length, rope)
        return torch.cat((nope, turned), -1), v

    def output(self, heads: Tensor) -> Tensor:
        """[B, H, T, v] -> [B, T, D]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU with one stacked gate and up matrix."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = weight_of(2 * inner, hidden)
        self.down = weight_of(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, self.gate_up)), self.down)


class Moe(nn.Module):
    """Sigmoid router with a correction bias, K of E routed experts, one shared expert."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        experts, inner, hidden = s.n_routed_experts, s.moe_intermediate_size, s.hidden_size
        self.top, self.scale = s.num_experts_per_tok, s.routed_scaling_factor
        self.gate = Linear(experts, hidden)
        self.register_buffer("correction", torch.zeros(experts))
        self.expert_gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.expert_down = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)
        self.shared_experts = Mlp(hidden, inner)
        self.load = torch.zeros(experts)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x))
        choice = (scores.detach() + self.correction).topk(self.top, -1).indices
        gates = scores.gather(-1, choice)
        return gates / (gates.sum(-1, keepdim=True) + 1e-20) * self.scale, choice

    def forward(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        gates, choice = self.route(x)
        self.load += torch.bincount(choice.flatten(), minlength=len(self.load))
        routed = RoutedExperts.apply(x, gates, choice, self.expert_gate_up, self.expert_down)
        return self.shared_experts(h) + routed.view_as(h)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, s: Shape, full: bool, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s, full)
        self.mlp = Moe(s) if sparse else Mlp(s.hidden_size, s.intermediate_size)

    def feed(self, x: Tensor, heads: Tensor) -> Tensor:
        """The second half: add the attention output [B, H, T, v], then the MLP."""
        x = x + self.self_attn.output(heads)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    """The multi-token-prediction layer: joins the next token with the trunk's hidden row."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, full=True, sparse=True)
        self.enorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.hnorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.eh_proj = Linear(s.hidden_size, 2 * s.hidden_size)
        self.head_norm = Norm(s.hidden_size, s.rms_norm_eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))


Watcher = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class DemoModel(nn.Module):
    """Trunk, tied embedding and MTP layer. `topk` None means dense attention everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        self.topk: int | None = None
        self.watch: Watcher | None = None
        self.embed = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.02)
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.layers = nn.ModuleList(
            Layer(s, s.indexer_types[i] == "full", i >= s.first_k_dense_replace)
            for i in range(s.num_hidden_layers)
        )
        self.mtp = MtpLayer(s)
        half = torch.arange(0, s.qk_rope_head_dim, 2).float() / s.qk_rope_head_dim
        angle = torch.outer(
            torch.arange(s.max_position_embeddings + 8).float(), s.rope_theta**-half
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def angles(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos[start : start + length], self.sin[start : start + length]

    def _mask(self, attn: Attention, h: Tensor, latent: Tensor, previous: Tensor) -> Tensor:
        """The additive mask of a layer: its own selection, or the previous full layer's."""
        if self.topk is None or attn.indexer is None:
            return previous
        return select(attn.indexer(h, latent, self.angles(0, h.shape[1])), self.topk)

    def trunk(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> hidden rows after the final norm [B, T, D]."""
        x, mask = F.embedding(ids, self.embed), causal_mask(ids.shape[1])
        angles = self.angles(0, ids.shape[1])
        for number, layer in enumerate(self.layers):
            h = layer.input_layernorm(x)
            q, latent = layer.self_attn.queries(h, angles)
            k, v = layer.self_attn.keys(h, angles)
            mask = self._mask(layer.self_attn, h, latent, mask)
            if self.watch is not None:
                self.watch(number, h, latent, q, k)
            x = layer.feed(x, attend(q, k, v, mask))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed)

    def drafts(self, hidden: Tensor, following: Tensor, steps: int = MTP_STEPS) -> list[Tensor]:
        """Hidden rows of the draft steps, teacher forced.

        hidden [B, T, D] is `trunk`'s result for tokens 0..T-1, following [B, T+steps-1] the tokens
        from 1 on; row j of step g (from 0) predicts token j+g+2. Step 0 is a causal row; later
        steps read step 0's keys under row j's own selection (index and KV sharing) at position j+g.
        """
        length, layer, out = hidden.shape[1], self.mtp, []
        attn, mask, previous = layer.self_attn, causal_mask(hidden.shape[1]), hidden
        for step in range(steps):
            embedded = F.embedding(following[:, step : step + length], self.embed)
            x = layer.join(embedded, previous)
            h = layer.input_layernorm(x)
            q, latent = attn.queries(h, self.angles(step, length))
            if step == 0:
                k, v = attn.keys(h, self.angles(0, length))
                mask = self._mask(attn, h, latent, mask)
            if self.watch is not None:
                self.watch(self.shape.num_hidden_layers + step, h, latent, q, k)
            previous = layer.head_norm(layer.feed(x, attend(q, k, v, mask)))
            out.append(previous)
        return out

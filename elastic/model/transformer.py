"""The built-in language model: a decoder transformer in plain PyTorch that knows nothing of parallelism.

Letters in names of tensors: B rows, T positions, D model size, H heads, K key-value heads, Q head size,
V vocabulary. There are no buffers: what follows from the configuration is computed in the forward pass, so a
model built on the meta device is whole as soon as its parameters are.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from elastic.config_sections import Model
from elastic.model.documents import causal_mask, positions_of
from elastic.model.shape import NO_TARGET, NORM_EPS, head_dim

_INIT_STD = 0.02


class Transformer(nn.Module):
    """tokens: int64 [B, T] -> logits: [B, T, V], in the parameters' precision. T may be below `seq_len`.

    documents: int32 [B, T], the number of each token's document in its row: each is computed as if it were alone, on a
    mask of B * T * T bytes. None: a row is one document.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.config = model
        self.embed = nn.Embedding(model.vocab_size, model.dim)
        self.dropout = nn.Dropout(model.dropout)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.dim, eps=NORM_EPS)
        self.output = None if model.tie_embeddings else _linear(model.dim, model.vocab_size)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.dropout(self.embed(tokens_BT))
        apart = None if documents_BT is None else (positions_of(documents_BT), causal_mask(documents_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD) if apart is None else layer(x_BTD, *apart)
        x_BTD = self.norm(x_BTD)
        # Tied: one owner uses its parameter twice; two modules that share it could be sharded apart.
        return F.linear(x_BTD, self.embed.weight) if self.output is None else self.output(x_BTD)


class Block(nn.Module):
    """x: [B, T, D] -> [B, T, D], pre-norm; dropout on what each half adds to the residual stream.

    positions, mask: see `Attention`.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.dim, eps=NORM_EPS)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.dim, eps=NORM_EPS)
        self.feed_forward = FeedForward(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None, mask_B1TT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), positions_BT, mask_B1TT))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Attention(nn.Module):
    """Causal self-attention with rotary positions; K key-value heads serve H query heads.

    positions: int64 [B, T]; None: 0, 1, 2, ... mask: bool [B, 1, T, T], what each position reads; None: all before it.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = head_dim(model)
        self.rope_theta = model.rope_theta
        kv_dim = model.kv_heads * self.head_dim
        self.query = _linear(model.dim, model.dim)
        self.key = _linear(model.dim, kv_dim)
        self.value = _linear(model.dim, kv_dim)
        self.project = _linear(model.dim, model.dim)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None, mask_B1TT: Tensor | None = None) -> Tensor:
        q_BTHQ = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKQ = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKQ = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTHQ, k_BTKQ = rotate(q_BTHQ, k_BTKQ, theta=self.rope_theta, positions_BT=positions_BT)
        if mask_B1TT is not None:
            # On GPUs only the slow kernel, of H * T * T values, takes both a mask and fewer key-value heads.
            shared = q_BTHQ.shape[2] // k_BTKQ.shape[2]
            k_BTKQ, v_BTKQ = (x.repeat_interleave(shared, dim=2) for x in (k_BTKQ, v_BTKQ))
        out_BHTQ = F.scaled_dot_product_attention(
            q_BTHQ.transpose(1, 2),
            k_BTKQ.transpose(1, 2),
            v_BTKQ.transpose(1, 2),
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=q_BTHQ.shape[2] != k_BTKQ.shape[2],
        )
        return self.project(out_BHTQ.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = _linear(model.dim, model.ffn_dim)
        self.up = _linear(model.dim, model.ffn_dim)
        self.down = _linear(model.ffn_dim, model.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def rotate(*heads: Tensor, theta: float, positions_BT: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rotary position embedding (arXiv 2104.09864) of tensors [B, T, heads, Q]: dimension i pairs with i + Q/2.

    Angles and the rotation are in float32 at least: in bfloat16 positions beyond 256 would share an angle.
    The table costs T * Q sines a call, nothing beside the products around it. positions: int64 [B, T], below T; None:
    0, 1, 2, ... in each row.
    """
    x = heads[0]
    precision = torch.promote_types(x.dtype, torch.float32)
    pairs = x.shape[-1] // 2
    powers = torch.arange(pairs, device=x.device, dtype=precision) / pairs
    positions = torch.arange(x.shape[1], device=x.device, dtype=precision)
    angles = torch.outer(positions, theta**-powers)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    if positions_BT is not None:
        cos, sin = cos[positions_BT], sin[positions_BT]
    rotated = []
    for x in heads:
        a, b = x.to(precision).chunk(2, dim=-1)
        rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype))
    return tuple(rotated)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over targets that are not -100: logits [B, T, V], targets [B, T] -> [].

    A sum, not a mean: the step divides once by the tokens of all ranks.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill each parameter with values that depend on (seed, its name, its global shape), not on the layout.

    As GPT-2: norms one, weights normal with deviation 0.02, the two projections into the residual stream of a
    block divided by sqrt(2 * layers). Drawn in float64 on the CPU, one whole parameter in memory at a time; a
    DTensor keeps its own part. No communication.
    """
    layers = model.config.layers
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
            continue
        residual = name.endswith(("attention.project.weight", "feed_forward.down.weight"))
        std = _INIT_STD / (2 * layers) ** 0.5 if residual else _INIT_STD
        key = hashlib.sha256(f"{seed} {name} {tuple(parameter.shape)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], signed=True))
        whole = torch.empty(parameter.shape, dtype=torch.float64, device="cpu")
        _fill(parameter, whole.normal_(0, std, generator=generator).to(parameter.dtype))


def _fill(parameter: Tensor, whole: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        # src_data_rank=None: each rank cuts from its own copy, nothing is sent.
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.copy_(whole)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)

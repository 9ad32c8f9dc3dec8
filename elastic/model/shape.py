"""Sizes of the built-in transformer from its configuration: parameters, and work per token.

No torch here: the planner and the reports count without building anything.
"""

from __future__ import annotations

from elastic.config_sections import Model

# A target at which nothing is predicted.
NO_TARGET = -100
NORM_EPS = 1e-5

TENSORS_PER_BLOCK = 9  # four of attention, three of the feed-forward, two norms


def head_dim(model: Model) -> int:
    """Size of one attention head."""
    return model.dim // model.heads


def block_parameters(model: Model) -> int:
    """Parameters of one decoder block."""
    kv_dim = model.kv_heads * head_dim(model)
    attention = 2 * model.dim * model.dim + 2 * model.dim * kv_dim
    feed_forward = 3 * model.dim * model.ffn_dim
    norms = 2 * model.dim
    return attention + feed_forward + norms


def parameters(model: Model) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    tables = 1 if model.tie_embeddings else 2
    return tables * model.vocab_size * model.dim + model.layers * block_parameters(model) + model.dim


def tensors(model: Model) -> int:
    """How many parameters, as tensors, the whole model has."""
    return TENSORS_PER_BLOCK * model.layers + (2 if model.tie_embeddings else 3)


def row_values(model: Model) -> int:
    """Values of the longest row (a slice along the first dimension) of any parameter."""
    return max(model.dim, model.ffn_dim)


def tensor_sizes(model: Model) -> dict[str, int]:
    """The numbers that fix every tensor's shape, by name: a checkpoint fits a model that has the same ones."""
    return {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "layers": model.layers,
        "kv_heads * head size": model.kv_heads * head_dim(model),
        "ffn_dim": model.ffn_dim,
        "tie_embeddings": int(model.tie_embeddings),
    }


def flops_per_token(model: Model) -> int:
    """Model FLOPs of forward and backward for one token: 6N + 12*L*H*Q*T (PaLM, arXiv 2204.02311, B).

    N: parameters that multiply, so without the input table, whose use is a look-up (the output table counts,
    tied or not). L layers, H heads, Q head size, T sequence length. Neither the causal mask (it would halve
    the second term) nor recomputation is taken into account, as is the custom for MFU.
    """
    multiplying = parameters(model)
    if not model.tie_embeddings:
        multiplying -= model.vocab_size * model.dim
    return 6 * multiplying + 12 * model.layers * model.heads * head_dim(model) * model.seq_len

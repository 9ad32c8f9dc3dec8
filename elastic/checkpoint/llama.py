"""The built-in model in Hugging Face's words: it is a Llama, under other names.

Both pair dimension i of a head with i + Q/2 in the rotary embedding, so that no row of a projection moves: every tensor
is the same bytes under both names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.checkpoint.blocks import Ints
from elastic.config_sections import Model
from elastic.model.shape import NORM_EPS, head_dim

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_OF_ALL = {"embed.weight": EMBEDDING, "norm.weight": "model.norm.weight", "output.weight": OUTPUT}
_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.project": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def names(model: Model) -> dict[str, str]:
    """Hugging Face's name of each parameter."""
    found = {ours: theirs for ours, theirs in _OF_ALL.items() if theirs != OUTPUT or not model.tie_embeddings}
    for layer in range(model.layers):
        for ours, theirs in _OF_LAYER.items():
            found[f"layers.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return found


def shapes(model: Model) -> dict[str, Ints]:
    """Shape of each parameter, by our names."""
    dim, key_dim = model.dim, model.kv_heads * head_dim(model)
    kinds: dict[str, Ints] = {
        "embed": (model.vocab_size, dim),
        "output": (model.vocab_size, dim),
        "query": (dim, dim),
        "key": (key_dim, dim),
        "value": (key_dim, dim),
        "project": (dim, dim),
        "gate": (model.ffn_dim, dim),
        "up": (model.ffn_dim, dim),
        "down": (dim, model.ffn_dim),
    }
    return {name: kinds.get(name.split(".")[-2], (dim,)) for name in names(model)}


def config(model: Model, *, dtype: str) -> dict[str, Any]:
    """The content of config.json. The tokens that begin and end a text are the corpus's matter: none is named."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": head_dim(model),
        "max_position_embeddings": model.seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def misfits(raw: Mapping[str, Any], model: Model) -> list[str]:
    """One sentence for each setting of a config.json that is another than the job's model."""
    if raw.get("model_type") != "llama":
        return [f"model_type is {raw.get('model_type')!r}, the built-in model is 'llama'; only those can be imported"]
    heads = raw.get("num_attention_heads")
    known: dict[str, tuple[Any, Any, str]] = {
        "vocab_size": (32000, model.vocab_size, "set model.vocab_size"),
        "hidden_size": (4096, model.dim, "set model.dim"),
        "intermediate_size": (11008, model.ffn_dim, "set model.ffn_dim"),
        "num_hidden_layers": (32, model.layers, "set model.layers"),
        "num_attention_heads": (32, model.heads, "set model.heads"),
        "num_key_value_heads": (heads, model.kv_heads, "set model.kv_heads"),
        "head_dim": (head_dim(model), head_dim(model), "the built-in model has no head size of its own"),
        "tie_word_embeddings": (False, model.tie_embeddings, "set model.tie_embeddings"),
        "rms_norm_eps": (1e-6, NORM_EPS, "the built-in model has no other"),
        "hidden_act": ("silu", "silu", "the built-in model has no other"),
        "attention_bias": (False, False, "the built-in model has no biases"),
        "mlp_bias": (False, False, "the built-in model has no biases"),
    }
    found = [
        f"{key} is {got}, the job's model has {wanted}; {remedy}"
        for key, (default, wanted, remedy) in known.items()
        if (got := default if raw.get(key) is None else raw[key]) != wanted
    ]
    return [*found, *_rope_misfits(raw, model)]


def _rope_misfits(raw: Mapping[str, Any], model: Model) -> list[str]:
    """Newer files have all of it in `rope_parameters`."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta, kind = rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), rope.get("rope_type", rope.get("type"))
    found = []
    if theta != model.rope_theta:
        found.append(f"rope_theta is {theta}, the job's model has {model.rope_theta}; set model.rope_theta")
    if kind not in (None, "default"):
        found.append(f"rope_type is {kind!r}, the built-in model's positions are not scaled; it can't be imported")
    return found

"""Which tensor of a Hugging Face checkpoint each parameter is: one table for loading, saving and naming gradients."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import DMS, Policy


class Weight(NamedTuple):
    """One parameter.

    Attributes:
        path: keys from the root {"model": parameters, "policy": parameters of the policy}.
        name: the tensor's name in the checkpoint; ``{l}`` and ``{x}`` stand for layer and expert.
        transpose: the checkpoint stores [out, in], we compute with [in, out].
        layers: of a stacked parameter, which layers its leading axis counts.
        experts: how many experts its second axis counts; 0: there is no such axis.
        rows: (first, total) where the parameter is some rows of a tensor that several share.
    """

    path: tuple[str, ...]
    name: str
    transpose: bool = False
    layers: range | None = None
    experts: int = 0
    rows: tuple[int, int] | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the leading axes that count tensors of the checkpoint."""
        if self.layers is None:
            return ()
        return (len(self.layers), self.experts) if self.experts else (len(self.layers),)

    @property
    def names(self) -> list[str]:
        """All tensor names, in the order of the leading axes."""
        if self.layers is None:
            return [self.name]
        return [self.name.format(l=i, x=x) for i in self.layers for x in range(self.experts or 1)]


IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the configuration."""

_MLP = ("gate", "up", "down")


def _attention(c: ModelConfig) -> Iterator[Weight]:
    """Paths within the layer, names within ``self_attn.``"""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    projections: dict[str, tuple[str, bool, tuple[int, int] | None]]
    if c.latent is not None:
        projections = {"kv_a": ("kv_a_proj_with_mqa", c.attention_bias, None), "kv_b": ("kv_b_proj", False, None)}
        if c.latent.q_rank is None:
            projections["q"] = ("q_proj", False, None)
        else:
            projections |= {"q_a": ("q_a_proj", c.attention_bias, None), "q_b": ("q_b_proj", False, None)}
            yield Weight(("q_a_norm",), "q_a_layernorm.weight")
        yield Weight(("kv_a_norm",), "kv_a_layernorm.weight")
    elif c.fused:
        total = q + 2 * kv
        starts = {"q": 0, "k": q, "v": q + kv}
        projections = {key: ("qkv_proj", c.attention_bias, (start, total)) for key, start in starts.items()}
    else:
        projections = {key: (f"{key}_proj", c.attention_bias, None) for key in "qkv"}
    projections["o"] = ("o_proj", c.output_bias, None)
    for key, (module, biased, rows) in projections.items():
        yield Weight((key, "kernel"), f"{module}.weight", transpose=True, rows=rows)
        if biased:
            yield Weight((key, "bias"), f"{module}.bias", rows=rows)
    if c.qk_norm:
        yield Weight(("q_norm",), "q_norm.weight")
        yield Weight(("k_norm",), "k_norm.weight")


def _mlp(c: ModelConfig, sparse: bool) -> Iterator[Weight]:
    """Paths within the layer, names within ``mlp.``"""
    if c.experts is not None and sparse:
        yield Weight(("router", "kernel"), "gate.weight", transpose=True)
        if c.experts.correction:
            yield Weight(("router", "correction"), "gate.e_score_correction_bias")
        for key in _MLP:
            of_expert = f"experts.{{x}}.{key}_proj.weight"
            yield Weight(("experts", key, "kernel"), of_expert, transpose=True, experts=c.experts.count)
            if c.experts.shared:
                yield Weight(("shared", key, "kernel"), f"shared_experts.{key}_proj.weight", transpose=True)
        return
    for key in _MLP:
        fused = c.fused and key != "down"
        module = "gate_up_proj" if fused else f"{key}_proj"
        rows = (c.intermediate_size * (key == "up"), 2 * c.intermediate_size) if fused else None
        yield Weight((key, "kernel"), f"{module}.weight", transpose=True, rows=rows)
        if c.mlp_bias:
            yield Weight((key, "bias"), f"{module}.bias", rows=rows)


def _layer(c: ModelConfig, sparse: bool) -> Iterator[Weight]:
    """Paths and names within the layer."""
    yield Weight(("attention_norm",), "input_layernorm.weight")
    for weight in _attention(c):
        yield weight._replace(name=f"self_attn.{weight.name}")
    before_mlp = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
    if c.post_norms:
        yield Weight(("post_attention_norm",), "post_attention_layernorm.weight")
        yield Weight(("post_mlp_norm",), "post_feedforward_layernorm.weight")
    yield Weight(("mlp_norm",), f"{before_mlp}.weight")
    for weight in _mlp(c, sparse):
        yield weight._replace(name=f"mlp.{weight.name}")


def table(config: ModelConfig, policy: Policy | None = None) -> list[Weight]:
    """All parameters of a model and of its policy."""
    prefix = "model.layers.{l}."

    def rows() -> Iterator[Weight]:
        yield Weight(("model", "embed"), "model.embed_tokens.weight")
        for stack, layers in config.stacks.items():
            for weight in _layer(config, sparse=stack == "layers"):
                yield weight._replace(path=("model", stack, *weight.path), name=prefix + weight.name, layers=layers)
        if isinstance(policy, DMS) and policy.variant == "adapter":
            alpha, every = f"{prefix}self_attn.dms_proj_alpha", range(config.layers)
            yield Weight(("policy", "norm"), f"{alpha}_norm.weight", layers=every)
            yield Weight(("policy", "proj"), f"{alpha}.weight", transpose=True, layers=every)
            if config.attention_bias:
                yield Weight(("policy", "bias"), f"{alpha}.bias", layers=every)
        yield Weight(("model", "norm"), "model.norm.weight")
        if not config.tie_embeddings:
            yield Weight(("model", "head"), "lm_head.weight", transpose=True)

    return list(rows())


def get(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf at a path."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Sets the leaf at a path, making the dictionaries on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def tensors(weights: list[Weight]) -> dict[str, list[tuple[Weight, tuple[int, ...]]]]:
    """What each tensor of the checkpoint is made of: parameters, and where in their leading axes; rows in order.

    Raises:
        ValueError: the table gives two parameters one tensor.
    """
    found: dict[str, list[tuple[Weight, tuple[int, ...]]]] = {}
    for weight in weights:
        for name, at in zip(weight.names, np.ndindex(weight.lead), strict=True):
            found.setdefault(name, []).append((weight, at))
    for name, parts in found.items():
        if len(parts) > 1:
            starts = [weight.rows[0] if weight.rows else 0 for weight, _ in parts]
            if len(set(starts)) < len(parts):
                raise ValueError(f"two parameters are stored as {name}")
            parts.sort(key=lambda part: part[0].rows or (0, 0))
    return found


def by_name(weights: list[Weight], tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` under their checkpoint names and in the checkpoint's orientation (arrays stay on device).

    Tensors of which a part is not in the tree are left out, so a tree of trainable parameters or gradients can be
    partial.

    Raises:
        ValueError: the table gives two parameters one tensor.
    """
    found: dict[str, Any] = {}
    for name, parts in tensors(weights).items():
        try:
            leaves = [(get(tree, weight.path)[at], weight.transpose) for weight, at in parts]
        except KeyError:
            continue
        stored = [value.T if transpose else value for value, transpose in leaves]
        found[name] = stored[0] if len(stored) == 1 else jnp.concatenate(stored)
    return found

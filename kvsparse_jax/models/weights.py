"""Which tensor of a Hugging Face checkpoint each parameter is: one table for loading, saving and naming gradients."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import DMS, Policy


class Weight(NamedTuple):
    """One parameter.

    Attributes:
        path: keys from the root {"model": parameters, "policy": parameters of the policy}.
        name: the tensor's name in the checkpoint; ``{l}`` stands for the layer of a stacked parameter.
        transpose: the checkpoint stores [out, in], we compute with [in, out].
    """

    path: tuple[str, ...]
    name: str
    transpose: bool = False

    @property
    def stacked(self) -> bool:
        """Has a leading layer axis here and one tensor per layer in the checkpoint."""
        return "{l}" in self.name

    def names(self, layers: int) -> list[str]:
        """All tensor names, in layer order."""
        return [self.name.format(l=i) for i in range(layers)] if self.stacked else [self.name]


IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the configuration."""

_PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def table(config: ModelConfig, policy: Policy | None = None) -> list[Weight]:
    """All parameters of a model and of its policy, in the order of the forward pass."""
    biased = {
        **dict.fromkeys("qkv", config.attention_bias),
        "o": config.output_bias,
        **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
    }

    def rows() -> Iterator[Weight]:
        yield Weight(("model", "embed"), "model.embed_tokens.weight")
        layer = "model.layers.{l}."
        yield Weight(("model", "layers", "attention_norm"), layer + "input_layernorm.weight")
        for key, module in _PROJECTIONS.items():
            yield Weight(("model", "layers", key, "kernel"), f"{layer}{module}.weight", transpose=True)
            if biased[key]:
                yield Weight(("model", "layers", key, "bias"), f"{layer}{module}.bias")
        if config.qk_norm:
            yield Weight(("model", "layers", "q_norm"), layer + "self_attn.q_norm.weight")
            yield Weight(("model", "layers", "k_norm"), layer + "self_attn.k_norm.weight")
        yield Weight(("model", "layers", "mlp_norm"), layer + "post_attention_layernorm.weight")
        if isinstance(policy, DMS) and policy.variant == "adapter":
            alpha = layer + "self_attn.dms_proj_alpha"
            yield Weight(("policy", "norm"), alpha + "_norm.weight")
            yield Weight(("policy", "proj"), alpha + ".weight", transpose=True)
            if config.attention_bias:
                yield Weight(("policy", "bias"), alpha + ".bias")
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


def by_name(weights: list[Weight], tree: Any, layers: int) -> dict[str, Any]:
    """The leaves of ``tree`` under their checkpoint names and in the checkpoint's orientation (arrays stay on device).

    Rows whose path is not in the tree are left out, so a tree of trainable parameters or gradients can be partial.

    Raises:
        ValueError: the table gives two parameters one tensor name.
    """
    found: dict[str, Any] = {}
    for weight in weights:
        try:
            leaf = get(tree, weight.path)
        except KeyError:
            continue
        for i, name in enumerate(weight.names(layers)):
            if name in found:
                raise ValueError(f"two parameters are stored as {name}")
            value = leaf[i] if weight.stacked else leaf
            found[name] = value.T if weight.transpose else value
    return found

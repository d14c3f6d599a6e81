"""Low-rank updates of the projections (LoRA, arXiv 2106.09685), to be trained beside the adapters.

An update is ``(x @ lora_a) @ lora_b``, which :func:`kvsparse_jax.models.decoder.dense` adds where it finds the two.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvsparse_jax.models.decoder import Params

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


def init(
    params: Params, key: Array, *, rank: int, alpha: float, targets: Sequence[str] = ("q", "k", "v", "o")
) -> Params:
    """Updates that are zero before training.

    Args:
        params: the model's.
        key: for ``lora_a``.
        rank: r.
        alpha: the update is multiplied by ``alpha / rank``. The factor is folded into ``lora_a``: at the start, when
            ``lora_b`` is zero, Adam's steps then move the update exactly as with the factor outside.
        targets: names of projections, of :data:`TARGETS`.

    Returns:
        {"layers": {name: {"lora_a": [L, in, r], "lora_b": [L, r, out]}}}, float32: normal with variance 1 / in (times
        the factor) and zeros.
    """
    layers: dict[str, Any] = {}
    for index, name in enumerate(targets):
        depth, width, out = params["layers"][name]["kernel"].shape
        a = jax.random.normal(jax.random.fold_in(key, index), (depth, width, rank), jnp.float32)
        layers[name] = {
            "lora_a": a * jnp.float32(alpha / rank / math.sqrt(width)),
            "lora_b": jnp.zeros((depth, rank, out), jnp.float32),
        }
    return {"layers": layers}


def merge(params: Params, update: Params) -> Params:
    """The model with the updates added to its kernels, in the dtype of the kernels; nothing else changes."""
    layers = dict(params["layers"])
    for name, pair in update["layers"].items():
        kernel = layers[name]["kernel"]
        product = jnp.einsum("lir,lro->lio", pair["lora_a"], pair["lora_b"], precision="highest")
        layers[name] = {**layers[name], "kernel": (kernel.astype(jnp.float32) + product).astype(kernel.dtype)}
    return {**params, "layers": layers}

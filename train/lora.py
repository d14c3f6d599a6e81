"""Low-rank updates of the projections (LoRA, arXiv 2106.09685), to be trained beside the adapters.

An update is ``(x @ lora_a) @ lora_b``, which :func:`kvsparse_jax.models.parts.dense` adds where it finds the two.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.parts import Params

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_LATENT = {"q": ("q_a", "q_b"), "k": ("kv_a",)}


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

    Projections of these names that a model does not have are left out: the experts of a mixture stay as they are, and
    of latent attention "q" and "k" are the projections down to the latents and the queries' up from theirs.

    Returns:
        {stack: {name: {"lora_a": [L, in, r], "lora_b": [L, r, out]}}} for each stack of layers, float32: normal with
        variance 1 / in (times the factor) and zeros.

    Raises:
        InputError: the model has none of the projections.
    """
    update: Params = {}
    names = [name for target in targets for name in (target, *_LATENT.get(target, ()))]
    for stack in _stacks(params):
        layers: dict[str, Any] = {}
        for index, name in enumerate(names):
            if name not in params[stack]:
                continue
            depth, width, out = params[stack][name]["kernel"].shape
            of_stack = key if stack == "layers" else jax.random.fold_in(key, len(names))
            a = jax.random.normal(jax.random.fold_in(of_stack, index), (depth, width, rank), jnp.float32)
            layers[name] = {
                "lora_a": a * jnp.float32(alpha / rank / math.sqrt(width)),
                "lora_b": jnp.zeros((depth, rank, out), jnp.float32),
            }
        if layers:
            update[stack] = layers
    if not update:
        raise InputError(f"the model has none of the projections {', '.join(targets)} that can be updated")
    return update


def merge(params: Params, update: Params) -> Params:
    """The model with the updates added to its kernels, in the dtype of the kernels; nothing else changes."""
    merged = dict(params)
    for stack, pairs in update.items():
        merged[stack] = dict(params[stack])
        for name, pair in pairs.items():
            kernel = params[stack][name]["kernel"]
            product = jnp.einsum("lir,lro->lio", pair["lora_a"], pair["lora_b"], precision="highest")
            new = (kernel.astype(jnp.float32) + product).astype(kernel.dtype)
            merged[stack][name] = {**params[stack][name], "kernel": new}
    return merged


def _stacks(params: Params) -> list[str]:
    return [name for name in ("first_layers", "layers") if name in params]

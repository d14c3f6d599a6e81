"""The budget with which a baseline holds as much memory as the policy that it is compared with."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from kernels.visibility import expires, visible
from kvsparse_jax.models.config import evicting
from kvsparse_jax.policies.streaming import SINKS, StreamingLLM


@functools.partial(jax.jit, static_argnames=("length", "local_windows", "sinks"))
def _streaming_live(window: Array, *, length: int, local_windows: tuple[int | None, ...], sinks: int) -> Array:
    """Entries that sinks and a window hold after `length` tokens, mean over layers."""
    positions = jnp.arange(length, dtype=jnp.int32)
    evict, last = positions >= sinks, jnp.int32(length - 1)
    acts = evicting(local_windows)
    kinds = [(w, layer in acts) for layer, w in enumerate(local_windows)]
    counts = {
        (w, act): visible(last, positions, expires(positions, evict & act, window, w)).sum() for w, act in set(kinds)
    }
    return jnp.stack([counts[kind] for kind in kinds]).mean()


def equal_memory_budget(live: float, length: int, local_windows: Sequence[int | None], sinks: int = SINKS) -> int:
    """Budget with which StreamingLLM holds as near to `live` entries per head as a whole number of tokens allows.

    Args:
        live: entries per head to match, mean over layers.
        length: tokens seen.
        local_windows: the model's own sliding windows, per layer; they drop keys too.
        sinks: first tokens that are never evicted.

    Returns:
        At least ``sinks + 1``, at most ``length`` (or ``sinks + 1`` where that is more).
    """

    @functools.cache
    def held(budget: int) -> float:
        window = jnp.int32(StreamingLLM(budget=budget, sinks=sinks).window)
        return float(_streaming_live(window, length=length, local_windows=tuple(local_windows), sinks=sinks))

    low, high = sinks + 1, max(length, sinks + 1)
    while low < high:  # the smallest budget that holds as much or more
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= live else (middle + 1, high)
    if low > sinks + 1 and live - held(low - 1) < held(low) - live:
        return low - 1
    return low

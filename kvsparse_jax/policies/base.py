"""What every eviction policy is: who sets ``evict``, and how late it takes effect."""

from typing import Any, NamedTuple

from jax import Array


class LayerInput(NamedTuple):
    """What a policy may look at when it decides, for one layer and a run of T tokens.

    Attributes:
        residual: [B, T, E], the residual stream before the layer's input norm.
        normed: [B, T, E], the attention's input (after the input norm).
        q: [B, T, Hq, D], queries after the family's own q norm, before the rotation.
        positions: [B, T] int32.
        kv_heads: H.
        rms_eps: epsilon of the model's norms.
    """

    residual: Array
    normed: Array
    q: Array
    positions: Array
    kv_heads: int
    rms_eps: float


class Policy:
    """Base of all policies that decide when a token arrives.

    A policy is a frozen dataclass registered as a pytree: arrays are data, settings are static.

    Attributes:
        window: delay of the eviction in tokens: a flagged key is visible to this many queries after its own.
        shift: token ``k + shift`` decides about key ``k``; 0 or 1.
        params: learned arrays, a pytree of [L, ...] that the decoder scans together with its layers, or None.
    """

    window: int
    shift: int
    params: Any

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """Decision logits [B, H, T] as emitted by each token (positive: evict), or None to keep everything.

        Args:
            params: this layer's slice of ``params``.
            layer: what can be looked at.
        """
        raise NotImplementedError

"""Dynamic Memory Sparsification (arXiv 2506.05345): a learned decision per token and KV head, executed with a delay."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels.numerics import accumulator
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.base import LayerInput, Policy


@dataclass(frozen=True)
class DMS(Policy):
    """Eviction where the decision logit is positive, ``window`` tokens later.

    ``logit = scale * z - offset``. In the adapter variant ``z`` is a linear map of the RMS-normed residual stream (own
    norm); in the neuron variant it is the last channel of the first query head of each group (section 3.1; the channel
    index follows the released code), which takes no part in attention (``ModelConfig.borrowed_channel``).

    Attributes:
        params: adapter: {"norm": [L, E], "proj": [L, E, H], "bias": [L, H] if the model has attention biases}, float32;
            neuron: None.
        window: delay in tokens (256 in the paper, 512 in the released checkpoints).
        shift: 1: token k + 1 decides about key k (released code); 0: token k does (paper).
        scale: factor on z.
        offset: what is subtracted; the larger, the less is evicted before training.
        tau: temperature of the relaxed decisions in training.
        variant: "adapter" or "neuron".
        per: "head", or "layer": KV head 0 decides for all.
        enabled: False evicts nothing.
        target_cr: compression ratio it was trained for, as recorded; None if unknown.
    """

    params: Any
    window: int = 512
    shift: int = 1
    scale: float = 100.0
    offset: float = 5.0
    tau: float = 0.1
    variant: Literal["adapter", "neuron"] = "adapter"
    per: Literal["head", "layer"] = "head"
    enabled: bool = True
    target_cr: float | None = None

    def __post_init__(self) -> None:
        choices = (("variant", self.variant, ("adapter", "neuron")), ("per", self.per, ("head", "layer")))
        for name, value, accepted in choices:
            if value not in accepted:
                raise InputError(f"DMS {name} must be one of {', '.join(accepted)}, not {value!r}")
        if self.shift not in (0, 1):
            raise InputError(f"DMS shift must be 0 or 1, not {self.shift}")
        whole("DMS window", self.window, 0)
        if not self.tau > 0:
            raise InputError(f"DMS tau must be positive, not {self.tau}")

    def check(self, config: ModelConfig) -> None:
        """Latent attention has no query channel to borrow: what it shares is the key."""
        if self.variant == "neuron" and config.latent is not None:
            raise InputError("DMS variant 'neuron' does not work on latent attention (accepted: 'adapter')")

    @classmethod
    def init(cls, config: ModelConfig, **settings: Any) -> "DMS":
        """A DMS policy before training: adapters with zero weights (norms 1), so that every logit is ``-offset``.

        Args:
            config: the model it is for.
            **settings: any attribute but ``params``.
        """
        policy = cls(None, **settings)
        if policy.variant == "neuron":
            return policy
        layers, hidden, heads = config.layers, config.hidden_size, config.kv_heads
        params = {"norm": jnp.ones((layers, hidden)), "proj": jnp.zeros((layers, hidden, heads))}
        if config.attention_bias:
            params["bias"] = jnp.zeros((layers, heads))
        return dataclasses.replace(policy, params=params)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DMS | None":
        """Settings from the ``dms_*`` keys of a released config.json (no arrays yet); None where it has none."""
        if not any(key.startswith("dms_") for key in config):
            return None

        def value(key: str, default: Any) -> Any:
            return default if config.get(key) is None else config[key]

        def number[N: (int, float)](kind: type[N], key: str, default: N) -> N:
            given = value(key, default)
            plain = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
            if not plain or given != kind(given):
                raise InputError(
                    f"config.json: {key} must be {'a whole' if kind is int else 'a'} number, not {given!r}"
                )
            return kind(given)

        return cls(
            None,
            window=number(int, "dms_window_size", cls.window),
            shift=number(int, "dms_shift", 1),
            scale=number(float, "dms_alpha_scale", cls.scale),
            offset=number(float, "dms_initial_alpha_offset", cls.offset),
            tau=number(float, "dms_tau", cls.tau),
            variant="adapter" if value("dms_separate_alpha", False) else "neuron",
            per=value("dms_alpha_per", "head"),
            enabled=not value("dms_disable_eviction", False),
            target_cr=config.get("dms_cr"),
        )

    def to_config(self) -> dict[str, Any]:
        """The released keys; ``dms_shift`` is ours and written only where it differs from the released rule."""
        keys: dict[str, Any] = {
            "dms_alpha_scale": self.scale,
            "dms_initial_alpha_offset": self.offset,
            "dms_window_size": self.window,
            "dms_tau": self.tau,
            "dms_separate_alpha": self.variant == "adapter",
            "dms_alpha_per": self.per,
            "dms_disable_eviction": not self.enabled,
        }
        if self.target_cr is not None:
            keys["dms_cr"] = self.target_cr
        if self.shift != 1:
            keys["dms_shift"] = self.shift
        return keys

    def abstract_params(self, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Any:
        """Shapes of ``params`` for this model."""
        init = jax.eval_shape(lambda: DMS.init(config, variant=self.variant).params)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), init)

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """Decision logits [B, H, T] in float32; None when eviction is disabled."""
        if not self.enabled:
            return None
        acc = accumulator(layer.residual.dtype)
        if self.variant == "adapter":
            x = layer.residual.astype(acc)
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.asarray(layer.rms_eps, acc))
            x = x * params["norm"].astype(acc)[None, None]
            z = x @ params["proj"].astype(acc)
            if "bias" in params:
                z = z + params["bias"].astype(acc)[None, None]
        else:
            z = layer.q[:, :, :: layer.q.shape[2] // layer.kv_heads, -1].astype(acc)
        z = z.swapaxes(1, 2)
        if self.per == "layer":
            z = jnp.broadcast_to(z[:, :1], z.shape)
        return jnp.asarray(self.scale, acc) * z - jnp.asarray(self.offset, acc)

    def relax(self, logits: Array, noise: Array) -> Array:
        """Training form of the decisions: ``(logits + noise) / tau`` [..., H, T]; its sigmoid is the relaxed decision.

        Args:
            logits: [..., H, T], see :meth:`gate`.
            noise: same shape, a difference of two Gumbel variables; where KV head 0 decides for all, its noise counts.
        """
        if self.per == "layer":
            noise = jnp.broadcast_to(noise[..., :1, :], noise.shape)
        return (logits + noise.astype(logits.dtype)) * jnp.asarray(1.0 / self.tau, logits.dtype)


jax.tree_util.register_dataclass(
    DMS, data_fields=["params"], meta_fields=[f.name for f in dataclasses.fields(DMS) if f.name != "params"]
)

"""KVzap (arXiv 2601.07891): a small surrogate predicts how much a key will matter, and a threshold decides."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from safetensors.numpy import save_file

from kernels.numerics import accumulator
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.models.config import ModelConfig, read_json
from kvsparse_jax.policies.base import LayerInput, Policy, Prefill

WINDOW = 128
"""Tokens that are never evicted behind the newest one (section 3.3; windows of 128 and 512 are as good)."""


@dataclass(frozen=True)
class KVzap(Policy):
    """Evicts a key whose predicted score is below the threshold, ``window`` tokens later.

    The score is the natural logarithm of the KVzip+ oracle's (section 3.1, :mod:`kvsparse_jax.oracle`), predicted from
    the attention's input of the token itself by one linear map or two-layer MLP per layer (section 3.2).

    The released code prefills densely and evicts when the prompt is over: ``prefill="dense"``. With "rule", the
    default, one rule holds everywhere, and the cache is small while it prefills, too.

    Attributes:
        params: float32: {"out": {"kernel": [L, D, H], "bias": [L, H]}}, and for an MLP D is the width F of
            {"hidden": {"kernel": [L, D, F], "bias": [L, F]}}, which comes first.
        threshold: keys with a lower score are evicted (published: -6 to -3 for Qwen3, -9 to -6 for Llama-3.1).
        window: delay in tokens.
        sinks: first tokens that are never evicted; 0 in the released code, where 4 are much better on small models.
        prefill: "rule" or "dense".
        while_decoding: False: only the prompt is compressed, the first thing that enters a session; its last ``window``
            tokens and all that comes after it stay (the released code's default).
        prompt: [B] int32, tokens of the prompts, noted by :meth:`prepare`.

    Example::

        lm = kvs.load("Qwen/Qwen3-8B", policy=kvs.KVzap.load("nvidia/KVzap-mlp-Qwen3-8B", threshold=-4.0))
    """

    params: Any
    threshold: float | Array = -4.0
    window: int = WINDOW
    sinks: int = 0
    prefill: Prefill = "rule"
    while_decoding: bool = True
    prompt: Any = None

    shift = 0

    def __post_init__(self) -> None:
        whole("KVzap window", self.window, 0)
        whole("KVzap sinks", self.sinks, 0)
        if self.prefill not in ("rule", "dense"):
            raise InputError(f"KVzap prefill must be rule or dense, not {self.prefill!r}")
        if isinstance(self.threshold, int | float) and math.isnan(self.threshold):
            raise InputError("KVzap threshold must be a number, not nan")

    @classmethod
    def load(cls, name: str | os.PathLike[str], threshold: float = -4.0, **settings: Any) -> "KVzap":
        """A surrogate in the published format.

        Args:
            name: a directory with config.json and model.safetensors, such as ``train.kvzap`` writes, or a hub name
                (``nvidia/KVzap-mlp-Qwen3-8B``).
            threshold: see the class.
            **settings: any other attribute but ``params``.

        Raises:
            InputError: nothing there, or not a surrogate.
        """
        from kvsparse_jax import checkpoint, hub  # they import the policies

        directory = hub.resolve(name)
        config = read_json(directory / "config.json")
        if config.get("model_type") != "kvzap":
            raise InputError(f"{directory} is no KVzap surrogate: its model_type is {config.get('model_type')!r}")
        sizes = {}
        for key in ("n_modules", "input_dim", "output_dim", "hidden_dim"):
            value = config.get(key)
            if value is None and key == "hidden_dim":
                continue
            sizes[key] = whole(f"{directory / 'config.json'}: {key}", value, 1)
        layers, features, heads = sizes["n_modules"], sizes["input_dim"], sizes["output_dim"]
        width = sizes.get("hidden_dim")
        parts = {"out": ("", features, heads)}
        if width is not None:
            parts = {"hidden": (".0", features, width), "out": (".2", width, heads)}
        tensors = checkpoint.Tensors(directory)
        wanted = {f"layers.{n}{at}.{kind}" for at, _, _ in parts.values() for n in range(layers) for kind in _KINDS}
        if wrong := sorted(set(tensors) ^ wanted):
            state = "is missing" if wrong[0] in wanted else "is not part of a KVzap surrogate"
            raise InputError(f"{directory}: tensor {wrong[0]} {state} ({len(wrong)} in all)")

        def stacked(name: str, shape: tuple[int, ...]) -> np.ndarray:
            names = [f"layers.{n}{name}" for n in range(layers)]
            for one in names:
                if tensors.shape(one) != shape:
                    raise InputError(
                        f"{directory}: tensor {one} has shape {tensors.shape(one)}, config.json asks for {shape}"
                    )
                tensors.dtype(one)
            return np.stack([np.asarray(tensors[one]).astype(np.float32) for one in names])

        params = {
            part: {
                "kernel": jnp.asarray(stacked(f"{at}.weight", (after, before)).swapaxes(1, 2)),
                "bias": jnp.asarray(stacked(f"{at}.bias", (after,))),
            }
            for part, (at, before, after) in parts.items()
        }
        return cls(params, threshold, **settings)

    def save(self, directory: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the surrogate in the published format, whole or not at all; threshold and window are not part of it.

        Raises:
            InputError: the directory holds something else.
        """
        target = pathlib.Path(directory)
        if target.exists() and any(target.iterdir()):
            old = target / "config.json"
            if not old.exists() or read_json(old).get("model_type") != "kvzap":
                raise InputError(f"{target} exists and holds something other than a KVzap surrogate")
        config = {
            "architectures": ["KVzapModel"],
            "dtype": "float32",
            "hidden_dim": None if "hidden" not in self.params else int(self.params["hidden"]["kernel"].shape[2]),
            "input_dim": self.features,
            "model_type": "kvzap",
            "n_modules": self.layers,
            "output_dim": int(self.params["out"]["bias"].shape[1]),
        }
        tensors = {}
        for part, at in (("hidden", ".0"), ("out", ".2" if "hidden" in self.params else "")):
            for n in range(self.layers if part in self.params else 0):
                kernel, bias = (np.asarray(self.params[part][key][n], np.float32) for key in ("kernel", "bias"))
                tensors[f"layers.{n}{at}.weight"] = np.ascontiguousarray(kernel.T)
                tensors[f"layers.{n}{at}.bias"] = np.ascontiguousarray(bias)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return target

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        """Where decoding evicts nothing it has to know where the prompt ends."""
        return not self.while_decoding

    def prepare(self, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> "KVzap":
        """Notes how long the prompts are."""
        before = [0] * len(rows) if self.prompt is None else np.asarray(self.prompt).tolist()
        lengths = [len(ids) or old for ids, old in zip(rows, before, strict=True)]
        return dataclasses.replace(self, prompt=jnp.asarray(lengths, jnp.int32))

    def of_rows(self, rows: Sequence[int]) -> "KVzap":
        """With the prompts of these rows."""
        if self.prompt is None:
            return self
        return dataclasses.replace(self, prompt=self.prompt[jnp.asarray(rows, jnp.int32)])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.params["out"]["bias"].shape[0])

    @property
    def features(self) -> int:
        """D, width of the hidden states it reads."""
        return int(self.params["hidden" if "hidden" in self.params else "out"]["kernel"].shape[1])

    def check(self, config: ModelConfig) -> None:
        """Raises InputError when the surrogate was made for a model of another shape."""
        own = (self.layers, self.features, int(self.params["out"]["bias"].shape[1]))
        model = (config.layers, config.hidden_size, config.kv_heads)
        if own != model:
            raise InputError(
                f"the KVzap surrogate is for {own[0]} layers of width {own[1]} with {own[2]} KV heads, the model has "
                f"{model[0]} layers of width {model[1]} with {model[2]} KV heads"
            )

    def scores(self, x: ArrayLike) -> Array:
        """Predicted log scores [..., L, H] from attention inputs x [..., L, D]."""
        x = jnp.asarray(x)
        if x.ndim < 2 or x.shape[-2:] != (self.layers, self.features):
            raise InputError(f"x must be [..., {self.layers}, {self.features}], not {list(x.shape)}")
        by_layer = jnp.moveaxis(x, -2, 0).reshape(self.layers, -1, self.features)
        found = jax.vmap(predict)(self.params, by_layer)
        return jnp.moveaxis(found, 0, 1).reshape(*x.shape[:-1], -1)

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """``threshold - score`` [B, H, T]: positive where the score is below the threshold."""
        score = predict(params, layer.normed).swapaxes(1, 2)
        gate = jnp.asarray(self.threshold, score.dtype) - score
        stays = layer.positions < self.sinks
        if self.prompt is not None:
            stays = stays | (layer.positions >= self.prompt[:, None] - self.window)
        return jnp.where(stays[:, None], jnp.asarray(-1, score.dtype), gate)


_KINDS = ("weight", "bias")


def _linear(p: Any, x: Array) -> Array:
    acc = accumulator(x.dtype)
    y = jnp.matmul(x, p["kernel"].astype(x.dtype), preferred_element_type=acc)
    return y + p["bias"].astype(acc).reshape((1,) * (x.ndim - 1) + (-1,))


def predict(params: Any, x: Array, alter: Callable[[Array], Array] | None = None) -> Array:
    """Scores [..., H] of one layer's attention inputs x [..., D]; sums in float32.

    Args:
        params: of the layer.
        x: in the dtype of the products.
        alter: applied to an MLP's hidden units [..., F] (dropout, in training).
    """
    if "hidden" in params:
        hidden = jax.nn.gelu(_linear(params["hidden"], x), approximate=False)
        x = (hidden if alter is None else alter(hidden)).astype(x.dtype)
    return _linear(params["out"], x)


jax.tree_util.register_dataclass(
    KVzap,
    data_fields=["params", "threshold", "prompt"],
    meta_fields=[f.name for f in dataclasses.fields(KVzap) if f.name not in ("params", "threshold", "prompt")],
)

"""Shape of a model, read from a Hugging Face config.json."""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.rope import Rope


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values out of one latent.

    Attributes:
        q_rank: width of the queries' latent; None: queries are projected at once.
        rank: width of the latent that is cached.
        nope: channels of a head's query and key that are not rotated.
        rope: rotated channels, shared by all heads in the key.
        value: channels of a head's value.
        interleaved: rotated channels are stored as pairs, not by halves.
    """

    q_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of the MLP.

    Attributes:
        count: routed experts (X).
        per_token: how many of them a token goes to.
        width: intermediate size of a routed expert.
        scoring: "softmax" over the experts, or "sigmoid" of each.
        correction: a learned bias on the scores takes part in the choice, not in the weights.
        normalise: the weights of the chosen ones sum to 1.
        factor: multiplies the weights.
        groups, groups_kept: experts are chosen from the best ``groups_kept`` of ``groups`` equal groups.
        group_score: a group's score is its best expert's ("max"), or the sum of its two best ("two").
        shared: intermediate size of the expert that every token goes to; 0: there is none.
        first: so many first layers have a plain MLP.
    """

    count: int
    per_token: int
    width: int
    scoring: Literal["softmax", "sigmoid"]
    correction: bool
    normalise: bool
    factor: float
    groups: int
    groups_kept: int
    group_score: Literal["max", "two"]
    shared: int
    first: int


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know of a model; hashable, so that it can be a static argument of jitted functions.

    Attributes:
        model_type: the Hugging Face name of the family.
        vocab_size, hidden_size, intermediate_size: as in config.json.
        layers: number of decoder layers (L).
        heads: query heads (Hq).
        kv_heads: key/value heads (H); query head h reads KV head h // (Hq // H). With latent attention 1: its cache
            has one entry for all heads.
        head_dim: channels of a cached key (D); with latent attention the latent's and the rotated ones.
        max_positions: context length in tokens.
        rms_eps: epsilon of the RMS norms.
        rope: rotary embedding.
        local_rope: that of the layers with a sliding window; None: the same.
        activation: name of the gate activation of the MLP.
        tie_embeddings: the output head is the embedding matrix.
        attention_bias: biases on q, k and v.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases in the MLP.
        qk_norm: RMS norm of each head's q and k before the rotation.
        query_scale: factor on <q, k>; None: head_dim ** -0.5.
        embed_scale: factor on the embeddings.
        unit_offset: norms multiply by 1 + weight, in float32.
        post_norms: RMS norms on what attention and MLP give, too.
        fused: q, k and v are stored as one tensor, gate and up as another.
        latent, experts: see the classes; None: plain attention, plain MLP.
        local_windows: per layer, the sliding window in tokens, or None for full attention.
        borrowed_channel: the weights were trained without the last channel of the first query head of each group, so it
            takes no part in attention, whatever the policy (the neuron variant of DMS reads its decisions from it).
        bos_token_id: None where the model has none.
        eos_token_ids: every id that ends a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    local_rope: Rope | None
    activation: str
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    query_scale: float | None
    embed_scale: float
    unit_offset: bool
    post_norms: bool
    fused: bool
    latent: Latent | None
    experts: Experts | None
    local_windows: tuple[int | None, ...]
    borrowed_channel: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Query heads that share a KV head (G)."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on <q, k>."""
        return float(self.head_dim**-0.5) if self.query_scale is None else self.query_scale

    @property
    def evicting(self) -> tuple[int, ...]:
        """Layers in which a policy may evict, see :func:`evicting`."""
        return evicting(self.local_windows)

    def needs_full_attention(self, what: str) -> None:
        """InputError where every layer has a sliding window, so that no key is there for ``what`` to choose among."""
        if None not in self.local_windows:
            raise InputError(
                f"{what} does not work on models in which every layer has a sliding window: it chooses among all tokens"
            )

    @property
    def stacks(self) -> dict[str, range]:
        """Layers that are stacked together because they hold the same tensors, in order, by the stack's name."""
        first = 0 if self.experts is None else self.experts.first
        parts = {"first_layers": range(first), "layers": range(first, self.layers)}
        return {name: layers for name, layers in parts.items() if layers}


def evicting(local_windows: Sequence[int | None]) -> tuple[int, ...]:
    """Layers in which a policy may evict: those with full attention, or all where every layer has a sliding window.

    A layer with a sliding window forgets by itself; beside layers with full attention it costs next to nothing.

    Args:
        local_windows: per layer, the model's own sliding window or None.
    """
    full = tuple(layer for layer, window in enumerate(local_windows) if window is None)
    return full or tuple(range(len(local_windows)))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; InputError names the file when it is missing or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} holds no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object")
    return found


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or None, as a tuple."""
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list | tuple) else (int(value),)

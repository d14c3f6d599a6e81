"""The language model object that notebooks and commands hold: weights, policy and tokenizer behind a few methods."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from kernels.visibility import PADDING
from kvsparse_jax import checkpoint, generation, hub
from kvsparse_jax.engine import Engine, EngineOptions
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig, read_json
from kvsparse_jax.policies import DMS, Dense, Policy
from kvsparse_jax.sampling import PerRow
from kvsparse_jax.tokenizer import Tokenizer
from kvsparse_jax.whole import full_logits


@dataclass(frozen=True)
class LM:
    """A decoder with its eviction policy.

    A policy that reads its decisions from a query channel (DMS's neuron variant) takes that channel out of attention:
    the model's config then says so, and no later policy gives it back. So a model has one full cache: the one that
    ``with_policy(Dense())`` shows.

    Attributes:
        config: shape of the model.
        params: its parameters, see :class:`kvsparse_jax.models.decoder.Decoder`.
        policy: decides what the KV cache keeps.
        tokenizer: None if the directory has none.
        hf_config: the config.json it was loaded from.
        source: the directory it was loaded from, None for a model made in memory.
        mesh: devices the parameters are placed on, None for the first device.
    """

    config: ModelConfig
    params: decoder.Params
    policy: Policy = dataclasses.field(default_factory=Dense)
    tokenizer: Tokenizer | None = None
    hf_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: pathlib.Path | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self.policy.check(self.config)
        if isinstance(self.policy, DMS) and self.policy.variant == "neuron" and not self.config.borrowed_channel:
            object.__setattr__(self, "config", dataclasses.replace(self.config, borrowed_channel=True))

    @property
    def _model(self) -> generation.Model:
        return generation.Model(self.params, self.policy, self.config, self.mesh)

    def with_policy(self, policy: Policy) -> "LM":
        """The same model (weights shared) under another policy."""
        return dataclasses.replace(self, policy=policy)

    def logits(self, input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
        """Next-token logits of whole sequences, with the policy's hard rule applied.

        Args:
            input_ids: [B, T] integers.
            attention_mask: [B, T], 0 at padding (left or right); padding is not attended to and does not count as a
                position.

        Returns:
            [B, T, V] float32, undefined at padding.

        Raises:
            InputError: wrong shape, ids out of range or more tokens than the model's context.
        """
        ids, segments = self.check(input_ids, attention_mask)
        return full_logits(self.params, self.config, self.policy, ids, segments)

    def check(self, input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> tuple[Array, Array]:
        """Validated input ids [B, T] int32 and segment ids [B, T] (0, PADDING at padding)."""
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"input_ids must be integers [B, T], not {ids.dtype} {list(ids.shape)}")
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        if mask.shape != ids.shape:
            raise InputError(f"attention_mask {list(mask.shape)} does not fit input_ids {list(ids.shape)}")
        if (np.abs(np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8))).sum(1) > 2).any():
            raise InputError("attention_mask has padding between the tokens of a row")
        vocab = self.config.vocab_size
        bad = ids[mask & ((ids < 0) | (ids >= vocab))]
        if bad.size:
            raise InputError(f"token id {bad[0]} is out of range (accepted: 0 to {vocab - 1})")
        longest = int(mask.sum(1).max())
        if longest > self.config.max_positions:
            raise InputError(f"{longest} tokens are more than the model's context of {self.config.max_positions}")
        # Padding may hold any id; a valid one keeps the gather in range.
        ids = np.where(mask, ids, 0).astype(np.int32)
        return jnp.asarray(ids), jnp.asarray(np.where(mask, 0, PADDING).astype(np.int32))

    def generate(
        self,
        prompts: Sequence[generation.Prompt],
        max_new_tokens: int | Sequence[int] = 256,
        temperature: PerRow = 0.6,
        top_p: PerRow = 0.95,
        top_k: int | Sequence[int] = 20,
        seed: int | Sequence[int] = 0,
        eos: bool = True,
        prefill_chunk: int | None = None,
        **options: Any,
    ) -> generation.GenerateOutput:
        """Continues prompts (raw text or token ids) of any lengths on the compressed cache.

        See :func:`kvsparse_jax.generation.generate`, also for ``options``; ``chat=True`` uses the chat template.
        """
        options |= dict(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, eos=eos)
        return generation.generate(
            self._model, self.tokenizer, prompts, max_new_tokens, prefill_chunk=prefill_chunk, **options
        )

    def session(self, batch: int = 1, **options: Any) -> generation.Session:
        """Opens a session of many turns on the compressed cache; see :class:`kvsparse_jax.generation.Session`."""
        return generation.Session(self._model, self.tokenizer, batch, **options)

    def engine(self, options: EngineOptions | None = None) -> Engine:
        """Makes a serving engine of the model.

        Raises:
            InputError: a policy or a pool that cannot be served.
        """
        return Engine(self._model, self.tokenizer, options)

    def replay(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        prefill: int | None = None,
        prefill_chunk: int | None = None,
        **options: Any,
    ) -> generation.Replay:
        """Feeds given tokens through the real cache; see :func:`kvsparse_jax.generation.replay`."""
        ids, segments = self.check(input_ids, attention_mask)
        lm = self.prepared(ids, segments, prefill)
        return generation.replay(lm._model, ids, segments, prefill, prefill_chunk, **options)

    def prepared(self, ids: Array, segment_ids: Array, prefill: int | None = None) -> "LM":
        """This model, its policy prepared for rows of token ids [B, T], of which ``prefill`` columns are a prompt."""
        if not self.policy.prepares:
            return self
        columns, real = np.asarray(ids)[:, :prefill], np.asarray(segment_ids)[:, :prefill] > PADDING
        rows = [row[keep].tolist() for row, keep in zip(columns, real, strict=True)]
        return self.with_policy(self.policy.prepare(self._model, self.tokenizer, rows))

    def save(self, directory: str | os.PathLike[str], like: pathlib.Path | None = None) -> pathlib.Path:
        """Writes a Hugging Face directory that :func:`load` opens again; see :func:`kvsparse_jax.checkpoint.save`."""
        target = pathlib.Path(directory)
        checkpoint.save(
            target, self.config, self.params, self.policy, hf_config=self.hf_config, source=self.source, like=like
        )
        return target


def load(
    name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    policy: Policy | None = None,
    mesh: Mesh | None = None,
) -> LM:
    """Loads a model with its tokenizer and the policy it was trained with.

    Args:
        name: local Hugging Face directory (a retrofit's output is one), hub name, "smollm2-135m", or
            "smollm2-135m-dms-8x": the same with DMS trained into it at CR 8 (docs/results.md).
        dtype: of the weights on the device; None keeps the stored one.
        policy: replaces the checkpoint's own.
        mesh: see :func:`kvsparse_jax.models.sharding.make_mesh`; None is one device.

    Raises:
        InputError: what cannot be found or does not fit, in one line.
    """
    directory = hub.resolve(name)
    config, params, trained = checkpoint.load(directory, dtype, mesh)
    return LM(
        config=config,
        params=params,
        policy=trained if policy is None else policy,
        tokenizer=Tokenizer.load(directory),
        hf_config=read_json(directory / "config.json"),
        source=directory,
        mesh=mesh,
    )

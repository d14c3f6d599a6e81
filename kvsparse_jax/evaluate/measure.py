"""The measurements: distance from the full cache token by token, and what the cache keeps by the visibility rule."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels.visibility import NEVER, PADDING, decisions_by_key, expires, visible
from kvsparse_jax.errors import RunError
from kvsparse_jax.evaluate.results import Curve, Estimate, Memory, OfKind, Quality, Result, Role
from kvsparse_jax.evaluate.sequences import Sequences
from kvsparse_jax.lm import LM
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import evicting
from kvsparse_jax.policies import Policy
from kvsparse_jax.policies.spec import describe
from kvsparse_jax.whole import full_hidden, positions_of

BINS = 32
"""Most bins of the curves over positions."""

_CHUNK_ENTRIES = 2**23  # float32 logits of a chunk of tokens: 32 MB


@functools.partial(jax.jit, static_argnames="chunk")
def compare(
    dense_params: decoder.Params, params: decoder.Params, dense: Array, hidden: Array, targets: Array, chunk: int
) -> tuple[Array, Array, Array]:
    """Per token: KL(dense || compressed), KL(compressed || dense) and the loss; a chunk of tokens at a time.

    Args:
        dense_params, params: for the output heads.
        dense, hidden: [B, T, E], final hidden states with the full and with the compressed cache.
        targets: [B, T] int32.
        chunk: tokens per row of which logits exist at once.

    Returns:
        Three arrays [B, T], float32.
    """

    def one(x: Array, y: Array, at: Array) -> tuple[Array, ...]:
        d, c = decoder.logits(dense_params, x), decoder.logits(params, y)
        d, c = d - d.max(-1, keepdims=True), c - c.max(-1, keepdims=True)
        # One pass over the vocabulary; differences first, so that close distributions keep their digits.
        weight_d, weight_c, difference = jnp.exp(d), jnp.exp(c), d - c
        log_d, log_c = jnp.log(weight_d.sum(-1)), jnp.log(weight_c.sum(-1))
        kl = (weight_d * difference).sum(-1) / weight_d.sum(-1) - (log_d - log_c)
        reverse = (log_d - log_c) - (weight_c * difference).sum(-1) / weight_c.sum(-1)
        return kl, reverse, log_c - jnp.take_along_axis(c, at[..., None], -1)[..., 0]

    kl, reverse, found = _in_chunks(one, chunk, dense, hidden, targets)
    return kl, reverse, found


@functools.partial(jax.jit, static_argnames="chunk")
def loss(params: decoder.Params, hidden: Array, targets: Array, chunk: int) -> Array:
    """Loss [B, T] float32 of predicting targets [B, T] from hidden [B, T, E]; a chunk of tokens at a time."""

    def one(x: Array, at: Array) -> tuple[Array, ...]:
        logits = decoder.logits(params, x)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, at[..., None], -1)[..., 0],)

    return _in_chunks(one, chunk, hidden, targets)[0]


def _in_chunks(function: Callable[..., tuple[Array, ...]], chunk: int, *arrays: Array) -> tuple[Array, ...]:
    """Results [B, T] of a function of [B, chunk, ...] pieces of arrays [B, T, ...]."""
    batch, length = arrays[0].shape[:2]
    pad = -length % chunk
    padded = [jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]

    def step(_: None, i: Array) -> tuple[None, tuple[Array, ...]]:
        return None, function(*(lax.dynamic_slice_in_dim(x, i * jnp.int32(chunk), chunk, 1) for x in padded))

    _, found = lax.scan(step, None, jnp.arange((length + pad) // chunk, dtype=jnp.int32))
    return tuple(x.swapaxes(0, 1).reshape(batch, length + pad)[:, :length] for x in found)


@jax.jit
def likeliest(params: decoder.Params, hidden: Array, columns: Array) -> Array:
    """The likeliest next token [B, A] after each of the columns [B, A] of hidden [B, T, E]."""
    picked = jnp.take_along_axis(hidden, columns[..., None], 1)
    return jnp.argmax(decoder.logits(params, picked), -1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("layers", "kv_heads", "local_windows", "shift", "bins"))
def memory(
    gates: Array | None,
    segment_ids: Array,
    *,
    layers: int,
    kv_heads: int,
    local_windows: tuple[int | None, ...],
    window: Array,
    shift: int,
    bins: int,
) -> tuple[Array, Array, Array, Array]:
    """What decisions keep, by the visibility rule.

    Args:
        gates: [L, B, H, T], decision logits as emitted; None: nothing is evicted.
        segment_ids: [B, T], 0 or PADDING.
        layers, kv_heads: L and H.
        local_windows: the model's own sliding windows, per layer.
        window, shift: of the policy; the window is an int32 scalar, so that policies share a compilation.
        bins: points in time at which entries are counted, S; evenly spread over the columns, the last at the last one.

    Returns:
        Flagged keys [B, L, H] and entries live at the last token [B, L, H], int32; entries live after the last column
        of each bin, mean over layers and heads [B, S], and share of the heads that do not flag the key [B, T] (in
        layers in which a policy may evict), float32.
    """
    batch, length = segment_ids.shape
    positions = positions_of(segment_ids)
    real = (segment_ids > PADDING)[None, :, None]
    if gates is None:
        evict = jnp.zeros((layers, batch, kv_heads, length), bool)
    else:
        evict = jax.vmap(lambda gate: decisions_by_key(gate > 0, shift, False, segment_ids))(gates) & real
    local = None
    if any(w is not None for w in local_windows):
        local = jnp.asarray([NEVER if w is None else w for w in local_windows], jnp.int32)[:, None, None, None]
    of_key = positions[None, :, None]
    last_seen = expires(of_key, evict, window, local)

    def live_at(query: Array) -> Array:
        """[L, B, H] for a query position [B]."""
        return (visible(query[None, :, None, None], of_key, last_seen) & real).sum(-1, dtype=jnp.int32)

    last = positions.max(1)
    ends = jnp.asarray(_bin_ends(length, bins), jnp.int32)
    # Counted in columns, so that a bin means the same tokens in the curve of every row.
    queries = jnp.take_along_axis(positions, jnp.broadcast_to(ends[None], (batch, len(ends))), 1)
    over_time = lax.map(lambda query: live_at(query).mean((0, 2)), queries.T)
    flagged = evict.sum(-1, dtype=jnp.int32).swapaxes(0, 1)
    return (
        flagged,
        live_at(last).swapaxes(0, 1),
        over_time.T,
        1.0 - evict[jnp.asarray(evicting(local_windows))].mean((0, 2)),
    )


def _bin_ends(length: int, bins: int) -> np.ndarray:
    """Last column of each of up to `bins` bins of nearly equal width."""
    bins = min(bins, length)
    return (np.arange(1, bins + 1) * length) // bins - 1


@dataclass(frozen=True)
class Kept:
    """:func:`memory` of all rows: flagged and live [N, L, H], curve [N, S], unflagged [N, T], seen [N].

    ``evicting`` are the layers in which a policy may evict: decision ratios are over these.
    """

    flagged: np.ndarray
    live: np.ndarray
    curve: np.ndarray
    unflagged: np.ndarray
    seen: np.ndarray
    evicting: tuple[int, ...]

    @property
    def nominal(self) -> np.ndarray:
        """[N, L, H], share of the keys that are not flagged."""
        return 1.0 - self.flagged / self.seen[:, None, None]

    @property
    def unflagged_share(self) -> np.ndarray:
        """[N], share of the keys that are not flagged, in the layers in which a policy may evict."""
        return self.nominal[:, list(self.evicting)].mean((1, 2))

    @property
    def entries(self) -> np.ndarray:
        """[N, L, H], share of the tokens seen that are live at the end."""
        return self.live / self.seen[:, None, None]

    def summary(self, rows: np.ndarray) -> Memory:
        nominal, entries = self.unflagged_share[rows], self.entries[rows].mean((1, 2))

        def inverse(mean: float) -> float:
            return 1.0 / mean if mean > 0 else math.inf

        return Memory(
            nominal_kept=Estimate.of(nominal),
            nominal_cr=inverse(float(nominal.mean())),
            entries_kept=Estimate.of(entries),
            entries_cr=inverse(float(entries.mean())),
            live_per_head=float(self.live[rows].mean()),
            seen=float(self.seen[rows].mean()),
        )


@dataclass(frozen=True)
class Rows:
    """Rows in batches of one size, so that a length compiles once.

    Attributes:
        ids: [N, T].
        real: [N, T] bool.
        size: rows of a batch.
    """

    ids: np.ndarray
    real: np.ndarray
    size: int

    def filled(self, index: slice) -> np.ndarray:
        """Indices of the `size` rows that the batch of these rows computes: it is filled up with the last row."""
        return np.minimum(np.arange(index.start, index.start + self.size), len(self.ids) - 1)

    def batch(self, index: slice) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask [size, T] of a batch."""
        rows = self.filled(index)
        return self.ids[rows], self.real[rows]

    def run(self, lm: LM, use: Callable[[slice, Array], None]) -> Kept:
        """Runs the model over all rows; `use` gets each batch's rows and hidden states [size, T, E]."""
        config, parts = lm.config, []
        for start in range(0, len(self.ids), self.size):
            index = slice(start, min(start + self.size, len(self.ids)))
            ids, segments = lm.check(*self.batch(index))
            hidden, gates = full_hidden(lm.params, config, lm.policy, ids, segments)
            kept = memory(
                gates,
                segments,
                layers=config.layers,
                kv_heads=config.kv_heads,
                local_windows=config.local_windows,
                window=jnp.int32(lm.policy.window),
                shift=lm.policy.shift,
                bins=BINS,
            )
            use(index, hidden)
            parts.append([np.asarray(x)[: index.stop - start] for x in kept])
        flagged, live, curve, unflagged = (np.concatenate(x) for x in zip(*parts, strict=True))
        return Kept(flagged, live, curve, unflagged, self.real.sum(1), config.evicting)


def chunk_of(batch: int, vocab: int) -> int:
    """Tokens per row and chunk, a power of two."""
    return max(8, 1 << max(_CHUNK_ENTRIES // (batch * vocab), 1).bit_length() - 1)


def _row_means(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[N] means over the tokens that count; values [N, T] may hold anything elsewhere."""
    return np.where(weight, values, 0.0).sum(1) / weight.sum(1)


@dataclass(frozen=True)
class Tokens:
    """Per token [N, T], float64: KL in both directions, and the losses with the full cache and with the method."""

    kl: np.ndarray
    reverse: np.ndarray
    loss_dense: np.ndarray
    loss: np.ndarray

    def summary(self, rows: np.ndarray, real: np.ndarray) -> Quality:
        """Over some of the rows."""
        real = real[rows]
        column = np.cumsum(real, 1) - 1
        second = real & (column >= real.sum(1, keepdims=True) // 2)
        # The last token of a row predicts nothing that is known.
        known = real & (column < real.sum(1, keepdims=True) - 1)
        dense, loss = (_row_means(x[rows], known) for x in (self.loss_dense, self.loss))
        for what, values in (("the full cache", dense), ("the policy", loss)):
            if not (np.isfinite(values) & (np.abs(values) < 700)).all():
                raise RunError(f"the model's loss with {what} is not finite: its weights are not to be trusted")
        change = Estimate.of(loss - dense)
        ratio = math.exp(change.mean)
        return Quality(
            kl=Estimate.of(_row_means(self.kl[rows], real)),
            kl_second_half=Estimate.of(_row_means(self.kl[rows], second)),
            reverse_kl=Estimate.of(_row_means(self.reverse[rows], real)),
            reverse_kl_second_half=Estimate.of(_row_means(self.reverse[rows], second)),
            perplexity_dense=math.exp(dense.mean()),
            perplexity=math.exp(loss.mean()),
            perplexity_change_percent=Estimate(
                100 * (ratio - 1), None if change.stderr is None else 100 * ratio * change.stderr
            ),
        )


def result(name: str, role: Role, policy: Policy, sequences: Sequences, tokens: Tokens, kept: Kept) -> Result:
    """Everything about one method on sequences of one length."""
    real = sequences.real
    every = np.ones(len(real), bool)
    kinds = np.asarray(sequences.kinds)
    length = real.shape[1]
    ends = _bin_ends(length, BINS)
    curve: list[list[float]] = [[], [], []]
    for i, (start, end) in enumerate(zip(np.concatenate([[0], ends[:-1] + 1]), ends, strict=True)):
        here = real[:, start : end + 1]
        at_end = real[:, end]
        for values, into in ((tokens.kl, curve[0]), (kept.unflagged, curve[1])):
            into.append(float(values[:, start : end + 1][here].mean()) if here.any() else math.nan)
        curve[2].append(float(kept.curve[at_end, i].mean()) if at_end.any() else math.nan)
    return Result(
        method=name,
        role=role,
        policy=describe(policy),
        context=length,
        sequences=len(real),
        quality=tokens.summary(every, real),
        memory=kept.summary(every),
        nominal_kept_by_head=kept.nominal.mean(0).tolist(),
        entries_kept_by_head=kept.entries.mean(0).tolist(),
        by_kind={
            kind: OfKind(int((kinds == kind).sum()), tokens.summary(kinds == kind, real), kept.summary(kinds == kind))
            for kind in dict.fromkeys(sequences.kinds)
        },
        curve=Curve(ends.tolist(), *curve),
    )

"""What a sequence holds under a policy, in entries, pages and bytes, by the rules and arrays of the cache itself."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvsparse_jax.cache import paged
from kvsparse_jax.cache.base import bucket
from kvsparse_jax.cache.quantise import Quantisation
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import DMS, H2O, TOVA, Dense, Knorm, KVzap, Policy, Random, SnapKV, StreamingLLM
from kvsparse_jax.policies.kvzap import WINDOW as KVZAP_WINDOW

_TAIL = 6.0
"""Standard deviations beyond which a count never lies."""


class Kind(NamedTuple):
    """How a policy's name is planned for.

    Attributes:
        make: (model, budget in entries per head, window) -> the policy, its parameters as shapes only.
        window: default delay in tokens, for policies that decide about each token on arrival; None: it has a budget.
        prompt_only: only prompts are compressed; what is generated stays.
    """

    make: Callable[[ModelConfig, int, int], Policy]
    window: int | None = None
    prompt_only: bool = False


def _dms(config: ModelConfig, budget: int, window: int) -> Policy:
    return DMS(DMS(None).abstract_params(config), window=window)


def _kvzap(config: ModelConfig, budget: int, window: int) -> Policy:
    """The MLP surrogate (arXiv 2601.07891, section 3.2): hidden width an eighth of the model's."""
    layers, hidden, heads = config.layers, config.hidden_size, config.kv_heads
    width = max(hidden // 8, 1)

    def part(before: int, after: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {"kernel": (layers, before, after), "bias": (layers, after)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    return KVzap({"hidden": part(hidden, width), "out": part(width, heads)}, window=window)


KINDS: dict[str, Kind] = {
    "dense": Kind(lambda config, budget, window: Dense()),
    "dms": Kind(_dms, window=DMS.window),
    "kvzap": Kind(_kvzap, window=KVZAP_WINDOW),
    "streaming": Kind(lambda config, budget, window: StreamingLLM(budget)),
    "h2o": Kind(lambda config, budget, window: H2O(budget)),
    "tova": Kind(lambda config, budget, window: TOVA(budget)),
    "knorm": Kind(lambda config, budget, window: Knorm(budget)),
    "random": Kind(lambda config, budget, window: Random(budget)),
    "snapkv": Kind(lambda config, budget, window: SnapKV(budget, window=window), window=64, prompt_only=True),
}
"""Policies that can be planned for."""


@dataclass(frozen=True)
class Compression:
    """What a sequence keeps.

    Attributes:
        policy: a name of :data:`KINDS`.
        cr: nominal compression ratio, in the layers in which a policy may evict. Policies that decide on arrival flag
            1 - 1 / cr of the tokens, and the newest ``window + 1`` stay besides; those with a budget keep 1 / cr of the
            context (SnapKV: of the prompt).
        window: delay in tokens (SnapKV: queries that count, which stay); None: the policy's default.
        kept: share of the tokens that each head of each layer keeps, [L][H], in place of 1 / cr in all of them.
    """

    policy: str = "dms"
    cr: float = 8.0
    window: int | None = None
    kept: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.policy not in KINDS:
            raise InputError(f"unknown policy {self.policy!r}; there are {', '.join(KINDS)}")
        if not (math.isfinite(self.cr) and self.cr >= 1):
            raise InputError(f"the compression ratio must be at least 1, not {self.cr!r}")
        if self.window is not None:
            if KINDS[self.policy].window is None:
                raise InputError(f"the policy {self.policy} has no window")
            whole("window", self.window, 0)
        if self.kept is not None:
            if not self.on_arrival:
                raise InputError(f"the policy {self.policy} has no shares by head: it is dense or has a budget")
            shares = [share for layer in self.kept for share in layer]
            if not shares or len({len(layer) for layer in self.kept}) != 1:
                raise InputError("the kept shares must be a table of layers and KV heads, [L][H]")
            if not all(0 <= share <= 1 for share in shares) or sum(shares) == 0:
                raise InputError("the kept shares must be fractions from 0 to 1, not all of them 0")

    @property
    def on_arrival(self) -> bool:
        """It decides about each token when it arrives, and heads differ in what they keep."""
        kind = KINDS[self.policy]
        return kind.window is not None and not kind.prompt_only

    @property
    def delay(self) -> int:
        """The window in tokens; 0 where there is none."""
        return (KINDS[self.policy].window or 0) if self.window is None else self.window

    @property
    def nominal_cr(self) -> float:
        """1 / mean kept share; 1 for a dense cache."""
        if self.policy == "dense":
            return 1.0
        return self.cr if self.kept is None else 1 / float(np.mean(self.kept))

    def budget(self, context: int) -> int:
        """Entries per head of a policy with a budget, for ``context`` tokens (SnapKV: of the prompt)."""
        return max(round(context / self.cr), 1)

    def made(self, config: ModelConfig, context: int, prompt: int) -> Policy:
        """The policy, with shapes in place of learned arrays.

        Raises:
            InputError: the context is too short for the policy's budget at this ratio.
        """
        kind = KINDS[self.policy]
        return kind.make(config, self.budget(prompt if kind.prompt_only else context), self.delay)

    def entries(self, config: ModelConfig, context: int, prompt: int, seen: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries that each head holds once ``seen`` tokens are there: mean and standard deviation, both [L, H].

        A token's fate is taken as independent of the others': then the count of those that stay beyond the window is
        binomial. ``context`` and ``prompt`` are what a budget is a share of.

        Raises:
            InputError: kept shares that do not fit the model.
        """
        shape = (config.layers, config.kv_heads)
        local = config.local_windows or (None,) * config.layers
        # A layer's own sliding window drops what is older, whatever the policy says; beside layers with full attention
        # the policy has no say there.
        acts = np.isin(np.arange(config.layers), config.evicting)[:, None]
        reach = np.asarray([seen if w is None else min(seen, w) for w in local], float)[:, None]
        if self.on_arrival:
            share = np.full(shape, 1 / self.cr) if self.kept is None else np.asarray(self.kept, float)
            if share.shape != shape:
                raise InputError(f"kept shares of {share.shape[0]} layers and {share.shape[1]} KV heads do not fit a "
                                 f"model of {shape[0]} and {shape[1]}")  # fmt: skip
            share = np.where(acts, share, 1.0)
            newest = np.minimum(reach, self.delay + 1)
            rest = reach - newest
            return newest + share * rest, np.sqrt(share * (1 - share) * rest)
        most = math.inf
        if KINDS[self.policy].prompt_only:
            most = min(self.budget(prompt), seen) + max(seen - prompt, 0)
        elif self.policy != "dense":
            most = self.budget(context)
        count = np.where(acts, np.minimum(reach, most), reach)
        return np.broadcast_to(count, shape).copy(), np.zeros(shape)


def expected_pages(mean: np.ndarray, deviation: np.ndarray, page: int) -> float:
    """Expected sum of ceil(count / page) over heads whose counts are normal (whole numbers) with these moments."""
    total = 0.0
    pairs, often = np.unique(np.stack([mean.ravel(), deviation.ravel()], 1), axis=0, return_counts=True)
    for (middle, spread), times in zip(pairs.tolist(), often.tolist(), strict=True):
        total += times * _pages(middle, spread, page)
    return total


def _pages(mean: float, deviation: float, page: int) -> float:
    """E[ceil(n / page)] = sum over j >= 0 of P(n > j * page)."""
    if deviation < 1e-6:
        return math.ceil(mean / page - 1e-9)
    certain = max(math.floor((mean - _TAIL * deviation) / page), 0)
    last = math.floor((mean + _TAIL * deviation) / page)
    scale = deviation * math.sqrt(2)
    return certain + sum(0.5 * math.erfc((j * page + 0.5 - mean) / scale) for j in range(certain, last + 1))


@dataclass(frozen=True)
class Storage:
    """What the paged cache of one device costs, from the sizes of its arrays.

    Attributes:
        page: slots per page.
        page_bytes: of a page with all that its slots carry, and its place in the free list.
        read_bytes: of a page, what attention reads: keys, values, scales.
        key_bytes: of a page, the keys and what the policy notes: read again by policies that select at every step.
        row_bytes: of a sequence: page tables, ring, counts.
    """

    page: int
    page_bytes: int
    read_bytes: int
    key_bytes: int
    row_bytes: int


@functools.cache
def storage(spec: CacheSpec, page: int, longest: int, quantisation: Quantisation | None) -> Storage:
    """Sizes of the cache that :func:`kvsparse_jax.cache.paged.init` makes, without making it.

    Args:
        spec: of the heads that the device holds.
        page: slots per page.
        longest: tokens that a page table has entries for.
        quantisation: of the pool.
    """
    width = bucket(-(-longest // page))

    def made(batch: int, pages: int) -> paged.PagedCache:
        return jax.eval_shape(
            lambda: paged.init(spec, batch, pages=pages, width=width, page=page, quantisation=quantisation)
        )

    one = made(1, 1)
    keys = [one.k, one.k_scale, one.statistic]
    return Storage(
        page=page,
        page_bytes=_nbytes(made(1, 2)) - _nbytes(one),
        read_bytes=_nbytes([one.k, one.v, one.k_scale, one.v_scale]),
        key_bytes=_nbytes(keys),
        row_bytes=_nbytes(made(2, 1)) - _nbytes(one),
    )


def spec_of(config: ModelConfig, policy: Policy, dtype: DTypeLike, context: int, kv_heads: int) -> CacheSpec:
    """What a device's cache is made for: ``kv_heads`` of the model's heads, sequences of up to ``context`` tokens."""
    spec = CacheSpec.of(config, policy, dtype)
    return dataclasses.replace(spec, kv_heads=kv_heads, max_positions=max(config.max_positions, context))


def _nbytes(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

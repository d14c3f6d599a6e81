"""Bytes, FLOPs and seconds of a decode step, and how many sequences fit: the model of docs/planning.md."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvsparse_jax.cache.quantise import Quantisation
from kvsparse_jax.errors import InputError, RunError, whole
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.sharding import RULES
from kvsparse_jax.plan.devices import Device, Efficiency
from kvsparse_jax.plan.occupancy import KINDS, Compression, Storage, expected_pages, spec_of, storage

_LOGITS = 3
"""Arrays of the logits' shape [B, V] in float32 that a step with sampling has at once."""

_POINTS = 9
"""Lengths at which a generation is looked at, from its prompt to its end."""

_MOST = 1 << 20
"""Sequences of one replica at most."""


@dataclass(frozen=True)
class Workload:
    """What is served.

    Attributes:
        context: tokens that a sequence has seen when it ends; memory is reserved for them.
        prompt: tokens of these that were there before the first step. Sequences are spread evenly over their
            generation, so a step reads what they hold on average. None: every sequence is at its end, the slowest case.
        latency: most seconds per step, None: any.
    """

    context: int
    prompt: int | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        whole("context", self.context, 1)
        if self.prompt is not None:
            whole("prompt", self.prompt, 0)
            if self.prompt > self.context:
                raise InputError(f"a prompt of {self.prompt} tokens does not fit a context of {self.context}")
        if self.latency is not None and not (math.isfinite(self.latency) and self.latency > 0):
            raise InputError(f"the latency must be above 0, not {self.latency!r}")

    @property
    def lengths(self) -> list[int]:
        """Tokens seen at which a step is looked at; their mean is the step."""
        start = self.context if self.prompt is None else max(self.prompt, 1)
        return sorted({round(x) for x in np.linspace(start, self.context, _POINTS)})


@dataclass(frozen=True)
class Weights:
    """Parameters on one of the ``tensor`` devices of a replica, the policy's included.

    Attributes:
        nbytes: held.
        always: bytes that every step reads.
        experts: bytes of routed experts, of which a step reads those that a token of the batch goes to.
        flops: of one token, without routed experts.
        expert_flops: of one token, if it went to all experts.
        routed: share of the experts that one token goes to.
    """

    nbytes: int
    always: int
    experts: int
    flops: float
    expert_flops: float
    routed: float

    def read(self, batch: int) -> float:
        """Bytes that a step of ``batch`` tokens reads, each token choosing its experts evenly and on its own."""
        return self.always + self.experts * (1 - (1 - self.routed) ** batch)

    def work(self, batch: int) -> float:
        """FLOPs of a step."""
        return batch * (self.flops + self.expert_flops * self.routed)


@functools.cache
def weights(config: ModelConfig, dtype: DTypeLike, tensor: int = 1) -> Weights:
    """Counts the parameters that the decoder declares, divided over ``tensor`` devices by the sharding rules."""
    shapes = decoder.abstract_params(config, dtype)
    axes = jax.tree.leaves(decoder.logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
    held = always = experts = 0
    flops = expert_flops = 0.0
    for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(shapes), axes, strict=True):
        divided = any(RULES[n] == "tensor" and d % tensor == 0 for n, d in zip(names, leaf.shape, strict=True))
        ways = tensor if divided else 1
        size = math.prod(leaf.shape)
        nbytes = size * leaf.dtype.itemsize // ways
        held += nbytes
        if path[0].key == "embed" and not config.tie_embeddings:
            continue  # looked up, a row per token
        work = 2.0 * size / ways if sum(name != "layers" for name in names) > 1 else 0.0
        if "experts" in names:
            experts, expert_flops = experts + nbytes, expert_flops + work
        else:
            always, flops = always + nbytes, flops + work
    routed = 0.0 if config.experts is None else config.experts.per_token / config.experts.count
    return Weights(held, always, experts, flops, expert_flops, routed)


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step on a replica, by what takes them; the parts follow one another.

    Attributes:
        weights: reading parameters. ``products``: multiplying by them. The longer of the two counts.
        kv: reading keys and values. ``attention``: its products. The longer counts.
        links: collectives between the devices of a replica.
        overhead: what each layer costs besides.
    """

    weights: float
    products: float
    kv: float
    attention: float
    links: float
    overhead: float

    @property
    def seconds(self) -> float:
        """The step."""
        return max(self.weights, self.products) + max(self.kv, self.attention) + self.links + self.overhead

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step that each of these takes; the shorter of two that overlap takes none."""
        parts = {
            "weights bandwidth": self.weights if self.weights >= self.products else 0.0,
            "FLOPs": (self.products if self.products > self.weights else 0.0)
            + (self.attention if self.attention > self.kv else 0.0),
            "KV bandwidth": self.kv if self.kv >= self.attention else 0.0,
            "links": self.links,
            "overhead": self.overhead,
        }
        return {name: seconds / self.seconds for name, seconds in parts.items()}

    @property
    def bottleneck(self) -> str:
        """What takes most of it."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class Plan:
    """A model under a policy on replicas of ``tensor`` devices.

    Attributes:
        config: of the model.
        device, tensor: what a replica is.
        compression: what sequences keep.
        workload: what is served.
        dtype: of weights, keys and values.
        kv_dtype: of 8-bit pages; None: ``dtype``.
        page: slots per page.
        efficiency: what is attained.

    Raises:
        InputError: settings that do not fit each other.
    """

    config: ModelConfig
    device: Device
    workload: Workload
    compression: Compression = Compression()
    tensor: int = 1
    dtype: Any = jnp.bfloat16
    kv_dtype: Quantisation | None = None
    page: int = 64
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        whole("page size", self.page, 1)
        whole("tensor", self.tensor, 1)
        heads = self.config.kv_heads
        if heads % self.tensor and self.config.latent is None:
            raise InputError(f"{heads} KV heads cannot be divided over {self.tensor} devices of a replica")

    @property
    def shards(self) -> int:
        """Devices of a replica over which a sequence's cache is divided; all have the whole of a latent cache."""
        return self.tensor if self.config.latent is None else 1

    @property
    def prompt(self) -> int:
        """Tokens of the context that are a prompt."""
        return self.workload.context if self.workload.prompt is None else self.workload.prompt

    # Memory

    @functools.cached_property
    def policy(self) -> Any:
        """With shapes in place of learned arrays."""
        return self.compression.made(self.config, self.workload.context, self.prompt)

    @functools.cached_property
    def storage(self) -> Storage:
        """Of one device."""
        context = self.workload.context
        spec = spec_of(self.config, self.policy, self.dtype, context, self.config.kv_heads // self.shards)
        return storage(spec, self.page, context, self.kv_dtype)

    @functools.cached_property
    def weights(self) -> Weights:
        """Of one device, the policy's included."""
        own = weights(self.config, jnp.dtype(self.dtype), self.tensor)
        leaves = jax.tree.leaves(self.policy.params)
        nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        work = 2.0 * sum(math.prod(x.shape) for x in leaves if len(x.shape) > 2)
        always, flops = own.always + nbytes, own.flops + work
        return dataclasses.replace(own, nbytes=own.nbytes + nbytes, always=always, flops=flops)

    def entries(self, seen: int | None = None) -> float:
        """Mean entries of a head once ``seen`` tokens are there (None: the context)."""
        mean, _ = self._held(seen)
        return float(mean.mean())

    def pages(self, seen: int | None = None) -> float:
        """Expected pages of a sequence on one device."""
        return expected_pages(*self._held(seen), self.page) / self.shards

    def kv_bytes(self, seen: int | None = None) -> float:
        """Bytes of a sequence's KV cache on one device: pages taken, page tables and all other bookkeeping."""
        return self.pages(seen) * self.storage.page_bytes + self.storage.row_bytes

    def plain_kv_bytes(self, seen: int | None = None) -> int:
        """Bytes of the keys and values (or latents) of all tokens of a sequence in ``dtype``, counted once."""
        c = self.config
        tokens = self.workload.context if seen is None else seen
        channels = 2 * c.head_dim if c.latent is None else c.head_dim
        return tokens * c.layers * c.kv_heads * channels * jnp.dtype(self.dtype).itemsize

    @property
    def physical_cr(self) -> float:
        """Plain bytes over those taken, at the end of the context."""
        return self.plain_kv_bytes() / (self.kv_bytes() * self.shards)

    def memory(self, batch: int) -> float:
        """Bytes that ``batch`` sequences and the weights take on one device."""
        c = self.config
        item = jnp.dtype(self.dtype).itemsize
        # Besides the logits: the residual stream, its norm, q, k, v and the two halves of the MLP.
        widest = 4 * c.hidden_size + 2 * (c.heads + c.kv_heads) * c.head_dim + 3 * c.intermediate_size
        activations = _LOGITS * c.vocab_size * 4 + widest * item
        return self.weights.nbytes + batch * (self.kv_bytes() + activations)

    @property
    def usable(self) -> float:
        """Bytes of a device that the plan may fill."""
        return self.device.memory * (1 - self.efficiency.reserve)

    def fits(self) -> int:
        """Sequences that fit a replica; 0 where the weights leave no room for one."""
        each = self.memory(1) - self.memory(0)
        return max(min(math.floor((self.usable - self.memory(0)) / each), _MOST), 0)

    # Time

    @functools.cached_property
    def mean_pages(self) -> float:
        """Expected pages that a step reads of a sequence on one device."""
        return float(np.mean([self.pages(seen) for seen in self.workload.lengths]))

    def step(self, batch: int) -> Step:
        """A decode step of ``batch`` sequences on a replica."""
        c, d, e, t = self.config, self.device, self.efficiency, self.tensor
        item = jnp.dtype(self.dtype).itemsize
        pages = self.mean_pages
        read = self.storage.read_bytes
        if self.policy.selects and self.policy.while_decoding:
            read += self.storage.key_bytes
        entries = batch * pages * self.page
        rows = max(c.groups * self.shards // t, d.rows)
        # Two sums over the devices per layer (after attention, after the MLP) and the logits, which all of them need.
        sums = 2 * c.layers * 2 * (t - 1) / t * batch * c.hidden_size * item
        logits = (t - 1) / t * batch * c.vocab_size * 4
        bandwidth, flops = d.bandwidth * e.bandwidth, d.flops * e.flops
        return Step(
            weights=self.weights.read(batch) / bandwidth,
            products=self.weights.work(batch) / flops,
            kv=batch * pages * read / (d.bandwidth * e.kv),
            attention=4.0 * rows * c.head_dim * entries / flops,
            links=0.0 if t == 1 else (sums + logits) / d.link + (2 * c.layers + 1) * e.latency,
            overhead=c.layers * e.overhead,
        )

    def batch(self) -> int:
        """Most sequences of a replica that fit and that meet the latency; 0: not even one."""
        most = self.fits()
        target = self.workload.latency
        if target is None:
            return most
        return _largest(most, lambda batch: self.step(batch).seconds <= target)

    def estimate(self, batch: int | None = None) -> "Estimate":
        """What ``batch`` sequences per replica (None: :meth:`batch`) come to."""
        most = self.fits()
        count = self.batch() if batch is None else batch
        step = self.step(max(count, 1))
        return Estimate(
            entries=self.entries(),
            pages=self.pages() * self.shards,
            kv_bytes=self.kv_bytes() * self.shards,
            nominal_cr=self.compression.nominal_cr,
            physical_cr=self.physical_cr,
            fits=most,
            batch=count,
            limit="memory" if count == most else "latency",
            step=step,
            tokens_per_second=count / step.seconds,
            devices=self.tensor,
            price=self.device.price,
        )

    def _held(self, seen: int | None) -> tuple[np.ndarray, np.ndarray]:
        context = self.workload.context
        tokens = context if seen is None else seen
        return self.compression.entries(self.config, context, self.prompt, tokens)


@dataclass(frozen=True)
class Estimate:
    """What a replica does.

    Attributes:
        entries: mean entries of a head at the end of the context.
        pages, kv_bytes: of a sequence then, over all shards of its cache.
        nominal_cr, physical_cr: 1 / share kept, and bytes of all tokens in the model's dtype over those taken.
        fits: sequences that there is memory for.
        batch: sequences that are served.
        limit: what bounds them, "memory" or "latency".
        step: a decode step.
        tokens_per_second: of the replica.
        devices: of the replica.
        price: dollars per device and hour.
    """

    entries: float
    pages: float
    kv_bytes: float
    nominal_cr: float
    physical_cr: float
    fits: int
    batch: int
    limit: str
    step: Step
    tokens_per_second: float
    devices: int
    price: float

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.devices

    @property
    def per_dollar(self) -> float | None:
        """Tokens per dollar; None where devices cost nothing."""
        return self.per_device * 3600 / self.price if self.price > 0 else None


def replica(make: Callable[[int], Plan], devices: int, tensor: int | None = None) -> int:
    """Devices per replica: ``tensor``, or of those that divide ``devices`` the number that gives most tokens/s.

    Args:
        make: tensor -> the plan.
        devices: that there are.
        tensor: what is asked for, None: the best.

    Raises:
        InputError: numbers that do not divide each other.
        RunError: the weights and one sequence fit none of them.
    """
    whole("devices", devices, 1)
    if tensor is not None:
        whole("tensor", tensor, 1)
        if devices % tensor:
            raise InputError(f"{devices} devices cannot be divided into replicas of {tensor}")
        make(tensor)
        return tensor
    config = make(1).config
    heads = config.kv_heads if config.latent is None else config.heads
    ways = [t for t in range(1, devices + 1) if devices % t == 0 and heads % t == 0]
    plans = {t: make(t) for t in ways}
    if not any(plan.fits() for plan in plans.values()):
        plan = plans[ways[-1]]
        raise RunError(
            f"the weights ({plan.weights.nbytes / 1e9:.1f} GB per device) and one sequence "
            f"({plan.kv_bytes() / 1e9:.2f} GB) do not fit {plan.usable / 1e9:.1f} GB of a {plan.device.name}, not even "
            f"over {ways[-1]} devices: give more devices, or a shorter context"
        )
    return max(ways, key=lambda t: (plans[t].estimate().per_device, plans[t].fits() > 0, -t))


@dataclass(frozen=True)
class SameCost:
    """How many sequences run for the price of some dense ones: on the same devices, in the same time.

    Attributes:
        threads: dense sequences.
        devices: the fewest that hold them.
        seconds: a step of theirs.
        fits: compressed sequences that fit these devices.
        meets: those of them whose step takes no longer: what the price of the dense ones buys.
        binds: what bounds ``meets``, "memory" or "time".
        step: of ``meets`` sequences.
    """

    threads: int
    devices: int
    seconds: float
    fits: int
    meets: int
    binds: str
    step: Step


def same_cost(dense: Plan, compressed: Plan, threads: int) -> SameCost:
    """Compares at equal devices and equal time per token, so at equal cost per thread of equal length.

    Raises:
        RunError: not one dense sequence fits.
    """
    whole("threads", threads, 1)
    each = dense.fits()
    if each == 0:
        raise RunError(f"not one dense sequence fits a replica of {dense.tensor} x {dense.device.name}")
    replicas = -(-threads // each)
    seconds = dense.step(-(-threads // replicas)).seconds
    fits = compressed.fits()
    meets = _largest(fits, lambda batch: compressed.step(batch).seconds <= seconds * (1 + 1e-9))
    return SameCost(
        threads=threads,
        devices=replicas * dense.tensor,
        seconds=seconds,
        fits=replicas * fits,
        meets=replicas * meets,
        binds="memory" if meets == fits else "time",
        step=compressed.step(max(meets, 1)),
    )


def needed_cr(dense: Plan, compressed: Plan, threads: int, wanted: int) -> float | None:
    """The nominal compression ratio at which ``wanted`` sequences run for the price of ``threads`` dense ones.

    Kept shares by head are scaled alike. None: no ratio is enough, as the window, weights and products remain.
    """

    def enough(cr: float) -> bool:
        old = compressed.compression
        kept = old.kept
        if kept is not None:
            kept = tuple(tuple(share * old.nominal_cr / cr for share in layer) for layer in kept)
            if max(map(max, kept)) > 1:
                return False
        changed = dataclasses.replace(old, cr=cr, kept=kept)
        return same_cost(dense, dataclasses.replace(compressed, compression=changed), threads).meets >= wanted

    low, high = 1.0, 1000.0
    if not enough(high):
        return None
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` for which something holds that stops holding once; 0: it never does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def four(plan: Plan, kv_dtype: Quantisation = "int8") -> dict[str, Plan]:
    """Dense and compressed, each in the model's dtype and in 8 bits."""
    plain = dataclasses.replace(plan, compression=Compression("dense"), kv_dtype=None)
    name = plan.compression.policy
    label = f"{name} CR {plan.compression.nominal_cr:g}" if name != "dense" else name
    bits = dataclasses.replace(plain, kv_dtype=kv_dtype)
    found = {"dense": plain, f"dense {kv_dtype}": bits}
    if name != "dense":
        found |= {label: dataclasses.replace(plan, kv_dtype=None)}
        found |= {f"{label} {kv_dtype}": dataclasses.replace(plan, kv_dtype=kv_dtype)}
    return found


__all__ = [
    "KINDS",
    "Estimate",
    "Plan",
    "SameCost",
    "Step",
    "Weights",
    "Workload",
    "four",
    "needed_cr",
    "replica",
    "same_cost",
    "weights",
]

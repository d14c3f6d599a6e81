"""Decode attention with its cache, compressed against dense: time, memory, and that no step copies the pool.

SmolLM2-135M shapes by default (30 layers, 9 query and 3 KV heads of 64 channels, bfloat16) and a synthetic retention as
uneven as a trial retrofit to CR 8 gave: 0.65 of the tokens in one layer, 0.35 in four, 0.01-0.06 in the others, plus
the window.
Both caches run in one process, interleaved, on the same queries, inside one jitted while loop of decode steps with
donated buffers; times are ratios of medians. Only attention and cache are measured, not the rest of the model.

    python -m benchmarks.decode_attention --context 8192 --batch 16
"""

import argparse
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels.visibility import NEVER
from kvsparse_jax.cache import dense, paged, report
from kvsparse_jax.cache.spec import CacheSpec

STEPS = 4
"""Decode steps per measurement; each is one iteration of the while loop."""


def retention(layers: int, kv_heads: int, rng: np.random.Generator) -> np.ndarray:
    """Kept fraction outside the window, [L, H]: the spread over layers of the trial retrofit, +- 30 % over heads."""
    by_layer = rng.uniform(0.01, 0.06, layers)
    by_layer[0] = 0.65
    by_layer[np.linspace(1, layers - 1, 4).astype(int)] = 0.35
    return np.clip(by_layer[:, None] * rng.uniform(0.7, 1.3, (layers, kv_heads)), 0.0, 1.0)


def filled(args: argparse.Namespace, rng: np.random.Generator, kept: np.ndarray) -> paged.PagedCache:
    """A paged cache as it stands after ``context`` tokens, without computing the prefill: pages in random order."""
    layers, heads = kept.shape
    shape = (layers, args.batch, heads)
    past = args.context - args.window - 1
    lengths = rng.binomial(past, np.broadcast_to(kept[:, None], shape)) + args.window + 1
    pages = -(-lengths // args.page)
    capacity = int(pages.sum() * args.headroom)
    cache = paged.init(
        CacheSpec(layers, heads, args.head_dim, jnp.bfloat16, window=args.window, shift=1),
        args.batch,
        pages=capacity,
        width=-(-(args.context + 512) // args.page),
        page=args.page,
        quantisation=args.quantisation,
    )
    ids = rng.permutation(capacity).astype(np.int32)
    tables = np.full(cache.tables.shape, capacity, np.int32)
    expires = np.full((capacity, args.page), NEVER, np.int32)
    ring = np.zeros(cache.ring.shape, np.int32)
    start = 0
    newest = np.arange(args.context - args.window - 1, args.context)
    for at in np.ndindex(*shape):
        n = pages[at]
        tables[at][:n] = ids[start : start + n]
        start += n
        slot = lengths[at] - args.window - 1 + np.arange(args.window + 1)
        ring[at][newest % ring.shape[-1]] = slot
        flagged = rng.uniform(size=slot.size) > kept[at[0], at[2]]
        flagged[-1] = False
        expires[tables[at][slot // args.page], slot % args.page] = np.where(flagged, newest + args.window, NEVER)
    key = jax.random.key(0)

    def noise(like: Array) -> Array:
        if cache.k_scale is None:
            return jax.random.normal(key, like.shape, jnp.bfloat16)
        return jax.lax.bitcast_convert_type(jax.random.randint(key, like.shape, -100, 100, jnp.int8), like.dtype)

    return dataclasses.replace(
        cache,
        k=noise(cache.k),
        v=noise(cache.v),
        expires=jnp.asarray(expires),
        free=jnp.asarray(ids[::-1].copy()),
        free_count=jnp.asarray(capacity - start, jnp.int32),
        tables=jnp.asarray(tables),
        lengths=jnp.asarray(lengths, jnp.int32),
        ring=jnp.asarray(ring),
        seen=jnp.full((args.batch,), args.context, jnp.int32),
    )


def filled_dense(args: argparse.Namespace) -> dense.DenseCache:
    """A dense cache after ``context`` tokens."""
    spec = CacheSpec(args.layers, args.kv_heads, args.head_dim, jnp.bfloat16)
    cache = dense.init(spec, args.batch, slots=args.context + 256)
    k = jax.random.normal(jax.random.key(0), cache.k.shape[1:], jnp.bfloat16)
    v = jax.random.normal(jax.random.key(1), cache.v.shape[1:], jnp.bfloat16)
    seen = jnp.full((args.batch,), args.context, jnp.int32)
    return dataclasses.replace(
        cache,
        k=jnp.broadcast_to(k[None], cache.k.shape),
        v=jnp.broadcast_to(v[None], cache.v.shape),
        seen=seen,
    )


def decode(cache: Any, q: Array, k: Array, v: Array, evict: Array | None) -> tuple[Any, Array]:
    """STEPS decode steps: q [L, B, Hq, 1, D], k, v [L, B, H, 1, D], evict [STEPS, L, B, H, 1] or None."""
    layers = jnp.arange(q.shape[0], dtype=jnp.int32)
    valid = jnp.ones((q.shape[1], 1), bool)
    scale = q.shape[-1] ** -0.5

    def step(state: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
        i, cache, total = state

        def layer(carry: tuple[Any, Array], x: tuple[Array, ...]) -> tuple[tuple[Any, Array], None]:
            cache, total = carry
            index, q, k, v = x
            flags = None if evict is None else evict[i, index]
            out, cache = cache.attend(index, q, k, v, flags, valid, scale=scale)
            return (cache, total + out.astype(jnp.float32)), None

        (cache, total), _ = jax.lax.scan(layer, (cache, total), (layers, q, k, v))
        return i + 1, cache.advance(valid), total

    start = (jnp.int32(0), cache, jnp.zeros(q.shape[1:], jnp.float32))
    _, cache, total = jax.lax.while_loop(lambda s: s[0] < STEPS, step, start)
    return cache, total


def pool_copies(hlo: str, arrays: dict[str, Array]) -> list[str]:
    """Copy instructions in a compiled program whose shape is that of one of the given arrays."""
    shapes = {",".join(map(str, x.shape)) for x in arrays.values()}
    return [f"{m[1]}[{m[2]}]" for m in re.finditer(r"= (\w+)\[([\d,]*)\]\S* copy\(", hlo) if m[2] in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192, help="tokens seen per sequence (default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences (default %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="default %(default)s")
    parser.add_argument("--heads", type=int, default=9, help="query heads (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=3, help="default %(default)s")
    parser.add_argument("--head-dim", type=int, default=64, help="channels (default %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens (default %(default)s)")
    parser.add_argument("--page", type=int, default=64, help="slots per page (default %(default)s)")
    parser.add_argument("--quantisation", choices=["int8", "float8_e4m3"], help="8-bit pages (default: bfloat16)")
    parser.add_argument("--headroom", type=float, default=1.1, help="pool over taken pages (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="measurements per cache (default %(default)s)")
    parser.add_argument("--only-paged", action="store_true", help="skip the dense cache")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    kept = retention(args.layers, args.kv_heads, rng)
    key = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(key[0], (args.layers, args.batch, args.heads, 1, args.head_dim), jnp.bfloat16)
    kv = (args.layers, args.batch, args.kv_heads, 1, args.head_dim)
    k, v = (jax.random.normal(x, kv, jnp.bfloat16) for x in key[1:])
    evict = jnp.asarray(rng.uniform(size=(STEPS, *kv[:-1])) > kept[None, :, None, :, None])

    cache = filled(args, rng, kept)
    live = int(cache.lengths.sum())
    entry = 2 * args.head_dim * (1 if args.quantisation else 2)
    figures: dict[str, Any] = {
        "context": args.context,
        "batch": args.batch,
        "page": args.page,
        "live_fraction": live / (cache.lengths.size * args.context),
        "used_over_live": report.used_bytes(cache) / (live * entry),
        "physical_cr": cache.lengths.size * args.context * 4 * args.head_dim / report.used_bytes(cache),
    }
    runs: dict[str, tuple[Callable[..., Any], Any]] = {}
    for name, state, flags in (
        ("paged", cache, evict),
        ("dense", None if args.only_paged else filled_dense(args), None),
    ):
        if state is None:
            continue
        step = jax.jit(decode, donate_argnums=(0,))
        compiled = step.lower(state, q, k, v, flags).compile()
        copies = pool_copies(compiled.as_text() or "", {"k": state.k, "v": state.v})
        figures[f"{name}_pool_copies"] = copies
        runs[name] = (lambda state, run=compiled, flags=flags: run(state, q, k, v, flags), state)
    del cache
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(args.repeats + 1):
        for name, (call, state) in runs.items():
            begin = time.perf_counter()
            state, out = jax.block_until_ready(call(state))
            if i:
                times[name].append((time.perf_counter() - begin) / STEPS)
            runs[name] = (call, state)
            assert bool(jnp.isfinite(out).all())
    for name, found in times.items():
        figures[f"{name}_ms"] = 1e3 * statistics.median(found)
        figures[f"{name}_ms_min"] = 1e3 * min(found)
    if "dense" in runs:
        figures["speedup"] = figures["dense_ms"] / figures["paged_ms"]
        figures["speedup_of_best"] = figures["dense_ms_min"] / figures["paged_ms_min"]
    for name, value in figures.items():
        print(f"{name:18s} {value:.4g}" if isinstance(value, float) else f"{name:18s} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

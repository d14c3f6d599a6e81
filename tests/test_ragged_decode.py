"""Ragged attention: every implementation against a loop over heads in float64, with NaN wherever nothing is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.partial import EMPTY, Partial, merge, normalise
from kernels.ragged_decode import xla
from kernels.ragged_decode.api import ragged_attention

IMPLEMENTATIONS = ("reference", "xla")  # the one for GPUs: test_mosaic_decode.py

SHAPES = {
    # batch, query heads, KV heads, queries, channels, page, width, lengths
    "decode": (2, 6, 2, 1, 8, 4, 7, [[25, 0], [1, 4]]),
    "one head": (1, 1, 1, 1, 4, 1, 3, [[2]]),
    "empty": (1, 2, 2, 1, 4, 2, 3, [[0, 0]]),
    "short chunk": (2, 4, 2, 3, 8, 4, 7, [[28, 3], [0, 11]]),
    "long chunk": (2, 4, 2, 20, 8, 4, 7, [[28, 3], [0, 11]]),
    "more pages than one iteration": (2, 4, 2, 1, 4, 1, 90, [[90, 31], [2, 77]]),
    "more keys than one iteration": (1, 2, 1, 40, 4, 64, 20, [[1100]]),
}


def problem(name, seed=0, codes=None):
    """Arguments of ragged_attention in float32, and what they mean: per head, keys, values and expires."""
    batch, heads, kv_heads, queries, dim, page, width, lengths = SHAPES[name]
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int32)
    count = int((-(-lengths // page)).sum())
    pages = count + 3
    free = rng.permutation(pages).tolist()
    k = np.full((pages, dim, page), np.nan, np.float32)
    v = np.full((pages, page, dim), np.nan, np.float32)
    scales = np.full((2, pages, page), np.nan, np.float32)
    expires = np.full((pages, page), 2**31 - 1, np.int32)
    tables = rng.choice([-3, pages + 9, 0], (batch, kv_heads, width)).astype(np.int32)
    parts = {}
    for at in np.ndindex(batch, kv_heads):
        keys, values = rng.normal(size=(2, lengths[at], dim)).astype(np.float32)
        of_k, of_v = rng.uniform(0.01, 0.1, (2, lengths[at])).astype(np.float32)
        if codes is not None:
            keys, values = (np.array(jnp.asarray(x * 40).astype(codes).astype(jnp.float32)) for x in (keys, values))
        last = rng.integers(0, 50, lengths[at]).astype(np.int32)
        for slot in range(lengths[at]):
            if slot % page == 0:
                tables[at][slot // page] = free.pop()
            where = tables[at][slot // page], slot % page
            k[where[0], :, where[1]], v[where], expires[where] = keys[slot], values[slot], last[slot]
            scales[0][where], scales[1][where] = of_k[slot], of_v[slot]
        if codes is not None:
            keys, values = keys * of_k[:, None], values * of_v[:, None]
        parts[at] = keys, values, last
    q = rng.normal(size=(batch, heads, queries, dim)).astype(np.float32)
    return q, k, v, tables, lengths, scales, expires, parts


def expected(q, parts, q_positions, scale):
    """Normalised output [B, Hq, T, D] and log-sum-exp [B, Hq, T] (-inf without keys), float64."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    group = q.shape[1] // (1 + max(h for _, h in parts))
    for b, h, t in np.ndindex(*q.shape[:3]):
        keys, values, last = (x.astype(np.float64) for x in parts[b, h // group])
        if q_positions is not None:
            seen = q_positions[b, t] <= last
            keys, values = keys[seen], values[seen]
        if len(keys):
            s = keys @ q[b, h, t].astype(np.float64) * scale
            top = s.max()
            p = np.exp(s - top)
            out[b, h, t], lse[b, h, t] = p @ values / p.sum(), top + np.log(p.sum())
    return out, lse


def check(part, want, tolerance):
    out, lse = want
    np.testing.assert_allclose(normalise(part), out, rtol=0, atol=tolerance)
    with np.errstate(divide="ignore"):
        got = np.where(np.asarray(part.weight) > 0, np.asarray(part.top) + np.log(np.asarray(part.weight)), -np.inf)
    np.testing.assert_allclose(got, lse, rtol=0, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_a_loop_over_heads(name, implementation):
    q, k, v, tables, lengths, _, expires, parts = problem(name)
    scale = 0.4
    positions = np.random.default_rng(1).integers(0, 50, (q.shape[0], q.shape[2])).astype(np.int32)
    attend = jax.jit(ragged_attention, static_argnames=("scale", "implementation"))
    for at in (None, positions):
        part = attend(
            *map(jnp.asarray, (q, k, v, tables, lengths)),
            scale=scale,
            expires=None if at is None else jnp.asarray(expires),
            q_positions=None if at is None else jnp.asarray(at),
            implementation=implementation,
        )
        check(part, expected(q, parts, at, scale), 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode", "long chunk"])
@pytest.mark.parametrize("side_by_side", [1, 2])
def test_tokens_side_by_side(name, implementation, side_by_side):
    """The pool of a TPU: keys as values, several tokens in a row."""
    q, k, v, tables, lengths, *_, parts = problem(name)
    k = k.swapaxes(1, 2)
    rows = k.shape[0], k.shape[1] // side_by_side, k.shape[2] * side_by_side
    part = ragged_attention(
        *map(jnp.asarray, (q, k.reshape(rows), v.reshape(rows), tables, lengths)),
        scale=0.4,
        token_major=True,
        implementation=implementation,
    )
    check(part, expected(q, parts, None, 0.4), 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode", "long chunk"])
def test_double_precision(name, implementation):
    q, k, v, tables, lengths, _, _, parts = problem(name)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, jnp.float64) for x in (q, k, v))
        tables, lengths = jnp.asarray(tables), jnp.asarray(lengths)
        part = ragged_attention(q, k, v, tables, lengths, scale=0.4, implementation=implementation)
        assert part.total.dtype == jnp.float64
        check(part, expected(np.asarray(q), parts, None, 0.4), 1e-12)


@pytest.mark.parametrize("codes", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", ["decode", "long chunk"])
def test_eight_bit_pages_equal_their_decoded_values(name, codes):
    q, k, v, tables, lengths, scales, _, parts = problem(name, codes=codes)
    k, v = (jnp.asarray(np.nan_to_num(x, nan=77.0)).astype(codes) for x in (k, v))
    if codes == jnp.float8_e4m3fn:
        k, v = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k, v))
    for implementation in IMPLEMENTATIONS:
        part = ragged_attention(
            jnp.asarray(q), k, v, jnp.asarray(tables), jnp.asarray(lengths), scale=0.4,
            k_scale=jnp.asarray(scales[0]), v_scale=jnp.asarray(scales[1]), implementation=implementation,
        )  # fmt: skip
        check(part, expected(q, parts, None, 0.4), 2e-5)


def test_every_float8_code_is_decoded_exactly():
    codes = jnp.arange(256, dtype=jnp.uint8)
    want = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32))
    number = ~np.isnan(want)
    assert number.sum() == 254
    np.testing.assert_array_equal(np.asarray(xla._widen(codes, jnp.float32))[number], want[number])


def test_low_precision_queries():
    q, k, v, tables, lengths, _, _, parts = problem("decode")
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    part = ragged_attention(q, k, v, jnp.asarray(tables), jnp.asarray(lengths), scale=0.4)
    assert part.total.dtype == jnp.float32
    np.testing.assert_allclose(normalise(part), expected(np.asarray(q, np.float32), parts, None, 0.4)[0], atol=0.03)


def test_one_program_serves_every_length():
    q, k, v, tables, lengths, *_ = problem("decode")
    attend = jax.jit(lambda lengths: ragged_attention(*map(jnp.asarray, (q, k, v, tables)), lengths, scale=0.4))
    for less in range(3):
        attend(jnp.asarray(np.maximum(lengths - less, 0)))
    assert attend._cache_size() == 1


def test_parts_merge_to_the_whole():
    rng = np.random.default_rng(3)
    s, v = rng.normal(size=(5, 12)) * 30, rng.normal(size=(12, 4))

    def part(columns):
        if not len(columns):
            return Partial(jnp.zeros((5, 4)), jnp.full(5, EMPTY), jnp.zeros(5))
        top = s[:, columns].max(1)
        p = np.exp(s[:, columns] - top[:, None])
        return Partial(*(jnp.asarray(x, jnp.float32) for x in (p @ v[columns], top, p.sum(1))))

    whole = normalise(part(range(12)))
    pieces = [part(range(0, 3)), part([]), part(range(3, 12))]
    np.testing.assert_allclose(normalise(merge(merge(*pieces[:2]), pieces[2])), whole, atol=1e-5)
    nothing = merge(part([]), part([]))
    np.testing.assert_array_equal(normalise(nothing), np.zeros((5, 4)))
    assert (np.asarray(nothing.top) == np.float32(EMPTY)).all()


def test_bad_arguments():
    q, k, v, tables, lengths, scales, expires = map(jnp.asarray, problem("decode")[:-1])
    with pytest.raises(NotImplementedError, match="no implementation 'fast'"):
        ragged_attention(q, k, v, tables, lengths, scale=1.0, implementation="fast")
    with pytest.raises(NotImplementedError, match="channels first"):
        ragged_attention(q, v, v, tables, lengths, scale=1.0, token_major=True, implementation="mosaic")
    for wrong, token_major in ((k, False), (v, True)):
        with pytest.raises(ValueError, match="do not fit"):
            ragged_attention(q, k, wrong, tables, lengths, scale=1.0, token_major=token_major)
    with pytest.raises(ValueError, match="do not fit"):
        ragged_attention(q, k, v, tables[0], lengths, scale=1.0)
    with pytest.raises(ValueError, match="cannot be shared"):
        ragged_attention(q[:, :5], k, v, tables, lengths, scale=1.0)
    with pytest.raises(ValueError, match="together"):
        ragged_attention(q, k, v, tables, lengths, scale=1.0, k_scale=scales[0])
    with pytest.raises(ValueError, match="together"):
        ragged_attention(q, k, v, tables, lengths, scale=1.0, expires=expires)

"""The TPU kernel of ragged attention in the interpreter, with races detected and NaN in all that is not in use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from benchmarks.gpu import problem
from kernels.partial import normalise
from kernels.ragged_decode import pallas_tpu
from kernels.ragged_decode.api import ragged_attention
from kernels.ragged_decode.pallas_tpu import pltpu

PAGE = 64
UNEVEN = [[0, 1], [PAGE - 1, PAGE], [PAGE + 1, 0], [0, 9 * PAGE + 5]]


@pytest.fixture
def interpreted():
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def as_on_tpu(given, dim, dtype=jnp.bfloat16):
    """The same with token_major pages, tokens side by side where a row of 128 has room; None: as they are stored."""
    n = 128 // dim if 128 % dim == 0 else 1
    rows = len(given["v"]), given["v"].shape[1] // n
    pages = {
        "k": given["k"].swapaxes(1, 2).reshape(*rows, n * dim),
        "v": given["v"].reshape(*rows, n * given["v"].shape[2]),
    }
    made = {**given, **pages, "token_major": True}
    return made if dtype is None else {**made, **{name: made[name].astype(dtype) for name in ("q", "k", "v")}}


def compare(given, dim, dtype=jnp.bfloat16, **settings):
    want = ragged_attention(**given, **settings, implementation="reference")
    got = ragged_attention(**as_on_tpu(given, dim, dtype), **settings, implementation="pallas_tpu")
    assert not interpreter.races.races_found
    assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    exact, out = normalise(want), normalise(got)
    error = jnp.abs(out - exact).max() / jnp.maximum(jnp.abs(exact).max(), 1e-3)
    assert error < tolerance, float(error)
    some = np.asarray(want.weight) > 0
    np.testing.assert_array_equal(np.asarray(got.weight) > 0, some)
    lse, expected = (np.where(some, np.asarray(p.top) + np.log(np.where(some, p.weight, 1)), 0) for p in (got, want))
    np.testing.assert_allclose(lse, expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(got.top)[~some], np.asarray(want.top)[~some])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("group", "dtype"), [(1, jnp.bfloat16), (4, jnp.bfloat16), (8, jnp.bfloat16), (4, jnp.float32)]
)
def test_equals_the_reference(dim, group, dtype, interpreted):
    compare(problem(UNEVEN, group, dim), dim, dtype, scale=dim**-0.5)


@pytest.mark.parametrize("dim", [32, 256])
def test_other_head_dimensions(dim, interpreted):
    compare(problem([[PAGE + 3, 2]], 2, dim), dim, scale=dim**-0.5)


def test_several_queries(interpreted):
    compare(problem([[PAGE - 1, 0]], 3, 64, 4), 64, scale=0.125)


def test_soft_cap(interpreted):
    given = problem([[PAGE + 3, 2]], 2, 64)
    compare(given, 64, scale=0.5, soft_cap=3.0)
    bare, capped = (ragged_attention(**as_on_tpu(given, 64), scale=0.5, soft_cap=cap) for cap in (None, 3.0))
    assert jnp.abs(normalise(bare) - normalise(capped)).max() > 0.05


def test_nothing_is_held(interpreted):
    given = problem([[0, 0], [0, 0]], 2, 64)
    compare(given, 64, scale=0.125)
    part = ragged_attention(**as_on_tpu(given, 64), scale=0.125, implementation="pallas_tpu")
    assert not part.weight.any() and not part.total.any()


def test_large_scores(interpreted):
    given = problem([[PAGE + 1]], 2, 64)
    given["q"] *= jnp.asarray(100, jnp.bfloat16)
    compare(given, 64, scale=1.0)


def test_blocks_of_heads_and_buffers_used_again(interpreted, monkeypatch):
    """Three blocks, the last with one head of eight, and few small tiles in flight."""
    monkeypatch.setattr(pallas_tpu, "_TABLES", 8 * pallas_tpu.LANES)
    monkeypatch.setattr(pallas_tpu, "_IN_FLIGHT", 0)
    monkeypatch.setattr(pallas_tpu, "KEYS", PAGE)
    lengths = [[3 * PAGE + 1], *([[0]] * 6), [5 * PAGE], *([[0]] * 8), [2]]
    compare(problem(lengths, 2, 64), 64, scale=0.125)


@pytest.mark.parametrize("seed", range(2))
def test_random_lengths(seed, interpreted):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 10 ** rng.integers(1, 4), (3, 4)) * (rng.random((3, 4)) < 0.7)
    compare(problem(lengths, 4, 128, seed=seed), 128, scale=128**-0.5)


def test_heads_divided_over_devices(interpreted):
    """Inside shard_map, as a cache on a mesh calls it."""
    given = problem([[PAGE + 1, 3], [0, 2 * PAGE]], 2, 64)
    want = ragged_attention(**given, scale=0.125, implementation="reference")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.sharding.PartitionSpec(None, "tensor"), jax.sharding.PartitionSpec()
    made = as_on_tpu(given, 64)

    def local(q, tables, lengths, k, v):
        return ragged_attention(q, k, v, tables, lengths, scale=0.125, token_major=True, implementation="pallas_tpu")

    run = jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 3 + (whole,) * 2, out_specs=heads, check_vma=False)
    got = jax.jit(run)(*(made[name] for name in ("q", "tables", "lengths", "k", "v")))
    np.testing.assert_allclose(normalise(got), normalise(want), rtol=0, atol=0.02)


def test_it_is_taken_where_it_can_serve(interpreted):
    given = as_on_tpu(problem(UNEVEN, 4, 128), 128)
    want = ragged_attention(**given, scale=0.1, implementation="pallas_tpu")
    np.testing.assert_array_equal(ragged_attention(**given, scale=0.1).total, want.total)
    assert pallas_tpu.unsupported(given["q"], given["k"], given["v"], given["tables"]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": jnp.int8}, "pages are bfloat16 or float32, not int8"),
        ({"masked": True}, "these expire"),
        ({"group": 70}, "128 query rows .* not 140"),
        ({"page": 24}, "multiple of 16 rows, not 12"),
        ({"dim": 96}, "a multiple of 128 numbers, not 96: XLA would copy"),
        ({"dim": 128, "latent": True}, "its values are not its keys"),
    ],
)
def test_what_it_cannot_do_xla_does(change, message, interpreted):
    given = problem([[3]], **{"group": 1, "dim": 64, **change})
    made = as_on_tpu(given, change.get("dim", 64), None)
    with pytest.raises(NotImplementedError, match=message):
        ragged_attention(**made, scale=1.0, implementation="pallas_tpu")
    want = ragged_attention(**made, scale=1.0, implementation="xla")
    np.testing.assert_array_equal(ragged_attention(**made, scale=1.0).total, want.total)


def test_sizes_that_scalar_memory_cannot_hold(interpreted):
    given = as_on_tpu(problem([[3]], 1, 64), 64)
    many, wide = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2**13, 8, 4), (1, 1, 10000)))
    for tables, message in ((many, "32768 KV heads"), (wide, "at most 8192 entries, not 10000")):
        q = jax.ShapeDtypeStruct((tables.shape[0], tables.shape[1], 1, 64), jnp.bfloat16)
        assert message in pallas_tpu.unsupported(q, given["k"], given["v"], tables)


def test_other_types_and_layouts_are_refused(interpreted):
    given = problem([[3]], 1, 64)
    with pytest.raises(NotImplementedError, match="reads pages that are token_major"):
        ragged_attention(**given, scale=1.0, implementation="pallas_tpu")
    made = as_on_tpu(given, 64)
    with pytest.raises(NotImplementedError, match="queries are of the pages' dtype bfloat16, not float32"):
        ragged_attention(**{**made, "q": made["q"].astype(jnp.float32)}, scale=1.0, implementation="pallas_tpu")


def test_without_a_tpu_it_says_so():
    given = as_on_tpu(problem([[3]], 1, 64), 64)
    with pytest.raises(NotImplementedError, match="it needs a TPU, and this is a CPU; 'xla' can"):
        ragged_attention(**given, scale=1.0, implementation="pallas_tpu")

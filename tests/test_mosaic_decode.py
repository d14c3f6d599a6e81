"""The Mosaic kernel of ragged attention in the interpreter, with races detected and NaN in all that is not in use."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from benchmarks.gpu import problem
from kernels.hopper import plgpu
from kernels.partial import normalise
from kernels.ragged_decode import mosaic
from kernels.ragged_decode.api import ragged_attention

PAGE = 64


@pytest.fixture
def interpreted():
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    with plgpu.force_gpu_interpret_mode(params):
        yield
    interpreter.reset_gpu_interpret_mode_state()


def compare(given, scale, soft_cap=None):
    want = ragged_attention(**given, scale=scale, soft_cap=soft_cap, implementation="reference")
    got = ragged_attention(**given, scale=scale, soft_cap=soft_cap, implementation="mosaic")
    assert not interpreter.get_races().races_found
    exact, out = normalise(want), normalise(got)
    error = jnp.abs(out - exact).max() / jnp.maximum(jnp.abs(exact).max(), 1e-3)
    assert error < 1e-2, float(error)
    some = np.asarray(want.weight) > 0
    np.testing.assert_array_equal(np.asarray(got.weight) > 0, some)
    lse, expected = (np.where(some, np.asarray(p.top) + np.log(np.where(some, p.weight, 1)), 0) for p in (got, want))
    np.testing.assert_allclose(lse, expected, rtol=0, atol=1e-2)
    np.testing.assert_array_equal(np.asarray(got.top)[~some], np.asarray(want.top)[~some])


UNEVEN = [[0, 1], [PAGE, 3 * PAGE + 1]]
CODES = {"bfloat16": None, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}


@pytest.mark.parametrize(
    ("dim", "codes"),
    [
        *((dim, "bfloat16") for dim in (64, 96, 128, 192, 256)),
        *((dim, "int8") for dim in (64, 96, 192)),
        *((dim, "float8") for dim in (96, 128, 256)),
    ],
)
def test_head_dimensions_and_types(dim, codes, interpreted):
    compare(problem(UNEVEN, 4, dim, code=CODES[codes]), dim**-0.5)


@pytest.mark.parametrize("group", [1, 5, 8, 9, 16])
def test_groups(group, interpreted):
    compare(problem([[PAGE - 1, PAGE + 1]], group, 64), 0.125)


@pytest.mark.parametrize(("group", "queries"), [(3, 2), (1, 16), (16, 16)])
def test_several_queries_see_what_has_not_expired(group, queries, interpreted):
    compare(problem([[PAGE - 1, 0]], group, 64, queries, masked=True), 0.125)


@pytest.mark.parametrize("codes", ["bfloat16", "int8"])
def test_latent_entries_are_keys_and_values(codes, interpreted):
    compare(problem([[2 * PAGE + 7]], 5, 576, 2, code=CODES[codes], masked=True, latent=True), 192**-0.5)


@pytest.mark.parametrize("codes", ["bfloat16", "float8"])
def test_pages_of_two_tiles(codes, interpreted):
    compare(problem([[129, 100], [0, 64]], 2, 64, 2, code=CODES[codes], masked=True, page=128), 0.125)


@pytest.mark.parametrize(
    ("code", "masked", "latent"), [(None, True, False), (jnp.int8, False, False), (jnp.int8, True, True)]
)
def test_buffers_are_used_again(code, masked, latent, interpreted, monkeypatch):
    """One block has all tiles, and two buffers for them."""
    plan = mosaic.plan
    monkeypatch.setattr(mosaic, "plan", lambda *args: dataclasses.replace(plan(*args), stages=2, per_core=1))
    compare(problem([[4 * PAGE + 3, 1, PAGE, 3]], 2, 64, code=code, masked=masked, latent=latent), 0.125)


def test_soft_cap(interpreted):
    given = problem([[PAGE + 3, 2]], 2, 64)
    compare(given, 0.5, soft_cap=3.0)
    bare = ragged_attention(**given, scale=0.5, implementation="reference")
    assert jnp.abs(normalise(bare) - normalise(ragged_attention(**given, scale=0.5, soft_cap=3.0))).max() > 0.05


def test_nothing_is_held(interpreted):
    given = problem([[0, 0], [0, 0]], 2, 64)
    compare(given, 0.125)
    part = ragged_attention(**given, scale=0.125, implementation="mosaic")
    assert not part.weight.any() and not part.total.any()


def test_nothing_is_visible(interpreted):
    given = problem([[5, PAGE + 1]], 2, 64, masked=True)
    given["q_positions"] = jnp.full_like(given["q_positions"], 60)
    compare(given, 0.125)


def test_large_scores(interpreted):
    given = problem([[PAGE + 1]], 2, 64)
    given["q"] *= jnp.asarray(100, jnp.bfloat16)
    compare(given, 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_schedule_gives_each_tile_to_one_block_and_each_part_a_place(seed):
    rng = np.random.default_rng(seed)
    heads, blocks = rng.integers(1, 40, 2).tolist()
    lengths = rng.integers(0, 10 ** rng.integers(1, 5), heads) * (rng.random(heads) < 0.8)
    made = mosaic._schedule(jnp.asarray(lengths, jnp.int32), blocks)
    ends, first, last = map(np.asarray, (made.ends, made.first, made.last))
    np.testing.assert_array_equal(np.diff(ends, prepend=0), -(-lengths // mosaic.KEYS))
    head_of = np.repeat(np.arange(heads), -(-lengths // mosaic.KEYS))
    start, stop = map(np.asarray, mosaic._share(jnp.arange(blocks, dtype=jnp.int32), made.ends[-1], blocks))
    assert np.ptp(stop - start) <= 1 and start[0] == 0 and stop[-1] == len(head_of)
    np.testing.assert_array_equal(start[1:], stop[:-1])
    parts = []
    for block in range(blocks):
        owned = head_of[start[block] : stop[block]]
        if not len(owned):
            assert last[block] <= min(first[block], heads - 1)
            continue
        assert (first[block], last[block]) == (owned[0], owned[-1])
        parts += [(head, block) for head in np.unique(owned).tolist()]
    places = [head + block for head, block in parts]
    assert places == sorted(set(places)) and all(place < heads + blocks for place in places)
    tiles = np.arange(len(head_of), dtype=np.int32)
    block_of = np.asarray(mosaic._block_of(jnp.asarray(tiles), made.ends[-1], blocks))
    assert ((start[block_of] <= tiles) & (tiles < stop[block_of])).all()


def test_without_a_hopper_gpu_it_says_so_and_xla_serves():
    given = problem(UNEVEN, 2, 64)
    with pytest.raises(NotImplementedError, match="it needs a Hopper GPU .* this is a CPU; 'xla' can"):
        ragged_attention(**given, scale=0.125, implementation="mosaic")
    want = ragged_attention(**given, scale=0.125, implementation="xla")
    np.testing.assert_array_equal(ragged_attention(**given, scale=0.125).total, want.total)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 80}, "head dimensions are"),
        ({"group": 300}, "query rows per KV head"),
        ({"page": 32}, "multiple of 64 slots"),
    ],
)
def test_what_it_cannot_do(change, message, interpreted):
    given = problem([[3]], **{"group": 1, "dim": 64, **change})
    with pytest.raises(NotImplementedError, match=message):
        ragged_attention(**given, scale=1.0, implementation="mosaic")
    assert jnp.isfinite(ragged_attention(**given, scale=1.0).total).all()


def test_other_types_are_refused(interpreted):
    given = problem([[3]], 1, 64)
    with pytest.raises(NotImplementedError, match="queries are bfloat16, not float32"):
        ragged_attention(**{**given, "q": given["q"].astype(jnp.float32)}, scale=1.0, implementation="mosaic")

"""The caches against a plain model of the visibility rule, the original code's recorded decisions, and each other."""

import dataclasses
import functools
import logging
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.visibility import NEVER
from kvsparse_jax.cache import capacity, dense, paged, report
from kvsparse_jax.cache.spec import CacheSpec

F32 = jnp.float32


class Rule:
    """The visibility rule for one (sequence, head), in plain Python: the positions that the newest query sees."""

    def __init__(self, window, shift, local=None):
        self.window, self.shift, self.local = window, shift, local
        self.evict = []

    def add(self, emitted):
        """A token arrives and emits a decision, about itself or about the token before it."""
        self.evict.append(bool(emitted) if self.shift == 0 else False)
        if self.shift == 1 and len(self.evict) > 1:
            self.evict[-2] = bool(emitted)

    def visible(self):
        """Positions visible to the newest query."""
        q = len(self.evict) - 1
        seen = [k for k in range(q + 1) if not self.evict[k] or self.window is None or q - k <= self.window]
        return [k for k in seen if self.local is None or q - k < self.local]


def masked_attention(q, k, v, seen, scale):
    """Dense reference in float64: q [B, Hq, T, D], k, v [B, H, T, D], seen [B, H, T, T] -> [B, Hq, T, D]."""
    group = q.shape[1] // k.shape[1]
    k, v, seen = (np.repeat(x, group, 1).astype(bool if x.dtype == bool else np.float64) for x in (k, v, seen))
    s = np.where(seen, np.einsum("bhtd,bhsd->bhts", q.astype(np.float64), k) * scale, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhts,bhsd->bhtd", p, v)


@functools.partial(jax.jit, static_argnames=("scale", "window_less"), donate_argnums=(0,))
def forward(cache, q, k, v, evict, valid, local, *, scale, window_less=False):
    """All layers of one forward pass, scanned as the decoder does: q [L, B, Hq, T, D] and so on."""

    def body(cache, x):
        i, q, k, v, evict, local = x
        out, cache = cache.attend(i, q, k, v, None if window_less else evict, valid, scale=scale, local_window=local)
        return cache, out

    layers = jnp.arange(q.shape[0], dtype=jnp.int32)
    cache, out = jax.lax.scan(body, cache, (layers, q, k, v, evict, local))
    return cache.advance(valid), out


def copies(text, pages):
    """Instructions of a compiled program that copy a whole pool.

    A conversion would be a copy too: XLA:CPU widens a whole float8 pool to scatter into it.
    """
    assert re.search(rf"= \w+\[{pages},\d+,\d+\]", text)
    return re.findall(rf"= \w+\[{pages},[\d,]+\]\S* (?:copy|convert)\(.*", text)


def poison(cache):
    """Fills everything that is not in use with NaN or garbage; a cache must behave the same."""
    if isinstance(cache, dense.DenseCache):
        empty = np.arange(cache.slots)[None] >= np.asarray(cache.seen)[:, None]
        k = np.where(empty[None, :, None, None, :], np.nan, np.asarray(cache.k))
        v = np.where(empty[None, :, None, :, None], np.nan, np.asarray(cache.v))
        return dataclasses.replace(cache, k=jnp.asarray(k, cache.k.dtype), v=jnp.asarray(v, cache.v.dtype))
    lengths, tables = np.asarray(cache.lengths)[..., None], np.array(cache.tables)
    slots = np.arange(cache.slots)
    page = np.repeat(tables, cache.page, -1)[slots < lengths]
    offset = np.broadcast_to(slots % cache.page, (*lengths.shape[:3], cache.slots))[slots < lengths]
    used = np.zeros((cache.pages, cache.page), bool)
    used[page, offset] = True
    assert used.sum() == lengths.sum(), "two slots in one place"
    free = np.arange(tables.shape[3]) >= -(-lengths // cache.page)
    tables[free] = np.resize([-5, cache.pages + 7, 0], free.sum())
    held = np.asarray(cache.free)[: int(cache.free_count)]
    assert len(set(held.tolist())) == len(held) and not used[held].any()
    assert len(held) + int(cache.pages_taken().sum()) == cache.pages

    def fill(x, mask, value):
        return None if x is None else jnp.where(jnp.asarray(mask), x, jnp.asarray(value, x.dtype))

    eight_bit = cache.k_scale is not None
    of_v = np.repeat(used.reshape(*cache.v.shape[:2], -1), cache.channels // 2, -1)
    return dataclasses.replace(
        cache,
        k=fill(cache.k, of_v if cache.token_major else used[:, None, :], 99 if eight_bit else np.nan),
        v=fill(cache.v, of_v, 99 if eight_bit else np.nan),
        k_scale=fill(cache.k_scale, used, np.nan),
        v_scale=fill(cache.v_scale, used, np.nan),
        expires=jnp.asarray(np.where(used, np.asarray(cache.expires), NEVER), jnp.int32),
        tables=jnp.asarray(tables),
    )


@dataclasses.dataclass
class Case:
    """Random tokens with decisions, in columns that may be padding: arrays [L, B, H, T, ...], valid [B, T]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    evict: np.ndarray
    valid: np.ndarray
    window: int | None
    shift: int
    local: tuple[int | None, ...]

    def spec(self, dtype=F32, **kwargs):
        layers, _, heads, _, dim = self.k.shape
        return CacheSpec(
            layers, heads, dim, dtype, window=self.window, shift=self.shift, local_windows=self.local, **kwargs
        )

    def expected(self):
        """Outputs [L, B, Hq, T, D] and, after each column, live counts [T, L, B, H]."""
        layers, batch, heads, length, _ = self.k.shape
        seen = np.zeros((layers, batch, heads, length, length), bool)
        live = np.zeros((length, layers, batch, heads), int)
        for at in np.ndindex(layers, batch, heads):
            rule = Rule(self.window, self.shift, self.local[at[0]] if self.local else None)
            columns = []
            for t in range(length):
                if self.valid[at[1], t]:
                    columns.append(t)
                    rule.add(self.evict[at][t])
                    visible = [columns[i] for i in rule.visible()]
                    seen[at][t, visible] = True
                live[(t, *at)] = len(rule.visible())
        scale = self.k.shape[-1] ** -0.5
        out = [masked_attention(*x, scale) for x in zip(self.q, self.k, self.v, seen, strict=True)]
        return np.stack(out), live


def random_case(
    rng, *, layers=2, batch=2, heads=2, groups=2, length=40, dim=8, window, shift, local=(), rate=0.5, pads=None
):
    shape = (layers, batch, heads, length)
    rates = rng.uniform(0, 2 * rate, shape[:3])[..., None]
    valid = np.ones((batch, length), bool)
    for row, columns in (pads or {}).items():
        valid[row, columns] = False
    return Case(
        q=rng.normal(size=(layers, batch, heads * groups, length, dim)),
        k=rng.normal(size=(*shape, dim)),
        v=rng.normal(size=(*shape, dim)),
        evict=rng.uniform(size=shape) < rates,
        valid=valid,
        window=window,
        shift=shift,
        local=local,
    )


def make(case, module, dtype=F32, page=4, pages=None, max_positions=None, **kwargs):
    _, batch, _, length, _ = case.k.shape
    if module is paged:
        width = -(-length // page) + 1
        heads = np.prod(case.k.shape[:3])
        kwargs |= dict(page=page, width=width, pages=pages or int(heads * width))
    else:
        kwargs |= dict(slots=length)
    return module.init(case.spec(dtype, max_positions=max_positions), batch, **kwargs)


def run(case, cache, module, chunks, check=None, poisoned=True, dtype=F32):
    """Feeds the columns in chunks of the given sizes; returns the outputs and the cache. ``check(cache, columns)``."""
    start, outs = 0, []
    layers = case.k.shape[0]
    local = None
    if case.local:
        local = jnp.asarray([NEVER if w is None else w for w in case.local], jnp.int32)
    assert len(case.local) in (0, layers)
    for size in chunks:
        cut = slice(start, start + size)
        if poisoned:
            cache = poison(cache)
        arrays = (jnp.asarray(x[:, :, :, cut], dtype) for x in (case.q, case.k, case.v))
        cache, out = forward(
            cache,
            *arrays,
            jnp.asarray(case.evict[..., cut]),
            jnp.asarray(case.valid[:, cut]),
            local,
            scale=case.k.shape[-1] ** -0.5,
            window_less=case.window is None,
        )
        start += size
        outs.append(np.asarray(out))
        if check is not None:
            check(cache, start)
    return np.concatenate(outs, 3), cache


def cut_columns(case, start, stop):
    """The case restricted to some of its columns."""
    arrays = {x: getattr(case, x)[:, :, :, start:stop] for x in ("q", "k", "v", "evict")}
    return dataclasses.replace(case, **arrays, valid=case.valid[:, start:stop])


class CountCompilations(logging.Handler):
    """Counts the programs that jax compiles, by name."""

    def __enter__(self):
        self.messages = []
        self.before = jax.config.jax_log_compiles
        jax.config.update("jax_log_compiles", True)
        logging.getLogger("jax._src.interpreters.pxla").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("jax._src.interpreters.pxla").removeHandler(self)
        jax.config.update("jax_log_compiles", self.before)

    def emit(self, record):
        self.messages.append(record.getMessage())

    def of(self, name):
        return sum(f"Compiling jit({name})" in m for m in self.messages)


def chunkings(prefill, length, size):
    """Chunks of the prompt, then single tokens."""
    full, rest = divmod(prefill, size)
    return [size] * full + ([rest] if rest else []) + [1] * (length - prefill)


def check_against(case, module, cache, chunks, tolerance=1e-5, dtype=F32):
    length = sum(chunks)
    want, live = case.expected()
    want = np.where(case.valid[None, :, None, :, None], want, 0)[:, :, :, :length]

    def check(cache, columns):
        if module is paged:
            got = np.asarray(cache.live())
            np.testing.assert_array_equal(got, live[columns - 1])
            assert (np.asarray(cache.pages_taken()) <= -(-got // cache.page) + 1).all()
            assert int(cache.lost) == 0

    got, cache = run(case, cache, module, chunks, check, dtype=dtype)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
    return cache


# The rule


GOLDEN = ["adapter", "adapter_layer", "borrowed"]
PREFILL = 29


def golden_case(directory, name, padded):
    """Random keys with the recorded decisions, and the live counts [1 + N, L, B, H] of the original code."""
    data = np.load(directory / "3_model" / f"{name}_golden.npz")
    evict, live = data["decisions"].astype(bool), data["live_lengths"]
    layers, batch, heads, length = evict.shape
    assert int(data["prefill_len"]) == PREFILL
    case = random_case(
        np.random.default_rng(0),
        layers=layers,
        batch=batch,
        heads=heads,
        length=length,
        window=int(data["window"]),
        shift=1,
    )
    case.evict = evict
    if padded:
        extra = np.load(directory / "3_model" / f"{name}_golden_padded.npz")
        case.valid, live = extra["attention_mask"], extra["live_lengths"]
    else:
        np.testing.assert_array_equal(data["visible"].sum(-1).transpose(3, 0, 1, 2), case.expected()[1])
    return case, live


@pytest.mark.parametrize("size", [1, 7, 29, 64])
@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_decisions(golden_methods, name, size):
    case, live = golden_case(golden_methods, name, padded=False)
    np.testing.assert_array_equal(case.expected()[1][PREFILL - 1 :], live)
    check_against(case, paged, make(case, paged), chunkings(PREFILL, 48, size))


@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_live_counts_of_a_padded_batch(golden_methods, name):
    case, live = golden_case(golden_methods, name, padded=True)
    unpadded = case.valid.all(1)
    got = []
    run(
        case,
        make(case, paged),
        paged,
        chunkings(PREFILL, 48, 7),
        lambda cache, t: got.append(np.asarray(cache.lengths)),
    )
    # The decisions of the padded row were not recorded; the row beside it must not notice the padding.
    np.testing.assert_array_equal(np.stack(got[-20:])[:, :, unpadded], live[:, :, unpadded])


@pytest.mark.parametrize("module", [paged, dense])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_any_chunking_equals_the_rule(window, shift, module):
    rng = np.random.default_rng(window * 2 + shift)
    case = random_case(rng, window=window, shift=shift, pads={1: slice(0, 9)})
    for size in (1, 7, 23) if module is paged else (7,):
        check_against(case, module, make(case, module), chunkings(23, 32, size))


@pytest.mark.parametrize("module", [paged, dense])
@pytest.mark.parametrize("window", [None, 3])
def test_sliding_window_layers(window, module):
    """A layer's own window: narrower than the delay of the eviction, wider, and none."""
    case = random_case(
        np.random.default_rng(5), layers=3, window=window, shift=1, local=(2, 9, None), pads={0: slice(0, 5)}
    )
    for size in (1, 6, 23) if module is paged else (6,):
        check_against(case, module, make(case, module), chunkings(23, 32, size))


@pytest.mark.parametrize(("dim", "rows", "size"), [(8, (1, 32), 1), (64, (2, 128), 6), (96, (4, 96), 6)])
def test_layout_of_tpus(monkeypatch, dim, rows, size):
    """Tokens side by side in rows of 128 numbers: the same entries and outputs, and the bytes of the other layout."""
    monkeypatch.setattr(paged, "_on_tpu", lambda mesh: True)
    case = random_case(
        np.random.default_rng(6), layers=2, window=3, shift=1, local=(9, None), pads={0: slice(0, 5)}, dim=dim
    )
    cache = make(case, paged)
    assert cache.k.shape[1:] == cache.v.shape[1:] == rows and cache.channels == 2 * dim
    check_against(case, paged, cache, chunkings(23, 32, size))
    if dim == 8:
        test_dropping_slots()
        test_report_counts_bytes_of_arrays()


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=12)
def test_turns(data):
    """Chunk, decode, chunk, decode with ragged rows: live counts and outputs at every step."""
    shift = data.draw(st.integers(0, 1))
    window = data.draw(st.sampled_from([0, 1, 4, 40]))
    rate = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    chunks = data.draw(st.permutations([9, 1, 1, 9, 1, 1, 9, 1]))
    # Each row takes part in a chunk with some of its columns, in a step wholly or not at all.
    valid = []
    for row in range(2):
        for i, size in enumerate(chunks):
            count = data.draw(st.sampled_from([size, size, 0, size // 2]), label=f"row {row}, chunk {i}")
            left = data.draw(st.booleans())
            valid.append(
                [False] * (size - count) + [True] * count if left else [True] * count + [False] * (size - count)
            )
    case = random_case(
        np.random.default_rng(len(valid)), layers=1, length=sum(chunks), window=window, shift=shift, rate=rate
    )
    case.valid = np.concatenate([np.array(x) for x in valid]).reshape(2, -1)
    check_against(case, paged, make(case, paged), chunks)


def test_double_precision():
    with jax.enable_x64(True):
        case = random_case(np.random.default_rng(1), window=3, shift=1, pads={1: slice(0, 9)})
        for module in (paged, dense):
            cache = make(case, module, jnp.float64)
            check_against(case, module, cache, chunkings(23, 32, 7), 1e-10, jnp.float64)


def test_a_window_longer_than_any_sequence_needs_no_longer_ring():
    case = random_case(np.random.default_rng(18), window=1000, shift=1, local=(700, 9))
    cache = make(case, paged, max_positions=32)
    assert cache.ring.shape[3] == 32
    check_against(case, paged, cache, chunkings(23, 32, 7))


def test_rows_do_not_influence_each_other():
    case = random_case(np.random.default_rng(2), batch=3, window=4, shift=1, pads={0: slice(0, 12), 2: slice(20, 23)})
    chunks = chunkings(23, 32, 7)
    together, cache = run(case, make(case, paged), paged, chunks)
    for row in range(3):
        alone = dataclasses.replace(case, valid=np.where(np.arange(3)[:, None] == row, case.valid, False))
        out, single = run(alone, make(case, paged), paged, chunks)
        np.testing.assert_array_equal(out[:, row], together[:, row])
        np.testing.assert_array_equal(np.asarray(single.lengths)[:, row], np.asarray(cache.lengths)[:, row])
        assert not np.asarray(single.lengths)[:, np.arange(3) != row].any()


# Memory


def allocator(cache):
    """Everything but the contents of the pool."""
    contents = ("k", "v", "k_scale", "v_scale", "expires", "lost")
    return [np.asarray(getattr(cache, f.name)) for f in dataclasses.fields(cache) if f.name not in contents]


def test_release_restores_the_pool():
    case = random_case(np.random.default_rng(3), window=4, shift=1, local=(6, None))
    new = make(case, paged)
    before = allocator(new)
    _, cache = run(case, new, paged, chunkings(23, 32, 7))
    lengths = np.asarray(cache.lengths)
    cache = cache.release(jnp.array([True, False]))
    poison(cache)
    assert not np.asarray(cache.lengths)[:, 0].any()
    np.testing.assert_array_equal(np.asarray(cache.lengths)[:, 1], lengths[:, 1])
    # The released row starts anew beside the other one, which goes on.
    case.valid[1] = False
    got, _ = run(case, jax.tree.map(jnp.copy, cache), paged, chunkings(23, 32, 7))
    np.testing.assert_allclose(got[:, 0], case.expected()[0][:, 0, :, :32], rtol=0, atol=1e-5)
    for a, b in zip(before, allocator(cache.release(jnp.array([True, True]))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_prefill_holds_no_more_than_it_must():
    """The pool has room for the live entries and the pages that they begin, and a far longer prompt goes through it."""
    case = random_case(np.random.default_rng(4), length=200, window=8, shift=1)
    case.evict[:] = np.arange(200) % 10 != 0
    live = case.expected()[1]
    heads = 8
    pages = int(max(-(-x // 4) for x in live.max((1, 2, 3))[15::16])) * heads + heads
    assert pages * 4 * 3 < 200 * heads
    cache = make(case, paged, pages=pages)
    check_against(case, paged, cache, [16] * 12 + [8])


def test_a_full_pool_is_counted_and_harms_no_one():
    case = random_case(np.random.default_rng(6), window=4, shift=1, rate=0)
    case.valid[1, 10:] = False
    _, cache = run(case, make(case, paged, pages=30), paged, [10, 10, 1])
    assert int(cache.lost) > 0 and int(cache.free_count) == 0
    lengths = np.asarray(cache.lengths)
    assert (lengths[:, 1] == 10).all()
    poison(cache)
    # The row that was stored in time is intact.
    wide, _ = run(case, make(case, paged), paged, [10, 10, 1])
    case.valid[:] = [[False] * 40, [True] * 40]
    case.q, case.k, case.v, case.evict = (x[:, :, :, 30:] for x in (case.q, case.k, case.v, case.evict))
    case.valid = case.valid[:, 30:]
    full = dataclasses.replace(cache, lost=jnp.int32(0))
    room = full.release(jnp.array([True, False]))
    got, room = run(case, room, paged, [1] * 8)
    assert int(room.lost) == 0 and np.isfinite(got).all() and np.isfinite(wide).all()


def test_growing_by_buckets_changes_nothing():
    case = random_case(np.random.default_rng(7), window=4, shift=1, rate=0.2)
    want, _ = case.expected()
    small = make(case, paged, pages=4)
    small = small.repack(jnp.arange(2), (4, 1))
    start, outs = 0, []
    for size in [7, 7, 9, *[1] * 9]:
        assert not bool(small.fits(999))
        with pytest.raises(capacity.CapacityError, match="the cache is full"):
            capacity.ensure(small, 999, "error")
        small = capacity.ensure(small, size)
        part = cut_columns(case, start, start + size)
        out, small = run(part, small, paged, [size])
        outs.append(out)
        start += size
    assert int(small.lost) == 0
    np.testing.assert_allclose(np.concatenate(outs, 3), want[:, :, :, :start], rtol=0, atol=1e-5)
    assert capacity.ensure(small, 1) is small or small.pages > 4


def test_evicting_for_room_keeps_the_window_and_counts():
    case = random_case(np.random.default_rng(8), length=60, window=4, shift=1, rate=0)
    cache = make(case, paged, pages=40)
    for start in range(0, 60, 6):
        cache = capacity.ensure(cache, 6, "evict")
        part = cut_columns(case, start, start + 6)
        out, cache = run(part, cache, paged, [6])
        assert int(cache.lost) == 0 and np.isfinite(out).all()
    trimmed, lengths = np.asarray(cache.trimmed), np.asarray(cache.lengths)
    assert trimmed.sum() > 0
    np.testing.assert_array_equal(trimmed + lengths, 60)
    # The newest window + 1 tokens are there, each in the slot that the ring names.
    for layer in range(2):
        k = np.asarray(paged.entries(cache, layer)[0])
        for b, h in np.ndindex(2, 2):
            for position in range(55, 60):
                slot = int(cache.ring[layer, b, h, position % 5])
                np.testing.assert_allclose(k[b, h, slot], case.k[layer, b, h, position], rtol=1e-6)
    with pytest.raises(capacity.CapacityError, match="nothing outside the window"):
        capacity.ensure(cache, 100, "evict")
    np.testing.assert_array_equal(np.asarray(cache.trimmed), trimmed)  # refused, it is as before
    with pytest.raises(ValueError, match="when_full"):
        capacity.ensure(make(case, paged), 1, "shrink")


def test_dense_cache_grows_and_counts():
    case = random_case(np.random.default_rng(9), window=4, shift=1)
    cache = make(cut_columns(case, 0, 8), dense)
    with pytest.raises(capacity.CapacityError, match="it can only grow"):
        capacity.ensure(cache, 20, "error")
    _, lost = run(cut_columns(case, 0, 23), jax.tree.map(jnp.copy, cache), dense, [23], poisoned=False)
    assert int(lost.lost) == 2 * 2 * 2 * (23 - 8)
    check_against(cut_columns(case, 0, 32), dense, capacity.ensure(cache, 32), chunkings(23, 32, 7))


def test_forked_sequences_go_on_independently():
    case = random_case(np.random.default_rng(10), window=4, shift=1)
    first = cut_columns(case, 0, 23)
    _, cache = run(first, make(case, paged), paged, [23])
    kept = jax.tree.map(np.asarray, cache)
    forked = capacity.fork(cache, [1, 0, 1], tokens=9)
    three = dataclasses.replace(
        case,
        **{x: getattr(case, x)[:, [1, 0, 1]].copy() for x in ("q", "k", "v", "evict")},
        valid=case.valid[[1, 0, 1]],
    )
    for x in (three.q, three.k, three.v):
        x[:, 2, :, 23:] = np.random.default_rng(11).normal(size=x[:, 2, :, 23:].shape)
    want, live = three.expected()
    got, forked = run(cut_columns(three, 23, 32), forked, paged, [1] * 9)
    np.testing.assert_allclose(got, want[:, :, :, 23:32], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(forked.lengths), live[31])
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, cache))
    with pytest.raises(ValueError, match="rows must name"):
        capacity.fork(cache, [2])


def test_dropping_slots():
    """What budgeted policies need: any slot may go."""
    rng = np.random.default_rng(12)
    case = random_case(rng, layers=1, window=None, shift=0, length=30)
    _, cache = run(cut_columns(case, 0, 20), make(case, paged), paged, [20])
    mask = rng.uniform(size=(2, 2, cache.slots)) < 0.5
    held = [[set(range(20)) - set(np.flatnonzero(mask[b, h]).tolist()) for h in range(2)] for b in range(2)]
    cache = poison(jax.jit(paged.drop)(cache, 0, jnp.asarray(mask)))
    for t in range(20, 30):
        for b, h in np.ndindex(2, 2):
            held[b][h].add(t)
        q, k, v = (jnp.asarray(x[0, :, :, t : t + 1], F32) for x in (case.q, case.k, case.v))
        out, cache = cache.attend(0, q, k, v, None, jnp.ones((2, 1), bool), scale=0.3)
        cache = poison(cache.advance(jnp.ones((2, 1), bool)))
        k, v, _, used = (np.asarray(x) for x in paged.entries(cache, 0))
        seen = np.zeros((2, 2, 1, 30), bool)
        for b, h in np.ndindex(2, 2):
            seen[b, h, 0, sorted(held[b][h])] = True
            assert int(cache.lengths[0, b, h]) == len(held[b][h]) == used[b, h].sum()
            for mine, given in ((k, case.k), (v, case.v)):
                got = sorted(mine[b, h][used[b, h]].tolist())
                np.testing.assert_allclose(got, sorted(given[0, b, h, sorted(held[b][h])].tolist()), rtol=1e-6)
        want = masked_attention(np.asarray(q), case.k[0], case.v[0], seen, 0.3)
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("quantisation", "limit"), [("int8", 0.01), ("float8_e4m3", 0.06)])
def test_eight_bit_pages(quantisation, limit):
    """Composed with eviction; the error of the outputs, relative to their size, stays at that of the format."""
    case = random_case(np.random.default_rng(13), window=4, shift=1, dim=64)
    cache = make(case, paged, quantisation=quantisation)
    want, live = case.expected()
    got, cache = run(case, cache, paged, chunkings(23, 32, 7))
    want = want[:, :, :, :32]
    error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
    assert 0 < error < limit, error
    np.testing.assert_array_equal(np.asarray(cache.lengths), live[31])
    plain = make(case, paged, dtype=jnp.bfloat16)
    assert report.page_bytes(cache) * 1.7 < report.page_bytes(plain)
    with pytest.raises(ValueError, match="quantisation must be"):
        make(case, paged, quantisation="int4")


def test_report_counts_bytes_of_arrays():
    case = random_case(np.random.default_rng(14), window=4, shift=1, pads={1: slice(0, 9)})
    _, cache = run(case, make(case, paged), paged, chunkings(23, 32, 7))
    found = report.report(cache)
    np.testing.assert_array_equal(found.seen, [32, 23])
    np.testing.assert_array_equal(found.live, case.expected()[1][31])
    assert found.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    free = int(cache.free_count) * 4 * (8 * 4 * 2 + 4)
    assert found.used == found.nbytes - free
    assert found.dense_nbytes == 2 * 2 * (32 + 23) * 2 * 8 * 4
    assert found.cr_physical == found.dense_nbytes / found.used
    by_key = case.evict[..., 1:32].copy()
    by_key[:, 1, :, :9] = False
    kept = 1 - by_key.sum(-1) / np.array([32, 23])[None, :, None]
    assert found.cr_nominal == pytest.approx(1 / kept.mean())
    _, whole = run(case, make(case, dense), dense, chunkings(23, 32, 7))
    baseline = report.report(whole)
    assert baseline.cr_nominal == found.cr_nominal and baseline.used == baseline.nbytes
    assert report.report(make(case, paged)).cr_nominal == 1


# Compilation


def test_a_hundred_steps_are_one_compilation():
    case = random_case(np.random.default_rng(15), length=101, window=4, shift=1)
    with CountCompilations() as count:
        run(case, make(case, paged), paged, [1] * 101, poisoned=False)
    assert count.of("forward") == 1


@pytest.mark.parametrize(
    ("quantisation", "local"), [(None, None), (None, (3, None)), ("int8", None), ("float8_e4m3", None)]
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_no_step_copies_the_pool(quantisation, tokens, local):
    """In a donated while loop of steps, each a scan over the layers, the compiled program has no copy of a pool."""
    case = random_case(np.random.default_rng(16), length=tokens, window=4, shift=1)
    spec = case.spec() if local is None else dataclasses.replace(case.spec(), local_windows=local)
    cache = paged.init(spec, 2, pages=77, width=9, page=4, quantisation=quantisation)

    def steps(cache, q, k, v, evict):
        def step(state):
            i, cache, _ = state
            windows = None if local is None else jnp.asarray([NEVER if x is None else x for x in local], jnp.int32)
            cache, out = forward(cache, q, k, v, evict, jnp.ones((2, tokens), bool), windows, scale=0.3)
            return i + 1, cache, out

        return jax.lax.while_loop(lambda s: s[0] < 5, step, (0, cache, jnp.zeros(q.shape)))

    arrays = (jnp.asarray(x, F32) for x in (case.q, case.k, case.v))
    lowered = jax.jit(steps, donate_argnums=(0,)).lower(cache, *arrays, jnp.asarray(case.evict))
    assert not copies(lowered.compile().as_text(), 77)


# Bad arguments


def test_bad_arguments():
    case = random_case(np.random.default_rng(17), window=4, shift=1)
    with pytest.raises(ValueError, match="window must be"):
        dataclasses.replace(case.spec(), window=-1)
    with pytest.raises(ValueError, match="shift must be"):
        dataclasses.replace(case.spec(), shift=2)
    with pytest.raises(ValueError, match="1 local_windows do not fit 2 layers"):
        dataclasses.replace(case.spec(), local_windows=(3,))
    with pytest.raises(ValueError, match="at least 1"):
        paged.init(case.spec(), 2, pages=0, width=1)
    one = [jnp.asarray(x[0, :, :, :1], F32) for x in (case.q, case.k, case.v)]
    flags, valid = jnp.ones((2, 2, 1), bool), jnp.ones((2, 1), bool)
    never = paged.init(dataclasses.replace(case.spec(), window=None), 2, pages=9, width=9)
    with pytest.raises(ValueError, match="never evicts"):
        never.attend(0, *one, flags, valid, scale=1.0)
    with pytest.raises(ValueError, match="without sliding windows"):
        never.attend(0, *one, None, valid, scale=1.0, local_window=jnp.int32(4))
    with pytest.raises(ValueError, match="does not select"):
        paged.held(make(case, paged), 0, *one[:2], valid, 1.0)

"""The visibility rule against a plain Python statement of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.visibility import NEVER, PADDING, decisions_by_key, expires, log_visibility, visible


def rule(q: int, k: int, evict: bool, window: int, local: int | None) -> bool:
    """METHOD (V) and the model's own sliding window."""
    return k <= q and (not evict or q - k <= window) and (local is None or q - k < local)


@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(0, 14),
    st.one_of(st.none(), st.integers(1, 14), st.just(NEVER)),
    st.integers(0, 1000),
)
def test_hard_rule(evict: list[bool], window: int, local: int | None, start: int) -> None:
    positions = jnp.arange(len(evict), dtype=jnp.int32) + start
    last = expires(positions, jnp.asarray(evict), window, local)
    assert last.dtype == jnp.int32
    seen = visible(positions[:, None], positions[None], last[None])
    wanted = [[rule(q, k, e, window, local) for k, e in enumerate(evict)] for q in range(len(evict))]
    np.testing.assert_array_equal(seen, wanted)


def test_expires_does_not_overflow() -> None:
    far = jnp.asarray([NEVER - 3], jnp.int32)
    assert expires(far, jnp.asarray([False]), 0, 100)[0] == NEVER
    assert expires(far, jnp.asarray([False]), 0)[0] == NEVER


def test_decisions_reach_their_key_and_no_other_segment() -> None:
    emitted = jnp.asarray([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    segments = jnp.asarray([[0, 0, 1, 1, PADDING]])
    np.testing.assert_array_equal(decisions_by_key(emitted, 0, 0.0, segments), emitted)
    np.testing.assert_array_equal(decisions_by_key(emitted, 1, 0.0), [[[2, 3, 4, 5, 0]]])
    np.testing.assert_array_equal(decisions_by_key(emitted, 1, 0.0, segments), [[[2, 0, 4, 0, 0]]])
    np.testing.assert_array_equal(decisions_by_key(emitted[:, :, :1], 1, 0.0, segments[:, :1]), [[[0]]])
    with pytest.raises(ValueError, match="shift must be 0 or 1"):
        decisions_by_key(emitted, 2, 0.0)


def test_log_visibility_soft_and_hard_agree_in_the_limit() -> None:
    logits = jnp.asarray([[[-1e4, 1e4, 2.0, -2.0]]])
    soft = log_visibility(logits, 0)
    np.testing.assert_allclose(soft, [[[0.0, -1e4, -np.log1p(np.exp(2.0)), -np.log1p(np.exp(-2.0))]]], rtol=1e-6)
    hard = log_visibility(logits, 0, hard=True)
    np.testing.assert_array_equal(hard, [[[0.0, -np.inf, -np.inf, 0.0]]])
    # A tie is kept: evict means strictly positive.
    np.testing.assert_array_equal(log_visibility(jnp.zeros((1, 1, 1)), 0, hard=True), [[[0.0]]])

"""Attention within a chunk against its definition: padding, expiry dates and queries wider than a block."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.blockwise import reference, xla
from kernels.partial import normalise
from kernels.visibility import NEVER


@pytest.mark.parametrize(("length", "groups"), [(7, 1), (65, 3), (600, 2)])
def test_chunk_attention_equals_its_definition(length: int, groups: int) -> None:
    rng = np.random.default_rng(length)
    batch, heads, dim = 2, 2, 8
    q = rng.normal(size=(batch, heads * groups, length, dim))
    k, v = rng.normal(size=(2, batch, heads, length, dim))
    # Left and right padding, which holds what is not a number; half of the keys expire after three more queries.
    valid = np.ones((batch, length), bool)
    valid[0, : length // 3] = valid[1, length - 2 :] = False
    k[~np.broadcast_to(valid[:, None], k.shape[:3])] = np.nan
    v[~np.broadcast_to(valid[:, None], v.shape[:3])] = np.nan
    positions = 11 + np.cumsum(valid, 1) - 1
    flagged = rng.random((batch, heads, length)) < 0.5
    expires = np.where(flagged, positions[:, None] + 3, NEVER)
    floats = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    rest = (jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.asarray(expires, jnp.int32))
    ours, theirs = (
        np.asarray(normalise(module.chunk_attention(*floats, *rest, scale=0.35))) for module in (xla, reference)
    )
    seen = np.broadcast_to(valid[:, None], ours.shape[:3])
    np.testing.assert_allclose(ours[seen], theirs[seen], rtol=1e-5, atol=1e-5)

"""Cached replay against whole sequences for shapes that no golden has: odd heads, window 0, prompts within it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.models import decoder
from kvsparse_jax.models.families import read_config

# family, query heads, KV heads, head_dim, window, shift, tied head, DMS variant
SHAPES = [
    ("llama", 5, 1, 10, 0, 1, True, "adapter"),
    ("qwen3", 3, 3, 14, 2, 0, False, "neuron"),
    ("qwen2", 7, 7, 6, 60, 1, True, "adapter"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}q{s[2]}kv-d{s[3]}-w{s[4]}-shift{s[5]}")
def test_replay_equals_whole_sequences(shape: Any) -> None:
    family, heads, kv_heads, head_dim, window, shift, tied, variant = shape
    config = read_config(
        dict(
            model_type=family,
            vocab_size=53,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=128,
            rms_norm_eps=1e-6,
            hidden_act="silu",
            rope_theta=1e4,
            tie_word_embeddings=tied,
        )
    )
    key = jax.random.key(heads)
    params = jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, decoder.init_params(config, key))
    policy = kvs.DMS.init(config, window=window, shift=shift, variant=variant, scale=20.0, offset=0.0)
    if variant == "adapter":
        proj = jax.random.normal(key, policy.params["proj"].shape) * 0.1
        policy = dataclasses.replace(policy, params={**policy.params, "proj": proj})
    lm = kvs.LM(config, params, policy)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 31))
    mask = np.ones(ids.shape, int)
    mask[1, :9] = 0
    whole = np.asarray(lm.logits(ids, mask))
    evicted = np.asarray(kvs.decision_logits(lm, ids, mask)) > 0
    assert 0.2 < evicted.mean() < 0.8
    for prefill, chunk in ((13, 5), (1, None)):
        replay = lm.replay(ids, attention_mask=mask, prefill=prefill, prefill_chunk=chunk)
        real = mask.astype(bool)
        np.testing.assert_allclose(np.asarray(replay.logits)[real], whole[real], rtol=0, atol=1e-5)

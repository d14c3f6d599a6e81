"""The training step: the original code's losses and gradients, and what they must not depend on."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvsparse_jax as kvs
from kernels.visibility import PADDING
from kvsparse_jax.models import decoder
from kvsparse_jax.models.sharding import make_mesh, sharding
from kvsparse_jax.whole import positions_of
from train import data, losses
from train import step as steps
from train.retrofit import loss_and_grads
from train.trainer import to_device

STEPS = [
    f"{name}_train_{kind}" for name in ("adapter", "adapter_layer", "borrowed") for kind in ("default", "mild")
]  # fmt: skip


@pytest.fixture(scope="session")
def load(golden_methods):
    return functools.cache(lambda name: kvs.load(golden_methods / "3_model" / name, dtype="float32"))


@pytest.mark.parametrize("case", STEPS)
def test_losses_and_gradients_are_the_originals(golden_methods, load, case):
    gold = np.load(golden_methods / "3_model" / f"{case}.npz")
    aux, grads = loss_and_grads(
        load(case.split("_train_")[0]),
        gold["input_ids"],
        gold["attention_mask"],
        noise=jnp.asarray(gold["noise"], jnp.float32),
        step=int(gold["step"]),
        initial_cr=float(gold["cr_initial"]),
        final_cr=float(gold["cr_final"]),
        final_step=int(gold["final_step"]),
        eos_token_id=int(gold["eos_token_id"]),
        window=int(gold["window"]),
        **{name: float(gold[name]) for name in ("scale", "offset", "tau")},
    )
    np.testing.assert_allclose(aux["loss"], gold["loss"], atol=2e-5)
    np.testing.assert_allclose(aux["distillation"], gold["distil_loss"], atol=2e-5)
    np.testing.assert_allclose(aux["budget"], gold["dms_loss"], atol=2e-5)
    np.testing.assert_allclose(aux["closed_fraction"], gold["dms_closed_frac"], atol=1e-6)
    names = [key.removeprefix("grad.") for key in gold.files if key.startswith("grad.")]
    assert names and set(names) == set(grads)
    close = 1e-3 if case.endswith("default") else 1e-4
    for name in names:
        np.testing.assert_allclose(grads[name], gold[f"grad.{name}"], atol=close, rtol=close, err_msg=name)


def test_loss_and_grads_needs_a_dms_policy(load):
    lm = load("adapter").with_policy(kvs.Dense())
    ids = np.ones((1, 4), int)
    with pytest.raises(kvs.InputError, match="Dense"):
        loss_and_grads(
            lm, ids, ids, noise=jnp.zeros(()), step=0, initial_cr=1, final_cr=2, final_step=1, scale=1, offset=0, tau=1,
            window=1, eos_token_id=0,
        )  # fmt: skip


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_does_not_depend_on_packing():
    """Two examples in one row, and each in a row of its own at other columns and in another order."""
    key, step = jax.random.key(3), jnp.int32(7)
    packed = jnp.asarray([[0] * 5 + [1] * 4])
    alone = jnp.asarray([[0] * 4 + [PADDING] * 5, [PADDING] * 2 + [0] * 5 + [PADDING] * 2])
    together = steps.gumbel_noise(
        key, step, jnp.asarray([[40] * 5 + [41] * 4]), positions_of(packed), 3, 2, jnp.float32
    )
    examples = jnp.asarray([[41] * 9, [40] * 9])
    apart = steps.gumbel_noise(key, step, examples, positions_of(alone), 3, 2, jnp.float32)
    assert together.shape == (3, 1, 2, 9)
    np.testing.assert_array_equal(together[:, 0, :, 5:], apart[:, 0, :, :4])
    np.testing.assert_array_equal(together[:, 0, :, :5], apart[:, 1, :, 2:7])


def test_noise_is_logistic_and_new_in_every_step():
    examples = jnp.arange(64, dtype=jnp.int32)[:, None] * jnp.ones((1, 64), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], (64, 64))
    noise = [
        steps.gumbel_noise(jax.random.key(0), jnp.int32(s), examples, positions, 2, 2, jnp.float32) for s in (0, 1)
    ]
    assert abs(float(noise[0].mean())) < 0.05
    assert float(noise[0].std()) == pytest.approx(np.pi / np.sqrt(3), rel=0.02)
    assert abs(np.corrcoef(np.ravel(noise[0]), np.ravel(noise[1]))[0, 1]) < 0.03
    assert abs(np.corrcoef(np.ravel(noise[0][0]), np.ravel(noise[0][1]))[0, 1]) < 0.03


# --- invariance ------------------------------------------------------------------------------------------------------


def batch_of(config, rows=4, length=24, seed=0):
    """Packed rows of two or three segments, one with padding at its end."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, config.vocab_size, (rows, length)).astype(np.int32)
    segments = np.zeros((rows, length), np.int32)
    for row in range(rows):
        segments[row, 9 + row :] = 1
    segments[0, 20:] = PADDING
    examples = np.where(segments == PADDING, PADDING, segments + 10 * np.arange(rows)[:, None]).astype(np.int32)
    return data.Batch(ids, segments, np.zeros_like(ids), examples)


class Setup:
    """A tiny model with random adapters, and one SGD step of it: the change of the weights is the gradient."""

    def __init__(self, lm, **objective):
        self.lm = lm
        policy = dataclasses.replace(lm.policy, window=4, scale=3.0, offset=0.5, tau=0.7)
        self.policy = dataclasses.replace(policy, params=None)
        self.trainable = {"policy": policy.params}
        self.frozen = {"model": lm.params}
        self.teacher = None
        self.objective = steps.Objective(eos_token_ids=(2,), dtype=jnp.float32, **objective)

    def run(self, batch, *, accumulate=1, mesh=None, healthy=None, **objective):
        optimizer = optax.sgd(1.0)
        chosen = dataclasses.replace(self.objective, **objective)
        schedule = losses.Schedule(2.0, 4.0, 10)
        step = steps.make_step(self.lm.config, chosen, optimizer, schedule, mesh=mesh)
        mesh = mesh or make_mesh()
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec()))
        axes = decoder.logical_axes(self.lm.config)
        trainable = jax.tree.map(jnp.array, self.trainable)
        state = place(steps.State(trainable, optimizer.init(trainable), jnp.int32(3)))
        model = jax.tree.map(
            lambda a, x: jax.device_put(x, sharding(mesh, a, x.shape)), axes, self.frozen["model"],
            is_leaf=lambda a: isinstance(a, tuple),
        )  # fmt: skip
        weights = {**self.frozen, "model": model}, place(self.teacher)
        placed = to_device(batch, mesh, accumulate)
        state, metrics = step(state, *weights, self.policy, placed, jax.random.key(1), healthy)
        grads = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), self.trainable, state.trainable)
        return jax.tree.map(float, metrics), grads, state


@pytest.fixture(scope="session")
def setup(load):
    return Setup(load("adapter"))


@pytest.fixture(scope="session")
def whole(setup):
    return functools.cache(lambda budget: setup.run(batch_of(setup.lm.config), budget=budget))


def same(one, other, tolerance=2e-5):
    for name, a, b in zip(one[0]._fields, one[0], other[0], strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance), name
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one[1]))
    assert largest > 1e-3
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, largest), rtol=0)


@pytest.mark.parametrize(("budget", "accumulate"), [("row", 4), ("global", 2)])
def test_accumulation_changes_nothing(setup, whole, budget, accumulate):
    assert whole(budget)[0].budget > 0
    same(whole(budget), setup.run(batch_of(setup.lm.config), accumulate=accumulate, budget=budget))


@pytest.mark.parametrize(("budget", "shape"), [("row", (2, 2, 1)), ("global", (2, 2, 1)), ("row", (1, 2, 2))])
def test_number_of_devices_changes_nothing(setup, whole, budget, shape):
    mesh = make_mesh(*shape)
    same(whole(budget), setup.run(batch_of(setup.lm.config), mesh=mesh, budget=budget))


def test_packing_changes_nothing_with_the_global_budget(setup, whole):
    """Each segment of the packed batch in a row of its own."""
    packed = batch_of(setup.lm.config)
    rows = []
    for row in range(packed.input_ids.shape[0]):
        for segment in (0, 1):
            at = np.flatnonzero(packed.segment_ids[row] == segment)
            ids, segments = np.zeros(24, np.int32), np.full(24, PADDING, np.int32)
            examples = np.full(24, PADDING, np.int32)
            ids[: len(at)], segments[: len(at)] = packed.input_ids[row, at], 0
            examples[: len(at)] = packed.example_ids[row, at]
            rows.append((ids, segments, np.zeros(24, np.int32), examples))
    apart = data.Batch(*(np.stack(column) for column in zip(*rows, strict=True)))
    one, other = whole("global"), setup.run(apart, budget="global")
    # The released count of closed gates is over all columns, so that one figure may differ.
    same((one[0]._replace(closed_fraction=other[0].closed_fraction), *one[1:]), other)


@pytest.mark.parametrize("objective", [{"remat": "full"}, {"remat": "attention"}])
def test_how_it_is_computed_changes_nothing(setup, whole, objective):
    same(whole("row"), setup.run(batch_of(setup.lm.config), **objective))


def test_teacher_is_the_given_one(setup):
    """With a teacher of other weights the distillation does not vanish even when nothing is evicted."""
    batch = batch_of(setup.lm.config, rows=2)
    kept = dataclasses.replace(setup.policy, offset=1e4)
    other = Setup(setup.lm)
    other.policy = kept
    assert other.run(batch)[0].distillation == pytest.approx(0, abs=1e-6)
    other.teacher = decoder.init_params(setup.lm.config, jax.random.key(0))
    assert other.run(batch)[0].distillation > 0.01


def test_hard_mask_sends_no_distillation_into_the_gate(setup):
    """The budget's gradient is all that is left; where it is met there is none."""
    batch = batch_of(setup.lm.config)
    met = dataclasses.replace(setup.policy, offset=-50.0)
    hard = Setup(setup.lm, mask="hard")
    hard.policy = met
    metrics, grads, _ = hard.run(batch)
    assert metrics.budget == 0 and metrics.distillation > 0
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) < 1e-7


def test_nothing_changes_in_a_step_that_is_not_finite(setup):
    broken = Setup(setup.lm)
    broken.trainable = jax.tree.map(lambda a: a.at[0].set(jnp.nan), setup.trainable)
    metrics, _, state = broken.run(batch_of(setup.lm.config, rows=2))
    assert not metrics.finite
    assert int(state.step) == 3
    for old, new in zip(jax.tree.leaves(broken.trainable), jax.tree.leaves(state.trainable), strict=True):
        np.testing.assert_array_equal(old, new)


def test_nothing_changes_after_a_step_that_was_not_finite(setup):
    metrics, _, state = setup.run(batch_of(setup.lm.config, rows=2), healthy=jnp.asarray(False))
    assert np.isfinite(metrics.loss) and not metrics.finite
    assert int(state.step) == 3
    for old, new in zip(jax.tree.leaves(setup.trainable), jax.tree.leaves(state.trainable), strict=True):
        np.testing.assert_array_equal(old, new)


# --- compiling -------------------------------------------------------------------------------------------------------


def test_compile_time_does_not_grow_with_depth(load):
    """Instructions of the compiled step, 64 layers against 4: what compile time is made of, whatever else runs here."""

    def instructions(layers):
        config = dataclasses.replace(load("adapter").config, layers=layers, local_windows=(None,) * layers)
        params = decoder.abstract_params(config)
        policy = kvs.DMS.init(config, window=4)
        optimizer = optax.adamw(1e-3)
        trainable = {"policy": policy.params}
        state = steps.State(trainable, optimizer.init(trainable), jnp.int32(0))
        objective = steps.Objective(dtype=jnp.float32)
        step: Any = steps.make_step(config, objective, optimizer, losses.Schedule(1.0, 4.0, 10))
        batch = jax.tree.map(jnp.asarray, batch_of(config, rows=2))
        ids = [a[None] for a in (batch.input_ids, batch.segment_ids, batch.example_ids)]
        arguments = (state, {"model": params}, None, dataclasses.replace(policy, params=None), steps.Batch(*ids))
        lowered = step.lower(*arguments, jax.random.key(0))
        return lowered.as_text().count("\n"), lowered.compile().as_text().count(" = ")

    shallow, deep = instructions(4), instructions(64)
    assert deep[0] <= 1.05 * shallow[0]
    assert deep[1] <= 1.5 * shallow[1]

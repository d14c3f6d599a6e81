"""Losses of the retrofit: the original code's numbers, and the fused distillation against the plain one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.visibility import PADDING
from train import losses

CASES = ["loss_0_full", "loss_1_partial", "loss_2_partial", "loss_3_single", "loss_4_empty"]


@pytest.mark.parametrize("case", CASES)
def test_distillation_is_the_originals(golden_methods, case):
    gold = np.load(golden_methods / "4_distill" / f"{case}.npz")
    teacher, mask = jnp.asarray(gold["teacher_logits"]), jnp.asarray(gold["loss_mask"])
    value, grad = jax.value_and_grad(losses.distillation)(jnp.asarray(gold["student_logits"]), teacher, mask)
    np.testing.assert_allclose(value, gold["loss"], atol=2e-6)
    np.testing.assert_allclose(grad, gold["grad_student"], atol=2e-6)
    other = losses.distillation(jnp.asarray(gold["student_logits"]), teacher, mask, direction="teacher_student")
    np.testing.assert_allclose(other, gold["other_direction_kl_teacher_student"], atol=2e-6)


def test_budget_is_the_originals(golden_methods):
    gold = np.load(golden_methods / "4_distill" / "hinge.npz")
    decisions = jnp.asarray(gold["decisions"], jnp.float32)
    for target, wanted, slope in zip(gold["target"], gold["dms_loss"], gold["grad_frac"], strict=True):
        value, grad = jax.value_and_grad(losses.budget)(decisions, float(target))
        np.testing.assert_allclose(value, wanted, atol=1e-6)
        # The golden gradient is that of each row's fraction.
        np.testing.assert_allclose(grad.sum((0, 2, 3)), slope, atol=1e-6)


def test_schedule_is_the_originals(golden_methods):
    rows = json.loads((golden_methods / "4_distill" / "schedule.json").read_text())
    rows = [row for row in rows if row["final_step"]]
    assert rows
    for row in rows:
        setting = (row["initial_cr"], row["final_cr"], row["final_step"])
        fraction, ratio = losses.cr_schedule(row["step"], *setting)
        traced = losses.cr_schedule(jnp.int32(row["step"]), *setting)
        np.testing.assert_allclose((fraction, ratio), (row["target_fraction"], row["cr"]), rtol=1e-12)
        np.testing.assert_allclose(traced, (row["target_fraction"], row["cr"]), rtol=1e-5, atol=1e-6)


def test_unknown_direction_is_refused():
    with pytest.raises(ValueError, match="student_teacher, teacher_student"):
        losses.distillation(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2)), jnp.ones((1, 1)), direction="sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", losses.DIRECTIONS)
@pytest.mark.parametrize("chunk", [None, 8, 5])
def test_fused_distillation_equals_the_plain_one(direction, chunk):
    """Value and gradients, also the head's; 19 tokens fill no chunk evenly."""
    keys = jax.random.split(jax.random.key(0), 5)
    student, teacher = (jax.random.normal(k, (2, 19, 12)) for k in keys[:2])
    head, teacher_head = (jax.random.normal(k, (12, 33)) for k in keys[2:4])
    mask = jax.random.bernoulli(keys[4], 0.7, (2, 19))

    def plain(student, head):
        return losses.distillation(student @ head, teacher @ teacher_head, mask, direction)

    def fused(student, head):
        weights = mask.astype(jnp.float32) / mask.sum().astype(jnp.float32)
        return losses.distillation_sum(
            student, teacher, head, teacher_head, weights, direction=direction, train_head=True, chunk=chunk
        )

    wanted, wanted_grads = jax.value_and_grad(plain, (0, 1))(student, head)
    value, grads = jax.value_and_grad(fused, (0, 1))(student, head)
    np.testing.assert_allclose(value, wanted, rtol=2e-6)
    for grad, other in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(grad, other, atol=2e-6)
    frozen = jax.grad(lambda s: losses.distillation_sum(s, teacher, head, teacher_head, mask.astype(jnp.float32)))(
        student
    )
    assert np.isfinite(frozen).all()


def test_fused_distillation_holds_no_array_of_all_logits():
    """No [B, T, V] in the compiled loss and gradient: the largest buffer is a chunk of logits."""
    length, vocab = 4096, 1000

    def loss(student, head):
        weights = jnp.ones((1, length), jnp.float32)
        return losses.distillation_sum(student, student, head, head, weights, chunk=64)

    compiled = jax.jit(jax.grad(loss)).lower(jnp.zeros((1, length, 8)), jnp.zeros((8, vocab))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * vocab * 4 / 4


def test_real_keys_leave_out_padding_and_strangers():
    """Two packed segments and padding: with shift 1 the last key of a segment has no decision and counts as kept."""
    segments = jnp.asarray([[0, 0, 0, 1, 1, PADDING]])
    decisions = jnp.ones((2, 1, 3, 6))
    evicted, keys = losses.evicted_real_keys(decisions, 1, segments)
    assert (float(evicted[0]), float(keys[0])) == (2 * 3 * 3, 2 * 3 * 5)
    evicted, _ = losses.evicted_real_keys(decisions, 0, segments)
    assert float(evicted[0]) == 2 * 3 * 5


def test_straight_through_is_hard_forward_and_soft_backward():
    gate = jnp.asarray([-1.0, 0.5, 3.0])
    value, vjp = jax.vjp(losses.straight_through, gate)
    np.testing.assert_allclose(value, [0, 1, 1], atol=1e-6)
    soft = jax.nn.sigmoid(gate)
    np.testing.assert_allclose(vjp(jnp.ones(3))[0], soft * (1 - soft), rtol=1e-6)

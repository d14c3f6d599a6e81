"""Losses of the DMS retrofit (arXiv 2506.05345, section 3.2): logit distillation, eviction budget, CR schedule.

Distillation on whole logits is the contract (:func:`distillation`); training uses :func:`distillation_sum`, which never
holds the logits of more than a chunk of tokens and computes the gradient in the same pass.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator
from kernels.visibility import PADDING, decisions_by_key

Direction = Literal["student_teacher", "teacher_student"]
DIRECTIONS: tuple[Direction, ...] = ("student_teacher", "teacher_student")


def kl_divergence(student_logits: Array, teacher_logits: Array, direction: Direction) -> Array:
    """KL divergence per token over the whole vocabulary.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V].
        direction: "student_teacher" is KL(student || teacher), what the released code minimises and calls forward;
            "teacher_student" is KL(teacher || student).

    Returns:
        [...] at least float32, natural log.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {direction!r}")
    acc = accumulator(student_logits.dtype)
    log_s = jax.nn.log_softmax(student_logits.astype(acc), -1)
    log_t = jax.nn.log_softmax(teacher_logits.astype(acc), -1)
    if direction == "student_teacher":
        return jnp.sum(jnp.exp(log_s) * (log_s - log_t), -1)
    return jnp.sum(jnp.exp(log_t) * (log_t - log_s), -1)


def distillation(
    student_logits: Array, teacher_logits: Array, mask: Array, direction: Direction = "student_teacher"
) -> Array:
    """Mean KL divergence over the counted tokens; 0 when none counts.

    Args:
        student_logits: [B, T, V].
        teacher_logits: [B, T, V].
        mask: [B, T], true where the token counts.
        direction: see :func:`kl_divergence`.

    Returns:
        Scalar.
    """
    kl = kl_divergence(student_logits, teacher_logits, direction)
    weight = mask.astype(kl.dtype)
    return jnp.sum(kl * weight) / jnp.maximum(jnp.sum(weight), jnp.ones((), kl.dtype))


def budget(decisions: Array, target: Array | float) -> Array:
    """Released budget loss: how far each row's evicted fraction falls short of the target, averaged over rows.

    Args:
        decisions: [L, B, H, T], 0 or 1 with a straight-through gradient.
        target: wished evicted fraction, 1 - 1/CR.

    Returns:
        Scalar ``mean_b max(target - mean_{l,h,t} decisions, 0)``.
    """
    short = jnp.asarray(target, decisions.dtype) - decisions.mean((0, 2, 3))
    return jnp.maximum(short, jnp.zeros_like(short)).mean()


def straight_through(gate: Array) -> Array:
    """Hard decisions 1[sigmoid(gate) > 0.5] whose gradient is that of the sigmoid."""
    soft = jax.nn.sigmoid(gate)
    hard = (soft > 0.5).astype(soft.dtype)
    return hard - lax.stop_gradient(soft) + soft


def evicted_real_keys(decisions: Array, shift: int, segment_ids: Array) -> tuple[Array, Array]:
    """Sum of the decisions about real keys and the number of real keys, each per row [B].

    Unlike the released count this one leaves out padding and decisions that refer to no key of their segment, so it
    does not change with packing. A key without a decision counts as kept.

    Args:
        decisions: [L, B, H, T] as emitted.
        shift: see :func:`kernels.visibility.decisions_by_key`.
        segment_ids: [B, T] int32.
    """
    layers, _, heads, _ = decisions.shape
    by_key = jax.vmap(lambda d: decisions_by_key(d, shift, 0.0, segment_ids))(decisions)
    real = (segment_ids > PADDING).astype(decisions.dtype)
    return (by_key * real[None, :, None]).sum((0, 2, 3)), real.sum(1) * float(layers * heads)


class Schedule(NamedTuple):
    """Linear CR schedule.

    Attributes:
        initial_cr: compression ratio asked for at step 0, at least 1.
        final_cr: from ``final_step`` on.
        final_step: steps of the ramp.
    """

    initial_cr: float
    final_cr: float
    final_step: int


def cr_schedule(
    step: Array | int, initial_cr: float, final_cr: float, final_step: int
) -> tuple[Array | float, Array | float]:
    """Evicted fraction and compression ratio that the budget asks for at a step.

    Args:
        step: optimiser step, from 0.
        initial_cr, final_cr, final_step: see :class:`Schedule`.

    Returns:
        (1 - 1/CR, CR); Python floats for a Python step.
    """
    if isinstance(step, int):
        progress: Array | float = min(max(step / final_step, 0.0), 1.0)
    else:
        progress = jnp.clip(step.astype(jnp.float32) / jnp.float32(final_step), 0.0, 1.0)
    cr = initial_cr + (final_cr - initial_cr) * progress
    return 1.0 - 1.0 / cr, cr


_Sums = tuple[Array, Array | None, Array | None]


class _Kl(NamedTuple):
    direction: Direction
    chunk: int
    train_head: bool


def chunk_size(batch: int, vocab: int, limit: int = 2**23) -> int:
    """Tokens per row and chunk such that a chunk's float32 logits stay near ``limit`` entries (32 MB)."""
    return max(8, 1 << max(limit // (batch * vocab), 1).bit_length() - 1)


def distillation_sum(
    student: Array,
    teacher: Array,
    head: Array,
    teacher_head: Array,
    weights: Array,
    *,
    direction: Direction = "student_teacher",
    train_head: bool = False,
    chunk: int | None = None,
) -> Array:
    """Weighted sum of the KL divergence from hidden states, a chunk of tokens at a time.

    Logits of a chunk exist only inside the loop, and the gradient is computed in the same pass, so that nothing of size
    [B, T, V] is ever held.

    Args:
        student: [B, T, E] final hidden states; differentiable.
        teacher: [B, T, E]; no gradient.
        head: [E, V]; differentiable if ``train_head``.
        teacher_head: [E, V]; no gradient (pass ``head`` when it is the same).
        weights: [B, T] float32, weight of each token in the sum.
        direction: see :func:`kl_divergence`.
        train_head: return a gradient for ``head``.
        chunk: tokens per row and chunk; None chooses by size.

    Returns:
        Scalar float32.
    """
    batch, length, _ = student.shape
    chunk = min(chunk or chunk_size(batch, head.shape[1]), length)
    pad = -length % chunk
    if pad:
        student, teacher = (jnp.pad(x, [(0, 0), (0, pad), (0, 0)]) for x in (student, teacher))
        weights = jnp.pad(weights, [(0, 0), (0, pad)])
    setting = _Kl(direction, chunk, train_head)
    return _distillation_sum(setting, student, teacher, head, teacher_head, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distillation_sum(
    s: _Kl, student: Array, teacher: Array, head: Array, teacher_head: Array, weights: Array
) -> Array:
    return _sum_and_grads(s, student, teacher, head, teacher_head, weights, grads=False)[0]


def _sum_and_grads(
    s: _Kl,
    student: Array,
    teacher: Array,
    head: Array,
    teacher_head: Array,
    weights: Array,
    *,
    grads: bool,
) -> tuple[Array, Array | None, Array | None]:
    acc = accumulator(student.dtype)
    length = student.shape[1]

    def step(carry: _Sums, i: Array) -> tuple[_Sums, None]:
        total, d_student, d_head = carry
        at = i * jnp.int32(s.chunk)
        x, y, w = (lax.dynamic_slice_in_dim(a, at, s.chunk, 1) for a in (student, teacher, weights))
        log_s = jax.nn.log_softmax(jnp.matmul(x, head.astype(x.dtype), preferred_element_type=acc), -1)
        log_t = jax.nn.log_softmax(jnp.matmul(y, teacher_head.astype(y.dtype), preferred_element_type=acc), -1)
        p_s = jnp.exp(log_s)
        if s.direction == "student_teacher":
            difference = log_s - log_t
            kl = jnp.sum(p_s * difference, -1)
            d_logits = p_s * (difference - kl[..., None])
        else:
            p_t = jnp.exp(log_t)
            kl = jnp.sum(p_t * (log_t - log_s), -1)
            d_logits = p_s - p_t
        total = total + jnp.sum(kl * w.astype(acc))
        if grads:
            d_logits = (d_logits * w.astype(acc)[..., None]).astype(x.dtype)
            assert d_student is not None
            dx = jnp.matmul(d_logits, head.T.astype(x.dtype), preferred_element_type=acc).astype(x.dtype)
            d_student = lax.dynamic_update_slice_in_dim(d_student, dx, at, 1)
            if d_head is not None:
                d_head = d_head + jnp.einsum("bte,btv->ev", x, d_logits, preferred_element_type=acc)
        return (total, d_student, d_head), None

    start = (
        jnp.zeros((), acc),
        jnp.zeros_like(student) if grads else None,
        jnp.zeros(head.shape, acc) if grads and s.train_head else None,
    )
    (total, d_student, d_head), _ = lax.scan(step, start, jnp.arange(length // s.chunk, dtype=jnp.int32))
    return total, d_student, d_head


def _distillation_fwd(
    s: _Kl, student: Array, teacher: Array, head: Array, teacher_head: Array, weights: Array
) -> tuple[Array, tuple[Array | None, ...]]:
    total, d_student, d_head = _sum_and_grads(s, student, teacher, head, teacher_head, weights, grads=True)
    return total, (d_student, None if d_head is None else d_head.astype(head.dtype))


def _distillation_bwd(
    s: _Kl, residuals: tuple[Array, ...], cotangent: Array
) -> tuple[Array, None, Array | None, None, None]:
    d_student, d_head = residuals
    d_student = d_student * cotangent.astype(d_student.dtype)
    return d_student, None, None if d_head is None else d_head * cotangent.astype(d_head.dtype), None, None


_distillation_sum.defvjp(_distillation_fwd, _distillation_bwd)

"""One optimiser step of the DMS retrofit as a pure, jitted function: student, teacher, losses, accumulation, update."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kernels.delayed_eviction.api import SAVED
from kernels.visibility import PADDING
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.sharding import collect
from kvsparse_jax.policies import DMS, Dense
from kvsparse_jax.whole import attend, positions_of
from train import losses

Tree = dict[str, Any]
Remat = Literal["none", "attention", "full"]
REMATS: tuple[Remat, ...] = ("none", "attention", "full")


@dataclass(frozen=True)
class Objective:
    """What is minimised; static.

    Attributes:
        eos_token_ids: tokens that do not count as a query in the distillation.
        direction: see :func:`train.losses.kl_divergence`.
        budget: "row": the released hinge per batch row over all columns; "global": one hinge on the mean over the real
            keys of the global batch, which does not change with packing or accumulation.
        mask: "soft" weighs keys beyond the window by their gate; "hard" drops them (no gradient of the distillation
            reaches the gate: an ablation).
        teacher: "self": the student's own weights without eviction (as released; with a borrowed neuron the teacher
            lacks it too); "original": the untouched model.
        remat: what the backward pass recomputes: "none"; "attention": all of a layer but its attention; "full".
        dtype: compute dtype; None is that of the weights.
    """

    eos_token_ids: tuple[int, ...] = ()
    direction: losses.Direction = "student_teacher"
    budget: Literal["row", "global"] = "row"
    mask: Literal["soft", "hard"] = "soft"
    teacher: Literal["self", "original"] = "self"
    remat: Remat = "none"
    dtype: Any = None


class Batch(NamedTuple):
    """Tokens of one step, or of one micro-batch of it.

    Attributes:
        input_ids: [B, T] int32.
        segment_ids: [B, T] int32; PADDING where there is no token.
        example_ids: [B, T] int32, the document of each token: keys the noise, so that packing does not change it.
        loss_mask: [B, T] bool, tokens whose distillation may count; None: all that are no padding.
    """

    input_ids: Array
    segment_ids: Array
    example_ids: Array
    loss_mask: Array | None = None


class Metrics(NamedTuple):
    """Scalars of a step, float32.

    Attributes:
        loss: distillation + budget.
        distillation: mean KL over the counted tokens of the global batch.
        budget: budget loss.
        target_fraction: evicted fraction that the schedule asks for.
        closed_fraction: mean noisy decision over all columns, as released.
        evicted_fraction: decisions about real keys without noise: what evaluation would evict.
        grad_norm: global norm of the gradient before clipping.
        finite: whether loss and gradient are finite; if not, the step changed nothing.
    """

    loss: Array
    distillation: Array
    budget: Array
    target_fraction: Array
    closed_fraction: Array
    evicted_fraction: Array
    grad_norm: Array
    finite: Array


def merge(base: Tree, update: Tree) -> Tree:
    """``base`` with the leaves of ``update`` put in (nested dictionaries)."""
    out = dict(base)
    for key, value in update.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def gumbel_noise(
    key: Array, step: Array, example_ids: Array, positions: Array, layers: int, heads: int, dtype: DTypeLike
) -> Array:
    """Difference of two Gumbel(0, 1) variables (a logistic one) per decision, [L, B, H, T].

    Keyed by (seed, step, example, position, layer, head), so it depends neither on packing nor on batch composition.
    Sampled in float32: in bfloat16 the tails are cut (standard deviation 1.70 instead of 1.81).
    """
    at_step = jax.random.fold_in(key, step)

    def token(example: Array, position: Array) -> Array:
        at_token = jax.random.fold_in(jax.random.fold_in(at_step, example), position)
        return jax.random.logistic(at_token, (layers, heads), jnp.float32)

    noise = jax.vmap(jax.vmap(token))(example_ids, positions)
    return jnp.transpose(noise, (2, 0, 3, 1)).astype(dtype)


def _wrap(config: ModelConfig, remat: Remat, mesh: Mesh | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What happens around a layer: it is divided over the mesh, and computed again in the backward pass."""
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*SAVED) if remat == "attention" else policies.nothing_saveable
    divided = decoder.on_mesh(config, mesh)

    def wrap(layer: Callable[..., Any]) -> Callable[..., Any]:
        layer = divided(layer)
        return layer if remat == "none" else jax.checkpoint(layer, policy=policy, prevent_cse=False)

    return wrap


def hidden_states(
    params: Tree,
    config: ModelConfig,
    policy: DMS | Dense,
    batch: Batch,
    *,
    noise: Array | None,
    objective: Objective,
    remat: Remat,
    fade: Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[Array, Array | None]:
    """Final hidden states [B, T, E] and the decision logits [L, B, H, T] without noise (None: no decisions)."""
    hidden, _, gates = decoder.forward(
        params,
        config,
        policy,
        batch.input_ids,
        positions_of(batch.segment_ids),
        attend(
            config,
            policy,
            batch.segment_ids,
            hard=objective.mask == "hard",
            decide=policy.relax if isinstance(policy, DMS) else None,
            mesh=mesh,
        ),
        per_layer=noise,
        wrap=_wrap(config, remat, mesh),
        dtype=objective.dtype,
        fade=fade,
    )
    return hidden, gates


def counted(batch: Batch, objective: Objective) -> Array:
    """[B, T] bool: tokens whose distillation counts (no padding, no end of text)."""
    mask = batch.segment_ids > PADDING
    if batch.loss_mask is not None:
        mask = mask & batch.loss_mask
    for eos in objective.eos_token_ids:
        mask = mask & (batch.input_ids != eos)
    return mask


def _chunk(config: ModelConfig, rows: int, mesh: Mesh | None) -> int:
    """Tokens per row whose logits are formed at once.

    A chunk reads the head three times, so on an accelerator it must be large for products, not memory, to bound it; on
    a CPU its logits should stay in the cache.
    """
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    limit = 2**23 if platform == "cpu" else 2**26
    return losses.chunk_size(max(rows // ways, 1), config.vocab_size, limit)


class Totals(NamedTuple):
    """Sums over the global batch, of which every micro-batch needs its share.

    Attributes:
        tokens: counted tokens.
        rows: batch rows.
        keys: decisions about real keys (layers in which a policy may evict x KV heads x tokens).
        evicted: sum of the noisy ones, for the "global" budget over several micro-batches; None where the micro-batch
            is the global batch or the budget is per row.
    """

    tokens: Array
    rows: int
    keys: Array
    evicted: Array | None = None


def totals(config: ModelConfig, batch: Batch, objective: Objective) -> Totals:
    """What is known before any forward pass; the batch may have leading axes before [B, T]."""
    real = (batch.segment_ids > PADDING).sum().astype(jnp.float32)
    rows = int(batch.input_ids.size // batch.input_ids.shape[-1])
    return Totals(
        counted(batch, objective).sum().astype(jnp.float32), rows, real * float(len(config.evicting) * config.kv_heads)
    )


def micro_loss(
    trainable: Tree,
    frozen: Tree,
    teacher_params: Tree | None,
    config: ModelConfig,
    policy: DMS,
    objective: Objective,
    batch: Batch,
    noise: Array,
    target: Array,
    total: Totals,
    fade: Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[Array, dict[str, Array]]:
    """A micro-batch's share of the loss of the global batch; shares add up to the loss, and so do their gradients.

    Args:
        trainable: {"model": ..., "policy": ...}, the leaves that are trained.
        frozen: the rest.
        teacher_params: parameters of the teacher; None takes the student's as they are.
        config: static.
        policy: settings; its ``params`` come from the trees.
        objective: static.
        batch: the micro-batch.
        noise: [L, B, H, T].
        target: wished evicted fraction.
        total: sums over the global batch.
        fade: what is left of the student's borrowed channel, see :func:`kvsparse_jax.models.decoder.forward`.
        mesh: see :func:`make_step`.

    Returns:
        The share, and sums over the micro-batch: distillation and budget (shares of the loss), closed (share of the
        mean), evicted and keys (decisions about real keys without noise).
    """
    tree = merge(frozen, trainable)
    model = tree["model"]
    policy = dataclasses.replace(policy, params=tree.get("policy"))
    taught = lax.stop_gradient(model if teacher_params is None else teacher_params)
    lacks = config.borrowed_channel and objective.teacher == "self"
    teacher, _ = hidden_states(
        taught,
        dataclasses.replace(config, borrowed_channel=lacks),
        Dense(),
        batch,
        noise=None,
        objective=objective,
        remat="none",
        mesh=mesh,
    )
    student, gates = hidden_states(
        model, config, policy, batch, noise=noise, objective=objective, remat=objective.remat, fade=fade, mesh=mesh
    )
    train_head = bool({"embed", "head"} & set(trainable.get("model", {})))
    head, taught_head = (collect(mesh, decoder.head_kernel(x), ("embed", "vocab")) for x in (model, taught))
    kl = losses.distillation_sum(
        student,
        teacher,
        head,
        taught_head,
        counted(batch, objective).astype(jnp.float32) / jnp.maximum(total.tokens, jnp.float32(1.0)),
        direction=objective.direction,
        train_head=train_head,
        chunk=_chunk(config, batch.input_ids.shape[0], mesh),
    )
    zero = jnp.zeros((), kl.dtype)
    if gates is None:  # the borrowed channel's fading stage: distillation only
        return kl, {"distillation": kl, "budget": zero, "closed": zero, "evicted": zero, "keys": zero}
    gates, noise = (decoder.of_evicting(config, x) for x in (gates, noise))
    decisions = losses.straight_through(policy.relax(gates, noise))
    part = decisions.shape[1] / total.rows
    if objective.budget == "row":
        hinge = losses.budget(decisions, target) * part
    else:
        mine = losses.evicted_real_keys(decisions, policy.shift, batch.segment_ids)[0].sum()
        everywhere = lax.stop_gradient(mine if total.evicted is None else total.evicted)
        short = target - everywhere / total.keys
        hinge = jnp.where(short > 0, target * part - mine / total.keys, zero)
    hinge = hinge.astype(kl.dtype)
    evicted, keys = losses.evicted_real_keys((gates > 0).astype(gates.dtype), policy.shift, batch.segment_ids)
    return kl + hinge, {
        "distillation": kl,
        "budget": hinge,
        "closed": lax.stop_gradient(decisions).mean().astype(kl.dtype) * part,
        "evicted": evicted.sum(),
        "keys": keys.sum(),
    }


class State(NamedTuple):
    """What changes from step to step.

    Attributes:
        trainable: {"model": ..., "policy": ...}, float32.
        optimizer: optax state of ``trainable``.
        step: int32 scalar, optimiser steps done.
    """

    trainable: Tree
    optimizer: optax.OptState
    step: Array


Step = Callable[..., tuple[State, Metrics]]


def make_step(
    config: ModelConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: losses.Schedule,
    *,
    start: int = 0,
    mesh: Mesh | None = None,
    shardings: Any = None,
) -> Step:
    """Builds the jitted step.

    Args:
        config: static.
        objective: what is minimised.
        optimizer: for the trainable leaves.
        schedule: of the compression ratio.
        start: optimiser step at which the schedule starts (after a fading stage).
        mesh: devices that rows, weights and heads are divided over (:mod:`kvsparse_jax.models.sharding`); a layer's
            weights are whole along fsdp only while it is computed. None: one device.
        shardings: of (state, metrics), each may be a prefix; None leaves them to the compiler.

    Returns:
        ``step(state, frozen, teacher_params, policy, batch, key, healthy=None, fade=None) -> (state, metrics)`` with
        ``batch`` leaves [A, B, T]: A micro-batches whose losses and gradients add up to those of the one batch
        [A * B, T].
        ``state`` is donated. A step whose loss or gradient is not finite leaves the state as it was and says so in the
        metrics; so does every step with ``healthy`` (bool scalar) false, so that, with ``metrics.finite`` of the step
        before, nothing happens between a failure and the moment the host reads of it.
    """

    def step(
        state: State,
        frozen: Tree,
        teacher_params: Tree | None,
        policy: DMS,
        batch: Batch,
        key: Array,
        healthy: Array | None = None,
        fade: Array | None = None,
    ) -> tuple[State, Metrics]:
        target = jnp.asarray(losses.cr_schedule(state.step - jnp.int32(start), *schedule)[0], jnp.float32)
        total = totals(config, batch, objective)

        def noise_of(micro: Batch) -> Array:
            return gumbel_noise(
                key,
                state.step,
                micro.example_ids,
                positions_of(micro.segment_ids),
                config.layers,
                config.kv_heads,
                jnp.float32,
            )

        def loss(trainable: Tree, micro: Batch, total: Totals) -> tuple[Array, dict[str, Array]]:
            return micro_loss(
                trainable,
                frozen,
                teacher_params,
                config,
                policy,
                objective,
                micro,
                noise_of(micro),
                target,
                total,
                fade,
                mesh,
            )

        parts = batch.input_ids.shape[0]
        if objective.budget == "global" and parts > 1 and policy.enabled:
            # The hinge needs the evicted fraction of all micro-batches before the first gradient: one more pass.
            def evicted(carry: Array, micro: Batch) -> tuple[Array, None]:
                tree = merge(frozen, state.trainable)
                mine = dataclasses.replace(policy, params=tree.get("policy"))
                noise = noise_of(micro)
                _, gates = hidden_states(
                    tree["model"], config, mine, micro, noise=noise, objective=objective, remat="none", mesh=mesh
                )
                assert gates is not None
                decisions = losses.straight_through(
                    mine.relax(decoder.of_evicting(config, gates), decoder.of_evicting(config, noise))
                )
                return carry + losses.evicted_real_keys(decisions, mine.shift, micro.segment_ids)[0].sum(), None

            total = total._replace(evicted=lax.scan(evicted, jnp.zeros((), jnp.float32), batch)[0])

        def share(micro: Batch) -> tuple[tuple[Array, dict[str, Array]], Tree]:
            return jax.value_and_grad(loss, has_aux=True)(state.trainable, micro, total)

        # Zeros of the first share's shape to start from, so that the body is compiled once.
        shapes = jax.eval_shape(share, jax.tree.map(lambda a: a[0], batch))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        add = functools.partial(jax.tree.map, jnp.add)
        ((value, sums), grads), _ = lax.scan(lambda carry, micro: (add(carry, share(micro)), None), zeros, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        if healthy is not None:
            finite = finite & healthy
        # optax counts in int32 and multiplies with float32 without saying so.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.trainable)
            trainable = optax.apply_updates(state.trainable, updates)
        updated = State(trainable, optimizer_state, state.step + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        metrics = Metrics(
            loss=value,
            distillation=sums["distillation"],
            budget=sums["budget"],
            target_fraction=target,
            closed_fraction=sums["closed"],
            evicted_fraction=sums["evicted"] / jnp.maximum(sums["keys"], jnp.float32(1.0)),
            grad_norm=norm,
            finite=finite,
        )
        return kept, metrics

    return (
        jax.jit(step, donate_argnums=0)
        if shardings is None
        else jax.jit(step, donate_argnums=0, out_shardings=shardings)
    )

"""``python -m train.retrofit``: trains DMS eviction into a pretrained model. The loop is in ``train.trainer``."""

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kernels.visibility import PADDING
from kvsparse_jax import cli, distributed
from kvsparse_jax.errors import InputError
from kvsparse_jax.lm import LM
from kvsparse_jax.models import weights
from kvsparse_jax.policies import DMS
from train import config, losses
from train.step import Batch, Objective, micro_loss, totals


def loss_and_grads(
    lm: LM,
    input_ids: ArrayLike,
    attention_mask: ArrayLike,
    *,
    noise: Array,
    step: int,
    initial_cr: float,
    final_cr: float,
    final_step: int,
    scale: float,
    offset: float,
    tau: float,
    window: int,
    eos_token_id: int | tuple[int, ...],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Loss and gradient of one released training step with given noise: what the trainer minimises, to check against.

    The student is its own teacher (KL(student || teacher), per-row budget). The adapter variant trains its adapters,
    the neuron variant all weights.

    Args:
        lm: a model with a DMS policy.
        input_ids: [B, T].
        attention_mask: [B, T], 0 at padding.
        noise: [L, B, H, T], added to the decision logits before they are divided by tau.
        step, initial_cr, final_cr, final_step: see :func:`train.losses.cr_schedule`.
        scale, offset, tau, window: replace the policy's settings.
        eos_token_id: does not count as a query.

    Returns:
        {"loss", "distillation", "budget", "closed_fraction"} and {released parameter name: gradient in the
        checkpoint's orientation}.

    Raises:
        InputError: the model has no DMS policy, or the input does not fit it.
    """
    if not isinstance(lm.policy, DMS):
        raise InputError(f"loss_and_grads needs a model with a DMS policy, not {type(lm.policy).__name__}")
    _, segments = lm.check(input_ids, attention_mask)
    # The released step runs padding through the model like any token and leaves it out of the distillation alone.
    ids = jnp.asarray(np.asarray(input_ids).astype(np.int32))
    policy = dataclasses.replace(lm.policy, scale=scale, offset=offset, tau=tau, window=window, enabled=True)
    eos = (eos_token_id,) if isinstance(eos_token_id, int | np.integer) else tuple(eos_token_id)
    objective = Objective(eos_token_ids=eos)
    batch = Batch(ids, jnp.zeros_like(ids), jnp.zeros_like(ids), segments > PADDING)
    tree: dict[str, Any] = {"model": lm.params, "policy": policy.params}
    trained = ("policy",) if policy.variant == "adapter" else ("model",)
    trainable = {key: tree[key] for key in trained}
    frozen = {key: value for key, value in tree.items() if key not in trained}
    target = jnp.asarray(losses.cr_schedule(step, initial_cr, final_cr, final_step)[0], jnp.float32)

    def loss(trainable: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
        total = totals(lm.config, batch, objective)
        return micro_loss(trainable, frozen, None, lm.config, policy, objective, batch, noise, target, total)

    (value, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
    aux = {"loss": value, "closed_fraction": sums["closed"]} | {k: sums[k] for k in ("distillation", "budget")}
    return aux, weights.by_name(weights.table(lm.config, policy), grads)


def _run(arguments: Namespace) -> None:
    settings = config.from_arguments(vars(arguments))
    distributed.start(settings.coordinator, settings.processes, settings.process_id)
    if distributed.first():
        cli.show_configuration(settings)
    from train import trainer  # here, so that --help and mistakes answer at once

    result = trainer.train(settings)
    if not distributed.first():
        return
    print(f"model: {result.model}")
    for path in result.exports:
        print(f"export: {path}")
    print(f"checkpoints: {result.output / 'checkpoints'}")
    print(f"metrics: {result.output / 'metrics.jsonl'}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    preset = config.preset_of(argv)
    defaults: dict[str, Any] = {}
    if preset is not None:
        with contextlib.suppress(InputError):  # reported by the run itself, as any other bad input
            defaults = config.load_preset(preset)
    return cli.run(_run, argv, parser=config.parser(defaults), show=False)


if __name__ == "__main__":
    sys.exit(main())

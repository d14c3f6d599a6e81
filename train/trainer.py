"""The training loop of a retrofit: model, data, steps, checkpoints, exports and what is shown of them."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import platform
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvsparse_jax import cli, distributed, hub
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.lm import LM, load
from kvsparse_jax.models.config import ModelConfig, read_json
from kvsparse_jax.models.families import read_config
from kvsparse_jax.models.sharding import check_heads, make_mesh
from kvsparse_jax.policies import DMS
from kvsparse_jax.tokenizer import Tokenizer
from train import data, lora, losses
from train.calibrate import calibrate
from train.card import model_card
from train.config import RetrofitConfig, differences, plain
from train.step import Batch, Metrics, Objective, State, Step, Tree, make_step
from train.store import Saved, Store

KIND = "retrofit run"
_BATCH_AXES = ("data", "fsdp")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a finished run has made.

    Attributes:
        output: directory of the run.
        model: the final export.
        exports: exports on the way, by compression ratio.
        steps: optimiser steps done in all.
        last: last row of metrics.jsonl.
    """

    output: Path
    model: Path
    exports: tuple[Path, ...]
    steps: int
    last: dict[str, Any]


def learning_rate(config: RetrofitConfig, step: Array | int) -> Array | float:
    """Learning rate of a step, from 0; a Python float for a Python step."""
    warmup, total = config.warmup_steps, config.total_steps
    if isinstance(step, int):
        rate = config.lr * min((step + 1) / warmup, 1.0) if warmup else config.lr
        if config.lr_schedule == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)))
        return rate
    at = step.astype(jnp.float32)
    value = jnp.full((), config.lr, jnp.float32)
    if warmup:
        value = value * jnp.minimum((at + jnp.float32(1.0)) / jnp.float32(warmup), jnp.float32(1.0))
    if config.lr_schedule == "cosine":
        progress = jnp.clip((at - jnp.float32(warmup)) / jnp.float32(max(total - warmup, 1)), 0.0, 1.0)
        value = value * jnp.float32(0.5) * (jnp.float32(1.0) + jnp.cos(jnp.float32(math.pi) * progress))
    return value


def make_optimizer(config: RetrofitConfig) -> optax.GradientTransformation:
    """AdamW on the clipped gradient."""
    adamw = optax.adamw(
        functools.partial(learning_rate, config), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw) if config.clip else adamw


class Parts(NamedTuple):
    """A model cut into what is trained and what is not.

    Attributes:
        lm: config, tokenizer and source; its parameters only where they are frozen.
        policy: settings, without parameters.
        trainable: see :class:`train.step.State`, float32.
        frozen: the rest.
        teacher: parameters of the teacher; None takes the student's.
    """

    lm: LM
    policy: DMS
    trainable: Tree
    frozen: Tree
    teacher: Tree | None


def make_mesh_for(config: RetrofitConfig) -> Mesh:
    """The mesh that the settings ask for; InputError if the batch or the devices do not divide."""
    rest = config.mesh_fsdp * config.mesh_tensor
    ways = config.mesh_data or max(jax.device_count() // rest, 1)
    mesh = make_mesh(ways, config.mesh_fsdp, config.mesh_tensor)
    if mesh.size < jax.device_count():
        _log.warning("using %d of %d devices", mesh.size, jax.device_count())
    rows, shards = config.batch_size // config.accumulate, ways * config.mesh_fsdp
    if rows % shards:
        raise InputError(
            f"{rows} rows (batch_size {config.batch_size} / accumulate {config.accumulate}) cannot be divided over "
            f"{shards} devices (mesh_data {ways} x mesh_fsdp {config.mesh_fsdp}); change batch_size or mesh_data"
        )
    return mesh


def make_policy(config: RetrofitConfig, model: ModelConfig) -> DMS:
    """The policy before training, adapters at zero."""
    names = ("window", "shift", "scale", "offset", "tau", "variant", "per")
    return DMS.init(model, target_cr=config.target_cr, **{name: getattr(config, name) for name in names})


def make_parts(config: RetrofitConfig, directory: Path, mesh: Mesh, rows: Callable[[int], list[Batch]] | None) -> Parts:
    """Loads the model and divides it.

    Args:
        config: settings.
        directory: of the model.
        mesh: devices.
        rows: gives at least so many rows of training text, for the oracle; None leaves the adapters at zero, to be
            replaced by those of a checkpoint.
    """
    compute = jnp.dtype(config.dtype)
    # LoRA is merged into the stored weights at an export, so these keep their precision.
    dtype = {"adapter": compute, "lora": None, "all": jnp.dtype(jnp.float32)}[config.train]
    lm = load(directory, dtype=dtype, mesh=mesh)
    if isinstance(lm.policy, DMS):
        _log.warning("%s carries a DMS policy already; it is replaced", directory)
    policy = make_policy(config, lm.config)
    if config.init == "oracle" and rows is not None:
        from train.warm_start import warm_start

        policy = warm_start(
            lm, policy, rows(config.init_rows), evict_fraction=1 - 1 / config.start_cr, slope=config.init_slope
        )
    # Copies: the training step donates its state, and nothing else may share those buffers.
    fresh = jax.jit(lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree))
    trainable: Tree = {} if policy.params is None else {"policy": fresh(policy.params)}
    frozen: Tree = {"model": lm.params}
    teacher: Tree | None = None
    if config.train == "lora":
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        trainable["model"] = lora.init(
            lm.params, key, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets
        )
        teacher = lm.params if config.teacher == "original" else None
    elif config.train == "all":
        trainable["model"], frozen = lm.params, {}
        if config.teacher == "original":
            teacher = load(directory, dtype=compute, mesh=mesh).params
        lm = dataclasses.replace(lm, params={})
    policy = dataclasses.replace(policy, params=None)
    # The policy decides whether the model lends a query channel, which its config tells the step.
    return Parts(lm.with_policy(policy), policy, distributed.replicate(trainable, mesh), frozen, teacher)


def export(config: RetrofitConfig, parts: Parts, trainable: Tree, policy: DMS) -> LM:
    """The model as it stands, ready to be saved.

    Args:
        config: settings.
        parts: of the run.
        trainable: as trained so far.
        policy: the one to write.
    """
    params = parts.lm.params
    if config.train == "lora":
        params = lora.merge(params, trainable["model"])
    elif config.train == "all":
        params = trainable["model"]
    return dataclasses.replace(parts.lm, params=params, policy=policy)


class _Pending(NamedTuple):
    """A step whose metrics have not been read yet."""

    step: int
    batch: data.Batch
    before: dict[str, Any]
    metrics: Metrics


class _Stop:
    """Notes that the process was asked to end; the loop looks after every step."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While it lasts, SIGTERM and a first Ctrl-C only leave a note.

        Several processes have to stop at the same step, so there JAX's runtime listens for SIGTERM.
        """
        if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        previous: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            signal.signal(number, previous[number] or signal.SIG_DFL)

        for number in previous:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler or signal.SIG_DFL)


def train(config: RetrofitConfig, *, stop: Callable[[int], bool] | None = None) -> Result:
    """Runs a retrofit to its end.

    Args:
        config: settings.
        stop: asked after every step whether to save and end there (as SIGTERM does).

    Raises:
        InputError: bad input; nothing was trained.
        RunError: the loss is not finite, or the run was stopped; a checkpoint was written.
    """
    config.require()
    directory = hub.resolve(config.model)
    model = _model_config(directory)
    if config.sequence_length > model.max_positions:
        raise InputError(
            f"sequence_length {config.sequence_length} is more than the model's context of {model.max_positions} tokens"
        )
    sources = [data.Source.parse(spec) for spec in config.data]
    mesh = make_mesh_for(config)
    check_heads(mesh, model.kv_heads)
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise InputError(f"{directory} has no tokenizer, which the training text needs")
    index, count = distributed.rows_of_process(mesh, _BATCH_AXES)
    output = _claim(config)
    distributed.barrier("output directory")  # before anyone writes to it
    settings: dict[str, Any] = {
        "sequence_length": config.sequence_length,
        "packing": config.packing,
        "heldout_fraction": config.heldout_fraction,
        "process_index": index,
        "process_count": count,
    }
    loader = data.Loader(sources, tokenizer, batch_size=config.batch_size, seed=config.seed, prefetch=2, **settings)
    with loader, Store(output / "checkpoints", config.keep) as store:
        for report in loader.report():
            _say(str(report))

        @functools.cache
        def rows(count: int) -> list[Batch]:
            """Other rows of the same text, in micro-batches on the mesh, for the oracle and for calibration."""
            size = config.batch_size // config.accumulate
            with data.Loader(sources, tokenizer, batch_size=size, seed=config.seed + 1, **settings) as other:
                return [to_device(next(other), mesh, 0) for _ in range(-(-count // size))]

        going_on = config.resume not in ("never", "auto") or (config.resume == "auto" and bool(store.steps()))
        parts = make_parts(config, directory, mesh, None if going_on else rows)
        return _Run(config, output, mesh, loader, parts, rows).train(store, stop)


def _model_config(directory: Path) -> ModelConfig:
    generation = directory / "generation_config.json"
    return read_config(read_json(directory / "config.json"), read_json(generation) if generation.exists() else None)


def _claim(config: RetrofitConfig) -> Path:
    """The output directory; InputError if it holds another run and this one does not resume it."""
    output = cli.fresh_directory(Path(config.output).expanduser(), KIND)
    its_own = config.resume == "auto"
    if config.resume not in ("auto", "never"):
        root, _ = _named_checkpoint(config.resume)
        its_own = output.resolve() in root.resolve().parents
    if (output / "run.json").exists() and not its_own:
        raise InputError(
            f"{output} holds another run: go on with it by --resume auto, or choose another output directory"
        )
    return output


def _named_checkpoint(name: str) -> tuple[Path, int | None]:
    """Directory of checkpoints and number of the one that ``--resume PATH`` names (None: the newest of that run)."""
    path = Path(name).expanduser()
    root, step = (path.parent, int(path.name)) if path.name.isdecimal() else (path / "checkpoints", None)
    if not root.is_dir():
        raise InputError(f"--resume {path} is neither auto, never, a checkpoint (RUN/checkpoints/STEP) nor a run")
    return root, step


def to_device(batch: data.Batch, mesh: Mesh, accumulate: int) -> Batch:
    """This process's rows on the mesh.

    Args:
        batch: [B, T] of this process.
        mesh: the batch is divided over its data and fsdp axes.
        accumulate: micro-batches A of the result [A, B / A, T]; 0 leaves [B, T].
    """
    spec = PartitionSpec(_BATCH_AXES) if not accumulate else PartitionSpec(None, _BATCH_AXES)
    sharding = NamedSharding(mesh, spec)

    def place(a: np.ndarray) -> Array:
        local = a if not accumulate else a.reshape(accumulate, -1, a.shape[-1])
        return jax.make_array_from_process_local_data(sharding, local)

    return Batch(place(batch.input_ids), place(batch.segment_ids), place(batch.example_ids))


def _exports(output: Path) -> list[Path]:
    """Exports on the way, by compression ratio."""
    found = [path for path in (output / "exports").glob("cr-*") if path.name[3:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[3:]))


def _say(line: str) -> None:
    if distributed.first():
        print(line, file=sys.stderr, flush=True)


class _Run:
    """One run, from its first or its resumed step to its end."""

    def __init__(
        self,
        config: RetrofitConfig,
        output: Path,
        mesh: Mesh,
        loader: data.Loader,
        parts: Parts,
        rows: Callable[[int], list[Batch]],
    ):
        self.config, self.output, self.mesh = config, output, mesh
        self.loader, self.parts, self.rows = loader, parts, rows
        optimizer = make_optimizer(config)
        # The counters of the optimiser and the step are scalars without a place; the moments lie with their weights.
        everywhere = NamedSharding(mesh, PartitionSpec())
        start = State(parts.trainable, optimizer.init(parts.trainable), jnp.int32(0))
        self.state = distributed.replicate(start, mesh)
        self.key = jax.random.key(config.seed)
        self.objective = Objective(
            eos_token_ids=parts.lm.config.eos_token_ids,
            direction=config.direction,
            budget=config.budget,
            mask=config.mask,
            teacher=config.teacher,
            remat=config.remat,
            dtype=jnp.dtype(config.dtype),
        )
        self.advance: Step = make_step(
            parts.lm.config,
            self.objective,
            optimizer,
            config.schedule,
            start=config.fade_steps,
            mesh=mesh if mesh.size > 1 else None,
            shardings=(jax.tree.map(lambda a: a.sharding, self.state), everywhere),
        )
        self.healthy: Array = distributed.replicate(jnp.asarray(True), mesh)
        self.pending: deque[_Pending] = deque()
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.last: dict[str, Any] = {}
        self.exports: list[Path] = []
        self.calibrated = (-1, 0.0, 0.0)  # step, compression ratio and offset of the last calibration
        self.main = distributed.first()
        self.slices = distributed.rows_of_process(mesh, _BATCH_AXES)[1]

    # --- the loop ---

    def train(self, store: Store, stop: Callable[[int], bool] | None) -> Result:
        """Trains from where the checkpoints say to the end."""
        config, total = self.config, self.config.total_steps
        stopper = _Stop()
        self._resume(store)
        if self.main:
            cli.write_json_atomically(self.output / "run.json", self._description())
        self._truncate()
        distributed.barrier("run directory")
        if self.step:
            _say(f"resumed after step {self.step}")
            self._export_due()  # what a run that was killed after its checkpoint did not come to
        with (
            stopper.listening(),
            _Log(self.output, self.step, config.tensorboard and self.main, self.main) as log,
            cli.progress(total, desc="retrofit", initial=self.step) as bar,
        ):
            self.log, self.bar, self.clock = log, bar, time.monotonic()
            while self.step < total:
                self._dispatch()
                asked = stopper.signal is not None or (stop is not None and stop(self.step))
                asked = distributed.asked_to_stop(self.step) or (asked and jax.process_count() == 1)
                due = bool(self._due(self.step))
                save = self.step == total or bool(config.save_every and self.step % config.save_every == 0)
                # What is written must be of a step that is known to be finite; else read one step behind.
                self._read(0 if asked or save or due else 1, store)
                if asked or save:
                    store.save(self.step, self.state, self._meta(self.step, self.loader.state()))
                self._export_due()
                if asked and self.step < total:
                    store.wait()
                    self._stopped(stopper.signal, store)
        final = self.output / "model"
        if not final.exists():
            self._export(final, config.target_cr)
        return Result(self.output, final, tuple(_exports(self.output)), self.step, self.last)

    def _stopped(self, number: int | None, store: Store) -> NoReturn:
        if number == signal.SIGINT:
            _say(f"saved after step {self.step}; --resume auto goes on from there")
            raise KeyboardInterrupt
        name = "request" if number is None else signal.Signals(number).name
        raise RunError(
            f"stopped by {name} after step {self.step} of {self.config.total_steps}; a checkpoint is in "
            f"{store.directory}, --resume auto goes on from there"
        )

    def _dispatch(self) -> None:
        """Starts the next step; on an accelerator this returns before it is done."""
        before = self.loader.state()
        batch = next(self.loader)
        vocab = self.parts.lm.config.vocab_size
        if batch.input_ids.max() >= vocab:
            raise InputError(
                f"the tokenizer gives token id {batch.input_ids.max()}; the model knows 0 to {vocab - 1} only"
            )
        fade = self._fade(self.step)
        self.state, metrics = self.advance(
            self.state,
            self.parts.frozen,
            self.parts.teacher,
            # While the borrowed channel fades nothing is evicted.
            self.parts.policy if fade is None else dataclasses.replace(self.parts.policy, enabled=False),
            to_device(batch, self.mesh, self.config.accumulate),
            self.key,
            self.healthy,
            fade,
        )
        self.healthy = metrics.finite
        self.step += 1
        self.pending.append(_Pending(self.step, batch, before, metrics))

    def _fade(self, step: int) -> Array | None:
        """What is left of the borrowed channel at a step; None once it is gone."""
        fading = self.config.fade_steps
        return None if step >= fading else jnp.asarray(np.float32(1 - (step + 1) / fading))

    def _read(self, leave: int, store: Store) -> None:
        """Reads the metrics of the steps that were started, all but the newest ``leave``."""
        while len(self.pending) > leave:
            done = self.pending.popleft()
            metrics = jax.device_get(done.metrics)
            if not metrics.finite:
                self._failed(done, metrics, store)
            now = time.monotonic()
            took, self.clock = now - self.clock, now
            tokens = done.batch.tokens * self.slices
            self.tokens += tokens
            self.seconds += took
            row = self._row(done.step, metrics, tokens / max(took, 1e-9))
            self.last = row
            if done.step % self.config.log_every == 0 or done.step == self.config.total_steps:
                self.log.write(row)
            self.bar.set_postfix(
                loss=row["loss"],
                KL=row["distillation"],
                CR=row["nominal_cr"] or math.inf,
                target=row["target_cr"],
                **{"tokens/s": round(row["tokens_per_second"])},
            )
            self.bar.update()

    def _row(self, step: int, metrics: Metrics, speed: float) -> dict[str, Any]:
        evicted = float(metrics.evicted_fraction)
        done = step - 1
        return {
            "step": step,
            "loss": float(metrics.loss),
            "distillation": float(metrics.distillation),
            "budget": float(metrics.budget),
            "target_cr": float(losses.cr_schedule(done - self.config.fade_steps, *self.config.schedule)[1]),
            "target_fraction": float(metrics.target_fraction),
            "closed_fraction": float(metrics.closed_fraction),
            "evicted_fraction": evicted,
            "nominal_cr": 1 / (1 - evicted) if evicted < 1 else None,
            "grad_norm": float(metrics.grad_norm),
            "lr": float(learning_rate(self.config, done)),
            "tokens": self.tokens,
            "tokens_per_second": speed,
            "seconds": self.seconds,
        }

    def _failed(self, done: _Pending, metrics: Metrics, store: Store) -> NoReturn:
        """Saves the state before the failed step, which no later step has changed, and ends the run."""
        good = done.step - 1
        if good:
            store.save(good, self.state, self._meta(good, done.before))
            store.wait()
        examples = done.batch.example_ids[done.batch.example_ids != data.PADDING]
        kept = f"the state after step {good} is in {store.directory}" if good else "nothing had been trained"
        raise RunError(
            f"loss or gradient is not finite in step {done.step} (loss {float(metrics.loss)}, gradient norm "
            f"{float(metrics.grad_norm)}; batch with examples {examples.min()} to {examples.max()}); {kept}"
        )

    # --- checkpoints ---

    def _meta(self, step: int, loader: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "loader": loader,
            "config": plain(self.config),
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    def _resume(self, store: Store) -> None:
        choice = self.config.resume
        if choice == "never":
            return
        if choice == "auto":
            saved = store.newest(self.state, self._compare)
        else:
            saved = self._at(choice)
            store.discard_after(saved.step)
        if saved is None:
            if (self.output / "model").exists():
                raise InputError(
                    f"{self.output} holds a finished model and no checkpoint to go on from; give --resume never to "
                    "train it anew, or another --output"
                )
            return
        self.loader.restore(saved.meta["loader"])
        self.state, self.step = saved.state, saved.step
        self.tokens, self.seconds = saved.meta["tokens"], saved.meta["seconds"]

    def _at(self, path: str) -> Saved:
        """The checkpoint that ``--resume PATH`` names."""
        root, step = _named_checkpoint(path)
        with Store(root, self.config.keep) as store:
            steps = store.steps()
            if step is None and steps:
                step = steps[-1]
            if step not in steps or step is None:
                raise InputError(
                    f"there is no whole checkpoint {path}; there are {', '.join(map(str, steps)) or 'none'}"
                )
            saved = store.read(step, self.state, self._compare)
        if isinstance(saved, str):
            raise InputError(f"checkpoint {root / str(step)} is damaged: {saved}")
        return saved

    def _compare(self, meta: dict[str, Any]) -> None:
        if found := differences(meta.get("config") or {}, plain(self.config)):
            raise InputError(f"the checkpoint is of a different configuration: {'; '.join(found)}")

    def _truncate(self) -> None:
        """Takes away what a resumed run will write again."""
        if not self.main:
            return
        path = self.output / "metrics.jsonl"
        if path.exists():
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off, or not ours
                    if json.loads(line)["step"] <= self.step:
                        kept.append(line)
            path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            if kept:
                self.last = json.loads(kept[-1])
        wanted = {ratio for step in range(1, self.step + 1) for ratio in self._due(step)}
        for path in _exports(self.output):
            if int(path.name[3:]) in wanted:
                self.exports.append(path)
            else:
                shutil.rmtree(path)
        if self.step < self.config.total_steps and (self.output / "model").exists():
            shutil.rmtree(self.output / "model")

    def _description(self) -> dict[str, Any]:
        packages = ("kvsparse-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
        versions = {"python": platform.python_version()}
        for name in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return {
            "config": plain(self.config),
            "versions": versions,
            "devices": [str(device) for device in self.mesh.devices.flat],
            "mesh": dict(self.mesh.shape),
            "data": self.loader.report(),
            "parameters": {
                "trained": sum(leaf.size for leaf in jax.tree.leaves(self.state.trainable)),
                "frozen": sum(leaf.size for leaf in jax.tree.leaves(self.parts.frozen)),
            },
        }

    # --- exports ---

    def _due(self, step: int) -> list[int]:
        """Whole compression ratios that the schedule has just passed."""
        at = step - self.config.fade_steps
        if not self.config.export_each_cr or at < 1:
            return []
        now, before = (float(losses.cr_schedule(s, *self.config.schedule)[1]) + 1e-9 for s in (at, at - 1))
        return [ratio for ratio in range(2, math.floor(now) + 1) if before < ratio]

    def _export_due(self) -> None:
        for ratio in self._due(self.step):
            target = self.output / "exports" / f"cr-{ratio}"
            if not target.exists():
                self._export(target, float(ratio))

    def _export(self, target: Path, ratio: float) -> None:
        """Writes the model as it stands, as one of this compression ratio."""
        policy = dataclasses.replace(self.parts.policy, target_cr=ratio, params=self.state.trainable.get("policy"))
        lm = export(self.config, self.parts, self.state.trainable, policy)
        measured = None
        if self.calibrated[:2] == (self.step, ratio):
            lm = lm.with_policy(dataclasses.replace(policy, offset=self.calibrated[2]))
        elif self.config.calibrate:
            rows = self.rows(self.config.calibrate_rows)
            wished, dtype = 1 - 1 / ratio, jnp.dtype(self.config.dtype)
            done = calibrate(lm.params, lm.config, policy, rows, evict_fraction=wished, dtype=dtype)
            _say(
                f"calibrated for CR {ratio:g}: offset {policy.offset:.4g} -> {done.policy.offset:.4g}, measured CR "
                f"{1 / max(1 - done.before, 1e-9):.3f} -> {1 / max(1 - done.after, 1e-9):.3f}"
            )
            measured = (1 / max(1 - done.before, 1e-9), 1 / max(1 - done.after, 1e-9))
            lm, self.calibrated = lm.with_policy(done.policy), (self.step, ratio, done.policy.offset)
        if self.main:
            target.parent.mkdir(exist_ok=True)
        lm.save(target, like=self.exports[-1] if self.exports else None)
        if self.main:
            assert isinstance(lm.policy, DMS)
            card = model_card(plain(self.config), lm.policy, ratio, self.last, measured)
            (target / "README.md").write_text(card, encoding="utf-8")
        self.exports.append(target)
        _say(f"exported {target}")
        self.clock = time.monotonic()  # the time of an export is no step's


class _Log:
    """metrics.jsonl and TensorBoard."""

    def __init__(self, output: Path, step: int, tensorboard: bool, main: bool):
        self._file = open(output / "metrics.jsonl", "a", encoding="utf-8") if main else None  # noqa: SIM115
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, row["step"])

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

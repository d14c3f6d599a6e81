"""``python -m train.kvzap``: trains KVzap surrogates, which :mod:`train.surrogate` fits."""

import contextlib
import dataclasses
import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from kvsparse_jax import cli
from kvsparse_jax.errors import InputError, RunError, whole
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import KVzap

PROG = "python -m train.kvzap"
DESCRIPTION = """Trains KVzap surrogates (arXiv 2601.07891): small models that predict, from a layer's attention input,
how much each key will matter to a repetition of the prompt (the KVzip+ oracle, or KVzip).

Every prompt goes through the model once. The linear surrogate is exact ridge regression over all tokens; the MLP is
trained on a sample, in a buffer of bounded size. The output directory gets linear/ and mlp/ (the published format;
kvsparse_jax.KVzap.load opens them), results.json, correlation.png and, while it runs, checkpoints/."""
EPILOG = """example:
  python -m train.kvzap --model smollm2-135m --output runs/kvzap --data builtin:code --data builtin:manuals
"""
_WARM_UP = 50  # steps in which the MLP's learning rate rises
_DROPOUT = 0x6D6C70  # sets the key of dropout apart from that of the initial weights
_HARMLESS = ("mesh_data", "mesh_fsdp", "mesh_tensor")  # a run may go on on other devices
BUCKETS = 5
"""Different lengths of a prompt, each of which is a compiled program."""


def _parser() -> cli.Parser:
    p = cli.parser(PROG, DESCRIPTION, epilog=EPILOG)
    p.add_argument("--model", required=True, help="hub name, local Hugging Face directory or smollm2-135m")
    p.add_argument(
        "--data", action="append", default=[], help="text, PATH[#key=value,...][:WEIGHT], as for train.retrofit; "
        "may be given several times (default: all built-in kinds)"
    )  # fmt: skip
    p.add_argument("--output", required=True, type=Path, help="directory of the run")
    p.add_argument("--kinds", nargs="+", choices=("linear", "mlp"), default=["linear", "mlp"], help="what is fitted")
    p.add_argument("--prompts", type=int, default=200, help="prompts to fit on")
    p.add_argument("--heldout-prompts", type=int, default=20, help="prompts to measure on, of other documents")
    p.add_argument("--heldout-fraction", type=float, default=0.05, help="share of one's own documents kept out")
    p.add_argument("--min-tokens", type=int, default=750, unit="tokens", help="shortest prompt")
    p.add_argument("--max-tokens", type=int, default=1250, unit="tokens", help="longest prompt")
    p.add_argument("--batch-size", type=int, default=1, unit="prompts", help="prompts that go through at once")
    p.add_argument("--sample", type=int, default=500, unit="tokens", help="tokens of a prompt that the MLP learns from")
    p.add_argument("--ridge", type=float, default=1.0, help="penalty of the linear surrogate's squared coefficients")
    p.add_argument("--mlp-width", type=int, help="hidden units of the MLP (default: an eighth of the model's width)")
    p.add_argument("--epochs", type=float, default=15, help="passes of the MLP over its sample")
    p.add_argument(
        "--lr", type=float, default=5e-3, help="peak learning rate of the MLP (AdamW, 50 steps up, cosine to 0)"
    )
    p.add_argument("--dropout", type=float, default=0.1, help="share of the MLP's hidden units left out of each step")
    p.add_argument("--input-dropout", type=float, default=0.1, help="the same of its inputs")
    p.add_argument("--weight-decay", type=float, default=0.1, help="of the MLP's kernels (AdamW)")
    p.add_argument("--mlp-batch", type=int, default=512, unit="tokens", help="tokens per step of the MLP")
    p.add_argument("--buffer-gb", type=float, default=2.0, unit="GB", help="most memory for the MLP's sample")
    p.add_argument(
        "--target", choices=("kvzip+", "kvzip"), default="kvzip+",
        help="oracle whose log score is predicted: KVzip+ as in the paper, or the plain attention of KVzip",
    )  # fmt: skip
    p.add_argument(
        "--norm", choices=("input", "residual"), default="input",
        help="hidden state in the KVzip+ score: the attention's input (released code) or the residual (paper's text)",
    )  # fmt: skip
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model")
    p.add_argument(
        "--mesh-data", type=int, default=1, unit="devices", help="over which the prompts of a batch are divided"
    )
    p.add_argument("--mesh-fsdp", type=int, default=1, unit="devices", help="over which batch and weights are divided")
    p.add_argument(
        "--mesh-tensor", type=int, default=1, unit="devices", help="over which heads and channels are divided"
    )
    p.add_argument("--seed", type=int, default=0, help="of the order of documents, the sample and the MLP")
    p.add_argument("--save-every", type=int, default=50, unit="batches", help="distance of checkpoints; 0: none")
    p.add_argument("--resume", choices=("auto", "never"), default="never", help="auto: go on from the last checkpoint")
    return p


@dataclasses.dataclass
class _Buffer:
    """Tokens for the MLP: x [L, C, D] in the model's dtype, y [L, C, H] float32; the first ``filled`` count."""

    x: np.ndarray
    y: np.ndarray
    filled: int = 0

    @property
    def room(self) -> int:
        return self.x.shape[1] - self.filled

    def add(self, x: Any, y: Any) -> None:
        """As many of the tokens [L, N, ...] as there is room for."""
        count = min(x.shape[1], self.room)
        at = slice(self.filled, self.filled + count)
        self.x[:, at], self.y[:, at] = np.asarray(x[:, :count]), np.asarray(y[:, :count])
        self.filled += count


def _check(args: Namespace) -> None:
    for name in ("prompts", "heldout_prompts", "batch_size", "sample", "mlp_batch"):
        whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    whole("--save-every", args.save_every, 0)
    whole("--seed", args.seed, 0)
    if args.mlp_width is not None:
        whole("--mlp-width", args.mlp_width, 1)
    if not 2 <= args.min_tokens <= args.max_tokens:
        raise InputError(f"prompts need 2 <= --min-tokens <= --max-tokens, not {args.min_tokens} and {args.max_tokens}")
    for name in ("epochs", "lr", "buffer_gb"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"--{name.replace('_', '-')} must be positive, not {value}")
    for name in ("dropout", "input_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 0 and below 1, not {getattr(args, name)}")
    if not (math.isfinite(args.weight_decay) and args.weight_decay >= 0):
        raise InputError(f"--weight-decay must be at least 0, not {args.weight_decay}")
    if not (math.isfinite(args.ridge) and args.ridge >= 0):
        raise InputError(f"--ridge must be at least 0, not {args.ridge}")
    for name in ("mesh_data", "mesh_fsdp", "mesh_tensor"):
        whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    if args.prompts % args.batch_size or args.heldout_prompts % args.batch_size:
        raise InputError(
            f"{args.prompts} prompts and {args.heldout_prompts} held-out ones cannot be cut into batches of "
            f"{args.batch_size}"
        )


def lengths(least: int, most: int) -> list[int]:
    """The lengths that prompts are cut to."""
    return sorted({round(least + (most - least) * i / (BUCKETS - 1)) for i in range(BUCKETS)})


class Contexts(Iterator[np.ndarray]):
    """Batches of contexts [B, n] from documents: batch i has the i-th length, in turn; resumable.

    Args:
        loader: of rows as long as the longest context; the longest segment of a row is cut.
        sizes: lengths, see :func:`lengths`.
        batch: B.
    """

    def __init__(self, loader: Any, sizes: Sequence[int], batch: int):
        self._loader, self._sizes, self._batch, self.taken = loader, list(sizes), batch, 0

    def __next__(self) -> np.ndarray:
        size = self._sizes[self.taken % len(self._sizes)]
        rows: list[np.ndarray] = []
        short = 0
        while len(rows) < self._batch:
            found = next(self._loader, None)
            if found is None or short > 1000:
                raise InputError(f"the data has no document left of {size} tokens: lower --min-tokens or add data")
            counts = np.bincount(found.segment_ids[0][found.segment_ids[0] >= 0])
            start = int(np.argmax(found.segment_ids[0] == counts.argmax()))
            if counts.max() < size:
                short += 1
                continue
            rows.append(found.input_ids[0, start : start + size])
        self.taken += 1
        return np.stack(rows)

    def state(self) -> dict[str, Any]:
        """Where it stands, plain JSON."""
        return {"taken": self.taken, "loader": self._loader.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.taken = state["taken"]
        self._loader.restore(state["loader"])


def _fresh(output: Path, resume: str, settings: dict[str, Any]) -> None:
    output = cli.fresh_directory(output, "KVzap run")
    known = output / "run.json"
    if not known.exists():
        return
    if resume == "never":
        raise InputError(f"{output} holds another run: choose another --output, or --resume auto to go on with it")
    old = json.loads(known.read_text(encoding="utf-8"))
    changed = [f"{k} {old.get(k)} -> {v}" for k, v in settings.items() if old.get(k) != v and k not in _HARMLESS]
    if changed:
        raise InputError(f"{output} is of a different configuration: {'; '.join(changed)}")


class _Fit:
    """What is being fitted: sums for the linear surrogates, the MLPs and the buffer of their sample.

    Args:
        args: of the command.
        config: of the model.
        dtype: of the model's hidden states.
    """

    def __init__(self, args: Namespace, config: ModelConfig, dtype: Any):
        from train import surrogate

        self._surrogate, self._args = surrogate, args
        layers, features, heads = config.layers, config.hidden_size, config.kv_heads
        self.with_mlp = "mlp" in args.kinds
        self.sample = min(args.sample, args.min_tokens)
        self._total = args.prompts * self.sample
        self._steps = max(1, math.ceil(args.epochs * self._total / args.mlp_batch))
        per_token = layers * (features * np.dtype(dtype).itemsize + 4 * heads)
        capacity = min(self._total, int(args.buffer_gb * 1e9 / per_token)) if self.with_mlp else 1
        if self.with_mlp and capacity < args.mlp_batch:
            raise InputError(
                f"a buffer of {args.buffer_gb} GB and a sample of {self._total} tokens hold {capacity} tokens of this "
                f"model, fewer than the --mlp-batch of {args.mlp_batch}"
            )
        x, y = (np.zeros((layers, capacity, n), kind) for n, kind in ((features, dtype), (heads, np.float32)))
        self.buffer = _Buffer(x, y)
        self.sums = surrogate.Sums.zero(config) if "linear" in args.kinds else None
        unit = surrogate.Scale(*(jnp.ones((layers, n)) for n in (features, features, heads, heads)))
        width = args.mlp_width or max(1, features // 8)
        self.mlp = surrogate.Mlp.init(layers, features, width, heads, unit, args.seed)
        self.progress = {"rows": 0, "phases": 0}

    def state(self) -> dict[str, Any]:
        """The arrays of a checkpoint; the sample stays in host memory."""
        return {"sums": self.sums, "mlp": self.mlp, "x": self.buffer.x, "y": self.buffer.y}

    def meta(self) -> dict[str, Any]:
        """The rest of it."""
        return {"filled": self.buffer.filled, "progress": self.progress}

    def restore(self, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.sums, self.mlp = state["sums"], state["mlp"]
        self.buffer = _Buffer(state["x"], state["y"], meta["filled"])
        self.progress = dict(meta["progress"])

    def add(self, x: Array, y: Array) -> None:
        """Sampled tokens; a full buffer is learned from and emptied."""
        while self.with_mlp and x.shape[1]:
            count = min(self.buffer.room, x.shape[1])
            self.buffer.add(x[:, :count], y[:, :count])
            x, y = x[:, count:], y[:, count:]
            if not self.buffer.room:
                self.learn()

    def learn(self) -> None:
        """Trains the MLPs on what the buffer holds, and empties it."""
        surrogate, args, rows = self._surrogate, self._args, self.buffer.filled
        x, y = self.buffer.x, self.buffer.y
        if self.progress["phases"] == 0:
            self.mlp = dataclasses.replace(self.mlp, scale=surrogate.Scale.of(x[:, :rows], y[:, :rows]))
        self.progress = {"rows": self.progress["rows"] + rows, "phases": self.progress["phases"] + 1}
        start = int(self.mlp.step)
        until = min(self._steps, math.ceil(args.epochs * self.progress["rows"] / args.mlp_batch))
        rng = np.random.default_rng((args.seed, 1, self.progress["phases"]))
        order = np.zeros(0, np.int64)
        restraint = surrogate.Restraint(args.dropout, args.input_dropout, args.weight_decay)
        key = jax.random.fold_in(jax.random.key(args.seed), _DROPOUT)
        with cli.progress(until - start, desc="mlp") as bar:
            for step in range(start, until):
                while len(order) < args.mlp_batch:
                    order = np.concatenate([order, rng.permutation(rows)])
                chosen, order = order[: args.mlp_batch], order[args.mlp_batch :]
                lr = args.lr * 0.5 * (1 + math.cos(math.pi * step / self._steps)) * min(1, (step + 1) / _WARM_UP)
                batch = (jnp.asarray(z[:, chosen]) for z in (x, y))  # the sample stays in the host's memory
                self.mlp, loss = surrogate.mlp_step(self.mlp, *batch, jnp.float32(lr), key, restraint)
                if (step + 1) % 50 == 0 or step + 1 == until:
                    bar.set_postfix(loss=float(loss))
                    if not math.isfinite(float(loss)):
                        raise RunError(f"the loss of the MLP is not finite at step {step}: lower --lr")
                bar.update()
        self.buffer.filled = 0

    def result(self) -> dict[str, Any]:
        """Parameters of each kind that is wanted."""
        if self.with_mlp and self.buffer.filled and int(self.mlp.step) < self._steps:
            self.learn()
        made = {
            "linear": lambda: self._surrogate.ridge(self.sums, self._args.ridge),
            "mlp": lambda: self.mlp.folded(),
        }
        return {kind: made[kind]() for kind in made if kind in self._args.kinds}


class _Collector:
    """Runs extended prompts through the model; see :func:`train.surrogate.collect`."""

    def __init__(self, lm: Any, args: Namespace):
        from train import surrogate

        self._lm, self._args, self._collect = lm, args, surrogate.collect
        self.extended = surrogate.Extended.of(lm.tokenizer)
        longest = len(self.extended.before) + len(self.extended.between) + 2 * args.max_tokens
        if longest > lm.config.max_positions:
            raise InputError(
                f"a prompt of {args.max_tokens} tokens and its repetition are {longest} tokens, more than the model's "
                f"context of {lm.config.max_positions}"
            )

    def __call__(self, sums: Any, batch: np.ndarray, number: int, sample: int) -> tuple[Any, Array, Array]:
        """Sums, attention inputs and scores of ``sample`` tokens of each context of batch ``number``."""
        context, probe = self.extended.spans(batch.shape[1])
        rng = np.random.default_rng((self._args.seed, 0, number))
        chosen = np.stack([np.sort(rng.choice(batch.shape[1], sample, replace=False)) for _ in batch])
        sums, x, y = self._collect(
            self._lm.params,
            self._lm.config,
            jnp.asarray(self.extended.ids(batch)),
            sums,
            jnp.asarray(chosen, jnp.int32),
            context=context,
            probe=probe,
            kind=self._args.target,
            norm=self._args.norm,
            mesh=self._lm.mesh,
        )
        if not bool(jnp.isfinite(y).all() & jnp.isfinite(x.astype(jnp.float32)).all()):
            raise RunError(f"the model's scores in batch {number} are not finite: its weights are not to be trusted")
        if self._lm.mesh is not None:  # what is fitted is on one device
            x, y = (jnp.asarray(np.asarray(z)) for z in (x, y))
        return sums, x, y


def _run(args: Namespace) -> None:
    _check(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "resume", "save_every")}
    _fresh(args.output, args.resume, settings)
    import kvsparse_jax as kvs  # here, so that --help and mistakes answer at once
    from kvsparse_jax import corpus, distributed
    from kvsparse_jax.models.sharding import check_heads, make_mesh
    from train import surrogate
    from train.data import Loader, Source
    from train.store import Store

    shape = args.mesh_data, args.mesh_fsdp, args.mesh_tensor
    mesh = make_mesh(*shape) if shape != (1, 1, 1) else None
    if args.batch_size % (args.mesh_data * args.mesh_fsdp):
        raise InputError(
            f"--batch-size {args.batch_size} cannot be divided over {args.mesh_data * args.mesh_fsdp} devices "
            f"(--mesh-data {args.mesh_data} x --mesh-fsdp {args.mesh_fsdp}): take a multiple of them"
        )
    lm = kvs.load(args.model, dtype=args.dtype, mesh=mesh).with_policy(kvs.Dense())
    if mesh is not None:
        check_heads(mesh, lm.config.kv_heads)
    if lm.tokenizer is None:
        raise InputError(f"{args.model} has no tokenizer, so no text can be read")
    tokenizer = lm.tokenizer
    lm.config.needs_full_attention("the KVzip oracle")
    collect = _Collector(lm, args)
    fit = _Fit(args, lm.config, ml_dtypes.bfloat16 if args.dtype == "bfloat16" else np.float32)
    sources = [Source.parse(spec) for spec in args.data or [f"builtin:{kind}" for kind in corpus.KINDS]]

    def contexts(split: Literal["train", "heldout"]) -> Contexts:
        loader = Loader(
            sources,
            tokenizer,
            batch_size=1,
            sequence_length=args.max_tokens,
            seed=args.seed,
            split=split,
            heldout_fraction=args.heldout_fraction,
        )
        return Contexts(loader, lengths(args.min_tokens, args.max_tokens), args.batch_size)

    train, heldout = contexts("train"), contexts("heldout")

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(args.output / "checkpoints", 1)) if args.save_every else None
        saved = store.newest(fit.state(), lambda meta: None) if store is not None and args.resume == "auto" else None
        if saved is not None:
            fit.restore(saved.state, saved.meta)
            train.restore(saved.meta["data"])
            print(f"going on after {train.taken * args.batch_size} prompts")
        if mesh is not None:
            fit.sums = distributed.replicate(fit.sums, mesh)
        cli.write_json_atomically(args.output / "run.json", settings)
        batches, done = args.prompts // args.batch_size, train.taken * args.batch_size
        with cli.progress(args.prompts, desc="kvzap", unit="prompts", initial=done) as bar:
            while train.taken < batches:
                number = train.taken
                fit.sums, x, y = collect(fit.sums, next(train), number, fit.sample)
                fit.add(x, y)
                if store is not None and train.taken % args.save_every == 0:
                    store.save(train.taken, fit.state(), {"data": train.state(), **fit.meta()})
                bar.update(args.batch_size)
    fitted = fit.result()
    del fit
    found = {kind: surrogate.Correlation() for kind in fitted}
    scores = []
    with cli.progress(args.heldout_prompts, desc="measuring", unit="prompts") as bar:
        for number in range(args.heldout_prompts // args.batch_size):
            _, x, y = collect(None, next(heldout), number, args.min_tokens)
            predicted = {kind: surrogate.predict_all(params, x) for kind, params in fitted.items()}
            for kind, values in predicted.items():
                found[kind].add(values, y)
            scores.append(np.asarray(predicted[args.kinds[-1]])[list(lm.config.evicting)].ravel())
            bar.update(args.batch_size)
    squared = {kind: correlation.squared() for kind, correlation in found.items()}
    _report(args, fitted, squared, np.concatenate(scores), lm.config.evicting)


def _report(
    args: Namespace,
    fitted: dict[str, Any],
    squared: dict[str, np.ndarray],
    scores: np.ndarray,
    evicting: tuple[int, ...],
) -> None:
    """Writes and prints what was fitted; means are over the layers in which a policy may evict."""
    from kvsparse_jax import plot

    quantiles = {f"{q:.0%}": round(float(np.quantile(scores, q)), 3) for q in (0.25, 0.5, 0.75, 0.875)}
    results = {
        "prompts": args.prompts,
        "heldout_prompts": args.heldout_prompts,
        "squared_pearson": {
            kind: {
                "mean": float(r[list(evicting)].mean()),
                "by_layer": r.mean(1).tolist(),
                "by_layer_and_head": r.tolist(),
            }
            for kind, r in squared.items()
        },
        "threshold_that_evicts": quantiles,
    }
    paths = {kind: KVzap(params).save(args.output / kind) for kind, params in fitted.items()}
    cli.write_json_atomically(args.output / "results.json", results)
    figure = plot.correlation_by_layer_and_head(squared)
    figure.savefig(args.output / "correlation.png", dpi=110)
    kinds = list(squared)
    print("squared Pearson correlation on held-out prompts")
    print("layer  " + "  ".join(f"{kind:>7}" for kind in kinds))
    for layer in evicting:
        print(f"{layer:>5}  " + "  ".join(f"{squared[kind][layer].mean():7.3f}" for kind in kinds))
    print(" mean  " + "  ".join(f"{squared[kind][list(evicting)].mean():7.3f}" for kind in kinds))
    told = ", ".join(f"{share} of the tokens: {value}" for share, value in quantiles.items())
    print(f"threshold that evicts (of {args.kinds[-1]}) {told}")
    for kind, path in paths.items():
        print(f"{kind}: {path}")
    print(f"results: {args.output / 'results.json'}")
    print(f"figure: {args.output / 'correlation.png'}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

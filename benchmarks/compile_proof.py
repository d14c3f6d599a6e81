"""Proof by compilation: steps of big models, compiled for accelerators that are not there, from shapes only.

    python -m benchmarks.compile_proof                    # a small model on this machine's (virtual) devices
    make proof                                            # for H100 and TPU: what CI does, three minutes or more
    make proof ARGS="--case '*'"                          # all

XLA compiles for a described GPU (``kernels/targets``) or TPU as it does for a real one; it needs the packages of the
extra ``aot`` on Python's path (see ``make proof``). The compiled program tells the bytes of a device and
which collectives run, how often and how large. A case fails where

* arguments and temporaries exceed the device's memory;
* a collective gives more than the output head, the largest tensor of a model: weights come together layer by layer;
* activations are summed over devices that divide the weights: all rows would then be computed everywhere;
* an array has two axes as long as the sequence: attention is blockwise.

A decode step instead may gather no more than the logits of its sequences, and is compared with the planner's bytes. On
a TPU, and in the cases of its decode kernel alone, the kernel has to be there and nothing as large as the keys may be
temporary: no pool is copied.

It says nothing about speed.
"""

import argparse
import dataclasses
import fnmatch
import functools
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kernels.ragged_decode import pallas_tpu
from kvsparse_jax import cli, plan
from kvsparse_jax.cache import paged
from kvsparse_jax.cache.base import bucket
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.cache.store import shardings
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation import decode as decoding
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.sharding import make_mesh, sharding
from kvsparse_jax.policies import DMS
from kvsparse_jax.sampling import sampling
from train import trainer
from train.config import RetrofitConfig, load_preset
from train.step import Batch, Objective, State, make_step

ROOT = Path(__file__).resolve().parent.parent

HOST = 8
"""Devices of a host; numbers of devices that follow one another are on one."""


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: a name of :data:`kvsparse_jax.plan.PUBLISHED`.
        preset: of train/presets, whose recipe is trained; None: a decode step under DMS at CR 8, window 512.
        target: "h100", "v5e", "v6e", or "cpu" for this machine's devices.
        mesh: (data, fsdp, tensor).
        rows, length: of a micro-batch; sequences and context of the decode step.
    """

    model: str
    preset: str | None
    target: str
    mesh: tuple[int, int, int]
    rows: int
    length: int


CASES = {
    "cpu": Case("SmolLM2-135M", "llama-3.2-1b", "cpu", (1, 4, 1), 4, 2048),
    "cpu-tensor": Case("SmolLM2-135M", "llama-3.2-1b", "cpu", (1, 1, 3), 2, 2048),
    "h100-llama-1b": Case("Llama-3.2-1B", "llama-3.2-1b", "h100", (1, 1, 1), 8, 4096),
    "h100x8-qwen3-8b": Case("Qwen3-8B", "qwen3-8b", "h100", (1, 8, 1), 8, 32768),
    "h100x8-r1-32b": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (1, 8, 1), 8, 32768),
    # Longer than the recipe: what a device holds without dividing the sequence.
    "h100x8-qwen3-8b-128k": Case("Qwen3-8B", "qwen3-8b", "h100", (1, 8, 1), 8, 131072),
    "h100x8-r1-32b-64k": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (1, 8, 1), 8, 65536),
    # More hosts of 8: rows over all of them, weights in pieces on each host, or in pieces over all.
    "h100x64-qwen3-8b": Case("Qwen3-8B", "qwen3-8b", "h100", (8, 8, 1), 64, 32768),
    "h100x512-qwen3-8b": Case("Qwen3-8B", "qwen3-8b", "h100", (64, 8, 1), 512, 32768),
    "h100x64-qwen3-8b-fsdp": Case("Qwen3-8B", "qwen3-8b", "h100", (1, 64, 1), 64, 32768),
    "h100x512-qwen3-8b-fsdp": Case("Qwen3-8B", "qwen3-8b", "h100", (1, 512, 1), 512, 32768),
    "h100x64-r1-32b": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (8, 8, 1), 64, 32768),
    "h100x512-r1-32b": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (64, 8, 1), 512, 32768),
    "h100x64-r1-32b-fsdp": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (1, 64, 1), 64, 32768),
    "h100x512-r1-32b-fsdp": Case("R1-distill-Qwen-32B", "qwen3-8b", "h100", (1, 512, 1), 512, 32768),
    "v5e-8-qwen3-8b": Case("Qwen3-8B", "qwen3-8b", "v5e", (1, 8, 1), 8, 8192),
    "v6e-8-qwen3-8b": Case("Qwen3-8B", "qwen3-8b", "v6e", (1, 8, 1), 8, 32768),
    "cpu-decode": Case("SmolLM2-135M", None, "cpu", (1, 1, 1), 4, 2048),
    "cpu-decode-tensor": Case("SmolLM2-135M", None, "cpu", (1, 1, 3), 4, 2048),
    "h100-decode-llama-1b": Case("Llama-3.2-1B", None, "h100", (1, 1, 1), 448, 32768),
    "h100-decode-qwen3-8b": Case("Qwen3-8B", None, "h100", (1, 1, 1), 80, 32768),
    "h100x8-decode-qwen3-8b": Case("Qwen3-8B", None, "h100", (1, 1, 8), 800, 32768),
    "h100x8-decode-r1-32b": Case("R1-distill-Qwen-32B", None, "h100", (1, 1, 8), 408, 32768),
    "v5e-decode-llama-1b": Case("Llama-3.2-1B", None, "v5e", (1, 1, 1), 72, 32768),
    "v5e-8-decode-qwen3-8b": Case("Qwen3-8B", None, "v5e", (1, 1, 8), 128, 32768),
    "v6e-8-decode-qwen3-8b": Case("Qwen3-8B", None, "v6e", (1, 1, 8), 288, 32768),
}

KERNELS = {
    f"{target}-kernel-{name}": (target, *case)
    for target in ("v5e", "v6e")
    for name, case in pallas_tpu.aot_cases().items()
}
"""The TPU's decode kernel by itself: target, function and shapes."""


def devices(target: str, count: int) -> list[jax.Device]:
    """Devices to compile for.

    Raises:
        RunError: what compiles for them is not installed, or there are too few.
    """
    if target == "cpu":
        found = jax.devices()
        if len(found) < count:
            raise RunError(
                f"needs {count} devices, there are {len(found)}: XLA_FLAGS=--xla_force_host_platform_device_count=8"
            )
        return found[:count]
    if target in ("v5e", "v6e"):
        if importlib.util.find_spec("libtpu") is None:
            raise RunError(
                "compiling for a TPU needs the packages of the extra `aot` on Python's path: see `make proof`"
            )
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the machine's metadata server, and waits
        return list(topologies.get_topology_desc(f"{target}:2x4", platform="tpu").devices)[:count]
    if importlib.util.find_spec("jax_plugins") is None:
        raise RunError("compiling for a GPU needs the packages of the extra `aot` on Python's path: see `make proof`")
    description = (ROOT / "kernels" / "targets" / f"{target}.txtpb").read_text()
    return list(
        topologies.get_topology_desc(
            topology_name=target,
            platform="cuda",
            target_config=description,
            topology=f"1x{-(-count // HOST)}x{min(count, HOST)}",
        ).devices
    )


def _placed(mesh: Mesh, x: Any, *parts: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*parts)))


def _params(mesh: Mesh, config: ModelConfig, dtype: Any) -> Any:
    return jax.tree.map(
        lambda axes, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, axes, x.shape)),
        decoder.logical_axes(config),
        decoder.abstract_params(config, jnp.dtype(dtype)),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def compiled(case: Case) -> tuple[ModelConfig, Any]:
    """The model's shape, and the step that the trainer or a session would run, compiled; nothing is allocated."""
    mesh = make_mesh(*case.mesh, devices=devices(case.target, math.prod(case.mesh)))
    config = plan.model_config(case.model)
    lower = _decode if case.preset is None else _training
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # names of axes are logical until they are mapped
        step, arguments = lower(case, config, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return config, step.lower(*arguments).compile()


def _training(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The jitted training step and the shapes of its arguments."""
    assert case.preset is not None
    settings = {**load_preset(case.preset), "output": "unused", "batch_size": case.rows, "accumulate": 1}
    # The ratio is a number at run time, and changes nothing here.
    settings |= {"sequence_length": case.length, "target_cr": 2.0, "mesh_fsdp": case.mesh[1]}
    recipe = RetrofitConfig(**settings)
    objective = Objective(
        eos_token_ids=(0,),
        direction=recipe.direction,
        budget=recipe.budget,
        mask=recipe.mask,
        teacher=recipe.teacher,
        remat=recipe.remat,
        dtype=jnp.dtype(recipe.dtype),
    )
    optimizer = trainer.make_optimizer(recipe)
    place = functools.partial(_placed, mesh)
    policy = DMS(None, window=recipe.window, shift=recipe.shift)
    trainable = jax.tree.map(place, {"policy": policy.abstract_params(config)})
    moments = jax.tree.map(place, jax.eval_shape(optimizer.init, trainable))
    state = State(trainable, moments, place(jax.ShapeDtypeStruct((), jnp.int32)))
    step = make_step(
        config,
        objective,
        optimizer,
        recipe.schedule,
        mesh=mesh if mesh.size > 1 else None,
        shardings=(jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, PartitionSpec())),
    )
    ids = place(jax.ShapeDtypeStruct((1, case.rows, case.length), jnp.int32), None, ("data", "fsdp"))
    key = place(jax.eval_shape(lambda: jax.random.key(0)))
    healthy = place(jax.ShapeDtypeStruct((), jnp.bool_))
    model = _params(mesh, config, recipe.dtype)
    return step, (state, {"model": model}, None, policy, Batch(ids, ids, ids), key, healthy)


def _planned(case: Case, config: ModelConfig) -> plan.Plan:
    device = plan.find("H100" if case.target == "cpu" else case.target)
    return plan.Plan(config, device, plan.Workload(case.length), plan.Compression("dms", 8.0, 512), case.mesh[2])


def _decode(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The decode loop on pages as the planner counts them, placed as a session places them."""
    place = functools.partial(_placed, mesh)
    policy = DMS(None, window=512)
    policy = dataclasses.replace(policy, params=jax.tree.map(place, policy.abstract_params(config)))
    planned = _planned(case, config)
    pages = math.ceil(case.rows * planned.pages()) * planned.shards
    spec = dataclasses.replace(CacheSpec.of(config, policy, jnp.bfloat16), max_positions=case.length)
    shape: dict[str, Any] = dict(pages=pages, width=bucket(case.length // 64), mesh=mesh)
    cache = jax.eval_shape(lambda: paged.init(spec, case.rows, **shape))
    where = shardings(cache, NamedSharding(mesh, PartitionSpec()))
    cache = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), cache, where)
    row = place(jax.ShapeDtypeStruct((case.rows,), jnp.int32))
    stops = jnp.full((case.rows, 4), -1, jnp.int32)
    sampler = jax.eval_shape(lambda: decoding.Sampler(sampling(case.rows, temperature=0.6), stops))
    model = decoding.Model(_params(mesh, config, jnp.bfloat16), policy, config, mesh if mesh.size > 1 else None)
    steps = place(jax.ShapeDtypeStruct((), jnp.int32))
    return decoding.decode, (model, jax.tree.map(place, sampler), decoding.State(cache, row, row, None), steps)


# Reading the program

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        kind: such as "all-gather".
        shape: of its largest array, as XLA writes it.
        nbytes: of that.
        times: how often a step runs it, as far as the trip counts of its loops are known.
        total: bytes of all arrays that it results in.
        devices: that take part in it together.
        hosts: on how many hosts those are.
    """

    kind: str
    shape: str
    nbytes: int
    times: int
    total: int
    devices: int
    hosts: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one run, in a ring."""
        n = self.devices
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
        return self.total * share.get(self.kind, (n - 1) / n)


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(kind, tuple(map(int, dims.split(",")) if dims else ())) for kind, dims in _ARRAY.findall(text)]


def _groups(line: str) -> np.ndarray:
    """Numbers of the devices that take part in a collective together, [groups, devices of each]."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        inner = re.findall(r"'(\w+)'", mesh[2])
        order = [i for i, name in enumerate(sizes) if name not in inner] + [list(sizes).index(name) for name in inner]
        table = np.arange(math.prod(sizes.values())).reshape(*sizes.values()).transpose(order)
        return table.reshape(-1, math.prod(sizes[name] for name in inner))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = list(map(int, iota[3].split(",")))
        order = list(map(int, iota[4].split(","))) if iota[4] else list(range(len(dims)))
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if told := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", line):
        return np.asarray([list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", told[1])])
    return np.zeros((1, 1), int)


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often the loop of a line runs: as XLA says, or as its condition compares a counter with a constant."""
    if told := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(told[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    text = "\n".join(bodies.get(condition[1], ())) if condition else ""
    bounds = re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)
    return int(bounds[0]) if len(bounds) == 1 and re.search(r"ROOT .*compare\(.*direction=LT", text) else 1


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a compiled program, each with how often it runs."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            name = head[1]
        bodies.setdefault(name, []).append(line)
    entry = re.search(r"^ENTRY %?([\w.-]+)", hlo, re.MULTILINE)
    times: dict[str, int] = {}

    def visit(name: str, factor: int) -> None:
        times[name] = times.get(name, 0) + factor
        for line in bodies.get(name, ()):
            for kind, callees in re.findall(
                r"(body|to_apply|calls|\w+_computations?)=\{?((?:%?[\w.-]+(?:, )?)+)", line
            ):
                for callee in re.findall(r"%([\w.-]+)", callees):
                    visit(callee, factor * (_trips(line, bodies) if kind == "body" else 1))

    visit(entry[1] if entry else "", 1)
    found: dict[str, Collective] = {}
    for name, lines in bodies.items():
        for line in lines:
            match = re.search(rf"= (.*?) ({_KINDS})(?:-start)?\(([^)]*)\)", line)
            if match and times.get(name):
                sizes = [
                    (math.prod(dims) * _BYTES.get(kind, 4), f"{kind}{list(dims)}") for kind, dims in _arrays(match[1])
                ]
                nbytes, shape = max(sizes)
                # What starts and ends apart has its operands before the results.
                count = match[3].count("%")
                results = sizes[count : 2 * count] if len(sizes) >= 2 * count else sizes
                groups = _groups(line)
                hosts = max(len(set(group // HOST)) for group in groups)
                total = sum(size for size, _ in results)
                # Where XLA:TPU fuses it with products, its start, course and end are one each, of one channel.
                channel = re.search(r"channel_id=\d+", line)
                one = Collective(match[2], shape, nbytes, times[name], total, groups.shape[1], hosts)
                found.setdefault(channel[0] if channel else line, one)
    return list(found.values())


def faults(case: Case, config: ModelConfig, hlo: str, held: int) -> list[str]:
    """What is wrong with a compiled step that takes ``held`` bytes per device; empty where nothing is."""
    wrong = []
    if case.target != "cpu" and held > plan.find(case.target).memory:
        wrong.append(f"{held / 1e9:.1f} GB do not fit {plan.find(case.target).memory / 1e9:g} GB")
    if case.preset is None:
        logits = case.rows * config.vocab_size * 4
        return wrong + [
            f"{one.kind} of {one.shape}: more than the logits" for one in collectives(hlo) if one.nbytes > logits
        ]
    head = config.vocab_size * config.hidden_size * 2
    rows = case.rows // (case.mesh[0] * case.mesh[1]) * case.length
    for one in collectives(hlo):
        # XLA:CPU computes in float32 what is given in bfloat16.
        if one.nbytes > max(head, rows * config.hidden_size * 2) * (2 if case.target == "cpu" else 1):
            wrong.append(f"{one.kind} of {one.shape}: more than any tensor of the model")
        dims = _arrays(one.shape.replace(" ", ""))[0][1]
        if case.mesh[2] == 1 and one.kind == "all-reduce" and case.length in dims:
            wrong.append(f"{one.kind} of {one.shape}: activations of all rows on every device")
    widths = (config.hidden_size, config.intermediate_size, config.vocab_size)
    for kind, dims in sorted(set(_arrays(hlo))):
        if dims.count(case.length) > 1 and case.length not in widths:
            wrong.append(f"an array {kind}{list(dims)}: attention is not blockwise")
    return wrong


def prove(case: Case) -> dict[str, Any]:
    """Compiles a case; its figures and faults."""
    start = time.perf_counter()
    config, program = compiled(case)
    memory, hlo = program.memory_analysis(), program.as_text()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    held += memory.temp_size_in_bytes
    totals: dict[str, dict[str, int]] = {}
    for one in collectives(hlo):
        empty = {"programs": 0, "runs": 0, "bytes": 0, "largest": 0, "sent": 0, "sent_between_hosts": 0}
        kind = totals.setdefault(one.kind, empty)
        kind["programs"] += 1
        kind["runs"] += one.times
        kind["bytes"] += one.times * one.total
        kind["sent" if one.hosts == 1 else "sent_between_hosts"] += round(one.times * one.sent)
        kind["largest"] = max(kind["largest"], one.nbytes)
    wrong = faults(case, config, hlo, held)
    planned = None
    if case.preset is None:
        planned = _planned(case, config).memory(case.rows)
        if case.target in ("v5e", "v6e"):
            keys = _planned(case, config).pages() * case.rows * 64 * config.head_dim * 2
            wrong += kernel_faults(hlo, round(keys), memory.temp_size_in_bytes)
    return {
        "case": asdict(case),
        "planned_bytes": planned,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_per_device": held,
        "collectives": totals,
        "faults": wrong,
        "seconds": time.perf_counter() - start,
    }


def kernel_faults(hlo: str, keys: int, temporary: int) -> list[str]:
    """What is wrong with a program for a TPU that has the decode kernel in it, given the bytes of the pool's keys."""
    wrong = [] if re.search(r'custom-call.*"tpu_custom_call"', hlo) else ["the decode kernel is not in it"]
    return wrong + [f"temporaries of {temporary / 1e9:.2f} GB: a pool is copied"] * (temporary >= keys)


def prove_kernel(name: str) -> dict[str, Any]:
    """Compiles a case of :data:`KERNELS`; its figures and faults."""
    start = time.perf_counter()
    target, function, arguments = KERNELS[name]
    mesh = make_mesh(1, 1, 1, devices=devices(target, 1))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(function).lower(*(_placed(mesh, x) for x in arguments)).compile()
    memory = program.memory_analysis()
    keys = math.prod(arguments[1].shape) * arguments[1].dtype.itemsize
    return {
        "case": {"kernel": name, "target": target},
        "planned_bytes": None,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": {},
        "faults": kernel_faults(program.as_text(), keys, memory.temp_size_in_bytes),
        "seconds": time.perf_counter() - start,
    }


def _run(args: argparse.Namespace) -> None:
    known = [*CASES, *KERNELS]
    names = [name for name in known if any(fnmatch.fnmatchcase(name, p) for p in args.case.split(","))]
    if not names:
        raise InputError(f"no case is named {args.case}; there are {', '.join(known)}")
    found = {}
    for name in names:
        try:
            found[name] = row = prove(CASES[name]) if name in CASES else prove_kernel(name)
        except jax.errors.JaxRuntimeError as error:  # as where a TPU's memory does not suffice
            found[name] = row = {
                "case": asdict(CASES[name]) if name in CASES else {"kernel": name},
                "faults": [f"does not compile: {error}"],
            }
            print(f"{name}: FAULT {row['faults'][0]}")
            continue
        print(
            f"{name}: arguments {row['argument_bytes'] / 1e9:.2f} GB, temporaries "
            f"{row['temporary_bytes'] / 1e9:.2f} GB per device ({row['seconds']:.0f} s)",
            flush=True,
        )
        if row["planned_bytes"]:
            print(f"    the planner counts {row['planned_bytes'] / 1e9:.2f} GB")
        for kind, one in row["collectives"].items():
            print(f"    {kind}: {one['runs']} runs, {one['bytes'] / 1e9:.2f} GB, largest {one['largest'] / 1e6:.1f} MB")
        for fault in row["faults"]:
            print(f"    FAULT {fault}")
    if args.json is not None:
        print(cli.write_json_atomically(args.json, {"jax": jax.__version__, "cases": found}))
    if wrong := [name for name, row in found.items() if row["faults"]]:
        raise RunError(f"not as they should be: {', '.join(wrong)}")


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.compile_proof", (__doc__ or "").partition("XLA compiles")[0].strip())
    parser.add_argument("--case", default="cpu", help=f"comma-separated patterns of: {', '.join([*CASES, *KERNELS])}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the GPU kernels to sm_90a machine code on a machine without a GPU, and checks what came out.

``CASES`` is ``{name: (function, (ShapeDtypeStruct, ...))}``: every kernel at every shape that has to work. ``make aot``
installs what it takes (the extra ``aot``) and runs this module, which compiles each case for an H200, prints a table
with a row per kernel, and fails unless

* every case compiles, without spilling registers and within the shared memory of a block (227 KB);
* ptxas has not made the asynchronous products (wgmma) wait for each other;
* every case named ``attention_*`` or ``decode_*`` multiplies on the tensor cores (HGMMA).

XLA compiles a Mosaic kernel together with the program around it, and takes the GPU from a description of one
(``targets/``), so that Mosaic's passes, LLVM and ptxas run for real. It says nothing of results or speed.
"""

import argparse
import dataclasses
import fnmatch
import importlib.util
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from kernels.delayed_eviction import mosaic as delayed_eviction
from kernels.delayed_eviction import mosaic_backward as delayed_backward
from kernels.hopper import SHARED_MEMORY, plgpu, tiled
from kernels.ragged_decode import mosaic as ragged_decode

Case = tuple[Callable[..., Any], tuple[Any, ...]]

_OPCODES = ("HGMMA", "UTMALDG", "UTMASTG", "LDL", "STL")


def _toolchain() -> dict[str, Case]:
    """A product of two tiles: where this fails, the installation is at fault, not a kernel."""
    tile = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def body(a: Any, b: Any, out: Any, a_smem: Any, b_smem: Any, out_smem: Any, landed: Any) -> None:
        plgpu.copy_gmem_to_smem(a, a_smem, landed)
        plgpu.copy_gmem_to_smem(b, b_smem, landed)
        plgpu.barrier_wait(landed)

        def product(acc: Any) -> Any:
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out_smem[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out)
        plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(jnp.bfloat16, 64))
    product = plgpu.kernel(
        body, out_type=tile, scratch_types=[smem, smem, smem, plgpu.Barrier(num_arrivals=2)], kernel_name="toolchain"
    )
    return {"toolchain": (product, (tile, tile))}


def cases() -> dict[str, Case]:
    """All cases, gathered from the operations. A new operation adds its line here."""
    return {
        **_toolchain(),
        **delayed_eviction.aot_cases(),
        **delayed_backward.aot_cases(),
        **ragged_decode.aot_cases(),
    }


CASES = cases()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one compiled kernel takes.

    Attributes:
        name: of the kernel, as Mosaic numbers it.
        threads: threads per block.
        registers: per thread when the block starts (warpgroups may trade them afterwards).
        shared: bytes of shared memory per block.
        spilled: bytes of registers that are stored to and loaded from local memory.
        serialised: ptxas has made the asynchronous products wait for each other.
        opcodes: machine instructions by kind.
    """

    name: str
    threads: int
    registers: int
    shared: int
    spilled: int
    serialised: bool
    opcodes: dict[str, int]

    @property
    def blocks_per_core(self) -> int:
        """Blocks that a multiprocessor holds at once, by registers, shared memory (1 KB is lost per block), threads."""
        warps = -(-self.threads // 32)
        registers = -(-self.registers * 32 // 256) * 256 * warps
        return min(65536 // registers, 228 * 1024 // (self.shared + 1024), 2048 // self.threads)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _kernel(ptx: Path) -> Kernel:
    """Reads what Mosaic has written about one kernel."""
    code, log = ptx.read_text(), ptx.with_suffix(".ptxas").read_text()
    block = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", code)
    registers = _number(r"Used (\d+) registers", log)
    if block is None or registers is None:
        raise ValueError(f"{ptx.name}: the reports of Mosaic or ptxas have another form than this program knows")
    dynamic = 0
    with ptx.with_suffix(".mlir-passes.log").open(errors="replace") as passes:
        for line in passes:
            dynamic = _number(r"mosaic_gpu\.smem_bytes = (\d+)", line) or dynamic
    sass = ptx.with_suffix(".sass_ctrl").read_text()
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass)
    return Kernel(
        name=ptx.stem,
        threads=int(block[1]) * int(block[2] or 1) * int(block[3] or 1),
        registers=registers,
        shared=dynamic + (_number(r"(\d+) bytes smem", log) or 0),
        spilled=sum(_number(rf"(\d+) bytes spill {kind}", log) or 0 for kind in ("stores", "loads")),
        serialised="wgmma" in log and "serialized" in log,
        opcodes={code: sum(i.split(".")[0] == code for i in instructions) for code in _OPCODES},
    )


def faults(name: str, kernels: list[Kernel]) -> list[str]:
    """What is wrong with the kernels of a case; empty where nothing is."""
    found = [] if kernels else ["no Mosaic kernel was compiled"]
    for k in kernels:
        if k.spilled:
            found.append(f"{k.name}: {k.spilled} bytes of registers are spilled")
        if k.serialised:
            found.append(f"{k.name}: ptxas has serialised wgmma")
        if k.shared > SHARED_MEMORY:
            found.append(f"{k.name}: {k.shared} bytes of shared memory, more than {SHARED_MEMORY}")
    if name.startswith(("attention_", "decode_")) and kernels and not any(k.opcodes["HGMMA"] for k in kernels):
        found.append("no HGMMA instruction")
    return found


def _compile(name: str, target: str) -> None:
    """Compiles one case; Mosaic writes where its environment says."""
    function, arguments = CASES[name]
    description = (Path(__file__).parent / "targets" / f"{target}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        topology_name=target, platform="cuda", target_config=description, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    jax.config.update("jax_enable_compilation_cache", False)
    # Mosaic overwrites this variable when it is imported, and looks for nvdisasm there.
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["AOT_CUDA_ROOT"]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).lower(*placed).compile()


def _serve(target: str) -> None:
    """Compiles the case that each line of the standard input names, into the folder that follows, and answers."""
    for line in sys.stdin:
        name, folder = line.rstrip("\n").split("\t")
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            _compile(name, target)
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        jax.clear_caches()
        print(f"{_ANSWER}{answer}", flush=True)


_ANSWER = "aot answer: "
"""What the lines of :func:`_serve` begin with; compilers write to its output, too."""


class _Worker:
    """A process that compiles cases, one after another: to start one takes longer than a case."""

    def __init__(self, target: str, tools: Path, root: Path, log: Path):
        self._command = [sys.executable, "-m", "kernels.aot_cases", "--target", target, "--serve"]
        self._environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("MOSAIC_GPU_", "JAX_COMPILATION"))
        } | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "MOSAIC_GPU_DUMP_TO": str(log.parent),
            "AOT_CUDA_ROOT": str(root),
            # XLA takes the first ptxas on the path; another version than the package's gives other code.
            "PATH": f"{tools}:{os.environ.get('PATH', '')}",
        }
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def compile(self, name: str, folder: Path) -> str:
        """What went wrong, "" if nothing did. A process that dies is replaced for the next case."""
        if self._process is None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name}\t{folder}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return line.removeprefix(_ANSWER).strip()
        status = self._process.wait()
        self._process = None
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"the compiler ended with status {status}: {lines[-1] if lines else 'no message'}"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _tools() -> Path | None:
    """The folder with ptxas and nvdisasm of the CUDA packages on Python's path."""
    for entry in sys.path:
        tools = Path(entry) / "nvidia" / "cu13" / "bin"
        if all(os.access(tools / tool, os.X_OK) for tool in ("ptxas", "nvdisasm")):
            return tools.absolute()
    return None


def _cuda_root(tools: Path, folder: Path) -> Path:
    """A CUDA folder whose nvdisasm also removes its input, which Mosaic leaves behind in a temporary folder."""
    wrapper = folder / "bin" / "nvdisasm"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(
        f"""#!/bin/sh
'{tools}/nvdisasm' "$@"
status=$?
for argument in "$@"; do
    case $argument in */mosaic-gpu-*/kernel.bin) rm -f "$argument" && rmdir "${{argument%/*}}" ;; esac
done
exit $status
"""
    )
    wrapper.chmod(0o755)
    return folder


def _attempt(name: str, worker: _Worker, folder: Path) -> tuple[list[Kernel], list[str]]:
    """Compiles a case. Returns the kernels that were written, and its faults."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if answer := worker.compile(name, folder):
        return [], [f"does not compile: {answer[:300]}"]
    kernels = [_kernel(ptx) for ptx in sorted(folder.glob("*.ptx"), key=lambda p: (len(p.stem), p.stem))]
    return kernels, faults(name, kernels)


def _run(name: str, workers: "queue.SimpleQueue[_Worker]", folder: Path) -> tuple[list[Kernel], list[str], float]:
    """Compiles a case with a free worker. Returns its kernels, its faults and the seconds that it took."""
    worker = workers.get()
    start = time.perf_counter()
    kernels, found = _attempt(name, worker, folder)
    if found:
        # A kernel that the process has compiled before, for another case, is not written again: what is missing then
        # is in a process of its own. (Where only some are missing they have been reported with that other case.)
        worker.close()
        kernels, found = _attempt(name, worker, folder)
    workers.put(worker)
    for bulky in [*folder.glob("*.mlir-passes.log"), *folder.glob("*_layout_inference.txt")]:
        bulky.unlink()
    return kernels, found, time.perf_counter() - start


_COLUMNS = ("case", "kernel", "threads", "registers", "shared KB", "blocks/SM", "HGMMA", "spilled", "seconds", "")


def _row(name: str, k: Kernel | None, seconds: float, verdict: str) -> tuple[str, ...]:
    figures = ["-"] * 7
    if k is not None:
        numbers = (k.threads, k.registers, f"{k.shared / 1024:.1f}", k.blocks_per_core, k.opcodes["HGMMA"], k.spilled)
        figures = [k.name, *map(str, numbers)]
    return (name, *figures, f"{seconds:.1f}", verdict)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns 0 if every case is right, 1 if not, 2 if it cannot be run as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot_cases",
        description="Compile the GPU kernels for Hopper without a GPU and check registers, memory and instructions.",
    )
    parser.add_argument("--case", default="*", help='comma-separated patterns of case names (default "*", all)')
    parser.add_argument("--target", choices=("h200", "h100"), default="h200", help="GPU (default h200)")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="cases at once (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="folder that keeps PTX, machine code, logs and report.json")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        _serve(args.target)
        return 0
    patterns = args.case.split(",")
    names = [name for name in CASES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        print(f"error: no case is named {args.case}; --list shows them", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(names))
        return 0
    tools = _tools()
    if tools is None or importlib.util.find_spec("jax_plugins") is None:
        print(
            "error: the packages of the extra `aot` are not on Python's path: `make aot` installs them", file=sys.stderr
        )
        return 2
    print(f"jax {jax.__version__}, target {args.target}, {len(names)} cases, {args.jobs} at once", flush=True)
    with tempfile.TemporaryDirectory(prefix="aot-") as scratch:
        root = _cuda_root(tools, Path(scratch) / "cuda")
        output = (args.output or Path(scratch)).absolute()
        report: dict[str, Any] = {}
        wide = max(map(len, names))
        line = f"{{:{wide}}}  {{:24}} {{:>7}} {{:>9}} {{:>9}} {{:>9}} {{:>6}} {{:>7}} {{:>7}}  {{}}"
        print(line.format(*_COLUMNS), flush=True)
        output.mkdir(parents=True, exist_ok=True)
        free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        workers = [_Worker(args.target, tools, root, output / f"log{i}.txt") for i in range(max(1, args.jobs))]
        for worker in workers:
            free.put(worker)
        with ThreadPoolExecutor(len(workers)) as pool:
            jobs = {name: pool.submit(_run, name, free, output / name) for name in names}
            for name, job in jobs.items():
                kernels, found, seconds = job.result()
                rows: list[Kernel | None] = [*kernels] or [None]
                for k in rows:
                    print(line.format(*_row(name, k, seconds, "FAILED" if found else "ok")), flush=True)
                for fault in found:
                    print(f"    {fault}", flush=True)
                figures = [dataclasses.asdict(k) | {"blocks_per_core": k.blocks_per_core} for k in kernels]
                report[name] = {"faults": found, "kernels": figures}
        for worker in workers:
            worker.close()
        wrong = [name for name, result in report.items() if result["faults"]]
        if args.output:
            text = json.dumps({"jax": jax.__version__, "target": args.target, "cases": report}, indent=1)
            (output / "report.json").write_text(text + "\n")
            print(f"PTX, machine code and report.json are in {output}")
    print(
        f"{len(names) - len(wrong)} of {len(names)} cases are right" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Settings of a retrofit: one frozen dataclass, filled from its defaults, a preset file and the command line.

config = RetrofitConfig(model="Qwen/Qwen3-8B", data=("chats.jsonl",), output="runs/qwen")
config = RetrofitConfig(**{**load_preset("qwen3-8b"), "output": "runs/qwen"})
"""

import argparse
import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvsparse_jax import cli
from kvsparse_jax.errors import InputError
from train import losses
from train.losses import Direction
from train.step import Remat

PRESETS = Path(__file__).parent / "presets"

PROG = "python -m train.retrofit"
DESCRIPTION = """Trains DMS eviction (arXiv 2506.05345) into a pretrained language model.

The output directory gets run.json (the effective configuration), metrics.jsonl, tensorboard/, checkpoints/,
exports/cr-N/ (a model at each whole compression ratio on the way) and model/ (the result). Both are Hugging Face
directories; kvsparse_jax.load opens them, and the output directory itself."""
EPILOG = """examples:
  python -m train.retrofit --preset qwen3-8b --output runs/qwen3-8b
  python -m train.retrofit --model smollm2-135m --data builtin:code --data chats.jsonl:2 --output runs/small \\
      --target-cr 4 --window 64 --sequence-length 1024 --batch-size 1 --steps 200 --resume auto
"""


def _setting(default: Any, text: str, group: str, *, unit: str | None = None, choices: Sequence[Any] = ()) -> Any:
    metadata = {"help": text, "group": group, "unit": unit, "choices": tuple(choices)}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


_MODEL, _DATA, _DMS, _TRAIN, _SPEED, _RUN = "model", "data", "eviction", "training", "speed and memory", "run"

Init = Literal["oracle", "zero"]
Train = Literal["adapter", "lora", "all"]


@dataclass(frozen=True, kw_only=True)
class RetrofitConfig:
    """Every setting of a retrofit; the help text of each is its documentation.

    Raises:
        InputError: a value out of range, or settings that contradict each other.
    """

    preset: str | None = _setting(
        None, "preset to start from: a name in train/presets or the path of a .toml file; flags win over it", _RUN
    )
    model: str = _setting("", "model to retrofit: hub name, local Hugging Face directory or smollm2-135m", _MODEL)
    data: tuple[str, ...] = _setting(
        (), "training text, PATH[#key=value,...][:WEIGHT]; may be given several times (see train/data.py)", _DATA
    )
    output: str = _setting("", "directory of the run", _RUN)

    target_cr: float = _setting(8.0, "compression ratio at the end of the schedule", _DMS)
    initial_cr: float | None = _setting(
        None, "compression ratio that the schedule starts from (default: 1; with --init oracle that of the end)", _DMS
    )
    cr_steps: int | None = _setting(None, "length of the linear ramp (default: all steps)", _DMS, unit="steps")
    window: int = _setting(
        256, "delay of an eviction: the newest window + 1 tokens are always kept", _DMS, unit="tokens"
    )
    init: Init = _setting(
        "zero", "adapters start at zero, or fitted to an attention oracle", _DMS, choices=get_args(Init)
    )
    init_rows: int = _setting(32, "rows that the oracle is fitted on", _DMS, unit="rows")
    init_slope: float = _setting(2.0, "decision logit per nat of the oracle's importance", _DMS)
    variant: Literal["adapter", "neuron"] = _setting(
        "adapter", "decisions from an adapter, or from a borrowed query channel", _DMS, choices=("adapter", "neuron")
    )
    per: Literal["head", "layer"] = _setting("head", "who decides alone", _DMS, choices=("head", "layer"))
    shift: int = _setting(1, "token k + shift decides about token k", _DMS, choices=(0, 1))
    scale: float = _setting(100.0, "factor on the decision logit", _DMS)
    offset: float = _setting(5.0, "what is subtracted from the decision logit", _DMS)
    tau: float = _setting(0.1, "temperature of the relaxed decisions", _DMS)
    fade_steps: int = _setting(
        0, "neuron variant: steps before the schedule, in which the borrowed channel fades to zero", _DMS, unit="steps"
    )
    budget: Literal["row", "global"] = _setting(
        "row", "budget hinge per row (as released) or over the global batch", _DMS, choices=("row", "global")
    )
    mask: Literal["soft", "hard"] = _setting(
        "soft", "weighing of late keys in training", _DMS, choices=("soft", "hard")
    )
    calibrate: bool = _setting(
        False, "at an export, set the offset so that the measured compression ratio is the named one", _DMS
    )
    calibrate_rows: int = _setting(8, "rows that the offset is calibrated on", _DMS, unit="rows")

    train: Train = _setting(
        "adapter",
        "what is trained: the adapters, also low-rank updates, or everything",
        _TRAIN,
        choices=get_args(Train),
    )
    lora_rank: int = _setting(16, "rank of the low-rank updates", _TRAIN)
    lora_alpha: float = _setting(32.0, "the updates are multiplied by alpha / rank", _TRAIN)
    lora_targets: tuple[str, ...] = _setting(
        ("q", "k", "v", "o"), "projections that get one, of q k v o gate up down, comma-separated", _TRAIN
    )
    direction: Direction = _setting(
        "student_teacher", "KL(student || teacher) or the other one", _TRAIN, choices=losses.DIRECTIONS
    )
    teacher: Literal["original", "self"] = _setting(
        "original", "the untouched model, or the student's own weights without eviction", _TRAIN,
        choices=("original", "self"),
    )  # fmt: skip
    steps: int = _setting(500, "optimiser steps after any fading", _TRAIN, unit="steps")
    batch_size: int = _setting(8, "global batch", _TRAIN, unit="rows")
    accumulate: int = _setting(1, "micro-batches that the global batch is cut into", _TRAIN)
    sequence_length: int = _setting(4096, "length of a row", _TRAIN, unit="tokens")
    lr: float = _setting(3e-5, "peak learning rate of AdamW", _TRAIN)
    lr_schedule: Literal["constant", "cosine"] = _setting(
        "constant", "after the warm-up (cosine ends at 0)", _TRAIN, choices=("constant", "cosine")
    )
    warmup_steps: int = _setting(0, "linear warm-up of the learning rate", _TRAIN, unit="steps")
    beta1: float = _setting(0.9, "decay of AdamW's first moment", _TRAIN)
    beta2: float = _setting(0.95, "decay of AdamW's second moment", _TRAIN)
    weight_decay: float = _setting(0.0, "decoupled weight decay", _TRAIN)
    clip: float = _setting(1.0, "largest global norm of the gradient; 0 clips nothing", _TRAIN)
    seed: int = _setting(0, "seed of data order, noise and initial values", _TRAIN)

    packing: bool = _setting(True, "fill rows with several documents", _DATA)
    heldout_fraction: float = _setting(0.0, "share of the documents that is kept out of training", _DATA)

    dtype: Literal["bfloat16", "float32"] = _setting(
        "bfloat16", "compute dtype; trained weights are float32", _SPEED, choices=("bfloat16", "float32")
    )
    remat: Remat = _setting(
        "none", "what of a layer the backward pass recomputes: nothing, all but attention, all", _SPEED,
        choices=get_args(Remat),
    )  # fmt: skip
    mesh_data: int | None = _setting(
        None, "devices over which the batch is divided, weights replicated (default: all that are left)", _SPEED
    )
    mesh_fsdp: int = _setting(1, "devices over which batch and weights are divided", _SPEED)
    mesh_tensor: int = _setting(1, "devices over which heads and channels are divided", _SPEED)

    coordinator: str | None = _setting(
        None, "HOST:PORT of the first of several processes, or auto (SLURM, Kubernetes, TPU, MPI)", _SPEED
    )
    processes: int | None = _setting(None, "how many processes there are", _SPEED)
    process_id: int | None = _setting(None, "which of them this is, from 0", _SPEED)

    resume: str = _setting(
        "never", "auto: go on from the newest checkpoint if there is one; never; or the path of a checkpoint", _RUN
    )
    save_every: int = _setting(50, "distance of checkpoints; 0: only the last and when stopped", _RUN, unit="steps")
    keep: int = _setting(2, "newest checkpoints that are kept", _RUN)
    log_every: int = _setting(1, "distance of rows in metrics.jsonl", _RUN, unit="steps")
    export_each_cr: bool = _setting(
        True, "export a model at each whole compression ratio that the schedule passes", _RUN
    )
    tensorboard: bool = _setting(True, "write TensorBoard files", _RUN)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise InputError(f"{f.name} must be one of {', '.join(map(str, choices))}, not {value!r}")
        for name in (
            "init_rows",
            "calibrate_rows",
            "lora_rank",
            "steps",
            "batch_size",
            "accumulate",
            "keep",
            "log_every",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("mesh_fsdp", "mesh_tensor"):
            _at_least(name, getattr(self, name), 1)
        for name in ("window", "fade_steps", "warmup_steps", "save_every", "seed", "weight_decay", "clip"):
            _at_least(name, getattr(self, name), 0)
        for name in ("offset", "scale"):
            if not math.isfinite(getattr(self, name)) or (name == "scale" and not self.scale):
                nonzero = " and not 0" if name == "scale" else ""
                raise InputError(f"{name} must be finite{nonzero}, not {getattr(self, name)}")
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2**63, not {self.seed}")
        for name in ("tau", "lr", "lora_alpha", "init_slope"):
            _positive(name, getattr(self, name))
        for name in ("cr_steps", "mesh_data"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("beta1", "beta2", "heldout_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        _at_least("sequence_length", self.sequence_length, 2)
        self._check_ratios()
        if self.batch_size % self.accumulate:
            raise InputError(f"a batch of {self.batch_size} rows cannot be cut into {self.accumulate} micro-batches")
        unknown = [name for name in self.lora_targets if name not in ("q", "k", "v", "o", "gate", "up", "down")]
        if unknown or not self.lora_targets:
            raise InputError(f"lora_targets must be some of q, k, v, o, gate, up, down, not {list(self.lora_targets)}")
        if self.variant == "neuron":
            if self.train == "adapter":
                raise InputError("the neuron variant has no adapter to train: choose train lora or all")
            if self.init == "oracle":
                raise InputError("init oracle fits adapters: it needs the adapter variant")
        if self.fade_steps and self.variant == "adapter":
            raise InputError("fade_steps is for the neuron variant; adapters need no fading")
        if self.fade_steps and self.teacher == "self":
            raise InputError("fading needs teacher original: with teacher self the teacher fades along")

    def _check_ratios(self) -> None:
        if not (math.isfinite(self.target_cr) and self.target_cr >= 1):
            raise InputError(f"target_cr must be at least 1, not {self.target_cr:g}")
        bound = self.sequence_length / (self.window + 1)
        if self.target_cr > max(bound, 1.0):
            raise InputError(
                f"target_cr {self.target_cr:g} is out of reach: of {self.sequence_length} tokens the newest "
                f"{self.window + 1} always stay, so no physical compression ratio exceeds T/(W+1) = {bound:.3g}; take "
                "a longer sequence_length or a smaller window"
            )
        start = self.start_cr
        if not 1 <= start <= self.target_cr:
            raise InputError(f"initial_cr must be between 1 and target_cr {self.target_cr:g}, not {start:g}")
        if self.init == "oracle" and start <= 1:
            raise InputError("init oracle needs an initial_cr above 1: adapters are fitted to evict that much at once")

    @property
    def start_cr(self) -> float:
        """The compression ratio that the schedule starts from."""
        if self.initial_cr is not None:
            return self.initial_cr
        return self.target_cr if self.init == "oracle" else 1.0

    @property
    def schedule(self) -> losses.Schedule:
        """CR schedule, counted from the end of any fading."""
        return losses.Schedule(self.start_cr, self.target_cr, self.cr_steps or self.steps)

    @property
    def total_steps(self) -> int:
        """Optimiser steps with the fading stage."""
        return self.fade_steps + self.steps

    def require(self) -> None:
        """InputError when something is missing that has no default."""
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise InputError(f"--{name} is missing (on the command line or in the preset)")


def _at_least(name: str, value: float, low: int) -> None:
    if not value >= low:
        raise InputError(f"{name} must be at least {low}, not {value}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be positive, not {value}")


HARMLESS = frozenset(
    (
        "preset",
        "output",
        "data",  # its content is compared by the loader; the path may change
        "resume",
        "save_every",
        "keep",
        "log_every",
        "export_each_cr",
        "tensorboard",
        "calibrate",
        "calibrate_rows",
        "mesh_data",
        "mesh_fsdp",
        "mesh_tensor",
        "coordinator",
        "processes",
        "process_id",
    )
)
"""Settings that may differ when a run is resumed."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``name old -> new`` for each setting that matters and differs; both as :func:`plain` gives them."""
    return [
        f"{name} {old.get(name, 'missing')} -> {new.get(name, 'missing')}"
        for name in sorted(old.keys() | new.keys())
        if name not in HARMLESS and old.get(name) != new.get(name)
    ]


def plain(config: RetrofitConfig) -> dict[str, Any]:
    """The settings as JSON can hold them."""
    return {
        f.name: list(value) if isinstance(value := getattr(config, f.name), tuple) else value
        for f in dataclasses.fields(config)
    }


def load_preset(name: str) -> dict[str, Any]:
    """Settings of a preset.

    Args:
        name: a file in train/presets without its ending, or the path of a .toml file.

    Raises:
        InputError: there is none, it is no TOML, or it names an unknown setting or a value of a wrong type.
    """
    path = PRESETS / f"{name}.toml"
    if not path.is_file():
        path = Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
        raise InputError(f"there is no preset {name!r}: known are {known}, or give the path of a .toml file")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"preset {path} is no TOML: {error}") from None
    settings = {f.name: f for f in dataclasses.fields(RetrofitConfig)}
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in settings:
            raise InputError(f"preset {path}: unknown setting {key!r}; there are {', '.join(settings)}")
        values[key] = _typed(f"preset {path}: {key}", settings[key], value)
    return values


def _typed(where: str, setting: dataclasses.Field[Any], value: Any) -> Any:
    kind = _type(setting)
    if setting.name in ("data", "lora_targets"):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise InputError(f"{where} must be a list of strings")
        return tuple(items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise InputError(f"{where} must be {kind.__name__}, not {value!r}")
    return value


def _type(setting: dataclasses.Field[Any]) -> type:
    """Type of a setting: that of its choices or of its default, or what its annotation names besides None."""
    if setting.metadata["choices"]:
        return type(setting.metadata["choices"][0])
    if setting.default is not None:
        return type(setting.default)
    return next(t for t in get_args(setting.type) if t is not type(None))


def parser(defaults: Mapping[str, Any]) -> cli.Parser:
    """The command line; ``defaults`` replaces those of the dataclass (what a preset says)."""
    made = cli.parser(PROG, DESCRIPTION, epilog=EPILOG)
    groups = {name: made.add_argument_group(name) for name in (_MODEL, _DATA, _DMS, _TRAIN, _SPEED, _RUN)}
    for setting in dataclasses.fields(RetrofitConfig):
        meta = setting.metadata
        flag = "--" + setting.name.replace("_", "-")
        default = defaults.get(setting.name, setting.default)
        options: dict[str, Any] = {"help": meta["help"], "default": default}
        if meta["unit"]:
            options["unit"] = meta["unit"]
        kind = _type(setting)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif setting.name == "data":
            # argparse would append to the preset's list; given sources replace it.
            options |= {"action": "append", "default": None, "metavar": "SOURCE"}
        elif setting.name == "lora_targets":
            options |= {"type": _names, "metavar": "NAMES"}
        else:
            options["type"] = kind
            if meta["choices"]:
                options["choices"] = meta["choices"]
            else:
                options["metavar"] = {str: "NAME", int: "N", float: "X"}[kind]
            if kind is str and not default:
                options["default"] = None
        groups[meta["group"]].add_argument(flag, **options)
    return made


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(" ", "").split(",") if name)


def preset_of(argv: Sequence[str]) -> str | None:
    """The preset that a command line names."""
    for i, argument in enumerate(argv):
        if argument == "--preset" and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset=")
    return None


def from_arguments(arguments: Mapping[str, Any]) -> RetrofitConfig:
    """The configuration that a parsed command line asks for.

    Raises:
        InputError: see :func:`load_preset` and :class:`RetrofitConfig`.
    """
    values = {key: value for key, value in arguments.items() if value is not None}
    preset = load_preset(arguments["preset"]) if arguments.get("preset") else {}
    config = RetrofitConfig(**{**preset, **values, "data": tuple(values.get("data") or preset.get("data", ()))})
    config.require()
    return config

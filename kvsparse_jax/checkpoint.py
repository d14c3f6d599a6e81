"""Hugging Face checkpoint directories: loading straight to a sharding, tensor by tensor, and saving back."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvsparse_jax.distributed import barrier, first, to_host
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import sharding, weights
from kvsparse_jax.models.config import ModelConfig, read_json
from kvsparse_jax.models.decoder import Params, abstract_params, logical_axes
from kvsparse_jax.models.families import BORROWED_CHANNEL, read_config
from kvsparse_jax.policies import DMS, Dense, Policy

_FLOATS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5_000_000_000
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


class Tensors:
    """Read access to the tensors of a checkpoint directory, by name, without loading the files.

    Raises:
        InputError: no weights, a missing shard, a damaged file or a tensor that the index promises and no file has.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        index, single = directory / _INDEX, directory / "model.safetensors"
        if index.exists():
            listed = read_json(index).get("weight_map", {})
            files = sorted(set(listed.values()))
            missing = [name for name in files if not (directory / name).exists()]
            if missing:
                raise InputError(
                    f"{directory}: shard {missing[0]} named by {_INDEX} is missing ({len(missing)} in all)"
                )
        elif single.exists():
            listed, files = None, [single.name]
        else:
            raise InputError(f"{directory} holds no model.safetensors and no {_INDEX}")
        self.files = files
        self._open: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}
        for name in files:
            try:
                self._open[name] = safe_open(directory / name, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{directory / name} is damaged: {error}") from None
            for tensor in self._open[name].keys():  # noqa: SIM118 (not a dict)
                if listed is None or listed.get(tensor) == name:
                    self.file_of[tensor] = name
        lost = [tensor for tensor in listed or () if tensor not in self.file_of]
        if lost:
            raise InputError(
                f"{directory}: {_INDEX} names {lost[0]} in {(listed or {})[lost[0]]}, which does not hold it"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def slice(self, name: str) -> Any:
        """A lazily read slice object (``[...]`` reads, ``get_shape()``)."""
        return self._open[self.file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Stored dtype; InputError for one that is no plain float."""
        stored = self.slice(name).get_dtype()
        if stored not in _FLOATS:
            raise InputError(f"{self.directory}: tensor {name} is stored as {stored} (accepted: {', '.join(_FLOATS)})")
        return np.dtype(_FLOATS[stored])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._open[self.file_of[name]].get_tensor(name)


def _fill(buffer: Array, tensor: Array, at: tuple[Array, ...], *, transpose: bool) -> Array:
    value = (tensor.T if transpose else tensor).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice(
        buffer, value.reshape((1,) * len(at) + value.shape), (*at, *[jnp.int32(0)] * value.ndim)
    )


_fill_in = jax.jit(_fill, donate_argnums=0, static_argnames="transpose")


def _place(tensors: Tensors, weight: weights.Weight, like: jax.ShapeDtypeStruct, target: Any) -> Array:
    """Loads one parameter; every device reads only its own slice of each tensor."""
    lead = len(weight.lead)
    shape = like.shape[lead:]
    stored = shape[::-1] if weight.transpose else shape
    first, total = weight.rows or (0, stored[0])
    if isinstance(target, NamedSharding):
        parts = list(target.spec)[lead:]
        parts += [None] * (len(shape) - len(parts))
        piece = NamedSharding(target.mesh, jax.sharding.PartitionSpec(*(parts[::-1] if weight.transpose else parts)))
    else:
        piece = target

    def read(name: str) -> Array:
        if tensors.shape(name) != (total, *stored[1:]):
            raise InputError(
                f"{tensors.directory}: tensor {name} has shape {tensors.shape(name)}, config.json asks for "
                f"{(total, *stored[1:])}"
            )
        tensors.dtype(name)
        lazy = tensors.slice(name)

        def part(index: tuple[slice, ...] | None) -> Any:
            assert index is not None
            start, stop, _ = index[0].indices(stored[0])
            return lazy[(slice(first + start, first + stop), *index[1:])]

        return jax.make_array_from_callback(stored, piece, part)

    if not lead:
        convert = jax.jit(lambda x: (x.T if weight.transpose else x).astype(like.dtype), out_shardings=target)
        return convert(read(weight.name))
    buffer = jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=target)()
    for name, at in zip(weight.names, np.ndindex(weight.lead), strict=True):
        buffer = _fill_in(buffer, read(name), tuple(jnp.int32(i) for i in at), transpose=weight.transpose)
    return buffer


def _check_names(tensors: Tensors, table: list[weights.Weight], config: ModelConfig) -> None:
    wanted = {name for weight in table for name in weight.names}
    missing = sorted(wanted - set(tensors))
    if missing:
        hint = " (config.json says that the head is not tied)" if missing == [_HEAD] else ""
        raise InputError(f"{tensors.directory}: tensor {missing[0]} is missing{hint} ({len(missing)} missing in all)")
    unused = [n for n in sorted(set(tensors) - wanted) if not n.endswith(weights.IGNORED_SUFFIXES)]
    if unused == [_HEAD] and config.tie_embeddings:
        same = tensors.shape(_HEAD) == tensors.shape(_EMBED) and np.array_equal(tensors[_HEAD], tensors[_EMBED])
        if not same:
            raise InputError(f"{tensors.directory}: config.json ties the head to the embedding, but {_HEAD} differs")
        return
    if unused:
        raise InputError(
            f"{tensors.directory}: tensor {unused[0]} has no place in the model ({len(unused)} unused in all)"
        )


def load(
    directory: pathlib.Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params, Policy]:
    """Loads a Hugging Face directory.

    Each tensor goes to its sharding as it is read: the host holds at most one tensor beside the final arrays.

    Args:
        directory: with config.json and safetensors.
        dtype: of the parameters on the device; None keeps the stored one. The policy's parameters stay float32
            (float64 where the model is).
        mesh: places the parameters by their logical axes; None puts all on the first device.

    Returns:
        The configuration, the parameters and the policy that the checkpoint was trained with (Dense if none).

    Raises:
        InputError: anything that is missing, unused, damaged or does not fit, by name.
    """
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    config = read_config(raw, read_json(generation) if generation.exists() else None)
    dms = DMS.from_config(raw)
    if dms is not None and dms.variant == "neuron":
        config = dataclasses.replace(config, borrowed_channel=True)
    tensors = Tensors(directory)
    table = weights.table(config, dms)
    _check_names(tensors, table, config)
    chosen = tensors.dtype(_EMBED) if dtype is None else jnp.dtype(dtype)
    wide = jnp.float64 if chosen == jnp.float64 else jnp.float32
    like = {"model": abstract_params(config, chosen), "policy": dms.abstract_params(config, wide) if dms else None}
    axes = logical_axes(config)
    tree: dict[str, Any] = {"model": {}}
    for weight in table:
        leaf = weights.get(like, weight.path)
        if mesh is None:
            target: Any = SingleDeviceSharding(jax.devices()[0])
        elif weight.path[0] == "policy":
            target = NamedSharding(mesh, jax.sharding.PartitionSpec())
        else:
            target = sharding.sharding(mesh, weights.get(axes, weight.path[1:]), leaf.shape)
        weights.put(tree, weight.path, _place(tensors, weight, leaf, target))
    return config, tree["model"], dataclasses.replace(dms, params=tree.get("policy")) if dms else Dense()


def save(
    directory: pathlib.Path,
    config: ModelConfig,
    params: Params,
    policy: Policy,
    *,
    hf_config: dict[str, Any],
    source: pathlib.Path | None = None,
    like: pathlib.Path | None = None,
) -> None:
    """Writes a Hugging Face directory, whole or not at all. Of several processes all take part and one writes.

    Tensors that equal the source's are written with the source's own bytes; a weight file of the source in which
    nothing changed is taken over as it is, and tensors that the source lacks (the trained adapters) get their own file.

    Args:
        directory: must not exist.
        config, params, policy: what to write; DMS policies add their released tensor names and configuration keys.
        hf_config: the config.json to start from.
        source: the checkpoint that the model was loaded from; its tokenizer and generation settings come along.
        like: an earlier export of the same run; equal files are hard links to it where the file system can.

    Raises:
        InputError: the directory exists.
    """
    if directory.exists():
        raise InputError(f"{directory} exists already; choose a directory that does not")
    table = weights.table(config, policy)
    tree = {"model": params, "policy": policy.params}
    slots = weights.tensors(table)
    old = None if source is None else Tensors(source)

    def value(name: str) -> np.ndarray:
        stored = []
        for weight, at in slots[name]:
            array = to_host(weights.get(tree, weight.path)[at])
            stored.append(array.T if weight.transpose else array)
        return stored[0] if len(stored) == 1 else np.concatenate(stored)

    # Every name goes to the source's file that holds it; what is new is split by size.
    groups: dict[str, list[str]] = {name: [] for name in (old.files if old else ())}
    fresh: list[list[str]] = []
    size = _SHARD_BYTES
    for name in slots:
        if old is not None and name in old:
            groups[old.file_of[name]].append(name)
            continue
        nbytes = 0
        for weight, _ in slots[name]:
            nbytes += weights.get(tree, weight.path).nbytes // math.prod(weight.lead)
        if size + nbytes > _SHARD_BYTES:
            fresh.append([])
            size = 0
        fresh[-1].append(name)
        size += nbytes
    parts: list[tuple[str | None, list[str]]] = [(file, names) for file, names in groups.items() if names]
    parts += [(None, names) for names in fresh]

    barrier(f"saving {directory.name}")  # nobody looks for the directory after another has made it
    if not first():
        for name in (name for _, names in parts for name in names):
            value(name)  # the pieces that this process holds
        barrier(f"saved {directory.name}")
        return
    staging = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        index: dict[str, str] = {}
        total = 0
        for i, (file, names) in enumerate(parts):
            target = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
            tensors: dict[str, np.ndarray] = {}
            changed = file is None
            for name in names:
                new = value(name)
                if old is not None and name in old:
                    stored = old[name]
                    if np.array_equal(stored.astype(new.dtype), new):
                        new = stored
                    else:
                        changed, new = True, new.astype(stored.dtype)
                tensors[name] = np.ascontiguousarray(new)
                index[name] = target
                total += new.nbytes
            if changed:
                save_file(tensors, staging / target, metadata={"format": "pt"})
            else:
                assert source is not None and file is not None
                _take(source / file, staging / target, None if like is None else like / target)
        if len(parts) > 1:
            _write_json(staging / _INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        _write_json(staging / "config.json", _hf_config(hf_config, config, policy))
        for name in _COMPANIONS:
            if source is not None and (source / name).exists():
                shutil.copyfile(source / name, staging / name)
        os.replace(staging, directory)
        barrier(f"saved {directory.name}")
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _take(source: pathlib.Path, target: pathlib.Path, like: pathlib.Path | None) -> None:
    if like is not None and like.exists() and like.stat().st_size == source.stat().st_size:
        try:
            os.link(like, target)
            return
        except OSError:
            pass  # another file system: copy
    shutil.copyfile(source, target)


def _hf_config(raw: dict[str, Any], config: ModelConfig, policy: Policy) -> dict[str, Any]:
    base = {key: value for key, value in raw.items() if not key.startswith("dms_") and key != BORROWED_CHANNEL}
    if config.borrowed_channel and not (isinstance(policy, DMS) and policy.variant == "neuron"):
        base[BORROWED_CHANNEL] = True  # no released key would say so
    if not isinstance(policy, DMS):
        return base
    if base.get("architectures"):
        base["architectures"] = [name.removesuffix("DMS") + "DMS" for name in base["architectures"]]
    return {**base, **policy.to_config()}


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

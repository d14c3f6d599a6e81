"""Evaluation that cannot flatter itself: a compressed model against the same model with its full cache.

Everything is teacher-forced over whole held-out sequences with hard decisions, so each figure compares two
distributions on the same context. Every compressed length has StreamingLLM (arXiv 2309.17453) beside it, given the
memory that the policy holds at the end of the sequence. Which key is live comes from ``kernels.visibility`` alone.

    report = evaluate(lm, [held_out_sequences(lm.tokenizer, 1024, 20)])
    print(report.table())

`python -m kvsparse_jax.evaluate --model DIR` does this and writes JSON, a table and plots.
"""

import argparse
import dataclasses
import functools
import glob
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels.visibility import NEVER, PADDING, decisions_by_key, expires, visible
from kvsparse_jax import cli, corpus
from kvsparse_jax.errors import InputError
from kvsparse_jax.lm import LM, full_hidden, load, positions_of
from kvsparse_jax.models import decoder
from kvsparse_jax.policies import DMS, Dense, LayerInput, Policy, StreamingLLM
from kvsparse_jax.tokenizer import Tokenizer

DEFAULT_KINDS = ("code", "manuals", "readme", "headers", "data")
DEFAULT_LENGTHS = ((1024, 20), (2048, 10))
DENSE = "dense"
EQUAL_MEMORY = "StreamingLLM, equal memory"
SINKS = 4

_BINS = 32  # of the curves over positions
_DEPTHS = 5  # bins of retrieval accuracy over the needle's depth
_DENSE_BYTES = 2**31  # hidden states of the full cache kept on the host; beyond that they are computed again
_CHUNK_ENTRIES = 2**23  # float32 logits of a chunk of tokens: 32 MB

Method = Policy | Callable[[int], Policy]
"""A policy, or a function from the number of tokens of a sequence to one."""


# --- sequences --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequences:
    """Token rows that are evaluated together, as one context length.

    Attributes:
        ids: [N, T] integers.
        kinds: N labels of what each row is.
        mask: [N, T] bool, false at padding (left or right); None: no padding.
    """

    ids: np.ndarray
    kinds: tuple[str, ...]
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.size == 0 or len(self.kinds) != len(self.ids):
            raise InputError(f"sequences must be [N, T] with N kinds, not {list(self.ids.shape)} and {len(self.kinds)}")
        if self.mask is None:
            return
        if self.mask.shape != self.ids.shape:
            raise InputError(f"mask {list(self.mask.shape)} does not fit sequences {list(self.ids.shape)}")
        edges = np.diff(np.pad(self.mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        if ((edges == 1).sum(1) != 1).any():
            raise InputError("every row of the mask must be one run of tokens, padded on the left or the right")

    @property
    def real(self) -> np.ndarray:
        """[N, T] bool, true where there is a token."""
        return np.ones(self.ids.shape, bool) if self.mask is None else self.mask.astype(bool)


def _shares(count: int, names: Sequence[str]) -> dict[str, int]:
    """`count` rows spread evenly over the names, the first ones getting what is left over."""
    return {
        name: count // len(names) + (i < count % len(names))
        for i, name in enumerate(names)
        if count // len(names) + (i < count % len(names))
    }


def held_out_sequences(
    tokenizer: Tokenizer | None, length: int, count: int, kinds: Sequence[str] = DEFAULT_KINDS, seed: int = 0
) -> Sequences:
    """Rows of built-in held-out text, whose files no training split holds; each row from another file while they last.

    Args:
        tokenizer: of the model.
        length: tokens of a row.
        count: rows, spread evenly over the kinds.
        kinds: of :data:`kvsparse_jax.corpus.KINDS`.
        seed: which files, and in which order.

    Raises:
        InputError: no tokenizer, unknown kind, or less text than asked for.
    """
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no text can be evaluated: pass token ids")
    if count < 1:
        raise InputError(f"at least 1 sequence is needed, not {count}")
    if not kinds:
        raise InputError(f"no kind of text; there are {', '.join(corpus.KINDS)}")
    for kind in kinds:
        if kind not in corpus.KINDS:
            raise InputError(f"unknown kind of built-in text {kind!r}; there are {', '.join(corpus.KINDS)}")
    if len(set(kinds)) < len(kinds):
        raise InputError(f"a kind of text is named twice in {', '.join(kinds)}")
    shares = _shares(count, kinds)
    rows = [corpus.token_rows(tokenizer, kind, "heldout", n, length, seed) for kind, n in shares.items()]
    return Sequences(np.concatenate(rows), tuple(kind for kind, n in shares.items() for _ in range(n)))


Content = str | list[dict[str, str]]


def read_documents(paths: Iterable[str], text_column: str = "text") -> dict[str, list[Content]]:
    """Texts and conversations of local files, by the argument that named them.

    Args:
        paths: files, directories or glob patterns. ``.json`` and ``.jsonl`` hold objects with ``messages`` or the text
            column; any other file is one text.
        text_column: where the text of a JSON object is.

    Raises:
        InputError: nothing found, a file that cannot be read, or an object without text.
    """
    found: dict[str, list[Content]] = {}
    for path in paths:
        matches = sorted(Path(match) for match in glob.glob(path, recursive=True))
        files = [file for match in matches for file in (sorted(match.rglob("*")) if match.is_dir() else [match])]
        files = [file for file in files if file.is_file() and not file.name.startswith(".")]
        if not files:
            raise InputError(f"{path} matches no file")
        texts = [text for file in files for text in _read_file(file, text_column)]
        if not texts:
            raise InputError(f"{path} holds no text")
        found.setdefault(Path(path).name or path, []).extend(texts)
    return found


def _read_file(file: Path, column: str) -> list[Content]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text") from None
    if file.suffix not in (".json", ".jsonl"):
        return [text] if text.strip() else []
    try:
        if file.suffix == ".jsonl":
            objects = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            content = json.loads(text)
            objects = content if isinstance(content, list) else [content]
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    out: list[Content] = []
    for row in objects:
        if isinstance(row, str):
            content = row
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            content = row["messages"]
        elif isinstance(row, dict) and isinstance(row.get(column), str):
            content = row[column]
        else:
            has = f"an object with {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
            raise InputError(f"{file} holds {has}, not 'messages' or a text column {column!r}")
        if content:
            out.append(content)
    return out


def text_sequences(
    tokenizer: Tokenizer | None, documents: Mapping[str, Sequence[Content]], length: int, count: int
) -> Sequences:
    """Rows of one's own text; whether the model was trained on it is the caller's to know.

    Args:
        tokenizer: of the model; conversations go through its chat template.
        documents: kind -> texts or conversations.
        length: tokens of a row; a document shorter than that is continued with the next one.
        count: rows, spread evenly over the kinds; the first row of every document comes before the second of any.

    Raises:
        InputError: no tokenizer, or less text than asked for.
    """
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no text can be evaluated: pass token ids")
    if count < 1 or length < 2:
        raise InputError(f"at least 1 sequence of at least 2 tokens is needed, not {count} of {length}")
    bos = tokenizer.encode("", add_bos=True)
    gap = tokenizer.encode("\n\n", add_bos=False)
    body = length - len(bos)
    rows: list[list[int]] = []
    kinds: list[str] = []
    for kind, wanted in _shares(count, list(documents)).items():
        first: list[list[int]] = []
        later: list[list[int]] = []
        pending: list[int] = []
        for content in documents[kind]:
            if isinstance(content, str):
                ids = tokenizer.encode(content, add_bos=False)
            else:
                ids = tokenizer.apply_chat_template(content, add_generation_prompt=False)
                ids = ids[len(bos) :] if bos and ids[: len(bos)] == bos else ids
            ids = pending + (gap if pending else []) + ids
            whole = [bos + ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
            pending = ids if not whole else []
            first += whole[:1]
            later += whole[1:]
        found = (first + later)[:wanted]
        if len(found) < wanted:
            raise InputError(f"{kind} gives only {len(found)} sequences of {length} tokens; {wanted} were asked for")
        rows += found
        kinds += [kind] * wanted
    return Sequences(np.asarray(rows, np.int32), tuple(kinds))


# --- what is reported -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences.

    Attributes:
        mean: the mean.
        stderr: its standard error; None for a single sequence.
    """

    mean: float
    stderr: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        """From one value per sequence."""
        error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        return cls(float(values.mean()), error)

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}}" + ("" if self.stderr is None else f" ± {self.stderr:{spec.lstrip('+')}}")


@dataclass(frozen=True)
class Quality:
    """Distance from the full cache on the same tokens.

    Attributes:
        kl: KL(dense || compressed) in nats per token, mean over all positions: the headline.
        kl_second_half: the same over the second half of every sequence, where eviction has had time to act.
        reverse_kl, reverse_kl_second_half: KL(compressed || dense).
        perplexity_dense, perplexity: of the text, with the full and with the compressed cache.
        perplexity_change_percent: 100 * (perplexity / perplexity_dense - 1).
    """

    kl: Estimate
    kl_second_half: Estimate
    reverse_kl: Estimate
    reverse_kl_second_half: Estimate
    perplexity_dense: float
    perplexity: float
    perplexity_change_percent: Estimate


@dataclass(frozen=True)
class Memory:
    """What the cache keeps. Kept fractions are averaged first, then inverted.

    Attributes:
        nominal_kept: keys not flagged for eviction / keys.
        nominal_cr: decision compression ratio, 1 / nominal_kept (infinite where every key is flagged).
        physical_kept: entries live at the end of the sequence / tokens seen.
        physical_cr: memory compression ratio, 1 / physical_kept; the window and the model's own sliding window count.
        live_per_head: entries that a KV head holds at the end, mean over layers, heads and sequences.
        seen: tokens of a sequence, mean.
    """

    nominal_kept: Estimate
    nominal_cr: float
    physical_kept: Estimate
    physical_cr: float
    live_per_head: float
    seen: float


@dataclass(frozen=True)
class OfKind:
    """The same for one kind of text; see :class:`Quality` and :class:`Memory`."""

    sequences: int
    quality: Quality
    memory: Memory


@dataclass(frozen=True)
class Curve:
    """Means over sequences by position, in up to 32 bins of equal width.

    Attributes:
        position: last position of each bin.
        kl: KL(dense || compressed) of the queries in the bin, nats per token.
        nominal_kept: keys of the bin that are not flagged / keys of the bin.
        live_per_head: entries that a head holds once the bin's last token is seen.
    """

    position: list[int]
    kl: list[float]
    nominal_kept: list[float]
    live_per_head: list[float]


@dataclass(frozen=True)
class Result:
    """One method at one context length.

    Attributes:
        method: its name.
        policy: its settings.
        context: tokens of a sequence.
        sequences: how many were evaluated.
        quality, memory: over all of them.
        nominal_kept_by_head, physical_kept_by_head: [L][H], mean over sequences.
        by_kind: kind of text -> the same over its sequences.
        curve: by position.
    """

    method: str
    policy: dict[str, Any]
    context: int
    sequences: int
    quality: Quality
    memory: Memory
    nominal_kept_by_head: list[list[float]]
    physical_kept_by_head: list[list[float]]
    by_kind: dict[str, OfKind]
    curve: Curve


@dataclass(frozen=True)
class Retrieval:
    """Passkey retrieval with one method.

    Attributes:
        method: its name.
        policy: its settings.
        prompts: how many.
        accuracy: share of prompts of whose answer every token is the likeliest one.
        of_dense_percent: 100 * accuracy / accuracy of the full cache; None where that is 0.
        accuracy_by_depth: share by where the number stands, in five equal ranges from the start to the end of the text;
            None where no prompt falls into a range.
        memory: at the end of prompt and answer.
    """

    method: str
    policy: dict[str, Any]
    prompts: int
    accuracy: Estimate
    of_dense_percent: float | None
    accuracy_by_depth: list[float | None]
    memory: Memory


_DEFINITIONS = {
    "kl": "KL(dense || compressed), nats per token, mean over positions; the headline",
    "reverse_kl": "KL(compressed || dense)",
    "second_half": "positions from T // 2 on",
    "dense": "the full cache: same weights, same dtype, same tokens (or those of the reference, if one is named)",
    "stderr": "standard error of the mean over sequences",
    "nominal": "decisions: 1 / mean share of keys not flagged for eviction, whether or not they are gone yet",
    "physical": "memory: 1 / mean of (entries live at the end of the sequence / tokens seen)",
    EQUAL_MEMORY: "as many entries per head as the model's policy holds at the end of the sequence, on average",
}


@dataclass(frozen=True)
class Report:
    """What :func:`evaluate` and :func:`passkey` found.

    Attributes:
        model: where the model came from.
        reference: where the model that it is compared with came from; None: the same weights.
        dtype: of the weights.
        results: one per context length and method, in the order evaluated.
        retrieval: one per method; empty if it was not asked for.
        notes: what a reader has to know, such as that the model has no eviction policy.
        versions: of the software.
    """

    model: str
    reference: str | None
    dtype: str
    results: tuple[Result, ...]
    retrieval: tuple[Retrieval, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything in terms of what JSON holds; figures that are not finite become None."""
        plain = json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=lambda _: None)
        return {"definitions": _DEFINITIONS, **plain}

    def result(self, method: str, context: int) -> Result:
        """The result of a method at a context length; KeyError if there is none."""
        for result in self.results:
            if (result.method, result.context) == (method, context):
                return result
        raise KeyError(f"no result of {method!r} at {context}")

    def table(self) -> str:
        """Markdown: quality and memory, by kind of text, retrieval, and notes."""
        against = self.reference or "the same weights with the full cache"
        lines = [f"Model {self.model} ({self.dtype}), against {against}"]
        if self.results:
            lines += ["", *_quality_table(self.results), "", _LEGEND]
        for context in dict.fromkeys(result.context for result in self.results):
            lines += _comparison([result for result in self.results if result.context == context])
        compressed = [result for result in self.results if result.method != DENSE and len(result.by_kind) > 1]
        if compressed:
            lines += ["", *_kind_table(compressed)]
        if self.retrieval:
            lines += ["", *_retrieval_table(self.retrieval)]
        for note in self.notes:
            lines += ["", f"Note: {note}."]
        return "\n".join(lines) + "\n"


_LEGEND = (
    "KL is KL(dense || compressed) in nats per token, reverse KL is KL(compressed || dense); ± is the standard error "
    "over sequences. Decision CR (nominal) counts flagged keys, memory CR (physical) counts the entries still held at "
    "the end of the sequence."
)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    out = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [out[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *out[1:]]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else "all flagged" if math.isinf(value) else f"{value:.0f}"


def _nats(value: Estimate) -> str:
    if value.mean == 0:
        return "0"
    return f"{value:.4f}" if value.mean >= 1e-3 else f"{value:.1e}"


def _quality_table(results: Iterable[Result]) -> list[str]:
    header = (
        "context",
        "method",
        "decision CR (nominal)",
        "memory CR (physical)",
        "live per head",
        "KL",
        "KL, 2nd half",
        "reverse KL",
        "ppl dense",
        "ppl",
        "ppl change %",
    )
    rows = []
    for r in results:
        q, m = r.quality, r.memory
        dense = r.method == DENSE
        rows.append(
            (
                f"{r.context} x {r.sequences}",
                r.method,
                _ratio(m.nominal_cr),
                _ratio(m.physical_cr),
                f"{m.live_per_head:.1f}",
                _nats(q.kl),
                _nats(q.kl_second_half),
                _nats(q.reverse_kl),
                f"{q.perplexity_dense:.3f}",
                f"{q.perplexity:.3f}",
                "0" if dense else f"{q.perplexity_change_percent:+.2f}",
            )
        )
    return _markdown(header, rows)


def _comparison(results: Sequence[Result]) -> list[str]:
    """How much better the model's policy is than StreamingLLM at its memory, if both are there."""
    by_name = {result.method: result for result in results}
    baseline = by_name.get(EQUAL_MEMORY)
    own = next((r for r in results if r.method not in (DENSE, EQUAL_MEMORY)), None)
    if baseline is None or own is None or own.quality.kl.mean <= 0 or own.quality.kl_second_half.mean <= 0:
        return []
    whole = baseline.quality.kl.mean / own.quality.kl.mean
    half = baseline.quality.kl_second_half.mean / own.quality.kl_second_half.mean
    return [
        "",
        f"At {own.context} tokens and equal memory, StreamingLLM's KL is {whole:.2f} times that of {own.method} "
        f"({half:.2f} times in the second half).",
    ]


def _kind_table(results: Sequence[Result]) -> list[str]:
    header = ("context", "kind of text", "method", "decision CR", "memory CR", "KL", "KL, 2nd half", "ppl change %")
    rows = []
    for context in dict.fromkeys(result.context for result in results):
        here = [result for result in results if result.context == context]
        for kind in here[0].by_kind:
            for result in here:
                found = result.by_kind[kind]
                q, m = found.quality, found.memory
                rows.append(
                    (
                        str(context),
                        f"{kind} x {found.sequences}",
                        result.method,
                        _ratio(m.nominal_cr),
                        _ratio(m.physical_cr),
                        _nats(q.kl),
                        _nats(q.kl_second_half),
                        f"{q.perplexity_change_percent:+.2f}",
                    )
                )
    return _markdown(header, rows)


def _retrieval_table(results: Sequence[Retrieval]) -> list[str]:
    header = (
        "passkey retrieval",
        "decision CR (nominal)",
        "memory CR (physical)",
        "correct %",
        "of dense %",
        "by depth (start to end) %",
    )
    rows = []
    for r in results:
        error = r.accuracy.stderr
        rows.append(
            (
                f"{r.method}, {r.prompts} prompts of {r.memory.seen:.0f} tokens",
                _ratio(r.memory.nominal_cr),
                _ratio(r.memory.physical_cr),
                f"{Estimate(100 * r.accuracy.mean, None if error is None else 100 * error):.1f}",
                "-" if r.of_dense_percent is None else f"{r.of_dense_percent:.1f}",
                " ".join("-" if value is None else f"{100 * value:.0f}" for value in r.accuracy_by_depth),
            )
        )
    return _markdown(header, rows)


# --- measuring --------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _WithoutNeuron(Policy):
    """A baseline on a model whose borrowed neurons take no part in attention: ``owner`` removes them."""

    policy: Policy
    owner: Policy

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.policy.window

    @property
    def shift(self) -> int:  # type: ignore[override]
        return self.policy.shift

    @property
    def params(self) -> Any:
        return self.policy.params

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        return self.policy.gate(params, layer)

    def queries(self, q: Array, kv_heads: int) -> Array:
        return self.owner.queries(q, kv_heads)


def uncompressed(lm: LM) -> LM:
    """The same network with its full cache. A model with borrowed neurons stays without them: it was trained so."""
    return lm.with_policy(_on(lm, Dense()))


def _on(lm: LM, policy: Policy) -> Policy:
    """A policy that is not the model's own, made to fit it."""
    if isinstance(lm.policy, DMS) and lm.policy.variant == "neuron" and not isinstance(policy, DMS):
        return _WithoutNeuron(policy, dataclasses.replace(lm.policy, enabled=False))
    return policy


def describe(policy: Policy) -> dict[str, Any]:
    """Name and settings of a policy, without its arrays."""
    if isinstance(policy, _WithoutNeuron):
        return describe(policy.policy)
    settings = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}  # type: ignore[arg-type]
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | None)}
    return {"name": type(policy).__name__, **plain, "window": policy.window, "shift": policy.shift}


@functools.partial(jax.jit, static_argnames="chunk")
def _compare(
    dense_params: decoder.Params, params: decoder.Params, dense: Array, hidden: Array, targets: Array, chunk: int
) -> tuple[Array, Array, Array, Array]:
    """Per token: KL(dense || compressed), KL(compressed || dense), and the loss of either; a chunk of tokens at a time.

    Args:
        dense_params, params: for the output heads.
        dense, hidden: [B, T, E], final hidden states with the full and with the compressed cache.
        targets: [B, T] int32.
        chunk: tokens per row of which logits exist at once.

    Returns:
        Four arrays [B, T], float32.
    """
    batch, length, _ = dense.shape
    pad = -length % chunk
    dense, hidden = (jnp.pad(x, [(0, 0), (0, pad), (0, 0)]) for x in (dense, hidden))
    targets = jnp.pad(targets, [(0, 0), (0, pad)])

    def step(_: None, i: Array) -> tuple[None, tuple[Array, ...]]:
        x, y, at = (lax.dynamic_slice_in_dim(a, i * jnp.int32(chunk), chunk, 1) for a in (dense, hidden, targets))
        d, c = decoder.logits(dense_params, x), decoder.logits(params, y)
        d, c = d - d.max(-1, keepdims=True), c - c.max(-1, keepdims=True)
        # One pass over the vocabulary; differences first, so that close distributions keep their digits.
        weight_d, weight_c, difference = jnp.exp(d), jnp.exp(c), d - c
        log_d, log_c = jnp.log(weight_d.sum(-1)), jnp.log(weight_c.sum(-1))
        kl = (weight_d * difference).sum(-1) / weight_d.sum(-1) - (log_d - log_c)
        reverse = (log_d - log_c) - (weight_c * difference).sum(-1) / weight_c.sum(-1)
        of_d, of_c = (jnp.take_along_axis(z, at[..., None], -1)[..., 0] for z in (d, c))
        return None, (kl, reverse, log_d - of_d, log_c - of_c)

    _, found = lax.scan(step, None, jnp.arange((length + pad) // chunk, dtype=jnp.int32))
    first, second, third, fourth = (x.swapaxes(0, 1).reshape(batch, length + pad)[:, :length] for x in found)
    return first, second, third, fourth


@jax.jit
def _likeliest(params: decoder.Params, hidden: Array, columns: Array) -> Array:
    """The likeliest next token [B, A] after each of the columns [B, A] of hidden [B, T, E]."""
    picked = jnp.take_along_axis(hidden, columns[..., None], 1)
    return jnp.argmax(decoder.logits(params, picked), -1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("layers", "kv_heads", "local_windows", "shift", "bins"))
def _memory(
    gates: Array | None,
    segment_ids: Array,
    *,
    layers: int,
    kv_heads: int,
    local_windows: tuple[int | None, ...],
    window: Array,
    shift: int,
    bins: int,
) -> tuple[Array, Array, Array, Array]:
    """What decisions keep, by the visibility rule.

    Args:
        gates: [L, B, H, T], decision logits as emitted; None: nothing is evicted.
        segment_ids: [B, T], 0 or PADDING.
        layers, kv_heads: L and H.
        local_windows: the model's own sliding windows, per layer.
        window, shift: of the policy; the window is an int32 scalar, so that policies share a compilation.
        bins: points in time at which entries are counted, S; evenly spread over the columns, the last at the last one.

    Returns:
        Flagged keys [B, L, H] and entries live at the last token [B, L, H], int32; entries live after the last column
        of each bin, mean over layers and heads [B, S], and share of the heads that do not flag the key [B, T], float32.
    """
    batch, length = segment_ids.shape
    positions = positions_of(segment_ids)
    real = (segment_ids > PADDING)[None, :, None]
    if gates is None:
        evict = jnp.zeros((layers, batch, kv_heads, length), bool)
    else:
        evict = jax.vmap(lambda gate: decisions_by_key(gate > 0, shift, False, segment_ids))(gates) & real
    local = None
    if any(w is not None for w in local_windows):
        local = jnp.asarray([NEVER if w is None else w for w in local_windows], jnp.int32)[:, None, None, None]
    of_key = positions[None, :, None]
    last_seen = expires(of_key, evict, window, local)

    def live_at(query: Array) -> Array:
        """[L, B, H] for a query position [B]."""
        return (visible(query[None, :, None, None], of_key, last_seen) & real).sum(-1, dtype=jnp.int32)

    last = positions.max(1)
    ends = jnp.asarray(_bin_ends(length, bins), jnp.int32)
    # Counted in columns, so that a bin means the same tokens in the curve of every row.
    queries = jnp.take_along_axis(positions, jnp.broadcast_to(ends[None], (batch, len(ends))), 1)
    over_time = lax.map(lambda query: live_at(query).mean((0, 2)), queries.T)
    flagged = evict.sum(-1, dtype=jnp.int32).swapaxes(0, 1)
    return flagged, live_at(last).swapaxes(0, 1), over_time.T, 1.0 - evict.mean((0, 2))


def _bin_ends(length: int, bins: int) -> np.ndarray:
    """Last column of each of up to `bins` bins of nearly equal width."""
    bins = min(bins, length)
    return (np.arange(1, bins + 1) * length) // bins - 1


@dataclass(frozen=True)
class _Kept:
    """:func:`_memory` of all rows: flagged and live [N, L, H], curve [N, S], unflagged [N, T], seen [N]."""

    flagged: np.ndarray
    live: np.ndarray
    curve: np.ndarray
    unflagged: np.ndarray
    seen: np.ndarray

    @property
    def nominal(self) -> np.ndarray:
        """[N, L, H], share of the keys that are not flagged."""
        return 1.0 - self.flagged / self.seen[:, None, None]

    @property
    def physical(self) -> np.ndarray:
        """[N, L, H], share of the tokens seen that are live at the end."""
        return self.live / self.seen[:, None, None]

    def summary(self, rows: np.ndarray) -> Memory:
        nominal, physical = self.nominal[rows].mean((1, 2)), self.physical[rows].mean((1, 2))

        def inverse(mean: float) -> float:
            return 1.0 / mean if mean > 0 else math.inf

        return Memory(
            nominal_kept=Estimate.of(nominal),
            nominal_cr=inverse(float(nominal.mean())),
            physical_kept=Estimate.of(physical),
            physical_cr=inverse(float(physical.mean())),
            live_per_head=float(self.live[rows].mean()),
            seen=float(self.seen[rows].mean()),
        )


@dataclass(frozen=True)
class _Rows:
    """Rows in batches of one size, so that a length compiles once.

    Attributes:
        ids: [N, T].
        real: [N, T] bool.
        size: rows of a batch.
    """

    ids: np.ndarray
    real: np.ndarray
    size: int

    def filled(self, index: slice) -> np.ndarray:
        """Indices of the `size` rows that the batch of these rows computes: it is filled up with the last row."""
        return np.minimum(np.arange(index.start, index.start + self.size), len(self.ids) - 1)

    def batch(self, index: slice) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask [size, T] of a batch."""
        rows = self.filled(index)
        return self.ids[rows], self.real[rows]

    def run(self, lm: LM, use: Callable[[slice, Array], None]) -> _Kept:
        """Runs the model over all rows; `use` gets each batch's rows and hidden states [size, T, E]."""
        config, parts = lm.config, []
        for start in range(0, len(self.ids), self.size):
            index = slice(start, min(start + self.size, len(self.ids)))
            ids, segments = lm.check(*self.batch(index))
            hidden, gates = full_hidden(lm.params, config, lm.policy, ids, segments)
            kept = _memory(
                gates,
                segments,
                layers=config.layers,
                kv_heads=config.kv_heads,
                local_windows=config.local_windows,
                window=jnp.int32(lm.policy.window),
                shift=lm.policy.shift,
                bins=_BINS,
            )
            use(index, hidden)
            parts.append([np.asarray(x)[: index.stop - start] for x in kept])
        flagged, live, curve, unflagged = (np.concatenate(x) for x in zip(*parts, strict=True))
        return _Kept(flagged, live, curve, unflagged, self.real.sum(1))


def _chunk(batch: int, vocab: int) -> int:
    """Tokens per row and chunk, a power of two."""
    return max(8, 1 << max(_CHUNK_ENTRIES // (batch * vocab), 1).bit_length() - 1)


def _row_means(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[N] means over the tokens that count; values [N, T] may hold anything elsewhere."""
    return np.where(weight, values, 0.0).sum(1) / weight.sum(1)


@dataclass(frozen=True)
class _Tokens:
    """Per token [N, T], float64: KL in both directions and the losses."""

    kl: np.ndarray
    reverse: np.ndarray
    loss_dense: np.ndarray
    loss: np.ndarray

    def summary(self, rows: np.ndarray, real: np.ndarray) -> Quality:
        """Over some of the rows."""
        real = real[rows]
        column = np.cumsum(real, 1) - 1
        second = real & (column >= real.sum(1, keepdims=True) // 2)
        # The last token of a row predicts nothing that is known.
        known = real & (column < real.sum(1, keepdims=True) - 1)
        dense, loss = (_row_means(x[rows], known) for x in (self.loss_dense, self.loss))
        change = Estimate.of(loss - dense)
        ratio = math.exp(change.mean)
        return Quality(
            kl=Estimate.of(_row_means(self.kl[rows], real)),
            kl_second_half=Estimate.of(_row_means(self.kl[rows], second)),
            reverse_kl=Estimate.of(_row_means(self.reverse[rows], real)),
            reverse_kl_second_half=Estimate.of(_row_means(self.reverse[rows], second)),
            perplexity_dense=math.exp(dense.mean()),
            perplexity=math.exp(loss.mean()),
            perplexity_change_percent=Estimate(
                100 * (ratio - 1), None if change.stderr is None else 100 * ratio * change.stderr
            ),
        )


def _result(name: str, policy: Policy, sequences: Sequences, tokens: _Tokens, kept: _Kept) -> Result:
    real = sequences.real
    every = np.ones(len(real), bool)
    kinds = np.asarray(sequences.kinds)
    length = real.shape[1]
    ends = _bin_ends(length, _BINS)
    curve: list[list[float]] = [[], [], []]
    for i, (start, end) in enumerate(zip(np.concatenate([[0], ends[:-1] + 1]), ends, strict=True)):
        here = real[:, start : end + 1]
        at_end = real[:, end]
        for values, into in ((tokens.kl, curve[0]), (kept.unflagged, curve[1])):
            into.append(float(values[:, start : end + 1][here].mean()) if here.any() else math.nan)
        curve[2].append(float(kept.curve[at_end, i].mean()) if at_end.any() else math.nan)
    return Result(
        method=name,
        policy=describe(policy),
        context=length,
        sequences=len(real),
        quality=tokens.summary(every, real),
        memory=kept.summary(every),
        nominal_kept_by_head=kept.nominal.mean(0).tolist(),
        physical_kept_by_head=kept.physical.mean(0).tolist(),
        by_kind={
            kind: OfKind(int((kinds == kind).sum()), tokens.summary(kinds == kind, real), kept.summary(kinds == kind))
            for kind in dict.fromkeys(sequences.kinds)
        },
        curve=Curve(ends.tolist(), *curve),
    )


@functools.partial(jax.jit, static_argnames=("length", "local_windows", "sinks"))
def _streaming_live(window: Array, *, length: int, local_windows: tuple[int | None, ...], sinks: int) -> Array:
    """Entries that sinks and a window hold after `length` tokens, mean over layers."""
    positions = jnp.arange(length, dtype=jnp.int32)
    evict, last = positions >= sinks, jnp.int32(length - 1)
    counts = {w: visible(last, positions, expires(positions, evict, window, w)).sum() for w in set(local_windows)}
    return jnp.stack([counts[w] for w in local_windows]).mean()


def equal_memory_budget(live: float, length: int, local_windows: Sequence[int | None], sinks: int = SINKS) -> int:
    """Budget with which StreamingLLM holds as near to `live` entries per head as a whole number of tokens allows.

    Args:
        live: entries per head to match, mean over layers.
        length: tokens seen.
        local_windows: the model's own sliding windows, per layer; they drop keys too.
        sinks: first tokens that are never evicted.

    Returns:
        At least ``sinks + 1``, at most ``length`` (or ``sinks + 1`` where that is more).
    """

    @functools.cache
    def held(budget: int) -> float:
        window = jnp.int32(StreamingLLM(budget=budget, sinks=sinks).window)
        return float(_streaming_live(window, length=length, local_windows=tuple(local_windows), sinks=sinks))

    low, high = sinks + 1, max(length, sinks + 1)
    while low < high:  # the smallest budget that holds as much or more
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= live else (middle + 1, high)
    if low > sinks + 1 and live - held(low - 1) < held(low) - live:
        return low - 1
    return low


def _own(lm: LM) -> str | None:
    """The name of the model's own policy; None: it has none."""
    return None if isinstance(lm.policy, Dense) else type(lm.policy).__name__


@dataclass(frozen=True)
class _Contest:
    """Which models and policies meet.

    Attributes:
        lm: with the policy in question.
        host: the model that baselines run on.
        base: ``host`` with its full cache.
        own: name of the policy of ``lm``, None if it has none.
        methods: what runs beside the full cache, in order, without StreamingLLM at equal memory.
        sinks: of StreamingLLM at equal memory; None: do not run it.
    """

    lm: LM
    host: LM
    base: LM
    own: str | None
    methods: dict[str, Method]
    sinks: int | None

    @classmethod
    def of(
        cls,
        lm: LM,
        reference: LM | None,
        methods: Mapping[str, Method] | None,
        equal_memory: bool,
        sinks: int,
        longest: int,
        batch_size: int,
    ) -> "_Contest":
        host = lm if reference is None else reference
        if host.config.vocab_size != lm.config.vocab_size:
            raise InputError(f"the reference has {host.config.vocab_size} tokens, the model {lm.config.vocab_size}")
        context = min(host.config.max_positions, lm.config.max_positions)
        if longest > context:
            raise InputError(f"sequences of {longest} tokens are longer than the model's context of {context}")
        if batch_size < 1:
            raise InputError(f"batch size must be at least 1, not {batch_size}")
        if sinks < 0:
            raise InputError(f"the number of sinks must be at least 0, not {sinks}")
        own = _own(lm)
        found: dict[str, Method] = {} if own is None else {own: lm.policy}
        for name, method in (methods or {}).items():
            if name in found or name in (DENSE, EQUAL_MEMORY):
                raise InputError(f"two methods are called {name!r}")
            found[name] = method
        wanted = equal_memory and own is not None and not isinstance(lm.policy, StreamingLLM)
        return cls(lm, host, uncompressed(host), own, found, sinks if wanted else None)

    @property
    def passes(self) -> int:
        """How often a sequence goes through a model, the full cache's turn left out."""
        return len(self.methods) + (self.sinks is not None)

    def model(self, method: Method, length: int) -> LM:
        """The model that runs a method at a length. A trained policy belongs to the weights it was trained with."""
        policy = method if isinstance(method, Policy) else method(length)
        if policy is self.lm.policy:
            return self.lm
        host = self.lm if isinstance(policy, DMS) else self.host
        return host.with_policy(_on(host, policy))

    def equal(self, memory: Memory) -> LM:
        """The model that runs StreamingLLM with this memory."""
        assert self.sinks is not None
        windows = self.host.config.local_windows
        budget = equal_memory_budget(memory.live_per_head, round(memory.seen), windows, self.sinks)
        return self.model(StreamingLLM(budget=budget, sinks=self.sinks), round(memory.seen))

    def notes(self) -> list[str]:
        """What a reader of the results has to know."""
        if self.own is not None:
            return []
        others = ", ".join(self.methods)
        told = f"only {others} can be compared with its full cache" if others else "only its full cache is measured"
        return [f"the model has no eviction policy: {told}"]


class _Steps:
    """A progress bar, or nothing."""

    def __init__(self, total: int, desc: str, unit: str, wanted: bool) -> None:
        self._bar = cli.progress(total, desc=desc, unit=unit) if wanted else None

    def show(self, **figures: Any) -> None:
        if self._bar is not None:
            self._bar.set_postfix(**figures)

    def advance(self, rows: slice) -> None:
        if self._bar is not None:
            self._bar.update(rows.stop - rows.start)

    def __enter__(self) -> "_Steps":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _Group:
    """Sequences of one length with the hidden states of the full cache, to compare methods on."""

    def __init__(self, base: LM, rows: _Rows, chunk: int, steps: "_Steps") -> None:
        self._base, self._rows, self._chunk, self._steps = base, rows, chunk, steps
        width = jnp.dtype(base.params["embed"].dtype).itemsize * base.config.hidden_size
        self._fits = rows.ids.size * width <= _DENSE_BYTES
        self._hidden: dict[int, np.ndarray] = {}
        self._targets = np.zeros(rows.ids.shape, np.int32)
        self._targets[:, :-1] = np.where(rows.real[:, 1:], rows.ids[:, 1:], 0)

        def put(index: slice, hidden: Array) -> None:
            if self._fits:
                self._hidden[index.start] = np.asarray(hidden)
            steps.advance(index)

        steps.show(tokens=rows.ids.shape[1], method=DENSE)
        self.kept = rows.run(base, put)

    def _dense(self, index: slice) -> Array:
        if self._fits:
            return jnp.asarray(self._hidden[index.start])
        ids, segments = self._base.check(*self._rows.batch(index))
        return full_hidden(self._base.params, self._base.config, self._base.policy, ids, segments)[0]

    def compare(self, model: LM, name: str) -> tuple[_Tokens, _Kept]:
        """Runs a model with its policy and compares it with the full cache, token by token."""
        found = [np.zeros(self._rows.ids.shape) for _ in range(4)]
        self._steps.show(tokens=self._rows.ids.shape[1], method=name)

        def use(index: slice, hidden: Array) -> None:
            targets = jnp.asarray(self._targets[self._rows.filled(index)])
            compared = _compare(self._base.params, model.params, self._dense(index), hidden, targets, self._chunk)
            for into, values in zip(found, compared, strict=True):
                into[index] = np.asarray(values)[: index.stop - index.start]
            self._steps.advance(index)

        kept = self._rows.run(model, use)
        return _Tokens(*found), kept


def evaluate(
    lm: LM,
    sequences: Sequence[Sequences],
    *,
    methods: Mapping[str, Method] | None = None,
    reference: LM | None = None,
    equal_memory: bool = True,
    sinks: int = SINKS,
    batch_size: int = 1,
    progress: bool = False,
) -> Report:
    """Compares the model's policy, StreamingLLM with the same memory, and any further policies with the full cache.

    Args:
        lm: the model with the policy in question.
        sequences: one entry per context length.
        methods: further policies by name.
        reference: the model whose full cache everything is compared with, and whose weights the baselines run on; None:
            the model itself. Name the original here if training changed more than the policy.
        equal_memory: evaluate StreamingLLM with the memory that the model's policy holds at the end of the sequence.
        sinks: of that StreamingLLM.
        batch_size: rows that are computed together.
        progress: show a progress bar.

    Returns:
        For every context length: the full cache, the model's policy, StreamingLLM, then ``methods`` in their order.

    Raises:
        InputError: sequences that do not fit the model, or two methods of one name.
    """
    if not sequences:
        raise InputError("there are no sequences to evaluate")
    lengths = [s.ids.shape[1] for s in sequences]
    if len(set(lengths)) < len(lengths):
        raise InputError(f"two groups of sequences have the same length: {', '.join(map(str, lengths))}")
    seen = [s.real.sum(1) for s in sequences]
    if min(int(n.min()) for n in seen) < 2:
        raise InputError("a sequence needs at least 2 tokens")
    longest = max(int(n.max()) for n in seen)
    contest = _Contest.of(lm, reference, methods, equal_memory, sinks, longest, batch_size)
    chunk = _chunk(batch_size, lm.config.vocab_size)
    results: list[Result] = []
    total = sum(len(s.ids) for s in sequences) * (1 + max(contest.passes, 1))
    with _Steps(total, "evaluate", "sequences", progress) as steps:
        for group in sequences:
            found: list[Result] = []
            full = _Group(contest.base, _Rows(np.asarray(group.ids), group.real, batch_size), chunk, steps)
            tokens: _Tokens | None = None
            for name, method in contest.methods.items():
                model = contest.model(method, group.ids.shape[1])
                tokens, kept = full.compare(model, name)
                found.append(_result(name, model.policy, group, tokens, kept))
                if name == contest.own and contest.sinks is not None:
                    model = contest.equal(found[-1].memory)
                    tokens, kept = full.compare(model, EQUAL_MEMORY)
                    found.append(_result(EQUAL_MEMORY, model.policy, group, tokens, kept))
            if tokens is None:
                tokens, _ = full.compare(contest.base, DENSE)
            zero = np.zeros(tokens.kl.shape)
            alone = _Tokens(zero, zero, tokens.loss_dense, tokens.loss_dense)
            results += [_result(DENSE, contest.base.policy, group, alone, full.kept), *found]
    return _report(lm, reference, results, contest.notes())


def passkey(
    lm: LM,
    prompts: Sequence[corpus.PasskeyPrompt],
    *,
    methods: Mapping[str, Method] | None = None,
    reference: LM | None = None,
    equal_memory: bool = True,
    sinks: int = SINKS,
    batch_size: int = 1,
    progress: bool = False,
) -> tuple[Retrieval, ...]:
    """Retrieval accuracy, teacher-forced.

    An answer counts if each of its tokens is the likeliest one after the prompt and the answer's tokens before it.

    Args:
        lm: the model with the policy in question.
        prompts: see :func:`kvsparse_jax.corpus.passkey_prompts`.
        methods, reference, equal_memory, sinks, batch_size, progress: see :func:`evaluate`.

    Returns:
        The full cache, the model's policy, StreamingLLM with its memory, then ``methods``.

    Raises:
        InputError: no prompts, or prompts that do not fit the model.
    """
    if not prompts:
        raise InputError("there are no retrieval prompts")
    lengths = np.asarray([len(p.prompt_ids) + len(p.answer_ids) for p in prompts])
    longest = int(lengths.max())
    contest = _Contest.of(lm, reference, methods, equal_memory, sinks, longest, batch_size)
    width = -(-longest // 64) * 64  # prompts of nearly the same length share a compilation
    ids = np.zeros((len(prompts), width), np.int32)
    columns = np.zeros((len(prompts), max(len(p.answer_ids) for p in prompts)), np.int32)
    answers = np.full(columns.shape, -1, np.int32)
    for i, prompt in enumerate(prompts):
        n = len(prompt.answer_ids)
        ids[i, : lengths[i]] = [*prompt.prompt_ids, *prompt.answer_ids]
        columns[i, :n] = len(prompt.prompt_ids) - 1 + np.arange(n)
        answers[i, :n] = prompt.answer_ids
    rows = _Rows(ids, np.arange(width)[None] < lengths[:, None], batch_size)
    depths = np.minimum([int(p.depth * _DEPTHS) for p in prompts], _DEPTHS - 1)
    every = np.ones(len(prompts), bool)
    found: list[Retrieval] = []
    total = len(prompts) * (1 + contest.passes)
    with _Steps(total, "passkey", "prompts", progress) as steps:

        def add(name: str, model: LM) -> Retrieval:
            correct = np.zeros(len(prompts))
            steps.show(method=name)

            def use(index: slice, hidden: Array) -> None:
                chosen = np.asarray(_likeliest(model.params, hidden, jnp.asarray(columns[rows.filled(index)])))
                wanted = answers[index]
                correct[index] = ((chosen[: len(wanted)] == wanted) | (wanted < 0)).all(1)
                steps.advance(index)

            memory = rows.run(model, use).summary(every)
            dense = correct.mean() if not found else found[0].accuracy.mean
            by_depth = [float(correct[depths == i].mean()) if (depths == i).any() else None for i in range(_DEPTHS)]
            found.append(
                Retrieval(
                    method=name,
                    policy=describe(model.policy),
                    prompts=len(prompts),
                    accuracy=Estimate.of(correct),
                    of_dense_percent=float(100 * correct.mean() / dense) if dense > 0 else None,
                    accuracy_by_depth=by_depth,
                    memory=memory,
                )
            )
            return found[-1]

        add(DENSE, contest.base)
        for name, method in contest.methods.items():
            result = add(name, contest.model(method, longest))
            if name == contest.own and contest.sinks is not None:
                add(EQUAL_MEMORY, contest.equal(result.memory))
    return tuple(found)


def _report(lm: LM, reference: LM | None, results: Sequence[Result], notes: Sequence[str]) -> Report:
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "backend": jax.default_backend()}
    for package in ("jax", "kvsparse-jax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"

    def name(model: LM) -> str:
        return "in memory" if model.source is None else str(model.source)

    return Report(
        model=name(lm),
        reference=None if reference is None else name(reference),
        dtype=jnp.dtype(lm.params["embed"].dtype).name,
        results=tuple(results),
        notes=tuple(notes),
        versions=versions,
    )


# --- the command ------------------------------------------------------------------------------------------------------


def parse_method(spec: str, lm: LM) -> Method:
    """A policy from the command line.

    Args:
        spec: ``name`` or ``name:key=value,key=value``. Names: ``streaming`` (``budget`` in entries per head or ``cr``,
            and ``sinks``); ``masked`` (evicts nothing, but runs the masked attention: how far rounding alone takes the
            result from the full cache); ``own`` (the model's DMS policy with other ``offset``, ``scale``, ``window``).
        lm: the model.

    Raises:
        InputError: what is unknown or missing.
    """
    name, _, rest = spec.partition(":")
    given: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(given[key]):
            raise InputError(f"policy {spec!r}: {part!r} is not of the form key=number")

    def whole(key: str, default: float | None = None) -> int:
        value = given.get(key, default)
        if value is None or value != int(value):
            raise InputError(f"policy {spec!r}: {key} must be a whole number")
        return int(value)

    accepted = {"streaming": {"budget", "cr", "sinks"}, "masked": set(), "own": {"offset", "scale", "window"}}
    if name not in accepted:
        raise InputError(f"unknown policy {name!r}; there are {', '.join(accepted)}")
    if unknown := sorted(given.keys() - accepted[name]):
        takes = ", ".join(sorted(accepted[name])) or "no settings"
        raise InputError(f"policy {spec!r}: {name} has no setting {unknown[0]!r} (it takes {takes})")
    if name == "masked":
        return lambda length: StreamingLLM(budget=length + 1, sinks=length)
    if name == "own":
        if not isinstance(lm.policy, DMS):
            raise InputError(f"policy {spec!r}: the model has no DMS policy")
        changes: dict[str, Any] = {key: whole(key) if key == "window" else value for key, value in given.items()}
        return dataclasses.replace(lm.policy, **changes)
    sinks = whole("sinks", SINKS)
    if ("budget" in given) == ("cr" in given):
        raise InputError(f"policy {spec!r}: streaming needs either budget=ENTRIES or cr=RATIO")
    if "budget" in given:
        return StreamingLLM(budget=whole("budget"), sinks=sinks)
    ratio = given["cr"]
    if ratio < 1:
        raise InputError(f"policy {spec!r}: cr must be at least 1")
    return lambda length: StreamingLLM(budget=round(length / ratio), sinks=sinks)


def parse_lengths(text: str) -> list[tuple[int, int]]:
    """``1024:20,2048:10`` as (tokens, sequences); ``none`` is an empty list."""
    if text == "none":
        return []
    found = []
    for part in text.split(","):
        length, colon, count = part.partition(":")
        try:
            pair = (int(length), int(count) if colon else DEFAULT_LENGTHS[0][1])
        except ValueError:
            raise InputError(f"lengths {text!r}: {part!r} is not of the form TOKENS:SEQUENCES") from None
        if pair[0] < 2 or pair[1] < 1:
            raise InputError(f"lengths {text!r}: {part!r} needs at least 2 tokens and 1 sequence")
        found.append(pair)
    if len({length for length, _ in found}) < len(found):
        raise InputError(f"lengths {text!r} name a length twice")
    return found


def plots(report: Report) -> dict[str, Any]:
    """The report's figures by file name (without suffix), see :mod:`kvsparse_jax.plot`."""
    from kvsparse_jax import plot  # matplotlib takes a second to import

    compressed = [result for result in report.results if result.method != DENSE]
    if not compressed:
        return {}
    figures: dict[str, Any] = {}
    points: dict[str, list[plot.Point]] = {}
    for result in compressed:
        kl = result.quality.kl
        points.setdefault(f"{result.method}, {result.context} tokens", []).append(
            (result.memory.physical_cr, kl.mean, kl.stderr)
        )
    figures["quality"] = plot.quality_by_method(points, title="divergence from the full cache against memory")
    contexts = list(dict.fromkeys(result.context for result in compressed))
    for context in contexts:
        own = next(result for result in compressed if result.context == context)
        figures[f"kept_{context}"] = plot.kept_by_layer_and_head(
            own.physical_kept_by_head, title=f"{own.method}: entries live after {context} tokens"
        )
    longest = [result for result in compressed if result.context == max(contexts)]
    at = longest[0].curve.position
    where = f"{longest[0].sequences} sequences of {longest[0].context} tokens"
    figures["kl_by_position"] = plot.kl_by_position(
        at, {r.method: r.curve.kl for r in longest}, title=f"divergence from the full cache, {where}"
    )
    figures["live_over_time"] = plot.live_over_time(
        np.asarray(at) + 1, {r.method: r.curve.live_per_head for r in longest}, title=f"live entries, {where}"
    )
    figures["kept_by_position"] = plot.kept_by_position(
        at, {r.method: r.curve.nominal_kept for r in longest}, title=f"keys not flagged for eviction, {where}"
    )
    return figures


def write(report: Report, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes report.json, report.md and the plots into an existing directory; returns the files."""
    root = Path(directory)
    files = [cli.write_json_atomically(root / "report.json", report.to_json()), root / "report.md"]
    files[1].write_text(report.table(), encoding="utf-8")
    for name, figure in plots(report).items():
        files.append(root / f"{name}.png")
        figure.savefig(files[-1])
    return files


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m kvsparse_jax.evaluate",
        "Measures what a compressed model loses against the same model with its full cache: KL and perplexity on\n"
        "held-out text, teacher-forced with hard eviction, at each context length, beside StreamingLLM with the same\n"
        "memory.",
        epilog="Examples:\n"
        "  python -m kvsparse_jax.evaluate --model runs/demo/final --passkey 100 --output runs/demo/evaluation\n"
        "  python -m kvsparse_jax.evaluate --model smollm2-135m --policy streaming:cr=4 streaming:cr=8 masked",
    )
    p.add_argument(
        "--model", required=True, help="directory, hub name or smollm2-135m, with the policy it was trained with"
    )
    p.add_argument(
        "--reference", help="compare with this model instead of the same weights (if all weights were trained)"
    )
    p.add_argument("--output", default="evaluation", help="directory for the report, the table and the plots")
    p.add_argument("--overwrite", action="store_true", help="replace an evaluation that is there already")
    p.add_argument("--dtype", default="stored", choices=("stored", "bfloat16", "float32"), help="of the weights")
    p.add_argument("--batch-size", type=int, default=1, unit="sequences", help="computed together")
    p.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME:KEY=VALUE",
        help=(
            "further policies to compare: streaming:budget=N or streaming:cr=X (sinks=4), masked (evicts nothing: the "
            "noise floor), own:offset=X (the model's DMS policy with another offset, scale or window)"
        ),
    )
    p.add_argument(
        "--equal-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=("StreamingLLM with the memory that the model's policy holds at the end of a sequence"),
    )
    p.add_argument("--sinks", type=int, default=SINKS, unit="tokens", help="of that StreamingLLM")
    text = p.add_argument_group("text")
    text.add_argument(
        "--data",
        nargs="+",
        help=(
            "one's own text instead of the built-in: files, directories or patterns; .json and .jsonl hold messages or "
            "text"
        ),
    )
    text.add_argument("--text-column", default="text", help="where a JSON object has its text")
    text.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help=(f"kinds of built-in held-out text, of {', '.join(corpus.KINDS)}; default: {' '.join(DEFAULT_KINDS)}"),
    )
    text.add_argument(
        "--lengths",
        default=",".join(f"{n}:{count}" for n, count in DEFAULT_LENGTHS),
        help=(
            "TOKENS:SEQUENCES of each context length, sequences spread over the kinds of text; none for retrieval alone"
        ),
    )
    text.add_argument("--seed", type=int, default=0, help="which held-out files and retrieval prompts")
    text.add_argument("--passkey", type=int, default=0, unit="prompts", help="retrieval prompts; 0: none")
    text.add_argument("--passkey-length", type=int, default=1000, unit="tokens", help="of a retrieval prompt, about")
    return p


def _run(args: argparse.Namespace) -> int:
    lengths = parse_lengths(args.lengths)
    if args.passkey < 0:
        raise InputError(f"--passkey must be at least 0, not {args.passkey}")
    if not lengths and not args.passkey:
        raise InputError("nothing to evaluate: --lengths is none and --passkey is 0")
    if args.data and args.kinds:
        raise InputError("--kinds is about the built-in text: leave it out, or leave out --data")
    documents = read_documents(args.data, args.text_column) if args.data else None
    kinds = args.kinds or DEFAULT_KINDS
    output = cli.fresh_directory(args.output, "evaluation")
    if (output / "report.json").exists() and not args.overwrite:
        raise InputError(f"{output} holds an evaluation already; choose another --output or pass --overwrite")
    lm = load(args.model, dtype=None if args.dtype == "stored" else args.dtype)
    reference = load(args.reference, dtype=jnp.dtype(lm.params["embed"].dtype)) if args.reference else None
    specs = args.policy or []
    methods = {spec: parse_method(spec, lm) for spec in specs}
    if len(methods) < len(specs):
        raise InputError("a policy is named twice")
    settings: dict[str, Any] = {
        "methods": methods,
        "reference": reference,
        "equal_memory": args.equal_memory,
        "sinks": args.sinks,
        "batch_size": args.batch_size,
        "progress": True,
    }
    limit = lm.config.max_positions
    if too_long := [length for length, _ in lengths if length > limit]:
        raise InputError(f"--lengths asks for {too_long[0]} tokens; the model's context is {limit}")
    groups = [
        held_out_sequences(lm.tokenizer, length, count, kinds, args.seed)
        if documents is None
        else text_sequences(lm.tokenizer, documents, length, count)
        for length, count in lengths
    ]
    prompts = []
    if args.passkey:
        if lm.tokenizer is None:
            raise InputError("the model directory has no tokenizer, so there can be no retrieval prompts")
        prompts = corpus.passkey_prompts(lm.tokenizer, args.passkey, args.passkey_length, args.seed)
    report = evaluate(lm, groups, **settings) if groups else _report(lm, reference, (), ())
    if prompts:
        report = dataclasses.replace(report, retrieval=passkey(lm, prompts, **settings))
    files = write(report, output)
    print(report.table())
    print("written: " + " ".join(map(str, files)), file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :mod:`kvsparse_jax.cli` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

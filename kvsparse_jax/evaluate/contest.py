"""Who meets whom: the full cache, the model's policy, StreamingLLM with its memory, and whatever else is asked for."""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax import corpus
from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate import measure
from kvsparse_jax.evaluate.match import equal_memory_budget
from kvsparse_jax.evaluate.results import DENSE, EQUAL_MEMORY, Estimate, Memory, Report, Result, Retrieval, Role
from kvsparse_jax.evaluate.sequences import Sequences
from kvsparse_jax.evaluate.steps import Steps
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import DMS, Dense, Policy, StreamingLLM
from kvsparse_jax.policies.spec import Method, describe
from kvsparse_jax.policies.streaming import SINKS
from kvsparse_jax.whole import full_hidden

_DEPTHS = 5  # bins of retrieval accuracy over the needle's depth
_DENSE_BYTES = 2**31  # hidden states of the full cache kept on the host; beyond that they are computed again


class _Measured(Protocol):
    """A result, whatever was measured."""

    @property
    def memory(self) -> Memory: ...


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
        own = None if isinstance(lm.policy, Dense) else type(lm.policy).__name__
        found: dict[str, Method] = {} if own is None else {own: lm.policy}
        for name, method in (methods or {}).items():
            if name in found or name in (DENSE, EQUAL_MEMORY):
                raise InputError(f"two methods are called {name!r}")
            found[name] = method
        wanted = equal_memory and own is not None and not isinstance(lm.policy, StreamingLLM)
        return cls(lm, host, host.with_policy(Dense()), own, found, sinks if wanted else None)

    @property
    def passes(self) -> int:
        """How often a sequence goes through a model."""
        return 1 + len(self.methods) + (self.sinks is not None)

    def run[M: _Measured](self, length: int, take: Callable[[str, Role, LM], M]) -> list[M]:
        """Measures the full cache, then every method, and StreamingLLM at equal memory after the model's own policy.

        Args:
            length: tokens of a sequence.
            take: measures one of them, from its name, its role and the model with the policy.
        """
        found = [take(DENSE, "full", self.base)]
        for name, method in self.methods.items():
            own = name == self.own
            found.append(take(name, "own" if own else "other", self._model(method, length)))
            if own and self.sinks is not None:
                found.append(take(EQUAL_MEMORY, "equal_memory", self._equal(found[-1].memory, self.sinks)))
        return found

    def check(self, lengths: Sequence[int]) -> None:
        """Makes every model, so that what does not fit is said before hours of work."""
        for method in self.methods.values():
            for length in lengths:
                self._model(method, length)

    def _model(self, method: Method, length: int) -> LM:
        """The model that runs a method at a length. A trained policy belongs to the weights it was trained with."""
        policy = method if isinstance(method, Policy) else method(length)
        if policy.prefill == "dense":
            raise InputError(
                f"{type(policy).__name__} lets a text see all of itself until it ends, so whole texts show no "
                "difference: compare it on what follows (--after)"
            )
        if policy is self.lm.policy:
            return self.lm
        host = self.lm if isinstance(policy, DMS) else self.host
        return host.with_policy(policy)

    def _equal(self, memory: Memory, sinks: int) -> LM:
        """The model that runs StreamingLLM with this memory."""
        length = round(memory.seen)
        budget = equal_memory_budget(memory.live_per_head, length, self.host.config.local_windows, sinks)
        return self._model(StreamingLLM(budget=budget, sinks=sinks), length)

    def notes(self) -> list[str]:
        """What a reader of the results has to know."""
        if self.own is not None:
            return []
        others = ", ".join(self.methods)
        told = f"only {others} can be compared with its full cache" if others else "only its full cache is measured"
        return [f"the model has no eviction policy: {told}"]


class _Group:
    """Sequences of one length, compared method by method with the full cache, which has to come first."""

    def __init__(self, base: LM, sequences: Sequences, batch_size: int, steps: Steps) -> None:
        self._base, self._sequences, self._steps = base, sequences, steps
        self._rows = measure.Rows(np.asarray(sequences.ids), sequences.real, batch_size)
        self._chunk = measure.chunk_of(batch_size, base.config.vocab_size)
        shape = self._rows.ids.shape
        width = jnp.dtype(base.params["embed"].dtype).itemsize * base.config.hidden_size
        self._fits = self._rows.ids.size * width <= _DENSE_BYTES
        self._hidden: dict[int, np.ndarray] = {}  # of the full cache, by the first row of a batch
        self._loss = np.zeros(shape)
        self._targets = np.zeros(shape, np.int32)
        self._targets[:, :-1] = np.where(self._rows.real[:, 1:], self._rows.ids[:, 1:], 0)

    def take(self, name: str, role: Role, model: LM) -> Result:
        """The result of one method."""
        self._steps.show(tokens=self._rows.ids.shape[1], method=name)
        # KL(dense || compressed), KL(compressed || dense), loss: [N, T] each.
        found = np.zeros((3, *self._rows.ids.shape))

        def use(index: slice, hidden: Array) -> None:
            targets = jnp.asarray(self._targets[self._rows.filled(index)])
            count = index.stop - index.start
            if role == "full":
                if self._fits:
                    self._hidden[index.start] = np.asarray(hidden)
                self._loss[index] = np.asarray(measure.loss(model.params, hidden, targets, self._chunk))[:count]
                found[2][index] = self._loss[index]
            else:
                dense = self._dense(index)
                compared = measure.compare(self._base.params, model.params, dense, hidden, targets, self._chunk)
                for into, values in zip(found, compared, strict=True):
                    into[index] = np.asarray(values)[:count]
            self._steps.advance(index.stop - index.start)

        kept = self._rows.run(model, use)
        kl, reverse, loss = found
        tokens = measure.Tokens(kl, reverse, self._loss, loss)
        return measure.result(name, role, model.policy, self._sequences, tokens, kept)

    def _dense(self, index: slice) -> Array:
        """Hidden states of the full cache."""
        if self._fits:
            return jnp.asarray(self._hidden[index.start])
        ids, segments = self._base.check(*self._rows.batch(index))
        return full_hidden(self._base.params, self._base.config, self._base.policy, ids, segments)[0]


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
    contest.check(lengths)
    results: list[Result] = []
    total = sum(len(s.ids) for s in sequences) * contest.passes
    with Steps(total, "evaluate", "sequences", progress) as steps:
        for group in sequences:
            take = _Group(contest.base, group, batch_size, steps).take
            results += contest.run(group.ids.shape[1], take)
    return report_of(lm, reference, results, contest.notes())


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
    rows = measure.Rows(ids, np.arange(width)[None] < lengths[:, None], batch_size)
    depths = np.minimum([int(p.depth * _DEPTHS) for p in prompts], _DEPTHS - 1)
    every = np.ones(len(prompts), bool)
    dense = 0.0  # accuracy of the full cache, which comes first
    with Steps(len(prompts) * contest.passes, "passkey", "prompts", progress) as steps:

        def take(name: str, role: Role, model: LM) -> Retrieval:
            nonlocal dense
            correct = np.zeros(len(prompts))
            steps.show(method=name)

            def use(index: slice, hidden: Array) -> None:
                chosen = measure.likeliest(model.params, hidden, jnp.asarray(columns[rows.filled(index)]))
                wanted = answers[index]
                correct[index] = ((np.asarray(chosen)[: len(wanted)] == wanted) | (wanted < 0)).all(1)
                steps.advance(index.stop - index.start)

            memory = rows.run(model, use).summary(every)
            if role == "full":
                dense = float(correct.mean())
            return Retrieval(
                method=name,
                role=role,
                policy=describe(model.policy),
                prompts=len(prompts),
                accuracy=Estimate.of(correct),
                of_dense_percent=float(100 * correct.mean() / dense) if dense > 0 else None,
                accuracy_by_depth=[
                    float(correct[depths == i].mean()) if (depths == i).any() else None for i in range(_DEPTHS)
                ],
                memory=memory,
            )

        return tuple(contest.run(longest, take))


def report_of(lm: LM, reference: LM | None, results: Sequence[Result] = (), notes: Sequence[str] = ()) -> Report:
    """Results with where they come from."""
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

"""EleutherAI's lm-evaluation-harness on a compressed model: the model class that its tasks call.

    import lm_eval
    from kvsparse_jax.evaluate.harness import KVSparse

    model = KVSparse(lm, policy="streaming:budget=256")
    results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy", "gsm8k"])
    results["config"]["counts"]  # how often something was truncated, and what compression was achieved

Once this module is imported, ``simple_evaluate(model="kvsparse", model_args="pretrained=PATH,policy=...")`` knows it
too.

Log-likelihoods come from whole sequences in one pass under the policy's hard rule, which sees what the compressed
cache would hold at every token; generation runs on that cache. Policies that evict when a prompt has ended (those with
a budget, KVzap with a dense prefill) would see the full cache in such a pass: scoring refuses them, generation does
not. Texts are tokenised and truncated as the harness's own Hugging Face models do it, so that figures can be compared,
with one difference: a rolling text has no BOS token of its own. It follows the prefix token, which those models then
repeat.

The harness comes with the extra ``harness``, and nothing else in the library imports it. It does not need torch. Where
torch is installed all the same, ``simple_evaluate`` imports it, to seed it and to describe the machine; this module
never does.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax import cli
from kvsparse_jax.cache.base import bucket
from kvsparse_jax.cache.report import CacheReport
from kvsparse_jax.errors import InputError, RunError, whole
from kvsparse_jax.evaluate.measure import Kept, Rows, _in_chunks, chunk_of
from kvsparse_jax.evaluate.results import DENSE
from kvsparse_jax.generation import CacheOptions
from kvsparse_jax.generation.requests import needed
from kvsparse_jax.lm import LM, load
from kvsparse_jax.models import decoder
from kvsparse_jax.policies import Dense, Policy
from kvsparse_jax.policies.spec import KINDS, describe, parse
from kvsparse_jax.sampling import most_probable

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise ImportError("kvsparse_jax.evaluate.harness needs lm_eval: pip install 'kvsparse-jax[harness]'") from None

LEAST_WIDTH = 16
"""Sequences are padded to lengths of this or more, so that short ones share a compiled program."""

_LEAST_SCORED = 64  # tokens that are scored at a time, for the same reason
_DTYPES = ("float32", "bfloat16", "float16")
_CACHE_OPTIONS = tuple(field.name for field in dataclasses.fields(CacheOptions))
_POLICY_SETTINGS = tuple(dict.fromkeys(key for kind in KINDS.values() for key in kind.keys))
_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # with what turns each of them off

_log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What happened to the requests of one kind since the model class was made.

    Attributes:
        requests: how many were answered.
        truncated: those of which the beginning was cut off, because they did not fit into the context.
        windows: pieces that rolling texts were divided into; as many as requests where every text fitted.
        length_limited: generations that ended at max_gen_toks instead of a stop token or string.
        trimmed: cache entries given up beyond what the policy evicts (``when_full="evict"``).
        sequences: that went through the model; requests with equal tokens share one.
        seen: tokens of these sequences, times layers and KV heads.
        live: of these, the keys that the policy still held at the end of each sequence.
        unflagged: sum over the sequences of the share of keys that were not flagged for eviction.
        dense_bytes, used_bytes: of the caches at the end of generation, see
            :class:`kvsparse_jax.cache.report.CacheReport`.
    """

    requests: int = 0
    truncated: int = 0
    windows: int = 0
    length_limited: int = 0
    trimmed: int = 0
    sequences: int = 0
    seen: int = 0
    live: int = 0
    unflagged: float = 0.0
    dense_bytes: int = 0
    used_bytes: int = 0

    @property
    def cr_entries(self) -> float | None:
        """Keys of all tokens seen over those held at the end, summed over sequences. None: there were none."""
        return self.seen / self.live if self.live else None

    @property
    def cr_nominal(self) -> float | None:
        """1 / mean(1 - flagged / seen). None: there were no sequences, or everything was flagged."""
        return self.sequences / self.unflagged if self.unflagged else None

    @property
    def cr_physical(self) -> float | None:
        """Bytes of dense caches over the bytes in use at the end. None: nothing was generated."""
        return self.dense_bytes / self.used_bytes if self.used_bytes else None

    def summary(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        ratios = {"cr_entries": self.cr_entries, "cr_nominal": self.cr_nominal, "cr_physical": self.cr_physical}
        return dataclasses.asdict(self) | ratios

    def scored(self, kept: Kept) -> None:
        """Adds sequences that were scored in one pass."""
        self.sequences += len(kept.seen)
        self.seen += int(kept.seen.sum()) * int(np.prod(kept.live.shape[1:]))
        self.live += int(kept.live.sum())
        self.unflagged += float(kept.unflagged_share.sum())

    def generated(self, report: CacheReport) -> None:
        """Adds the cache that a batch was generated on."""
        started = int((report.seen > 0).sum())
        self.sequences += started
        self.seen += int(report.seen.sum()) * report.live.shape[0] * report.live.shape[2]
        self.live += int(report.live.sum())
        self.unflagged += started / report.cr_nominal
        self.trimmed += report.trimmed
        self.dense_bytes += report.dense_nbytes
        self.used_bytes += report.used


@dataclass(frozen=True)
class _Asked:
    """How a request wants to be continued; requests that agree share batches."""

    limit: int
    temperature: float
    sampling: tuple[tuple[str, float], ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]


@functools.partial(jax.jit, static_argnames="chunk")
def _scores(
    params: decoder.Params, hidden: Array, rows: Array, columns: Array, targets: Array, chunk: int
) -> tuple[Array, Array]:
    """Log-probability [N] of targets [N] after some tokens of hidden [B, T, E], and whether each is the likeliest."""

    def one(x: Array, at: Array) -> tuple[Array, ...]:
        logits = decoder.logits(params, x)
        chosen = jnp.take_along_axis(logits, at[..., None], -1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, -1), most_probable(logits) == at

    logprob, greedy = _in_chunks(one, chunk, hidden[rows, columns][None], targets[None])
    return logprob[0], greedy[0]


@register_model("kvsparse")
class KVSparse(TemplateLM):
    """A model with its eviction policy, as the harness sees it.

    Attributes:
        lm: the model, under the policy that is measured.
        batch_size: sequences at a time.
        max_length: tokens of a context at most.
        max_gen_toks: tokens to generate where a task does not say.
        counts: what was truncated and what was compressed, by the kind of request: "loglikelihood",
            "loglikelihood_rolling" and "generate_until". Also in ``results["config"]["counts"]``.
    """

    def __init__(
        self,
        pretrained: LM | str | os.PathLike[str],
        *,
        policy: Policy | str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        prefill_chunk: int | None = None,
        enable_thinking: bool | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        """Args:
            pretrained: a model, or what :func:`kvsparse_jax.load` takes.
            policy: a policy, what :func:`kvsparse_jax.policies.spec.parse` takes, or "dense" for the full cache; None
                is the model's own.
            dtype: of a model that is loaded here: "float32", "bfloat16" or "float16"; None keeps the stored one.
            batch_size: sequences at a time.
            max_length: tokens of a context at most; None is the model's own limit.
            max_gen_toks: tokens to generate where a task does not say.
            seed: of tasks that sample; every request draws from a stream of its own.
            prefill_chunk: see :meth:`kvsparse_jax.lm.LM.generate`.
            enable_thinking: given to the chat template, where not None.
            max_batch_size: refused; no batch size is searched for.
            device: ignored: the harness's command line always names one, and jax has chosen.
            **settings: the policy's, for the harness divides "policy=streaming:budget=256,sinks=8" at the comma; and
                those of the cache that generation runs on, see :class:`kvsparse_jax.generation.CacheOptions`.

        Raises:
            InputError: what cannot be found, does not fit or is unknown, in one line.
        """
        super().__init__()
        if unknown := sorted(settings.keys() - {*_CACHE_OPTIONS, *_POLICY_SETTINGS}):
            accepted = ", ".join((*_CACHE_OPTIONS, *_POLICY_SETTINGS))
            raise InputError(f"kvsparse has no setting {unknown[0]!r}; beside the named ones it takes {accepted}")
        if max_batch_size is not None:
            raise InputError("kvsparse finds no batch size of its own: give batch_size and leave out max_batch_size")
        if dtype not in (None, "auto", *_DTYPES):
            raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
        if isinstance(pretrained, LM):
            if dtype not in (None, "auto"):
                raise InputError("dtype is for a model that is loaded here: load this one with that dtype")
            model = pretrained
        else:
            model = load(pretrained, dtype=None if dtype == "auto" else dtype)
        self.batch_size = whole("batch_size", _number(batch_size), 1)
        self.max_gen_toks = whole("max_gen_toks", max_gen_toks, 1)
        limit = model.config.max_positions
        self.max_length = limit if max_length is None else whole("max_length", max_length, 2)
        if self.max_length > limit:
            raise InputError(f"max_length of {max_length} tokens is more than the model's context of {limit}")
        self.tokenizer = needed(model.tokenizer)
        changes = {name: value for name, value in settings.items() if name in _POLICY_SETTINGS}
        self.lm = model.with_policy(_policy(policy, changes, model))
        self.counts = {kind: Counts() for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until")}
        self._seed, self._thinking = whole("seed", seed, 0), enable_thinking
        options = {name: value for name, value in settings.items() if name in _CACHE_OPTIONS}
        CacheOptions(**options)  # says now what is wrong with them
        self._options = options | {
            "prefill_chunk": None if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
        }

    @property
    def truncated(self) -> int:
        """Requests of which the beginning was cut off."""
        return sum(counts.truncated for counts in self.counts.values())

    def get_model_info(self) -> dict[str, Any]:
        """What the harness notes beside its results."""
        return {
            "model_source": str(self.lm.source or "in memory"),
            "model_num_parameters": sum(x.size for x in jax.tree.leaves(self.lm.params)),
            "model_dtype": str(self.lm.params["embed"].dtype),
            "policy": describe(self.lm.policy),
            "max_length": self.max_length,
            "cache_options": self._options,
            "counts": {kind: counts.summary() for kind, counts in self.counts.items() if counts.requests},
        }

    # Text

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        found = self.lm.config.eos_token_ids or tuple(sorted(self.tokenizer.eos_token_ids))
        if not found:
            raise InputError("the model has no end-of-text token, which a text without context would follow")
        return found[0]

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows: the BOS token, or the token that ends a text."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Token ids; the BOS token starts them where the model's texts have one, unless the text already does."""
        ids = self.tokenizer.encode(string, add_bos=add_special_tokens is not False)
        if ids and max(ids) >= (vocab := self.lm.config.vocab_size):
            raise InputError(f"the tokenizer gives token {max(ids)}, and the model has {vocab}")
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the template shows it; without a generation prompt the last message is left open."""
        extra = {} if self._thinking is None else {"enable_thinking": self._thinking}
        text = self.tokenizer.apply_chat_template(chat_history, add_generation_prompt, tokenize=False, **extra)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        for content in (last, last.strip()):  # many templates strip messages
            if (start := text.rfind(content)) >= 0:
                return text[: start + len(content)]
        raise InputError("the chat template does not show the last message, so it cannot be continued")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, which the harness notes and hashes; None: none is used."""
        if chat_template is False or chat_template is None:
            return None
        if chat_template not in (True, "default"):
            raise InputError(f"there is one chat template to choose, 'default', not {chat_template!r}")
        return self.tokenizer._templates.get("default", "")

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer and its template in the harness's cache of prompts."""
        return str(self.tokenizer.directory).replace("/", "__")

    # Scoring

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy decoding would give it."""
        counts = self.counts["loglikelihood"]
        pieces = []
        for (_, text), context, continuation in requests:
            if not continuation:
                raise InputError(f"the continuation {text[:60]!r} adds no tokens to its context: nothing to score")
            if len(continuation) > self.max_length:
                raise InputError(f"a continuation of {len(continuation)} tokens does not fit into {self.max_length}")
            # The last token is predicted and not read, so that one more than the context fits.
            tokens = [*(context or [self.prefix_token_id]), *continuation]
            counts.truncated += len(tokens) > self.max_length + 1
            pieces.append((tuple(tokens[-self.max_length - 1 : -1]), continuation))
        counts.requests += len(requests)
        self._warn(counts, "loglikelihood")
        found = [
            (float(logprob.sum()), bool(greedy.all()))
            for logprob, greedy in self._score(pieces, counts, "log-likelihood")
        ]
        for (arguments, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", arguments, answer)
        return found

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the greedy one) of each (context, continuation)."""
        for request in requests:
            if not request.args[1]:
                raise InputError(f"a continuation is empty, after {request.args[0][-60:]!r}: nothing to score")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, every token once; a long text in windows of the whole context."""
        counts = self.counts["loglikelihood_rolling"]
        pieces: list[tuple[tuple[int, ...], list[int]]] = []
        of: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, windows):
                pieces.append((tuple([*context, *continuation][:-1]), continuation))
                of.append(number)
        counts.requests += len(requests)
        counts.windows += len(pieces)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(of, self._score(pieces, counts, "rolling log-likelihood"), strict=True):
            totals[number] += float(logprob.sum())
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(
        self, pieces: Sequence[tuple[tuple[int, ...], list[int]]], counts: Counts, desc: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores targets that follow the last tokens of their inputs.

        Args:
            pieces: (inputs, targets): the last len(targets) inputs predict the targets. Answers of a multiple choice
                that are one token long have their inputs in common, which then go through the model once.
            counts: where to count.
            desc: for the progress bar.

        Returns:
            Log-probability [N] float64 and whether it is the likeliest token [N] bool, of the targets of each piece.
        """
        policy = self.lm.policy
        if policy.selects or policy.prefill == "dense":
            name = type(policy).__name__
            raise InputError(
                f"{name} evicts when a prompt has ended: scores would be the full cache's, so only generate"
            )
        of: dict[tuple[int, ...], list[int]] = {}
        for number, (inputs, _) in enumerate(pieces):
            of.setdefault(inputs, []).append(number)
        widths: dict[int, list[tuple[int, ...]]] = {}
        for inputs in of:
            width = min(max(LEAST_WIDTH, bucket(len(inputs))), self.lm.config.max_positions)
            widths.setdefault(width, []).append(inputs)
        found: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0, bool))] * len(pieces)
        with cli.progress(total=len(pieces), desc=desc, unit="requests") as bar:
            for width, rows in sorted(widths.items(), reverse=True):  # longest first: what does not fit fails at once
                self._score_width(width, rows, of, pieces, found, counts, bar)
        return found

    def _score_width(
        self,
        width: int,
        rows: list[tuple[int, ...]],
        of: Mapping[tuple[int, ...], list[int]],
        pieces: Sequence[tuple[tuple[int, ...], list[int]]],
        found: list[tuple[np.ndarray, np.ndarray]],
        counts: Counts,
        bar: cli.Progress,
    ) -> None:
        """:meth:`_score` for inputs that are padded to one width."""
        ids, real = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
        for row, inputs in enumerate(rows):
            ids[row, : len(inputs)], real[row, : len(inputs)] = inputs, True

        def use(index: slice, hidden: Array) -> None:
            numbers = [(row, number) for row in range(index.start, index.stop) for number in of[rows[row]]]
            sizes = [len(pieces[number][1]) for _, number in numbers]
            size = bucket(max(_LEAST_SCORED, sum(sizes)))
            picks = np.zeros((3, size), np.int32)  # row of the batch, column, target
            ends = np.cumsum(sizes)
            for (row, number), end, n in zip(numbers, ends, sizes, strict=True):
                length = len(rows[row])
                picks[0, end - n : end] = row - index.start
                picks[1, end - n : end] = np.arange(length - n, length)
                picks[2, end - n : end] = pieces[number][1]
            chunk = min(chunk_of(1, self.lm.config.vocab_size), size)
            scores = _scores(self.lm.params, hidden, *(jnp.asarray(x) for x in picks), chunk=chunk)
            logprob, greedy = np.asarray(scores[0], np.float64), np.asarray(scores[1])
            if not np.isfinite(logprob[: ends[-1]]).all():
                raise RunError("a log-likelihood is not finite: the model's weights are not to be trusted")
            for (_, number), end, n in zip(numbers, ends, sizes, strict=True):
                found[number] = logprob[end - n : end], greedy[end - n : end]
            bar.update(len(numbers))

        counts.scored(Rows(ids, real, self.batch_size).run(self.lm, use))

    # Generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each (context, settings), cut before its stop strings."""
        counts = self.counts["generate_until"]
        groups: dict[_Asked, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._asked(request.args[1]), []).append(number)
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        for asked, numbers in groups.items():
            room = self.max_length - asked.limit
            for number in numbers:
                counts.truncated += len(prompts[number]) > room
                prompts[number] = prompts[number][-room:]
        counts.requests += len(requests)
        self._warn(counts, "generate_until")
        texts = [""] * len(requests)
        with cli.progress(total=len(requests), desc="generation", unit="requests") as bar:
            for asked, numbers in groups.items():
                numbers.sort(key=lambda number: -len(prompts[number]))
                for start in range(0, len(numbers), self.batch_size):
                    batch = numbers[start : start + self.batch_size]
                    for number, text in zip(batch, self._generate(asked, batch, prompts, counts), strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return texts

    def _generate(
        self, asked: _Asked, batch: Sequence[int], prompts: Sequence[list[int]], counts: Counts
    ) -> Sequence[str]:
        out = self.lm.generate(
            [prompts[number] for number in batch],
            asked.limit,
            temperature=asked.temperature,
            # By the request and not by its place in the batch: what is drawn does not depend on the batch size.
            seed=[(self._seed + number) % 2**32 for number in batch],
            stop=asked.stop,
            stop_ids=asked.stop_ids,
            **dict(asked.sampling),  # type: ignore[arg-type]
            **self._options,
        )
        counts.length_limited += sum(reason != "stop" for reason in out.finish_reason)
        counts.generated(out.cache)
        return out.text or []

    def _asked(self, given: Mapping[str, Any]) -> _Asked:
        """The settings of a request. Raises InputError for what generation cannot do."""
        settings = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        limit, sample = whole("max_gen_toks", settings.pop("max_gen_toks"), 1), settings.pop("do_sample")
        if limit >= self.max_length:
            raise InputError(f"max_gen_toks of {limit} leaves no room for a prompt in a context of {self.max_length}")
        temperature = settings.pop("temperature", 1.0)
        stop, stop_ids = [], []
        for text in settings.pop("until"):
            ids = self.tokenizer.encode(text, add_bos=False) if text else []
            if len(ids) == 1 and ids[0] in self.tokenizer.special_ids:
                stop_ids += ids  # special tokens are left out of the text, where they would never be found
            elif text:
                stop.append(text)
        sampling = {name: settings.pop(name, off) for name, off in _SAMPLING.items()}
        if settings.get("num_beams") == 1:  # some tasks say so
            del settings["num_beams"]
        if settings:
            accepted = ", ".join(("until", "max_gen_toks", "do_sample", "temperature", *_SAMPLING))
            raise InputError(f"generation has no setting {min(settings)!r}; there are {accepted}")
        temperature = float(temperature) if sample else 0.0
        return _Asked(limit, temperature, tuple(sampling.items()), tuple(stop), tuple(stop_ids))

    def _warn(self, counts: Counts, kind: str) -> None:
        if counts.truncated:
            _log.warning(
                "%d of %d %s requests so far are longer than %d tokens: their beginning is cut off",
                counts.truncated,
                counts.requests,
                kind,
                self.max_length,
            )


def _number(value: int | str) -> int | str:
    """A command line's digits as the number that they are."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _policy(policy: Policy | str | None, changes: Mapping[str, Any], model: LM) -> Policy:
    """The policy that is asked for. Raises InputError."""
    if not isinstance(policy, str):
        if changes:
            raise InputError(f"{min(changes)} is a setting of a policy: name one, as in policy=streaming:budget=256")
        return model.policy if policy is None else policy
    text = policy + "".join(
        f"{',' if ':' in policy or number else ':'}{key}={value}" for number, (key, value) in enumerate(changes.items())
    )
    if text == DENSE:
        return Dense()
    method = parse(text, model.policy)
    if isinstance(method, Policy):
        return method
    if text.partition(":")[0] == "masked":  # evicts nothing at any length up to this one
        return method(model.config.max_positions)
    raise InputError(f"policy {text!r} depends on the length, which differs between requests: give budget=ENTRIES")

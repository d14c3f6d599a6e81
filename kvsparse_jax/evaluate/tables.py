"""An evaluation as text: Markdown tables of quality, memory and retrieval."""

import math
from collections.abc import Iterable, Sequence

from kvsparse_jax.evaluate.results import Estimate, Report, Result, Retrieval

_LEGEND = (
    "KL is KL(dense || compressed) in nats per token, reverse KL is KL(compressed || dense); ± is the standard error "
    "over sequences. Decision CR (nominal) counts flagged keys, entry CR (physical) counts the entries still held at "
    "the end of the sequence."
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose columns also line up as plain text."""
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
        "entry CR (physical)",
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
        rows.append(
            (
                f"{r.context} x {r.sequences}",
                r.method,
                _ratio(m.nominal_cr),
                _ratio(m.entries_cr),
                f"{m.live_per_head:.1f}",
                _nats(q.kl),
                _nats(q.kl_second_half),
                _nats(q.reverse_kl),
                f"{q.perplexity_dense:.3f}",
                f"{q.perplexity:.3f}",
                "0" if r.role == "full" else f"{q.perplexity_change_percent:+.2f}",
            )
        )
    return markdown(header, rows)


def _comparison(results: Sequence[Result]) -> list[str]:
    """How much better the model's policy is than StreamingLLM at its memory, if both are there."""
    by_role = {result.role: result for result in results}
    baseline, own = by_role.get("equal_memory"), by_role.get("own")
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
    header = ("context", "kind of text", "method", "decision CR", "entry CR", "KL", "KL, 2nd half", "ppl change %")
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
                        _ratio(m.entries_cr),
                        _nats(q.kl),
                        _nats(q.kl_second_half),
                        f"{q.perplexity_change_percent:+.2f}",
                    )
                )
    return markdown(header, rows)


def _retrieval_table(results: Sequence[Retrieval]) -> list[str]:
    header = (
        "passkey retrieval",
        "decision CR (nominal)",
        "entry CR (physical)",
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
                _ratio(r.memory.entries_cr),
                f"{Estimate(100 * r.accuracy.mean, None if error is None else 100 * error):.1f}",
                "-" if r.of_dense_percent is None else f"{r.of_dense_percent:.1f}",
                " ".join("-" if value is None else f"{100 * value:.0f}" for value in r.accuracy_by_depth),
            )
        )
    return markdown(header, rows)


def table(report: Report) -> str:
    """Markdown: quality and memory, by kind of text, retrieval, and notes."""
    against = report.reference or "the same weights with the full cache"
    lines = [f"Model {report.model} ({report.dtype}), against {against}"]
    if report.results:
        lines += ["", *_quality_table(report.results), "", _LEGEND]
    for context in dict.fromkeys(result.context for result in report.results):
        lines += _comparison([result for result in report.results if result.context == context])
    compressed = [result for result in report.results if result.role != "full" and len(result.by_kind) > 1]
    if compressed:
        lines += ["", *_kind_table(compressed)]
    if report.retrieval:
        lines += ["", *_retrieval_table(report.retrieval)]
    for note in report.notes:
        lines += ["", f"Note: {note}."]
    return "\n".join(lines) + "\n"

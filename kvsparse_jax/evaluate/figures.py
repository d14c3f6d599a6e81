"""The figures of an evaluation, and the directory that it is written to."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kvsparse_jax import cli
from kvsparse_jax.evaluate.results import Report


def plots(report: Report) -> dict[str, Any]:
    """The report's figures by file name (without suffix), see :mod:`kvsparse_jax.plot`."""
    from kvsparse_jax import plot  # matplotlib takes a second to import

    compressed = [result for result in report.results if result.role != "full"]
    if not compressed:
        return {}
    figures: dict[str, Any] = {}
    points: dict[str, list[plot.Point]] = {}
    for result in compressed:
        kl = result.quality.kl
        points.setdefault(f"{result.method}, {result.context} tokens", []).append(
            (result.memory.entries_cr, kl.mean, kl.stderr)
        )
    figures["quality"] = plot.quality_by_method(points, title="divergence from the full cache against memory")
    contexts = list(dict.fromkeys(result.context for result in compressed))
    for context in contexts:
        first = next(result for result in compressed if result.context == context)
        figures[f"kept_{context}"] = plot.kept_by_layer_and_head(
            first.entries_kept_by_head, title=f"{first.method}: entries live after {context} tokens"
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

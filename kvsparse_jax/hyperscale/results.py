"""Accuracy against what it cost: intervals, frontiers, table and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from kvsparse_jax.hyperscale.chains import Chain, Configuration
from kvsparse_jax.hyperscale.problems import Problem
from kvsparse_jax.hyperscale.vote import Same, extract, vote

DENSE = "dense"
"""The method that keeps everything."""

COSTS = {"read": "KV tokens read per problem", "held": "most KV tokens held per problem"}

DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over problems with a bootstrap interval of 95 %.

    Attributes:
        mean: the mean.
        low, high: percentiles 2.5 and 97.5 of the means of problems drawn again with replacement.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Interval":
        """From one value per problem. The same problems are drawn for all sequences of a length."""
        x = np.asarray(values, np.float64)
        drawn = np.random.default_rng(0).integers(0, len(x), (DRAWS, len(x)))
        low, high = np.percentile(x[drawn].mean(1), [2.5, 97.5])
        return cls(float(x.mean()), float(low), float(high))


def summary(
    problems: Sequence[Problem],
    found: Mapping[Configuration, Sequence[Sequence[Chain]]],
    same: Same,
    pattern: str | None = None,
) -> list[dict[str, Any]]:
    """One row per configuration.

    Args:
        problems: all of them.
        found: the chains of every problem, by configuration.
        same: when two answers are.
        pattern: see :func:`kvsparse_jax.hyperscale.vote.extract`.

    Returns:
        ``config``, ``length``, ``width``, ``method``, ``problems``; ``accuracy`` of the majority, ``single`` of one
        chain and ``any`` of the best; ``read`` and ``held``: KV tokens, on average over layers and heads, that the
        chains of a problem read while they were decoded, and held if side by side (the sum of their largest);
        ``cr``: tokens seen per KV token held; ``cut``: share of the chains that ended because of their length;
        ``frontier``: for each cost, whether no configuration of its side (dense, or compressed) is at least as good for
        less; ``over_dense``: for compressed ones and each cost, accuracy beyond that of the best dense configuration
        that costs no more, paired by problem.
    """
    rows: list[dict[str, Any]] = []
    right: dict[str, np.ndarray] = {}
    for config, every in found.items():
        answers = [[extract(chain.text, pattern) for chain in chains] for chains in every]
        hits = [
            [answer is not None and same(problem.answer, answer) for answer in row]
            for problem, row in zip(problems, answers, strict=True)
        ]
        right[config.name] = np.zeros(len(every))
        for i, given in enumerate(answers):
            won = vote(given, same)
            right[config.name][i] = won is not None and hits[i][given.index(won)]
        flat = [chain for chains in every for chain in chains]
        rows.append(
            {
                "config": config.name,
                **asdict(config),
                "problems": len(every),
                "accuracy": asdict(Interval.of(right[config.name])),
                "single": asdict(Interval.of([np.mean(row) for row in hits])),
                "any": asdict(Interval.of([float(any(row)) for row in hits])),
                "read": asdict(Interval.of([sum(chain.read for chain in chains) for chains in every])),
                "held": asdict(Interval.of([sum(chain.held for chain in chains) for chains in every])),
                "cr": float(np.mean([chain.cr for chain in flat])),
                "tokens": float(np.mean([chain.tokens for chain in flat])),
                "cut": float(np.mean([chain.reason in ("length", "context") for chain in flat])),
            }
        )
    sides = [[row for row in rows if (row["method"] == DENSE) == dense] for dense in (True, False)]
    for row in rows:
        row["frontier"] = {}
    for cost in COSTS:
        for side in sides:
            for row in frontier(side, cost):
                row["frontier"][cost] = True
    for row in rows:
        row["frontier"] = {cost: cost in row["frontier"] for cost in COSTS}
        row["over_dense"] = {}
        if row["method"] == DENSE:
            continue
        for cost in COSTS:
            within = [x for x in sides[0] if x[cost]["mean"] <= row[cost]["mean"]]
            if within:
                best = max(within, key=lambda x: x["accuracy"]["mean"])
                gain = Interval.of(right[row["config"]] - right[best["config"]])
                row["over_dense"][cost] = {"config": best["config"], **asdict(gain)}
    return rows


def frontier(rows: Sequence[Mapping[str, Any]], cost: str) -> list[Any]:
    """The rows that are more accurate than all that cost no more, cheapest first."""
    best: list[Any] = []
    for row in sorted(rows, key=lambda x: (x[cost]["mean"], -x["accuracy"]["mean"])):
        if not best or row["accuracy"]["mean"] > best[-1]["accuracy"]["mean"]:
            best.append(row)
    return best


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""

    def percent(x: Mapping[str, float]) -> str:
        return f"{100 * x['mean']:.1f} % ({100 * x['low']:.1f} to {100 * x['high']:.1f})"

    lines = [
        "| length:width:method | CR | majority (95 %) | one chain | KV tokens read | KV tokens held | cut chains "
        "| over dense, equal reads | over dense, equal memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gains = [
            "-" if (gain := row["over_dense"].get(cost)) is None else f"{percent(gain)} over {gain['config']}"
            for cost in COSTS
        ]
        lines.append(
            f"| {row['config']} | {row['cr']:.2f} | {percent(row['accuracy'])} | {100 * row['single']['mean']:.1f} % "
            f"| {row['read']['mean']:,.0f} | {row['held']['mean']:,.0f} | {100 * row['cut']:.0f} % | {gains[0]} "
            f"| {gains[1]} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: Sequence[Mapping[str, Any]], title: str = "hyper-scaling") -> Any:
    """Accuracy against both costs, with the frontiers of dense and of compressed configurations."""
    from kvsparse_jax import plot  # matplotlib takes a second to import

    made = plot._figure(11.0, 4.6, title)
    panels = cast(Sequence[Any], made.subplots(1, 2, sharey=True))
    for axes, (cost, label) in zip(panels, COSTS.items(), strict=True):
        plot._style(axes, f"{label} (mean over layers and heads)", "accuracy of the majority")
        for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            mine = [row for row in rows if row["method"] == method]
            x, y = ([row[key]["mean"] for row in mine] for key in (cost, "accuracy"))
            error = [[abs(row["accuracy"][end] - row["accuracy"]["mean"]) for row in mine] for end in ("low", "high")]
            axes.errorbar(x, y, yerr=error, **plot._look(index), linestyle="none", capsize=3, label=method)
            for row in mine:
                at = row[cost]["mean"], row["accuracy"]["mean"]
                axes.annotate(
                    f"{row['length']}:{row['width']}", at, (4, 4), textcoords="offset points", fontsize=7, color="0.3"
                )
        for dense, style in ((True, "--"), (False, "-")):
            best = frontier([row for row in rows if (row["method"] == DENSE) == dense], cost)
            if best:
                x, y = ([row[key]["mean"] for row in best] for key in (cost, "accuracy"))
                name = f"frontier, {'dense' if dense else 'compressed'}"
                axes.step(x, y, where="post", color="0.4", linestyle=style, linewidth=1.2, zorder=1, label=name)
        axes.set_xscale("log")
        plot._plain_log(axes.xaxis)
    plot._legend(panels[0])
    return made

"""Figures of a run: training curves, what the cache keeps, and quality against memory.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to no window and no global state: save it with
``figure.savefig(path)``; a notebook shows it as the value of a cell. :func:`tokens` returns HTML.
"""

import html
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.colors
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

# Okabe and Ito's palette: apart for colour-blind readers too. Each line also has a marker of its own.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C510A")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 130
_WIDEST = 26.0  # inches


_NUMBERS = matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1e4 else f"{value:g}")


class _Figure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


class Html(str):
    """HTML that a notebook shows; ``path.write_text(page)`` makes a file of it."""

    def _repr_html_(self) -> str:
        return self


def _figure(width: float, height: float, title: str) -> Figure:
    figure = _Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def _style(axes: Axes, x: str, y: str) -> Axes:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _look(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th line."""
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _plain_log(axis: Any) -> None:
    """A log axis with plain numbers (2, 0.01) at round places, not powers of ten alone."""
    axis.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(_NUMBERS)
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _column(rows: Sequence[Mapping[str, Any]], *keys: str) -> np.ndarray | None:
    """The first of these figures that any row has, NaN where a row lacks it."""
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(isinstance(value, int | float) for value in values):
            return np.asarray([value if isinstance(value, int | float) else math.nan for value in values], float)
    return None


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over about a twentieth of the run, narrower at its ends; NaN does not count."""
    half = max(len(values) // 40, 1)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), math.nan)


def training_curves(rows: Sequence[Mapping[str, Any]], *, title: str = "DMS retrofit") -> Figure:
    """Losses, compression, learning rate and speed of a training run over its steps.

    Args:
        rows: what the trainer logged, one mapping per step: ``step`` and any of ``loss``, ``distillation`` (nats per
            token), ``budget``, ``target_cr``, ``nominal_cr`` or ``evicted_cr``, ``lr``, ``tokens_per_second``. Rows
            without ``step`` are passed over; figures that no row has leave their place empty.
        title: what was trained.

    Raises:
        ValueError: no row has a step.
    """
    rows = sorted((row for row in rows if isinstance(row.get("step"), int | float)), key=lambda row: row["step"])
    if not rows:
        raise ValueError("no row with a step to draw")
    step = np.asarray([row["step"] for row in rows], float)
    figure = _figure(10.5, 6.5, f"{title}: training, {len(rows)} logged steps")
    panels = figure.subplots(2, 2)

    axes = _style(panels[0, 0], "optimiser step", "loss (nats per token)")
    lines = (("distillation (KL)", _column(rows, "distillation")), ("total loss", _column(rows, "loss")))
    positive = False
    for index, (label, values) in enumerate(lines):
        if values is None:
            continue
        colour = _COLOURS[index]
        axes.plot(step, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(step, _smooth(values), color=colour, linewidth=1.8, label=f"{label}, smoothed")
        positive |= bool((values > 0).any())
    if positive:
        axes.set_yscale("log")
        _plain_log(axes.yaxis)
    axes.set_title("distillation (faint: every step)", fontsize=9)

    axes = _style(panels[0, 1], "optimiser step", "nominal compression ratio (x)")
    target, reached = _column(rows, "target_cr"), _column(rows, "nominal_cr", "evicted_cr")
    if reached is not None:
        axes.plot(step, reached, color=_COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(step, _smooth(reached), color=_COLOURS[0], linewidth=1.8, label="reached (hard decisions), smoothed")
    if target is not None:
        axes.plot(step, target, color="0.3", linestyle="--", linewidth=1.3, label="asked for by the schedule")
    axes.set_title("compression (faint: every step)", fontsize=9)

    axes = _style(panels[1, 0], "optimiser step", "budget loss (missing fraction)")
    budget = _column(rows, "budget")
    if budget is not None:
        axes.plot(step, budget, color=_COLOURS[2], alpha=0.25, linewidth=0.8)
        axes.plot(step, _smooth(budget), color=_COLOURS[2], linewidth=1.8, label="budget, smoothed")
        axes.set_ylim(bottom=0)
    axes.set_title("evicted fraction short of the target (faint: every step)", fontsize=9)

    axes = _style(panels[1, 1], "optimiser step", "training speed (tokens/s)")
    speed, rate = _column(rows, "tokens_per_second"), _column(rows, "lr")
    if speed is not None:
        axes.plot(step, speed, color=_COLOURS[4], linewidth=1.2, label="tokens/s")
        axes.set_ylim(bottom=0)
    if rate is not None:
        right = axes.twinx()
        right.plot(step, rate, color=_COLOURS[1], linewidth=1.3, label="learning rate")
        right.set_ylabel("learning rate", color=_COLOURS[1])
        right.tick_params(axis="y", labelcolor=_COLOURS[1])
        right.set_ylim(0, 1.2 * max(float(np.nanmax(rate)), 1e-12))
        right.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
        right.spines[["top"]].set_visible(False)
    axes.set_title("speed and learning rate", fontsize=9)

    for axes in panels.flat:
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        _legend(axes)
    return figure


def kept_by_layer_and_head(kept: ArrayLike, *, title: str = "kept fraction by layer and KV head") -> Figure:
    """Heat map of the kept fraction, the number in percent in every cell, and the mean of each layer below.

    Args:
        kept: [L, H], fractions from 0 to 1.
        title: what is shown; the overall kept fraction and its compression ratio are added.

    Raises:
        ValueError: not two-dimensional, empty, or not fractions.
    """
    values = np.asarray(kept, float)
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"kept must be [layers, kv_heads], not {list(values.shape)}")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("kept holds values that are no fractions from 0 to 1")
    layers, heads = values.shape
    mean = values.mean()
    ratio = f" (CR {1 / mean:.2f})" if mean > 0 else ""
    width = min(max(0.42 * layers + 2.2, 5.0), _WIDEST)
    cell = min((width - 2.2) / layers, 0.6)  # inches
    figure = _figure(width, 0.36 * (heads + 1) + 1.9, f"{title}: {100 * mean:.1f} % overall{ratio}")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [heads, 1]})
    norm = matplotlib.colors.Normalize(0.0, 1.0)
    font = min(8.0, 20.0 * cell)
    for axes, rows in ((upper, values.T), (lower, values.mean(1)[None])):
        axes.imshow(rows, cmap="viridis", norm=norm, aspect="auto", interpolation="nearest")
        if font >= 4.5:
            for (y, x), value in np.ndenumerate(rows):
                # Two digits fit a cell, and what matters at the low end is the first of them.
                percent = 100 * float(value)
                text = "<1" if 0 < percent < 0.995 else f"{percent:.0f}"
                colour = "black" if value > 0.6 else "white"
                axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=font)
        axes.set_xticks(np.arange(layers + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(True, which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
        axes.spines[:].set_visible(False)
    upper.set_yticks(range(heads))
    upper.set_ylabel("KV head")
    upper.tick_params(axis="x", length=0, labelbottom=False)
    lower.set_yticks([0], ["mean"])
    every = max(1, math.ceil(layers / 40))
    lower.set_xticks(range(0, layers, every))
    lower.tick_params(axis="x", labelsize=8)
    lower.set_xlabel("layer (cells: percent of the tokens kept)")
    bar = figure.colorbar(upper.images[0], ax=[upper, lower], fraction=0.05, pad=0.01)
    bar.ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    bar.set_label("kept (% of tokens)")
    return figure


def correlation_by_layer_and_head(squared: Mapping[str, ArrayLike]) -> Figure:
    """Heat maps of the squared Pearson correlation of surrogates with their oracle, one above the other.

    Args:
        squared: name of each surrogate -> [L, H], from 0 to 1.

    Raises:
        ValueError: none, or one that is not two-dimensional or not within 0 and 1.
    """
    maps = {name: np.asarray(values, float) for name, values in squared.items()}
    if not maps:
        raise ValueError("there is no correlation to show")
    for name, values in maps.items():
        if values.ndim != 2 or values.size == 0 or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"correlations of {name} must be [layers, kv_heads], each from 0 to 1")
    layers = max(values.shape[0] for values in maps.values())
    width = min(max(0.42 * layers + 2.2, 5.0), _WIDEST)
    heights = [values.shape[1] for values in maps.values()]
    figure = _figure(width, 0.36 * sum(heights) + 0.9 * len(maps) + 0.9, "squared Pearson correlation with the oracle")
    panels = figure.subplots(len(maps), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    font = min(8.0, 20.0 * (width - 2.2) / layers)
    for axes, (name, values) in zip(panels[:, 0], maps.items(), strict=True):
        axes.imshow(values.T, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
        for (x, y), value in np.ndenumerate(values):
            if font >= 4.5:
                colour = "black" if value > 0.6 else "white"
                axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=font)
        axes.set_title(f"{name}: mean {values.mean():.3f}", fontsize=9, loc="left")
        axes.set_yticks(range(values.shape[1]))
        axes.set_ylabel("KV head")
        axes.set_xticks(range(0, layers, max(1, math.ceil(layers / 40))))
        axes.spines[:].set_visible(False)
    panels[-1, 0].set_xlabel("layer (cells: percent)")
    bar = figure.colorbar(panels[0, 0].images[0], ax=list(panels[:, 0]), fraction=0.05, pad=0.01)
    bar.set_label("share of variance")
    return figure


def _lines(axes: Axes, x: ArrayLike, lines: Mapping[str, ArrayLike]) -> None:
    at = np.asarray(x, float)
    for index, (label, values) in enumerate(lines.items()):
        y = np.asarray(values, float)
        if y.shape != at.shape:
            raise ValueError(f"{label!r} has {y.size} values for {at.size} positions")
        axes.plot(at, y, **_look(index), linewidth=1.6, markersize=3.5, label=label)


def kept_by_position(
    positions: ArrayLike, kept: Mapping[str, ArrayLike], *, title: str = "kept fraction by position of the key"
) -> Figure:
    """Share of the keys at each position that are not flagged for eviction.

    Args:
        positions: [S], position of the keys in the sequence, in tokens.
        kept: label -> [S], fractions.
        title: what is shown.
    """
    figure = _figure(7.0, 4.2, title)
    axes = _style(figure.subplots(), "position of the key (tokens)", "keys not flagged (%)")
    _lines(axes, positions, {label: 100 * np.asarray(values, float) for label, values in kept.items()})
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def live_over_time(
    positions: ArrayLike, live: Mapping[str, ArrayLike], *, title: str = "live cache entries while the text goes by"
) -> Figure:
    """Entries that a KV head holds, mean over layers and heads, against tokens seen; the full cache is drawn beside.

    Args:
        positions: [S], tokens seen.
        live: label -> [S], mean live entries per head.
        title: what is shown.
    """
    figure = _figure(7.0, 4.2, title)
    axes = _style(figure.subplots(), "tokens seen", "live entries per KV head (mean)")
    seen = np.asarray(positions, float)
    axes.plot([0, seen.max()], [0, seen.max()], color="0.4", linestyle="--", linewidth=1.2, label="full cache")
    _lines(axes, seen, live)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(axes)
    return figure


def kl_by_position(
    positions: ArrayLike, kl: Mapping[str, ArrayLike], *, title: str = "divergence from the full cache by position"
) -> Figure:
    """KL(dense || compressed) against the position of the query, log scale.

    Args:
        positions: [S], position of the query in tokens.
        kl: label -> [S], nats per token; values that are not positive are left out.
        title: what is shown.
    """
    figure = _figure(7.0, 4.2, title)
    axes = _style(figure.subplots(), "position of the query (tokens)", "KL(dense || compressed) (nats per token)")
    cleaned = {label: np.asarray(values, float) for label, values in kl.items()}
    _lines(axes, positions, {label: np.where(values > 0, values, math.nan) for label, values in cleaned.items()})
    if any((values > 0).any() for values in cleaned.values()):
        axes.set_yscale("log")
        _plain_log(axes.yaxis)
    _legend(axes)
    return figure


Point = tuple[float, float, float | None]
"""(x, y, standard error of y or None)."""


def quality_by_method(
    points: Mapping[str, Sequence[Point]],
    *,
    title: str = "quality against memory",
    x_label: str = "physical compression ratio at the end of the sequence (x)",
    y_label: str = "KL(dense || compressed) (nats per token)",
) -> Figure:
    """KL against physical compression, both on log scales: one line and marker per method, with standard errors.

    Args:
        points: label -> (compression ratio, KL, standard error) of each measurement; those whose KL is not positive
            cannot be drawn and are left out.
        title: what is shown.
        x_label: of the horizontal axis, with its unit.
        y_label: of the vertical axis, with its unit.
    """
    figure = _figure(7.5, 5.0, title)
    axes = _style(figure.subplots(), x_label, y_label)
    drawn: list[float] = []
    for index, (label, all_points) in enumerate(points.items()):
        found = sorted(point for point in all_points if point[0] > 0 and point[1] > 0)
        if not found:
            continue
        x, y = [point[0] for point in found], [point[1] for point in found]
        # An error bar that reaches 0 would leave the log scale.
        down = [min(point[2] or 0.0, 0.9 * point[1]) for point in found]
        up = [point[2] or 0.0 for point in found]
        axes.errorbar(x, y, yerr=[down, up], **_look(index), linewidth=1.5, markersize=6, capsize=3, label=label)
        drawn += x
    if drawn:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(min(drawn) / 1.25, max(drawn) * 1.25)
        for axis, ratios in ((axes.xaxis, (1.0, 1.25, 1.5, 1.75)), (axes.yaxis, None)):
            if ratios is None:
                _plain_log(axis)
            else:
                axis.set_major_locator(matplotlib.ticker.LogLocator(base=2, subs=ratios, numticks=20))
                axis.set_major_formatter(_NUMBERS)
                axis.set_minor_locator(matplotlib.ticker.NullLocator())
    _legend(axes)
    return figure


def pareto(
    points: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    title: str = "quality against cost",
    higher_is_better: bool = True,
    log_x: bool = True,
) -> Figure:
    """Quality against cost with the frontier drawn through the points that nothing beats.

    Args:
        points: label -> (cost, quality, standard error of the quality) of each configuration.
        x_label: the cost and its unit (KV tokens read, peak bytes).
        y_label: the quality and its unit.
        title: what is shown.
        higher_is_better: whether more quality is better (accuracy) or less (KL). Less cost always is.
        log_x: cost on a log scale.
    """
    figure = _figure(7.5, 5.0, title)
    axes = _style(figure.subplots(), x_label, y_label)
    every: list[tuple[float, float]] = []
    for index, (label, found) in enumerate(points.items()):
        look = _look(index)
        error = [point[2] or 0.0 for point in found]
        x, y = [point[0] for point in found], [point[1] for point in found]
        axes.errorbar(x, y, yerr=error, **look, linestyle="none", markersize=6, capsize=3, label=label)
        every += zip(x, y, strict=True)
    sign = 1.0 if higher_is_better else -1.0
    frontier: list[tuple[float, float]] = []
    for x_value, y_value in sorted(every, key=lambda point: (point[0], -sign * point[1])):
        if not frontier or sign * y_value > sign * frontier[-1][1]:
            frontier.append((x_value, y_value))
    if len(frontier) > 1:
        along = np.asarray(frontier)
        axes.step(
            along[:, 0],
            along[:, 1],
            where="post",
            color="0.4",
            linewidth=1.2,
            linestyle="--",
            label="frontier",
            zorder=1,
        )
    if log_x and every and min(point[0] for point in every) > 0:
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
    _legend(axes)
    return figure


def serving_plan(rows: Mapping[str, Mapping[str, Any]], *, title: str = "serving plan") -> Figure:
    """What a planner foretells: bytes and sequences by context, speed against latency, and where a step's time goes.

    Args:
        rows: label -> "contexts" [S] (tokens) with "kv_bytes" [S] of a sequence and "fits" [S] (sequences per device);
            "milliseconds" [N] of a step by growing batch with "per_device" [N] (tokens/s per device); and "parts", the
            milliseconds of the planned step by what takes them.
        title: what is planned.
    """
    figure = _figure(11.0, 7.5, title)
    panels = figure.subplots(2, 2)
    sizes = _style(panels[0, 0], "context (tokens)", "KV cache of a sequence (GB)")
    counts = _style(panels[0, 1], "context (tokens)", "sequences that fit, per device")
    speed = _style(panels[1, 0], "time per token (ms)", "tokens/s per device")
    for index, (label, row) in enumerate(rows.items()):
        look = {**_look(index), "linewidth": 1.6, "markersize": 3.5, "label": label}
        sizes.plot(row["contexts"], np.asarray(row["kv_bytes"], float) / 1e9, **look)
        some = [(x, y) for x, y in zip(row["contexts"], row["fits"], strict=True) if y > 0]
        counts.plot([x for x, _ in some], [y for _, y in some], **look)
        speed.plot(row["milliseconds"], row["per_device"], **look)
    for axes in (sizes, counts, speed):
        if any(np.size(line.get_xdata()) for line in axes.get_lines()):
            axes.set_xscale("log")
            axes.set_yscale("log")
            _plain_log(axes.xaxis)
            _plain_log(axes.yaxis)
        _legend(axes)
    speed.set_title("each line: batches from 1 to what fits", fontsize=9)
    step = _style(panels[1, 1], "", "milliseconds of the planned step")
    names = list(dict.fromkeys(name for row in rows.values() for name in row["parts"]))
    base = np.zeros(len(rows))
    for index, name in enumerate(names):
        values = np.asarray([row["parts"].get(name, 0.0) for row in rows.values()], float)
        if values.any():
            step.bar(range(len(rows)), values, 0.6, bottom=base, color=_COLOURS[index % len(_COLOURS)], label=name)
            base += values
    step.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right", fontsize=8)
    _legend(step)
    return figure


def ablation(
    points: Mapping[str, Sequence[tuple[Any, float, float | None]]], *, x_label: str, y_label: str, title: str
) -> Figure:
    """A figure of merit against a setting, with error bars over seeds.

    Args:
        points: label -> (setting, value, standard deviation or None) of each cell. Settings that are numbers are placed
            by value, others side by side.
        x_label: the setting.
        y_label: the figure of merit and its unit.
        title: of the study.
    """
    figure = _figure(7.5, 4.5, title)
    axes = _style(figure.subplots(), x_label, y_label)
    settings = list(dict.fromkeys(point[0] for found in points.values() for point in found))
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in settings)
    for index, (label, found) in enumerate(points.items()):
        placed = sorted(found, key=lambda point: point[0]) if numbers else found
        x = [float(point[0]) if numbers else float(settings.index(point[0])) for point in placed]
        y = [point[1] for point in placed]
        error = [point[2] or 0.0 for point in placed]
        axes.errorbar(
            x, y, yerr=error, **_look(index), linestyle="-" if numbers else "none", markersize=5, capsize=3, label=label
        )
    if not numbers:
        axes.set_xticks(range(len(settings)), [str(x) for x in settings])
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


_TOKEN_STYLE = """<meta charset="utf-8">
<style>
.kvs-tokens { font: 13px/1.7 ui-monospace, monospace; max-width: 70em; }
.kvs-tokens p { margin: .2em 0 .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
.kvs-tokens span { border-radius: 3px; }
.kvs-tokens .gone { color: #999; }
.kvs-tokens .held { background: #d6e8f7; color: #111; }
.kvs-tokens summary { cursor: pointer; font-weight: 600; }
</style>"""


def tokens(pieces: Sequence[str], kept: ArrayLike, *, title: str = "what each head holds") -> Html:
    """A text as each KV head sees it at its end: what is held is marked, what is evicted is grey.

    Args:
        pieces: the text of each token, T of them.
        kept: [L, H, T] bool, or [H, T] of one layer (see :func:`kvsparse_jax.kept`).
        title: above it.

    Raises:
        ValueError: shapes that do not fit.
    """
    table = np.asarray(kept, bool)
    table = table[None] if table.ndim == 2 else table
    if table.ndim != 3 or table.shape[2] != len(pieces):
        raise ValueError(f"kept must be [L, H, T] or [H, T] with T = {len(pieces)}, not {list(np.shape(kept))}")
    shown = [html.escape(piece) for piece in pieces]
    parts = [_TOKEN_STYLE, f'<div class="kvs-tokens"><h4>{html.escape(title)}</h4>']
    for number, layer in enumerate(table):
        opened = " open" if number == 0 else ""
        parts.append(f"<details{opened}><summary>layer {number}: {100 * layer.mean():.0f} % held</summary>")
        for head, held in enumerate(layer):
            parts.append(f"<p>head {head}, {100 * held.mean():.0f} %: ")
            # One element per run of equal tokens keeps pages of long texts small.
            edges = [0, *(np.flatnonzero(np.diff(held)) + 1).tolist(), len(shown)]
            for start, end in itertools.pairwise(edges):
                if end > start:
                    kind = "held" if held[start] else "gone"
                    parts.append(f'<span class="{kind}">{"".join(shown[start:end])}</span>')
            parts.append("</p>")
        parts.append("</details>")
    return Html("".join([*parts, "</div>"]))

"""Tests of the figures: what they draw, that they can be saved, and that they leave no global state behind."""

import io
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvsparse_jax import plot

POSITIONS = np.arange(31, 1024, 32)


def _saved(figure) -> bytes:
    assert isinstance(figure, Figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    data = buffer.getvalue()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
    return data


def _labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def _rows(count: int) -> list[dict]:
    return [
        {
            "step": step,
            "loss": 0.1 / step,
            "distillation": 0.05 / step,
            "budget": 0.01,
            "target_cr": 1.0 + step / 10,
            "evicted_cr": 1.0 + step / 11,
            "tokens_per_second": 300.0,
            "lr": 6e-5,
        }
        for step in range(1, count + 1)
    ]


def test_training_curves_show_every_figure_with_units():
    figure = plot.training_curves(_rows(60), title="tiny")
    _saved(figure)
    assert figure.get_suptitle() == "tiny: training, 60 logged steps"
    loss, ratio, budget, speed, rate = figure.axes
    assert _labels(loss) == ["distillation (KL), smoothed", "total loss, smoothed"] and loss.get_yscale() == "log"
    assert _labels(ratio) == ["reached (hard decisions), smoothed", "asked for by the schedule"]
    np.testing.assert_allclose(ratio.lines[0].get_ydata(), [1.0 + s / 11 for s in range(1, 61)])
    assert "nats" in loss.get_ylabel() and "tokens/s" in speed.get_ylabel() and rate.get_ylabel() == "learning rate"
    assert budget.get_ylim()[0] == 0


def test_training_curves_take_what_the_log_has():
    """Rows of other events, rows out of order, missing and undefined figures, the other name of the reached ratio."""
    rows = [{"event": "export"}, {"step": 2, "loss": float("nan"), "nominal_cr": 2.0}, {"step": 1, "loss": 0.5}]
    figure = plot.training_curves(rows)
    _saved(figure)
    assert list(figure.axes[1].lines[0].get_xdata()) == [1, 2]
    assert list(figure.axes[1].lines[0].get_ydata())[1] == 2.0
    # Without a positive loss there is no log scale.
    _saved(plot.training_curves([{"step": 1, "loss": 0.0, "distillation": 0.0}]))
    with pytest.raises(ValueError, match="no row"):
        plot.training_curves([{"event": "start"}])


def test_smoothing_is_a_running_mean_that_skips_what_is_missing():
    values = np.arange(100.0)
    np.testing.assert_allclose(plot._smooth(values)[10:90], values[10:90])
    values[50] = np.nan
    smooth = plot._smooth(values)
    assert np.isfinite(smooth).all() and smooth[50] == pytest.approx(50.0)


def test_kept_by_layer_and_head_writes_percent_into_every_cell():
    kept = np.asarray([[0.004, 0.65], [0.0, 1.0], [0.123, 0.5]])
    figure = plot.kept_by_layer_and_head(kept, title="DMS")
    _saved(figure)
    upper, lower, bar = figure.axes
    assert [t.get_text() for t in upper.texts] == ["<1", "0", "12", "65", "100", "50"]
    assert [t.get_text() for t in lower.texts] == ["33", "50", "31"]
    assert figure.get_suptitle() == "DMS: 38.0 % overall (CR 2.64)"
    assert "%" in bar.get_ylabel() and upper.get_ylabel() == "KV head" and "layer" in lower.get_xlabel()


@pytest.mark.parametrize("shape", [(1, 1), (30, 3), (80, 8)])
def test_heat_maps_of_any_model_stay_within_bounds(shape):
    figure = plot.kept_by_layer_and_head(np.full(shape, 0.25))
    if shape[0] < 80:  # hundreds of cells take seconds to draw
        _saved(figure)
    assert 5 <= figure.get_figwidth() <= 26


@pytest.mark.parametrize("kept", [np.ones(3), np.ones((0, 3)), [[1.5]], [[float("nan")]]])
def test_heat_map_refuses_what_is_no_fraction(kept):
    with pytest.raises(ValueError, match="kept"):
        plot.kept_by_layer_and_head(kept)


def test_curves_over_positions():
    lines = {"DMS": np.linspace(1.0, 0.2, 32), "StreamingLLM": np.linspace(1.0, 0.0, 32)}
    kept = plot.kept_by_position(POSITIONS, lines)
    _saved(kept)
    assert _labels(kept.axes[0]) == ["DMS", "StreamingLLM"] and "%" in kept.axes[0].get_ylabel()
    np.testing.assert_allclose(kept.axes[0].lines[0].get_ydata(), 100 * lines["DMS"])

    live = plot.live_over_time(POSITIONS + 1, {"DMS": POSITIONS / 4.0})
    _saved(live)
    assert _labels(live.axes[0]) == ["full cache", "DMS"]

    kl = plot.kl_by_position(POSITIONS, {"DMS": np.linspace(-1e-9, 0.01, 32), "exact": np.zeros(32)})
    _saved(kl)
    assert kl.axes[0].get_yscale() == "log" and np.isnan(kl.axes[0].lines[0].get_ydata()[0])
    _saved(plot.kl_by_position(POSITIONS, {"exact": np.zeros(32)}))
    with pytest.raises(ValueError, match="32 positions"):
        plot.kept_by_position(POSITIONS, {"short": [1.0, 2.0]})


def test_quality_by_method_draws_error_bars_on_log_scales():
    points = {"DMS": [(4.0, 0.02, 0.03), (2.0, 0.005, None)], "exact": [(1.0, 0.0, 0.0)], "none": []}
    figure = plot.quality_by_method(points)
    _saved(figure)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert _labels(axes) == ["DMS"]
    line, _, (bars,) = axes.containers[0]
    assert list(line.get_xdata()) == [2.0, 4.0]
    assert min(low[1] for low, _ in bars.get_segments()) > 0  # a bar as long as the value would leave the axis
    assert "physical" in axes.get_xlabel() and "nats" in axes.get_ylabel()
    _saved(plot.quality_by_method({}))


def test_pareto_draws_the_frontier():
    points = {
        "dense": [(1e6, 0.4, 0.01), (4e6, 0.6, 0.01)],
        "DMS": [(2e5, 0.4, None), (1e6, 0.6, 0.01), (3e6, 0.5, 0.01)],
    }
    figure = plot.pareto(points, x_label="KV tokens read", y_label="accuracy")
    _saved(figure)
    axes = figure.axes[0]
    frontier = next(line for line in axes.lines if line.get_label() == "frontier")
    np.testing.assert_allclose(np.c_[frontier.get_xdata(), frontier.get_ydata()], [[2e5, 0.4], [1e6, 0.6]])
    assert axes.get_xscale() == "log" and set(_labels(axes)) == {"dense", "DMS", "frontier"}

    lower = plot.pareto({"a": [(1.0, 0.3, None), (2.0, 0.1, None), (3.0, 0.2, None)]}, x_label="x", y_label="KL",
                        higher_is_better=False, log_x=False)  # fmt: skip
    frontier = next(line for line in lower.axes[0].lines if line.get_label() == "frontier")
    assert list(frontier.get_ydata()) == [0.3, 0.1]


def test_a_notebook_shows_a_figure_as_the_value_of_a_cell():
    assert plot.kept_by_position(POSITIONS, {"DMS": np.ones(32)})._repr_png_().startswith(b"\x89PNG")


def test_no_pyplot_and_no_changed_settings():
    code = (
        "import matplotlib, sys; before = dict(matplotlib.rcParams);"
        "from kvsparse_jax import plot; plot.kept_by_layer_and_head([[0.5]]).savefig(sys.stdout.buffer);"
        "assert 'matplotlib.pyplot' not in sys.modules; assert before == dict(matplotlib.rcParams)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"\x89PNG")


class Words(HTMLParser):
    """Text and class of every span."""

    def __init__(self):
        super().__init__()
        self.found, self._kind = [], None

    def handle_starttag(self, tag, attrs):
        self._kind = dict(attrs).get("class") if tag == "span" else None

    def handle_endtag(self, tag):
        self._kind = None

    def handle_data(self, data):
        if self._kind:
            self.found.append((self._kind, data))


def test_tokens_are_marked_per_head():
    kept = np.asarray([[[True, False, False, True], [True, True, True, True]]])
    page = plot.tokens(["<s>", "a", " b", "\n"], kept)
    words = Words()
    words.feed(page)
    assert words.found == [("held", "<s>"), ("gone", "a b"), ("held", "\n"), ("held", "<s>a b\n")]
    assert page._repr_html_() == page and "head 0, 50 %" in page and "layer 0: 75 % held" in page
    assert plot.tokens(["x"], [[True]]).count("<details open>") == 1
    with pytest.raises(ValueError, match="T = 1"):
        plot.tokens(["x"], kept)

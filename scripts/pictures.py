"""Draws the pictures of the documentation: the rule itself, and what a retrofit was measured to keep.

PYTHONPATH=. python scripts/pictures.py
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from kernels.visibility import expires, visible
from kvsparse_jax import plot

TOKENS, WINDOW = 28, 5
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "img"


def seen(evict: np.ndarray, window: int) -> np.ndarray:
    """[query, key], which keys are visible."""
    at = jnp.arange(TOKENS, dtype=jnp.int32)
    return np.asarray(visible(at[:, None], at[None], expires(at, jnp.asarray(evict), window, None)[None]))


def main() -> None:
    """Writes docs/img/rule.png and kept.png."""
    rng = np.random.default_rng(4)
    cases = {
        "full cache": (np.zeros(TOKENS, bool), 0),
        "2 sinks and a window": (np.arange(TOKENS) >= 2, WINDOW),
        "delayed eviction": (rng.random(TOKENS) < 0.7, WINDOW),
    }
    figure = Figure(figsize=(10, 3.6), dpi=130, layout="constrained")
    for axes, (title, (evict, window)) in zip(figure.subplots(1, 3), cases.items(), strict=True):
        axes.imshow(seen(evict, window), cmap="Blues", vmin=-0.4, vmax=1.3, interpolation="nearest")
        held = seen(evict, window)[-1].sum()
        axes.set_title(f"{title}: {held} of {TOKENS} held", fontsize=10)
        axes.set(xlabel="key", ylabel="query", xticks=[], yticks=[])
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / "rule.png")
    kept = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text(encoding="utf-8"))["kept"]
    title = "SmolLM2-135M, CR 8: tokens kept by each layer and head"
    plot.kept_by_layer_and_head(np.asarray(kept), title=title).savefig(OUT / "kept.png", dpi=80)


if __name__ == "__main__":
    main()

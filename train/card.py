"""The model card that goes with an export: what it is, how it was made, what was measured while it was."""

import json
import math
from collections.abc import Mapping
from typing import Any

from kvsparse_jax.policies import DMS

_RECIPE = (
    "target_cr", "initial_cr", "window", "shift", "variant", "per", "init", "train", "teacher", "direction", "budget",
    "mask",
    "steps", "batch_size", "sequence_length", "lr", "lr_schedule", "seed",
)  # fmt: skip


def model_card(
    settings: Mapping[str, Any],
    policy: DMS,
    ratio: float,
    last: Mapping[str, Any],
    calibrated: tuple[float, float] | None,
) -> str:
    """A Hugging Face README.md.

    Args:
        settings: of the run (:func:`train.config.plain`).
        policy: of the export.
        ratio: compression ratio that it is for.
        last: newest row of metrics.jsonl; empty: nothing was trained yet.
        calibrated: compression ratio on training text before and after calibration; None: not calibrated.
    """
    base = str(settings["model"])
    head = {
        "base_model": base,
        "library_name": "kvsparse-jax",
        "tags": ["kv-cache", "dms", "kv-cache-compression"],
    }
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    rows = [(name, settings[name]) for name in _RECIPE if settings.get(name) is not None]
    rows += [("data", ", ".join(map(str, settings["data"]))), ("offset", f"{policy.offset:.6g}")]
    recipe = "".join(f"| {name} | {value} |\n" for name, value in rows)
    measured = []
    if last:
        reached = last.get("nominal_cr")
        measured.append(("optimiser step", f"{last['step']}"))
        measured.append(("KL of the last training batch, soft decisions", f"{last['distillation']:.4f} nats per token"))
        if reached is not None and math.isfinite(reached):
            measured.append(("decision CR of the last training batch", f"{reached:.2f}"))
    if calibrated is not None:
        measured.append(
            ("decision CR on training text, before and after calibration", "{:.2f}, {:.2f}".format(*calibrated))
        )
    table = "".join(f"| {name} | {value} |\n" for name, value in measured) or "| nothing | - |\n"
    unit = "layer" if policy.per == "layer" else "KV head"
    return f"""---
{front}---

# {base.rstrip("/").rsplit("/", 1)[-1]}, KV cache {ratio:g} times smaller (DMS)

{base} with eviction trained into it by Dynamic Memory Sparsification
([arXiv 2506.05345](https://arxiv.org/abs/2506.05345)): each
{unit} decides which tokens to forget, {policy.window} tokens after they were seen.

```python
import kvsparse_jax as kvs

lm = kvs.load("PATH OR NAME OF THIS DIRECTORY")
lm.generate(["..."], max_new_tokens=64)
```

## Recipe

| setting | value |
|---|---|
{recipe}
## Measured while training

| figure | value |
|---|---|
{table}
These are figures on training text. Held-out quality, beside other methods with the same memory:
`python -m kvsparse_jax.evaluate --model THIS --output evaluation`. The base model's licence and limits apply.
"""

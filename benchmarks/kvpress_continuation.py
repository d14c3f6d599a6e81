"""The PyTorch side of benchmarks/continuation.py: kvpress' policies on the same prompts.

Run by an interpreter with torch and kvpress, by path, and without this project. Reads an .npz with ``ids`` [N, T], and
writes JSON: per policy and share removed, the KL(dense || compressed) of every text over the tokens after the context.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from kvpress.presses.kvzap_press import KVzapModel


@dataclass
class Surrogate(kvpress.KVzapPress):  # type: ignore[misc]
    """KVzapPress with a surrogate from a directory, which the original takes from a hub only, and with sinks."""

    sinks: int = 0

    def post_init_from_model(self, model: Any) -> None:
        """Nothing to look up."""

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Above every threshold for the first tokens."""
        scores: torch.Tensor = super().score(*args, **kwargs).clone()
        scores[..., : self.sinks] = float("inf")
        return scores


def presses(ratio: float, surrogate: Any, thresholds: dict[int, float], window: int) -> dict[str, Any]:
    """Policies that remove a share of the context; KVzap's threshold by its number of sinks."""
    found = {
        "KVzip": kvpress.KVzipPress(compression_ratio=ratio),
        "KVzip+": kvpress.KVzipPress(compression_ratio=ratio, kvzip_plus_normalization=True),
        "SnapKV": kvpress.SnapKVPress(compression_ratio=ratio),
        "TOVA": kvpress.TOVAPress(compression_ratio=ratio),
        "Knorm": kvpress.KnormPress(compression_ratio=ratio),
        "ExpectedAttention": kvpress.ExpectedAttentionPress(compression_ratio=ratio),
        "StreamingLLM": kvpress.StreamingLLMPress(compression_ratio=ratio),
    }
    for sinks, threshold in thresholds.items():
        press = Surrogate(sinks=sinks)
        press.kvzap_model = surrogate
        name = f"KVzap, {sinks} sinks"
        found[name] = kvpress.DMSPress(press, threshold=threshold, sliding_window_size=window)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--ids", required=True, help=".npz with ids [N, T]")
    parser.add_argument("--context", type=int, required=True, help="tokens of each prompt")
    parser.add_argument("--removed", type=float, nargs="+", required=True, help="shares of the context to remove")
    parser.add_argument("--surrogate", help="directory of a KVzap surrogate")
    parser.add_argument(
        "--thresholds", type=json.loads, default={}, help="JSON: its threshold for each share, by the number of sinks"
    )
    parser.add_argument("--window", type=int, nargs="+", required=True, help="of KVzap, for each share removed")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    surrogate = KVzapModel.from_pretrained(args.surrogate) if args.surrogate else None
    rows = torch.from_numpy(np.load(args.ids)["ids"].astype(np.int64))
    context, length = args.context, rows.shape[1]
    after = torch.arange(context, length)[None]

    def logits(row: torch.Tensor, press: Any) -> torch.Tensor:
        cache = transformers.DynamicCache()
        if press is None:
            model.model(input_ids=row[:, :context], past_key_values=cache)
        else:
            with press(model):
                model.model(input_ids=row[:, :context], past_key_values=cache)
        out = model(input_ids=row[:, context:], past_key_values=cache, position_ids=after)
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        return out.logits[0].double()

    found: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for i, row in enumerate(rows):
            dense = torch.log_softmax(logits(row[None], None), -1)
            for n, ratio in enumerate(args.removed):
                thresholds = {int(sinks): chosen[n] for sinks, chosen in args.thresholds.items()}
                for name, press in presses(ratio, surrogate, thresholds, args.window[n]).items():
                    other = torch.log_softmax(logits(row[None], press), -1)
                    kl = (dense.exp() * (dense - other)).sum(-1).mean()
                    found.setdefault(name, {}).setdefault(str(ratio), []).append(float(kl))
            print(f"kvpress: text {i + 1} of {len(rows)}", file=sys.stderr, flush=True)
    versions = {x.__name__: getattr(x, "__version__", None) for x in (torch, transformers)}
    print(json.dumps({"versions": versions, "kl": found}))


if __name__ == "__main__":
    main()

"""The PyTorch side of benchmarks/decode.py: greedy decoding by Hugging Face transformers, a burst at a time.

Run by an interpreter with torch and transformers, by path, and without this project: it is told what to do on stdin. It
first writes one line of JSON with its versions and the names of its caches; then each line ``CACHE STEPS`` on stdin is
answered by one with the seconds that STEPS tokens per sequence took on that cache. It ends when stdin does.

Both caches that transformers offers are there, filled with random keys and values: "dynamic", which concatenates, and
"static", which is allocated once and masks what is unused. Attention is PyTorch's own (sdpa), the default.
"""

import argparse
import inspect
import json
import sys
import time
from typing import Any

import torch
import transformers


def filled(config: Any, kind: str, batch: int, start: int, slots: int) -> Any:
    """A cache after ``start`` tokens of ``batch`` sequences, with room for ``slots``."""
    if kind == "static":
        cache = transformers.StaticCache(config=config, max_cache_len=slots)
    else:
        cache = transformers.DynamicCache(config=config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, start, head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    for layer in range(config.num_hidden_layers):
        cache.update(k.clone(), v.clone(), layer)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--batch", type=int, default=8, help="sequences (default %(default)s)")
    parser.add_argument("--start", type=int, default=2000, help="tokens seen at first (default %(default)s)")
    parser.add_argument("--slots", type=int, default=2048, help="tokens seen at last (default %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    # Named anew in transformers 5.
    names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    caches = {kind: filled(model.config, kind, args.batch, args.start, args.slots) for kind in ("dynamic", "static")}
    tokens = {kind: torch.ones((args.batch, 1), dtype=torch.long) for kind in caches}
    positions = dict.fromkeys(caches, args.start)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "variants": list(caches)}), flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(int(steps)):
                at = torch.full((1, 1), positions[kind])
                out = model(input_ids=tokens[kind], position_ids=at, use_cache=True, **{argument: caches[kind]})
                tokens[kind] = out.logits[:, -1:].argmax(-1)
                positions[kind] += 1
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()

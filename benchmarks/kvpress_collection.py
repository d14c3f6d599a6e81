"""The PyTorch side of benchmarks/collection.py: the original collector of KVzap's training data.

Run by an interpreter with torch and kvpress, by path, and without this project. The first line on stdin is a JSON list
of texts and is answered by the versions; each later line is the number of a text and is answered by the seconds that it
took, its tokens, and the mean score of every layer and head.
"""

import argparse
import json
import sys
import time

import pandas
import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", required=True, help="of kvpress")
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--sample", type=int, required=True, help="tokens of a prompt")
    args = parser.parse_args()
    sys.path.insert(0, args.checkout)
    from kvzap.data import KVzapDataCollector, repeat_prompt_tokenization

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    collector = KVzapDataCollector(model, tokenizer)
    texts = json.loads(sys.stdin.readline())
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        text = texts[int(line)]
        start = time.perf_counter()
        collector.collect(pandas.DataFrame({"text": [text]}), n_tokens=args.sample)
        seconds = time.perf_counter() - start
        scores = [of_layer.float().mean(0).tolist() for _, of_layer in collector._data]  # of all tokens [T, H]
        _, first, end, _, _ = repeat_prompt_tokenization(tokenizer, text)
        answer = {"seconds": seconds, "tokens": end - first, "scores": scores}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

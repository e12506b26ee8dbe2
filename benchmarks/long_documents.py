"""Gives the tasks of a prepared recipe long documents to read, for trees with long shared contexts.

    python benchmarks/long_documents.py .cache/demo/0123456789ab --out long --document-tokens 2000

A document of drawn sums precedes the question of every training task; sessions of one task share it. The model is the
prepared one with room for longer sequences. It was not taught to read them, so its turns are of little worth: what is
measured on such trees is time. benchmarks/stored_fixtures.sh runs it.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import pandas as pd
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MAX_POSITIONS = 8192


def document(rng: random.Random, *, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> str:
    """Draw sums until they have that many tokens."""
    lines: list[str] = []
    while len(tokenizer(" ".join(lines))["input_ids"]) < num_tokens:
        lines += [f"{rng.randint(10, 99)} + {rng.randint(10, 99)} = {rng.randint(10, 99)};" for _ in range(20)]
    return " ".join(lines)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="what `python -m recipes.arithmetic_tools.prepare` printed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--document-tokens", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=64)
    options = parser.parse_args()
    shutil.copytree(options.prepared, options.out)
    config_file = options.out / "model" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"max_position_embeddings": MAX_POSITIONS}))
    tokenizer = AutoTokenizer.from_pretrained(options.out / "model")
    rng = random.Random(0)
    tasks = pd.read_parquet(options.out / "train.parquet").head(options.tasks)

    def with_document(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        text = document(rng, tokenizer=tokenizer, num_tokens=options.document_tokens)
        return [
            message | {"content": f"{text}\n{message['content']}"} if message["role"] == "user" else message
            for message in messages
        ]

    tasks["prompt"] = [with_document(list(messages)) for messages in tasks["prompt"]]
    tasks.to_parquet(options.out / "train.parquet")


if __name__ == "__main__":
    main()

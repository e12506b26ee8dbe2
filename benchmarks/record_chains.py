"""Samples sessions of a plain tool agent and stores them as trees: one chain a session, the history kept as it is.

The tasks, the tools and the taught model of a prepared recipe, without Ray and vLLM. Two kinds of trees for por.py:

    python -m recipes.arithmetic_tools.prepare    # prints FOLDER
    python benchmarks/record_chains.py FOLDER --tasks 24 --sessions 2 --out two_chains.parquet
    python benchmarks/record_chains.py FOLDER --tasks 2 --sessions 4 --document-tokens 2000 --out long_documents.parquet

Few sessions of a task share little. With `--document-tokens`, a document of drawn sums precedes the question, and the
sessions of a task share it. The model was not taught to read such documents, so its turns are of little worth: what is
measured on these trees is time.
"""

import argparse
import json
import random
import re
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from recipes.demo.leaves import Leaf, Renderer
from recipes.demo.tools import OneArgumentTool, make_tools
from verl_tree.records import StoredLeaf, StoredTree, write_trees

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
MAX_TURNS = 4
MAX_TURN_TOKENS = 96

Message = dict[str, str]


class Agent:
    """A model with tools that keeps its whole history."""

    def __init__(self, folder: Path, *, temperature: float) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "model")
        self._model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        self._tools: dict[str, OneArgumentTool] = {tool.name: tool for tool in make_tools(folder / "memory.sqlite")}
        self._renderer = Renderer(self.tokenizer, [tool.tool_schema for tool in self._tools.values()])
        self._temperature = temperature

    def session(self, messages: list[Message]) -> tuple[Leaf, int]:
        """Work on a task; return the chain and the length of its prompt."""
        leaf = self._renderer.read(messages)
        prompt_len = len(leaf.token_ids)
        for _ in range(MAX_TURNS):
            text = self._turn(leaf)
            leaf = self._renderer.write(leaf, text)
            results = [self._result(call) for call in CALL.findall(text)]
            if not results:
                break
            messages = [*messages, {"role": "assistant", "content": text}]
            answers = [{"role": "tool", "content": result} for result in results]
            leaf = self._renderer.read_on(leaf, messages, answers)
            messages = [*messages, *answers]
        return leaf, prompt_len

    def _turn(self, leaf: Leaf) -> str:
        given = torch.tensor([leaf.token_ids])
        with torch.no_grad():
            sampled = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                temperature=self._temperature,
                top_k=0,
                max_new_tokens=MAX_TURN_TOKENS,
            )
        return self.tokenizer.decode(sampled[0, given.shape[1] :], skip_special_tokens=True)

    def _result(self, call: str) -> str:
        """Run a call; what cannot be read is answered with an error, as verl's loops do."""
        try:
            parsed = json.loads(call)
            return self._tools[parsed["name"]].answer(parsed["arguments"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"error: {type(error).__name__}"


def document(rng: random.Random, *, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> str:
    """Draw sums until they have that many tokens."""
    text = ""
    while len(tokenizer(text)["input_ids"]) < num_tokens:
        text += "".join(f"{rng.randint(10, 99)} + {rng.randint(10, 99)} = {rng.randint(10, 99)}; " for _ in range(20))
    return text


def main() -> None:
    """Sample, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="what `python -m recipes.arithmetic_tools.prepare` printed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=4, help="of a task")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--document-tokens", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    agent = Agent(options.prepared, temperature=options.temperature)
    trees = []
    for number, row in enumerate(pd.read_parquet(options.prepared / "train.parquet")["prompt"].head(options.tasks)):
        *before, question = (dict(message) for message in row)
        text = document(rng, tokenizer=agent.tokenizer, num_tokens=options.document_tokens)
        messages = [*before, question | {"content": text + question["content"]}]
        leaves = []
        for session in range(options.sessions):
            leaf, prompt_len = agent.session(messages)
            num_tokens = len(leaf.token_ids)
            leaves.append(
                StoredLeaf(
                    session,
                    0,
                    np.array(leaf.token_ids),
                    prompt_len,
                    is_trained=np.array(leaf.trained, dtype=bool),
                    log_probs=np.full(num_tokens, np.nan),
                    token_rewards=np.zeros(num_tokens - prompt_len),
                )
            )
        trees.append(StoredTree(step=0, uid=f"{number:09d}", leaves=tuple(leaves)))
    write_trees(options.out, trees)


if __name__ == "__main__":
    main()

"""Count sessions and tool calls of stored trees, for sums and for products.

    python -m recipes.calculator.tool_calls MODEL step_000001.parquet ...

MODEL is a folder with the tokenizer. A session is right if its final answer is. A turn that calls has ``<tool_call>``
in it. It is *malformed* if verl's parser reads fewer calls than it opens, and *refused* if the calculator answers one
of them with an error. A turn that several leaves of a session share counts once.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser

from recipes.demo.tools import Calculator
from verl_tree.records import StoredTree, read_trees
from verl_tree.trainer.rows.calls import calls_of_row

COUNTED = ("sessions", "right", "turns", "calling", "malformed", "refused")


def sampled_turns(tree: StoredTree) -> Iterator[list[int]]:
    """Yield the tokens of each turn that the model wrote."""
    seen = set()
    for leaf in tree.leaves:
        for turn in calls_of_row({}, is_trained=leaf.is_trained):
            key = (leaf.session, leaf.token_ids[: turn.end].tobytes())
            if key not in seen:
                seen.add(key)
                yield leaf.token_ids[turn.start : turn.end].tolist()


async def fate(turn: list[int], *, parser: ToolParser, calculator: Calculator) -> str:
    """Return what became of the calls of a turn: ``none``, ``malformed``, ``refused`` or ``answered``."""
    _, calls = await parser.extract_tool_calls(turn)
    num_opened = parser.tokenizer.decode(turn).count("<tool_call>")
    if not num_opened:
        return "none"
    if len(calls) < num_opened:
        return "malformed"
    answers = []
    for call in calls:
        arguments = json.loads(call.arguments)
        known = call.name == calculator.function_name and isinstance(arguments, dict)
        answers.append(calculator.answer(arguments) if known else "error: ")
    return "refused" if any(each.startswith("error: ") for each in answers) else "answered"


async def count(tree: StoredTree, *, parser: ToolParser, calculator: Calculator) -> Counter[str]:
    """Return what `COUNTED` names, of one task."""
    fates = Counter([await fate(turn, parser=parser, calculator=calculator) for turn in sampled_turns(tree)])
    final = {leaf.session: leaf for leaf in tree.leaves}  # a session's last leaf
    right = sum(leaf.reward == 1 for leaf in final.values())
    calling = fates.total() - fates["none"]
    return fates + Counter(sessions=len(final), right=right, turns=fates.total(), calling=calling)


async def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model", type=Path)
    command.add_argument("trees", type=Path, nargs="+")
    options = command.parse_args()
    parser = ToolParser.get_tool_parser("hermes", AutoTokenizer.from_pretrained(options.model))
    calculator = Calculator({"type": "native"})
    print("file", "kind", *COUNTED, sep=",")
    for path in options.trees:
        counts: dict[str, Counter[str]] = {"sums": Counter(), "products": Counter()}
        for tree in read_trees(path):
            prompt = parser.tokenizer.decode(tree.leaves[0].token_ids[: tree.leaves[0].prompt_len])
            kind = "products" if "*" in prompt.rpartition("What is ")[2] else "sums"
            counts[kind] += await count(tree, parser=parser, calculator=calculator)
        for kind, counted in counts.items():
            print(path.stem, kind, *(counted[name] for name in COUNTED), sep=",")


if __name__ == "__main__":
    asyncio.run(main())

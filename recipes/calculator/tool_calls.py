"""Count what became of the tool calls in stored trees.

    python -m recipes.calculator.tool_calls MODEL step_000001.parquet ...

MODEL is a folder with the tokenizer. A turn that calls has ``<tool_call>`` in it. It is *malformed* if verl's parser
reads fewer calls than it opens, and *refused* if the calculator answers one of them with an error. A turn that several
leaves of a session share counts once.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser

from recipes.demo.tools import Calculator
from verl_tree.records import StoredTree, read_trees


def sampled_turns(tree: StoredTree) -> Iterator[list[int]]:
    """Yield the tokens of each turn that the model wrote."""
    seen = set()
    for leaf in tree.leaves:
        changes = np.flatnonzero(np.diff(leaf.is_trained, prepend=False, append=False))
        for start, end in zip(changes[::2], changes[1::2], strict=True):
            key = (leaf.session, leaf.token_ids[:end].tobytes())
            if key not in seen:
                seen.add(key)
                yield leaf.token_ids[start:end].tolist()


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


async def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model", type=Path)
    command.add_argument("trees", type=Path, nargs="+")
    options = command.parse_args()
    parser = ToolParser.get_tool_parser("hermes", AutoTokenizer.from_pretrained(options.model))
    calculator = Calculator({"type": "native"})
    print("file,turns,calling,malformed,refused")
    for path in options.trees:
        fates = [
            await fate(turn, parser=parser, calculator=calculator)
            for tree in read_trees(path)
            for turn in sampled_turns(tree)
        ]
        num_calling = len(fates) - fates.count("none")
        print(path.stem, len(fates), num_calling, fates.count("malformed"), fates.count("refused"), sep=",")


if __name__ == "__main__":
    asyncio.run(main())

"""Compare stored trees with the flat forward of a model: what `tree.canary` does in a training run, on one machine.

verl-tree canary TREES.parquet --model FOLDER [--backend NAME] [--capacity TOKENS] [--rows N]

The file is what the canary of a training run wrote, of which what it found is compared, a row or the gradient of a
layer from some rows, or any file of stored trees, of which rows are drawn. The exit status is 1 if something differs by
more than rounding explains (docs/exactness.md).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_tree.commands.show import choose_or_exit
from verl_tree.records import FOUND, StoredTree

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from verl_tree.functional.rounding import Difference


def main(arguments: Sequence[str]) -> int:
    """Parse the command line, compare, print a line for each row; return 1 if one differs by more than rounding."""
    parser = argparse.ArgumentParser(
        prog="verl-tree canary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stored", type=Path, help="file of stored trees")
    parser.add_argument("--model", required=True, help="model folder or name, best the checkpoint of that step")
    parser.add_argument("--uid", help="group to compare; default: the first of the file")
    parser.add_argument("--rows", type=int, default=4, help="rows to draw, if the file names none")
    parser.add_argument("--backend", help="attention kernel; default: that of the file, or auto")
    parser.add_argument("--capacity", type=int, help="tree tokens of a section; default: that of the file, or all")
    parser.add_argument("--dtype", help="default: that of the file, or float32")
    options = parser.parse_args(arguments)
    tree = choose_or_exit(parser, options.stored, options.uid)
    if options.rows < 1:
        parser.error(f"--rows {options.rows}: give at least 1")
    # Not at the top: both take seconds to import.
    import torch
    from transformers import AutoModelForCausalLM

    rows, found = _rows(tree, num_drawn=options.rows)
    if found.get("scores", "log_probs") != "log_probs":
        parser.error(f"{options.stored} has {found['scores']} of a critic: give a file of a policy's log-probs")
    dtype = getattr(torch, options.dtype or found.get("dtype", "float32"), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        parser.error(f"--dtype {options.dtype}: give float32, bfloat16 or float16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        model.to(device).eval()
        compared = compare_gradient if "layer" in found else compare
        differences = compared(
            model,
            tree,
            rows,
            backend=options.backend or found.get("backend", "auto"),
            capacity=options.capacity or found.get("capacity"),
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, each in differences.items():
        verdict = "rounding" if each.is_rounding else "NOT ROUNDING"
        print(f"{name}: {each.size:.3g} apart, {each.units:.3g} times its rounding of {each.unit:.3g}: {verdict}")
    return int(not all(each.is_rounding for each in differences.values()))


def _rows(tree: StoredTree, *, num_drawn: int) -> tuple[list[int], dict[str, Any]]:
    """Return the rows of a finding, with what is known of it, or rows that are drawn."""
    infos = {row: leaf.reward_extra_info or {} for row, leaf in enumerate(tree.leaves)}
    found = [row for row, info in infos.items() if FOUND in info]
    if found:
        return found, infos[found[0]][FOUND]
    num_rows = len(tree.leaves)
    drawn = np.random.default_rng(0).choice(num_rows, min(num_drawn, num_rows), replace=False)
    return sorted(drawn.tolist()), {}


def compare(
    model: "PreTrainedModel", tree: StoredTree, rows: Sequence[int], *, backend: str, capacity: int | None
) -> "dict[str, Difference]":
    """Compare the log-probs of rows in their tree with those of the model's own forward, row by row.

    Raises:
        ValueError: `tree_log_probs` refuses the tree, or a row has images, which files do not keep.
    """
    import torch

    from verl_tree.functional.rounding import Difference, moved_embeddings

    def trained(scores: "Tensor", row: int) -> "Tensor":
        return scores[torch.from_numpy(tree.leaves[row].is_trained[1:]).to(scores.device)]

    with torch.no_grad():
        scores = _of_tree(model, tree, backend=backend, capacity=capacity)
        once = [_alone(model, tree, row) for row in rows]
        with moved_embeddings([model.get_input_embeddings()], dtype=model.dtype):
            moved = [_alone(model, tree, row) for row in rows]
    return {
        f"row {row}": Difference.of_scores(
            *(trained(each, row) for each in (scores[row], here, there)), dtype=model.dtype
        )
        for row, here, there in zip(rows, once, moved, strict=True)
    }


def compare_gradient(
    model: "PreTrainedModel", tree: StoredTree, rows: Sequence[int], *, backend: str, capacity: int | None
) -> "dict[str, Difference]":
    """Compare the gradient of a layer from the scores of rows, through their tree and through each row alone.

    What Megatron has outside its layers has other names there; then the gradient of all parameters is compared.

    Raises:
        ValueError: As in `compare`.
    """
    import torch

    from verl_tree.functional.rounding import Difference, moved_embeddings

    infos = [(tree.leaves[row].reward_extra_info or {})[FOUND] for row in rows]
    layer = infos[0]["layer"]
    parameters = [each for name, each in model.named_parameters() if f"{name}.".startswith(f"{layer}.")]
    if not parameters:
        layer, parameters = "all layers", list(model.parameters())

    def gradient(scores: "list[Tensor]") -> "Tensor":
        read = [each[torch.tensor(info["places"]) - 1].sum() for each, info in zip(scores, infos, strict=True)]
        grads = torch.autograd.grad(torch.stack(read).sum(), parameters, allow_unused=True)
        pairs = zip(parameters, grads, strict=True)
        return torch.cat([(torch.zeros_like(one) if grad is None else grad).flatten() for one, grad in pairs]).float()

    scores = _of_tree(model, tree, backend=backend, capacity=capacity)
    by_tree = gradient([scores[row] for row in rows])
    by_rows = gradient([_alone(model, tree, row) for row in rows])
    with moved_embeddings([model.get_input_embeddings()], dtype=model.dtype):
        moved = gradient([_alone(model, tree, row) for row in rows])
    norms = [float(each.norm()) for each in (by_tree - by_rows, moved - by_rows, by_rows)]
    return {f"gradient of {layer}": Difference.of_norms(*norms, dtype=model.dtype)}


def _of_tree(model: "PreTrainedModel", tree: StoredTree, *, backend: str, capacity: int | None) -> "Sequence[Tensor]":
    """Return the log-probs of every leaf's tokens but the first."""
    from verl_tree.functional import tree_log_probs

    if any(leaf.images for leaf in tree.leaves):
        raise ValueError(f"{tree.uid}: files of stored trees keep no images; give a tree of text")
    sequences = [leaf.token_ids for leaf in tree.leaves]
    return tree_log_probs(model, sequences, backend=backend, capacity=capacity).log_probs


def _alone(model: "PreTrainedModel", tree: StoredTree, row: int) -> "Tensor":
    """Return the same of one leaf by the model's own forward."""
    import torch

    ids = torch.from_numpy(tree.leaves[row].token_ids.astype(np.int64)).to(model.device)
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

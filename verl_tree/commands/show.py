"""Make the HTML page of one tree of a stored rollout (`tree.dump_dir`), or of a prompt's trees over the steps.

verl-tree show STORED.parquet [--uid UID] [--tokenizer PATH] [--out page.html]
verl-tree show FOLDER --prompt UID [--tokenizer PATH] [--out page.html]
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_tree.records import StoredTree, read_trees
from verl_tree.records.page import tree_page

MAX_NAME_LEN = 100
"""Characters of a uid in the name of a page; file systems take 255 in all."""


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, make the page, print where it is."""
    parser = argparse.ArgumentParser(
        prog="verl-tree show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stored", type=Path, help="file of stored trees; with --prompt a folder of them")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--uid", help="group to show; default: the first of the file")
    chosen.add_argument(
        "--prompt", metavar="UID", help="group whose prompt is shown, as one tree of all training steps"
    )
    parser.add_argument("--tokenizer", help="model folder or name, to show texts instead of token ids")
    parser.add_argument(
        "--out", type=Path, help="page to write; default: beside the stored file, with the uid in its name"
    )
    options = parser.parse_args(arguments)

    tree = choose_or_exit(parser, options.stored, options.uid, prompt=options.prompt)
    tokenizer = None
    if options.tokenizer is not None:
        # Not at the top: transformers takes seconds to import, and pages of ids do without it.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        except (OSError, ValueError) as error:
            parser.error(f"--tokenizer {options.tokenizer}: give a model's folder or name. {error}")
    # A uid may be any text.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", tree.uid)[:MAX_NAME_LEN]
    beside = options.stored / "prompt" if options.prompt else options.stored
    out = options.out or beside.with_name(f"{beside.stem}_{name}.html")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(tree_page(tree, tokenizer), encoding="utf-8")
    print(out)


def choose_or_exit(
    parser: argparse.ArgumentParser, path: Path, uid: str | None, *, prompt: str | None = None
) -> StoredTree:
    """Return what `choose` or `over_steps` does, or end the program with the parser's message of an error."""
    try:
        return choose(path, uid) if prompt is None else over_steps(path, prompt)
    except OSError as error:
        parser.error(f"cannot read {path}: {error}")
    except ValueError as error:
        parser.error(str(error))


def choose(path: Path, uid: str | None) -> StoredTree:
    """Return the tree of the group `uid`, or the first one.

    Raises:
        ValueError: There is none, or the file holds no stored trees.
        OSError: The file cannot be read.
    """
    trees = read_trees(path, uid=uid)
    if not trees:
        raise ValueError(f"{path} holds no tree: give a file of another step")
    return trees[0]


def over_steps(folder: Path, uid: str) -> StoredTree:
    """Return one tree of the leaves of all training steps that have the prompt of a group, whose roles are their steps.

    Raises:
        ValueError: There is no such group, or a file holds no stored trees.
        OSError: A file cannot be read.
    """
    files = sorted(folder.glob("step_*.parquet"))
    stored = [tree for file in files for tree in read_trees(file)]
    wanted = next((_prompt_of(tree) for tree in stored if tree.uid == uid), None)
    if wanted is None:
        raise ValueError(f"--prompt {uid}: no group of the {len(files)} files step_*.parquet in {folder} has this uid")
    trees = [tree for tree in stored if _prompt_of(tree) == wanted]
    leaves, num_sessions = [], 0
    for tree in trees:
        for leaf in tree.leaves:
            leaves.append(replace(leaf, session=num_sessions + leaf.session, role=f"step {tree.step}"))
        num_sessions = leaves[-1].session + 1
    thumbnails = {number: image for tree in trees for number, image in tree.thumbnails.items()}
    return StoredTree(trees[-1].step, uid, tuple(leaves), thumbnails=thumbnails)


def _prompt_of(tree: StoredTree) -> tuple[int, ...]:
    first = tree.leaves[0]
    return tuple(first.keys()[: first.prompt_len].tolist())

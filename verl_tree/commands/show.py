"""Make the HTML page of one tree of a stored rollout (`tree.dump_dir`).

verl-tree show STORED.parquet [--uid UID] [--tokenizer PATH] [--out page.html]
"""

import argparse
import re
from collections.abc import Sequence
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
    parser.add_argument("stored", type=Path, help="file of stored trees")
    parser.add_argument("--uid", help="group to show; default: the first of the file")
    parser.add_argument("--tokenizer", help="model folder or name, to show texts instead of token ids")
    parser.add_argument(
        "--out", type=Path, help="page to write; default: beside the stored file, with the uid in its name"
    )
    options = parser.parse_args(arguments)

    tree = choose_or_exit(parser, options.stored, options.uid)
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
    out = options.out or options.stored.with_name(f"{options.stored.stem}_{name}.html")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(tree_page(tree, tokenizer), encoding="utf-8")
    print(out)


def choose_or_exit(parser: argparse.ArgumentParser, path: Path, uid: str | None) -> StoredTree:
    """Return what `choose` does, or end the program with the parser's message of an error."""
    try:
        return choose(path, uid)
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

"""Makes the HTML page of one tree of a stored rollout (`tree.dump_dir`).

python scripts/show_tree.py STORED.parquet [--uid UID] [--tokenizer PATH] [--out page.html]

Without --uid it is the first tree of the file; without --tokenizer the page shows token ids.
"""

import argparse
from pathlib import Path

from verl_tree.stored_trees import StoredTree, read_trees
from verl_tree.tree_page import tree_page


def choose(path: Path, uid: str | None) -> StoredTree:
    """The tree of a group, or the first one.

    Raises:
        ValueError: There is none; the message names those that there are.
    """
    trees = read_trees(path, uid=uid)
    if not trees:
        uids = [tree.uid for tree in read_trees(path)]
        raise ValueError(f"--uid {uid}: {path} has the trees {', '.join(uids[:20]) or 'of no group'}")
    return trees[0]


def main() -> None:
    """Reads, makes the page, says where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stored", type=Path, help="file of stored trees")
    parser.add_argument("--uid", help="group to show")
    parser.add_argument("--tokenizer", help="model folder or name; the texts are decoded with its tokenizer")
    parser.add_argument("--out", type=Path, help="page to write; default: beside the stored file")
    arguments = parser.parse_args()

    tokenizer = None
    if arguments.tokenizer is not None:
        # Not at the top: transformers takes seconds to import, and pages of ids do without it.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    try:
        tree = choose(arguments.stored, arguments.uid)
    except ValueError as error:
        parser.error(str(error))
    out = arguments.out or arguments.stored.with_name(f"{arguments.stored.stem}_{tree.uid}.html")
    out.write_text(tree_page(tree, tokenizer), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()

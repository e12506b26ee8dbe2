"""The trees of a training run: parquet files of every step, and pages of a few trees (docs/stored_trees.md).

They are written beside training (`late_files`).

In a validation verl does not know advantages, nor the rewards of a reward model that shares the actor's resource pool,
so its trees lack them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Self

from omegaconf import DictConfig

from verl_tree.records import StoredTree, write_trees
from verl_tree.records.page import Tokenizer, tree_page
from verl_tree.trainer.told.late_files import LateFile, LateFiles

NUM_SHOWN = 4
"""Trees of a step that become pages. A page of 50,000 tokens is a third of a megabyte, in every wandb table."""


class When(NamedTuple):
    """The time of trees: a training step, or the validation that follows it."""

    step: int
    is_last: bool
    is_validation: bool

    @property
    def kind(self) -> str:
        """What names of files and tables begin with."""
        return "val" if self.is_validation else "step"


@dataclass(slots=True)
class TreeLog:
    """Writer of the trees and pages of one training run."""

    dump_dir: Path | None  # folder of stored trees; None stores none
    show_every: int  # fewest steps between two shows of a kind; 0 shows nothing
    page_dir: Path
    last_shown: dict[str, int] = field(default_factory=dict)  # step of the last show of each kind
    files: LateFiles = field(default_factory=LateFiles)

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """Read `tree.dump_dir`, `tree.show_every` and `trainer.default_local_dir`."""
        dump_dir = None if config.tree.dump_dir is None else Path(config.tree.dump_dir)
        return cls(
            dump_dir=dump_dir,
            show_every=config.tree.show_every,
            page_dir=dump_dir or Path(config.trainer.default_local_dir) / "trees",
        )

    @property
    def writes(self) -> bool:
        """Whether anything is ever stored or shown."""
        return self.dump_dir is not None or self.show_every > 0

    def wants(self, when: When) -> bool:
        """Return whether the trees of that time are stored or shown."""
        return self.dump_dir is not None or self._shows(when)

    def max_trees(self, when: When) -> int | None:
        """Return how many of a training step's trees are needed, the first ones; None: all, because all are stored."""
        assert self.wants(when)
        return None if self.dump_dir is not None else NUM_SHOWN

    def log(
        self, trees: Sequence[StoredTree], when: When, *, tokenizer: Tokenizer | None, wandb: ModuleType | None
    ) -> None:
        """Store trees, and show the first of them when it is time; files are written a little later.

        Pages show token ids if there is no `tokenizer`. `wandb` is the started module, None if it is not a logger.
        """
        name = when.kind
        if self.dump_dir is not None:
            path = self.dump_dir / f"{name}_{when.step:06d}.parquet"
            remedy = "set tree.dump_dir to another folder, or to null to store no trees"
            self.files.add(LateFile(path, partial(write_trees, path, trees), remedy))
        if not self._shows(when):
            return
        is_first = name not in self.last_shown
        self.last_shown[name] = when.step
        pages = [tree_page(tree, tokenizer) for tree in trees[:NUM_SHOWN]]
        write = partial(_write_pages, self.page_dir, pages, when, is_first=is_first)
        self.files.add(LateFile(self.page_dir, write, "set tree.show_every=0 to show no pages"))
        if wandb is not None:
            table = wandb.Table(columns=["step", "uid", "leaves", "tree tokens", "POR", "mean reward", "tree"])
            for tree, page in zip(trees, pages, strict=False):
                # The page's security policy would refuse wandb's own style sheet.
                table.add_data(when.step, tree.uid, *_summary(tree), wandb.Html(page, inject=False))
            wandb.log(data={f"{name}/trees": table}, step=when.step)

    def _shows(self, when: When) -> bool:
        if self.show_every <= 0:
            return False
        last = self.last_shown.get(when.kind)
        return last is None or when.is_last or when.step - last >= self.show_every


def _write_pages(folder: Path, pages: Sequence[str], when: When, *, is_first: bool) -> None:
    """Write pages; tell the user where the first ones of a kind are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{when.kind}_{when.step:06d}_{number}.html" for number in range(len(pages))]
    for path, page in zip(paths, pages, strict=True):
        path.write_text(page, encoding="utf-8")
    if is_first and paths:
        of = "validation" if when.is_validation else "training"
        print(f"pages of {of} trees, to be opened in a browser: {paths[0]} and more beside it", flush=True)


def _summary(tree: StoredTree) -> tuple[int, int, float, float | None]:
    """Return leaves, tree tokens, POR and mean reward."""
    forest = tree.forest()
    rewards = [leaf.reward for leaf in tree.leaves if leaf.reward is not None]
    mean_reward = sum(rewards) / len(rewards) if rewards else None
    return forest.num_leaves, forest.num_tokens, forest.potential_overlap_ratio, mean_reward

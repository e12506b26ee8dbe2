"""verl's own SFT trainer on flat rows, and ours on trees, on the same batches; one process per rank.

`tests/e2e/test_sft.py` starts it. The reference is verl's `SFTTrainer` with its own data set and its own FSDP2 engine,
which gets the rows of each step from a list. Rank 0 writes what the runs have logged, distances of parameters, and what
the cases are made of.
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from beside_verl import full
from omegaconf import DictConfig, OmegaConf
from process_groups import join_ranks
from tiny_run import make_inputs
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM
from typing_extensions import override
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.dataset.dataset_utils import SFTTensorCollator

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.launch.command.composition import compose_config
from verl_tree.sft.checks import validate
from verl_tree.sft.rows import PADDING
from verl_tree.sft.trainer import TreeSFTTrainer

NUM_STEPS, BATCH_SIZE, CHECKPOINTS = 12, 4, (4, 6)
"""An epoch has 3 steps: the first checkpoint is in the middle of the second epoch, the other at its end."""

UNTRAINED = 7
"""Number of the row in which the model says nothing."""


def text(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice("abcdefghijklmnop 0123456789") for _ in range(rng.randint(low, high)))


def conversations() -> list[list[dict[str, str]]]:
    """Return a tree of nine rows, which a step of four does not hold, with a duplicate and a strict prefix; others."""
    rng = random.Random(1)

    def turn() -> list[dict[str, str]]:
        return [{"role": "user", "content": text(rng, 3, 9)}, {"role": "assistant", "content": text(rng, 3, 9)}]

    question = {"role": "user", "content": text(rng, 40, 60)}
    first = [question, {"role": "assistant", "content": text(rng, 5, 9)}]
    deep = [first + turn() + turn() for _ in range(3)]
    rows = [first, *deep, deep[0], *(deep[1][:4] + turn() for _ in range(2))]
    rows += [[question], *(first + turn() for _ in range(2))]
    for _ in range(3):
        other = [{"role": "user", "content": text(rng, 30, 60)}, *turn()[1:]]
        rows += [other + turn() for _ in range(rng.randint(1, 3))]
    return rows


def settings(root: Path, name: str, *overrides: str) -> DictConfig:
    """Compose the command line of a run."""
    config = compose_config(
        [
            "trainer.device=cpu",
            f"data.train_files={root}/train.parquet",
            f"data.val_files={root}/val.parquet",
            f"data.train_batch_size={BATCH_SIZE}",
            "data.min_shared=20",
            "data.max_token_len_per_gpu=160",
            "data.max_length=160",
            f"model.path={root}/model",
            f"trainer.default_local_dir={root}/{name}",
            "trainer.logger=[file]",
            "trainer.total_epochs=4",
            f"trainer.total_training_steps={NUM_STEPS}",
            "trainer.test_freq=4",
            # Above the rounding of gradients. AdamW divides those that are smaller by their own size, rounding or not.
            "optim.override_optimizer_config={eps: 1e-5}",
            *overrides,
        ],
        default_name="tree_sft",
    )
    OmegaConf.resolve(config)
    validate(config)
    return config


class GivenSteps:
    """The rows of this rank in each step of each epoch."""

    def __init__(self, epochs: list[list[list[int]]]) -> None:
        self._epochs, self._epoch = epochs, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._epochs[self._epoch])


class VerlsTrainer(SFTTrainer):
    """verl's trainer with everything its own but the order of the rows."""

    epochs: list[list[list[int]]]

    @override
    def _build_dataloader(self) -> None:
        self.global_batch_size = self.config.data.train_batch_size
        self.train_sampler = GivenSteps(self.epochs)
        self.collate_fn = SFTTensorCollator(self.config.data.pad_mode)
        self.train_dataloader = StatefulDataLoader(
            self.train_dataset, batch_sampler=self.train_sampler, collate_fn=self.collate_fn
        )
        self.val_dataloader = None


def rows_of_verl(trainer: TreeSFTTrainer) -> list[list[list[int]]]:
    """Return the rows of this rank in each step, as verl's data set counts them, with the untrained row for padding.

    It is also in every step, because verl takes no row out.
    """
    sampler, epochs = trainer.train_sampler, []
    for epoch in range(trainer.config.trainer.total_epochs):
        sampler.set_epoch(epoch)
        numbers = [[UNTRAINED if row == PADDING else row + (row >= UNTRAINED) for row in step] for step in sampler]
        epochs.append([[*step, UNTRAINED] for step in numbers])
    return epochs


def fit(trainer: SFTTrainer, metrics: Path) -> dict[str, Any]:
    """Train, and return what was logged by step, and the parameters."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)
    trainer.fit()
    dist.barrier()
    logged: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        logged.setdefault(record["step"], {}).update(record["data"])
    parameters = {name: full(p.detach()).clone() for name, p in trainer.engine.module.named_parameters()}
    return {"logged": logged, "parameters": parameters}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two runs' parameters."""
    assert one["parameters"].keys() == other["parameters"].keys()
    return max((one["parameters"][name] - value).abs().max().item() for name, value in other["parameters"].items())


def resume(root: Path, *, step: int) -> dict[str, Any]:
    """Resume the tree run after a step."""
    options = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/tree/global_step_{step}"]
    return fit(TreeSFTTrainer(config=settings(root, f"resumed_{step}", *REPEATABLE, *options)), root / f"{step}.jsonl")


REPEATABLE = ["tree.gate=never", "tree.relay=never"]
"""Nothing that a clock decides, so that resumed steps equal the others bit for bit."""


def validation_loss(model: Path, rows: list[dict[str, torch.Tensor]]) -> float:
    """Compute the mean over all trained tokens with transformers, row by row."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            scores = network(input_ids=row["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        chosen = scores.gather(1, row["input_ids"][1:, None])[:, 0][row["loss_mask"][1:].bool()]
        total, count = total - chosen.sum().item(), count + len(chosen)
    return total / count


def compare(root: Path) -> dict[str, Any]:
    """Run all sides; return what rank 0 writes."""
    trainer = TreeSFTTrainer(config=settings(root, "tree", *REPEATABLE, "trainer.save_freq=2"))
    epochs = rows_of_verl(trainer)
    tree = fit(trainer, root / "tree.jsonl")
    VerlsTrainer.epochs = epochs
    flat_options = ["tree.enabled=false", "trainer.test_freq=-1"]
    verls = fit(VerlsTrainer(config=settings(root, "verls", *flat_options)), root / "verls.jsonl")
    relayed = fit(
        TreeSFTTrainer(config=settings(root, "relayed", "tree.capacity=40", "tree.relay=always")), root / "relay.jsonl"
    )
    flat = fit(TreeSFTTrainer(config=settings(root, "flat", "tree.enabled=false")), root / "flat.jsonl")
    resumed = {step: resume(root, step=step) for step in CHECKPOINTS}
    exported = AutoModelForCausalLM.from_pretrained(
        root / "tree" / f"global_step_{NUM_STEPS}" / "huggingface", dtype=torch.float32
    )
    parameters = dict(exported.named_parameters())
    return {
        "logged": {
            "tree": tree["logged"],
            "verls": verls["logged"],
            "relayed": relayed["logged"],
            "flat": flat["logged"],
            "resumed": {step: run["logged"] for step, run in resumed.items()},
        },
        "distances": {
            "verls": distance(tree, verls),
            "relayed": distance(tree, relayed),
            "flat": distance(tree, flat),
            "resumed": max(distance(tree, run) for run in resumed.values()),
            "exported": max(
                (parameters[name] - value).abs().max().item() for name, value in tree["parameters"].items()
            ),
        },
        "validation_loss": validation_loss(
            root / "tree" / f"global_step_{NUM_STEPS}" / "huggingface",
            [trainer.val_dataset[row] for row in range(len(trainer.val_dataset))],
        ),
        "num_padding": sum(step[:-1].count(UNTRAINED) for steps in epochs for step in steps),
        "num_rows": [len(step) for step in epochs[0]],
    }


def main() -> None:
    """Write the results of all runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    root = join_ranks()
    if dist.get_rank() == 0:
        make_inputs(root)
        rows = [{"messages": messages} for messages in conversations()]
        pd.DataFrame(rows).to_parquet(root / "train.parquet")
        pd.DataFrame(rows[1:4]).to_parquet(root / "val.parquet")
    dist.barrier()
    results = compare(root)
    padding: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(padding, results["num_padding"])
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results | {"num_padding": sum(padding)}))
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

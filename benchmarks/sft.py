"""Times steps of fine-tuning on stored trees: verl's own FSDP2 engine and the tree engine, on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/sft.py --out docs/benchmarks/data/sft.jsonl

Both sides are `TreeSFTTrainer`s, whose batches, loss (verl's `sft_loss`) and AdamW are the same, with gradient
checkpointing. They take turns, step by step, in one process. Rows are leaves of trees with a prompt, branches below it
and leaves below these; everything behind the prompt is trained. verl's engine gets micro-batches of one row and of
four (`--flat-rows`), and the faster counts. Seconds are the processor's.

Two bounds: flat tokens / tree tokens, and the same in floating-point operations (`por_models.model_flops`), of which
verl's engine projects every position to the vocabulary and trees only those that are scored.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from harness import append_record, environment, interleave, new_parser, print_table
from omegaconf import OmegaConf
from por_models import Counts, model_flops, small_qwen3
from tensordict import NonTensorData
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.launch.command.composition import compose_config
from verl_tree.main_sft import ONE_RANK
from verl_tree.records import StoredLeaf, StoredTree, write_trees
from verl_tree.sft.trainer import TreeSFTTrainer
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout


def draw_trees(options: argparse.Namespace) -> list[StoredTree]:
    """Draw trees of a prompt with branches, and on each of these as many leaves."""
    rng = np.random.default_rng(0)
    prompt_len, branch_len, leaf_len = options.lens

    def tokens(length: int) -> np.ndarray:
        return rng.integers(0, options.vocabulary, size=length)

    trees = []
    for number in range(options.trees):
        prompt = tokens(prompt_len)
        paths = [np.concatenate([prompt, tokens(branch_len)]) for _ in range(options.branches)]
        rows = [np.concatenate([path, tokens(leaf_len)]) for path in paths for _ in range(options.leaves)]
        leaves = tuple(
            StoredLeaf(
                session=index,
                leaf=0,
                token_ids=row,
                prompt_len=prompt_len,
                is_trained=np.arange(len(row)) >= prompt_len,
                log_probs=np.zeros(len(row)),
            )
            for index, row in enumerate(rows)
        )
        trees.append(StoredTree(step=0, uid=str(number), leaves=leaves))
    return trees


class Side:
    """A trainer and its batches; `step` takes the next one."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = compose_config(
            [
                "trainer.device=cpu",
                f"data.train_files={folder}/trees.parquet",
                f"model.path={folder}/model",
                "+model.load_tokenizer=false",
                "trainer.resume_mode=disable",
                *overrides,
            ],
            default_name="tree_sft",
        )
        OmegaConf.resolve(config)
        self.trainer = TreeSFTTrainer(config=config)
        self.losses: list[float] = []
        self._epoch, self._batches = 0, iter(self.trainer.train_dataloader)

    def step(self) -> None:
        """Take one optimiser step."""
        batch = next(self._batches, None)
        if batch is None:
            self._epoch += 1
            self.trainer.train_sampler.set_epoch(self._epoch)
            self._batches = iter(self.trainer.train_dataloader)
            batch = next(self._batches)
        data = self.trainer.config.data
        batch = tu.get_tensordict(
            batch,
            {
                "use_remove_padding": False,
                "use_dynamic_bsz": True,
                "max_token_len_per_gpu": data.max_token_len_per_gpu,
                "temperature": 1.0,
                "global_batch_size": data.train_batch_size,
                "pad_mode": data.pad_mode,
            },
        )
        lens = batch["input_ids"].offsets().diff().tolist()
        tu.assign_non_tensor(batch, update_lr_scheduler=True, global_token_num=NonTensorData(lens))
        output = self.trainer.training_client.train_batch(data=batch)
        self.losses.append(tu.get(output, "metrics")["loss"])


def flops_of(model: PreTrainedModel, trees: list[StoredTree], *, prompt_len: int) -> dict[str, float]:
    """Return the operations of an update on all rows as verl's engine computes them, and as trees."""
    flat = tree = Counts()
    for each in trees:
        layout = TreeLayout.from_forest(TokenForest.from_sequences([leaf.token_ids for leaf in each.leaves]))
        # A position is projected if a token behind the prompt stands below it.
        scored = layout.parent_T[(layout.position_T >= prompt_len) & (layout.parent_T >= 0)].unique()
        tree += Counts(layout.num_tokens, int((layout.position_T + 1).sum()), len(scored))
        for leaf in each.leaves:
            length = len(leaf.token_ids)
            flat += Counts(length, length * (length + 1) // 2, length)
    return {"flat": model_flops(model, flat), "tree": model_flops(model, tree)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the sides and return a record."""
    trees = draw_trees(options)
    model = small_qwen3(options.hidden, layers=options.layers, vocab_size=options.vocabulary)
    row_len = sum(options.lens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trees(folder / "trees.parquet", trees)
        model.save_pretrained(folder / "model")
        common = [f"data.train_batch_size={options.rows}", f"data.max_length={row_len}"]
        common += [f"trainer.default_local_dir={folder}/run"]
        sides = {
            f"flat_{num}": Side(folder, *common, "tree.enabled=false", f"data.max_token_len_per_gpu={num * row_len}")
            for num in options.flat_rows
        }
        sides["tree"] = Side(folder, *common, f"data.max_token_len_per_gpu={options.capacity}")
        times = interleave(
            {name: side.step for name, side in sides.items()}, repetitions=options.repetitions, num_warmups=1
        )
        counts = sides["tree"].trainer.engine.tree_counts
    best = min((name for name in times if name != "tree"), key=lambda name: times[name].median_cpu_s)
    flops = flops_of(model, trees, prompt_len=options.lens[0])
    flat, tree = np.array(sides[best].losses), np.array(sides["tree"].losses)
    num_flat = sum(len(leaf.token_ids) for each in trees for leaf in each.leaves)
    num_tree = sum(each.forest().num_tokens for each in trees)
    return {
        "por": 1 - num_tree / num_flat,
        "flat_cpu_s": times[best].median_cpu_s,
        "tree_cpu_s": times["tree"].median_cpu_s,
        "speed_up": times[best].median_cpu_s / times["tree"].median_cpu_s,
        "bound_by_tokens": num_flat / num_tree,
        "bound_by_flops": flops["flat"] / flops["tree"],
        "flat_rows": int(best.removeprefix("flat_")),
        "packed_tokens_of_last_step": counts.num_packed_tokens,
        "largest_relative_difference_of_losses": float((abs(flat - tree) / flat).max()),
        "losses": {name: side.losses for name, side in sides.items()},
        "cpu_times_s": {name: each.cpu_s for name, each in times.items()},
        "times_s": {name: each.wall_s for name, each in times.items()},
        "environment": environment(options),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--trees", type=int, default=8)
    parser.add_argument("--branches", type=int, default=4, help="of a tree")
    parser.add_argument("--leaves", type=int, default=4, help="of a branch")
    parser.add_argument("--lens", type=int, nargs=3, default=(512, 276, 60), help="tokens of prompt, branch and leaf")
    parser.add_argument("--rows", type=int, default=32, help="in a step")
    parser.add_argument(
        "--flat-rows", type=int, nargs="+", default=(1, 4), help="of verl's micro-batches; the best counts"
    )
    parser.add_argument("--capacity", type=int, default=8192, help="tree tokens of a pack")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(ONE_RANK)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    record = measure(options)
    append_record(record, options.out)
    print_table([{name: value for name, value in record.items() if not isinstance(value, dict)}])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

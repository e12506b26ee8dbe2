"""verl's SFT trainer on batches of whole trees.

Everything but the batches is verl's (0.9.1, trainer/sft_trainer.py): model, loss, optimiser, checkpoints, log. The loss
is the mean over the trained tokens of all ranks, so a step may have any number of rows. With `tree.enabled=false` the
same batches go through verl's own FSDP2 engine.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
from verl.workers.engine_workers import TrainingWorker

import verl_tree.engine  # noqa: F401  (registers the engines)
from verl_tree.cpu.platform import ensure_cpu_process_group
from verl_tree.engine import TreeEngine
from verl_tree.engine.rows.columns import read_row_lens
from verl_tree.sft.rows import TokenRows, read_rows
from verl_tree.sft.sampler import TreeBatchSampler, TreePart, deal, find_trees, parts_of
from verl_tree.trainer.starts.checkpoints import folder_of, mark_complete, resume_from_complete, saving
from verl_tree.trainer.starts.metrics_file import keep_under_another_name, path_of
from verl_tree.trainer.told.update_flops import UpdateFlops


def train(config: DictConfig) -> None:
    """Train with a valid and resolved configuration, as one rank of the process group of the environment."""
    if config.trainer.device == "cpu":
        # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
        ensure_cpu_process_group()
    else:
        initialize_global_process_group()
    try:
        TreeSFTTrainer(config=config).fit()
    finally:
        destroy_global_process_group()


class TreeSFTTrainer(SFTTrainer):
    """verl's `SFTTrainer` whose steps are whole trees, and whose validation is the mean over all tokens."""

    @override
    def _build_dataset(self) -> None:
        data = self.config.data
        self.train_dataset = read_rows(
            data.train_files, data, model_config=self.model_config, max_samples=data.train_max_samples
        )
        self.val_dataset = None
        if data.val_files:
            self.val_dataset = read_rows(
                data.val_files, data, model_config=self.model_config, max_samples=data.val_max_samples
            )

    @override
    def _build_engine(self) -> None:
        super()._build_engine()
        self.training_client.train_batch = _counted(self.training_client)

    @override
    def _build_dataloader(self) -> None:
        data = self.config.data
        rank, num_ranks = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        self.global_batch_size = data.train_batch_size
        self.collate_fn = SFTTensorCollator(data.pad_mode)
        self.train_sampler = TreeBatchSampler(
            _parts(self.train_dataset, name="training", max_rows=data.train_batch_size, min_shared=data.min_shared),
            batch_size=data.train_batch_size,
            seed=self.config.trainer.seed,
            rank=rank,
            num_ranks=num_ranks,
            shared_tokens=self.config.tree.shared_tokens,
        )
        self.train_dataloader = StatefulDataLoader(
            self.train_dataset, batch_sampler=self.train_sampler, collate_fn=self.collate_fn
        )
        self.val_dataloader = None
        if self.val_dataset is not None:
            # verl takes the mean over batches, so all rows are one batch. The engine cuts it to what fits.
            num_rows = len(self.val_dataset)
            parts = _parts(self.val_dataset, name="validation", max_rows=num_rows, min_shared=data.min_shared)
            # Weights of shared tokens change gradients only, so here every objective may be cut.
            mine = deal(parts, num_ranks=num_ranks)[rank]
            self.val_dataloader = DataLoader(self.val_dataset, batch_sampler=[mine], collate_fn=self.collate_fn)

    @override
    def _build_ckpt_handler(self) -> None:
        # verl reads a path in the mode `auto`, too.
        if self.config.trainer.resume_from_path is None:
            resume_from_complete(self.config)
        super()._build_ckpt_handler()
        save = self.ckpt_handler.save_checkpoint

        def save_and_mark(step: int) -> None:
            folder = folder_of(self.config) / f"global_step_{step}"
            if self.rank != 0:
                save(step=step)
                return
            with saving(folder, step=step):
                save(step=step)
            mark_complete(folder, step=step)

        self.ckpt_handler.save_checkpoint = save_and_mark

    @override
    def fit(self) -> None:
        if self.rank == 0 and (path := path_of(self.config)) is not None:
            # verl keeps this logger to itself, so the lines cannot be written back.
            keep_under_another_name(path, like=path)
        super().fit()

    @override
    def _init_engine(self) -> None:
        super()._init_engine()
        available = len(self.train_dataloader) * self.config.trainer.total_epochs
        if self.total_training_steps > available:
            raise ValueError(
                f"trainer.total_training_steps={self.total_training_steps}: trainer.total_epochs="
                f"{self.config.trainer.total_epochs} have {available} steps; raise them, or set "
                "trainer.total_training_steps=null"
            )

    @override
    def _get_batch_seqlens(self, data: TensorDict) -> list[int]:
        """Return the lengths of the rows of all ranks, without padding rows."""
        return read_row_lens(data, mask="loss_mask", group=self.engine.get_data_parallel_group())


def _parts(dataset: TokenRows, *, name: str, max_rows: int, min_shared: int) -> list[TreePart]:
    """Find the trees of a data set, say what was found, and cut those that are too large for a step."""
    rows = dataset.rows
    trees, forest = find_trees([row.token_ids for row in rows], keys=[row.tree for row in rows], min_shared=min_shared)
    parts = parts_of(trees, rows, max_rows=max_rows)
    if dist.get_rank() == 0:
        num_tokens = sum(part.num_tokens for part in parts)
        print(
            f"{name}: {len(rows)} rows in {len(trees)} trees, the largest of {max(map(len, trees))} rows; "
            f"{forest.num_flat_tokens} flat tokens, POR {forest.potential_overlap_ratio:.2f}, and "
            f"{1 - num_tokens / forest.num_flat_tokens:.2f} in parts of at most {max_rows} rows",
            flush=True,
        )
    return parts


def _counted(worker: TrainingWorker) -> Callable[..., TensorDict]:
    """Return the worker's `train_batch` with metrics of trees, and an MFU of what was computed (docs/metrics.md)."""
    assert worker.flops_counter is not None, "it is there for every transformers model"
    train_batch, flops = worker.train_batch, UpdateFlops(worker.flops_counter, is_critic=False)

    def train_and_count(data: TensorDict) -> TensorDict:
        row_lens = tu.get(data, "global_token_num")
        output = train_batch(data=data)
        metrics: dict[str, Any] = tu.get(output, "metrics")
        engine = worker.engine
        if isinstance(engine, TreeEngine):
            metrics |= engine.tree_counts.metrics() | engine.rank_times.metrics() | engine.cost_metrics
            metrics |= engine.canary.metrics
            metrics["tree/micro_batches"] = engine.num_micro_batches
        metrics |= flops.both_mfus(metrics["mfu"], engine=engine, row_lens=row_lens)
        # verl names `mfu` itself.
        metrics["train/mfu_flat_equivalent"] = metrics.pop("mfu_flat_equivalent")
        tu.assign_non_tensor(output, metrics=metrics)
        return output

    return train_and_count

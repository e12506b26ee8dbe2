"""A training worker in this process, without Ray: the engines as tests, benchmarks and notebooks use them.

Run the script by `torchrun --nproc-per-node=1`, or set up torch.distributed in any other way::

    worker = local_worker("path/to/qwen3", strategy="fsdp_tree", max_token_len=8192)
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    worker.train_batch(batch_of_rows(rows, max_token_len=8192, global_batch_size=len(rows)))
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.engine import TrainingWorkerConfig

from verl_tree.config import TreeFSDPEngineConfig
from verl_tree.trainer.worker import TreeTrainingWorker

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def local_worker(
    model_path: str,
    *,
    strategy: str,
    max_token_len: int,
    is_critic: bool = False,
    model_options: Mapping[str, Any] | None = None,
    tree_options: Mapping[str, Any] | None = None,
    optimizer: FSDPOptimizerConfig | None = None,
) -> TreeTrainingWorker:
    """Build a float32 worker with its model, optimiser and engine.

    Args:
        model_path: Folder of a Hugging Face model.
        strategy: `fsdp_tree`, or verl's own `fsdp2`.
        max_token_len: Tokens of one micro-batch: tree tokens of a pack, or flat tokens.
        is_critic: A value model instead of a policy.
        model_options: Fields of verl's `HFModelConfig` to set.
        tree_options: Fields of `TreeConfig` to set.
        optimizer: verl's optimiser config; AdamW with learning rate 1e-3 by default.

    Returns:
        The worker, initialised; `set_loss_fn` gives it a loss.
    """
    options = {"enable_gradient_checkpointing": False, **(model_options or {})}
    model_config = HFModelConfig(
        path=model_path,
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        **options,
    )
    engine_config = TreeFSDPEngineConfig(
        strategy="fsdp2", mixed_precision=FP32, model_dtype="fp32", use_torch_compile=False, tree=tree_options or {}
    )
    # As verl's actor config does: an engine config checks its strategy before the actor's is known.
    object.__setattr__(engine_config, "strategy", strategy)
    engine_config.use_dynamic_bsz = True
    engine_config.max_token_len_per_gpu = max_token_len
    engine_config.infer_max_token_len_per_gpu = max_token_len
    worker = TreeTrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if is_critic else "language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer or FSDPOptimizerConfig(lr=1e-3, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def batch_of_rows(
    rows: Sequence[Mapping[str, Tensor]], *, max_token_len: int, global_batch_size: int, **settings: Any
) -> TensorDict:
    """Make the batch that verl's trainer would send to a worker.

    Args:
        rows: One mapping per trajectory with 1-D tensors: `prompts`, `responses`, `response_mask`, and what the loss
            reads (`old_log_probs`, `advantages`, ... of the response's length).
        max_token_len: Tokens of one micro-batch.
        global_batch_size: Trajectories of the mini-batch over all ranks, padding rows not counted.
        **settings: Other keys of the batch, such as `calculate_entropy`; `temperature` is 1.0 unless given.

    Returns:
        Jagged tensors with `input_ids`, `position_ids` and `loss_mask` added.
    """
    columns: dict[str, list[Tensor]] = {}
    for row in rows:
        input_ids = torch.cat([row["prompts"], row["responses"]])
        added = {
            "input_ids": input_ids,
            "position_ids": torch.arange(len(input_ids)),
            "loss_mask": row["response_mask"],
        }
        for name, value in {**row, **added}.items():
            columns.setdefault(name, []).append(value)
    jagged = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    batch = TensorDict(jagged, batch_size=[len(rows)])
    tu.assign_non_tensor(
        batch,
        **{
            "temperature": 1.0,
            "calculate_entropy": False,
            "use_dynamic_bsz": True,
            "use_remove_padding": False,
            "use_fused_kernels": False,
            "max_token_len_per_gpu": max_token_len,
            "global_batch_size": global_batch_size,
            "global_token_num": NonTensorData([len(row) for row in columns["input_ids"]]),
            **settings,
        },
    )
    return batch

"""A training worker in this process, without Ray, for tests, benchmarks and notebooks.

Run the script by `torchrun --nproc-per-node=1`, or set up torch.distributed in any other way::

    worker = local_worker("path/to/qwen3", strategy="fsdp_tree", max_token_len=8192)
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    worker.train_batch(batch_of_rows(rows, max_token_len=8192, global_batch_size=len(rows)))
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import (
    EngineRouterReplayConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    VeOmniOptimizerConfig,
)
from verl.workers.config.engine import TrainingWorkerConfig

from verl_tree.configs import FLAT_STRATEGIES
from verl_tree.engine_config import TreeFSDPEngineConfig, TreeMegatronEngineConfig, TreeVeOmniEngineConfig
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
    router_replay: str = "disabled",
    optimizer: OptimizerConfig | None = None,
    sequence_parallel_size: int = 1,
    freeze_vision_tower: bool = False,
    engine_options: Mapping[str, Any] | None = None,
) -> TreeTrainingWorker:
    """Build an initialised float32 worker on a folder with a Hugging Face model; `set_loss_fn` gives it a loss.

    `strategy` is `fsdp_tree` or verl's own `fsdp2`; where VeOmni is installed, `veomni_tree` or verl's `veomni`, too,
    on two ranks or more; where Megatron is, `megatron_tree` or verl's `megatron`. `max_token_len` bounds a
    micro-batch, in tree tokens or in flat tokens. `model_options` sets fields of verl's `HFModelConfig`,
    `tree_options` those of `TreeConfig`, `engine_options` those of verl's engine config
    (`pipeline_model_parallel_size=2`), `router_replay` verl's mode, `freeze_vision_tower` its key of that name. The
    default optimiser is Adam with learning rate 1e-3. `is_critic` builds a value model instead of a policy. So many
    ranks as `sequence_parallel_size` says compute each model call together, on Megatron none.
    """
    flat = FLAT_STRATEGIES.get(strategy, strategy)
    options = {
        "enable_gradient_checkpointing": False,
        "use_remove_padding": flat == "megatron",
        "override_config": {"attn_implementation": "sdpa"},
        **(model_options or {}),
    }
    model_config = HFModelConfig(
        path=model_path,
        load_tokenizer=False,
        **options,
    )
    if flat == "megatron":  # it asks for the id of padding
        model_config.tokenizer = SimpleNamespace(pad_token_id=0)
    attention = options["override_config"]["attn_implementation"]
    kernels = "cpu" if get_device_name() == "cpu" else "fla"
    config_class, make_optimizer, own_options = {
        "fsdp2": (
            TreeFSDPEngineConfig,
            FSDPOptimizerConfig,
            {
                "mixed_precision": FP32,
                "model_dtype": "fp32",
                "ulysses_sequence_parallel_size": sequence_parallel_size,
                "use_torch_compile": False,
            },
        ),
        "veomni": (
            TreeVeOmniEngineConfig,
            VeOmniOptimizerConfig,
            {
                "mixed_precision": True,
                "ulysses_parallel_size": sequence_parallel_size,
                "attn_implementation": attention,
                "moe_implementation": "eager",
                "causal_conv1d_implementation": kernels,
                "chunk_gated_delta_rule_implementation": kernels,
                "use_torch_compile": False,
            },
        ),
        "megatron": (TreeMegatronEngineConfig, McoreOptimizerConfig, {"sequence_parallel": False}),
    }[flat]
    engine_config = config_class(
        strategy=strategy,
        router_replay=EngineRouterReplayConfig(mode=router_replay),
        tree=tree_options or {},
        freeze_vision_tower=freeze_vision_tower,
        **(own_options | dict(engine_options or {})),
    )
    engine_config.use_dynamic_bsz = True
    engine_config.max_token_len_per_gpu = max_token_len
    engine_config.infer_max_token_len_per_gpu = max_token_len
    worker = TreeTrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if is_critic else "language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer or make_optimizer(lr=1e-3, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def batch_of_rows(
    rows: Sequence[Mapping[str, Tensor]], *, max_token_len: int, global_batch_size: int, **settings: Any
) -> TensorDict:
    """Make the batch that verl's trainer would send to a worker: jagged tensors.

    A row has the 1-D tensors `prompts`, `responses`, `response_mask`, and what the loss reads (`old_log_probs`,
    `advantages`, ... of the response's length). `input_ids`, `position_ids` and `loss_mask` are added.
    `global_batch_size` counts the mini-batch's trajectories over all ranks, without padding rows. `settings` are other
    keys of the batch, such as `calculate_entropy`; `temperature` is 1.0 unless given.
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

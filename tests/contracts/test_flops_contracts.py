"""What we rely on in verl's FLOPs counter (0.9.1), for each type of model that it and transformers know."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

pytest.importorskip("verl")

from process_groups import group_of_one
from transformers import CONFIG_MAPPING, AutoConfig
from verl.utils import tensordict_utils as tu
from verl.utils.flops_counter import ESTIMATE_FUNC, FlopsCounter
from verl.workers.config import FSDPActorConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform, of which the counter knows the peak)
from verl_tree.config import FLAT_STRATEGY
from verl_tree.testing.local_worker import batch_of_rows, local_worker

# verl reads hidden_size of the whole glm4v config, which has none.
MODEL_TYPES = sorted(ESTIMATE_FUNC.keys() & set(CONFIG_MAPPING) - {"glm4v"})


def flops(config: Any, lens: list[int]) -> float:
    return FlopsCounter(config).estimate_flops(lens, 1e-12)[0]


def test_most_types_are_here() -> None:
    assert {"qwen2", "llama", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_5", "gemma3_text"} <= set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rows_add_up_and_every_token_has_two_products_with_the_vocabulary(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    rows = [2000, 300, 7]
    assert flops(config, rows) == pytest.approx(sum(flops(config, [each]) for each in rows), rel=1e-12)
    assert flops(config, []) == 0.0
    # The text config is what the counter reads of a model that reads images.
    text = config.get_text_config(decoder=True)
    before, hidden_size = flops(config, rows), text.hidden_size
    text.vocab_size += 1000
    assert flops(config, rows) - before == pytest.approx(12 * 1000 * hidden_size * sum(rows), rel=1e-6)


def test_attention_is_half_the_square_of_a_row() -> None:
    """6 = 3 (forward, and twice that backward) x 2 (FLOPs) x 2 (scores and values) / 2 (what a causal mask shows)."""
    config = AutoConfig.for_model("qwen3")
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert flops(config, [4096]) - 2 * flops(config, [2048]) == pytest.approx(6 * width * 2 * 2048**2, rel=1e-9)


class FixedCounter(FlopsCounter):
    """A counter that does 3 of 2 promised TFLOPs in any time, and keeps the lengths that it is asked about."""

    def estimate_flops(self, batch_seqlens: list[int], delta_time: float, **_: Any) -> tuple[float, float]:
        self.lens = batch_seqlens
        assert delta_time > 0
        return 3.0, 2.0


def test_an_update_reports_the_estimate_of_its_global_token_num_over_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(size="engine").save_pretrained(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with group_of_one():
        worker = local_worker(str(tmp_path), strategy=FLAT_STRATEGY, max_token_len=64)
        config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        worker.set_loss_fn(partial(ppo_loss, config=config))
        assert worker.flops_counter is not None
        worker.flops_counter = counter = FixedCounter(worker.flops_counter.config)
        row = {"prompts": torch.tensor([1, 2]), "responses": torch.tensor([3]), "response_mask": torch.ones(1).long()}
        row |= {"old_log_probs": torch.zeros(1), "advantages": torch.ones(1)}
        batch = batch_of_rows([row, row], max_token_len=64, global_batch_size=2)
        metrics = tu.get(TrainingWorker.train_batch(worker, batch), "metrics")
    assert metrics["mfu"] == 1.5
    assert counter.lens == [3, 3]

"""What the tests with real engines share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_groups import group_of_one
from transformers import AutoModelForCausalLM, Qwen3Config


@pytest.fixture(scope="module")
def worker_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a small model, and make a process group of this process alone, so that `local_worker` works."""
    if torch.cuda.is_available():
        pytest.skip("builds engines on the CPU platform")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with group_of_one(), pytest.MonkeyPatch.context() as patch:
        # What verl's workers read of their place.
        for name, value in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")
        yield folder

"""What we rely on in verl's FLOPs counter (0.9.1), for each type of model that it and transformers know."""

from typing import Any

import pytest

pytest.importorskip("verl")

from transformers import CONFIG_MAPPING, AutoConfig
from verl.utils.flops_counter import ESTIMATE_FUNC, FlopsCounter

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform, of which the counter knows the peak)

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

"""Hybrids that vLLM's CPU engine would load and then fail on are refused before anything starts."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from input_cases import resolved, write_model

from verl_tree.launch.checks import find
from verl_tree.launch.checks.cpu_rollouts import check_linear_attention

NEXT = {
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}


def messages(folder: Path, *overrides: str, **settings: object) -> list[str]:
    path = write_model(folder / "model", **settings)
    config = resolved(f"actor_rollout_ref.model.path={path}", *overrides)
    found = [finding.message for finding in check_linear_attention(config)]
    assert set(found) <= {finding.message for finding in find(config)}
    return found


BFLOAT16 = "actor_rollout_ref.rollout.dtype=bfloat16"


@pytest.mark.parametrize("settings", [NEXT, {"model_type": "qwen3_5", "text_config": NEXT}], ids=["text", "nested"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "auto"])
def test_other_types_than_bfloat16_are_refused(settings: dict, dtype: str, tmp_path: Path) -> None:
    (message,) = messages(tmp_path, f"actor_rollout_ref.rollout.dtype={dtype}", **settings)
    assert message.startswith(f"actor_rollout_ref.rollout.dtype={dtype}: the linear attention of vLLM's CPU engine")
    assert f"{tmp_path}/model: qwen3_" in message
    assert "set it to bfloat16" in message
    assert messages(tmp_path, BFLOAT16, **settings) == []


def test_heads_without_a_kernel_are_refused(tmp_path: Path) -> None:
    settings = NEXT | {"linear_value_head_dim": 32}
    (message,) = messages(tmp_path, BFLOAT16, **settings)
    assert message.startswith(f"actor_rollout_ref.model.path={tmp_path}/model: ")
    assert "heads of 64 and 128, and linear_value_head_dim=32" in message
    assert len(messages(tmp_path, **settings)) == 2


def test_other_models_and_devices_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(tmp_path) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert messages(tmp_path, "trainer.device=cuda", **NEXT) == []

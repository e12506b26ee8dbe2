"""Real training in which a student reaches its teacher: sessions that branch, the teacher on ranks or on servers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_run import run
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STEPS = 60
LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model.model_path"


def make_teacher(folder: Path) -> Path:
    """Save another model with the student's tokenizer, whose distributions are far from even."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = tiny_model(size="vllm", seed=11, vocab_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    return folder / "teacher"


SERVERS = (
    "distillation.nnodes=1",
    "distillation.teacher_models.teacher_model.num_replicas=1",
    "distillation.teacher_models.teacher_model.inference.max_model_len=128",
)


@pytest.mark.parametrize(
    ("loss_mode", "as_reward", "place"),
    [
        ("forward_kl_topk", False, "ranks"),
        ("k3", False, "ranks"),
        ("k1", True, "ranks"),
        ("forward_kl_topk", False, "servers"),
    ],
)
def test_a_student_reaches_its_teacher(folder: Path, loss_mode: str, as_reward: bool, place: str) -> None:
    metrics = run(
        folder,
        f"distilled_{loss_mode}_{place}",
        "distillation.enabled=true",
        *(SERVERS if place == "servers" else ()),
        f"{TEACHER}={make_teacher(folder)}",
        f"{LOSS}.loss_mode={loss_mode}",
        f"{LOSS}.topk=8",
        f"{LOSS}.use_task_rewards=false",
        f"{LOSS}.use_policy_gradient={str(as_reward).lower()}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "actor_rollout_ref.actor.optim.optimizer=AdamW",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        f"trainer.total_training_steps={NUM_STEPS}",
    )
    steps = [metrics[step] for step in sorted(metrics)]
    assert len(steps) == NUM_STEPS
    assert all(step["tree/por"] > 0.5 for step in steps), "four leaves of a session share their turns"
    name = "actor/distillation/loss" if loss_mode == "forward_kl_topk" else "actor/distillation/abs_loss"
    first, last = (sum(step[name] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last < 0.2 * first, [step[name] for step in steps]

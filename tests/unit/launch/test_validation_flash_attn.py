"""What `tree.enabled=false` on CUDA needs flash-attn for. None is installed here; an empty module stands for it."""

from pathlib import Path

import pytest
from input_cases import resolved

from verl_tree.launch.checks import find
from verl_tree.launch.checks.refusals import Finding
from verl_tree.launch.checks.settings import check_attention
from verl_tree.launch.command.composition import compose_config

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
FLAT = ("trainer.device=cuda", "tree.enabled=false", "actor_rollout_ref.actor.strategy=fsdp2")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make an environment with flash-attn."""
    (tmp_path / "flash_attn_2_cuda.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join no cluster, so that what is missing here is a refusal, not a warning."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def findings(*overrides: str) -> list[Finding]:
    config = resolved(*overrides)
    found = list(check_attention(config))
    assert set(found) <= set(find(config))
    return found


def test_the_gpu_profile_takes_sdpa_where_flash_attn_is_missing() -> None:
    for model in ("actor_rollout_ref", "critic"):
        assert compose_config(["profile=gpu"])[model].model.override_config.attn_implementation == "sdpa"


@pytest.mark.usefixtures("installed")
def test_the_gpu_profile_keeps_verls_default_with_flash_attn() -> None:
    for model in ("actor_rollout_ref", "critic"):
        assert compose_config(["profile=gpu"])[model].model.override_config.attn_implementation == "flash_attention_2"
    chosen = compose_config(["profile=gpu", f"+{KEY}=sdpa"])
    assert chosen.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"


def test_the_slow_baseline_is_warned_of_once() -> None:
    (finding,) = findings(*FLAT)
    assert finding.is_warning
    assert finding.message.startswith(f"{KEY}=sdpa: exact, but its time and memory grow")


@pytest.mark.parametrize("value", ["flash_attention_2", "null"])
def test_attention_that_is_not_installed_is_refused(value: str) -> None:
    (finding,) = findings(*FLAT, f"{KEY}={value}")
    assert not finding.is_warning
    assert "flash-attn is not installed; install flash-attn (docs/install.md), or set sdpa" in finding.message


def test_a_critic_without_flash_attn_is_refused() -> None:
    *_, finding = findings(*FLAT, "critic.enable=true")
    assert not finding.is_warning
    assert finding.message.startswith("tree.enabled=False: verl's own critic needs flash-attn")


def test_other_machines_may_have_it() -> None:
    assert all(each.is_warning for each in findings(*FLAT, "critic.enable=true", "trainer.nnodes=2"))


def test_trees_and_cpus_need_none() -> None:
    assert findings("trainer.device=cuda", "critic.enable=true", f"{KEY}=flash_attention_2") == []
    assert findings("tree.enabled=false", "actor_rollout_ref.actor.strategy=fsdp2") == []


@pytest.mark.usefixtures("installed")
def test_an_installed_one_is_fine() -> None:
    assert findings(*FLAT, "critic.enable=true", f"{KEY}=flash_attention_2") == []

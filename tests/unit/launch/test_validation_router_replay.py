"""Router replay that cannot work is refused before Ray starts, each with its remedy."""

import pytest
from input_cases import refusal, resolved
from verl.utils.config import omega_conf_to_dataclass

from verl_tree.launch.checks import validate
from verl_tree.launch.checks.router_replay import MODE, RETURNED, check_router_replay

BYPASS = "algorithm.rollout_correction.bypass_mode=true"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{MODE}=R4"], [f"{MODE}=R4", "disabled, R2 or R3"]),
        ([f"{MODE}=R2", "tree.enabled=false"], [f"{MODE}=R2", "tree.enabled=true"]),
        ([f"{MODE}=R3", f"{RETURNED}=true"], [f"{MODE}=R3", "vLLM's CPU engine", "set R2"]),
        ([f"{MODE}=R2", BYPASS], [f"{MODE}=R2", "bypass_mode=true", "set it to false, or R3"]),
        ([f"{MODE}=R2", f"{RETURNED}=true"], [f"{RETURNED}=True", "here it is R2, so set false"]),
        ([f"{RETURNED}=true"], [f"{RETURNED}=True", "here it is disabled, so set false"]),
        (["tree.route_conflicts=fork"], ["tree.route_conflicts=fork", "set R2 or R3 there, or first here"]),
    ],
)
def test_setting_is_refused_with_its_remedy(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    for part in parts:
        assert part in message


def test_r3_needs_a_rollout_that_returns_routes() -> None:
    config = resolved(f"{MODE}=R3", "trainer.device=cuda")
    (finding,) = check_router_replay(config)
    assert finding.message.startswith(f"{RETURNED}=False")
    assert finding.message.endswith("here it is R3, so set true")
    assert not list(check_router_replay(resolved(f"{MODE}=R3", f"{RETURNED}=true", "trainer.device=cuda")))


def test_the_mode_reaches_the_engine() -> None:
    config = resolved(f"{MODE}=R2")
    validate(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config).router_replay.mode == "R2"
    assert omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config).router_replay.mode == "disabled"

"""Checks of router replay: who records the routes, and who imposes them."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    ROLLOUT,
    Check,
    Findings,
    refusal,
    uses_cpu,
    uses_tree,
    value_of,
)

MODE, RETURNED = f"{ACTOR}.fsdp_config.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"

CONFLICTS = "tree.route_conflicts"


def check_router_replay(config: DictConfig) -> Findings:
    """Find a mode that nobody would serve, and routes that nobody would record or read."""
    mode = value_of(config, MODE) or "disabled"
    if mode not in ("disabled", "R2", "R3"):
        yield refusal(config, MODE, "choose disabled, R2 or R3")
    elif mode != "disabled" and not uses_tree(config):
        yield refusal(config, MODE, "verl's own FSDP engine ignores it; set disabled or tree.enabled=true")
    elif mode == "R3" and uses_cpu(config):
        yield refusal(config, MODE, "vLLM's CPU engine returns no routes; set R2, which needs none of it")
    elif mode == "R2" and value_of(config, f"{CORRECTION}.bypass_mode"):
        remedy = f"{CORRECTION}.bypass_mode=true leaves out the pass that records the routes; set it to false, or R3"
        yield refusal(config, MODE, remedy)
    elif bool(value_of(config, RETURNED)) != (mode == "R3"):
        value = "true" if mode == "R3" else "false"
        remedy = f"routes of the rollout are for {MODE}=R3 and no other; here it is {mode}, so set {value}"
        yield refusal(config, RETURNED, remedy)
    if mode == "disabled" and value_of(config, CONFLICTS) == "fork":
        yield refusal(
            config, CONFLICTS, f"no routes are replayed with {MODE}=disabled; set R2 or R3 there, or first here"
        )


CHECKS: tuple[Check, ...] = (check_router_replay,)

"""Checks of verl's own engine on CUDA (`tree.enabled=false`): what it needs flash-attn for. Trees need none."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    MODELS,
    Check,
    Finding,
    Findings,
    refusal,
    refusal_here,
    uses_cpu,
    uses_critic,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.ulysses import team_keys, team_size
from verl_tree.launch.command.composition import has_flash_attn

KEY = f"{MODELS[0]}.override_config.attn_implementation"
VERLS_DEFAULT = "flash_attention_2"
"""What `verl.workers.config.HFModelConfig` (0.9.1) takes where the key has no value."""

INSTALL = "install flash-attn (docs/install.md)"


def check_attention(config: DictConfig) -> Findings:
    """Find attention of verl's engine that is not installed, slow, or wrong with Ulysses."""
    if uses_tree(config) or uses_cpu(config):
        return
    attention = value_of(config, KEY) or VERLS_DEFAULT
    is_flash = attention == VERLS_DEFAULT
    if team_size(config) > 1 and not is_flash:
        # verl exchanges heads in this implementation only; any other would attend within a rank's tokens.
        remedy = f"verl's own engine needs {KEY}={VERLS_DEFAULT} for it, not {attention}; {INSTALL}, or set 1"
        yield refusal(config, team_keys(config)[0], remedy)
    elif is_flash and not has_flash_attn():
        yield refusal_here(config, KEY, f"flash-attn is not installed; {INSTALL}, or set sdpa")
    elif attention == "sdpa" and not has_flash_attn():
        slow = "exact, but its time and memory grow with the square of a micro-batch's tokens"
        yield Finding(f"{KEY}=sdpa: {slow}; {INSTALL} before you compare speeds", is_warning=True)


def check_critic(config: DictConfig) -> Findings:
    """Find verl's critic without flash-attn: verl asks for flash_attention_2 by name when it loads one."""
    if uses_critic(config) and not (uses_tree(config) or uses_cpu(config) or has_flash_attn()):
        remedy = f"verl's own critic needs flash-attn, whatever attn_implementation says; {INSTALL}, or set true"
        yield refusal_here(config, "tree.enabled", remedy)


CHECKS: tuple[Check, ...] = (check_attention, check_critic)

"""Checks of models with recurrent layers that vLLM's CPU engine (0.31) loads, and fails on at the first prompt."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ROLLOUT,
    Check,
    Findings,
    refusal,
    text_settings,
    uses_cpu,
    value_of,
)

_MODEL = "actor_rollout_ref.model.path"
_HEAD_DIMS = (64, 128)


def check_linear_attention(config: DictConfig) -> Findings:
    """Find a gated delta rule in a type or a size that its CPU kernels do not take."""
    settings = text_settings(value_of(config, _MODEL))
    if not uses_cpu(config) or "linear_conv_kernel_dim" not in settings:
        return
    name = f"linear attention of vLLM's CPU engine ({_MODEL}={value_of(config, _MODEL)}: {settings['model_type']})"
    if value_of(config, f"{ROLLOUT}.dtype") != "bfloat16":
        remedy = f"the {name} computes in bfloat16 only; set it to bfloat16, training stays in float32"
        yield refusal(config, f"{ROLLOUT}.dtype", remedy)
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if settings.get(key) not in _HEAD_DIMS:
            remedy = f"the {name} has kernels for heads of 64 and 128, and {key}={settings.get(key)}"
            yield refusal(config, _MODEL, f"{remedy}; train such a model on GPUs")


CHECKS: tuple[Check, ...] = (check_linear_attention,)

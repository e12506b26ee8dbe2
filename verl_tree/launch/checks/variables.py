"""Checks of the environment variables that the configuration gives to Ray's processes."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import Check, Finding, Findings, value_of

ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
SECRETS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS"})
"""Words in the names of variables whose values nobody should see."""

REMEDY = (
    "the run's log shows it, and .hydra/config.yaml does, if it is given in the clear; remove it here, and set the "
    "variable in the shell of this command, or of `ray start` where Ray runs already: Ray's processes inherit it"
)


def check_secrets(config: DictConfig) -> Findings:
    """Warn of secrets: verl prints the resolved configuration, and Hydra keeps what it was composed from."""
    for name in value_of(config, ENV_VARS) or ():
        if not SECRETS.isdisjoint(str(name).upper().split("_")):
            yield Finding(f"{ENV_VARS}.{name}=(not shown): {REMEDY}", is_warning=True)


CHECKS: tuple[Check, ...] = (check_secrets,)

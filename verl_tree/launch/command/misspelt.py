"""Misspelt names, and what was meant; of a misspelt option of a command line what Hydra says of it, in our words.

Hydra's own advice is to add the option with a `+`. A misspelt one is then accepted, and read by nobody.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.errors import HydraException

GONE = {
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": (
        "it has no interactions; write an agent loop that answers the model (docs/agent_loops.md)"
    ),
    "critic.model.fsdp_config": "it is critic.fsdp",
    "reward_model.use_reward_loop": "there is no other way to reward; remove it",
    "trainer.use_legacy_worker_impl": "there is one kind of workers; remove it",
    **{
        f"{role}.megatron.grad_offload": "param_offload frees gradients, too; remove it"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    },
    "actor_rollout_ref.actor.policy_loss.tau_pos": "it is actor_rollout_ref.actor.tau_pos",
    "actor_rollout_ref.actor.policy_loss.tau_neg": "it is actor_rollout_ref.actor.tau_neg",
}
"""Options and groups of earlier releases of verl, and what there is instead."""

_LIKENESS = 0.8
"""How like a name must be to one that is there; `interaction_config_path` is to `tool_config_path` by 0.72."""

_REFUSED = re.compile(r"Could not override '(?P<key>[^']+)'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that ends a sentence; empty if nothing is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def misspelt_option(error: "HydraException", values: Mapping[str, Any]) -> str | None:
    """Return the refusal of an option that is not there, or None if the error is another one.

    Args:
        error: What Hydra raised when it composed the configuration.
        values: The options that there are, nested as in a config file.
    """
    found = _REFUSED.match(str(error))
    if found is None or "is not in struct" not in str(error.__cause__):
        return None
    key = found["key"]
    for gone, instead in GONE.items():
        if f"{key}.".startswith(f"{gone}."):
            return f"{key}: no such option in verl 0.9.1: {instead}"
    meant = _close_to(key.split("."), values)
    question = f"; did you mean {meant}?" if meant else "."
    return f"{key}: no such option{question} One that your own code reads is added with a plus: +{key}=VALUE"


def _close_to(names: list[str], values: Mapping[str, Any]) -> str | None:
    """Return the key that is like the given one in the first name that is not there, if one is."""
    for number, name in enumerate(names):
        if name not in values:
            close = get_close_matches(name, list(values), n=1, cutoff=_LIKENESS)
            return ".".join([*names[:number], *close, *names[number + 1 :]]) if close else None
        if not isinstance(values[name], Mapping):
            return None
        values = values[name]
    return None

"""Checks of what is optimised: advantages, weights of sessions, distillation, corrections of old rows."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    corrections,
    refusal,
    uses_tree,
    value_of,
)


def check_estimator(config: DictConfig) -> Findings:
    """Look up the estimator, which verl does only after the first rollout."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_tree.trainer.advantages import ESTIMATORS

    known = [*ESTIMATORS, *sorted(ADV_ESTIMATOR_REGISTRY.keys() - ESTIMATORS.keys())]
    if config.algorithm.adv_estimator not in known:
        remedy = f"choose one of {', '.join(known)}, or register yours in a module of VERL_USE_EXTERNAL_MODULES"
        yield refusal(config, "algorithm.adv_estimator", remedy)
    weight = "algorithm.gigpo.step_advantage_w"
    if config.algorithm.adv_estimator == "gigpo" and not isinstance(value_of(config, weight), int | float):
        yield refusal(config, weight, "give a number; 1.0 is the paper's, and 0.0 makes it tree_grpo")


OVER_SESSIONS = (
    *("tree_grpo", "grpo", "grpo_passk", "grpo_vectorized", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Estimators that compare the sessions of a prompt, and nothing within one."""


def check_group_size(config: DictConfig) -> Findings:
    """Warn of groups of one session, where sessions are compared."""
    key, estimator = f"{ROLLOUT}.n", config.algorithm.adv_estimator
    if value_of(config, key) == 1 and estimator in OVER_SESSIONS:
        message = (
            f"{key}=1: algorithm.adv_estimator={estimator} compares the sessions of a prompt, and there is one; unless "
            "that ends in several leaves with rewards of their own, there is nothing to compare with. Set 8, say"
        )
        yield Finding(message, is_warning=True)


def check_session_weight(config: DictConfig) -> Findings:
    """Find a loss that is not known to be a sum over rows, where rows are to be weighed."""
    if config.tree.session_weight != "session":
        return
    from verl_tree.engine.losses.row_losses import DISTILLATION_LOSSES_OVER_ROWS, POLICY_LOSSES_OVER_ROWS

    losses: dict[str, tuple[str, ...]] = {f"{ACTOR}.policy_loss.loss_mode": POLICY_LOSSES_OVER_ROWS}
    if config.distillation.enabled:
        losses["distillation.distillation_loss.loss_mode"] = DISTILLATION_LOSSES_OVER_ROWS
    reason = "tree.session_weight=session weighs rows, and this loss is not known to be a sum over them"
    for key, known in losses.items():
        if value_of(config, key) not in known:
            remedy = f"choose one of {', '.join(known)}, or set tree.session_weight=leaf"
            yield refusal(config, key, f"{reason}; {remedy}")


def check_rows(config: DictConfig) -> Findings:
    """Find what compares or weighs the leaves of a session where one is left: it would be ignored."""
    if config.tree.rows == "all":
        return
    of_leaves = {
        "algorithm.adv_estimator": (("tree_grpo_intra", "treerl", "treepo"), "tree_grpo"),
        "tree.session_weight": (("session",), "leaf"),
    }
    for key, (ignored, same) in of_leaves.items():
        if value_of(config, key) in ignored:
            remedy = f"with tree.rows={config.tree.rows} a session has one leaf, and this is {same}"
            yield refusal(config, key, f"{remedy}; set it to {same}, or tree.rows=all")


def check_distillation(config: DictConfig) -> Findings:
    """Find a distillation loss that reads more of the student than log-probs, or that verl does not know."""
    if not config.distillation.enabled:
        return
    # It imports `datasets`, which takes half a second.
    from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

    key = "distillation.distillation_loss.loss_mode"
    known = DISTILLATION_SETTINGS_REGISTRY
    estimators = ", ".join(name for name, each in known.items() if each.use_estimator)
    loss = known.get(value_of(config, key))
    if loss is None:
        yield refusal(config, key, f"no such distillation loss; choose one of {estimators}")
    elif not loss.use_estimator and uses_tree(config):
        remedy = "top-k distillation needs the logits of every row, which a tree does not make; choose an estimator"
        yield refusal(config, key, f"{remedy} ({estimators}), or set tree.enabled=false")


def check_correction(config: DictConfig) -> Findings:
    """Find a correction without the rollout's log-probs, and one that no loss would read."""
    asked = corrections(config)
    if asked and not value_of(config, f"{ROLLOUT}.calculate_log_probs"):
        yield refusal(config, f"{ROLLOUT}.calculate_log_probs", f"{CORRECTION}.{asked[0]} needs them; set it to true")
    # With bypass_mode verl 0.9.1 neither weighs nor rejects rows before the update. The loss that does it is set where
    # nobody asked for another one (verl_tree.launch.checks.translation).
    key = f"{ACTOR}.policy_loss.loss_mode"
    if "bypass_mode" in asked and len(asked) > 1 and value_of(config, key) != "bypass_mode":
        remedy = (
            f"verl ignores {CORRECTION}.{asked[0]} with this loss and bypass_mode=true; set bypass_mode here, or "
            f"{CORRECTION}.bypass_mode=false"
        )
        yield refusal(config, key, remedy)


CHECKS: tuple[Check, ...] = (
    check_estimator,
    check_group_size,
    check_session_weight,
    check_rows,
    check_distillation,
    check_correction,
)

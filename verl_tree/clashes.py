"""What does not go with what: every pair once, with its remedy.

A feature is something that a run uses: settings, or what only words say. Settings are written `KEY` (on), `no KEY`
(off), `KEY=A,B` (one of these) or `KEY!=A,B` (another); a key may begin with `actor.`, `rollout.`, `model.`, which is
that of any model in use, or `engine.`, which is the actor's engine config. The rows stand in `clashes.csv` beside this
file; its notes are for who changes them.

`verl_tree.launch.checks.features` finds the features of a configuration, and `verl_tree.engine.fsdp.build` those of an
engine, before it reads weights; either refuses what is here. `scripts/make_clashes.py` makes a table of it in
docs/from_verl.md. The fuzz of combinations (`tests/fuzz/combinations`) draws features: a draw is exact, or here.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from verl_tree.families import VEOMNI_CRITICS, VEOMNI_TYPES

POLICY_LOSSES_OVER_ROWS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "dro")
"""Names in `actor.policy_loss.loss_mode` that are sums of one term per row.

`clip_cov` and `kl_cov` rank the tokens of all rows, `geo_mean` takes the mean of its rows, and `bypass_mode` may
normalise over them.
"""

POLICY_LOSSES_OF_ADVANTAGES = tuple(name for name in POLICY_LOSSES_OVER_ROWS if name != "dro")
"""Those in which a token of advantage 0 has no gradient; dro pulls its log-prob to the old one."""

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names in `distillation.distillation_loss.loss_mode`: estimators of the KL divergence from one sampled token."""

DISTILLATION_LOSSES_OVER_ROWS = (*ESTIMATORS, "forward_kl_topk")
"""The names that are sums of one term per row: all that verl 0.9.1 has."""

Uses = Callable[[str], Sequence[str]]
"""Returns the settings that turn a feature on, such as `tree.sharing=prompt`; none where it is off."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Features that do not go together.

    Attributes:
        feature: The one whose settings a message names, and the remedy changes.
        others: Those that it does not go with where all of them are used.
        why: A clause that reads well behind "with the others, ".
        remedy: What to set.
    """

    feature: str
    others: tuple[str, ...]
    why: str
    remedy: str


TREES, CPU = "tree.enabled", "trainer.device=cpu"
PROMPT, MEAN = "tree.sharing=prompt", "tree.shared_tokens!=sum"
AUTO, SESSION, ROLES = "tree.capacity=auto", "tree.session_weight=session", "tree.role_weight"
TILES, OFFLOAD = "model.tiled_mlp.enabled", "model.enable_activation_offload"
SUM_PI = "actor.calculate_sum_pi_squared"

SFT, IMAGES, RECURRENT, ULYSSES = "fine-tuning", "images", "recurrent layers", "Ulysses"
CRITIC, NO_CLASSIFIER = "a critic", "a type without a token classifier"
TRANSFORMERS = "trees or a CPU"
NO_MLP, NO_CHECKPOINTS = "layers without an MLP", "no gradient checkpointing of it"
CUDA_KERNELS, OTHER_ATTENTION = "a backend for CUDA", "attention other than flash_attention_2"
OTHER_LOSS, TOP_K = "a loss over several rows", "top-k distillation"
TEACHER_HERE = "a teacher on the training ranks"
CORRECTION, REWEIGHED = "a rollout correction", "rollout_is or rollout_rs"
VEOMNI, UNTRIED, ONE_RANK = "model_engine=veomni", "a type not served on VeOmni", "one rank"
NO_VEOMNI_CRITIC = "a critic of a type without a token classifier in VeOmni"
MEGATRON = "model_engine=megatron"
EXPERTS = "engine.expert_parallel_size!=1"
LINEAR, OTHER_HEADS = "linear attention", "linear attention with heads other than of 64 or 128"


def doubled_experts(key: str, *, parallel: int, of_experts: int | None, tensor: int) -> str | None:
    """Return why a mixture is refused on Megatron whose experts several tensor-parallel ranks hold, and the remedy.

    `parallel` is the size of expert parallelism, whose key is `key`, `tensor` that of tensor parallelism, and
    `of_experts` that of experts, which is the same if it is None. Megatron-core 0.16.1 adds up gradients of such
    experts over data-parallel ranks only, those of flat rows, too.
    """
    if parallel != 1 or (of_experts or tensor) == tensor:
        return None
    return f"with {key}=1, ranks that hold the same experts never add up their gradients; set it to null, or raise that"


def divides_by_width(loss: Any) -> bool:
    """Whether verl divides a loss by the width to which it pads the rows of a call; `loss` is the config of a role."""
    return loss.loss_agg_mode == "seq-mean-token-sum-norm" and loss.loss_scale_factor is None


def run_keeps_all_rows(config: Any) -> list[str]:
    """Return the settings of a training run of `keep_all_rows`."""
    return keep_all_rows(config.actor_rollout_ref.actor, config.tree, distils=config.distillation.enabled)


def keep_all_rows(actor: Any, tree: Any, *, distils: bool = False) -> list[str]:
    """Return the settings for which an update computes rows whose advantages are 0, too; see `tree.compute`.

    `actor` and `tree` are verl's config of the actor and our options, as the driver or as a worker has them.
    """
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    # What else has a gradient there, reports a sum over all rows, or counts them.
    found = {
        f"tree.compute={tree.compute}": tree.compute != "live",
        f"tree.shared_tokens={tree.shared_tokens}": tree.shared_tokens != "sum",
        f"actor.policy_loss.loss_mode={mode}": mode not in POLICY_LOSSES_OF_ADVANTAGES,
        f"actor.loss_agg_mode={actor.loss_agg_mode} without loss_scale_factor": divides_by_width(actor),
        "actor.use_kl_loss=True": actor.use_kl_loss,
        f"actor.entropy_coeff={actor.entropy_coeff}": actor.entropy_coeff,
        "actor.calculate_entropy=True": actor.calculate_entropy,
        "distillation.enabled=True": distils,
    }
    return [setting for setting, is_used in found.items() if is_used]


def not_drawn(reason: str) -> str:
    """Return why rows cannot be drawn (`tree.keep_tokens`) where all are to be computed, and the remedy."""
    return f"with {reason}, something else reads the rows that would be left out; set it to null"


def _read() -> Iterator[Clash]:
    """Yield the rows of the file. A remedy may have the names of losses, in braces."""
    names = {
        "policy_losses": ", ".join(POLICY_LOSSES_OVER_ROWS),
        "distillation_losses": ", ".join(DISTILLATION_LOSSES_OVER_ROWS),
        "estimators": ", ".join(ESTIMATORS),
        "veomni_types": ", ".join(VEOMNI_TYPES),
        "veomni_critics": ", ".join(VEOMNI_CRITICS),
    }
    text = files("verl_tree").joinpath("clashes.csv").read_text(encoding="utf-8")
    for feature, others, why, remedy, _ in list(csv.reader(text.splitlines(), strict=True))[1:]:
        yield Clash(feature, tuple(others.split("; ")), why, remedy.format(**names))


CLASHES = tuple(_read())
"""All of them, in the order in which a user should hear of them."""


def refusals(uses: Uses) -> Iterator[str]:
    """Yield a message for each clash of the features in use. A feature is asked for only if those that count are on."""
    for clash in CLASHES:
        others = [uses(name) for name in clash.others]
        if all(others):
            named = " and ".join(each[0] for each in others)
            for setting in uses(clash.feature):
                yield f"{setting}: with {named}, {clash.why}; {clash.remedy}"


def refuse(used: Mapping[str, str | bool]) -> None:
    """Refuse features that do not go together; `used` has the setting of each one in use, and False for others.

    Raises:
        ValueError: The message has a line for each clash, with its remedy.
    """
    settings = {name: [setting] for name, setting in used.items() if isinstance(setting, str)}
    messages = list(refusals(lambda name: settings.get(name, [])))
    if messages:
        raise ValueError("\n".join(messages))

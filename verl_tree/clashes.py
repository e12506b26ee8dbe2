"""What does not go with what: every pair once, with its remedy.

A feature is something that a run uses: settings, or what only words say. Settings are written `KEY` (on), `no KEY`
(off), `KEY=A,B` (one of these) or `KEY!=A,B` (another); a key may begin with `actor.`, `rollout.`, or `model.`, which
is that of any model in use. `verl_tree.launch.checks.features` finds the features of a configuration, and
`verl_tree.engine.fsdp.build` those of an engine, before it reads weights; either refuses what is here.
`scripts/make_clashes.py` makes a table of it in docs/from_verl.md. The fuzz of combinations
(`tests/fuzz/combinations`) draws features: a draw is exact, or here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

POLICY_LOSSES_OVER_ROWS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "dro")
"""Names in `actor.policy_loss.loss_mode` that are sums of one term per row.

`clip_cov` and `kl_cov` rank the tokens of all rows, `geo_mean` takes the mean of its rows, and `bypass_mode` may
normalise over them.
"""

DISTILLATION_LOSSES_OVER_ROWS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names in `distillation.distillation_loss.loss_mode`: estimators of the KL divergence from one sampled token."""

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


FLAT, TREES, CPU, GPU = "no tree.enabled", "tree.enabled", "trainer.device=cpu", "trainer.device!=cpu"
PROMPT, MEAN, AUTO = "tree.sharing=prompt", "tree.shared_tokens!=sum", "tree.capacity=auto"
SESSION, ONE_ROW = "tree.session_weight=session", "tree.rows!=all"
TILES, OFFLOAD, TOWER = "model.tiled_mlp.enabled", "model.enable_activation_offload", "actor.freeze_vision_tower"
REPLAY, RETURNED = "actor.fsdp_config.router_replay.mode", "rollout.enable_rollout_routing_replay"
BYPASS, LOSS = "algorithm.rollout_correction.bypass_mode", "actor.policy_loss.loss_mode"
MODE, SEPARATE = "trainer.v1.trainer_mode", "trainer.v1.trainer_mode=separate_async"
SUM_PI = "actor.calculate_sum_pi_squared"

SFT, IMAGES, RECURRENT, ULYSSES = "fine-tuning", "images", "recurrent layers", "Ulysses"
CRITIC, NO_CLASSIFIER = "a critic", "a type without a token classifier"
TRANSFORMERS = "trees or a CPU"
NO_MLP, NO_CHECKPOINTS = "layers without an MLP", "no gradient checkpointing of it"
CUDA_KERNELS, OTHER_ATTENTION = "a backend for CUDA", "attention other than flash_attention_2"
OTHER_LOSS, TOP_K = "a loss over several rows", "top-k distillation"
CORRECTION, REWEIGHED = "a rollout correction", "rollout_is or rollout_rs"
LINEAR, OTHER_HEADS = "linear attention", "linear attention with heads other than of 64 or 128"
NO_CRITIC = "set critic.enable=false, and an estimator other than gae"
OVER_ROWS = (
    f"choose one of {', '.join(POLICY_LOSSES_OVER_ROWS)}, of distillation one of "
    f"{', '.join(DISTILLATION_LOSSES_OVER_ROWS)}, or set tree.session_weight=leaf"
)
FLASH = "set override_config.attn_implementation=flash_attention_2, and install flash-attn (docs/install.md), or set 1"

CLASHES = (
    Clash(PROMPT, (FLAT,), "no prefix is shared", "set it to full"),
    Clash(PROMPT, (TREES, IMAGES), "the driver does not know which images are in prompts", "set it to full"),
    Clash(PROMPT, (SFT,), "rows have no prompts apart from their responses", "set it to full"),
    Clash(MEAN, (FLAT,), "only the sum is known", "set it to sum"),
    Clash(MEAN, (TREES, PROMPT), "no trained token has several leaves", "set it to sum"),
    Clash(OTHER_LOSS, (SESSION,), "rows are weighed, and this loss is not known to be a sum over them", OVER_ROWS),
    Clash(
        "algorithm.adv_estimator=tree_grpo_intra,treerl,treepo",
        (ONE_ROW,),
        "a session has one leaf, and this is tree_grpo",
        "set it to tree_grpo, or tree.rows=all",
    ),
    Clash(SESSION, (ONE_ROW,), "a session has one leaf, and this is leaf", "set it to leaf, or tree.rows=all"),
    Clash(SESSION, (SFT,), "rows have no sessions to weigh", "set it to leaf"),
    Clash(ONE_ROW, (SFT,), "rows have no sessions to choose from", "set it to all"),
    Clash("tree.save_on_term", (SFT,), "SIGTERM ends the run at once", "set it to false"),
    Clash(
        AUTO,
        (TREES, IMAGES),
        "the memory is measured without images",
        "give a number of tokens, image tokens among them",
    ),
    Clash(
        "tree.memory_gib", (TREES, "tree.capacity!=auto"), "only tree.capacity=auto reads it", "set that, or null here"
    ),
    Clash(
        "no tree.memory_gib",
        (TREES, AUTO, CPU),
        "there is no device whose memory could be asked",
        "give the GiB that one rank may use",
    ),
    Clash(CUDA_KERNELS, (TREES, CPU), "its kernels need CUDA", "set auto, varlen or dense"),
    Clash(ULYSSES, (TREES, IMAGES), "one rank computes a model with images alone", "set 1"),
    Clash(ULYSSES, (TREES, RECURRENT), "one rank computes recurrent layers alone", "set 1"),
    Clash(ULYSSES, (SFT,), "one rank computes a tree", "set it to 1"),
    Clash(ULYSSES, (FLAT, CPU), "heads are exchanged in flash attention, on CUDA", "set 1 or tree.enabled=true"),
    # Any other would attend within a rank's tokens.
    Clash(ULYSSES, (FLAT, GPU, OTHER_ATTENTION), "heads are exchanged in flash_attention_2 only", FLASH),
    Clash(CRITIC, (TREES, IMAGES), "there is no critic that reads images", NO_CRITIC),
    Clash(
        CRITIC,
        (NO_CLASSIFIER, TRANSFORMERS),
        "transformers builds the critic, and has no token classifier for its type",
        f"give a model of another type, or {NO_CRITIC}",
    ),
    Clash(
        "critic.model.lora_rank",
        (FLAT, GPU),
        "verl's own engine cannot build such a critic",
        "set it to 0, or tree.enabled=true",
    ),
    Clash(
        "critic.checkpoint.save_lora_only",
        ("critic.model.lora_rank",),
        "the value head is trained, too, and would be lost",
        "set it to false",
    ),
    Clash(TOWER, (FLAT,), "verl's FSDP engine ignores it", "set tree.enabled=true or false here"),
    Clash(
        TOWER,
        (TREES, "actor_rollout_ref.model.lora_rank"),
        "LoRA freezes the tower itself",
        "keep adapters out of it by actor_rollout_ref.model.exclude_modules, and set false",
    ),
    Clash(TILES, (FLAT,), "verl's FSDP engine ignores it", "set it to false"),
    Clash(TILES, (NO_MLP,), "there is nothing to cut, as experts are not tiled", "set it to false"),
    Clash(OFFLOAD, (FLAT, CPU), "activations are offloaded through CUDA only", "set it to false"),
    Clash(
        OFFLOAD,
        (TREES, NO_CHECKPOINTS),
        "nothing is moved, as what is moved are gradient checkpoints",
        "set enable_gradient_checkpointing=true",
    ),
    Clash("model.use_fused_kernels", (TREES, SFT), "the engine has kernels of its own", "set it to false"),
    Clash(f"{REPLAY}=R2,R3", (FLAT,), "verl's FSDP engine ignores it", "set disabled or tree.enabled=true"),
    Clash(f"{REPLAY}=R3", (CPU,), "vLLM's CPU engine returns no routes", "set R2, which needs none of it"),
    Clash(
        f"{REPLAY}=R2", (BYPASS,), "the pass that records the routes is left out", "set bypass_mode=false, or R3 here"
    ),
    Clash(RETURNED, (f"{REPLAY}!=R3",), "nothing reads the routes of the rollout", "set it to false"),
    Clash(f"no {RETURNED}", (f"{REPLAY}=R3", GPU), "there are no routes to replay", "set it to true"),
    Clash(
        "tree.route_conflicts=fork",
        (f"{REPLAY}=disabled,null",),
        "no routes are replayed",
        "set R2 or R3 there, or first here",
    ),
    Clash(SUM_PI, (TREES,), "a tree does not give it", "set it to false, or tree.enabled=false"),
    Clash(
        TOP_K,
        (TREES,),
        "the logits of every row, which it reads, are not made",
        f"choose an estimator ({', '.join(DISTILLATION_LOSSES_OVER_ROWS)}), or set tree.enabled=false",
    ),
    Clash(
        "no rollout.calculate_log_probs",
        (CORRECTION,),
        "log-probs of the rollout are needed",
        "set it to true",
    ),
    # verl 0.9.1 then neither weighs nor rejects rows before the update. The loss that does it is set where nobody asked
    # for another one (`verl_tree.launch.checks.translation`).
    Clash(
        f"{LOSS}!=bypass_mode",
        (BYPASS, REWEIGHED),
        "verl ignores the latter with this loss",
        f"set bypass_mode here, or {BYPASS}=false",
    ),
    Clash("rollout.name!=vllm", (CPU,), "the rollout is vLLM's CPU engine", "set it to vllm"),
    Clash("rollout.quantization", (CPU,), "vLLM's CPU engine does not take it", "set it to null"),
    Clash("rollout.enable_sleep_mode", (CPU,), "vLLM's CPU engine cannot sleep", "set it to false"),
    Clash("rollout.free_cache_engine", (CPU,), "vLLM's CPU engine cannot sleep", "set it to false"),
    # vLLM's CPU engine (0.31) loads such a model, and fails at the first prompt.
    Clash(
        "rollout.dtype!=bfloat16",
        (CPU, LINEAR),
        "vLLM's CPU engine computes linear attention in bfloat16 only",
        "set it to bfloat16, training stays in float32",
    ),
    Clash(
        OTHER_HEADS,
        (CPU,),
        "vLLM's CPU engine has kernels for heads of 64 and 128",
        "train such a model on GPUs",
    ),
    Clash(
        "no actor_rollout_ref.hybrid_engine",
        (f"{MODE}=sync,colocate_async",),
        "a rollout on other GPUs alone is not known",
        f"set it to true, or {SEPARATE}",
    ),
    Clash(
        "rollout.checkpoint_engine.backend=naive",
        (SEPARATE,),
        "weights go to other GPUs, and it stays on those that train",
        "set nccl or another of verl's",
    ),
    Clash(
        "no reward.reward_model.enable_resource_pool",
        ("reward.reward_model.enable", SEPARATE),
        "training never pauses to make room for a reward model",
        "set it to true",
    ),
)
"""All of them, in the order in which a user should hear of them."""


def refusals(uses: Uses) -> Iterator[str]:
    """Yield a message for each clash of the features in use. A feature is asked for only if those that count are on."""
    for clash in CLASHES:
        others = [uses(name) for name in clash.others]
        if all(others):
            named = " and ".join(each[0] for each in others)
            for setting in uses(clash.feature):
                yield f"{setting}: with {named}, {clash.why}; {clash.remedy}"


def refuse(used: Mapping[str, str]) -> None:
    """Refuse features that do not go together; `used` has the setting of each one in use.

    Raises:
        ValueError: The message has a line for each clash, with its remedy.
    """
    messages = list(refusals(lambda name: [used[name]] if name in used else []))
    if messages:
        raise ValueError("\n".join(messages))

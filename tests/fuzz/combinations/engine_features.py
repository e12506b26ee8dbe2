"""What can be drawn of a training worker on the tree engine; `verl_tree.clashes` says what does not go together."""

from verl_tree import clashes

from .drawing import Clashes, Feature, Settings, Space

MIXTURES = ("qwen3 moe", "gpt-oss", "qwen3_next", "qwen3_5_moe_text")
"""Families whose routers the flat side can be told routes for."""
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "granitemoehybrid")
IMAGES = ("qwen2_5_vl", "qwen3_vl")
MODELS = (*("qwen3",) * 5, "qwen3 tied", "qwen3 moe", *MIXTURES, *RECURRENT[1:], *IMAGES)

POLICY_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "dro")
BYPASS = ("bypass ppo_clip", "bypass reinforce")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def trains_policy(drawn: Settings) -> bool:
    return drawn["loss"] not in ("sft", "critic")


def takes_corrections(drawn: Settings) -> bool:
    return trains_policy(drawn) and drawn["loss"] not in BYPASS and drawn["model"] not in IMAGES


def rows(drawn: Settings) -> tuple[str, ...]:
    if drawn["model"] in IMAGES:
        return ("deep",)
    others = ("idle_rank", "idle_rank") if drawn["ranks"] > drawn["ulysses"] else ()
    # Every value of few tokens may be clipped, which leaves no gradient to compare.
    few = () if drawn["loss"] == "critic" else ("one_token", "single")
    return ("deep", "duplicates", "duplicates", *few, *others)


def relays(drawn: Settings) -> tuple[str, ...]:
    fits = drawn["capacity"] in (None, 60, 4096, "auto")
    return ("auto", "always", "never") if fits else ("auto", "always")


FEATURES = (
    Feature("model", MODELS),
    Feature("ulysses", (1, 2), 0.4, when=lambda drawn: drawn["ranks"] == 2),
    Feature("loss", (*POLICY_LOSSES, *BYPASS, "unknown", "sft", "sft", "critic", "critic"), 0.7),
    Feature("aggregation", AGGREGATIONS, 0.5, when=lambda drawn: drawn["loss"] != "sft"),
    Feature("kl", (None, "low_var_kl", "k1", "abs", "mse", "k3+"), 0.4, when=trains_policy),
    Feature("entropy", (0.0, 0.05), 0.4, when=trains_policy),
    Feature("corrected", (False, True), 0.2, when=takes_corrections),
    Feature("rows", rows, 0.4),
    Feature("temperature", (1.0, 0.7, "per row", "per row"), 0.4, when=lambda drawn: drawn["loss"] != "critic"),
    Feature("capacity", (None, 2, 3, 5, 7, 7, 11, 17, 24, 60, 4096, "auto"), 0.85),
    Feature("relay", relays, 0.5),
    Feature("gate", ("auto", "always", "never"), 0.3),
    Feature("relay_store", ("device", "host"), 0.3),
    Feature("packing", ("auto", "heuristic", "exact"), 0.3),
    Feature("max_loss_terms", (None, 30, 50), 0.2),
    Feature("logits_chunk_size", (1024, 1, 3, 16), 0.3),
    Feature("sharing", ("full", "prompt"), 0.12),
    Feature("shared_tokens", ("sum", "mean", "once"), 0.2),
    Feature("session_weight", ("leaf", "session"), 0.2),
    Feature("backend", ("auto", "dense", "varlen"), 0.4),
    Feature("lora", (False, True), 0.3),
    Feature("checkpointing", (False, True), 0.3),
    Feature("offload", (False, True), 0.4, when=lambda drawn: drawn["checkpointing"]),
    Feature("tiles", (None, 1, 3), 0.15),
    Feature(
        "replay",
        (None, "R2", "R3 first", "R3 fork"),
        0.7,
        when=lambda drawn: drawn["model"] in MIXTURES and trains_policy(drawn),
    ),
    Feature("frozen_tower", (False, True), 0.3, when=lambda drawn: drawn["model"] in IMAGES and not drawn["lora"]),
    Feature("steps", (1, 2), 0.4),
    Feature(
        "planned",
        (False, True),
        0.4,
        when=lambda drawn: drawn["loss"] == "vanilla" and drawn["model"] not in IMAGES and not drawn["replay"],
    ),
)

KINDS: dict[str, tuple[str, ...]] = {
    "ulysses=2": (clashes.ULYSSES,),
    "sharing=prompt": (clashes.PROMPT,),
    "shared_tokens=mean": (clashes.MEAN,),
    "shared_tokens=once": (clashes.MEAN,),
    "session_weight=session": (clashes.SESSION,),
    "capacity=auto": (clashes.AUTO,),
    "tiles=1": (clashes.TILES,),
    "tiles=3": (clashes.TILES,),
    "loss=critic": (clashes.CRITIC,),
    "loss=sft": (clashes.SFT,),
    **{f"loss={name}": (clashes.OTHER_LOSS,) for name in (*BYPASS, "unknown")},
    **{f"model={name}": (clashes.IMAGES,) for name in IMAGES},
    **{f"model={name}": (clashes.RECURRENT, clashes.NO_CLASSIFIER) for name in RECURRENT},
    **{f"model={name}": (clashes.NO_MLP,) for name in ("qwen3 moe", "gpt-oss")},
    "model=qwen3_next": (clashes.RECURRENT, clashes.NO_MLP),
    "model=qwen3_5_moe_text": (clashes.RECURRENT, clashes.NO_CLASSIFIER, clashes.NO_MLP),
}
"""What is drawn, as features of `verl_tree.clashes`."""

ALWAYS = (clashes.TREES, clashes.TRANSFORMERS)
NAMES = {*ALWAYS, *(name for names in KINDS.values() for name in names)}
CLASHES: Clashes = {
    # That a run fine-tunes is known, and refused, at the launch.
    (each.feature, *each.others): "" if clashes.SFT in each.others else each.why
    for each in clashes.CLASHES
    if NAMES.issuperset((each.feature, *each.others))
}

SPACE = Space(FEATURES, KINDS, CLASHES, always=ALWAYS)

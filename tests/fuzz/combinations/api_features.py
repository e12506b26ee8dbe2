"""What can be drawn of the public functions, and what does not go together."""

from .api_models import DROPOUTS, FAMILIES
from .drawing import Clashes, Feature, Settings, Space


def scores_rows(drawn: Settings) -> bool:
    return drawn["call"] == "log_probs"


def takes_gradients(drawn: Settings) -> bool:
    return scores_rows(drawn) and drawn["via"] != "none"


def dropouts(drawn: Settings) -> list[str | None]:
    found: list[str | None] = [None, "lora"] if drawn["lora"] else [None]
    if drawn["family"] in DROPOUTS:
        return [*found, "module" if drawn["family"] == "gpt2" else "functional"]
    return found if drawn["lora"] else [None, "attention", None, None]


FEATURES = (
    Feature("family", tuple(FAMILIES)),
    Feature("call", ("log_probs", "score", "score_batch"), 0.2),
    Feature("read", (None, "labels", "last"), 0.6, when=lambda drawn: not scores_rows(drawn)),
    Feature("rows", ("random", "duplicates", "chain", "long", "single", "roots"), 0.5),
    Feature("ids", ("list", "int32", "tensor"), 0.4),
    Feature("empty", (False, True), 0.02, when=scores_rows),
    Feature("capacity", (None, 2, 3, 4, 6, 9, 14, 22, 40, 4096), 0.8),
    Feature(
        "packing",
        (None, "auto", "heuristic", "exact", "single_path"),
        0.2,
        when=lambda drawn: scores_rows(drawn) and drawn["capacity"] is not None,
    ),
    Feature("temperature", (1.0, 0.7, 1.6, 0.4, 2.5, "tensor"), 0.5),
    Feature("backend", ("auto", "dense", "varlen"), 0.6),
    Feature("via", ("grad", "backward", "twice", "none"), 0.5, when=scores_rows),
    Feature("entropy", (False, True), 0.5, when=scores_rows),
    Feature("loss", ("signed", "sparse", "coupled"), 0.5, when=scores_rows),
    Feature("lora", (None, "all-linear", "attention"), 0.35),
    Feature("frozen", (None, "embeddings", "first layer", "norms"), 0.25, when=lambda drawn: not drawn["lora"]),
    Feature("checkpointing", (None, "reentrant", "non-reentrant"), 0.35, when=takes_gradients),
    Feature("offload", (False, True), 0.4, when=lambda drawn: drawn["checkpointing"] is not None),
    Feature("tiles", (None, 1, 3, 7), 0.2, when=takes_gradients),
    Feature("dropout", dropouts, 0.25, when=takes_gradients),
    Feature(
        "change",
        (None, "trained", "frozen"),
        0.2,
        when=lambda drawn: takes_gradients(drawn) and not drawn["dropout"] and bool(drawn["lora"] or drawn["frozen"]),
    ),
    Feature(
        "training",
        lambda drawn: (True,) if drawn["checkpointing"] or drawn["dropout"] else (False, True),
        0.3,
    ),
)

KINDS = {
    "family=gemma2": ("softcaps",),
    "family=deepseek_v3": ("latent attention",),
}

CLASHES: Clashes = {
    # What a backend says that it does not serve, among the reasons of all backends.
    ("backend=varlen", "softcaps"): "softcap",
    ("backend=varlen", "latent attention"): "value head dim",
    # torch itself: "Checkpointing is not compatible with .grad()".
    ("checkpointing=reentrant", "via=grad"): "",
}

SPACE = Space(FEATURES, KINDS, CLASHES)

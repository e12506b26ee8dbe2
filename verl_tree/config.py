"""The `tree:` options as frozen dataclasses, checked when they are built, and the engine config that carries them.

`TreeConfig` is what every consumer reads; `TreeFSDPEngineConfig` is verl's FSDP engine config with that one
field more, so that the options reach the workers, which see nothing but `actor_rollout_ref` (and `critic`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import FSDPEngineConfig

TREE_STRATEGY = "fsdp_tree"
"""Name under which the tree engine is registered with verl."""

FLAT_STRATEGY = "fsdp2"
"""verl's own engine: what `tree.enabled=false` selects."""

SHARED_TOKENS = ("sum", "mean", "once")
GATES = ("auto", "always", "never")
DRIFT = ("heal", "fork")


def _from_mapping(cls: type, values: Any, *, key: str) -> Any:
    """Builds `cls` from a mapping, naming unknown keys; an instance of `cls` passes through."""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{key}={values!r} is not a mapping of options")
    known = [each.name for each in fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{key} has no option {', '.join(unknown)}; the options are {', '.join(known)}")
    return cls(**values)


def _require_int(value: Any, *, key: str, minimum: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key}={value!r} must be an integer of at least {minimum}; {remedy}")


def _require_seconds(value: Any, *, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{key}={value!r} must be a positive number of seconds")


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """Options of the watchdog (`tree.watchdog`).

    Attributes:
        enabled: Whether a dead or silent process ends the run.
        timeout_s: Seconds without a sign of progress after which the run is ended.
        poll_s: Seconds between two looks at the processes.
        log_tail_lines: Lines of the culprit's log shown with the error.
    """

    enabled: bool = True
    timeout_s: float = 1800.0
    poll_s: float = 2.0
    log_tail_lines: int = 40

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"tree.watchdog.enabled={self.enabled!r} must be true or false")
        _require_seconds(self.timeout_s, key="tree.watchdog.timeout_s")
        _require_seconds(self.poll_s, key="tree.watchdog.poll_s")
        _require_int(self.log_tail_lines, key="tree.watchdog.log_tail_lines", minimum=1, remedy="the default is 40")


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """The `tree:` group of the configuration.

    Attributes:
        enabled: Train on forests (true) or the same rows through verl's own FSDP2 engine (false).
        capacity: Tree tokens of one pack; None takes the role's own `*_max_token_len_per_gpu`.
        packing: Method of `verl_tree.packing.pack`.
        max_loss_terms: Trained tokens of one pack, counted on every leaf; None for no limit.
        max_path_len: Tokens of the longest trajectory; None for no limit of its own.
        gate: Which packs run flat, their trajectories one by one: those that the cost model predicts to be faster
            that way (`auto`), all (`always`) or none (`never`).
        backend: Attention backend of `verl_tree.attention.tree_attention`.
        shared_tokens: What a token shared by several trajectories receives: `sum` of the leaves' gradients
            (the flat objective), their `mean` over the leaves that train it, or that of the first leaf (`once`).
        logits_chunk_size: Positions projected to the vocabulary at a time.
        drift: What happens to a prompt that reads like recorded model text but has other tokens: the recorded tokens
            are sent instead (`heal`), or it is sent as it is and makes a leaf of its own (`fork`).
        drift_max_tokens: Most tokens that one place healed this way may have.
        dump_dir: Folder to which every step writes its trees (`verl_tree.records`); None writes none.
        show_every: Fewest steps between two validations that show pages of a few trees; 0 shows none.
        watchdog: See `WatchdogConfig`.
    """

    enabled: bool = True
    capacity: int | None = None
    packing: str = "auto"
    max_loss_terms: int | None = None
    max_path_len: int | None = None
    gate: str = "auto"
    backend: str = "auto"
    shared_tokens: str = "sum"
    logits_chunk_size: int = 1024
    drift: str = "heal"
    drift_max_tokens: int = 64
    dump_dir: str | None = None
    show_every: int = 50
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "watchdog", _from_mapping(WatchdogConfig, self.watchdog, key="tree.watchdog"))
        if not isinstance(self.enabled, bool):
            raise ValueError(f"tree.enabled={self.enabled!r} must be true or false")
        if self.capacity is not None:
            remedy = "leave it null to take each role's own *_max_token_len_per_gpu"
            _require_int(self.capacity, key="tree.capacity", minimum=2, remedy=remedy)
        for name in ("max_loss_terms", "max_path_len"):
            if getattr(self, name) is not None:
                _require_int(getattr(self, name), key=f"tree.{name}", minimum=2, remedy="null sets no limit")
        if self.gate not in GATES:
            raise ValueError(
                f"tree.gate={self.gate!r} is unknown; choose one of {', '.join(GATES)} ('auto' runs a pack flat where "
                "that is predicted to be faster)"
            )
        for name in ("packing", "backend"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"tree.{name}={value!r} must be a name; 'auto' lets the program choose")
        if self.shared_tokens not in SHARED_TOKENS:
            raise ValueError(
                f"tree.shared_tokens={self.shared_tokens!r} is unknown; choose one of {', '.join(SHARED_TOKENS)} "
                "('sum' is the flat objective)"
            )
        _require_int(self.logits_chunk_size, key="tree.logits_chunk_size", minimum=1, remedy="the default is 1024")
        if self.dump_dir is not None and (not isinstance(self.dump_dir, str) or not self.dump_dir):
            raise ValueError(f"tree.dump_dir={self.dump_dir!r} must be a folder; null stores no trees")
        _require_int(self.show_every, key="tree.show_every", minimum=0, remedy="0 shows no trees, the default is 50")
        if self.drift not in DRIFT:
            raise ValueError(
                f"tree.drift={self.drift!r} is unknown; choose one of {', '.join(DRIFT)} ('heal' sends the tokens that "
                "the model sampled, 'fork' the prompt as it is)"
            )
        remedy = "to heal nothing set tree.drift=fork"
        _require_int(self.drift_max_tokens, key="tree.drift_max_tokens", minimum=1, remedy=remedy)

    @classmethod
    def from_mapping(cls, values: "Mapping[str, Any] | TreeConfig") -> "TreeConfig":
        """Builds the options from a mapping such as the `tree` node of a composed configuration.

        Args:
            values: Option names and values; missing ones take their defaults. A `TreeConfig` passes through.

        Returns:
            The checked options.

        Raises:
            ValueError: An unknown option, or a value outside its domain; the message names key and remedy.
        """
        return _from_mapping(cls, values, key="tree")


@dataclass
class TreeFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP engine config (`verl.workers.config.FSDPEngineConfig`, 0.9.1) with the tree options.

    Selected by `fsdp_config._target_`; used for both `tree.enabled` values, so a strategy of either engine is
    accepted. Not frozen or slotted because its verl base is neither.

    Attributes:
        tree: The tree options; a mapping is turned into a `TreeConfig`.
    """

    tree: TreeConfig = field(default_factory=TreeConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", TreeConfig.from_mapping(self.tree))
        # verl's own check knows its strategies only; ours runs on FSDP2, so that is what is checked.
        strategy = self.strategy
        if strategy == TREE_STRATEGY:
            object.__setattr__(self, "strategy", FLAT_STRATEGY)
        super().__post_init__()
        object.__setattr__(self, "strategy", strategy)

"""The `tree:` options as dataclasses that check their values; without verl, whose import takes seconds.

`configs/tree/default.yaml` and docs/options.md say what each option means.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollout_hooks.capture.roles import is_role
from verl_tree.configs import FLAT_STRATEGY as FLAT_STRATEGY
from verl_tree.configs import TREE_STRATEGY as TREE_STRATEGY


def teaches_on_ranks(distillation: Mapping[str, Any]) -> bool:
    """Whether the ranks of training compute the teacher of `distillation`, which has no machines of its own."""
    return bool(distillation["enabled"]) and not distillation["nnodes"]


LONGEST_WAIT_S = 1e9
"""Python's threads can wait up to 9e9 seconds, and fail where asked for more (`threading.TIMEOUT_MAX`)."""


def _option(default: Any, must_be: str, holds: Callable[[Any], bool]) -> Any:
    """Declare an option that takes the values for which `holds` is true, and None if that is its default."""
    return field(default=default, metadata={"must_be": must_be, "holds": holds})


def _flag(default: bool) -> Any:
    return _option(default, "true or false", lambda value: isinstance(value, bool))


def _integer(default: int | None, *, minimum: int, remedy: str) -> Any:
    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

    return _option(default, f"an integer of at least {minimum}; {remedy}", holds)


def _positive(default: float | None, *, unit: str, most: float = math.inf) -> Any:
    def holds(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and 0 < value < math.inf and value <= most

    bound = "" if most == math.inf else f", at most {most:g}"
    return _option(default, f"a positive and finite number of {unit}{bound}", holds)


def _tolerance(default: float) -> Any:
    """Declare the option `log_prob_tolerance`: a positive number or None, which is not its default."""
    positive = _positive(default, unit="nats; null compares nothing")
    return _option(default, positive.metadata["must_be"], lambda each: each is None or positive.metadata["holds"](each))


def _capacity() -> Any:
    """Declare the option `capacity`: an integer, a word or None."""

    def holds(value: Any) -> bool:
        return value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 2)

    remedy = "'auto' takes what fits into the memory, null each role's own *_max_token_len_per_gpu"
    return _option(None, f"an integer of at least 2, 'auto' or null; {remedy}", holds)


def _weights() -> Any:
    """Declare the option `role_weight`: numbers by role, or None."""

    def is_weight(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

    def holds(value: Any) -> bool:
        return isinstance(value, Mapping) and all(is_role(name) and is_weight(value[name]) for name in value)

    return _option(
        None, "finite numbers of at least 0 by role, as {planner: 0.5} with the space; null weighs no roles", holds
    )


def _text(default: str | None, must_be: str) -> Any:
    return _option(default, must_be, lambda value: isinstance(value, str) and value != "")


def _choice(*names: str, remedy: str) -> Any:
    """Declare an option that takes one of the names; the first is its default."""
    return _option(names[0], f"one of {', '.join(names)}; {remedy}", lambda value: value in names)


def _problems(options: Any, *, group: str) -> list[str]:
    """Return a line for each option that does not take its value."""
    lines = []
    for each in fields(options):
        value = getattr(options, each.name)
        is_default_none = value is None and each.default is None
        if "holds" in each.metadata and not is_default_none and not each.metadata["holds"](value):
            lines.append(f"{group}.{each.name}={value!r} must be {each.metadata['must_be']}")
    return lines


def _require_none(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))


def _from_mapping(cls: type, values: Any, *, group: str) -> Any:
    """Build `cls` from a mapping and refuse unknown keys; an instance of `cls` passes through."""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{group}={values!r} is not a mapping of options")
    known = [each.name for each in fields(cls)]
    remedy = f"no such option; remove it, or give one of {', '.join(known)}"
    problems = [f"{group}.{name}={values[name]!r}: {remedy}" for name in sorted(set(values) - set(known))]
    built = None
    try:
        built = cls(**{name: values[name] for name in known if name in values})
    except ValueError as error:
        problems.append(str(error))
    _require_none(problems)
    return built


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    """The options of the watchdog, `tree.watchdog`."""

    enabled: bool = _flag(True)
    timeout_s: float = _positive(1800.0, unit="seconds", most=LONGEST_WAIT_S)
    poll_s: float = _positive(2.0, unit="seconds", most=LONGEST_WAIT_S)
    log_tail_lines: int = _integer(40, minimum=1, remedy="the default is 40")

    def __post_init__(self) -> None:
        _require_none(_problems(self, group="tree.watchdog"))


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """The options of the group `tree`.

    The names that `backend` and `shared_tokens` take are in `verl_tree.attention.BACKENDS` and
    `verl_tree.functional.expansion.SHARED_TOKEN_MODES`.
    """

    enabled: bool = _flag(True)
    capacity: int | Literal["auto"] | None = _capacity()
    memory_gib: float | None = _positive(None, unit="GiB; null takes the free memory of a CUDA device")
    relay: str = _choice("auto", "always", "never", remedy="'auto' relays a tree where that should be faster")
    relay_store: str = _choice("device", "host", remedy="'host' saves memory of a GPU")
    packing: str = _choice(
        "auto", "heuristic", "exact", remedy="set it to auto (benchmarks/packing.py compares others)"
    )
    max_loss_terms: int | None = _integer(None, minimum=2, remedy="null sets no limit")
    max_path_len: int | None = _integer(None, minimum=2, remedy="null sets no limit")
    gate: str = _choice("auto", "always", "never", remedy="'auto' runs a pack flat where that should be faster")
    backend: str = _text("auto", "a name; 'auto' lets the program choose")
    shared_tokens: str = _text("sum", "a name; 'sum' is the flat objective")
    sharing: str = _choice("full", "prompt", remedy="'prompt' shares no token of a response, as an ablation")
    route_conflicts: str = _choice("first", "fork", remedy="'fork' computes each row under its own experts")
    compute: str = _choice("live", "all", remedy="'live' leaves rows out of an update that teach nothing")
    keep_tokens: float | None = _positive(None, unit="parts of the tokens; null keeps all", most=1.0)
    rows: str = _choice("all", "longest", remedy="'longest' trains one row of each session")
    session_weight: str = _choice("leaf", "session", remedy="'leaf' is verl's objective, every row the same weight")
    role_weight: Mapping[str, float] | None = _weights()
    logits_chunk_size: int = _integer(1024, minimum=1, remedy="the default is 1024")
    drift: str = _choice("heal", "fork", remedy="'heal' sends the tokens that the model sampled, 'fork' the prompt's")
    drift_max_tokens: int = _integer(64, minimum=1, remedy="to heal nothing set tree.drift=fork")
    abandoned: str = _choice("drop", "keep", remedy="'drop' trains no answer that the agent did not read to its end")
    dump_dir: str | None = _text(None, "a folder; null stores no trees")
    show_every: int = _integer(50, minimum=0, remedy="0 shows no trees, the default is 50")
    log_prob_tolerance: float | None = _tolerance(0.5)
    canary: int = _integer(1, minimum=0, remedy="0 compares no row with the model's own forward")
    canary_gradient_every: int = _integer(100, minimum=0, remedy="0 compares no gradient")
    console: str = _choice("steps", "all", remedy="'all' shows every line of every process")
    save_on_term: bool = _flag(False)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        problems = _problems(self, group="tree")
        try:
            watchdog = _from_mapping(WatchdogConfig, self.watchdog, group="tree.watchdog")
            object.__setattr__(self, "watchdog", watchdog)
        except ValueError as error:
            problems.append(str(error))
        _require_none(problems)
        if self.role_weight is not None:
            object.__setattr__(self, "role_weight", {name: float(self.role_weight[name]) for name in self.role_weight})

    @classmethod
    def from_mapping(cls, values: "Mapping[str, Any] | TreeConfig") -> "TreeConfig":
        """Build the options from a mapping of names and values; missing ones take their defaults.

        Raises:
            ValueError: An option is unknown or does not take its value; the message has the remedy.
        """
        return _from_mapping(cls, values, group="tree")

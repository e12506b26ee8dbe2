"""Which lines of a training run's output are for people; the others stand in the run's log only (`console`).

Ray prints what its processes write with their names in front: `(WorkerDict pid=12) text`. A line without a name is the
driver's. What decides, in this order:

- Known noise is hidden: what verl, vLLM and Ray print in every good run.
- A line of a log has a level. Errors are shown, warnings too, but those of vLLM and of C++ libraries. All else is
  hidden, but where a checkpoint is read or written (`_TOLD`).
- Warnings of Python are hidden if a library gives them.
- What reads like an error is shown, and whatever the process says behind it.
- Other lines are shown but those of processes that run no code of agents, rewards or data (`QUIET`), and but the
  configuration that verl prints in the task runner.

An indented line goes with the line before it. To hide a cause is worse than noise, so a process that is not known may
talk, and a library's new message is shown until it is listed here.
"""

import re
from dataclasses import dataclass, field

DRIVER, TASK_RUNNER = "", "TreeTaskRunner"
TRAINING = "training"
"""What begins when the start is over."""
GENERATING = "generating: "
"""How the line begins that says again and again which sessions are open."""
QUIET = frozenset(
    {
        "?",  # a worker that is still importing
        "WorkerDict",
        "CheckpointEngineWorker",
        "vLLMHttpServer",
        "SGLangHttpServer",
        "TRTLLMHttpServer",
        "GlobalRequestLoadBalancer",
        "SimpleStorageUnit",
        "TransferQueueController",
    }
)
"""Ray's names for the processes of verl, TransferQueue and the engines that generate."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"\((?:(?P<name>[^()]+) )?pid=\d+(?:, ip=[^)]+)?\) ?")

_NOISE = re.compile(
    r"--- last \d+ lines of std"
    r"|ray init kwargs: |Error executing job with overrides: |Set the environment variable HYDRA_FULL_ERROR"
    r"|.*Token authentication is enabled|Using blocking ray\.get inside async actor"
    r"|step:\d+ - |.*\d+%\||.*\[00:00, | *warnings\.warn\(| +self\.use_critic = "
    r"|.*engine is not available: |.*Disabled critic as |.*Platform override from "
    r"|Using dataset class: |(?:filter )?dataset len: |colocated worker base class |LLMServerManager: "
    r"|Creating file logger at |\[RolloutTqSkip|\[transformers\] "
    r"|.*Triton is (?:not )?installed|.*Failed to import the DeepSelect extension"
    r"|.*requires torchvision \(not installed\); falling back"
    r"|.*IPC is not supported on your devices|.*agent loop only support torch and npu profiler"
    r"|Checkpoint tracker file does not exist: |Found checkpoint: %s "
    r"|.*No model-specific Continuous Token builder is registered"
    r"|ERROR:\d{4}-\S+ [\d:,]+:Failed to (?:decode|parse) (?:[\w.-]+ )?tool call: "
    r"|wandb: (?!.*(?:View (?:run|project) |wandb sync|[Ee]rror|ERROR))"
)
"""Lines of good runs, and the ends of logs in a report, from their beginning, without Ray's name of the process.

A model that is not trained yet writes hundreds of tool calls that cannot be read, for verl an error each. It warns in
each session of a model type that it has no rules for.
"""

_CONFIGURATION = re.compile(r"[\[\](){}'\",:]|(?:[\d.e+-]+|True|False|None)?[\])},]*$")
"""What `pprint` prints. Ray cuts it into lines where a process happens to be when Ray reads."""

_VLLM = r"(?:\(\w[\w-]* pid=\d+\) )?"
_LEVELS = (
    (re.compile(r"(INFO|DEBUG|WARNING|ERROR|CRITICAL):\d{4}-"), True),  # verl, and with it our modules
    (re.compile(r"\[\d{4}-[\d :,-]+\]\[[\w.]+\]\[([A-Z]+)\]"), True),  # the driver's, as Hydra sets it up
    (re.compile(r"\d{4}-[\d :,-]+\t([A-Z]+) "), True),  # Ray
    (re.compile(r"\d{4}-[\d :,-]+ - ([A-Z]+) - "), True),  # TransferQueue
    (re.compile(rf"{_VLLM}([A-Z]+) \d\d-\d\d [\d:]+ \["), False),  # vLLM
    (re.compile(r"\[\d{4}-[\d :,-]+ ([IWEF]) \d+ \d+\]"), False),  # C++ of Ray
    (re.compile(r"(?:\[rank\d+\]:)?\[?([IWEF])\d{4} [\d:.]+ "), False),  # C++ of torch
)
"""Beginnings of a log's lines with their level, and whether its warnings are shown."""

_INFO = re.compile(r"^INFO:\d{4}-[^:]+:\d\d:[\d,]+:")
_TOLD = re.compile(rf"{_INFO.pattern}(?:Resuming from |Saving checkpoint to )")
_PYTHON_WARNING = re.compile(r"(?P<path>\S+\.py):\d+: \w*Warning: ")
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|^<frozen ")
_ERROR = re.compile(
    r"Traceback \(most recent call last\)|\w*(?:Error|Exception)\b|Fatal |fatal |.*\b(?:[Ee]rror|ERROR)\b: "
    r"|.*out of memory|.*Out of memory|\*\*\* SIG|Segmentation fault|.*\bkilled\b"
)


def without_colours(line: str) -> str:
    """Return a line without the codes of a terminal's colours."""
    return _COLOUR.sub("", line)


def split_process(line: str) -> tuple[str, str]:
    """Return Ray's name of the process that wrote a line (`DRIVER`: this one), and what it wrote."""
    found = _PROCESS.match(line)
    return (found["name"] or "?", line[found.end() :]) if found else (DRIVER, line)


def for_people(line: str) -> str:
    """Return a shown line without what says nothing: the task runner's name, and the head of what is no warning."""
    process, text = split_process(line)
    return _INFO.sub("", text if process == TASK_RUNNER else line, count=1)


@dataclass(frozen=True, slots=True)
class Milestone:
    """A line that says how far the start is.

    Attributes:
        process: Ray's name of the process that writes it; others may quote it.
        pattern: The line, without the name of its process; its group, if it has one, is told as well.
        done: What has been done then.
        doing: What begins.
    """

    process: str
    pattern: re.Pattern[str]
    done: str
    doing: str


MILESTONES = (
    Milestone(
        DRIVER,
        re.compile(r"\d{4}-.*\tINFO .*(?:Started a local Ray instance|Connected to Ray cluster)\.(?:.* at (\S+))?"),
        "Ray started",
        "starting the trainer, reading the data",
    ),
    Milestone(TASK_RUNNER, re.compile(rf"{_INFO.pattern}Total training steps: "), "data read", "loading the models"),
    Milestone(
        TASK_RUNNER,
        re.compile(rf"{_INFO.pattern}reward loop manager initialized"),
        "models loaded",
        "starting the rollout engine",
    ),
    Milestone(
        TASK_RUNNER,
        re.compile(rf"{_INFO.pattern}all initialize finished, ready to fit"),
        "rollout engine started",
        "starting the agent loops",
    ),
    Milestone(TASK_RUNNER, re.compile(r"agent loops started$"), "agent loops started", TRAINING),
)
"""The start as the lines of Ray, verl's trainer and our task runner tell it."""


def find_milestone(line: str) -> tuple[str, str] | None:
    """Return what has been done and what begins, if a line says so."""
    process, text = split_process(line)
    for each in MILESTONES:
        if process == each.process and (found := each.pattern.match(text)):
            told = next(filter(None, found.groups()), None)
            return each.done + (f", dashboard at {told}" if told else ""), each.doing
    return None


@dataclass(slots=True)
class LineFilter:
    """The decisions about the lines of one stream, which come in their order and without colours."""

    _is_shown: dict[str, bool] = field(default_factory=dict)  # by process: the decision about its last line
    _failed: set[str] = field(default_factory=set)  # processes whose last known line was an error

    def shows(self, line: str) -> bool:
        """Return whether a line is for people."""
        process, text = split_process(line)
        if not text.strip():
            return process in self._failed
        if not text[0].isspace() or _NOISE.match(text):
            self._is_shown[process] = self._decide(process, text)
        return self._is_shown.get(process, process not in QUIET)

    def _decide(self, process: str, text: str) -> bool:
        level = next(((found[1][0], shown) for each, shown in _LEVELS if (found := each.match(text))), None)
        is_noise = _NOISE.match(text) is not None
        is_error = not is_noise and (level[0] in "EFC" if level else _ERROR.match(text) is not None)
        warning = _PYTHON_WARNING.match(text)
        if is_error and warning is None:
            self._failed.add(process)
            return True
        if is_noise or level is not None:
            self._failed.discard(process)
            return not is_noise and (level == ("W", True) or _TOLD.match(text) is not None)
        if warning is not None:
            return _LIBRARIES.search(warning["path"]) is None
        if process in self._failed:
            return True
        return process not in QUIET and not (process == TASK_RUNNER and _CONFIGURATION.match(text))

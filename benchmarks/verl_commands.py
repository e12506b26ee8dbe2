"""What becomes of the launch commands of verl's own examples, and of others.

    git clone --branch v0.9.0 https://github.com/volcengine/verl
    python benchmarks/verl_commands.py verl --out verl_commands.jsonl
    python benchmarks/verl_commands.py verl_commands.jsonl
    git clone https://github.com/verl-project/verl-recipe
    python benchmarks/verl_commands.py verl-recipe --folder . --out verl_recipes.jsonl

Of a checkout, each script below `examples/`, or another folder, runs with bash in a copy. There `python` and `torchrun`
write down their arguments, some tools that only print text are themselves, and every other program does nothing:
nothing is trained, downloaded or installed. Then each command of the PPO trainer is composed, translated and checked as
`python -m verl_tree.check profile=gpu` does, except that data, code and models may be missing. The tables are those of
docs/from_verl.md.
"""

import contextlib
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import markdown_table, new_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

PPO_MODULE = "verl.trainer.main_ppo"
HARMLESS = ("basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "sed", "seq", "tail", "tr", "wc")
"""Programs that scripts make settings with."""

OTHER_ENGINE = re.compile(r"(?:^|[.+])(mindspeed|mlite)\.|=(mindspeed|torchtitan)$|(mlite)_(?:trainer|actor)")
"""An argument by which a command asks for an engine without trees."""

RECORDER = """#!{python}
import json, os, sys
words = sys.argv[1:]
if words[:1] == ["-c"]:  # a question, such as whether a package is there
    os.execv({python!r}, [{python!r}, *words])
with open({record!r}, "a") as file:
    file.write(json.dumps(words) + chr(10))
"""

Finding = str
"""A line of the check, `key=value: what becomes of it`."""


KINDS = ("as it is", "translated", "refused", "another engine")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a script would run: the module that python is to run, and its arguments."""

    script: str
    module: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a command.

    Attributes:
        script: The script below the folder.
        module: What python runs.
        engine: The engine that it asks for, if that has no trees.
        translated, refused: The lines of the check; none for another trainer than PPO's.
    """

    script: str
    module: str
    engine: str | None = None
    translated: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.refused:
            return "refused" if self.engine is None else "another engine"
        return "translated" if self.translated else "as it is"

    @property
    def folder(self) -> str:
        """The first folder of the script."""
        return self.script.split("/")[0]


def record(checkout: Path, *, folder: str = "examples", timeout_s: float = 60.0) -> Iterator[Command]:
    """Run the scripts in a folder of a checkout without their programs; yield the modules that they would run."""
    with tempfile.TemporaryDirectory() as name:
        copy, programs, recorded = Path(name) / "verl", Path(name) / "bin", Path(name) / "recorded.jsonl"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        environment = _environment_without_programs(programs, recorded=recorded)
        for script in sorted((copy / folder).rglob("*.sh")):
            recorded.write_text("")
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["bash", str(script)],
                    cwd=copy,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                )
            for line in recorded.read_text().splitlines():
                yield from _module_of(line.replace(str(copy), "verl"), script=str(script.relative_to(copy / folder)))


def _environment_without_programs(programs: Path, *, recorded: Path) -> dict[str, str]:
    """Fill a folder with the only programs that a script finds; return the variables that it sees."""
    programs.mkdir()
    recorder = programs / "python"
    recorder.write_text(RECORDER.format(python=sys.executable, record=str(recorded)))
    recorder.chmod(0o755)
    for program in ("python3", "torchrun", "ray"):
        (programs / program).symlink_to(recorder)
    for program in HARMLESS:
        (programs / program).symlink_to(str(shutil.which(program)))
    (programs / "bash").symlink_to(str(shutil.which("bash")))
    start = programs / "start.sh"
    start.write_text("command_not_found_handle() { return 0; }\n")
    return {"PATH": str(programs), "BASH_ENV": str(start), "HOME": "/home/me", "USER": "me"}


def _module_of(line: str, *, script: str) -> Iterator[Command]:
    words = json.loads(line)
    for number, word in enumerate(words[:-1]):
        if word == "-m" and words[number + 1].startswith("verl"):
            yield Command(script, words[number + 1], tuple(words[number + 2 :]))


def judge(command: Command) -> Outcome:
    """Compose, translate and check a command as for a machine with GPUs."""
    if command.module != PPO_MODULE:
        return Outcome(command.script, command.module)
    translated: list[str] = []
    try:
        translated, refused = _findings(("profile=gpu", *command.arguments))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        causes = [str(each).strip().splitlines()[0] for each in (error, error.__cause__) if each is not None]
        refused = [": ".join(causes)]
    return Outcome(command.script, command.module, _other_engine(command), tuple(translated), tuple(refused))


def _other_engine(command: Command) -> str | None:
    """Return the engine without trees that the arguments name."""
    found = [name for each in command.arguments for names in OTHER_ENGINE.findall(each) for name in names if name]
    return next((name for name in ("mlite", "mindspeed", "torchtitan") if name in found), None)


def _findings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is translated and what is refused."""
    from verl_tree.launch.checks.translation import translate
    from verl_tree.launch.command.composition import compose_config
    from verl_tree.launch.command.resolution import resolve

    config = compose_config(arguments)
    resolve(config)
    with contextlib.redirect_stdout(io.StringIO()):
        translated = translate(config)
    return translated, list(dict.fromkeys(_refused(config)))


def _refused(config: DictConfig) -> Iterator[str]:
    from verl_tree.launch.checks import CHECKS, code, find_by_verl, inputs, objects, prompts, settings, values

    # Data, models and code of the examples are not here, nor is a GPU.
    left_out = {*inputs.CHECKS, *prompts.CHECKS, *code.CHECKS, *objects.CHECKS, settings.check_device}
    wrong = list(values.find_wrong_values(config))
    found = wrong or [each for check in CHECKS if check not in left_out for each in check(config)]
    refused = [each.message for each in found if not each.is_warning]
    # verl's check of a critic reads its model.
    yield from refused or (each.message for each in find_by_verl(config) if "HFModelConfig" not in each.message)


def read(path: Path) -> list[Outcome]:
    """Read what `record` wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Outcome(each["script"], each["module"], each["engine"], tuple(each["translated"]), tuple(each["refused"]))
        for each in lines
    ]


def table_of_folders(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Return a row for each folder with commands of the PPO trainer: how many, and what becomes of them."""
    ppo = [each for each in outcomes if each.module == PPO_MODULE]
    names = sorted({each.folder for each in ppo})
    parts = {name: [each for each in ppo if each.folder == name] for name in names} | {"all": ppo}
    return [
        {"examples": name, "commands": str(len(part)), **_counts(part), "refused for": _reasons(part)}
        for name, part in parts.items()
    ]


def _counts(part: Sequence[Outcome]) -> dict[str, str]:
    counts = Counter(each.kind for each in part)
    return {name: str(counts[name]) for name in KINDS}


def _reasons(part: Sequence[Outcome]) -> str:
    """Return the first keys for which commands for engines with trees are refused, the most frequent first."""
    reasons = Counter(key for each in part if each.kind == "refused" for key in keys_of(each.refused[:1]))
    return ", ".join(f"`{key}` {number}" for key, number in reasons.most_common())


def table_of_keys(outcomes: Iterable[Outcome], which: str) -> list[dict[str, str]]:
    """Return a row for each key that is "translated" or "refused": in how many commands of that kind, or of engines."""
    kinds = (which, "another engine") if which == "refused" else (which,)
    counts = Counter(key for each in outcomes if each.kind in kinds for key in keys_of(getattr(each, which)))
    return [{which: f"`{key}`", "commands": str(number)} for key, number in counts.most_common()]


def keys_of(findings: Iterable[str]) -> list[str]:
    """Return the keys that lines of the check are about, each once; of other errors what stands in quotes, or all."""
    names = [finding.split(": ")[0] for finding in findings]
    found = [re.findall(r"([\w.]+)=", name) or re.findall(r"'([\w.]+)'", name) or [name] for name in names]
    return list(dict.fromkeys(key for keys in found for key in keys))


def main() -> None:
    """Check the commands of a checkout, or read what was found, and print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument("source", type=Path, help="a checkout of verl, or a file that --out has written")
    parser.add_argument("--folder", default="examples", help="of the checkout, with the scripts")
    options = parser.parse_args()
    if options.source.is_dir():
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        outcomes = [judge(command) for command in record(options.source, folder=options.folder)]
    else:
        outcomes = read(options.source)
    if options.out:
        options.out.write_text("".join(json.dumps(asdict(each)) + "\n" for each in outcomes))
    for rows in (table_of_folders(outcomes), *(table_of_keys(outcomes, each) for each in ("translated", "refused"))):
        if rows:
            print(markdown_table(rows), end="\n\n")


if __name__ == "__main__":
    main()

"""The driver's streams during a training run: what goes to the terminal, to the log, and when."""

import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from verl_tree.launch.run import console as console_module
from verl_tree.launch.run.console import Console
from verl_tree.launch.run.lines import TRAINING

NOISE = "(WorkerDict pid=1) Qwen3ForCausalLM contains 64.77K parameters"
STEP = "step 1/3: reward 0.50 (leaves), 0.60 (sessions)"


@contextmanager
def streams_on(terminal: io.StringIO) -> Iterator[None]:
    """Let both streams end on one terminal, as `2>&1` does."""
    with redirect_stdout(terminal), redirect_stderr(terminal):
        yield


def test_people_see_their_lines_and_the_log_has_all(tmp_path: Path) -> None:
    terminal = io.StringIO()
    path = tmp_path / "logs" / "run.log"
    with streams_on(terminal), Console() as console:
        print("before the log")
        console.is_brief = True
        print(NOISE)
        console.record(path)
        print(f"\x1b[36m(TreeTaskRunner pid=1)\x1b[0m {STEP}")
        print(NOISE, file=sys.stderr)
        print("a line", "in ", sep=" ", end="")
        print("parts")
        print("unfinished", end="")
    told = f"log: {path}; the lines below are for people (tree.console=all shows all)"
    assert terminal.getvalue().splitlines() == [
        "before the log",
        told,
        STEP,
        "a line in parts",
        "unfinished",
        f"log: {path}",
    ]
    logged = ["before the log", NOISE, told, f"(TreeTaskRunner pid=1) {STEP}", NOISE, "a line in parts", "unfinished"]
    assert path.read_text().splitlines() == logged


def test_all_is_shown_if_asked_for(tmp_path: Path) -> None:
    terminal = io.StringIO()
    coloured = f"\x1b[36m{NOISE}\x1b[0m"
    with streams_on(terminal), Console() as console:
        console.record(tmp_path / "run.log")
        print(coloured)
        print("50%", end="\r")
    path = tmp_path / "run.log"
    assert terminal.getvalue() == f"log: {path}\n{coloured}\n50%\r\nlog: {path}\n"
    assert path.read_text() == f"log: {path}\n{NOISE}\n50%\n"


def test_the_start_is_told_with_seconds(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "run.log")
        console.reached("configuration checked", doing="starting Ray")
        print("(TreeTaskRunner pid=1) INFO:2026-11-22 13:29:19,938:Total training steps: 10")
    lines = [line for line in terminal.getvalue().splitlines() if line.startswith("start ")]
    assert [line.split(" s: ")[1].split(" (")[0] for line in lines] == ["configuration checked", "data read"]
    assert [line.split("; ")[1] for line in lines] == ["starting Ray", "loading the models"]
    seconds = [float(line.removeprefix("start").split()[0]) for line in lines]
    assert 0 <= seconds[0] <= seconds[1] < 60


def test_what_ends_the_run_is_last_on_the_terminal_and_in_the_log(tmp_path: Path) -> None:
    terminal = io.StringIO()
    path = tmp_path / "run.log"

    def run() -> None:
        with streams_on(terminal), Console() as console:
            console.is_brief = True
            console.record(path)
            sys.exit("The training run has ended: KeyError\n  and its second line")

    with pytest.raises(SystemExit):
        run()
    assert terminal.getvalue().splitlines()[-1] == f"log: {path}", "the interpreter prints the message of an exit"
    assert path.read_text().splitlines()[-2:] == ["The training run has ended: KeyError", "  and its second line"]


def test_a_start_that_takes_long_says_what_it_is_doing_until_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "STILL_S", 0.05)
    terminal = io.StringIO()
    told = r"start +\d+\.\d s: still starting Ray \(0 s\)"
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "run.log")
        console.reached("configuration checked", doing="starting Ray")
        deadline = time.monotonic() + 60
        while len(re.findall(told, terminal.getvalue())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        console.reached("agent loops started", doing=TRAINING)
        shown = terminal.getvalue()
        time.sleep(0.2)
    assert len(re.findall(told, shown)) >= 2
    assert terminal.getvalue().removeprefix(shown) == f"log: {tmp_path}/run.log\n", "it is silent behind the start"


class Terminal(io.StringIO):
    """A terminal that people look at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_is_told_every_minute_is_one_line_on_a_terminal(
    tmp_path: Path, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, and in the log, it is a line each time."""
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal() if is_watched else io.StringIO()
    told = [f"generating: 8 open sessions, the oldest for {seconds} s" for seconds in (60, 120)]
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "run.log")
        for line in told:
            print(line)
        print(STEP, file=sys.stderr)
        print(told[0])
    clear = "\r\x1b[K"
    in_place = f"{told[0][:29]}{clear}{told[1][:29]}{clear}{STEP}\n{told[0][:29]}{clear}"
    lines = "".join(f"{line}\n" for line in (*told, STEP, told[0]))
    shown = terminal.getvalue().split("\n", 1)[1].rsplit(f"log: {tmp_path}", 1)[0]
    assert shown == (in_place if is_watched else lines)
    assert (tmp_path / "run.log").read_text().splitlines()[1:] == [*told, STEP, told[0]]


def test_lines_of_two_threads_do_not_mix(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "run.log")
        print("of one ", end="")
        other = threading.Thread(target=print, args=("of another",))
        other.start()
        other.join()
        print("thread")
    assert terminal.getvalue().splitlines()[1:3] == ["of another", "of one thread"]


def test_a_log_that_cannot_be_written_is_missed_and_all_is_shown(tmp_path: Path) -> None:
    terminal = io.StringIO()
    (tmp_path / "file").write_text("")
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "file" / "run.log")
        print(NOISE)
    lines = terminal.getvalue().splitlines()
    assert "run.log: not written" in lines[0]
    assert "trainer.default_local_dir" in lines[0]
    assert lines[1:] == [NOISE]


def test_a_disk_that_fills_up_is_said_once_and_nothing_is_lost() -> None:
    terminal = io.StringIO()
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        # Every write to it fails as on a full disk.
        console.record(Path("/dev/full"))
        print(NOISE)
        print(NOISE)
    lines = terminal.getvalue().splitlines()
    assert "/dev/full: not written ([Errno 28] No space left on device)" in lines[0]
    assert lines.count(NOISE) == 2
    assert sum("not written" in line for line in lines) == 1


def test_a_stream_that_outlives_the_console_still_prints(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with streams_on(terminal), Console() as console:
        console.is_brief = True
        console.record(tmp_path / "run.log")
        kept = sys.stderr
    kept.write(f"{NOISE}\n")
    assert terminal.getvalue().endswith(f"{NOISE}\n")


WATCHED = """
import io, json, runpy, sys

HEAVY = {"torch", "verl", "ray", "vllm", "transformers"}

class Terminal(io.StringIO):
    first = at_wrong = None

    def write(self, text):
        if self.first is None:
            self.first = (text, sorted((HEAVY | {"hydra", "omegaconf"}) & set(sys.modules)))
        if self.at_wrong is None and "tree.drift='heel' must be one of" in text:
            self.at_wrong = sorted(HEAVY & set(sys.modules))
        return super().write(text)

terminal, stdout = Terminal(), sys.stdout
sys.stdout = sys.stderr = terminal
sys.argv = ["main_ppo", "profile=auto", "tree.drift=heel", "data.train_files=/no/such.parquet"]
try:
    runpy.run_module("verl_tree.main_ppo", run_name="__main__")
except SystemExit as end:
    refusal = end.code
print(json.dumps([*terminal.first, terminal.at_wrong, refusal]), file=stdout, flush=True)
"""


def test_the_first_line_and_a_wrong_value_come_before_heavy_imports_and_all_refusals_together(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{WATCHED}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, at_first, at_wrong, refusal = json.loads(done.stdout)
    assert first == "verl_tree 0.1.0: composing the configuration"
    assert at_first == []
    assert refusal.startswith("Refused; nothing was started.\n  tree.drift='heel' must be one of heal, fork")
    assert at_wrong == []
    assert "data.train_files=/no/such.parquet: no such file" in refusal

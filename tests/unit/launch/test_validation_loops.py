"""What an entry of the file of agent loops names is checked before Ray starts, by reading the user's files."""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from input_cases import refusal, resolved
from omegaconf import DictConfig

from rollout_hooks.loops.places import POLICIES
from verl_tree.launch.checks.arguments import arguments_of
from verl_tree.launch.checks.code import check_agent_loops
from verl_tree.launch.checks.loop_entries import READ_REWARDS
from verl_tree.launch.checks.refusals import Finding
from verl_tree.launch.checks.source import find_target

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
BLACKBOX = "rollout_hooks.loops.blackbox.BlackboxAgentLoop"

MODULE = """\
import os
from functools import partial

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.experimental.agent_loop import AgentLoopBase as Base
from rollout_hooks.loops.base import BranchingAgentLoop
from rollout_hooks.loops.blackbox import BlackboxAgentLoop
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop

ONLY_IN_RAY = os.environ["ONLY_IN_RAY"]


class ThreePlans(BranchingAgentLoop):
    def __init__(self, *args, num_plans=3, plan_len: int = 64, **kwargs):
        super().__init__(*args, **kwargs)


class Longer(ThreePlans):
    pass


class Silent(Base):
    def __init__(self, *args, patience=1, **kwargs):
        super().__init__(*args, **kwargs)


class Greedy(Base):
    def __init__(self, *args, **kwargs):
        self.wish = kwargs.pop("wish", None)
        super().__init__(*args, **kwargs)


class Keeper(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.options = dict(**kwargs)


class Closed(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor):
        super().__init__(trainer_config, server_manager, tokenizer, processor, None, None)


@partial
class Changed(ThreePlans):
    pass


class OwnAgent(BlackboxAgentLoop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, agent="agents:solve", **kwargs)


class Judged(TreeSearchAgentLoop):
    async def leaf_reward(self, *, row, answer):
        return None


class Scored(Judged):
    async def leaf_reward(self, *, row, answer):
        if not answer:
            return None
        return 1.0


async def solve(*, base_url, api_key, model, row):
    return 1.0


def not_async(*, base_url, api_key, model, row):
    return 1.0


class Solvers:
    @staticmethod
    async def first(**_):
        return 1.0


made = partial(solve)


def load(device="cpu", *, size=3):
    return None
"""


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of agent loops; the module beside it cannot be imported here."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planners.py").write_text(MODULE)
    (tmp_path / "given.py").write_text("from planners import *\n")
    (tmp_path / "passed_on.py").write_text("from planners import ThreePlans as Plans\nfrom planners import solve\n")
    return tmp_path / "loops.yaml"


@functools.cache
def config_of(loops: Path) -> DictConfig:
    return resolved(f"{LOOPS}={loops}")


def findings(loops: Path, *entry: str) -> list[Finding]:
    """Return what is found in an entry of these lines."""
    loops.write_text("- name: mine\n" + "".join(f"  {line}\n" for line in entry))
    return list(check_agent_loops(config_of(loops)))


def refused(loops: Path, *entry: str) -> list[str]:
    """Return why an entry of these lines is refused."""
    found = findings(loops, *entry)
    assert not any(each.is_warning for each in found)
    return [each.message for each in found]


def accept(loops: Path, *entry: str) -> None:
    assert findings(loops, *entry) == []


def test_a_misspelt_option_is_refused_with_those_that_exist(loops: Path) -> None:
    options = "It takes: call_timeout_s, max_snapshots, num_plans, plan_len"
    for target in ("planners.ThreePlans", "planners.Longer", "passed_on.Plans"):
        accept(loops, f"_target_: {target}", "num_plans: 4", "call_timeout_s: 3", "_convert_: all")
        (line,) = refused(loops, f"_target_: {target}", "num_planz: 3")
        name = "Longer" if "Longer" in target else "ThreePlans"
        lack = f"num_planz=3 of the loop mine: {name} has no such option; did you mean num_plans? {options}"
        assert line == f"{LOOPS}={loops}: {lack}"
    (line,) = refused(loops, "_target_: planners.ThreePlans", "wisdom: 9")
    assert line.endswith(f"wisdom=9 of the loop mine: ThreePlans has no such option. {options}")


@pytest.mark.parametrize("target", ["planners.Greedy", "planners.Keeper", "planners.Changed", "given.ThreePlans"])
def test_what_the_text_does_not_tell_counts_as_right(loops: Path, target: str) -> None:
    """Options out of `**kwargs`, a class that a decorator made, one behind an `import *`."""
    accept(loops, f"_target_: {target}", "wish: 3")


def test_an_option_that_verl_drops_is_warned_of(loops: Path) -> None:
    (found,) = findings(loops, "_target_: planners.Silent", "patiense: 3")
    lack = "Silent has no such option, and verl drops it; did you mean patience? It takes: patience"
    assert found == Finding(f"{LOOPS}={loops}: patiense=3 of the loop mine: {lack}", is_warning=True)


def test_a_loop_that_does_not_take_what_verl_gives_is_refused(loops: Path) -> None:
    (line,) = refused(loops, "_target_: planners.Closed")
    missing = "data_config, dataset_cls, hf_model_type, name, tools"
    assert line.endswith(f"Closed.__init__ does not take {missing}, which verl gives to every loop; add **kwargs")


def test_a_class_that_its_module_does_not_have_is_refused(loops: Path) -> None:
    (line,) = refused(loops, "_target_: planners.ThreePlan")
    assert line.endswith(f"of the loop mine: {loops.parent}/planners.py has no ThreePlan; did you mean ThreePlans?")


def test_a_module_that_cannot_be_imported_is_refused_with_its_line(loops: Path) -> None:
    (loops.parent / "typo.py").write_text("class Loop:\n    def run(self:\n        pass\n")
    (line,) = refused(loops, "_target_: typo.Loop")
    assert f"{loops.parent}/typo.py:2: not valid Python" in line
    (loops.parent / "lacking.py").write_text(
        "try:\n    import not_needed_here\nexcept ImportError:\n    pass\nimport opnai\n\n\nclass Loop:\n    pass\n"
    )
    (line,) = refused(loops, "_target_: lacking.Loop")
    assert line.endswith(f"{loops.parent}/lacking.py:5: no module named opnai; install or correct it")


def test_the_agent_of_a_gateway_loop_must_be_an_async_function(loops: Path) -> None:
    for agent in ("planners:solve", "planners.solve", "planners:Solvers.first", "planners:made", "passed_on:solve"):
        accept(loops, f"_target_: {BLACKBOX}", f"agent: {agent}")
    accept(loops, "_target_: planners.OwnAgent")
    wrong = {
        "planners:solv": f"{loops.parent}/planners.py has no solv; did you mean solve?",
        "plannerz:solve": "no module named plannerz; correct it, or add its folder to PYTHONPATH",
        "planners:not_async": "not an async function; name an async function as package.module:function",
        "planners:ThreePlans": "not an async function; name an async function as package.module:function",
        "3": "name an async function as package.module:function",
    }
    for agent, problem in wrong.items():
        (line,) = refused(loops, f"_target_: {BLACKBOX}", f"agent: {agent}")
        assert line == f"{LOOPS}={loops}: agent={agent} of the loop mine: {problem}"
    (line,) = refused(loops, f"_target_: {BLACKBOX}", "timeout_s: 3")
    assert line.endswith("agent=None of the loop mine: name an async function as package.module:function")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_search_that_rewards_later_cannot_choose_by_rewards(loops: Path, policy: str) -> None:
    reads = "outcomes(" in inspect.getsource(POLICIES[policy])
    assert reads == (policy in READ_REWARDS)
    accept(loops, "_target_: planners.Scored", f"select: {policy}")
    found = refused(loops, "_target_: planners.Judged", f"select: {policy}")
    assert len(found) == reads
    assert all(
        f"select={policy} of the loop mine: reads the rewards of leaves during the search" in each for each in found
    )


def test_hooks_inside_options_are_checked(loops: Path) -> None:
    memory = "_target_: rollout_hooks.loops.memory.MemoryAgentLoop"
    accept(loops, memory, "embed: {_target_: planners.load, device: cuda}")
    wrong = {
        "planners.lod": f"{loops.parent}/planners.py has no lod; did you mean load?",
        "plannerz.load": "no module named plannerz; correct it, or add its folder to PYTHONPATH",
        "planners.load, devise: cuda": "it takes no devise; did you mean device?",
    }
    for hook, problem in wrong.items():
        (line,) = refused(loops, memory, f"embed: {{_target_: {hook}}}")
        assert line.endswith(f"in the loop mine: {problem}")


def test_all_findings_of_all_entries_come_at_once(loops: Path) -> None:
    loops.write_text(
        "- {name: a, _target_: planners.ThreePlans, num_planz: 3, plan_length: 4}\n"
        f"- {{name: b, _target_: {BLACKBOX}, agent: 'planners:solv', timeout: 3}}\n"
        "- {name: c, _target_: planners.Nobody}\n"
    )
    lines = refusal(f"{LOOPS}={loops}").splitlines()
    assert [line.split(" of the loop ")[1][0] for line in lines] == ["a", "a", "b", "b", "c"]


def test_every_built_in_loop_is_understood() -> None:
    """Else a misspelt option of it would pass."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    from rollout_hooks.loops import register_built_in

    register_built_in()
    targets = {entry["_target_"] for entry in _agent_loop_registry.values()}
    of_ours = [target for target in targets if target.startswith("rollout_hooks.")]
    assert len(of_ours) >= 6
    for target in of_ours:
        found = find_target(target)
        taken = None if found is None else arguments_of(found)
        assert taken is not None, target
        assert taken.refuses_others, target


def test_every_loop_that_a_worker_knows_is_known_here_without_vllm(tmp_path: Path) -> None:
    """The workers of verl's own manager know only verl's loops.

    The workers need vLLM; imported by the driver it costs seconds, and memory for the whole training run.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    importlib.import_module("rollout_hooks.worker")  # registers its loops
    ours = {name for name, entry in _agent_loop_registry.items() if entry["_target_"].startswith("rollout_hooks.")}
    assert len(ours) >= 6
    (tmp_path / "loops.yaml").write_text("- name: mine\n  _target_: rollout_hooks.capture.async_llm.AsyncLLM\n")
    program = (
        "import json, sys, verl_tree.cpu.platform; from input_cases import resolved\n"
        "from verl_tree.launch.checks import validate\n"
        "from verl_tree.launch.checks.code import _registered_loops\n"
        f"of_verl = _registered_loops(resolved('{AGENT}.agent_loop_manager_class=null'))\n"
        f"validate(resolved('{AGENT}.default_agent_loop=parallel_tools', '{LOOPS}={tmp_path}/loops.yaml'))\n"
        "assert not {'vllm', 'rollout_hooks.worker'} & set(sys.modules)\n"
        "print(json.dumps([list(of_verl), list(_registered_loops(resolved()))]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    of_verl, of_ours = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert "single_turn_agent" in of_verl & of_ours
    assert (ours & of_verl, ours & of_ours) == (set(), ours)

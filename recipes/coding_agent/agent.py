"""One session: mini-swe-agent as it is, on a module in a throw-away folder. This is what the loop `blackbox` runs.

`scripts/setup.sh --extra coding_agent` installs the package, and what it needs, into a folder beside the others.
"""

import asyncio
import atexit
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipes.coding_agent.bugs import TASK, Bug, is_repaired, make_bug

PACKAGES = Path(sys.prefix) / "coding_agent"
MAX_TURNS = 6
PROGRAMS = ("cat", "grep", "head", "ls", "sed", "sh")
"""All that a command finds beside python: a model that learns tries `sudo rm -rf` and `pip`, too."""
TEMPLATES = {
    "system_template": (
        "You repair programs with bash commands. Write a THOUGHT, then one command between ```mswea_bash_command and "
        "```. When the work is done, give the command echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT."
    ),
    "instance_template": "{{task}}",
}
"""mini-swe-agent's own are 1,200 tokens long, most of a tiny model's context."""
_THREADS = ThreadPoolExecutor(max_workers=256, thread_name_prefix="coding_agent")  # the agent blocks


async def run(*, base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, Any]:
    """Let the agent repair the module of ``extra_info.seed``; the reward is 1 or 0."""
    bug = make_bug(seed=row["extra_info"]["seed"])
    policy = {"model_name": f"openai/{model}", "model_kwargs": {"api_base": base_url, "api_key": api_key}}
    return {"reward": await asyncio.get_running_loop().run_in_executor(_THREADS, _session, bug, policy)}


@cache
def command_variables() -> dict[str, str]:
    """Return the environment variables of commands."""
    folder = Path(tempfile.mkdtemp(prefix="coding_agent_programs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name, path=os.defpath) or name)
    (folder / "python").symlink_to(Path(sys.executable).resolve())
    # A module that is changed within a second would be read from its cache.
    return {"PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def solve(model: Any, folder: Path) -> list[dict[str, Any]]:
    """Let the agent work in a folder with one of its models; return its messages."""
    find_package()
    from litellm.exceptions import ContextWindowExceededError
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment

    environment = LocalEnvironment(cwd=str(folder), env=command_variables(), timeout=20)
    agent = DefaultAgent(model, environment, step_limit=MAX_TURNS, cost_limit=0, **TEMPLATES)
    with suppress(ContextWindowExceededError):  # the session ends, as with the last turn
        agent.run(TASK)
    return agent.messages


def find_package() -> None:
    """Make mini-swe-agent importable.

    Raises:
        ValueError: It is not installed.
    """
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    # Else litellm asks the network for prices when it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    if find_spec("minisweagent") is None:
        raise ValueError(f"{PACKAGES}: mini-swe-agent is not there; run scripts/setup.sh --extra coding_agent")


def _session(bug: Bug, policy: dict[str, Any]) -> float:
    find_package()
    import litellm
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    litellm.suppress_debug_info = True  # else it prints that it knows no price of the policy
    model = LitellmTextbasedModel(cost_tracking="ignore_errors", **policy)
    with tempfile.TemporaryDirectory(prefix="coding_agent-") as name:
        folder = Path(name)
        bug.write(folder)
        solve(model, folder)
        return float(is_repaired(folder, bug.check, environment=os.environ | command_variables()))

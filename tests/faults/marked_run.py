"""`verl_tree.main_ppo` with trainers that mark their phases: `python -m marked_run OVERRIDES`.

The classes are in a module of their own, because Ray copies what `__main__` defines instead of importing it.
"""

from marked_phases import MarkingTaskRunner

from verl_tree import main_ppo
from verl_tree.trainer import task_runner

if __name__ == "__main__":
    # `main_ppo.train` looks the class up when it is called.
    task_runner.TreeTaskRunner = MarkingTaskRunner
    main_ppo.main()

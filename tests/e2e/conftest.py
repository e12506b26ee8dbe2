"""What the files of whole runs share."""

import os

from verl_tree.launch.environment import RAY_METRICS_VARIABLE

# For the clusters that a test starts itself; a run's own has it from the entry point.
os.environ.setdefault(RAY_METRICS_VARIABLE, "0")

"""Names the module of the CPU platform to verl, as a training run does: verl chooses its platform for good when used.

verl imports the module when it is imported itself, so tests without verl wait for nothing.
"""

import os

os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

"""Python imports this module before all others in a process whose `PYTHONPATH` has this folder: those of whole runs.

Importing verl makes a million objects. With Python's own threshold, looking through them for garbage again and again
takes a fifth of that time. `tests/conftest.py` sets the same for the tests themselves.
"""

import gc

gc.set_threshold(20_000)

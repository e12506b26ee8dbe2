"""verl_tree: branching agent rollouts trained as token trees, every shared prefix computed once.

Its folders, and which may import which, are on one page: docs/architecture.md.
"""

__version__ = "0.1.0"

"""Registers the CPU platform first: verl chooses its platform for good when its trainers are imported."""

from importlib.util import find_spec

if find_spec("verl") is not None:
    import verl_tree.cpu.platform  # noqa: F401

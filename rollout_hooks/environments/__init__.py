"""Environments that fork: what a session acts on, so that every branch has the one that its tokens tell of.

`base`    the protocol of three methods; `CopiedEnvironment`, for objects that can be copied, such as a game
`folder`  a folder of files
`process` a process that holds an object
"""

from rollout_hooks.environments.base import CopiedEnvironment, Environment
from rollout_hooks.environments.folder import FolderEnvironment
from rollout_hooks.environments.process import ProcessEnvironment

__all__ = ["CopiedEnvironment", "Environment", "FolderEnvironment", "ProcessEnvironment"]

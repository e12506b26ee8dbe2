"""Environments that fork: what a session acts on, so that every branch has the one that its tokens tell of.

`base`      the protocol of three methods, and what its adapters share
`folder`    a folder of files
`process`   a process that holds an object
`leftovers` where folders lie, and how those of a process that died are found

`CopiedEnvironment` is for objects that can be copied, such as a game. An adapter of yours needs no base class.
"""

from rollout_hooks.environments.base import AdaptedEnvironment, CopiedEnvironment, Environment
from rollout_hooks.environments.folder import FolderEnvironment
from rollout_hooks.environments.process import ProcessEnvironment

__all__ = ["AdaptedEnvironment", "CopiedEnvironment", "Environment", "FolderEnvironment", "ProcessEnvironment"]

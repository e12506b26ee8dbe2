"""What is kept of a tree that the canary found wrong: a file of stored trees, with the finding beside the row."""

import platform
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.functional.rounding import Difference
from verl_tree.records import FOUND, StoredLeaf, StoredTree, write_trees


def write_report(
    engine: ModelCalls,
    micro: TreeMicroBatch,
    *,
    found: Mapping[int, Mapping[str, Any]],
    difference: Difference,
) -> Path:
    """Write the tree of some rows, what was found of each, by its leaf, and how it was computed; return the file."""
    config = engine.tree_config
    common = {
        "units": difference.units,
        "unit": difference.unit,
        "scores": engine.head.names[0],
        "engine": type(engine).__name__,
        "backend": config.backend,
        "capacity": max(section.end - section.start for section in micro.cut.sections),
        "dtype": str(engine.compute_dtype).removeprefix("torch."),
        "model": engine.model_config.path,
        "weights of this rank": weights_hash(engine.model),
        "machine": f"{platform.node()}, {platform.machine()}, {_device_name()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "verl", "verl-tree")},
    }
    layout = micro.layout
    leaves = [
        _stored(
            number,
            layout.token_ids_T[path].numpy(),
            micro.wanted_T[path].numpy(),
            found={**common, **found[number]} if number in found else None,
        )
        for number, path in enumerate(map(layout.path, range(layout.num_leaves)))
    ]
    name = f"canary_{time.strftime('%Y%m%d_%H%M%S')}_rank_{dist.get_rank()}.parquet"
    path = Path(config.dump_dir or tempfile.gettempdir()).absolute() / name
    write_trees(path, [StoredTree(0, FOUND, tuple(leaves))])
    return path


def _stored(number: int, token_ids: np.ndarray, wanted: np.ndarray, *, found: dict[str, Any] | None) -> StoredLeaf:
    """Store one row; its prompt ends where its first score is read."""
    return StoredLeaf(
        session=number,
        leaf=0,
        token_ids=token_ids,
        prompt_len=int(wanted.argmax()) if wanted.any() else len(wanted),
        is_trained=wanted,
        log_probs=np.full(len(wanted), np.nan),
        reward_extra_info=None if found is None else {FOUND: found},
    )


def weights_hash(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters of a model, of this rank's parts where they are sharded."""
    digest = sha256()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(name.encode() + local.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

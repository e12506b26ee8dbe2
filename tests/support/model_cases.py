"""Logits of models as a tree and as flat sequences."""

import numpy as np
import torch
from tree_cases import layout_of

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME


def flat_logits(model, sequences):
    model.set_attn_implementation("eager")
    return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in sequences]


def tree_logits(model, sequences, *, backend):
    layout = layout_of(sequences)
    model.set_attn_implementation(ATTENTION_NAME)
    logits_TV = model(
        input_ids=layout.token_ids_T[None],
        position_ids=layout.position_T[None],
        attention_mask=None,
        use_cache=False,
        tree_plan=AttentionPlan.from_layout(layout, backend=backend),
    ).logits[0]
    by_leaf = logits_TV[layout.tree_index_F].split(np.diff(layout.leaf_offsets).tolist())
    return [by_leaf[layout.leaves.tolist().index(sequence)] for sequence in range(len(sequences))]


def loss_of(logits):
    """Return a signed sum over everything, different for every (sequence, position, token)."""
    generator = torch.Generator().manual_seed(1)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in logits)

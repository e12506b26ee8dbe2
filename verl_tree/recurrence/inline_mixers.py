"""Mixers that compute their convolution or recurrence inline, on trees: what their forward is, for one forest.

Projections, norms and parameters are those of the mixer, so adapters and FSDP2 serve them as ever.

Legend: T tokens of a pack, E model dim, D channels of the convolution, G groups of J heads, N state dim, P head dim.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from verl_tree.recurrence.causal_conv import ConvSeams, tree_causal_conv
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.ssd import tree_ssd
from verl_tree.tree.plan import AttentionPlan, States


def short_conv(mixer: Any, hidden_TE: Tensor, *, plan: AttentionPlan, inputs: States | None = None) -> Tensor:
    """Compute LFM2's gated short convolution, (T, E) (`Lfm2ShortConv` of transformers 5.10).

    `inputs` are the convolution's that cross calls.
    """
    b_ET, c_ET, x_ET = mixer.in_proj(hidden_TE).T.chunk(3)
    return mixer.out_proj((c_ET * _convolve(mixer.conv, b_ET * x_ET, plan=plan, inputs=inputs)).T)


def mamba2(
    mixer: Any,
    hidden_TE: Tensor,
    *,
    plan: AttentionPlan,
    chunks: TreeChunks,
    inputs: States | None = None,
    states: States | None = None,
) -> Tensor:
    """Compute Granite's Mamba-2, (T, E) (`GraniteMoeHybridMambaLayer` of transformers 5.10).

    `inputs` and `states` are the convolution's inputs and the states that cross calls.
    """
    num_groups, state_dim = mixer.n_groups, mixer.ssm_state_size
    gate, x_b_c, dt_TH = mixer.in_proj(hidden_TE).split(
        [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1
    )
    x_b_c = mixer.act(_convolve(mixer.conv1d, x_b_c.T, plan=plan, inputs=inputs).T)
    x, b, c = x_b_c.split([mixer.intermediate_size, num_groups * state_dim, num_groups * state_dim], dim=-1)
    x_TGJP = x.unflatten(-1, (num_groups, -1, mixer.head_dim)).float()
    dt_TH = F.softplus(dt_TH + mixer.dt_bias).clamp(*mixer.time_step_limit)
    dt_TGJ, g_TGJ = (each.unflatten(-1, (num_groups, -1)) for each in (dt_TH, -mixer.A_log.float().exp() * dt_TH))
    b_TGN, c_TGN = (each.unflatten(-1, (num_groups, state_dim)) for each in (b, c))
    y_TGJP = tree_ssd(c_TGN, b_TGN, x_TGJP * dt_TGJ.unsqueeze(-1), g_TGJ=g_TGJ, chunks=chunks, states=states)
    y_TGJP = y_TGJP + mixer.D.unflatten(0, (num_groups, -1)).unsqueeze(-1) * x_TGJP
    return mixer.out_proj(mixer.norm(y_TGJP.flatten(1), gate).to(hidden_TE.dtype))


def _convolve(conv: Any, x_DT: Tensor, *, plan: AttentionPlan, inputs: States | None) -> Tensor:
    seams = ConvSeams.of_plan(plan, width=conv.weight.shape[-1])
    return tree_causal_conv(x_DT, conv.weight.squeeze(1), conv.bias, seams=seams, states=inputs)

"""What a group of rows with one prompt costs: by formula, and counted while it runs.

Prefix Grouper (https://arxiv.org/abs/2506.05433, section 3.1, equations 15 to 21) compares position-wise work and
attention of both ways: with long prompts the cost of sharing falls to 1 / G of that of repeating. Here are the numbers
of tokens, of visible (query, key) pairs and of positions projected to the vocabulary; `por_models.model_flops` makes
floating-point operations of them. A query at position p sees p + 1 keys, which is the causal half::

    tokens      repeated  G (Lp + Lr)                      shared  Lp + G Lr
    pairs       repeated  G (Lp + Lr) (Lp + Lr + 1) / 2    shared  Lp (Lp + 1) / 2 + G (Lr Lp + Lr (Lr + 1) / 2)
    projected   repeated  G Lr                             shared  1 + G (Lr - 1)

So what is saved is G - 1 times the prompt alone, and G - 1 projections of its last position.

A count without the causal half (`square`), as torch has it of its kernels, is G (Lp + Lr)^2 repeated and
Lp^2 + G Lr (Lp + Lr) shared. It saves more than there is: half of the pairs of Lp and Lr that it counts for a repeated
row are not visible, and sharing leaves out that half, too.

Legend: G rows of a group, Lp tokens of the prompt, Lr of a response; b batch, h heads, q queries, k keys, d head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from por_models import Counts
from torch.utils.flop_counter import FlopCounterMode


def repeated(num_rows: int, *, prompt_len: int, response_len: int, square: bool = False) -> Counts:
    """Count a group whose prompt runs with every response; the tokens of the responses are scored."""
    row_len = prompt_len + response_len
    return Counts(
        num_tokens=num_rows * row_len,
        num_pairs=num_rows * (row_len**2 if square else _triangle(row_len)),
        num_projected=num_rows * response_len,
    )


def shared(num_rows: int, *, prompt_len: int, response_len: int, square: bool = False) -> Counts:
    """Count a group whose prompt runs once; the first tokens of all responses are scored by one position."""
    in_prompt, in_response = (length**2 if square else _triangle(length) for length in (prompt_len, response_len))
    return Counts(
        num_tokens=prompt_len + num_rows * response_len,
        num_pairs=in_prompt + num_rows * (response_len * prompt_len + in_response),
        num_projected=1 + num_rows * (response_len - 1),
    )


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def count_flops(run: Callable[[], Any]) -> int:
    """Run, and return the floating-point operations of all matrix products, those of attention kernels included.

    torch's counter has no formula for its CPU kernel of attention. Here it is two products forward and four backward,
    over half of the pairs where the kernel is causal. That the backward pass makes the scores once more does not count.
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        run()
    return counter.get_total_flops()


def _forward_flops(
    query: torch.Size, key: torch.Size, _value: torch.Size, _dropout: float = 0.0, causal: bool = False, **_unread: Any
) -> int:
    return 4 * query[-1] * _num_pairs(query, key, causal=causal)


def _backward_flops(
    _grad_out: torch.Size,
    query: torch.Size,
    key: torch.Size,
    _value: torch.Size,
    _out: torch.Size,
    _lse: torch.Size,
    _dropout: float,
    causal: bool,
    **_unread: Any,
) -> int:
    return 8 * query[-1] * _num_pairs(query, key, causal=causal)


def _num_pairs(query_bhqd: torch.Size, key_bhkd: torch.Size, *, causal: bool) -> int:
    num_batches, num_heads, num_queries, _ = query_bhqd
    pairs = _triangle(num_queries) if causal else num_queries * key_bhkd[2]
    return num_batches * num_heads * pairs


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}

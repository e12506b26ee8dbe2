"""`tree_search` that branches at lines: the steps of a written reasoning.

    question ── Ben: 3 + 4 = 7 ──┬── Cleo: 7 - 2 = 5 ── #### 5
                                 └── Cleo: 7 + 2 = 9 ── #### 9         the second line, sampled anew

The places that are expanded are the beginnings of the lines that the model was least certain of.

Legend: N tokens of one call.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase
from typing_extensions import override
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.loops.tree_search import TreeSearchAgentLoop


def line_starts(token_ids: Sequence[int], *, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the positions at which a line begins, 0 first. An empty line begins nowhere."""
    texts = tokenizer.batch_decode([[token_id] for token_id in token_ids])
    behind = [at for at, (before, text) in enumerate(pairwise(texts), start=1) if "\n" in before and text.strip()]
    return [0, *behind]


class LineSearch(TreeSearchAgentLoop):
    """`tree_search` with `select: entropy`, whose places are beginnings of lines.

    Where a tree has fewer lines than places are wanted, its first tokens follow.
    """

    @override
    def uncertainty(self, output: TokenOutput) -> np.ndarray:
        """Return, where a line begins, the mean -log-prob of its tokens, and -inf at all other tokens: (N,) nats."""
        tokens_N = super().uncertainty(output)
        starts = line_starts(output.token_ids, tokenizer=self.tokenizer)
        lines_N = np.full(len(tokens_N), -np.inf)
        for start, end in pairwise([*starts, len(tokens_N)]):
            lines_N[start] = tokens_N[start:end].mean()
        return lines_N

"""The example of docs/dpo.md as printed, against DPO row by row in float64."""

import math
from pathlib import Path

import torch
from tiny_models import tiny_model
from tree_cases import flat_scores, gradients, relative_error

from verl_tree.tree import TokenForest

PAGE = Path(__file__).parents[3] / "docs" / "dpo.md"
# Two prompts that begin alike. Of the first one three answers are ranked, so each is in two pairs, and two begin alike.
PROMPTS = [[7, 3, 9, 4], [7, 3, 2]]
RANKED = [[8, 8, 2, 0], [8, 5, 0], [6, 0]]
PAIRS = [
    (PROMPTS[0], RANKED[0], RANKED[1]),
    (PROMPTS[0], RANKED[0], RANKED[2]),
    (PROMPTS[0], RANKED[1], RANKED[2]),
    (PROMPTS[1], [1, 0], [4, 4, 4, 4, 0]),
]


def flat_loss(model, reference, *, beta):
    """Return DPO's loss (Rafailov et al. 2023, equation 7), the answers one after another."""

    def log_ratio(prompt, answer):
        ours, theirs = (flat_scores(each, prompt + answer)[0][len(prompt) - 1 :] for each in (model, reference))
        return ours.sum() - theirs.sum().detach()

    margins = [beta * (log_ratio(prompt, chosen) - log_ratio(prompt, rejected)) for prompt, chosen, rejected in PAIRS]
    return -sum(torch.log(1 / (1 + torch.exp(-margin))) for margin in margins) / len(margins)


def test_the_documented_dpo_is_that_on_flat_rows():
    (example,) = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]
    model, reference = tiny_model(seed=0), tiny_model(seed=1)
    scope = {"model": model, "reference": reference, "pairs": PAIRS}
    exec(compile(example, "docs/dpo.md", "exec"), scope)
    assert all(parameter.grad is None for parameter in reference.parameters())

    want = flat_loss(model, reference, beta=0.1)
    assert abs(want - math.log(2)) > 0.01  # what it is where model and reference agree
    torch.testing.assert_close(scope["loss"].detach(), want.detach(), rtol=1e-10, atol=0)
    wanted = gradients(model, want)
    assert wanted.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, wanted[name]) <= 1e-10, name


def test_the_savings_that_the_page_states():
    """Six pairs of four answers, and one pair."""
    prompt = [1] * 1024
    answers = [[2 + number] * 128 for number in range(4)]
    six = [prompt + answers[one] for first in range(4) for second in range(first) for one in (first, second)]
    for rows, want in ((six, (13_824, 1_536)), (six[:2], (2_304, 1_280))):
        forest = TokenForest.from_sequences(rows)
        assert (forest.num_flat_tokens, forest.num_tokens) == want

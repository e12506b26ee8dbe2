"""Make the small model of the stand-in: a Qwen3 from random weights, taught on solutions of its problems."""

import random
from pathlib import Path

from recipes.demo.leaves import Leaf, Renderer
from recipes.demo.settings import Settings
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.warm_start import save_taught_model
from recipes.gsm8k.problems import PHRASES, make_problems, solve

SLIP_RATE = 0.25
"""How often a line slips in the second stage, so that four solutions of ten are right."""


def teach(folder: Path, *, settings: Settings) -> None:
    """Make the model as a Hugging Face model folder."""
    warm = settings.warm_start
    assert warm is not None
    tokenizer = build_tokenizer(PHRASES)
    renderer = Renderer(tokenizer, [])

    def make_batch(step: int, is_skilled: bool) -> list[Leaf]:
        rng = random.Random(step)
        problems = make_problems(warm.num_sessions, seed=settings.warm_start_seed + step)
        slip_rate = 0.0 if is_skilled else SLIP_RATE
        return [
            renderer.write(renderer.read(problem.messages), solve(problem, slip_rate=slip_rate, rng=rng))
            for problem in problems
        ]

    save_taught_model(folder, tokenizer, settings=settings, make_batch=make_batch)

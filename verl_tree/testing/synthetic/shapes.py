"""The shapes that agents make: samples, conversations, tool calls, searches.

The defaults draw one prompt of a training step. `verl_tree.testing.synthetic` explains the common arguments.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from verl_tree.testing.synthetic.growth import (
    NO_PARENT,
    VOCAB_SIZE,
    Growth,
    Seed,
    Sequences,
    TokenLen,
    check_counts,
    draw_lens,
)


def star(
    num_branches: int = 16,
    *,
    prompt_len: int = 8192,
    branch_len: TokenLen = (256, 2048),
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw samples of one prompt that share nothing else: `num_branches` trajectories, depth 2.

    The default prompt is as long as an agent's, with instructions, tools and documents. Where n branches need k packs,
    no packing keeps more than (n - k) / (n - 1) of the potential reuse.
    """
    check_counts(num_branches=num_branches, prompt_len=prompt_len)
    rng, tree = np.random.default_rng(seed), Growth()
    prompt = tree.add(NO_PARENT, node_len=prompt_len)
    for node_len in draw_lens(rng, size=num_branches, branch_len=branch_len):
        tree.end(tree.add(prompt, node_len=node_len))
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def _add_session(
    tree: Growth,
    rng: np.random.Generator,
    *,
    node: int,
    num_turns: int,
    question_len: TokenLen,
    thinking_len: TokenLen,
    answer_len: TokenLen,
) -> None:
    """Grow the turns of a session whose first question is `node`; thinking is dropped from the history."""
    turn_lens = zip(
        draw_lens(rng, size=num_turns, question_len=question_len),
        draw_lens(rng, size=num_turns, thinking_len=thinking_len),
        draw_lens(rng, size=num_turns, answer_len=answer_len),
        strict=True,
    )
    for turn, (own_question_len, own_thinking_len, own_answer_len) in enumerate(turn_lens):
        is_last = turn + 1 == num_turns
        if turn:
            node = tree.add(node, node_len=own_question_len)
        thinking = tree.add(node, node_len=own_thinking_len)
        # The last answer is in no history, so it only follows its thinking.
        answer = tree.add(thinking if is_last else node, node_len=own_answer_len)
        if is_last:
            tree.end(answer)
        else:
            tree.end(thinking, repeat=(answer,))
        node = answer


def caterpillar(
    num_turns: int = 12,
    *,
    system_len: int = 2048,
    question_len: TokenLen = (64, 512),
    thinking_len: TokenLen = (128, 2048),
    answer_len: TokenLen = (64, 512),
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw a conversation whose thinking is dropped from the history: `num_turns` trajectories, one a turn.

    ::

        system ── question 1 ─┬─ answer 1 ── question 2 ─┬─ answer 2 ── question 3 ── thinking 3 ── answer 3
                              └─ thinking 1 ── answer 1  └─ thinking 2 ── answer 2

    The two copies of an answer have the same tokens after different prefixes and must not be merged.
    """
    check_counts(num_turns=num_turns, system_len=system_len)
    rng, tree = np.random.default_rng(seed), Growth()
    system = tree.add(NO_PARENT, node_len=system_len)
    (first_len,) = draw_lens(rng, size=1, question_len=question_len)
    _add_session(
        tree,
        rng,
        node=tree.add(system, node_len=first_len),
        num_turns=num_turns,
        question_len=question_len,
        thinking_len=thinking_len,
        answer_len=answer_len,
    )
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def tool_fan_out(
    num_turns: int = 6,
    *,
    num_calls: int = 4,
    prompt_len: int = 2048,
    plan_len: TokenLen = (32, 512),
    call_len: TokenLen = (32, 256),
    result_len: TokenLen = (64, 1024),
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw parallel tool calls: num_turns * num_calls + 1 trajectories.

    Each call is a branch, and the main branch goes on with all results. Its last plan is its answer.

    ::

        prompt ── plan ─┬─ call 1 ── result 1
                        ├─ call 2 ── result 2
                        └─ result 1 ── result 2 ── plan ─┬─ ...
    """
    check_counts(num_turns=num_turns, num_calls=num_calls, prompt_len=prompt_len)
    rng, tree = np.random.default_rng(seed), Growth()
    node = tree.add(NO_PARENT, node_len=prompt_len)
    *plan_lens, answer_len = draw_lens(rng, size=num_turns + 1, plan_len=plan_len)
    for node_len in plan_lens:
        plan = tree.add(node, node_len=node_len)
        results = tree.add_chain(plan, node_lens=draw_lens(rng, size=num_calls, result_len=result_len))
        for result, own_len in zip(results, draw_lens(rng, size=num_calls, call_len=call_len), strict=True):
            tree.end(tree.add(plan, node_len=own_len), repeat=(result,))
        node = results[-1]
    tree.end(tree.add(node, node_len=answer_len))
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def _add_search_branch(
    tree: Growth, rng: np.random.Generator, *, node: int, num_steps: int, step_len: TokenLen
) -> list[tuple[int, int]]:
    """Grow a trajectory below `node`; return its steps but the last, each with the number that follow it."""
    steps = tree.add_chain(node, node_lens=draw_lens(rng, size=num_steps, step_len=step_len))
    tree.end(steps[-1])
    return list(zip(steps[:-1], range(num_steps - 1, 0, -1), strict=True))


def tree_search(
    num_trees: int = 4,
    *,
    num_expansions: int = 4,
    num_rounds: int = 2,
    num_steps: int = 6,
    prompt_len: int = 1024,
    step_len: TokenLen = (128, 512),
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw a tree search as in Tree-GRPO, M x N x L: M samples of one prompt, each then expanded in L rounds.

    A round draws N steps of a tree and grows a new branch from each. That gives M * (1 + N * L) trajectories of
    `num_steps` steps after the prompt.

    Raises:
        ValueError: A count or length is below 1, or num_steps is 1 and no step has room for a branch.
    """
    check_counts(num_trees=num_trees, num_expansions=num_expansions, num_rounds=num_rounds, prompt_len=prompt_len)
    if num_steps < 2:
        raise ValueError(f"num_steps={num_steps}: give at least 2, so that branches part after the first step")
    rng, tree = np.random.default_rng(seed), Growth()
    prompt = tree.add(NO_PARENT, node_len=prompt_len)
    for _ in range(num_trees):
        open_steps = _add_search_branch(tree, rng, node=prompt, num_steps=num_steps, step_len=step_len)
        for _ in range(num_rounds):
            chosen = [open_steps[index] for index in rng.integers(len(open_steps), size=num_expansions)]
            for node, num_left in chosen:
                open_steps += _add_search_branch(tree, rng, node=node, num_steps=num_left, step_len=step_len)
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def tau2(
    num_tasks: int = 8,
    *,
    num_sessions: int = 4,
    num_turns: int = 12,
    system_len: int = 4800,
    question_len: TokenLen = (40, 400),
    thinking_len: TokenLen = (40, 640),
    answer_len: TokenLen = (20, 200),
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw customer service as in tau2-bench: num_tasks * num_sessions * num_turns trajectories like `caterpillar`.

    All sessions share policy and tools in the system prompt; those of a task share its first question, too. The lengths
    are not measured on tau2: the system prompt is an assumption, and the turns were chosen for a compression near 9.4.
    AReaL times its depth-first tree training at 9.43x compression, and its documentation of tree training gives "up to
    10x" fewer FLOPs on tau2.
    """
    check_counts(num_tasks=num_tasks, num_sessions=num_sessions, num_turns=num_turns, system_len=system_len)
    rng, tree = np.random.default_rng(seed), Growth()
    system = tree.add(NO_PARENT, node_len=system_len)
    for first_len in draw_lens(rng, size=num_tasks, question_len=question_len):
        question = tree.add(system, node_len=first_len)
        for _ in range(num_sessions):
            _add_session(
                tree,
                rng,
                node=question,
                num_turns=num_turns,
                question_len=question_len,
                thinking_len=thinking_len,
                answer_len=answer_len,
            )
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


def unbalanced(
    num_leaves: int = 64,
    *,
    num_deep: int = 3,
    num_turns: int = 24,
    prompt_len: int = 512,
    turn_len: int = 64,
    leaf_len: int = 192,
    max_len: int = 8192,
    seed: Seed = 0,
    vocab_size: int = VOCAB_SIZE,
    shuffle: bool = True,
) -> Sequences:
    """Draw a few deep branches and many short leaves, as real agents make them.

    After the Tree Training paper, section 3.1 on figure 7: "sparse, unbalanced trees with highly variable reuse across
    different depths and branching factors", POR 28.0 % to 88.7 %. Each deep branch has num_turns / 2 to num_turns nodes
    and leaves an earlier one or the prompt; `num_leaves` counts them, too.

    Lengths follow a Pareto distribution from `turn_len` (nodes of deep branches) or `leaf_len` (other leaves) to
    `max_len`; their median is 1.6 times the smallest. The number of leaves at a node follows one, too, divided by its
    depth. A few nodes hold most tokens, a few others most leaves, and half of the trajectories end far above the
    deepest one.

    Raises:
        ValueError: A count or length is below 1, or num_leaves is below num_deep.
    """
    check_counts(num_deep=num_deep, num_turns=num_turns, prompt_len=prompt_len)
    check_counts(turn_len=turn_len, leaf_len=leaf_len, max_len=max_len)
    if num_leaves < num_deep:
        raise ValueError(f"num_leaves={num_leaves} are fewer than num_deep={num_deep}: give at least as many")
    rng, tree = np.random.default_rng(seed), Growth()

    def heavy_lens(smallest: int, size: int) -> list[int]:
        return np.minimum(smallest * (1 + rng.pareto(1.5, size=size)), max_len).astype(int).tolist()

    hosts, levels = [tree.add(NO_PARENT, node_len=prompt_len)], [1]
    for _ in range(num_deep):
        num_nodes = int(rng.integers((num_turns + 1) // 2, num_turns + 1))
        start = int(rng.integers(len(hosts)))
        chain = tree.add_chain(hosts[start], node_lens=heavy_lens(turn_len, num_nodes))
        tree.end(chain[-1])
        levels += range(levels[start] + 1, levels[start] + num_nodes)
        hosts += chain[:-1]
    popularity = rng.pareto(1.0, size=len(hosts)) / np.array(levels)
    chosen = rng.choice(hosts, size=num_leaves - num_deep, p=popularity / popularity.sum())
    for host, node_len in zip(chosen.tolist(), heavy_lens(leaf_len, len(chosen)), strict=True):
        tree.end(tree.add(host, node_len=node_len))
    return tree.sequences(rng, vocab_size=vocab_size, shuffle=shuffle)


SHAPES: dict[str, Callable[..., Sequences]] = {
    "star": star,
    "star_short_prompt": partial(star, prompt_len=1024, branch_len=(1024, 4096)),
    "caterpillar": caterpillar,
    "tool_fan_out": tool_fan_out,
    "tree_search": tree_search,
    "tau2": tau2,
    "unbalanced": unbalanced,
}

"""The tree of a session as text, against trees drawn by hand. A token is a character."""

import pytest

from rollout_hooks.trial.tree_text import MAX_TEXT, TextPath, draw, num_nodes_and_tokens

KINDS = {0: "root", 1: "continuation", 2: "fork", 3: "rewrite"}


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def path(text: str, *stretches: tuple[int, int, int], prompt_len: int, end: str, rewards=()) -> TextPath:
    tokens = [ord(character) for character in text]
    return TextPath.of_stretches(tokens, stretches, prompt_len=prompt_len, end=end, rewards=rewards)


def test_a_tree_of_several_turns() -> None:
    """Call 0 gives "ab"; then one path is answered "r" and continued, another is forked at once, and one ends there."""
    paths = [
        path("ppabrcc", (0, 2, 4), (1, 5, 7), prompt_len=2, end="leaf 0", rewards=((3, 0.25), (3, 0.5), (6, -1.0))),
        path("ppabdd", (0, 2, 4), (2, 4, 6), prompt_len=2, end="leaf 1", rewards=((3, 0.75),)),
        path("ppab", (0, 2, 4), prompt_len=2, end="leaf 2"),
    ]
    assert draw(paths, decode=decode, kinds=KINDS) == [
        "prompt, 2 tokens: 'pp'",
        "call 0 (root), 2 tokens, reward +0.75: 'ab'",
        "leaf 2",
        "├─ environment, 1 token: 'r'",
        "│  call 1 (continuation), 2 tokens, reward -1: 'cc'",
        "│  leaf 0",
        "└─ call 2 (fork), 2 tokens: 'dd'",
        "   leaf 1",
    ]
    assert num_nodes_and_tokens(paths) == (5, 9)


def test_branches_of_branches_and_of_one_call() -> None:
    """Paths part inside the prompt, and two calls that sample the same tokens are two leaves."""
    paths = [
        path("pxaa", (0, 2, 4), prompt_len=2, end="leaf 0"),
        path("pyab", (1, 2, 4), prompt_len=2, end="leaf 1"),
        path("pyab", (2, 2, 4), prompt_len=2, end="leaf 2"),
    ]
    assert draw(paths, decode=decode, kinds=KINDS) == [
        "prompt, 1 token: 'p'",
        "├─ prompt, 1 token: 'x'",
        "│  call 0 (root), 2 tokens: 'aa'",
        "│  leaf 0",
        "└─ prompt, 1 token: 'y'",
        "   ├─ call 1 (continuation), 2 tokens: 'ab'",
        "   │  leaf 1",
        "   └─ call 2 (fork), 2 tokens: 'ab'",
        "      leaf 2",
    ]
    assert num_nodes_and_tokens(paths) == (6, 9)


@pytest.mark.parametrize("num_tokens", [MAX_TEXT - 2, MAX_TEXT - 1])
def test_a_long_text_loses_its_middle(num_tokens: int) -> None:
    text = "a" + "-" * (num_tokens - 2) + "z"
    (line, _) = draw([path(text, prompt_len=num_tokens, end="leaf 0")], decode=decode, kinds={})
    shown = line.removeprefix(f"prompt, {num_tokens} tokens: ")
    assert shown == repr(text) if num_tokens == MAX_TEXT - 2 else " ... " in shown
    assert shown[:2] == "'a"
    assert shown[-2:] == "z'"


def test_no_leaf_is_no_line() -> None:
    assert draw([], decode=decode, kinds={}) == []
    assert num_nodes_and_tokens([]) == (0, 0)

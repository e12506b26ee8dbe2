"""The page of a tree: what it says, that text stays text, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from verl_tree.commands import show
from verl_tree.records import CallRun, StoredLeaf, StoredTree, write_trees
from verl_tree.records.page import tree_page
from verl_tree.records.page.content import overlap_histogram, page_content
from verl_tree.testing.synthetic import random_forest
from verl_tree.tree import TokenForest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='hijacked'</script><!--<b>&amp;"


class Words:
    """A tokenizer of whole pieces of text."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def encode(self, *pieces: str) -> list[int]:
        for piece in pieces:
            if piece not in self.pieces:
                self.pieces.append(piece)
        return [self.pieces.index(piece) for piece in pieces]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.pieces[token] for token in token_ids)


def leaf_of(words: Words, parts: list[tuple[str, list[str]]], *, session: int, leaf: int, **values) -> StoredLeaf:
    """Make a leaf from parts (kind of the call, or "read"; its words); those before the first call are the prompt."""
    token_ids, calls, trained = [], [], []
    for kind, pieces in parts:
        start = len(token_ids)
        token_ids += words.encode(*pieces)
        trained += [kind != "read"] * len(pieces)
        if kind != "read":
            calls.append(CallRun(len(calls), kind, start, len(token_ids)))
    prompt_len = calls[0].start
    return StoredLeaf(
        session=session,
        leaf=leaf,
        token_ids=np.array(token_ids),
        prompt_len=prompt_len,
        is_trained=np.array(trained),
        log_probs=np.full(len(token_ids), np.nan),
        token_rewards=np.eye(len(token_ids) - prompt_len)[-1] * values.pop("reward"),
        token_advantages=np.where(trained[prompt_len:], values.pop("advantage"), 0.0),
        calls=tuple(calls),
        **values,
    )


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def tree(words: Words) -> StoredTree:
    """Two sessions: the first forks on what a tool answered, the second samples something else.

    ask ─┬─ call tool ─┬─ 21 ─ sum        0_0
         │             └─ 24 ─ HOSTILE    0_1
         └─ guess                         1_0
    """
    ask, call = ("read", ["ask"]), ("root", ["call", "tool"])
    return StoredTree(
        step=10,
        uid="u-1",
        leaves=(
            leaf_of(
                words,
                [ask, call, ("read", ["21"]), ("continuation", ["sum"])],
                session=0,
                leaf=0,
                reward=1.0,
                advantage=0.5,
            ),
            leaf_of(
                words,
                [ask, call, ("read", ["24"]), ("fork", [HOSTILE])],
                session=0,
                leaf=1,
                reward=0.0,
                advantage=-1.0,
                reward_extra_info={"acc": 0},
            ),
            leaf_of(words, [ask, ("root", ["guess"])], session=1, leaf=0, reward=0.5, advantage=0.25),
        ),
    )


def embedded(page: str) -> dict:
    """Return the page's data, found as a browser finds it: up to the first end of the script element."""
    found = re.search(r'<script type="application/json" id="content">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    return json.loads(found[1])


def test_content_by_hand(tree: StoredTree, words: Words) -> None:
    content = page_content(tree, tokenizer=words)
    # More than half of the leaves are behind the call, so that branch comes last and is not indented.
    shown = [(node["level"], node["parent"], [s["text"] for s in node["passages"]]) for node in content["nodes"]]
    assert shown == [
        (0, -1, ["ask"]),
        (1, 0, ["guess"]),
        (0, 0, ["call tool"]),
        (1, 2, ["21", "sum"]),
        (1, 2, ["24", HOSTILE]),
    ]
    assert [node["fork"] for node in content["nodes"]] == [None, "sampled", "sampled", "continuation", "fork"]
    assert [node["ends"] for node in content["nodes"]] == [[], [2], [], [0], [1]]
    assert [node["reward"] for node in content["nodes"]] == [0.5, 0.5, 0.5, 1.0, 0.0]
    assert [node["advantage"] for node in content["nodes"]] == [None, 0.25, -0.25, 0.5, -1.0]
    producers = [[(s["who"], s["call"], s["num_training"]) for s in node["passages"]] for node in content["nodes"]]
    assert producers == [
        [("prompt", None, 0)],
        [("model", 0, 1)],
        [("model", 0, 2)],
        [("environment", None, 0), ("model", 1, 1)],
        [("environment", None, 0), ("model", 1, 1)],
    ]
    # ask is in 3 leaves, call and tool in 2; flat 5 + 5 + 2, unique 1 + 2 + 2 + 2 + 1
    assert content["overlap"] == [(1, 5), (2, 2), (3, 1)]
    assert (content["num_flat_tokens"], content["num_tree_tokens"]) == (12, 8)
    assert content["por"] == pytest.approx(1 / 3)
    assert (content["reward_range"], content["advantage_range"]) == ([0.0, 1.0], [-1.0, 1.0])
    assert content["is_training"] is True
    assert [leaf["node"] for leaf in content["leaves"]] == [3, 4, 1]


def test_a_passage_ends_where_fewer_leaves_train_it(words: Words) -> None:
    parts = [("read", ["ask"]), ("root", ["a", "b"])]
    whole = leaf_of(words, parts, session=0, leaf=0, reward=0.0, advantage=0.0)
    part = leaf_of(
        words, [("read", ["ask"]), ("root", ["a"]), ("read", ["b"])], session=1, leaf=0, reward=0.0, advantage=0.0
    )
    content = page_content(StoredTree(step=0, uid="u", leaves=(whole, part)), tokenizer=words)
    (node,) = content["nodes"]
    assert [(s["text"], s["num_training"]) for s in node["passages"]] == [("ask", 0), ("a", 2), ("b", 1)]
    assert node["ends"] == [0, 1]


def rewarded(leaf: StoredLeaf, *, position: int, reward: float) -> StoredLeaf:
    """Return the leaf with a reward on another token than its last."""
    rewards = leaf.token_rewards.copy()
    rewards[position - leaf.prompt_len] += reward
    return replace(leaf, token_rewards=rewards)


def test_rewards_of_turns_are_told_from_those_of_leaves(tree: StoredTree, words: Words) -> None:
    """`tool`, at position 2, ends the turn; the rewards of the leaves lie on `sum` and HOSTILE."""
    first, second, other = tree.leaves
    first = rewarded(first, position=2, reward=-0.5)

    def turn_rewards(*leaves: StoredLeaf) -> list[list[tuple[float | None, int]]]:
        content = page_content(StoredTree(step=10, uid="u-1", leaves=leaves), tokenizer=words)
        return [[(each["turn_reward"], each["num_rewarded"]) for each in node["passages"]] for node in content["nodes"]]

    ends = [[(None, 0), (None, 0)]] * 2
    assert turn_rewards(*tree.leaves)[2:] == [[(None, 0)], *ends]
    assert turn_rewards(first, second, other)[2:] == [[(-0.5, 1)], *ends]
    second = rewarded(second, position=2, reward=0.75)
    assert turn_rewards(first, second, other)[2:] == [[(0.125, 2)], *ends]


def test_rows_without_records_say_model_where_they_are_trained() -> None:
    leaf = StoredLeaf(0, 0, np.arange(4), 1, np.array([0, 1, 0, 1], dtype=bool), np.full(4, np.nan))
    content = page_content(StoredTree(step=0, uid="u", leaves=(leaf,)), tokenizer=None)
    passages = content["nodes"][0]["passages"]
    assert [(s["who"], s["call"], s["text"]) for s in passages] == [
        ("prompt", None, "0"),
        ("model", None, "1"),
        ("environment", None, "2"),
        ("model", None, "3"),
    ]
    assert (content["reward_range"], content["advantage_range"]) == (None, None)
    assert content["is_training"] is False, "there are no advantages"


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_shown_once_after_its_parent_and_levels_stay_low(seed: int) -> None:
    sequences = random_forest(seed, num_leaves=40, max_depth=30)
    leaves = tuple(
        StoredLeaf(0, row, ids, len(ids), np.zeros(len(ids), dtype=bool), np.full(len(ids), np.nan))
        for row, ids in enumerate(sequences)
    )
    tree = StoredTree(step=0, uid="u", leaves=leaves)
    content = page_content(tree, tokenizer=None)
    forest = TokenForest.from_sequences(sequences)
    assert sum(node["num_tokens"] for node in content["nodes"]) == forest.num_tokens
    assert all(node["parent"] < index for index, node in enumerate(content["nodes"]))
    assert max(node["level"] for node in content["nodes"]) <= np.log2(len(leaves))
    histogram = overlap_histogram(forest)
    assert sum(tokens for _, tokens in histogram) == forest.num_tokens
    assert sum(leaves * tokens for leaves, tokens in histogram) == forest.num_flat_tokens
    for row, ids in enumerate(sequences):
        index, text = content["leaves"][row]["node"], []
        while index >= 0:
            text.insert(0, " ".join(passage["text"] for passage in content["nodes"][index]["passages"]))
            index = content["nodes"][index]["parent"]
        assert " ".join(text) == " ".join(map(str, ids))


def test_what_a_model_wrote_cannot_become_markup(tree: StoredTree, words: Words) -> None:
    page = tree_page(tree, words)
    assert HOSTILE not in page
    assert "hijacked" in page
    assert embedded(page)["nodes"][4]["passages"][1]["text"] == HOSTILE

    names = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list) -> None:
            names.append(tag)
            attributes = {name for name, _ in attrs}
            assert not attributes & {"src", "href"}, "the page is self-contained"
            assert not {name for name in attributes if name == "style" or name.startswith("on")}, (
                "its policy refuses it"
            )

    Elements().feed(page)
    # The template's own: data, script, and the name of the measure in the legend.
    assert (names.count("script"), names.count("b")) == (2, 1)
    assert "default-src 'none'" in page
    assert "unsafe" not in page


def test_an_advantage_that_is_zero_but_for_rounding_is_zero(words: Words) -> None:
    """The mean of a group in float32 is not exact. A small advantage beside small rewards is one."""

    def shown(reward: float, advantage: float) -> tuple[float, float]:
        parts = [("read", ["why"]), ("root", ["so"])]
        leaf = leaf_of(words, parts, session=0, leaf=0, reward=reward, advantage=advantage)
        content = page_content(StoredTree(step=1, uid="u", leaves=(leaf,)), tokenizer=None)
        return content["leaves"][0]["advantage"], content["nodes"][-1]["advantage"]

    assert shown(0.7, 6.69e-8) == shown(0.7, -6.69e-8) == (0.0, 0.0)
    assert shown(0.7, 1e-3) == pytest.approx((1e-3, 1e-3))
    assert shown(1e-7, 6.69e-8) == pytest.approx((6.69e-8, 6.69e-8))


def test_values_that_json_lacks_are_missing(words: Words) -> None:
    leaf = leaf_of(words, [("read", ["ask"]), ("root", ["a"])], session=0, leaf=0, reward=np.nan, advantage=np.inf)
    content = page_content(StoredTree(step=0, uid="u", leaves=(leaf,)), tokenizer=words)
    assert json.loads(json.dumps(content, allow_nan=False))["nodes"][0]["reward"] is None


@pytest.fixture
def browse(tmp_path: Path):
    """Open a page in headless Chromium and return the document after its script ran."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")

    def open_page(page: str, address: str = "") -> "Document":
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=2000", "--dump-dom"]
        done = subprocess.run([*command, f"file://{path}{address}"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        document = Document()
        document.feed(done.stdout)
        return document

    return open_page


class Document(HTMLParser):
    """What a browser shows: the node blocks with their attributes and text, marks, and text by element id."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[dict] = []
        self.marks: list[str] = []
        self.text: dict[str, str] = {}
        self.scripts = 0
        self._stack: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        attributes = dict(attrs)
        if tag in ("meta", "input", "br", "img"):
            return
        self._stack.append((tag, attributes.get("id")))
        self.scripts += tag == "script"
        if tag == "li":
            border = re.search(r"border-left-color: ([^;]+)", attributes.get("style", ""))
            node = {"hidden": "hidden" in attributes, "class": attributes["class"], "text": ""}
            self.nodes.append(node | {"border": border and border[1]})
        if tag == "mark":
            self.marks.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._stack and self._stack.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._stack]
        if "li" in tags:
            self.nodes[-1]["text"] += data
        if "mark" in tags:
            self.marks[-1] += data
        for tag, name in self._stack:
            if tag == "title" or name:
                self.text[name or tag] = self.text.get(name or tag, "") + data

    @property
    def shown(self) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if not node["hidden"]]


def test_a_browser_shows_the_tree(tree: StoredTree, words: Words, browse) -> None:
    document = browse(tree_page(tree, words))
    assert document.text["title"] == "Token tree u-1, step 10"
    assert document.shown == [0, 1, 2, 3, 4]
    assert document.scripts == 2
    for text in (HOSTILE, "#4branch 2 of 2after #2", "leaf 0_1 ends: reward 0"):
        assert text in document.nodes[4]["text"]
    assert "model · session 0 call 0 (root) · trained" in document.nodes[2]["text"]
    for fact in ("leaves3", "flat tokens12", "tree tokens8", "POR0.333", "step10"):
        assert fact in document.text["facts"]
    assert "acc: 0" in document.text["leaves"]
    assert document.text["not-trained"] == "model, not trained"


def test_a_browser_shows_one_colour_for_each_role(tree: StoredTree, words: Words, browse) -> None:
    """Session 0 has a planner and a worker; the node that both go on from has no role's colour."""
    roles = ("worker", "planner", None)
    leaves = tuple(replace(leaf, role=role) for leaf, role in zip(tree.leaves, roles, strict=True))
    page = tree_page(StoredTree(step=10, uid="u-1", leaves=leaves), words)
    document = browse(page, "#colour=role")
    assert document.text["roles"] == "plannerworker"
    assert document.text["colour"] == "advantagerewardrole"
    assert "0_0worker53" in document.text["leaves"].replace(" ", "")
    for node, expected in ((3, "worker ■ leaf 0_0 ends"), (4, "planner ■ leaf 0_1 ends"), (1, "■ leaf 1_0 ends")):
        assert expected in document.nodes[node]["text"]
    # In the order of their names: the first is blue, the second orange.
    transparent, planner, worker = "transparent", "rgb(0, 114, 178)", "rgb(213, 94, 0)"
    assert [node["border"] for node in document.nodes] == [transparent, transparent, transparent, worker, planner]
    assert browse(page, "#colour=reward").nodes[3]["border"] != worker


def test_a_page_without_roles_names_none(tree: StoredTree, words: Words, browse) -> None:
    document = browse(tree_page(tree, words), "#colour=role")
    assert "roles" not in document.text
    assert document.text["colour"] == "advantagereward"
    assert "role" not in document.text["leaves"]


def test_a_browser_shows_the_reward_of_a_turn(tree: StoredTree, words: Words, browse) -> None:
    first, *others = tree.leaves
    leaves = (rewarded(first, position=2, reward=0.2), *others)
    document = browse(tree_page(StoredTree(step=10, uid="u-1", leaves=leaves), words))
    assert "call 0 (root) · trained · 2 tokens · turn reward 0.2 on 1 of 2 leaves" in document.nodes[2]["text"]
    assert "leaf 0_0 ends: reward 1.2" in document.nodes[3]["text"]
    assert "turn reward" not in document.nodes[3]["text"] + document.nodes[4]["text"]


def test_a_browser_shows_a_validation_without_training(tree: StoredTree, words: Words, browse) -> None:
    """The same leaves without advantages; the second one's mask leaves out its last text."""
    leaves = [replace(leaf, token_advantages=None) for leaf in tree.leaves]
    leaves[1] = replace(leaves[1], is_trained=np.array([0, 1, 1, 0, 0], dtype=bool))
    document = browse(tree_page(StoredTree(step=10, uid="u-1", leaves=tuple(leaves)), words))
    assert "model · session 0 call 0 (root) · 2 tokens" in document.nodes[2]["text"]
    assert "model · session 0 call 1 (fork) · not trainable · 1 token" in document.nodes[4]["text"]
    assert "trained" not in "".join(node["text"] for node in document.nodes) + document.text["leaves"]
    assert document.text["not-trained"] == "model, not trainable"


def test_a_browser_marks_markup_as_text(tree: StoredTree, words: Words, browse) -> None:
    document = browse(tree_page(tree, words), "#search=%3C/script%3E%3Cscript%3E")
    assert document.marks == ["</script><script>"]
    assert (document.scripts, document.text["title"]) == (2, "Token tree u-1, step 10")


def test_a_browser_runs_no_script_but_the_pages_own(tree: StoredTree, words: Words, browse) -> None:
    """Whatever is written into a page: the policy knows its script by a hash. Without the policy the same text runs."""
    script = "<script>document.title='hijacked'</script>"
    handler = "<img src='none' onerror=\"document.title='hijacked'\">"
    page = tree_page(tree, words).replace("</body>", f"{script}{handler}</body>")
    document = browse(page)
    assert document.text["title"] == "Token tree u-1, step 10"
    assert document.shown == [0, 1, 2, 3, 4]
    assert browse(re.sub("<meta http-equiv=.*?>", "", page)).text["title"] == "hijacked"


def test_a_prompt_is_one_tree_over_the_steps(tree: StoredTree, words: Words, tmp_path: Path) -> None:
    """Of step 11 two sessions; another prompt is left out."""
    later = leaf_of(words, [("read", ["ask"]), ("root", ["again"])], session=0, leaf=0, reward=1.0, advantage=0.0)
    other = leaf_of(words, [("read", ["else"]), ("root", ["x"])], session=0, leaf=0, reward=1.0, advantage=0.0)
    write_trees(tmp_path / "step_000010.parquet", [tree, StoredTree(10, "u-2", (other,))])
    write_trees(tmp_path / "step_000011.parquet", [StoredTree(11, "u-9", (later, replace(later, session=1)))])
    shown = show.over_steps(tmp_path, "u-1")
    assert [(leaf.session, leaf.leaf, leaf.role) for leaf in shown.leaves] == [
        (0, 0, "step 10"),
        (0, 1, "step 10"),
        (1, 0, "step 10"),
        (2, 0, "step 11"),
        (3, 0, "step 11"),
    ]
    assert page_content(shown, tokenizer=words)["roles"] == ["step 10", "step 11"]
    show.main([str(tmp_path), "--prompt", "u-1"])
    assert (tmp_path / "prompt_u-1.html").exists()
    with pytest.raises(ValueError, match=r"--prompt u-3: no group of the 2 files step_\*.parquet in .* has this uid"):
        show.over_steps(tmp_path, "u-3")


@pytest.mark.parametrize(
    ("address", "shown", "status"),
    [
        # A match keeps the way to it; the others are context.
        ("#search=SUM", [0, 2, 3], "1 node with “SUM”"),
        ("#search=nowhere", [], "0 nodes with “nowhere”"),
        ("#leaf=0_1", [0, 2, 4], "3 of 5 nodes shown"),
        ("#collapse=all", [0], "1 of 5 nodes shown"),
        ("#collapse=0", [0], "1 of 5 nodes shown"),
        ("#collapse=2", [0, 1, 2], "3 of 5 nodes shown"),
        ("#collapse=all&search=guess", [0, 1], "1 node with “guess”"),
    ],
)
def test_a_browser_filters(tree: StoredTree, words: Words, browse, address: str, shown: list, status: str) -> None:
    document = browse(tree_page(tree, words), address)
    assert document.shown == shown
    assert document.text["status"] == status
    if address == "#search=SUM":
        assert [document.nodes[index]["class"] for index in shown] == ["node context", "node context", "node"]
        assert document.marks == ["sum"]


def test_a_browser_shows_sixty_leaves_with_long_texts_folded(browse) -> None:
    sequences = random_forest(1, num_leaves=60, mean_len=600)
    leaves = tuple(
        StoredLeaf(row, 0, ids, 1, np.arange(len(ids)) > 0, np.full(len(ids), np.nan), np.ones(len(ids) - 1))
        for row, ids in enumerate(sequences)
    )
    assert TokenForest.from_sequences(sequences).num_tokens > 50_000
    document = browse(tree_page(StoredTree(step=1, uid="big", leaves=leaves), None))
    assert len(document.shown) == TokenForest.from_sequences(sequences).num_nodes
    assert max(len(node["text"]) for node in document.nodes) < 2000
    assert any("Show all" in node["text"] for node in document.nodes)


def test_the_command_makes_the_page_of_a_stored_tree(
    tree: StoredTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, page = tmp_path / "step_000010.parquet", tmp_path / "new" / "out.html"
    write_trees(stored, [tree])
    show.main([str(stored), "--out", str(page)])
    assert embedded(page.read_text())["nodes"][2]["passages"][0]["text"] == "1 2"
    show.main([str(stored)])
    beside = tmp_path / "step_000010_u-1.html"
    assert capsys.readouterr().out.split() == [str(page), str(beside)]
    assert beside.read_text() == page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step.parquet", "--uid", "v"], "uid='v' is not in step.parquet, which holds 'u-1'"),
        (["missing.parquet"], "cannot read missing.parquet: "),
        (["empty.parquet"], "empty.parquet holds no tree: give a file of another step"),
        (
            ["step.parquet", "--tokenizer", "missing/folder/"],
            "--tokenizer missing/folder/: give a model's folder or name",
        ),
    ],
)
def test_the_command_says_what_it_cannot_read(
    tree: StoredTree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    write_trees(tmp_path / "step.parquet", [tree])
    write_trees(tmp_path / "empty.parquet", [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        show.main(arguments)
    assert ended.value.code == 2
    assert f"verl-tree show: error: {message}" in capsys.readouterr().err

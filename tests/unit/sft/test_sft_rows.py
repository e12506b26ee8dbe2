"""What becomes a row: conversations, stored trees, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from byte_tokens import REAL
from fuzzing import fuzzed, outcome
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from process_groups import group_of_one
from tiny_run import make_inputs
from transformers import LlamaConfig
from verl.workers.config import HFModelConfig

from verl_tree.launch.command.composition import compose_config
from verl_tree.records import StoredLeaf, StoredTree, holds_trees, write_trees
from verl_tree.records.trees import ImageRun
from verl_tree.sft.rows import PADDING, TokenRow, TokenRows, read_rows

TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
"""`u:ab` and `a:cd` in the template of the tiny model, whose tokens are characters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def model_config(folder: Path) -> Iterator[HFModelConfig]:
    with group_of_one():
        yield HFModelConfig(path=str(folder / "model"), use_remove_padding=False)


def data_of(*overrides: str) -> DictConfig:
    """Return the part `data` of a configuration."""
    config = compose_config(["trainer.device=cpu", "model.path=any", *overrides], default_name="tree_sft")
    OmegaConf.resolve(config)
    return config.data


def leaf(number: int, *, reward: float | None, tokens: int = 6, images: tuple[ImageRun, ...] = ()) -> StoredLeaf:
    """Return a leaf with a prompt of 2 tokens; the model sampled the others but the last."""
    token_ids = np.arange(tokens) + 10 * number
    rewards = None if reward is None else np.array([0.0] * (tokens - 3) + [reward])
    is_trained = np.array([False, False, *[True] * (tokens - 3), False])
    return StoredLeaf(
        session=0,
        leaf=number,
        token_ids=token_ids,
        prompt_len=2,
        is_trained=is_trained,
        log_probs=np.zeros(tokens),
        token_rewards=rewards,
        images=images,
    )


def stored(path: Path, *leaves: StoredLeaf, uid: str = "a") -> str:
    """Write a file of one stored tree."""
    write_trees(path, [StoredTree(step=1, uid=uid, leaves=leaves)])
    return str(path)


def test_conversations_train_what_the_assistant_says(folder: Path, model_config: HFModelConfig) -> None:
    """The row without an answer changes nothing and is left out; a column says what is one tree."""
    pd.DataFrame({"messages": [TALK, TALK[:1], TALK + TALK], "of": ["x", "y", "x"]}).to_parquet(
        folder / "talks.parquet"
    )
    rows = read_rows(
        str(folder / "talks.parquet"), data_of("data.tree_key=of"), model_config=model_config, max_samples=-1
    ).rows
    decoded = [model_config.tokenizer.decode(row.token_ids) for row in rows]
    assert decoded == ["u:aba:cd", "u:aba:cdu:aba:cd"]
    assert rows[0].is_trained.tolist() == [False] * 6 + [True] * 2
    assert rows[0].tree == rows[1].tree is not None


def test_conversations_in_the_tokens_and_the_template_of_a_pretrained_model(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "model")
    sizes = {"vocab_size": 49152, "hidden_size": 8, "num_attention_heads": 1}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    talk = [{"role": "system", "content": "s"}, TALK[0], {"role": "assistant", "content": "café 漢 12"}]
    pd.DataFrame({"messages": [talk, talk + TALK]}).to_parquet(tmp_path / "talks.parquet")
    model_config = HFModelConfig(path=str(tmp_path / "model"), use_remove_padding=False)
    rows = read_rows(str(tmp_path / "talks.parquet"), data_of(), model_config=model_config, max_samples=-1).rows
    for row, messages in zip(rows, (talk, talk + TALK), strict=True):
        text = model_config.tokenizer.apply_chat_template(messages, tokenize=False)
        assert model_config.tokenizer.decode(row.token_ids) == text
        said = "".join(f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant")
        assert model_config.tokenizer.decode(row.token_ids[row.is_trained]) == said


def test_leaves_of_a_reward_are_trained_where_the_model_sampled(folder: Path, model_config: HFModelConfig) -> None:
    path = stored(folder / "trees.parquet", *(leaf(number, reward=number / 2) for number in range(3)))
    assert holds_trees(path)
    assert not holds_trees(folder / "loops.yaml")
    every = read_rows(path, data_of(), model_config=model_config, max_samples=-1).rows
    assert [row.token_ids.tolist() for row in every] == [list(range(start, start + 6)) for start in (0, 10, 20)]
    assert every[0].is_trained.tolist() == [False, False, True, True, True, False]
    assert every[0].tree == every[2].tree is not None
    good = read_rows([path], data_of("data.min_reward=0.5"), model_config=model_config, max_samples=-1).rows
    assert [row.token_ids[0] for row in good] == [10, 20]
    first = read_rows([path, path], data_of(), model_config=model_config, max_samples=4).rows
    assert [row.token_ids[0] for row in first] == [0, 10, 20, 0]
    pattern = read_rows(str(folder / "tr*s.parquet"), data_of(), model_config=model_config, max_samples=-1).rows
    assert len(pattern) == 3


def test_what_cannot_be_trained_is_refused(folder: Path, model_config: HFModelConfig) -> None:
    def refusal(path: str, *overrides: str) -> str:
        with pytest.raises(ValueError, match=r"data\.") as error:
            read_rows(path, data_of(*overrides), model_config=model_config, max_samples=-1)
        return str(error.value)

    path = stored(folder / "good.parquet", leaf(0, reward=1.0))
    assert "none of 0 rows" in refusal(path, "data.min_reward=2")
    message = refusal(path, "data.max_length=5")
    assert message.startswith("data.max_length=5: ")
    assert "leaf a_0_0 has 6 tokens" in message
    unscored = stored(folder / "unscored.parquet", leaf(0, reward=None))
    assert "has no reward" in refusal(unscored, "data.min_reward=0")
    image = ImageRun(start=0, end=1, number=2**40)
    assert "has images" in refusal(stored(folder / "images.parquet", leaf(0, reward=1.0, images=(image,))))
    pd.DataFrame({"messages": [TALK]}).to_parquet(folder / "talk.parquet")
    message = refusal(str(folder / "talk.parquet"), "data.tree_key=of")
    assert message == (
        "data.tree_key=of: the files have the columns messages; name one, or set null to find trees from the tokens"
    )
    message = refusal(str(folder / "talk.parquet"), "data.max_length=5")
    assert message.startswith("data.max_length=5: row 0 of data.train_files is too long (sequence_length=8 ")


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "nobody", None]),
            "content": st.text("ab<>{}", max_size=4) | st.none() | st.just([{"type": "text", "text": "a"}]),
        },
    ),
    max_size=3,
)
KEY = st.sampled_from(["x", 1, 1.5, None, float("nan"), ["x"]])


@fuzzed(12)
@given(st.lists(st.tuples(MESSAGES | st.just(TALK) | st.none(), KEY), min_size=1, max_size=3))
@example([(TALK, ["x"]), (TALK, ["x"])])
@example([(TALK, None), (TALK, None)])
@example([([], "x")])
@example([([{"role": "user"}], "x")])
@example([([{"role": "user", "content": None}], "x")])
@example([(TALK, "x"), ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "x")])
def test_any_conversations_are_refused_or_read(folder: Path, model_config: HFModelConfig, rows: list) -> None:
    path = folder / "any.parquet"
    messages, keys = zip(*rows, strict=True)
    try:
        pq.write_table(pa.table({"messages": list(messages), "of": list(keys)}), path)
    except (pa.ArrowException, TypeError):
        return  # no table can have these values in one column
    options = data_of("data.tree_key=of")
    read, refusal = outcome(lambda: read_rows(str(path), options, model_config=model_config, max_samples=-1).rows)
    if refusal is not None:
        assert refusal.startswith("data.")
        assert ";" in refusal, "the remedy"
        return
    for row in read:
        assert row.is_trained.any()
        assert not row.is_trained[0]
        assert len(row.token_ids) == len(row.is_trained)
        assert row.tree in {("conversation", key) for key in keys}


def test_a_long_leaf_is_cut_at_its_end_where_that_is_asked_for(folder: Path, model_config: HFModelConfig) -> None:
    path = stored(folder / "long.parquet", leaf(0, reward=1.0))
    options = data_of("data.max_length=4", "data.truncation=right")
    (row,) = read_rows(path, options, model_config=model_config, max_samples=-1).rows
    assert row.token_ids.tolist() == [0, 1, 2, 3]
    assert row.is_trained.tolist() == [False, False, True, True]


def test_the_first_token_of_a_row_is_never_trained(folder: Path, model_config: HFModelConfig) -> None:
    """Nothing scores it, and verl's loss would train the row before instead; see the contract of `sft_loss`."""
    one = StoredLeaf(
        session=0,
        leaf=0,
        token_ids=np.arange(3),
        prompt_len=0,
        is_trained=np.ones(3, dtype=bool),
        log_probs=np.zeros(3),
    )
    (row,) = read_rows(stored(folder / "first.parquet", one), data_of(), model_config=model_config, max_samples=-1).rows
    assert row.is_trained.tolist() == [False, True, True]


def test_rows_have_verls_columns() -> None:
    rows = TokenRows([TokenRow(np.array([4, 5, 6], dtype=np.int32), np.array([False, True, True]))])
    assert len(rows) == 1
    columns = {name: value.tolist() for name, value in rows[0].items()}
    assert columns == {"input_ids": [4, 5, 6], "position_ids": [0, 1, 2], "loss_mask": [0, 1, 1]}
    assert all(value.dtype == torch.int64 for value in rows[0].values())
    padding = {name: value.tolist() for name, value in rows[PADDING].items()}
    assert padding == {"input_ids": [4, 4], "position_ids": [0, 1], "loss_mask": [0, 0]}

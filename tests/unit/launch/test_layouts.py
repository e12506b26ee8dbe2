"""What an update of stored trees would take: the same packing as a run's, and numbers by hand."""

import re
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from input_cases import write_model, write_rows
from omegaconf import DictConfig

pytest.importorskip("verl")

from verl_tree.check import report
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work
from verl_tree.functional.model_size import ModelSize, Sharing
from verl_tree.functional.update_memory import Levers, Relay, UpdateMemory, update_memory
from verl_tree.functional.update_time import (
    DEVICES,
    LAUNCH_S,
    LAUNCHES,
    REACHED,
    Device,
    computed_costs,
    exchanged_bytes,
)
from verl_tree.launch.checks import find_before_the_queue
from verl_tree.launch.checks.memory import model_size
from verl_tree.launch.checks.translation import translate
from verl_tree.launch.command.composition import compose_config
from verl_tree.launch.command.resolution import resolve
from verl_tree.launch.run import layouts
from verl_tree.launch.run.layouts import Layout, Prediction, best_of, fitted_costs
from verl_tree.launch.run.stored_work import Pass, Rows, micro_batches_of, predicted_s, rank_bytes
from verl_tree.records import StoredLeaf, StoredTree, read_trees, write_trees

BY_TOKENS = replace(CostModel.prior(), s_per_pair=0.0, s_per_pack=0.5)
"""A second for each token, half of one for each pack, a third for a token of a spine."""

# Group a: 1 2 3 ─┬─ 4 5       Group b: 1 6 7
#                 └─ 6 (dead)           1 6 8
TOKENS = {"a": ([1, 2, 3, 4, 5], [1, 2, 3, 6]), "b": ([1, 6, 7], [1, 6, 8])}
ADVANTAGES = {"a": (1.0, 0.0), "b": (1.0, -1.0)}


def leaf(session: int, token_ids: list[int], advantage: float) -> StoredLeaf:
    """Make a leaf whose prompt is its first token."""
    is_trained = np.arange(len(token_ids)) > 0
    return StoredLeaf(
        session=session,
        leaf=0,
        token_ids=np.array(token_ids, dtype=np.int32),
        prompt_len=1,
        is_trained=is_trained,
        log_probs=np.where(is_trained, -1.0, np.nan).astype(np.float32),
        token_rewards=np.zeros(len(token_ids) - 1, dtype=np.float32),
        token_advantages=np.full(len(token_ids) - 1, advantage, dtype=np.float32),
    )


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    groups = [
        StoredTree(
            1, uid, tuple(leaf(number, *each) for number, each in enumerate(zip(rows, ADVANTAGES[uid], strict=True)))
        )
        for uid, rows in TOKENS.items()
    ]
    write_trees(tmp_path / "trees.parquet", groups)
    return tmp_path / "trees.parquet"


def seconds(
    rows: Rows, *, capacity: int, num_ranks: int = 1, groups_per_mini_batch: int = 2, relay: str = "auto"
) -> float:
    tree = TreeConfig(capacity=capacity, relay=relay)
    planned = micro_batches_of(
        rows, tree, costs=BY_TOKENS, num_ranks=num_ranks, groups_per_mini_batch=groups_per_mini_batch
    )
    return predicted_s([[[each.work for each in rank] for rank in ranks] for ranks in planned], BY_TOKENS)


def test_rows_that_teach_nothing_are_left_out(trees: Path) -> None:
    rows, every = (Rows.of_file(trees, leaves_out=each) for each in (True, False))
    assert [each.tolist() for each in rows.tokens] == [TOKENS["a"][0], *TOKENS["b"]]
    assert (rows.groups, rows.num_left_out, rows.num_tree_tokens, rows.longest) == (((0,), (1, 2)), 1, 5 + 4, 5)
    assert (every.num_left_out, every.num_tree_tokens) == (0, 6 + 4)


def test_a_prompt_of_which_nothing_is_left_is_one_of_its_mini_batch(trees: Path, tmp_path: Path) -> None:
    first, second = read_trees(trees)
    dead = StoredTree(1, "d", (leaf(0, [1, 2], 0.0),))
    write_trees(tmp_path / "with_dead.parquet", [first, dead, dead, second])
    rows = Rows.of_file(tmp_path / "with_dead.parquet", leaves_out=True)
    assert rows.places == (0, 3)
    assert (rows.num_groups, rows.num_left_out) == (2, 1 + 2)
    # Two mini-batches of two prompts, not one.
    together = Rows.of_file(trees, leaves_out=True)
    assert seconds(together, capacity=16) == 5 + 4 - 1 + 0.5
    assert seconds(rows, capacity=16) == 5 + 4 + 2 * 0.5
    assert rows.first(num_tokens=1, num_ranks=1).places == (0,)


def test_twice_the_context_is_the_same_tree_of_twice_the_tokens(trees: Path) -> None:
    rows = Rows.of_file(trees, leaves_out=False).stretched(2)
    assert rows.tokens[0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert rows.trained[0].tolist() == [False] * 2 + [True] * 8
    assert rows.num_tree_tokens == 2 * (6 + 4)


def test_seconds_are_those_of_the_slowest_rank_and_of_what_is_computed_twice(trees: Path) -> None:
    rows = Rows.of_file(trees, leaves_out=False)
    # One pack: both groups start with 1, which a rank shares.
    assert seconds(rows, capacity=16) == 6 + 4 - 1 + 0.5
    # Group by group: a mini-batch each on one rank, or one on two ranks, which wait for the dearer.
    assert seconds(rows, capacity=16, groups_per_mini_batch=1) == 6 + 4 + 2 * 0.5
    assert seconds(rows, capacity=16, num_ranks=2) == 6 + 0.5
    # Two packs of at most 6 tokens each: 1 2 3 (4 5) (6), and 1 6 (7) (8).
    assert seconds(rows, capacity=6, relay="never") == 6 + 4 + 2 * 0.5
    # In sections of at most 4 tokens each token runs once, and the spine once more.
    assert seconds(rows, capacity=4, relay="always") > 9 + 3 * 0.5


def test_a_shape_is_equal_trees_that_nobody_has_stored(trees: Path) -> None:
    rows = Rows.of_shape("prompt=3 branches=2x2 tools=2x1", num_groups=2)
    assert [each.tolist() for each in rows.tokens] == [
        [0, 0, 0, 1, 1, 3],
        [0, 0, 0, 1, 1, 4],
        [0, 0, 0, 2, 2, 5],
        [0, 0, 0, 2, 2, 6],
    ]
    assert rows.trained[0].tolist() == [False] * 3 + [True] * 3
    assert (rows.num_groups, rows.num_rows, rows.num_tree_tokens) == (2, 8, 2 * 11)
    # Copies cost what as many stored trees cost that share nothing.
    once = replace(Rows.of_file(trees, leaves_out=False), places=None)
    size = len(once.tokens)
    groups = once.groups + tuple(tuple(row + size for row in group) for group in once.groups)
    twice = Rows(once.tokens + tuple(each + 9 for each in once.tokens), once.trained * 2, groups)
    for capacity, num_ranks in ((16, 1), (6, 2), (4, 2)):
        assert seconds(replace(once, copies=2), capacity=capacity, num_ranks=num_ranks) == seconds(
            twice, capacity=capacity, num_ranks=num_ranks
        )
    # As many prompts as have so many flat tokens; as many for each rank, if there are so many.
    for num_tokens, num_ranks, num_groups in ((1, 1, 1), (1, 2, 2), (48, 1, 2), (72, 2, 4), (999, 9, 7)):
        part = replace(rows, copies=7).first(num_tokens=num_tokens, num_ranks=num_ranks)
        assert (part.num_groups, part.num_rows) == (num_groups, 4 * num_groups)
    assert once.first(num_tokens=1, num_ranks=1).groups == once.groups[:1]
    assert len(once.first(num_tokens=1, num_ranks=1).tokens) == 2
    for shape in ("prompt=8", "prompt=8 branches=2", "prompt=8 branches=0x2", "branches=2x2 a=1x1"):
        with pytest.raises(ValueError, match=f"--plan '{shape}': neither a file nor a shape; give"):
            Rows.of_shape(shape, num_groups=1)


def test_slower_layouts_are_told_where_they_take_less_memory() -> None:
    def made(capacity: int, seconds: float, num_bytes: int) -> Prediction:
        return Prediction(Layout(capacity), seconds, num_bytes)

    fast, small, worse, equal = made(8, 1.0, 100), made(4, 2.0, 50), made(2, 3.0, 70), made(16, 1.0, 120)
    predictions = [worse, small, equal, fast]
    assert best_of(predictions, accepts=lambda _: True, most=5) == [fast, small]
    assert best_of(predictions, accepts=lambda _: True, most=1) == [fast]
    # What would be refused hides nothing.
    assert best_of(predictions, accepts=lambda layout: layout != fast.layout, most=5) == [equal, small]
    assert best_of(predictions, accepts=lambda layout: layout != small.layout, most=5) == [fast, worse]


def test_a_layout_is_given_as_overrides() -> None:
    assert Layout(8, ranks=("engine.team=2",)).overrides() == ["tree.capacity=8", "engine.team=2"]
    model = "actor_rollout_ref.model"
    assert Layout(8, tiles=True, offloads=True, on_host=True).overrides() == [
        "tree.capacity=8",
        "tree.relay_store=host",
        f"{model}.tiled_mlp.enabled=true",
        f"{model}.tiled_mlp.num_shards=8",
        f"{model}.enable_activation_offload=true",
    ]


def test_costs_are_computed_from_a_data_sheet_by_hand() -> None:
    size = ModelSize(
        hidden=10, intermediate=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5, vocabulary=100, is_tied=True
    )
    costs = computed_costs(size, Device(flops=1e3 / REACHED, bytes_per_s=1e3, memory_bytes=1, link_bytes_per_s=1.0))
    layers = size.num_parameters - 100 * 10 - 10  # without the last norm
    assert astuple(costs) == pytest.approx(
        (
            8 * layers / 1e3,
            18 * 20 * 3 / 1e3,  # 4 heads of 5
            6 * 1000 / 1e3,
            0.0,
            LAUNCH_S * LAUNCHES * 3,
            2 * layers / 1e3,
            14 * 2 * 10 * 3 / 1e3,  # keys and values of 2 heads of 5
            0.0,
        )
    )
    # A team of four has each of the two key-value heads twice; a quarter of the heads stays here.
    assert [exchanged_bytes(size, Sharing(4, team)) for team in (1, 2, 4)] == [0, 6 * 60 / 2, 6 * 80 * 3 / 4]
    # Of tensor parallelism the hidden state goes to three others, and so do parts of sums, for attention and MLP.
    assert exchanged_bytes(size, Sharing(4, 4, is_gathered=False)) == 6 * 4 * 10 * 3
    # Two experts of four, three quarters of which are elsewhere: there and back.
    mixture = replace(size, num_experts=4, experts_per_token=2)
    assert exchanged_bytes(mixture, Sharing(4, experts=4)) == 6 * 2 * 2 * 10 * 3 / 4
    assert computed_costs(mixture, DEVICES["H100"]).s_per_token == pytest.approx(
        8 * 3 * (630 + 4 * 10 + 2 * 600) / (REACHED * 989e12)
    )


def test_a_pipeline_waits_for_its_longest_pass_and_fsdp_for_what_it_gathers() -> None:
    # A rank of two packs, of 4 and of 2 tokens; another of a tree of 9 tokens in three sections.
    packs = [Work(num_tokens=4, num_packs=1), Work(num_tokens=2, num_packs=1)]
    tree = [Work(num_tokens=9, num_packs=3)]
    assert predicted_s([[packs, tree]], BY_TOKENS) == 9 + 3 * 0.5
    # Three stages take a third each, and wait for two passes: of 4.5 s of 7 s, of 3.5 s of 10.5 s.
    assert predicted_s([[packs]], BY_TOKENS, num_stages=3) == (7 + 2 * 4.5) / 3
    assert predicted_s([[packs, tree]], BY_TOKENS, num_stages=3) == (10.5 + 2 * 3.5) / 3
    # Three passes gather for as long as they compute, or longer.
    assert predicted_s([[tree]], BY_TOKENS, gather_s=3.5) == 10.5
    assert predicted_s([[tree], [packs]], BY_TOKENS, gather_s=4.0) == 12 + 8
    assert predicted_s([[[Work()], []]], BY_TOKENS, gather_s=4.0) == 0
    # What is there five times waits at the ends as often as before.
    assert predicted_s([[packs]], BY_TOKENS, num_stages=3, repeats=5) == (5 * 7 + 2 * 4.5) / 3
    assert predicted_s([[tree]], BY_TOKENS, gather_s=3.5, repeats=5) == 5 * 10.5


def test_gradients_wait_from_the_second_pass_on_if_they_do() -> None:
    size = ModelSize(
        hidden=10, intermediate=20, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=5, vocabulary=100, is_tied=True
    )
    one, two = ([Pass(num_tokens=8, num_scored=4)] * number for number in (1, 2))

    def made(passes: list[Pass], **more: bool) -> int:
        return rank_bytes(size, passes, levers=Levers(), sharing=Sharing(2, **more), reduce_bytes=4)

    assert made(two) - made(one) == 4 * size.num_parameters
    assert made(two, waits=False) == made(one)


def test_a_large_step_is_planned_by_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal prompts two of each rank have the seconds and bytes of all, also those of a pipeline."""
    shape = "prompt=2000 branches=4x300"
    arguments = [*command(tmp_path), "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    stages = ["model_engine=megatron", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]
    monkeypatch.setattr(layouts, "_on_other_engines", lambda *_: [])
    monkeypatch.setattr(layouts, "best_of", lambda made, **_: [each for each in made if each.layout.capacity == 4096])
    for settings in ([], stages):
        told = []
        for num_tokens in (1, 10**9):
            monkeypatch.setattr(layouts, "MAX_TOKENS", num_tokens)
            is_valid, text = report([*arguments, "trainer.n_gpus_per_node=2", *settings], plan=shape, gpu="H200")
            assert is_valid, text
            told.append(re.findall(r"an update: .*", text))
        assert told[0] == told[1]
        assert len(told[0]) > 3


def test_a_pipeline_holds_the_passes_on_the_way_and_all_stores() -> None:
    size = ModelSize(
        hidden=10, intermediate=20, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=5, vocabulary=100, is_tied=True
    )
    sharing, levers = Sharing(4, team=2, stages=2, is_gathered=False), Levers()
    part = replace(size, num_layers=2, vocabulary=50)

    def memory(num_tokens: int, **more: Relay) -> UpdateMemory:
        return update_memory(part, num_tokens, state_bytes=0, levers=replace(levers, chunk_size=4), **more)

    packs = [Pass(num_tokens=8, num_scored=4), Pass(num_tokens=6, num_scored=4), Pass(num_tokens=4, num_scored=4)]
    # Half of the tokens each. While the first runs backward the second has run forward.
    expected = max(memory(4).total + memory(3).checkpoints, memory(3).total + memory(2).checkpoints, memory(2).total)
    made = rank_bytes(size, packs, levers=levers, sharing=sharing, reduce_bytes=4)
    assert made == expected
    # Of two relayed trees with spines of 6 and 2 tokens both stores are there; no gradients wait.
    trees = [Pass(8, 4, 6, 6), Pass(8, 4, 2, 6, is_first=False), Pass(8, 4, 2, 2)]
    of_token = 2 * 10 * 2 * (2 + 4)  # keys and values of two layers, and their gradients
    first = memory(4, relay=Relay(3, spine_len=3))
    made = rank_bytes(size, trees, levers=levers, sharing=sharing, reduce_bytes=4)
    assert made == first.total + memory(4).checkpoints + of_token * 1


SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


MIXTURE = SIZES | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 32,
}


def command(folder: Path, **settings: object) -> list[str]:
    rows, model = write_rows(folder / "rows.parquet"), write_model(folder / "model", **SIZES | settings)
    paths = [f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={model}"]
    return ["profile=gpu", *paths, "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=8"]


def test_the_check_tells_the_plan(trees: Path, tmp_path: Path) -> None:
    is_valid, text = report(command(tmp_path), plan=str(trees), gpu="H200")
    assert is_valid, text
    (block,) = [each for each in text.split("\n\n") if each.startswith("Plan\n")]
    head, first, *_, last = block.splitlines()[1:]
    assert head == (
        "  2 prompts, 3 rows of at most 5 tokens (1 left out), 9 tree tokens; seconds computed from the data sheet of "
        "H200, not measured; GiB computed"
    )
    assert first.startswith("  an update: ")
    assert " GiB  tree.capacity=" in first
    assert last.startswith("  with twice the context: ")
    # Without relay the least capacity has room for the longest row, of 1,024 tokens as the command says.
    _, text = report([*command(tmp_path), "tree.relay=never"], plan=str(trees), gpu="H200")
    assert all(int(each) >= 1024 for each in re.findall(r"an update: .* tree.capacity=(\d+)", text))


def test_teams_are_planned_where_data_sheets_say_what_they_exchange(tmp_path: Path) -> None:
    shape = "prompt=2000 branches=4x300"
    arguments = [*command(tmp_path), "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    is_valid, text = report([*arguments, "trainer.nnodes=2"], plan=shape, gpu="H100")
    assert is_valid, text
    assert "8 prompts, 32 rows of at most 2300 tokens (0 left out), 25600 tree tokens" in text
    # 16 ranks for 8 prompts: alone, half of them compute a spine that others compute, too.
    (best,) = re.findall(r"an update: .*", text)[:1]
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    assert f"{key}=2" in best
    best, *_ = (each for each in text.splitlines() if key in each)
    overrides = re.findall(r"\S+=\S+", best)
    is_valid, text = report([*arguments, "trainer.nnodes=2", *overrides])
    assert is_valid, text


def test_engines_and_layouts_of_ranks_are_planned_and_their_overrides_accepted(tmp_path: Path) -> None:
    """Of a mixture of 77 billion parameters FSDP2 gathers for longer than a pass computes."""
    shape, of_nodes = "prompt=2000 branches=4x300", ["trainer.nnodes=4", "data.train_batch_size=32"]
    arguments = [*command(tmp_path, **MIXTURE), *of_nodes, "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    is_valid, text = report(arguments, plan=shape, gpu="H100")
    assert is_valid, text
    told = [re.findall(r"\S+=\S+", line) for line in text.splitlines() if line.startswith("  an update: ")]
    assert "model_engine=veomni" in told[0]
    assert any("expert_parallel_size" in each for each in told[0])
    is_valid, text = report([*arguments, *told[0]])
    assert is_valid, text


def test_layouts_of_megatron_recompute_and_its_experts_stay_in_a_node(tmp_path: Path) -> None:
    arguments = [*command(tmp_path, **MIXTURE), "model_engine=megatron", "trainer.nnodes=2"]
    group = "actor_rollout_ref.actor.megatron"
    config = accepted([*arguments, f"{group}.tensor_model_parallel_size=2"])
    size = model_size(config)
    assert size is not None
    ways = list(layouts._sharings(config, size, is_fixed=False))
    sharings = [sharing for sharing, _ in ways]
    assert (sharings[0].team, sharings[0].stages, sharings[0].experts) == (2, 1, 1)  # its own
    assert len({*sharings}) == len(sharings) > 20
    assert {each.team * each.experts for each in sharings if each.experts > 1} == {2, 4, 8}
    assert all(each.num_ranks % each.num_parts == each.num_replicas % each.experts == 0 for each in sharings)
    own, other = ways[0][1], next(settings for each, settings in ways if (each.team, each.stages) == (1, 4))
    assert [each.partition("=")[0].rpartition(".")[2] for each in own] == [*layouts.RECOMPUTATION]
    assert other[:2] == [f"{group}.tensor_model_parallel_size=1", f"{group}.pipeline_model_parallel_size=4"]
    config = accepted([*arguments, *other])
    assert next(layouts._sharings(config, size, is_fixed=True))[1] == []


def accepted(arguments: list[str]) -> DictConfig:
    config = compose_config(arguments)
    resolve(config)
    translate(config)
    assert [each.message for each in find_before_the_queue(config) if not each.is_warning] == []
    return config


def test_what_would_be_refused_is_not_told(tmp_path: Path) -> None:
    """LoRA runs on FSDP2 only."""
    few = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    arguments = [*command(tmp_path, **MIXTURE), *few, "actor_rollout_ref.model.lora_rank=8"]
    is_valid, text = report(arguments, plan="prompt=20 branches=4x3", gpu="B200")
    assert is_valid, text
    assert "an update: " in text
    assert "model_engine" not in text


def test_what_cannot_be_planned_is_refused_with_the_remedy(trees: Path, tmp_path: Path) -> None:
    is_valid, text = report([*command(tmp_path), "tree.enabled=false"], plan=str(trees), gpu="H200")
    assert not is_valid
    assert "tree.enabled=False: --plan foresees updates on trees; set it to true" in text
    for options, settings, told in (
        ({"gpu": "H2000"}, {}, "--gpu H2000: give one of A100, H100, H200, B200, or --costs METRICS.jsonl"),
        ({}, {}, "--gpu None: give one of"),
        ({"costs": "none.jsonl"}, {}, "--costs none.jsonl: there is no such file; give one that a run wrote"),
        ({"plan": "none.parquet", "gpu": "H200"}, {}, "--plan none.parquet: there is no such file"),
        (
            {"gpu": "H200"},
            {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
            "--plan knows decoders of equal layers whose config.json is here",
        ),
    ):
        is_valid, text = report(command(tmp_path, **settings), **{"plan": str(trees)} | options)
        assert not is_valid
        assert told in text
    is_valid, text = report([*command(tmp_path), "model_engine=megatron"], plan=str(trees), costs="metrics.jsonl")
    assert not is_valid
    assert "--costs metrics.jsonl: no run has fitted a pipeline's times; give --gpu alone" in text
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"actor/loss": 1.0}}\n')
    with pytest.raises(ValueError, match=r"no step has tree/cost_model/s_per_token; give the metrics of a run"):
        fitted_costs(path)
    write_trees(tmp_path / "dead.parquet", [StoredTree(1, "a", (leaf(0, [1, 2], 0.0),))])
    with pytest.raises(ValueError, match="of these trees; give those of another step"):
        Rows.of_file(tmp_path / "dead.parquet", leaves_out=True)


def test_costs_are_those_that_a_run_has_fitted_last(tmp_path: Path) -> None:
    path, prefix = tmp_path / "metrics.jsonl", "tree/cost_model"
    lines = [{"step": step, "data": replace(BY_TOKENS, s_per_token=step).as_metrics(prefix)} for step in (1, 2)]
    path.write_text("\n".join(map(str, lines)).replace("'", '"') + '\n{"step": 3, "data": {}}\n')
    assert fitted_costs(path) == replace(BY_TOKENS, s_per_token=2.0)

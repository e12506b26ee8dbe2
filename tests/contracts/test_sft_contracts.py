"""What fine-tuning relies on in verl 0.9.1: its SFT trainer, data set, loss and collator, and torchdata's loader."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from process_groups import group_of_one
from tensordict import TensorDict
from tiny_run import make_inputs
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer import sft_trainer
from verl.trainer.config import CheckpointConfig
from verl.trainer.sft_trainer import SFTTrainer, create_sft_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.distributed import destroy_global_process_group
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.launch.command.composition import compose_config


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_inputs(folder)
    return folder


def test_the_loss_is_the_mean_over_all_tokens_and_rolls_the_mask() -> None:
    """The second row trains its first token: that trains the last token of the first row, so ours never do."""
    data = TensorDict({"loss_mask": jagged([[0, 1, 1], [1, 1]])}, batch_size=[2])
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=4)
    scores = [[-1.0, -2.0, -100.0], [-4.0, -100.0]]
    loss, metrics = sft_loss(config=None, model_output={"log_probs": jagged(scores)}, data=data)
    assert loss.item() == pytest.approx((1 + 2 + 100 + 4) / 4 * 2)
    assert metrics == {}
    data["loss_mask"] = jagged([[0, 1, 1], [0, 1]])
    loss, _ = sft_loss(config=None, model_output={"log_probs": jagged(scores)}, data=data)
    assert loss.item() == pytest.approx((1 + 2 + 4) / 4 * 2)


def test_the_collator_makes_jagged_columns() -> None:
    rows = [{"input_ids": torch.arange(length), "loss_mask": torch.ones(length)} for length in (2, 3)]
    batch = SFTTensorCollator("no_padding")(rows)
    assert batch["input_ids"].offsets().tolist() == [0, 2, 5]
    assert batch["loss_mask"].values().tolist() == [1.0] * 5


def test_the_trainer_builds_in_an_order_and_by_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is there before the loader, and the steps of an epoch are known when the engine is initialised."""
    called: list[str] = []

    class Recorder(SFTTrainer):
        """Notes which method is called."""

    def note(name: str, trainer: SFTTrainer) -> None:
        called.append(name)
        trainer.ckpt_handler = type("Handler", (), {"load_checkpoint": staticmethod(lambda: 0)})

    names = ("config", "dataset", "engine", "dataloader")
    for name in (*(f"_build_{each}" for each in names), "_init_engine", "_build_ckpt_handler"):
        monkeypatch.setattr(Recorder, name, lambda trainer, name=name: note(name, trainer))
    with group_of_one():
        Recorder(config=OmegaConf.create({"trainer": {"device": "cpu"}}))
    assert called == [
        "_build_config",
        "_build_dataset",
        "_build_engine",
        "_build_dataloader",
        "_init_engine",
        "_build_ckpt_handler",
    ]


def test_the_trainer_asks_its_client_for_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute of the client is what `fit` calls, `metrics` what it logs, and one validation batch the mean."""
    pd.DataFrame({"messages": [[{"role": "user", "content": "a"}] * 2]}).to_parquet(folder / "talks.parquet")
    logged: list[dict[str, float]] = []

    class Log:
        """Keeps what is logged."""

        def __init__(self, **_: object) -> None:
            pass

        def log(self, data: dict[str, float], step: int) -> None:
            logged.append(data | {"step": step})

    class Client:
        """Answers every batch with its tokens as loss."""

        def train_batch(self, data: TensorDict) -> TensorDict:
            assert tu.get(data, "update_lr_scheduler") is True
            assert tu.get(data, "global_token_num") == [2, 2]
            return self.infer_batch(data)

        def infer_batch(self, data: TensorDict) -> TensorDict:
            values = data["input_ids"].values().float()
            metrics = {"loss": values.sum().item(), "tree/tokens": 3}
            return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

        def step_profile(self) -> None:
            pass

    class Sampler:
        """Is told the epoch by name."""

        def set_epoch(self, *, epoch: int) -> None:
            epochs.append(epoch)

    epochs: list[int] = []
    trainer = object.__new__(SFTTrainer)
    trainer.config = compose_config(
        ["trainer.device=cpu", "trainer.test_freq=1", "trainer.total_epochs=2"], default_name="tree_sft"
    )
    engine = {
        "is_mp_src_rank_with_outputs": lambda: True,
        "get_data_parallel_rank": lambda: 0,
        "get_data_parallel_size": lambda: 1,
        "get_data_parallel_group": lambda: None,
    }
    trainer.engine = type("Engine", (), {name: staticmethod(call) for name, call in engine.items()})
    trainer.model_config = HFModelConfig(path=str(folder / "model"), use_remove_padding=False)
    trainer.rank = trainer.resume_global_step = 0
    trainer.total_training_steps, trainer.steps_per_epoch, trainer.global_batch_size = 2, 1, 2
    trainer.test_freq, trainer.save_freq, trainer.start_profile_step, trainer.end_profile_step = 1, -1, -1, -1
    trainer.device_name, trainer.train_sampler, trainer.training_client = "cpu", Sampler(), Client()
    batch = {"input_ids": jagged([[1, 2], [3, 4]]), "loss_mask": jagged([[0, 1], [0, 1]])}
    trainer.train_dataloader = trainer.val_dataloader = [batch]
    saved: list[int] = []
    trainer.ckpt_handler = type("Handler", (), {"save_checkpoint": staticmethod(lambda step: saved.append(step))})
    monkeypatch.setattr(sft_trainer, "Tracking", Log)
    with group_of_one():
        trainer.fit()
    steps = [each for each in logged if "train/loss" in each]
    assert [(each["train/loss"], each["tree/tokens"], each["train/global_tokens"]) for each in steps] == [
        (10, 3, 4)
    ] * 2
    assert [each["val/loss"] for each in logged if "val/loss" in each] == [10.0, 10.0]
    assert epochs == [0, 1]
    assert saved == [2]


def test_the_data_set_keeps_the_columns_of_its_rows_in_order(folder: Path) -> None:
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    for name, keys in (("one", [5, 6]), ("two", [7])):
        pd.DataFrame({"messages": [talk] * len(keys), "tree": keys}).to_parquet(folder / f"{name}.parquet")
    data = compose_config(["trainer.device=cpu"], default_name="tree_sft").data
    tokenizer = HFModelConfig(path=str(folder / "model"), use_remove_padding=False).tokenizer
    files = [str(folder / "one.parquet"), str(folder / "two.parquet")]
    dataset = create_sft_dataset(files, data, tokenizer, None, max_samples=-1)
    assert isinstance(dataset, MultiTurnSFTDataset)
    assert dataset.dataframe["tree"].tolist() == [5, 6, 7]
    row = dataset[2]
    assert sorted(row) == ["input_ids", "loss_mask", "position_ids"]
    assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
    # `u:ab`, then `a:c` of which the beginning, which the model does not write, is masked.
    assert row["loss_mask"].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_the_worker_of_the_trainer_has_an_engine_of_the_strategy(folder: Path) -> None:
    """`_build_engine` leaves the worker in `training_client`, its engine in `engine`, and the loss in the worker."""
    from verl_tree.engine import TreeEngine

    config = compose_config(["trainer.device=cpu", f"model.path={folder}/model"], default_name="tree_sft")
    OmegaConf.resolve(config)
    trainer = object.__new__(SFTTrainer)
    trainer.config = config
    with group_of_one(), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "x",
            "MASTER_PORT": "0",
        }.items():
            patch.setenv(name, value)
        trainer._build_config()
        trainer._build_engine()
        assert isinstance(trainer.training_client, TrainingWorker)
        assert isinstance(trainer.engine, TreeEngine)
        assert trainer.engine is trainer.training_client.engine
        loss = trainer.training_client.loss_fn
        assert isinstance(loss, partial)
        assert loss.func is sft_loss
    assert isinstance(trainer.optimizer_config, FSDPOptimizerConfig)
    assert isinstance(trainer.checkpoint_config, CheckpointConfig)
    assert trainer.checkpoint_config.load_contents == ["model", "optimizer", "extra"]


class StatefulSteps:
    """Yields lists of numbers, and keeps its place itself."""

    def __init__(self) -> None:
        self.next, self.loaded = 0, 0

    def __iter__(self):
        for step in range(self.loaded, 4):
            self.next = step + 1
            yield [step]

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["next"]


class Numbers(Dataset[int]):
    """Row i is the number i."""

    def __getitem__(self, index: int) -> int:
        return index


def test_the_loader_leaves_the_place_to_a_batch_sampler_that_keeps_it() -> None:
    """Not skipped once more by the loader."""
    loader = StatefulDataLoader(Numbers(), batch_sampler=StatefulSteps(), collate_fn=list)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [[0], [1]]
    state = loader.state_dict()
    resumed = StatefulDataLoader(Numbers(), batch_sampler=StatefulSteps(), collate_fn=list)
    resumed.load_state_dict(state)
    assert list(resumed) == [[2], [3]]


def test_a_group_that_is_not_there_need_not_be_destroyed() -> None:
    assert not torch.distributed.is_initialized()
    destroy_global_process_group()

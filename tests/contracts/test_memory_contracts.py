"""What saves memory: verl's keys, which its FSDP engine reads or not, and what is wrong with verl's own ways."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from built_engines import build_engine, saved
from tiny_models import tiny_model
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from verl.models.transformers.tiled_mlp import TiledMLP, _mlp_forward_fn
from verl.workers.config import HFModelConfig
from verl.workers.engine import FSDPEngineWithLMHead

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.engine import CPUEngineWithLMHead, FSDPTreeEngine

TILED = {"enabled": True, "num_shards": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a tiny model, and make a process group of this process alone."""
    with saved(tiny_model(size="engine"), tmp_path_factory.mktemp("memory")) as folder:
        yield folder


def build(folder: Path, *, trees: bool, **model: object) -> FSDPEngineWithLMHead:
    return build_engine(FSDPTreeEngine if trees else CPUEngineWithLMHead, folder, model=model)


def test_the_keys_are_off_unless_said(folder: Path) -> None:
    config = HFModelConfig(path=str(folder), load_tokenizer=False)
    assert config.tiled_mlp == {"enabled": False, "num_shards": 4}
    assert config.enable_activation_offload is False
    assert config.enable_gradient_checkpointing is True


def tiled_modules(engine: FSDPEngineWithLMHead) -> int:
    return sum("forward" in vars(each) for each in engine.module.modules() if type(each).__name__ == "Qwen3MLP")


def test_verls_engine_ignores_tiles_and_ours_does_not(folder: Path) -> None:
    """Ours sets the instances' forward; verl's patch, if its engine applied it, would change the class."""
    forward = Qwen3MLP.forward
    assert tiled_modules(build(folder, trees=False, tiled_mlp=TILED)) == 0
    assert tiled_modules(build(folder, trees=True, tiled_mlp=TILED)) == 2
    assert tiled_modules(build(folder, trees=True)) == 0
    assert Qwen3MLP.forward is forward


def test_verl_offloads_while_it_wraps_the_model_and_ours_keeps_its_checkpoints(folder: Path) -> None:
    """Its offload turns transformers' checkpoints off and wraps every FSDP module in its own, the head as well."""
    theirs = build(folder, trees=False, enable_activation_offload=True).module
    assert not theirs.is_gradient_checkpointing
    assert "forward" in vars(theirs.lm_head)
    engine = build(folder, trees=True, enable_activation_offload=True)
    assert engine.module.is_gradient_checkpointing
    assert "forward" not in vars(engine.module.lm_head)
    assert engine.model_config.enable_activation_offload is True


def test_verls_offload_needs_an_accelerator(folder: Path) -> None:
    """In a thread of its own, where its hooks on saved tensors stay when it fails."""
    model = build(folder, trees=False, enable_activation_offload=True).module.train()

    def step() -> None:
        model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=r"accelerator|no NVIDIA driver"):
        pool.submit(step).result()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize(("num_tokens", "is_right"), [(8, True), (5, False), (1, False)])
def test_verls_own_tiles_lose_gradients(num_tokens: int, is_right: bool) -> None:
    """Two passes add up their gradients, unless the tokens make fewer than the four tiles that were asked for."""
    torch.manual_seed(0)
    mlp = Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=20)).double()
    passes = torch.randn(2, 1, num_tokens, 8, dtype=torch.float64)
    found = []
    for tiled in (False, True):
        mlp.zero_grad()
        for hidden in passes.clone().requires_grad_():
            out = TiledMLP.apply(_mlp_forward_fn, mlp, hidden, 4, list(mlp.parameters())) if tiled else mlp(hidden)
            out.square().sum().backward()
        found.append(mlp.down_proj.weight.grad.clone())
    assert torch.allclose(*found) == is_right

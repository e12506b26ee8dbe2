"""What `verl_tree.engine.veomni` relies on in verl and VeOmni, read from their source: VeOmni is not imported here."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from other_engines import folder_of


@pytest.fixture(scope="module")
def source() -> ast.Module:
    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "workers/engine/veomni")
    return ast.parse((folder / "transformer_impl.py").read_text())


def method(source: ast.Module, owner: str, name: str) -> str:
    """Return the source of a method."""
    (owner_node,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [node for node in owner_node.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{owner} has no {name}"
    return ast.unparse(found[0])


def test_the_model_is_handed_over_as_it_is_loaded_and_before_it_is_sharded(source: ast.Module) -> None:
    """Why `BuildForTrees` changes the model in `_maybe_apply_async_activation_offload`."""
    build = method(source, "VeOmniEngine", "_build_model_optimizer")
    calls = [
        "build_foundation_model(",
        "self._maybe_apply_async_activation_offload(module)",
        "build_parallelize_model(",
    ]
    assert sorted(calls, key=build.index) == calls
    assert "attn_implementation=self.engine_config.attn_implementation" in build
    assert "MixedPrecisionConfig(enable=self.engine_config.mixed_precision)" in build
    assert "config_path=self._get_model_config_path()" in build


def test_a_critic_is_a_token_classifier_by_its_config(source: ast.Module) -> None:
    assert "ForTokenClassification" in method(source, "VeOmniEngineWithValueHead", "_get_model_config_path")


def test_ranks_of_a_team_and_of_data(source: ast.Module) -> None:
    init = method(source, "VeOmniEngine", "__init__")
    assert "self.ulysses_parallel_group = None" in init
    assert "ulysses_size=self.engine_config.ulysses_parallel_size" in init
    for name in ("get_data_parallel_group", "get_data_parallel_rank", "is_mp_src_rank_with_outputs"):
        method(source, "VeOmniEngine", name)


def test_own_replay_of_routes_has_a_switch(source: ast.Module) -> None:
    """Why `VeOmniTreeEngine` sets `enable_routing_replay` to False."""
    assert "if self.enable_routing_replay" in method(source, "VeOmniEngine", "initialize")


def test_there_are_no_adapters(source: ast.Module) -> None:
    """Why `model.lora_rank` is refused: verl reads the key and builds none."""
    assert "lora" not in method(source, "VeOmniEngine", "_build_model_optimizer").lower()


def test_weights_that_are_not_found_are_drawn_one_by_one() -> None:
    """Where `BuildForTrees` refuses them, in VeOmni's own source."""
    text = (folder_of("veomni") / "veomni/models/module_utils.py").read_text()
    assert "_init_parameter(model, name, parameter_names_left=parameter_names_left)" in text

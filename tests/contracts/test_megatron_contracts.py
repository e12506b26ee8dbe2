"""What `verl_tree.engine.megatron` and `verl_tree.cpu.megatron` rely on, read from the sources of those it builds on.

These are verl 0.9.1, megatron-core 0.16.1 and mbridge 0.15.1. Megatron is not imported here; it has a folder of its own.
"""

import ast
import re
from dataclasses import FrozenInstanceError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_engines import FOLDER
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import McoreEngineConfig

OURS = FOLDER.parents[1] / "verl_tree/cpu/megatron.py"
ENGINE = "workers/engine/megatron/transformer_impl.py"
SCHEDULES = "core/pipeline_parallel/schedules.py"
ATTENTION = "core/transformer/attention.py"
BLOCK = "core/transformer/transformer_block.py"
LAYERS = "core/models/gpt/gpt_layer_specs.py"
ROPE = "core/models/common/embeddings/rotary_pos_embedding.py"
GPT = "core/models/gpt/gpt_model.py"
THD = "if packed_seq_params is not None and packed_seq_params.qkv_format == 'thd':"
STEP = "output_tensor, num_tokens = forward_step(forward_step_func, data_iterator, model,"
BACKWARD = "backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config)"
POP = "input_tensor = input_tensors.pop(0) output_tensor = output_tensors.pop(0)"


def verl(path: str) -> Path:
    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], path)


def installed(path: str) -> Path:
    if not FOLDER.is_dir():
        pytest.skip("Megatron is not there: scripts/setup.sh --extra megatron")
    return FOLDER / path


def megatron(path: str) -> Path:
    return installed("megatron") / path


def node(path: Path, name: str = "") -> Any:
    """Return a class or a function by its dotted name, or the file, without docstrings."""
    found: Any = ast.parse(path.read_text())
    for part in filter(None, name.split(".")):
        matches = [each for each in found.body if getattr(each, "name", None) == part]
        assert len(matches) == 1, f"{path.name} has no {name}"
        (found,) = matches
    for each in ast.walk(found):
        if isinstance(each, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(each) is not None:
            del each.body[0]
    return found


def code(path: Path, name: str = "") -> str:
    """Return the code of `node`, in single spaces."""
    return " ".join(ast.unparse(node(path, name)).split())


def parameters(path: Path, name: str) -> list[str]:
    arguments = node(path, name).args
    return [each.arg for each in arguments.posonlyargs + arguments.args]


def fields(path: Path, name: str = "") -> dict[str, str]:
    """Return the fields of a dataclass, or the annotated names of a file, with their values."""
    body = [each for each in node(path, name).body if isinstance(each, ast.AnnAssign) and each.value is not None]
    return {ast.unparse(each.target): ast.unparse(each.value) for each in body}


def methods(path: Path, name: str) -> set[str]:
    return {each.name for each in node(path, name).body if isinstance(each, ast.FunctionDef)}


def has(text: str, *parts: str) -> None:
    """Find the parts in the text, one behind the other."""
    place = 0
    for part in parts:
        found = text.find(part, place)
        assert found >= 0, f"no longer there, or in another order: {part}"
        place = found + len(part)


def test_verls_constructor_lays_out_ranks_and_builds_no_model() -> None:
    """Why a CPU is prepared before it, and verl's replay is switched off behind it."""
    configs = ["model_config", "engine_config", "optimizer_config", "checkpoint_config"]
    assert parameters(verl(ENGINE), "MegatronEngine.__init__") == ["self", *configs]
    init = code(verl(ENGINE), "MegatronEngine.__init__")
    has(init, "self._init_device_mesh()", "self.enable_routing_replay = self.engine_config.router_replay.mode !=")
    assert "_build_" not in init
    for name in ("_build_tf_config", "_build_megatron_module"):
        has(code(verl(ENGINE), f"MegatronEngine.{name}"), "if self.enable_routing_replay")


def test_chunks_of_the_model_come_loaded_and_before_the_optimizer() -> None:
    """Why layers are put in where `_build_megatron_module` returns, by which time `tf_config` is the model's."""
    built = code(verl(ENGINE), "MegatronEngine.initialize")
    has(built, "self._build_tf_config()", "self.module = self._build_megatron_module()", "self._build_optimizer()")
    assert parameters(verl(ENGINE), "MegatronEngine._build_megatron_module") == ["self"]
    build = code(verl(ENGINE), "MegatronEngine._build_megatron_module")
    has(build, "module, updated_tf_config = make_megatron_module(", "self.tf_config = updated_tf_config")
    has(build, "self.bridge.load_weights(module,", "return module")
    has(code(verl("utils/megatron_utils.py"), "unwrap_model"), "model_module = model_module.module", "unwrapped_model[0]")


def test_the_key_vanilla_mbridge_chooses_the_bridge() -> None:
    """A CPU needs mbridge; either bridge lets lengths vary, and takes the dtype and the overrides of a CPU."""
    build = code(verl(ENGINE), "MegatronEngine._build_tf_config")
    has(build, "self.param_dtype = PrecisionType.to_dtype(self.engine_config.dtype)")
    has(build, "{**self.engine_config.override_transformer_config}", "self.engine_config.vanilla_mbridge")
    has(build, "if self.vanilla_bridge: from verl.models.mcore.mbridge import AutoBridge", "dtype=self.param_dtype)")
    has(build, "set_extra_args(**override_transformer_config)", "tf_config = bridge.config")
    has(build, "else: from verl.models.mcore.bridge import AutoBridge", "'variable_seq_lengths': True")


def test_verls_config_takes_two_dtypes_and_one_strategy() -> None:
    """Why float32 is set past the constructor of a frozen config, and the strategy is verl's own there."""
    for wrong in ("dtype=float32", "strategy=megatron_tree"):
        with pytest.raises(AssertionError):
            McoreEngineConfig(tensor_model_parallel_size=2, **dict([wrong.split("=")]))
    config = McoreEngineConfig(tensor_model_parallel_size=2)
    with pytest.raises(FrozenInstanceError):
        config.dtype = "float32"
    assert PrecisionType.to_dtype("float32") is torch.float32
    assert (config.context_parallel_size, config.virtual_pipeline_model_parallel_size) == (1, None)
    assert (config.dynamic_context_parallel, config.use_megatron_fsdp) == (False, False)
    assert (config.router_replay.mode, config.vanilla_mbridge) == ("disabled", False)


def test_verl_runs_micro_batches_through_megatrons_schedule() -> None:
    """What `_schedule` repeats: stages tell each other the shape, so the lengths are no more than names."""
    name = "MegatronEngine.forward_backward_batch"
    assert parameters(verl(ENGINE), name) == ["self", "data", "loss_function", "forward_only"]
    has(code(verl(ENGINE), name), "= get_forward_backward_func()", "model=self.module", "seq_length=1, micro_batch_size=1")
    has(code(verl(ENGINE), name), "output = {} if mpu.is_pipeline_last_stage(ignore_virtual=True)", "return output")


def test_verl_knows_ranks_of_data_and_of_outputs() -> None:
    last = "mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1"
    has(code(verl(ENGINE), "MegatronEngine.is_mp_src_rank_with_outputs"), "tensor_model_parallel_rank() == 0", last)
    for name, asked in (("group", "group"), ("rank", "rank"), ("size", "world_size")):
        has(code(verl(ENGINE), f"MegatronEngine.get_data_parallel_{name}"), f"return mpu.get_data_parallel_{asked}()")


def test_verl_registers_its_engines_for_gpus_alone() -> None:
    """Why ours are registered for a CPU under verl's keys."""
    has(code(verl("workers/engine/base.py"), "EngineRegistry.register"), "device: list[str] | str='cuda'")
    for path, name, device in ((ENGINE, "MegatronEngine", ""), (ENGINE.replace("megatron", "mindspeed"), "Mindspeed", "npu")):
        for model_type, head in (("language_model", "LMHead"), ("value_model", "ValueHead")):
            found = code(verl(path), f"{name.removesuffix('Engine')}EngineWith{head}")
            key = f"model_type='{model_type}', backend='megatron'" + (f", device='{device}')" if device else ")")
            has(found, f"@EngineRegistry.register({key}", f"class {name.removesuffix('Engine')}EngineWith{head}(")


def test_adapters_have_a_key_of_their_own() -> None:
    """Why `model.lora.rank` is refused beside `model.lora_rank`."""
    has(code(verl("workers/config/megatron_peft.py"), "get_peft_cls"), "model_config.lora", "lora_cfg.get('rank', 0) <= 0")


@pytest.mark.parametrize("head", ["LMHead", "ValueHead"])
def test_verls_rows_ask_for_an_id_of_padding_and_are_packed_on_request(head: str) -> None:
    """Why `local_worker` gives a tokenizer and `use_remove_padding`, and `FlatAttention` wants packed rows."""
    step = code(verl(ENGINE), f"MegatronEngineWith{head}.forward_step")
    has(step, "pad_token_id=self.model_config.tokenizer.pad_token_id")
    has(step, "data_format='thd' if self.engine_config.use_remove_padding else 'bshd'")


def test_gradients_are_finalized_by_the_config_of_the_model() -> None:
    """Why a step that is not the last one takes the function from `tf_config`."""
    hooks = code(verl("utils/megatron_utils.py"), "register_megatron_training_hooks")
    has(hooks, "config = get_model_config(one_model)", "config.finalize_model_grads_func = finalize_model_grads")
    has(code(installed("mbridge/core/llm_bridge.py"), "LLMBridge._model_provider"), "GPTModel(config=self.config,")
    for name in ("no_pipelining", "pipelining_without_interleaving"):
        schedule = code(megatron(SCHEDULES), f"forward_backward_{name}")
        wanted = "if config.finalize_model_grads_func is not None and (not forward_only): "
        has(schedule, "config = get_model_config(model)", BACKWARD, wanted, "config.finalize_model_grads_func([model],")

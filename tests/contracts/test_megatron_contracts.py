"""What `verl_tree.engine.megatron` and its CPU rely on in verl, megatron-core and mbridge, read from their sources."""

import ast
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import verl
from verl.workers.config import McoreEngineConfig

PROJECT = Path(__file__).parents[2]
MEGATRON = PROJECT / ".venv/megatron"
ENGINE = "verl/workers/engine/megatron/transformer_impl.py MegatronEngine"
GPT = "core/models/gpt/gpt_model.py GPTModel"
BLOCK = "core/transformer/transformer_block.py"
ATTENTION = "core/transformer/attention.py Attention"
SCHEDULES = "core/pipeline_parallel/schedules.py"


def code(path: str, name: str = "") -> str:
    """Return the code of a file, or of a class or a function by its dotted name, in single spaces."""
    if not path.startswith("verl") and not MEGATRON.is_dir():
        pytest.skip("Megatron is not there: scripts/setup.sh --extra megatron")
    roots = {"core": MEGATRON / "megatron", "mbridge": MEGATRON, "verl": Path(verl.__path__[0]).parent}
    node: Any = ast.parse((roots.get(path.split("/")[0], PROJECT) / path).read_text())
    for part in filter(None, name.split(".")):
        node = {getattr(each, "name", ""): each for each in node.body}[part]
    return " ".join(ast.unparse(node).split())


def expect(contracts: str) -> None:
    """Find pieces of code in their order, each contract as `file name: piece ... piece`; spaces do not count."""
    for contract in re.split(r"\n {4}(?=\S)", contracts.strip()):
        where, pieces = " ".join(contract.split()).split(": ", 1)
        text = code(*where.split()).replace(" ", "")
        for piece in pieces.replace(" ", "").split("..."):
            _, found, text = text.partition(piece)
            assert found, f"{where}: it is gone, or in another order: {piece}"


def test_verl_builds_behind_its_constructor_and_hands_out_loaded_chunks_whose_lengths_vary() -> None:
    """Why a CPU is prepared before it, replay is switched off behind it, and trees are put into chunks."""
    expect(f"""
    {ENGINE}.__init__: (self, model_config: HFModelConfig, engine_config: McoreEngineConfig,
        optimizer_config: McoreOptimizerConfig, checkpoint_config: CheckpointConfig):
        ... self._init_device_mesh() ... self.enable_routing_replay = self.engine_config.router_replay.mode !=
    {ENGINE}.initialize: self._build_tf_config() ... self.module = self._build_megatron_module()
        ... self.optimizer = self._build_optimizer()
    {ENGINE}._build_megatron_module: (self): ... module, updated_tf_config = make_megatron_module(
        ... self.tf_config = updated_tf_config ... self.bridge.load_weights(module, ... return module
    verl/utils/megatron_utils.py unwrap_model: unwrap_model(model, ... = model_module.module ... unwrapped_model[0]
    {ENGINE}._build_tf_config: self.param_dtype = PrecisionType.to_dtype(self.engine_config.dtype)
        ... **self.engine_config.override_transformer_config ... = self.engine_config.vanilla_mbridge
        if self.vanilla_bridge: from verl.models.mcore.mbridge import AutoBridge ... dtype=self.param_dtype)
        bridge.set_extra_args(**override_transformer_config) tf_config = bridge.config ... else: from
        verl.models.mcore.bridge ... 'variable_seq_lengths': True ... if self.enable_routing_replay and tf_config
    verl/utils/torch_dtypes.py PrecisionType.to_dtype: elif precision in FLOAT_LIST: return torch.float32
    {ENGINE}.forward_backward_batch: (self, data: TensorDict, loss_function: Callable, forward_only=False)
        ... = get_forward_backward_func() ... model=self.module ... seq_length=1, micro_batch_size=1, forward_only=
    mbridge/core/llm_bridge.py LLMBridge._build_base_config: 'params_dtype': dtype ... 'variable_seq_lengths': True
        ... 'moe_token_dispatcher_type': 'alltoall' ... base_config.update(self.extra_args)
    core/pipeline_parallel/p2p_communication.py: if config.variable_seq_lengths ... self._communicate_shapes(
    """)


def test_verls_config_takes_two_dtypes_and_one_strategy() -> None:
    """Why float32 is set past the constructor of a frozen config, and the constructor sees verl's strategy."""
    for name, wrong in (("dtype", "float32"), ("strategy", "megatron_tree")):
        with pytest.raises(AssertionError):
            McoreEngineConfig(tensor_model_parallel_size=2, **{name: wrong})  # type: ignore[arg-type]
    config = McoreEngineConfig(tensor_model_parallel_size=2)
    with pytest.raises(FrozenInstanceError):
        config.dtype = "float32"
    assert (config.context_parallel_size, config.virtual_pipeline_model_parallel_size) == (1, None)
    assert (config.dynamic_context_parallel, config.use_megatron_fsdp) == (False, False)
    assert (config.router_replay.mode, config.override_transformer_config) == ("disabled", {})


@pytest.mark.parametrize(("key", "head"), [("language_model", "LMHead"), ("value_model", "ValueHead")])
def test_verls_ranks_keys_and_what_it_reads_of_the_model_config(key: str, head: str) -> None:
    """Why its engines are registered for a CPU, `local_worker` gives a tokenizer, and `lora.rank` is refused."""
    expect(f"""
    verl/workers/engine/base.py EngineRegistry.register: device: list[str] | str='cuda'
    {ENGINE}With{head}: @EngineRegistry.register(model_type='{key}', backend='megatron') ... def forward_step
        ... self.model_config.tokenizer.pad_token_id ... 'thd' if self.engine_config.use_remove_padding
    {ENGINE.replace("egatron", "indspeed")}With{head}: (model_type='{key}', backend='megatron', device='npu')
    {ENGINE}: def is_mp_src_rank_with_outputs(self): return mpu.get_tensor_model_parallel_rank() == 0 and
        mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1 ... return
        mpu.get_data_parallel_rank() ... mpu.get_data_parallel_world_size() ... return mpu.get_data_parallel_group()
    verl/workers/config/megatron_peft.py get_peft_cls: lora_cfg = model_config.lora if lora_cfg.get('rank', 0) <= 0:
    """)


def test_a_plan_travels_with_the_parameters_of_packed_rows() -> None:
    """Checkpoints get them through a closure, and rows are one row unless the format is `thd`."""
    call = """(query, key, value, attention_mask, attn_mask_type=attn_mask_type, attention_bias=attention_bias,
        packed_seq_params=packed_seq_params)"""
    thd = "if packed_seq_params is not None and packed_seq_params.qkv_format == 'thd':"
    expect(f"""
    core/packed_seq_params.py: class PackedSeqParams: ... qkv_format: str = None ... cp_group: dist.ProcessGroup = None
    {GPT}.forward: self.decoder( ... packed_seq_params=packed_seq_params ... return self._postprocess(
    {BLOCK} TransformerBlock._checkpointed_forward.custom: def custom_forward(hidden_states, attention_mask, context,
        context_mask, rotary_pos_emb, padding_mask=None): ... context = layer( ... packed_seq_params=packed_seq_params
    core/transformer/transformer_layer.py TransformerLayer._forward_attention: self.self_attention(
        input_layernorm_output, attention_mask=attention_mask, ... packed_seq_params=packed_seq_params
    {ATTENTION}.__init__: self.core_attention = ... softmax_scale=self.config.softmax_scale
    {ATTENTION}._checkpointed_attention_forward.custom_forward: (self.core_attention){call}
    {ATTENTION}.forward: {thd} query = query.squeeze(1) key = key.squeeze(1) ... {thd} if
        ... else: cu_seqlens_q = cu_seqlens_kv = None ... (self.core_attention){call} ... {thd} core_attn_out =
    """)


def test_positions_stand_for_a_length_and_heads_stand_behind_hidden_states() -> None:
    """Why a call turns `post_process` off, and what heads then do by themselves: the decoder has a norm of its own."""
    expect(f"""
    {GPT}._preprocess: if self.position_embedding_type == 'rope'
        ... rotary_seq_len = self.rotary_pos_emb.get_rotary_seq_len(inference_context, self.decoder, decoder_input,
        self.config, packed_seq_params) rotary_pos_emb = self.rotary_pos_emb(rotary_seq_len, packed_seq=
    core/models/common/embeddings/rotary_pos_embedding.py RotaryEmbedding.get_emb: emb[:, None, None, :] return emb
    core/models/common/embeddings/rope_utils.py: if cu_seqlens is None: return _apply_rotary_pos_emb_bshd(t, freqs,
    {GPT}.forward: (self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor,
    {GPT}._postprocess: if not self.post_process: return hidden_states
    {BLOCK} TransformerBlock.forward: hidden_states = self.final_layernorm(hidden_states)
    {GPT}.__init__: self.share_embeddings_and_output_weights = ... self.rotary_pos_emb = RotaryEmbedding( ...
        self.decoder = TransformerBlock( ... self.output_layer =
    core/models/common/language_module/language_module.py LanguageModule.shared_embedding_or_output_weight:
        if self.pre_process: return self.embedding.word_embeddings.weight ... return self.output_layer.weight
    core/tensor_parallel/mappings.py _CopyToModelParallelRegion.backward: return (_reduce(grad_output, ctx.group), None)
    core/tensor_parallel/mappings.py _ReduceFromModelParallelRegion.backward: return (grad_output, None)
    core/tensor_parallel/mappings.py _GatherFromModelParallelRegion.backward: (_split_along_last_dim(grad_output,
    core/tensor_parallel/mappings.py: def copy_to_tensor_model_parallel_region(input_, ... _CopyToModelParallelRegion
        ... def reduce_from_tensor_model_parallel_region(input_, ... _ReduceFromModelParallelRegion
        ... def gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True,
    mbridge/utils/post_creation_callbacks.py make_value_model: if post_process: model.output_layer = LinearForLastLayer(
    mbridge/utils/layer.py LinearForLastLayer.forward: gather_from_sequence_parallel_region( ... return (logits, None)
    """)


def test_schedules_run_backwards_in_order_divide_the_loss_and_end_with_the_configs_function() -> None:
    """Why later sections end before earlier ones, losses are multiplied, and `tf_config` lends out its function."""
    forward, pop = "= forward_step(forward_step_func,", "input_tensors.pop(0) output_tensor = output_tensors.pop(0)"
    backward, add = "backward_step(input_tensor, output_tensor,", "output_tensors.append(output_tensor)"
    end = "if config.finalize_model_grads_func is not None and (not forward_only): ... finalize_model_grads_func("
    expect(f"""
    verl/utils/megatron_utils.py register_megatron_training_hooks: config = get_model_config(one_model)
        ... config.finalize_model_grads_func = finalize_model_grads
    {SCHEDULES} get_forward_backward_func: if pp_size > 1: ... else: forward_backward_func =
        forward_backward_pipelining_without_interleaving else: forward_backward_func = forward_backward_no_pipelining
    core/parallel_state.py: def get_model_parallel_group( ... def get_tensor_model_parallel_group( ... def
        get_tensor_model_parallel_world_size( ... def is_pipeline_last_stage(ignore_virtual=True
    {SCHEDULES} forward_step_calc_loss: if is_last_stage: if loss_func is None:
        ... output_tensor, loss_reduced = outputs output_tensor *= cp_group_size output_tensor /= num_microbatches
    {SCHEDULES} forward_step: output_tensor, loss_func = forward_step_func(data_iterator, model)
    {SCHEDULES} forward_backward_no_pipelining: config = get_model_config(model)
        ... for i in range(num_microbatches - 1): ... {forward} ... {backward} ... {forward} ... {backward} ... {end}
    {SCHEDULES} forward_backward_pipelining_without_interleaving: config = get_model_config(model)
        ... range(num_warmup_microbatches): ... {forward} ... {add} ... range(num_microbatches_remaining): ... {forward}
        ... {add} ... {pop} ... {backward} ... range(num_warmup_microbatches): ... {pop} ... {backward} ... {end}
    mbridge/core/llm_bridge.py LLMBridge._model_provider: GPTModel(config=self.config,
    verl/utils/megatron_utils.py: def copy_megatron_model_to_cpu(models): ... .clone().pin_memory()
        ... def restore_megatron_model_from_cpu(models, cpu_state):
    """)


def test_virtual_stages_keep_the_order_of_backwards_and_want_calls_in_groups() -> None:
    """Why relay needs nothing else there, and idle calls fill the last group; a stage tells by itself if it is last."""
    expect(f"""
    core/model_parallel_config.py: if self.microbatch_group_size_per_vp_stage is None:
        self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size
    {SCHEDULES} get_schedule_table: for min_microbatch_id_in_group in range(
        ... schedule_table.extend( ... for model_chunk_id in range(num_model_chunks) for microbatch_id in range(
    {SCHEDULES} forward_backward_pipelining_with_interleaving: final_microbatch_group_size = num_microbatches %
        config.microbatch_group_size_per_vp_stage if 0 < final_microbatch_group_size < pipeline_parallel_size:
        ... def backward_step_helper_preprocess( ... input_tensors[model_chunk_id].pop(0)
        ... def backward_step_helper(virtual_microbatch_id ... get_model_chunk_id(virtual_microbatch_id, forward=False)
        ... if config.overlap_moe_expert_parallel_comm and (not forward_only):
    {SCHEDULES} forward_backward_pipelining_with_interleaving: data_iterator[model_chunk_id], model[model_chunk_id],
    {GPT}.__init__: self.post_process = post_process
    {SCHEDULES} forward_backward_no_pipelining: if isinstance(data_iterator, list): assert len(data_iterator) == 1
    {SCHEDULES} forward_backward_pipelining_without_interleaving: if isinstance(data_iterator, list):
        assert len(data_iterator) == 1
    """)


def test_a_router_stands_behind_the_attention_of_its_layer_and_asks_topk_once() -> None:
    """Why attention says how a layer that is computed anew routes, and what an imposed route stands in for."""
    expect("""
    core/transformer/transformer_layer.py TransformerLayer.__init__: self.layer_number = layer_number +
        get_transformer_layer_offset( ... self.mlp = build_module(
    core/transformer/transformer_layer.py TransformerLayer.forward: self._forward_attention( ... self._forward_mlp(
    core/transformer/moe/moe_layer.py MoELayer.__init__: self.router =
    core/transformer/moe/moe_layer.py MoELayer.route: apply_module(self.router)(
    core/transformer/moe/router.py TopKRouter.forward: (self, input: ... self.routing(logits
    verl/utils/megatron/router_replay_patch.py _patched_topk_routing_with_score_function:
        return torch.topk(scores, k=topk, dim=1) ... if router_replay is None: return _compute_topk(
    verl/utils/megatron/router_replay_patch.py: enable_routing_replay
    core/tensor_parallel/random.py: def _get_cuda_rng_state( ... def _set_cuda_rng_state( ... def _get_all_rng_states(
    """)
    fields = code("core/transformer/transformer_config.py", "TransformerConfig")
    for name in ("num_moe_experts", "moe_router_topk", "moe_router_group_topk", "moe_router_fusion"):
        assert f"{name}: " in fields
    assert "recompute_modules: Optional[List[str]] = None" in fields


def test_options_of_megatrons_config() -> None:
    """What `refuse_layers` takes for unused, and what a CPU switches off."""
    text = code("core/model_parallel_config.py") + code("core/transformer/transformer_config.py", "TransformerConfig")
    fields = dict(re.findall(r"(\w+): [\w\[\], '-]+ = ([\w']+)", text))
    unused = dict.fromkeys(("window_size", "mtp_num_layers", "experimental_attention_variant", "softmax_scale"), "None")
    assert fields.items() >= {**unused, "multi_latent_attention": "False", "softmax_type": "'vanilla'"}.items()
    cpu = re.findall(r"'(\w+)':", code("verl_tree/cpu/megatron.py").split("UNFUSED")[1].split("}")[0])
    assert fields.keys() >= {*cpu, "attention_dropout", "hidden_dropout", "sequence_parallel"}


def test_layers_of_a_cpu_stand_where_transformer_engines_do() -> None:
    """What `prepare` replaces by name, and what builds and calls its layers; bridges know their parameters."""
    specs = [f"core/models/gpt/{name}.py" for name in ("gpt_layer_specs", "moe_module_specs")]
    asked = re.findall(r"def (\w+)", code("core/models/backends.py", "BackendSpecProvider"))
    asked += re.findall(r"backend\.(\w+)\(", "".join(map(code, specs)))
    assert set(asked) == set(re.findall(r"def (\w+)", code("verl_tree/cpu/megatron.py", "_Provider")))
    expect(f"""
    core/models/gpt/gpt_layer_specs.py: HAVE_TE = True ... else: backend = TESpecProvider() ... TEFusedMLP if use_te
    core/models/gpt/gpt_layer_specs.py get_gpt_decoder_block_spec: if use_transformer_engine: layer_norm_impl = TENorm
    core/models/gpt/moe_module_specs.py get_moe_module_spec: TESpecProvider()
    {BLOCK}: LayerNormImpl = TENorm ... layer_norm=LayerNormImpl ... self.layers = torch.nn.ModuleList(
        ... build_module(self.submodules.layer_norm, config=self.config, hidden_size=self.config.hidden_size, eps=
    mbridge/models/qwen2.py: 'self_attention.linear_qkv.layer_norm_weight': ... 'mlp.linear_fc1.layer_norm_weight':
    mbridge/models/qwen2moe.py: 'mlp.experts.linear_fc1': [
    core/transformer/moe/experts.py TEGroupedMLP: build_module(submodules.linear_fc1, self.num_local_experts, ...
        tokens_per_expert.tolist() ... self.linear_fc2(bias_act_output, tokens_per_expert)
    core/transformer/moe/token_dispatcher.py: maybe_move_tensor_to_cpu(self.input_splits, as_numpy=True
    core/transformer/moe/moe_utils.py: if te_general_gemm is not None and router_dtype != torch.float64: output =
    core/distributed/distributed_data_parallel.py: if getattr(param, 'allreduce', True)
    core/distributed/finalize_model_grads.py: getattr(param, 'sequence_parallel', False)
    core/tensor_parallel/layers.py ColumnParallelLinear.__init__: (self, input_size, output_size, *, config:
    core/tensor_parallel/random.py CudaRNGStatesTracker: def add(self, ... def fork(self,
    core/optimizer/optimizer.py: param.type() == 'torch.cuda.FloatTensor'
    core/optimizer/clip_grads.py: .type() == 'torch.cuda.FloatTensor'
    core/optimizer/distrib_optimizer.py: model_param.type() == 'torch.cuda.FloatTensor'
    """)


def test_gradients_are_in_buffers_that_can_be_put_aside() -> None:
    """Why the canary reads `main_grad`, and how it compares gradients beside those of an update."""
    expect("""
    core/distributed/distributed_data_parallel.py DistributedDataParallel.__init__: self.buffers, ... =
        ... self.expert_parallel_buffers, ... =
    core/distributed/distributed_data_parallel.py DistributedDataParallel.zero_grad_buffer: (self): ...
        param.grad_added_to_main_grad = False ... for buffer in self.buffers + self.expert_parallel_buffers:
        buffer.reset()
    core/distributed/distributed_data_parallel.py DistributedDataParallel: param.main_grad.add_(param.grad.data)
    core/distributed/param_and_grad_buffer.py _ParamAndGradBuffer.reset: self.grad_data.zero_()
    core/distributed/param_and_grad_buffer.py _ParamAndGradBuffer.__init__: param.main_grad = self._get(
    core/transformer/transformer_config.py: num_layers: int
    """)

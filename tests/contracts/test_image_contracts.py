"""What images on trees rely on in verl 0.9.1: its forwards of vision-language models, and rows of its agent loops."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model

pytest.importorskip("verl")

from float64_mode import Float64
from image_cases import FAMILIES, PATCH, Row, branching_rows, errors, flat_inputs, in_float64, pack_of, tree_scores
from transformers import BatchFeature
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe
from verl.experimental.agent_loop import agent_loop
from verl.models.transformers.monkey_patch import apply_monkey_patch

_MODULES = (modeling_qwen2_5_vl, modeling_qwen2_vl, modeling_qwen3_vl, modeling_qwen3_vl_moe)


@pytest.fixture(params=FAMILIES)
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """Return a float64 model with verl's forwards, which verl sets on classes; they are put back."""
    for module in _MODULES:
        for cls in [each for each in vars(module).values() if isinstance(each, type)]:
            for name in ("forward", "fast_pos_embed_interpolate"):
                if name in vars(cls):
                    monkeypatch.setattr(cls, name, vars(cls)[name])
    with Float64():
        model = tiny_model(request.param)
        apply_monkey_patch(model, use_remove_padding=False)
        yield model


def test_trees_with_images_equal_flat_rows_through_verls_forwards(patched: torch.nn.Module) -> None:
    """These pass `grid_thw` to the tower by name, and do not cut its features by the grids."""
    rows = [row for row in in_float64(branching_rows(1)) if row.images]
    log_probs, text, tower = errors(patched, rows)
    assert log_probs < 1e-12
    assert text < 1e-12
    assert tower < 1e-12


def test_calls_without_images_run_the_tower_for_every_parameter(patched: torch.nn.Module) -> None:
    """FSDP2 needs it. verl's forward of Qwen2.5-VL fails there, because towers of transformers 5 give no tensor."""
    text = Row((5, 6, 7, 8))
    if patched.config.model_type == "qwen2_5_vl":
        with pytest.raises(AttributeError, match="has no attribute 'mean'"):
            patched(**flat_inputs(patched, text))
    else:
        patched(**flat_inputs(patched, text))
    layout, images = pack_of(patched, [text])
    tree_scores(patched, layout, images).sum().backward()
    tower = dict(patched.get_encoder("image").named_parameters())
    assert all(each.grad is not None and not each.grad.any() for each in tower.values())
    assert len(tower) > 20


def test_verls_forwards_ignore_logits_to_keep(patched: torch.nn.Module) -> None:
    inputs = flat_inputs(patched, in_float64(branching_rows(1))[0])
    logits = patched(**inputs, logits_to_keep=torch.tensor([3]), use_cache=False).logits
    assert logits.shape[1] == inputs["input_ids"].shape[1]


def test_rows_have_pixels_grids_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_compute_multi_modal_inputs` keeps what the processor makes of images, and adds `images_seqlens`."""
    made = BatchFeature(
        {
            "input_ids": torch.zeros(1, 3),
            "attention_mask": torch.ones(1, 3),
            "pixel_values": torch.ones(8, PATCH),
            "image_grid_thw": torch.tensor([[1, 2, 4]]),
        }
    )
    monkeypatch.setattr(agent_loop, "build_multimodal_processor_inputs", lambda *_args, **_kwargs: made)
    monkeypatch.setattr(agent_loop, "get_processor_token_id", lambda *_args: 60)
    worker = SimpleNamespace(
        processor=object(),
        tokenizer=SimpleNamespace(decode=lambda *_args, **_kwargs: ""),
        _get_mm_processor_kwargs=None,
    )
    output = SimpleNamespace(multi_modal_data={"images": ["picture"]}, mm_processor_kwargs={})
    inputs = agent_loop.AgentLoopWorker._compute_multi_modal_inputs(worker, output, torch.tensor([5, 60, 60]))
    assert inputs.keys() == {"pixel_values", "image_grid_thw", "images_seqlens"}

"""Vision-language models on trees with images, in float64, against the same model on one flat row after another."""

import numpy as np
import pytest
import torch
from float64_mode import Float64
from image_cases import FAMILIES, Row, branching_rows, errors, in_float64, pack_of, rows_with_images, split, tree_scores
from tiny_models import IMAGE, VIDEO, tiny_model

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, check_model
from verl_tree.functional.images import Image, PackImages, reads_images
from verl_tree.functional.relayed import call_scores
from verl_tree.relay.calls import RelayCall
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout


@pytest.fixture(params=FAMILIES)
def model(request):
    """Return a model in float64, all through."""
    with Float64():
        yield tiny_model(request.param)


def test_trees_with_images_equal_flat_rows(model):
    """The images of 16 rows are 22, and in the tree 7 runs of four distinct ones."""
    rows = in_float64(branching_rows(1))
    layout, images = pack_of(model, rows)
    assert layout.num_flat_tokens > 2 * layout.num_tokens
    assert len(images.images) == 4
    assert images.of_call(torch.arange(layout.num_tokens)).grids_I3.tolist() == [list(i.grid) for i in images.images]
    log_probs, text, tower = errors(model, rows)
    assert log_probs < 1e-12
    assert text < 1e-12
    assert tower < 1e-12


def test_positions_of_text_would_be_wrong(model):
    """The positions of the rows matter: 0, 1, 2, ... in their place gives other log-probs and gradients."""
    rows = in_float64(branching_rows(1))
    log_probs, text, _ = errors(model, rows, position_CT=lambda layout: layout.position_T.expand(4, -1))
    assert log_probs > 1e-3
    assert text > 0.1


def image(*, value, height=2, width=4, dtype=torch.float32):
    return Image(torch.full((height * width, 3), value, dtype=dtype), (1, height, width))


def numbers_of(rows):
    """Return the numbers of each row."""
    with_images, offsets = rows_with_images(tiny_model("qwen3_vl"), rows)
    return [each.tolist() for each in split(with_images.number_F, offsets)]


def test_numbers_are_those_of_the_docstring():
    first, second = image(value=0.0), image(value=1.0)
    ends = ((6, first), (6, second), (7, first))
    rows = [Row((5, IMAGE, IMAGE, end), (shown,)) for end, shown in ends]
    assert numbers_of(rows) == [[0, 1, 2, 0], [0, 3, 4, 0], [0, 1, 2, 0]]


def test_equal_pixels_are_one_image_and_other_grids_or_types_are_not():
    ids = (IMAGE, IMAGE)
    same, tall = image(value=0.0), image(value=0.0, height=4, width=2)
    wide = image(value=0.0, dtype=torch.float64)
    numbers = numbers_of([Row(ids, (each,)) for each in (image(value=0.0), same, tall, wide)])
    assert numbers == [[1, 2], [1, 2], [3, 4], [5, 6]]


def test_neighbouring_images_are_two():
    first, second = image(value=0.0), image(value=1.0)
    assert numbers_of([Row((IMAGE,) * 4, (first, second)), Row((IMAGE,) * 4, (second, first))]) == [
        [1, 2, 3, 4],
        [3, 4, 1, 2],
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row((5, IMAGE), (image(value=0.0),)), "row 1 has 1 image tokens .* 1 images have 2 features"),
        (Row((5, IMAGE, IMAGE)), "row 1 has 2 image tokens .* 0 images have 0 features"),
        (Row((5, 6), (image(value=0.0),)), "row 1 has 0 image tokens .* 1 images have 2 features"),
        (Row((5, VIDEO)), "row 1 has a video token"),
    ],
    ids=["cut", "no pixels", "no tokens", "video"],
)
def test_rows_that_do_not_hold_their_images_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        numbers_of([Row((5,)), row])


def test_positions_that_disagree_are_refused():
    rows = [Row((5, 6, 7)), Row((5, 6, 8))]
    with_images, _ = rows_with_images(tiny_model("qwen3_vl"), rows)
    layout = TreeLayout.from_forest(TokenForest.from_sequences([row.ids for row in rows]))
    position_CF = torch.tensor([[0, 1, 2, 0, 1, 2]]).repeat(4, 1)
    with_images.of_pack(layout, torch.arange(6), position_CF=position_CF)
    position_CF[2, 1] = 5
    with pytest.raises(ValueError, match="different position_ids"):
        with_images.of_pack(layout, torch.arange(6), position_CF=position_CF)


def test_a_call_gets_each_of_its_images_once_and_no_other():
    """Sections of a pack: tokens 0..2 hold half of image 0, tokens 3..7 image 1 twice."""
    first, second = image(value=0.0), image(value=1.0)
    pack = PackImages(
        images=(first, second),
        feature_bounds=np.array([0, 2, 4]),
        feature_T=torch.tensor([-1, 0, -1, 2, 3, 2, 3, -1]),
        position_CT=torch.arange(8).repeat(4, 1),
    )
    call = pack.of_call(torch.arange(3))
    assert (call.feature_E.tolist(), call.grids_I3.tolist()) == ([0], [[1, 2, 4]])
    assert call.pixels_AX is not None
    assert torch.equal(call.pixels_AX, first.pixels_AX)
    call = pack.of_call(torch.arange(3, 8))
    assert (call.feature_E.tolist(), call.grids_I3.tolist()) == ([0, 1, 0, 1], [[1, 2, 4]])
    assert call.pixels_AX is not None
    assert torch.equal(call.pixels_AX, second.pixels_AX)
    assert torch.equal(call.position_CQ, torch.arange(3, 8).repeat(4, 1))
    call = pack.of_call(torch.tensor([7, 4, 1]))
    assert (call.feature_E.tolist(), call.grids_I3.tolist()) == ([3, 0], [[1, 2, 4]] * 2)
    call = pack.of_call(torch.tensor([0, 2, 7]))
    assert call.pixels_AX is None


def test_the_tower_runs_once_per_call_on_the_distinct_images(model):
    num_patches = []
    embed = model.get_encoder("image").patch_embed
    embed.register_forward_pre_hook(lambda _module, args: num_patches.append(len(args[0])))
    layout, images = pack_of(model, in_float64(branching_rows(1)))
    tree_scores(model, layout, images)
    assert num_patches == [16 + 32 + 16 + 32]
    assert not model.get_encoder("image")._forward_hooks


def test_only_the_families_that_are_tested_read_images(model):
    assert reads_images(model.config)
    assert not reads_images(model.config.get_text_config())
    check_model(model, max_path_len=100)
    assert model.config.get_text_config().vocab_size == 64


def test_the_tower_on_tree_attention_is_refused(model):
    """Patches see each other in both directions, so the tree's mask must never reach them."""
    layout, images = pack_of(model, in_float64(branching_rows(1)))
    call = RelayCall.of_pack(layout.subtree_end_T.numpy(), scorer_T=layout.parent_T.numpy())
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(ValueError, match="only causal models have shareable prefixes"):
        call_scores(model, call, layout, plan=AttentionPlan.from_layout(layout), images=images)

"""Rows of text and images that share prefixes, for the tests of images on trees."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import END, IMAGE, IMAGES, START
from transformers import PreTrainedModel
from tree_cases import gradients, relative_error

from verl_tree.attention.hf import ATTENTION_NAME, for_text
from verl_tree.functional import expand
from verl_tree.functional.images import Image, PackImages, RowsWithImages
from verl_tree.functional.relayed import call_scores
from verl_tree.relay.calls import RelayCall
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.row_keys import row_keys
from verl_tree.tree.rows import ranges

PATCH = 3 * 2 * 14 * 14
"""Numbers of a patch: channels, frames, height, width."""

FAMILIES = [pytest.param(name, marks=pytest.mark.long if name == "qwen3_vl_moe" else ()) for name in IMAGES]
"""Parameters of a test of each model that reads images."""


@dataclass(frozen=True)
class Row:
    """A row of token ids, and its images in order."""

    ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()

    def __add__(self, other: "Row") -> "Row":
        """Return this row continued by another."""
        return Row(self.ids + other.ids, self.images + other.images)


def span(image: Image) -> Row:
    """Return the tokens of an image with its marks."""
    return Row((START, *[IMAGE] * (int(np.prod(image.grid)) // 4), END), (image,))


def draw_image(rng: np.random.Generator, height: int, width: int) -> Image:
    """Draw an image of so many patches, both even."""
    return Image(torch.from_numpy(rng.standard_normal((height * width, PATCH))).float(), (1, height, width))


def draw_text(rng: np.random.Generator, low: int, high: int) -> Row:
    """Draw some ordinary tokens."""
    return Row(tuple(rng.integers(1, IMAGE, size=rng.integers(low, high + 1)).tolist()))


def branching_rows(seed: int) -> list[Row]:
    """Draw 16 rows, and three without images among them.

    An image stands in a shared prompt; a second behind a shared turn; the first again, deeper; a third, of equal size,
    behind the same token ids; two in one prompt.
    """
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> Row:
        return draw_text(rng, low, high)

    first, second, twin, tall = (draw_image(rng, *size) for size in ((4, 4), (4, 8), (4, 4), (8, 4)))
    head, tail = text(2, 4), text(3, 5)
    prompt, other = head + span(first) + tail, head + span(twin) + tail
    rows: list[Row] = []
    for _ in range(2):
        turn = prompt + text(2, 4)
        rows += [turn + text(1, 5) for _ in range(2)]
        seen = turn + span(second) + text(1, 2)
        rows += [seen + text(1, 4) for _ in range(2)]
    rows += [other + text(2, 4) for _ in range(2)]
    rows += [other + text(1, 3) + span(first) + text(1, 2)]
    plain = text(4, 6)
    rows += [plain + text(2, 3) for _ in range(2)]
    pair = text(2, 3) + span(first) + text(1, 1) + span(tall) + text(2, 2)
    return rows + [pair + text(1, 4) for _ in range(3)]


def random_rows(seed: int, *, num_rows: int = 8) -> list[Row]:
    """Draw rows that fork from, extend, repeat or cut short earlier ones, or start anew; images are never cut."""
    rng = np.random.default_rng(seed)
    sizes = ((2, 2), (4, 4), (4, 8), (4, 4), (2, 4))
    images = [draw_image(rng, *size) for size in sizes]

    def pieces() -> list[Row]:
        drawn: list[Row] = []
        for _ in range(rng.integers(1, 4)):
            drawn += [Row((token,)) for token in draw_text(rng, 1, 4).ids]
            if rng.random() < 0.5:
                drawn.append(span(images[rng.integers(len(images))]))
        return drawn

    rows = [[Row((int(rng.integers(1, IMAGE)),)), *pieces()]]
    for _ in range(num_rows - 1):
        start = rows[rng.integers(len(rows))]
        kept = start[: rng.integers(0 if rng.random() < 0.15 else 1, len(start) + 1)]
        row = kept + (pieces() if rng.random() < 0.8 or not kept else [])
        rows.append(row)
    return [sum(row, Row()) for row in rows]


def positions_of(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Return the (4, L) positions of a row as verl stores them: 0, 1, 2, ..., and those of M-RoPE."""
    ids = torch.tensor([row.ids])
    of_text = torch.arange(len(row.ids)).unsqueeze(0)
    if not row.images:
        return of_text.repeat(4, 1)
    grids = torch.tensor([image.grid for image in row.images])
    of_model, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)
    return torch.cat([of_text, of_model[:, 0]])


def flat_inputs(model: PreTrainedModel, row: Row) -> dict[str, torch.Tensor]:
    """Return what the model reads of a row alone."""
    inputs = {"input_ids": torch.tensor([row.ids]), "position_ids": positions_of(model, row).unsqueeze(1)}
    if row.images:
        inputs["pixel_values"] = torch.cat([image.pixels_AX for image in row.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in row.images])
    return inputs


def laid_out(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of rows one after another, and the bounds of the rows."""
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)])
    return np.concatenate([row.ids for row in rows]), offsets


def split(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """Cut values of rows at their bounds."""
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def in_float64(rows: list[Row]) -> list[Row]:
    """Return rows with the pixels of their images in float64."""
    return [
        dataclasses.replace(row, images=tuple(Image(image.pixels_AX.double(), image.grid) for image in row.images))
        for row in rows
    ]


def rows_with_images(model: PreTrainedModel, rows: list[Row]) -> tuple[RowsWithImages, np.ndarray]:
    """Return the images of rows, and the bounds of the rows."""
    token_ids, offsets = laid_out(rows)
    return RowsWithImages.of_rows(
        token_ids, offsets=offsets, images=[row.images for row in rows], config=model.config
    ), offsets


def pack_of(model: PreTrainedModel, rows: list[Row]) -> tuple[TreeLayout, PackImages]:
    """Return the layout of all rows as one pack, and its images."""
    with_images, offsets = rows_with_images(model, rows)
    token_ids, _ = laid_out(rows)
    layout = TreeLayout.from_forest(
        TokenForest.from_sequences(split(row_keys(token_ids, with_images.number_F), offsets))
    )
    place_F = torch.from_numpy(ranges(offsets[layout.leaves], np.diff(layout.leaf_offsets)))
    position_CF = torch.cat([positions_of(model, row) for row in rows], dim=1)
    layout = layout.with_token_ids(torch.from_numpy(token_ids)[place_F])
    return layout, with_images.of_pack(layout, place_F, position_CF=position_CF)


def tree_scores(model: PreTrainedModel, layout: TreeLayout, images: PackImages) -> torch.Tensor:
    """Return log-probs and entropies, (2, T), 0 where nothing is scored."""
    model.set_attn_implementation(for_text(model.config, ATTENTION_NAME))
    call = RelayCall.of_pack(layout.subtree_end_T.numpy(), scorer_T=layout.parent_T.numpy())
    plan = AttentionPlan.from_layout(layout)
    scores_CK = call_scores(model, call, layout, plan=plan, images=images, calculate_entropy=True)
    return scores_CK.new_zeros(2, layout.num_tokens).index_copy(1, torch.from_numpy(call.scored_K), scores_CK)


def flat_scores(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Return log-probs and entropies of a row, (2, L - 1), from the model's own forward on this row alone."""
    model.set_attn_implementation("sdpa")
    inputs = flat_inputs(model, row)
    log_probs = model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
    chosen = log_probs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
    return torch.stack([chosen, -(log_probs.exp() * log_probs).sum(-1)])


def signed_loss(scores: list[torch.Tensor]) -> torch.Tensor:
    """Add up (2, L - 1) scores of rows with coefficients of either sign; log-probs enter as probabilities."""
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for log_probs, entropy in scores:
        coefficient, weight = torch.randn(2, len(log_probs), dtype=torch.float64, generator=generator)
        total = total + (coefficient * log_probs.exp()).sum() + (weight * entropy).sum()
    return total


def errors(
    model: PreTrainedModel, rows: list[Row], *, position_CT: Callable[[TreeLayout], torch.Tensor] | None = None
) -> tuple[float, float, float]:
    """Return the largest relative errors of the tree: log-probs, gradients of the text part and of the tower."""
    layout, images = pack_of(model, rows)
    if position_CT is not None:
        images = dataclasses.replace(images, position_CT=position_CT(layout))
    flat = [flat_scores(model, row) for row in rows]
    want = gradients(model, signed_loss(flat))
    scores_F = expand(tree_scores(model, layout, images).T, layout).T
    of_leaves = scores_F.split(np.diff(layout.leaf_offsets).tolist(), dim=1)
    tree = [of_leaves[rank][:, 1:] for rank in layout.leaves.argsort()]
    got = gradients(model, signed_loss(tree))
    largest = max(each[0].abs().max() for each in flat if each.numel())
    log_probs = max((here[0] - there[0]).abs().max() for here, there in zip(tree, flat, strict=True) if here.numel())
    assert want.keys() == got.keys()
    by_name = {name: relative_error(got[name], want[name]) for name in want}
    tower = [error for name, error in by_name.items() if "visual" in name]
    text = [error for name, error in by_name.items() if "visual" not in name]
    return (log_probs / largest).item(), max(text), max(tower, default=0.0)

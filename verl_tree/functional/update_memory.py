"""How many bytes an update takes on one device, phase by phase, computed from a model's sizes.

For decoders such as Qwen3 in bfloat16, with RMSNorm in front of attention, of heads and of a gated MLP or of experts
that each are one, with transformers' own code and gradient checkpointing. A backward pass holds, besides weights,
gradients and optimiser:

- the checkpoints, the input of every layer that has not run backward;
- the largest of three phases: the output head on a chunk of positions; the MLP of a layer in its backward pass, below
  which lies all that attention keeps; the attention of a layer in its backward pass.

Not computed: what stays the same whatever the model (a CUDA context, workspaces of libraries), what an allocator cannot
use, what a loss keeps of a row (`verl_tree.functional.memory`, which measures), and what tensor-parallel ranks gather
of a layer's input. Tokens are taken to be spread evenly over the experts.

Legend: bytes per token, unless a name ends in `_bytes`. "kept" is saved for a backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

from verl_tree.functional.memory import KeysAndValues
from verl_tree.functional.model_size import FLOAT, HALF, ModelSize


@dataclass(frozen=True, slots=True)
class Levers:
    """What lowers the memory of an update."""

    num_tiles: int | None = None  # of MLPs and norms (`model.tiled_mlp`); None: they run as a whole
    offloads: bool = False  # checkpoints are in host memory (`model.enable_activation_offload`)
    chunk_size: int = 1024  # positions whose logits exist at once (`tree.logits_chunk_size`)


@dataclass(frozen=True, slots=True)
class Relay:
    """A tree in sections: the longest context, where the store is (`verl_tree.relay`), and what is in it."""

    max_path_len: int
    on_host: bool = False
    spine_len: int | None = None  # Tokens of the spine; None: not known


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes of an update on the device, by what holds them. The phases follow each other."""

    states: int  # weights, gradients, optimiser
    checkpoints: int
    head: int
    mlp: int
    attention: int
    relayed: int = 0  # keys and values of the spine, their gradients, and the copies of a context

    @property
    def layer(self) -> int:
        """What a layer takes in its backward pass."""
        return max(self.mlp, self.attention)

    @property
    def total(self) -> int:
        """The peak."""
        return self.states + self.checkpoints + max(self.head, self.layer) + self.relayed


def update_memory(
    size: ModelSize,
    num_tokens: int,
    *,
    state_bytes: int,
    levers: Levers | None = None,
    relay: Relay | None = None,
    kernel_bytes: int | None = None,
) -> UpdateMemory:
    """Compute the memory of an update whose passes have `num_tokens` tokens, all of which are scored.

    Args:
        size: The model's sizes.
        num_tokens: Tokens of a pack or a section.
        state_bytes: Bytes per parameter of weights, gradients and optimiser.
        levers: What lowers the memory; None: nothing does.
        relay: The tokens are those of a section, and the tree is any tree with such paths.
        kernel_bytes: Bytes per token of the attention kernel's backward pass besides what it is given. None: the
            gradients of queries, keys and values, and float32 sums of them, as FlashAttention 4 has.
    """
    levers = levers or Levers()
    context = relay.max_path_len if relay else 0
    held_layers = 0 if levers.offloads else size.num_layers
    relayed = 0
    if relay:
        dims = 2 * size.key_dims
        relayed = KeysAndValues(dims=dims, num_layers=size.num_layers, dtype_bytes=HALF).relayed_bytes(
            relay.max_path_len, trains=True, recomputes=True, on_host=relay.on_host, spine_len=relay.spine_len
        )
    return UpdateMemory(
        states=state_bytes * size.num_parameters,
        # The cosines and sines of all positions lie beside them.
        checkpoints=HALF * (held_layers * size.hidden + 2 * size.head_dim) * num_tokens,
        head=_head_bytes(size, num_tokens, levers),
        mlp=_mlp_bytes(size, num_tokens, levers),
        attention=_attention_bytes(size, num_tokens, levers, num_context=context, kernel_bytes=kernel_bytes),
        relayed=relayed,
    )


def waiting_bytes(size: ModelSize, *, reduce_bytes: int) -> int:
    """Return the bytes of the gradients that wait on a rank where an update has several passes.

    The FSDP2 engine adds them up over the ranks in the last pass only. Until then a rank has those of the whole model,
    in the dtype in which they are added up.
    """
    return reduce_bytes * size.num_parameters


def largest(fits: Callable[[int], bool], *, limit: int) -> int:
    """Return the largest number of tokens up to `limit` that fits, 0 if none does; more tokens never fit better."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _norm_kept(dims: int, *, is_tiled: bool) -> int:
    """Return what a norm keeps: the input in float32 and normalised, or, in tiles, the input."""
    return HALF * dims if is_tiled else (FLOAT + HALF) * dims


def _attention_kept(size: ModelSize, levers: Levers) -> int:
    """Return what a layer keeps up to the output of attention; its own input only if that comes from the host."""
    is_tiled = levers.num_tiles is not None
    # In tiles the first norm keeps the layer's input, which is there anyway.
    first = (0 if is_tiled else _norm_kept(size.hidden, is_tiled=False)) + HALF * size.hidden
    first += HALF * size.hidden if levers.offloads else 0
    heads = _norm_kept(size.query_dims + size.key_dims, is_tiled=is_tiled)
    log_sums = FLOAT * size.num_heads
    return first + heads + HALF * (2 * size.query_dims + 2 * size.key_dims) + log_sums


def _mlp_bytes(size: ModelSize, num_tokens: int, levers: Levers) -> int:
    """Return the peak of a layer's MLP in its backward pass."""
    is_tiled = levers.num_tiles is not None
    # The second norm and its output, and the gradient of the layer's output.
    below = _attention_kept(size, levers) + _norm_kept(size.hidden, is_tiled=is_tiled) + 2 * HALF * size.hidden
    # Kept of gate, its activation and up, and the gradients of the product and of both of its factors.
    wide = 6 * HALF * size.experts_per_token * size.intermediate
    if size.num_experts:
        # Each expert of a token has its input and output, and the gradients of both. Measured, of six shapes with
        # transformers' grouped products: at most 1 % more, and up to 12 % less.
        below += 4 * HALF * size.experts_per_token * size.hidden
    if levers.num_tiles is None:
        return (below + wide) * num_tokens
    tile_len = -(-num_tokens // levers.num_tiles)
    # A tile's gradients of the weights beside the sums in float32, and the gradient of the input.
    return (below + HALF * size.hidden) * num_tokens + wide * tile_len + (HALF + FLOAT) * size.mlp_parameters


def _attention_bytes(
    size: ModelSize, num_tokens: int, levers: Levers, *, num_context: int, kernel_bytes: int | None
) -> int:
    """Return the peak of a layer's attention in its backward pass."""
    if kernel_bytes is None:
        kernel_bytes = (FLOAT + HALF) * (size.query_dims + 2 * size.key_dims)
    # The gradients of the layer's output and of attention's.
    per_token = _attention_kept(size, levers) + HALF * (size.hidden + size.query_dims) + kernel_bytes
    # `relayed_bytes` counts the gradient of a context, but not its sums.
    return per_token * num_tokens + 2 * FLOAT * size.key_dims * num_context


def _head_bytes(size: ModelSize, num_tokens: int, levers: Levers) -> int:
    """Return the peak of the output head in its backward pass."""
    # The last norm, the scored rows, their gradients and the next chunk's share in them.
    rows = _norm_kept(size.hidden, is_tiled=levers.num_tiles is not None) + 3 * HALF * size.hidden
    chunk = min(levers.chunk_size, num_tokens)
    # Log-probs, their gradient and that of the logits; the sum of the chunks' gradients of the weight.
    return rows * num_tokens + 3 * FLOAT * chunk * size.vocabulary + HALF * size.hidden * size.vocabulary

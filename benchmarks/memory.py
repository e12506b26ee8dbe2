"""The tables of docs/memory.md: what an update of Qwen3 takes on one GPU, computed from the models' sizes.

    python benchmarks/memory.py
    python benchmarks/memory.py --cost --out docs/benchmarks/data/memory_cost.json

The tables are computed by `verl_tree.functional.update_memory`, and its test compares it with real updates on a CPU.
The sizes are those of the models' published configs. `--cost` measures on this CPU what tiles cost in time and save in
bytes. What trees save beside flat rows `por.py --memory` measures.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from harness import environment, interleave, markdown_table, new_parser, print_table, write_json
from por_models import small_qwen3

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.functional.memory import GIB, RESERVED_SHARE, peak_bytes, probe_layout
from verl_tree.functional.model_size import ModelSize
from verl_tree.functional.tiles import tile_modules
from verl_tree.functional.update_memory import Levers, Relay, largest, update_memory

VOCABULARY = 151_936

MODELS = {
    "0.6B": ModelSize(1024, 3072, 28, 16, 8, 128, VOCABULARY, is_tied=True),
    "1.7B": ModelSize(2048, 6144, 28, 16, 8, 128, VOCABULARY, is_tied=True),
    "4B": ModelSize(2560, 9728, 36, 32, 8, 128, VOCABULARY, is_tied=True),
    "8B": ModelSize(4096, 12288, 36, 32, 8, 128, VOCABULARY, is_tied=False),
}
STATES = {"none": 4, "offloaded": 8, "on the card": 16}
"""Bytes per parameter by where Adam is. Without it: weights and gradients in bfloat16. With it both are in float32, as
in verl, and Adam's two numbers are on the host during the passes, or not."""

CARDS = {"H200, 139 GiB": 139, "H100, 80 GiB": 80}
NUM_TOKENS = 131_072
NUM_TILES = 8
SECTION = 16_384
MOST_TOKENS = 2**24

TILED = Levers(num_tiles=NUM_TILES)
LEVERS = {
    "none": Levers(),
    "offload": Levers(offloads=True),
    "tiles": TILED,
    "tiles, offload": Levers(num_tiles=NUM_TILES, offloads=True),
}
NUM_REPEATS = 7


def gib(num_bytes: float) -> str:
    """Return GiB with one decimal."""
    return f"{num_bytes / GIB:.1f}"


def phases() -> Iterator[Mapping[str, str]]:
    """Yield what holds the memory of each model without levers."""
    for name, size in MODELS.items():
        memory = update_memory(size, NUM_TOKENS, state_bytes=STATES["none"])
        row = {"model": name, "weights, gradients": gib(memory.states), "Adam": gib(12 * size.num_parameters)}
        row |= {"checkpoints": gib(memory.checkpoints), "MLP": gib(memory.mlp), "attention": gib(memory.attention)}
        yield row | {"head": gib(memory.head), "peak without Adam": gib(memory.total)}


def levers() -> Iterator[Mapping[str, str]]:
    """Yield the peak of every model under every set of levers, without Adam."""
    for name, size in MODELS.items():
        row = {"model": name}
        for lever, each in LEVERS.items():
            row[lever] = gib(update_memory(size, NUM_TOKENS, state_bytes=STATES["none"], levers=each).total)
        yield row


def relays() -> Iterator[Mapping[str, str]]:
    """Yield the memory of a tree with paths of `NUM_TOKENS` tokens, in sections of several capacities."""
    for name in ("0.6B", "8B"):
        size = MODELS[name]
        for on_host in (False, True):
            relay = Relay(NUM_TOKENS, on_host=on_host)
            row = {"model": name, "store": "host" if on_host else "device"}
            for capacity in (SECTION, 65_536):
                memory = update_memory(size, capacity, state_bytes=STATES["none"], levers=TILED, relay=relay)
                row["keys and values"] = gib(memory.relayed)
                row[f"C = {capacity:,}"] = gib(memory.total)
            yield row


def longest(memory_gib: float) -> Iterator[Mapping[str, str]]:
    """Yield the most tokens, in thousands, that fit into a card less what is reserved."""
    memory_bytes = (1 - RESERVED_SHARE) * memory_gib * GIB
    for name, size in MODELS.items():
        for states in ("offloaded", "on the card"):
            state_bytes = STATES[states]
            row = {"model": name, "Adam": states}
            for lever in ("none", "tiles", "tiles, offload"):

                def fits(tokens: int, size=size, state_bytes=state_bytes, lever=LEVERS[lever]) -> bool:
                    return update_memory(size, tokens, state_bytes=state_bytes, levers=lever).total <= memory_bytes

                row[lever] = _thousands(largest(fits, limit=MOST_TOKENS))
            for on_host in (False, True):

                def holds(path: int, size=size, state_bytes=state_bytes, on_host=on_host) -> bool:
                    relay = Relay(path, on_host=on_host)
                    memory = update_memory(size, SECTION, state_bytes=state_bytes, levers=TILED, relay=relay)
                    return memory.total <= memory_bytes

                row[f"relayed path, store on {'host' if on_host else 'device'}"] = _thousands(
                    largest(holds, limit=MOST_TOKENS)
                )
            yield row


def _thousands(num_tokens: int) -> str:
    return "-" if num_tokens == 0 else f"{num_tokens / 1000:,.0f}k"


def tables() -> dict[str, str]:
    """Return all tables by title."""
    made = {
        "phases": markdown_table([*phases()]),
        "levers": markdown_table([*levers()]),
        "relay": markdown_table([*relays()]),
    }
    return made | {card: markdown_table([*longest(memory_gib)]) for card, memory_gib in CARDS.items()}


def measure_cost() -> list[dict[str, Any]]:
    """Measure updates of a small model with checkpoints, without tiles and with several numbers of them, in turn."""
    torch.set_num_threads(1)
    register()
    layout = probe_layout(4096, max_path_len=1024)
    plan = AttentionPlan.from_layout(layout, backend="varlen")

    def update(num_tiles: int | None) -> Callable[[], None]:
        model = small_qwen3(256, layers=4, vocab_size=1024, intermediate_size=1024, tie_word_embeddings=False)
        model.set_attn_implementation(ATTENTION_NAME)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if num_tiles is not None:
            tile_modules(model, num_tiles=num_tiles)
        return lambda: tree_forward_log_probs(model, layout, plan=plan).log_probs_T.sum().backward()

    updates = {str(num_tiles): update(num_tiles) for num_tiles in (None, 1, NUM_TILES, 64)}
    times = interleave(updates, repetitions=NUM_REPEATS, num_warmups=1)
    peaks = {name: peak_bytes(run, device=torch.device("cpu")) for name, run in updates.items()}
    return [{"num_tiles": name, "cpu_s": times[name].median_cpu_s, "peak_bytes": peaks[name]} for name in updates]


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--cost", action="store_true", help="measure tiles on this CPU")
    options = parser.parse_args()
    if options.cost:
        updates = measure_cost()
        print_table(updates)
        write_json({"environment": environment(options), "updates": updates}, options.out)
    else:
        for title, table in tables().items():
            print(f"\n{title}\n\n{table}")

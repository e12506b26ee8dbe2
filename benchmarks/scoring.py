"""Seconds and FLOPs of scoring many continuations of one context, on this machine's CPU.

A random Qwen3 of four layers. `one by one` runs context and continuation together, each continuation anew, and projects
only what is read. `cached` runs the context once with transformers' cache, and then each continuation behind it.
`score` is `verl_tree.functional.score`, in one call or in sections of a capacity. The bound is what a perfect sharing
would give: the tokens that `one by one` runs, over those of the tree. A case is appended to `--out` when it is done::

    python benchmarks/scoring.py --out docs/benchmarks/data/scoring.jsonl

`without` scores an answer of 16 tokens behind a prompt and eight notes of 32, and without each of the notes.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from harness import append_record, environment, interleave, new_parser, print_table
from por_models import small_qwen3
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from verl_tree.functional import score, score_without
from verl_tree.tree import TokenForest

VOCABULARY = 4096
LABELS = [17, 23]
CAPACITY = 1024

CASES = {
    "judge: 2,048 + 32 questions of 32, two labels": (2048, 32, 32),
    "choice: 1,024 + 64 answers of 1": (1024, 64, 1),
    "rank: 256 + 16 passages of 256": (256, 16, 256),
}
"""Tokens of the context, continuations, tokens of each."""
WITHOUT = {"without: 2,048 + 8 notes of 32": 2048, "without: 512 + 8 notes of 32": 512}
"""Tokens of the prompt."""


def read(logits_PV: Tensor, continuation: Tensor, *, is_judge: bool) -> Tensor:
    """Return what is read of the distributions before each token, or of that after the last."""
    log_probs_PV = logits_PV.log_softmax(-1)
    return log_probs_PV[-1, LABELS] if is_judge else log_probs_PV.gather(-1, continuation[:, None])[:, 0]


@torch.no_grad()
def one_by_one(model: PreTrainedModel, context: Tensor, continuations: list[Tensor], *, is_judge: bool) -> list[Tensor]:
    """Run context and continuation together."""
    found = []
    for continuation in continuations:
        whole = torch.cat([context, continuation] if is_judge else [context, continuation[:-1]])
        kept = 1 if is_judge else len(continuation)
        logits = model(input_ids=whole[None], use_cache=False, logits_to_keep=kept).logits[0]
        found.append(read(logits, continuation, is_judge=is_judge))
    return found


@torch.no_grad()
def cached(model: PreTrainedModel, context: Tensor, continuations: list[Tensor], *, is_judge: bool) -> list[Tensor]:
    """Run the context once, and each continuation behind its keys and values."""
    cache = DynamicCache(config=model.config)
    before = model(input_ids=context[None], past_key_values=cache, logits_to_keep=1).logits[0]
    found = []
    for continuation in continuations:
        rest = continuation if is_judge else continuation[:-1]
        logits = before
        if len(rest):
            # The call writes into the cache that it is given.
            own = copy.deepcopy(cache)
            kept = 1 if is_judge else 0
            after = model(input_ids=rest[None], past_key_values=own, logits_to_keep=kept).logits[0]
            logits = after if is_judge else torch.cat([before, after])
        found.append(read(logits, continuation, is_judge=is_judge))
    return found


def as_tree(
    model: PreTrainedModel, context: Tensor, continuations: list[Tensor], *, is_judge: bool, capacity: int | None
) -> list[Tensor]:
    """Run the tree."""
    labels = LABELS if is_judge else None
    return score(
        model, context.numpy(), [each.numpy() for each in continuations], labels=labels, capacity=capacity
    ).log_probs


def measure(name: str, model: PreTrainedModel, *, repetitions: int) -> dict[str, object]:
    """Time one case and count its FLOPs."""
    context_len, num, length = CASES[name]
    is_judge = name.startswith("judge")
    generator = torch.Generator().manual_seed(0)
    context, *continuations = (
        torch.randint(VOCABULARY, (size,), generator=generator) for size in (context_len, *[length] * num)
    )
    paths: dict[str, Callable[[], list[Tensor]]] = {
        "one_by_one": partial(one_by_one, model, context, continuations, is_judge=is_judge),
        "cached": partial(cached, model, context, continuations, is_judge=is_judge),
        "score": partial(as_tree, model, context, continuations, is_judge=is_judge, capacity=None),
        f"score_{CAPACITY}": partial(as_tree, model, context, continuations, is_judge=is_judge, capacity=CAPACITY),
    }
    found: dict[str, Tensor] = {}

    def run(path: str) -> None:
        found[path] = torch.stack(paths[path]())

    times = interleave({path: partial(run, path) for path in paths}, repetitions=repetitions, title=f"{name}: ")
    error = max(float((found[path] - found["one_by_one"]).abs().max()) for path in paths)
    assert error < 1e-4, error
    flops = {}
    for path in paths:
        with FlopCounterMode(display=False) as counter:
            paths[path]()
        flops[path] = counter.get_total_flops()
    sequences = [torch.cat([context, each] if is_judge else [context, each[:-1]]).numpy() for each in continuations]
    forest = TokenForest.from_sequences(sequences)
    cpu_s = {path: round(each.median_cpu_s, 3) for path, each in times.items()}
    return {
        "case": name,
        "bound": round(forest.num_flat_tokens / forest.num_tokens, 1),
        **{f"{path}_cpu_s": seconds for path, seconds in cpu_s.items()},
        **{f"{path}_faster": round(cpu_s["one_by_one"] / cpu_s[path], 1) for path in paths if path != "one_by_one"},
        "largest_difference": error,
        "gflops": {path: round(count / 1e9, 2) for path, count in flops.items()},
        "all_cpu_s": {path: each.cpu_s for path, each in times.items()},
    }


def measure_without(name: str, model: PreTrainedModel, *, repetitions: int) -> dict[str, object]:
    """Time an answer without each of eight notes, in one forest and one by one."""
    prompt_len, generator = WITHOUT[name], torch.Generator().manual_seed(0)
    context, answer = (torch.randint(VOCABULARY, (size,), generator=generator) for size in (prompt_len + 256, 16))
    spans = [(start, start + 32) for start in range(prompt_len, prompt_len + 256, 32)]
    variants = [context, *(torch.cat([context[:start], context[end:]]) for start, end in spans)]
    found: dict[str, Tensor] = {}

    def flat() -> None:
        each = [one_by_one(model, variant, [answer], is_judge=False)[0].sum() for variant in variants]
        found["one_by_one"] = torch.stack(each)

    def tree() -> None:
        found["score"] = score_without(model, context.numpy(), spans, answer.numpy())

    paths = {"one_by_one": flat, "score": tree}
    times = interleave(paths, repetitions=repetitions, title=f"{name}: ")
    error = float((found["score"] - found["one_by_one"]).abs().max())
    assert error < 1e-4, error
    forest = TokenForest.from_sequences([torch.cat([variant, answer[:-1]]).numpy() for variant in variants])
    cpu_s = {path: round(each.median_cpu_s, 3) for path, each in times.items()}
    return {
        "case": name,
        "bound": round(forest.num_flat_tokens / forest.num_tokens, 1),
        **{f"{path}_cpu_s": seconds for path, seconds in cpu_s.items()},
        "score_faster": round(cpu_s["one_by_one"] / cpu_s["score"], 1),
        "largest_difference": error,
        "all_cpu_s": {path: each.cpu_s for path, each in times.items()},
    }


def main() -> None:
    """Measure all cases."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("cases", nargs="*", default=[*CASES, *WITHOUT], help=f"of {[*CASES, *WITHOUT]}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = small_qwen3(256, layers=4, vocab_size=VOCABULARY, tie_word_embeddings=False, pad_token_id=0).eval()
    rows = []
    for name in options.cases:
        record = (measure_without if name in WITHOUT else measure)(name, model, repetitions=options.repetitions)
        append_record(record | {"environment": environment(options)}, options.out)
        rows.append({key: value for key, value in record.items() if key != "all_cpu_s"})
    print_table(rows)


if __name__ == "__main__":
    main()

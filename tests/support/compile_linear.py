"""A program that compiles the fused log-prob kernels ahead of time, without a GPU, and prints results as JSON lines.

    python tests/support/compile_linear.py '[{"kernel": "normalizer", "capability": 90, "dtype": "bf16",
        "config": [128, 256, 64, 8, 3], "options": ["entropy", "softcap", "bias"]}]'

It is a program because TRITON_INTERPRET must not be set. Arguments are specialised as in a launch. TRITON_CACHE_DIR
must be an empty folder, as for `compile_kernels.py`.
"""

import json
import re
import sys

from compile_kernels import compile_and_measure
from triton.compiler import ASTSource

from verl_tree.functional import linear_log_probs_kernels
from verl_tree.functional.linear_arguments import (
    GROUP,
    LABEL_BLOCK,
    LABEL_HIDDEN_BLOCK,
    PAIR_BLOCK,
    LinearConfig,
)

INT64_POINTERS = {"position", "label", "pair_start"}
NUMBERS = {"num_positions", "num_words", "num_pairs", "num_columns", "hidden_size", "span", "word_start",
           "position_start", "stride_p", "stride_v"}  # fmt: skip
OPTIONS = {"entropy": {"moment_out", "entropy", "grad_entropy", "grad_entropy_sum"}, "softcap": {"softcap"},
           "bias": {"bias"}}  # fmt: skip
"""Arguments that are None, and so no arguments of the compiled kernel, where a call does not ask for the option."""


def compile_one(case: dict) -> dict:
    """Compile one kernel for one target and measure the result."""
    kernel = getattr(linear_log_probs_kernels, case["kernel"] + "_kernel")
    config = LinearConfig(*case["config"])
    makes_logits = case["kernel"] in ("normalizer", "grad_logits")
    constants = {"POSITION_BLOCK": config.position_block, "WORD_BLOCK": config.word_block, "GROUP": GROUP,
                 "HIDDEN_BLOCK": config.hidden_block if makes_logits else LABEL_HIDDEN_BLOCK, "PRECISION": "ieee",
                 "BLOCK": LABEL_BLOCK if case["kernel"] == "label" else PAIR_BLOCK}  # fmt: skip
    absent = {name for option, names in OPTIONS.items() if option not in case["options"] for name in names}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in absent or name in constants:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        elif makes_logits and name in ("hidden", "weight"):
            rows = config.position_block if name == "hidden" else config.word_block
            signature[name] = f"tensordesc<{case['dtype']}[{rows}, {config.hidden_block}]>"
        elif name in NUMBERS:
            signature[name] = "i32"
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            is_input = name in ("hidden", "weight", "bias", "grad_logits")
            signature[name] = "*" + ("i64" if name in INT64_POINTERS else case["dtype"] if is_input else "fp32")
            attributes[place,] = [["tt.divisibility", 16]]
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    measured, ttgir = compile_and_measure(source, capability=case["capability"], options=options)
    pending = map(int, re.findall(r"pendings = (\d+)", ttgir))
    return case | measured | {"open_products": max(pending, default=0)}


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(compile_one(case)), flush=True)

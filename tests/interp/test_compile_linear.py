"""The fused log-prob kernels, compiled ahead of time for a Hopper GPU, without one."""

from kernel_cases import compiled

from verl_tree.functional.linear_arguments import HOPPER_CONFIG, HOPPER_NARROW_CONFIG, SMALL_CONFIG

HOPPER_SHARED_BYTES = 227 * 1024
SMALL_SHARED_BYTES = 99 * 1024
PLAIN, OTHERS = [(), ("entropy",)], [("entropy", "softcap"), ("entropy", "bias"), ("entropy", "softcap", "bias")]


def measure(asked, tmp_path):
    return compiled(asked, tmp_path, program="compile_linear.py")


def cases(kernels, *, config, dtype="bf16", options=PLAIN):
    target = {"capability": 90, "dtype": dtype, "config": config}
    return [target | {"kernel": kernel, "options": chosen} for kernel in kernels for chosen in options]


def test_the_kernels_that_make_logits(tmp_path):
    """Products on the matrix units, a product always open while the next is issued, nothing spilled."""
    makes_logits = ("normalizer", "grad_logits")
    asked = [
        *cases(makes_logits, config=HOPPER_CONFIG),
        *cases(makes_logits, config=HOPPER_NARROW_CONFIG, options=OTHERS),
        *cases(makes_logits, config=HOPPER_CONFIG, dtype="fp16", options=PLAIN[1:]),
    ]
    for one in measure(asked, tmp_path):
        assert one["wgmma"] > 0, one
        assert one["mma"] == 0, one
        assert one["tma_copies"] > 0, one
        assert one["open_products"] == 1, one
        assert one["advisories"] == [], one
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= HOPPER_SHARED_BYTES, one


def test_the_other_kernels_and_the_other_configuration(tmp_path):
    others = cases(("label", "pair_gradient", "label_gradient"), config=HOPPER_CONFIG, options=OTHERS[-1:])
    small = cases(("normalizer", "grad_logits"), config=SMALL_CONFIG, options=OTHERS[-1:])
    for one in measure([*others, *small], tmp_path):
        assert one["advisories"] == [], one
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= SMALL_SHARED_BYTES, one

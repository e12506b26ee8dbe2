"""The check of the backends finds what it is there for: one wrong pair, and a kernel that does not repeat itself."""

import check_attention
import gpu_stages
import numpy as np
import pytest
import report_gpu
import torch
from check_attention import judge, make_oracle
from check_cases import BASIC, BF16, FORESTS, FP32, LONG, SECTIONS, WAVES, Layer, cases, plan_of
from check_long import check_long, sample_queries
from flash_rounding import mean_error, rounded_attention, worst_token_error
from harness import append_record, read_records
from tree_calls import random_inputs, results_of, visible_pairs

from verl_tree.attention import BACKENDS, AttentionPlan

LAYER = Layer(BF16, 64, (2, 1))


@pytest.fixture(scope="module")
def star_case():
    """Return a small star: its plan, inputs, gradient of the output and oracle."""
    plan = AttentionPlan.from_subtree_end(np.array([450] * 300 + [350] * 50 + [450] * 100, dtype=np.int32))
    inputs, grad_out = random_inputs(LAYER, plan, device="cpu")
    return plan, inputs, grad_out, make_oracle(LAYER, plan, inputs, grad_out)


def judged(star_case, change):
    """Judge a correct kernel whose mask `change` has changed in place."""
    plan, inputs, grad_out, oracle = star_case
    visible_QT = visible_pairs(plan)
    change(visible_QT)
    return judge([rounded_attention(inputs, grad_out, visible_QT, scale=64**-0.5)], oracle, must_repeat=False)


def drop_first_key_of_some(visible_QT):
    visible_QT[399::400, 0] = False


def leak_one_key(visible_QT):
    visible_QT[400, 325] = True  # from one branch into the other


def lose_the_diagonal_of_one(visible_QT):
    visible_QT[225, 225] = False


def test_a_correct_kernel_passes(star_case):
    assert judged(star_case, lambda _: None)["passed"]


@pytest.mark.parametrize("change", [drop_first_key_of_some, leak_one_key, lose_the_diagonal_of_one])
def test_one_wrong_pair_fails(star_case, change):
    record = judged(star_case, change)
    assert not record["passed"]
    # The mean over all tokens does not see it: that is why the worst token is asked.
    means = [name for name in record["errors"] if name.endswith("mean")]
    assert all(record["errors"][name] <= record["limits"][name] for name in means)


def test_other_bits_fail_where_they_are_promised(star_case):
    _, inputs, grad_out, oracle = star_case
    run = rounded_attention(inputs, grad_out, visible_pairs(star_case[0]), scale=64**-0.5)
    other = run | {"dv": run["dv"].clone()}
    other["dv"][5, 0, 3] = other["dv"][5, 0, 3].nextafter(torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert judge([run, other], oracle, must_repeat=False)["passed"]
    record = judge([run, other], oracle, must_repeat=True)
    assert not record["repeats"]
    assert not record["passed"]


def test_an_element_that_was_not_written_fails(star_case):
    _, inputs, grad_out, oracle = star_case
    run = rounded_attention(inputs, grad_out, visible_pairs(star_case[0]), scale=64**-0.5)
    run["dk"][7, 0, 0] = torch.nan
    assert not judge([run], oracle, must_repeat=False)["passed"]


@pytest.mark.parametrize("asked", [{}, {"window": 40}, {"softcap": 2.0}, {"window": 40, "softcap": 2.0, "sinks": True}])
def test_the_rounded_reference_is_attention(asked):
    """In float64, where nothing is rounded, against the dense backend and autograd."""
    layer = Layer(FP32, 16, (4, 2), **asked)
    plan = plan_of("section of chain", device="cpu")
    inputs, grad_out = random_inputs(layer, plan, device="cpu")
    inputs, grad_out = [each.double() for each in inputs], grad_out.double()
    want = results_of("dense", layer, plan, inputs, grad_out)
    visible_QT = visible_pairs(plan, window=layer.window)
    got = rounded_attention(inputs, grad_out, visible_QT, scale=0.25, softcap=layer.softcap)
    assert set(got) == set(want)
    assert all(worst_token_error(got[name], want[name]) < 1e-12 for name in want)


def test_errors_by_hand():
    want = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]], dtype=torch.float64)  # norms 5 and 1, mean square 13
    got = want + torch.tensor([[[0.0, 0.0]], [[0.0, 0.5]]])
    assert worst_token_error(got, want) == pytest.approx(0.5 / 13**0.5)
    assert mean_error(got, want) == pytest.approx((0.25 / 2) ** 0.5 / 13**0.5)
    zero = torch.zeros(1, 1, 4, dtype=torch.float64)  # counts as if its elements were 1, so its norm 2
    assert worst_token_error(zero + 1e-7, zero) == pytest.approx(1e-7)


def test_one_token_passes_in_float32():
    """Its gradients of queries and keys are zero, so a relative error of them would be arbitrary."""
    plan, layer = plan_of("one token", device="cpu"), Layer(FP32, 64)
    inputs, grad_out = random_inputs(layer, plan, device="cpu")
    runs = [results_of("varlen", layer, plan, inputs, grad_out)]
    assert judge(runs, make_oracle(layer, plan, inputs, grad_out), must_repeat=False)["passed"]


def test_the_long_check_compares_backends_and_samples(tmp_path, monkeypatch):
    plan = plan_of("131k", device="cpu", small=True)
    keywords = {"folder": tmp_path, "must_repeat": True}
    assert check_long("varlen", LAYER, plan, **keywords)["passed"]
    record = check_long("dense", LAYER, plan, **keywords)
    assert record["passed"]
    assert "dk of varlen" in record["errors"]

    def wrong(q_QHD, k_THD, v_THD, plan, *, options):
        """Let the last query see nothing of the first key."""
        out_QHD = BACKENDS["varlen"].attend(q_QHD, k_THD, v_THD, plan, options=options)
        first_THD = torch.cat((torch.ones_like(v_THD[:1]), torch.zeros_like(v_THD[1:])))
        return (
            out_QHD
            - 0.05
            * (v_THD * first_THD)[0].repeat_interleave(2, 0)
            * (torch.arange(len(q_QHD)) == len(q_QHD) - 1)[:, None, None]
        )

    monkeypatch.setitem(BACKENDS, "dense", type(BACKENDS["dense"])(wrong, lambda *_, **__: []))
    assert not check_long("dense", LAYER, plan, **keywords)["passed"]


def test_the_long_check_samples_where_errors_are_largest():
    plan = plan_of("131k", device="cpu", small=True)
    sampled = sample_queries(plan).tolist()
    assert len(set(sampled)) == len(sampled) >= 200
    assert set(range(32)) <= set(sampled)
    assert set(range(plan.num_queries - 32, plan.num_queries)) <= set(sampled)


def test_cases_come_in_order_of_value():
    ordered = cases()
    assert len(set(ordered)) == len(ordered)
    assert {case.layer for case in ordered[: len(FORESTS)]} == {BASIC}
    first = {}
    for number, case in enumerate(ordered):
        first.setdefault((case.layer.dtype, case.layer.head_dim), number)
    assert first["bfloat16", 128] < first["bfloat16", 64] < first["float16", 128] < first["bfloat16", 256]
    waves = [case for case in ordered if case.forest in WAVES]
    assert {case.num_runs for case in waves} == {3}
    long = [case for case in ordered if case.is_long]
    assert {case.forest for case in long} == {*LONG, "section of 131k"}
    sections = {case.forest for case in ordered if case.forest.startswith("section")}
    assert sections == {f"section of {name}" for name in SECTIONS}


def test_the_report_says_what_failed(tmp_path, capsys):
    folder = tmp_path / "correctness"
    named = {"kind": "case", "dtype": "bfloat16", "head_dim": 64, "heads": [8, 2]}
    named |= {"window": None, "softcap": None, "sinks": False, "deterministic": False, "forest": "chain"}
    results = {"repeats": True, "must_repeat": True}
    records = [
        {"backend": "triton", "errors": {"dq worst": 0.1}, "limits": {"dq worst": 0.2}, "passed": True, **results},
        {"backend": "triton", "errors": {"dq worst": 0.5}, "limits": {"dq worst": 0.2}, "passed": False, **results},
        {"backend": "fa4", "refused": ["it is not installed"]},
        {"backend": "varlen", "error": "RuntimeError: no", "passed": False},
    ]
    for record in records:
        append_record(named | record, folder / "check.jsonl")
    append_record({"kind": "end", "num_failed": 2, "num_not_run": 3}, folder / "check.jsonl")
    rule = {"backend": "fla", "dtype": "bfloat16", "heads": [32, 128, 128], "passed": False}
    timed = {"shape": "deep", "rows": "tree", "tokens": 9, "nodes": 3, "calls": 2, "peak_bytes": None}
    for record in (
        {"kind": "rule", "forest": "star", "errors": {"dk": 0.3, "dg": 0.1}, "limits": {"dk": 0.2, "dg": 0.1}, **rule},
        {"kind": "rule", "forest": "deep", "error": "RuntimeError: no", **rule},
        {"kind": "rule", "forest": "deep", **rule, "refused": ["no CUDA"]},
        {"kind": "rule_time", **timed, "backend": "fla", "forward_ms": 1.25, "backward_ms": 2.5},
    ):
        append_record(record, folder / "recurrence.jsonl")
    rules = read_records(folder / "recurrence.jsonl")
    assert [row["worst error / limit"] for row in report_gpu.rules_table(rules)] == ["1.50", "-"]
    assert [row["backward_ms"] for row in report_gpu.rule_times_table(rules)] == ["2.50"]
    far_off = {"log_probs": 0.1, "control": 0.17, "grad_norm": 0.0}
    for record in (
        {"engine": "megatron", "passed": False, "ranks": 1, "differences": far_off},
        {"engine": "veomni", "passed": True, "skipped": "2 ranks on 1 GPU"},
    ):
        append_record({"kind": "engine", **record}, folder / "engines.jsonl")
    machine = gpu_stages.Machine("cpu", 2, tmp_path)
    append_record(gpu_stages._machine_record(machine, "correctness"), folder / "machine.jsonl")
    append_record({"job": "check-fa4", "status": "died", "exit_status": -9}, folder / "jobs.jsonl")
    append_record({"kind": "environment"}, folder / "model-tiny.jsonl")
    rows = {row["backend"]: row for row in report_gpu.cases_table(read_records(folder / "check.jsonl"))}
    assert (rows["triton"]["passed"], rows["triton"]["run"], rows["triton"]["worst error / limit"]) == (1, 2, "2.50")
    assert (rows["fa4"]["refused"], rows["varlen"]["raised"]) == (1, 1)
    report_gpu.report(tmp_path)
    printed = capsys.readouterr().out
    assert str(folder / "model-tiny.jsonl") in printed
    assert "What jobs that died or ran out of time had not reached" in printed
    for part in (
        "REHEARSAL",
        "; fa4: ",
        "died",
        "5.0e-01 > 2.0e-01",
        "RuntimeError: no",
        "fa4: it is not installed",
        "fla: no CUDA",
        "1.7e-01",
        "2 ranks on 1 GPU",
        "3 cases",
    ):
        assert part in printed


def test_the_layers_report_compares_with_the_fastest_flat_contender():
    shared = {"kind": "layer", "shape": "star", "queries": 10, "visible_pairs": 1, "visited_pairs": 2}
    shared |= {"forward_tflops": 1.0, "backward_tflops": 1.0, "peak_bytes": 10**9}
    times = {"fa4 flat": (10.0, 30.0), "aten flat": (20.0, 40.0), "triton": (4.0, 6.0), "triton, section": (1.0, 1.0)}
    records = [{**shared, "contender": "triton", "forward_ms": 99.0, "backward_ms": 99.0}]  # of an earlier stage
    records += [
        {**shared, "contender": name, "forward_ms": forward, "backward_ms": backward}
        for name, (forward, backward) in times.items()
    ]
    rows = {row["contender"]: row["flat / this"] for row in report_gpu.layers_table(records)}
    assert rows == {"fa4 flat": "1.00", "aten flat": "0.67", "triton": "4.00", "triton, section": "-"}


def test_kernels_are_compiled_by_all_workers_once():
    wanted = cases()
    shares = [check_attention._kernels_of(wanted, index, 8) for index in range(8)]
    layers = [case.layer for share in shares for case in share]
    assert len(layers) == len(set(layers))
    assert set(layers) == {case.layer for case in wanted if not case.is_long}
    assert shares[0][0].layer == BASIC

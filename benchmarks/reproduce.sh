#!/usr/bin/env bash
# Makes the data and figures of docs/experiments.md anew on a CPU, one experiment after the other. Two cores that do
# nothing else take about an hour.
#
#   benchmarks/reproduce.sh                       all, into runs/reproduce
#   benchmarks/reproduce.sh figure8 scoring       only these
#   OUT=docs benchmarks/reproduce.sh figure8      in the place of what is committed
#
# Data go to $OUT/benchmarks/data, figures to $OUT, and what the programs print beside them to the screen. What was
# measured is kept: a command that was stopped goes on where it was. Remove $OUT to measure again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
source scripts/steps.sh
PATH=$PWD/.venv/bin:$PATH
OUT=$(realpath -m "${OUT:-runs/reproduce}")
DATA=$OUT/benchmarks/data
mkdir -p "$DATA"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD WANDB_MODE=offline

SHAPES=(star tau2 tree_search caterpillar tool_fan_out chain)

# Each function is an experiment; its name is what the command line takes.

figure8() { # Tree Training, figure 8 a to c
  local por="python benchmarks/por.py --device cpu --threads 1 --seconds 1200 --micro-batch-tokens 2048 --flat-kernels sdpa"
  local drawn="$por --flat-tokens 8192 --out $DATA/por_cpu.jsonl"
  $drawn --error-tokens 0 --models 7M --capacities ''
  $drawn --error-tokens 0 --models 0.6B-layer --capacities '' --repetitions 2 --flat-pors 0.2,0.8
  $drawn --error-tokens 0 --models 0.6B-layer --capacities 1.5 --repetitions 1 --flat-pors 0.2,0.8
  $drawn --error-tokens 2048 --models 7M --pors 0.8,0.4,0.92 --repetitions 1 --methods single_path,deepest_first,heuristic,exact
  $drawn --error-tokens 0 --models 7M --pors '' --repetitions 1 --stored docs/benchmarks/data/trees/*.parquet
  $por --flat-tokens 16384 --error-tokens 0 --models 7M --capacities 1.5 --repetitions 1 --pors 0.8,0.92 --out "$DATA/por_cpu_16k.jsonl"
  [[ -e $DATA/por_engines.json ]] ||
    python benchmarks/update.py --overlap 0.2 0.8 0.92 --branches 64 --branch-len 128 --layers 2 --vocab-size 1024 \
      --repetitions 1 --threads 1 --out "$DATA/por_engines.json"
  python benchmarks/report_por.py "$DATA/por_cpu.jsonl" --engines "$DATA/por_engines.json" --plot "$OUT/por_cpu.png"
}

prompts() { # Prefix Grouper, figures 2 and 3
  python benchmarks/shared_prefix.py --out "$DATA/prefix_grouper.jsonl"
  python benchmarks/report_shared_prefix.py "$DATA/prefix_grouper.jsonl" --plot "$OUT/prefix_grouper.png"
}

memory() { # over the overlap ratio and for agents' shapes
  local por="python benchmarks/por.py --device cpu --threads 1 --seconds 1200 --memory --flat-tokens 8192 --flat-kernels same"
  $por --models 0.3M --capacities 1.5 --out "$DATA/por_memory.jsonl"
  $por --models 0.3M --pors '' --shapes "${SHAPES[@]}" --capacities 1,0.5,0.25 --out "$DATA/por_memory.jsonl"
  python benchmarks/report_por.py "$DATA/por_memory.jsonl" --plot "$OUT/por_memory.png"
}

relay() { # time of sections for agents' shapes, with gradient checkpointing and without
  local por="python benchmarks/por.py --device cpu --threads 1 --seconds 1200 --error-tokens 0 --models 7M --capacities 1,0.5,0.25"
  por+=" --flat-kernels sdpa --micro-batch-tokens 2048 --repetitions 1"
  $por --pors '' --shapes "${SHAPES[@]}" --out "$DATA/por_shapes.jsonl"
  $por --pors '' --shapes star caterpillar --no-checkpointing --out "$DATA/por_shapes_kept.jsonl"
  python benchmarks/report_por.py "$DATA/por_shapes.jsonl"
  python benchmarks/report_por.py "$DATA/por_shapes_kept.jsonl"
}

fine_tuning() { # Tree Training, SFT
  [[ -e $DATA/sft.jsonl ]] || python benchmarks/sft.py --flat-rows 4 --repetitions 2 --out "$DATA/sft.jsonl"
}

scoring() { # Prefix Grouper, section 4.1
  [[ -e $DATA/scoring.jsonl ]] || python benchmarks/scoring.py --out "$DATA/scoring.jsonl"
}

packing() { # Tree Training, section 2.2
  [[ -e $DATA/packing.json ]] ||
    python benchmarks/packing.py optimum capacity --out "$DATA/packing.json" --plot "$OUT/packing.png"
}

parity() { # Tree Training, unchanged training curves
  python benchmarks/parity.py --out "$DATA" --work "$OUT/runs/parity"
  (cd "$DATA" && verl-tree plot parity_tree.jsonl --baseline parity_flat.jsonl --names tree,flat \
    --out "$OUT/parity.png" --keys "actor/loss,actor/grad_norm,actor/entropy,actor/kl_loss,tree/session_reward/mean,val-core/memory_qa/reward/mean@1,weights/moved,weights/apart")
}

rows() { # all rows of a session against its longest
  python benchmarks/paired_runs.py --out "$DATA" --work "$OUT/runs/paired"
  (cd "$DATA" && verl-tree plot rows_all_1.jsonl --baseline rows_all_[23].jsonl rows_longest_[123].jsonl \
    --names all,all,all,longest,longest,longest --out "$OUT/rows.png" \
    --keys val-core/memory_qa/reward/mean@1,tree/session_reward/mean,tree/flat_tokens)
}

EXPERIMENTS=(figure8 prompts memory relay fine_tuning scoring packing parity rows)
(($# == 0)) && set -- "${EXPERIMENTS[@]}"
for name; do
  [[ " ${EXPERIMENTS[*]} " == *" $name "* ]] || fail "no experiment $name; there are ${EXPERIMENTS[*]}"
done
NUM_STEPS=$#
for name; do
  show "$name" "$name"
done
echo "As committed, and as measured now:"
python benchmarks/compare_data.py docs/benchmarks/data "$DATA"
echo "data: $DATA, figures: $OUT"

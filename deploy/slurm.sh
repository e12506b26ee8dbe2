#!/usr/bin/env bash
# Trains on several nodes under SLURM: one Ray process a node, the driver on the first.
#
#   sbatch --nodes=2 deploy/slurm.sh data.train_files=/shared/train.parquet data.val_files=/shared/val.parquet \
#       actor_rollout_ref.model.path=/shared/Qwen3-8B
#
# VENV names the environment with verl_tree; the nodes must see it and the model under the same paths. Inside a container,
# put its command (`apptainer exec --nv IMAGE`) into LAUNCH. PROFILE=cpu trains without GPUs. RAY_OPTIONS are more options
# of `ray start`, such as --num-cpus=16 where a node has fewer cores than verl asks places for.
#SBATCH --job-name=verl-tree
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
set -euo pipefail

VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv}
PORT=${PORT:-6379}
read -ra LAUNCH <<<"${LAUNCH:-}"
read -ra RAY_OPTIONS <<<"${RAY_OPTIONS:-}"
GPUS=${SLURM_GPUS_ON_NODE:?run this with sbatch --gpus-per-node=...}

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
HEAD_IP=$(srun --nodes=1 --ntasks=1 --nodelist="$HEAD" hostname --ip-address | awk '{ print $1 }')

# Only who has the token may use the cluster. It is made anew for each job, and srun hands it to the nodes.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PATH=$VENV/bin:$PATH

# on NODE command...: runs it there, beside what already runs there. SLURM names a node's GPUs for AMD's libraries, too,
# unless it knows whose they are, and verl refuses to have both names.
on() {
  local node=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --gpus-per-node="$GPUS" "${LAUNCH[@]}" \
    env -u ROCR_VISIBLE_DEVICES "$@"
}

on "$HEAD" ray start --block --head --node-ip-address="$HEAD_IP" --port="$PORT" --num-gpus="$GPUS" "${RAY_OPTIONS[@]}" &
until on "$HEAD" ray status --address="$HEAD_IP:$PORT" >/dev/null 2>&1; do
  kill -0 $! || { echo "Ray did not start on $HEAD" >&2; exit 1; }
  sleep 2
done
for node in "${NODES[@]:1}"; do
  on "$node" ray start --block --address="$HEAD_IP:$PORT" --num-gpus="$GPUS" "${RAY_OPTIONS[@]}" &
done

# verl refuses to start with fewer GPUs than it is told of, so all nodes must have joined.
export RAY_ADDRESS=$HEAD_IP:$PORT
COUNT="import ray; ray.init(log_to_driver=False); print(int(ray.cluster_resources().get('GPU', 0)))"
until [[ $(on "$HEAD" python -c "$COUNT" | tail -n 1) == $((GPUS * ${#NODES[@]})) ]]; do
  sleep 2
done

# The job ends with the driver, and SLURM ends Ray with the job.
on "$HEAD" python -m verl_tree.main_ppo profile="${PROFILE:-gpu}" trainer.nnodes="${#NODES[@]}" trainer.n_gpus_per_node="$GPUS" "$@"

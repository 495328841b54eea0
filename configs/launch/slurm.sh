#!/usr/bin/env bash
# A run on four nodes of eight GPUs under SLURM, one process a node.
#
#   sbatch configs/launch/slurm.sh configs/NAME.toml [more arguments of sat-jax train]
#
#SBATCH --job-name=sat-jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
# Ten minutes before the limit, to the steps: the optimizer step is finished, the cut saved, exit code 75.
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: sbatch $0 CONFIG [ARGUMENTS]" >&2
  exit 2
fi

# Of a step with several tasks JAX takes the coordinator and the numbers from SLURM by itself. By default it would give
# each task one GPU.
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
code=0
srun --kill-on-bad-exit=0 sat-jax train "$@" --runs "${SAT_RUNS:-$SLURM_SUBMIT_DIR/runs}" --quiet || code=$?

if [ "$code" -eq 75 ]; then  # asked to stop: the same job goes on from the newest cut
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

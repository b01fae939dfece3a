#!/bin/bash
# One long run as N jobs that follow each other, for a Slurm that never queues a job again. Each job
# continues where the one before it was interrupted; when the run finishes, fails or is cancelled,
# the remaining jobs are cancelled.
#   launch/chain.sh 5 -N2 --ntasks-per-node=8 --gpus-per-node=8 -t 4:00:00 launch/run.slurm arch=trm data_path=… shards=16
# Arguments after the number go to sbatch.
set -eu
number=${1:?how many jobs? launch/chain.sh 5 -N2 … launch/run.slurm …}
shift
[[ $number =~ ^[1-9][0-9]*$ ]] || {
  echo "$number: must be a number of jobs; launch/chain.sh 5 …" >&2
  exit 2
}
(($#)) || { echo "give what follows sbatch; launch/chain.sh 5 -N2 launch/run.slurm …" >&2; exit 2; }

CHAIN=lockstep-chain-$(date +%m%d-%H%M%S)-$$ # the name by which the jobs find each other
export CHAIN
trap 'echo "to cancel all of them: scancel --name=$CHAIN" >&2' EXIT
after=
for ((i = 1; i <= number; i++)); do
  job=$(sbatch --parsable --no-requeue ${after:+"--dependency=afterany$after"} --job-name="$CHAIN" "$@")
  job=${job%%;*} # with several clusters: job;cluster
  echo "$job"
  after+=:$job # after all of them: cancelling a job that waits must not start the next
done

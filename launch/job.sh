# What the batch scripts share; they source it. `to_its_end COMMAND …` runs a command, hands signals on to it, and queues the job again
# if the run was interrupted and has come further. Variables: PYTHON (.venv/bin/python), CHAIN (set by chain.sh).
# shellcheck shell=bash
PYTHON=${PYTHON:-.venv/bin/python}
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer asks sbatch for it
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
export LOCKSTEP_STATUS=$PWD/.lockstep-$job.json # torchrun and mpirun lose exit statuses: the run says here how it ended

to_its_end() {
  rm -f "$LOCKSTEP_STATUS"
  local command='' status late
  trap 'kill -USR1 $command 2>/dev/null' USR1 # time is nearly over, or other jobs go first: save, to be queued again
  trap 'kill -TERM $command 2>/dev/null' TERM # save, and that is all
  "$@" & # in the background: bash heeds a signal only while it waits
  command=$!
  while wait $command; status=$?; kill -0 $command 2>/dev/null; do :; done # each signal cuts `wait` short
  wait $command; late=$?
  [ $late = 127 ] || status=$late # it ended between a signal and the question whether it lives
  trap '' USR1
  trap - TERM
  conclude "$status"
  exit "$status"
}

conclude() {
  local reason
  reason=$(sed -n 's/^ *"reason": "\(.*\)",$/\1/p' "$LOCKSTEP_STATUS" 2>/dev/null)
  if asks_for_more || { [ "$1" != 0 ] && preempted; }; then
    rm -f "$LOCKSTEP_STATUS"
    if [ -n "${CHAIN:-}" ] && [ -z "$(squeue --noheader --states=PENDING --name="$CHAIN")" ]; then
      echo "job $job: ${reason:-interrupted}; it was the last job of the chain: begin another one with the same line"
    elif [ -n "${CHAIN:-}" ]; then
      echo "job $job: ${reason:-interrupted}; the next job of $CHAIN goes on"
    elif scontrol requeue "$job"; then
      echo "job $job: ${reason:-interrupted}; queued again, to start in about two minutes; at once: scontrol update JobId=$job StartTime=now"
      sleep 300 # Slurm ends this script when it takes the job back
    else
      echo "job $job: ${reason:-interrupted}; Slurm does not queue it again here, so do it yourself, or begin with launch/chain.sh"
    fi
    return
  fi
  rm -f "$LOCKSTEP_STATUS"
  [ "$1" = 0 ] || echo "job $job: ended with status $1${reason:+ ($reason)}; not queued again"
  [ -z "${CHAIN:-}" ] || scancel --state=PENDING --name="$CHAIN"
}

asks_for_more() { grep -q '"state": "requeue"' "$LOCKSTEP_STATUS" 2>/dev/null; }

# By a job that goes first: also a run that was still starting is to come back, and where a site sends SIGTERM, one that was stopped.
preempted() { scontrol show job "$job" | grep -q 'PreemptTime=[0-9]'; }

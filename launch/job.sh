# Shared by the batch scripts, which source it. `to_its_end COMMAND …` runs a command, forwards
# signals to it, and queues the job again if the run was interrupted and has taken steps.
# Variables: PYTHON (.venv/bin/python), CHAIN (set by chain.sh).
# shellcheck shell=bash
PYTHON=${PYTHON:-.venv/bin/python}
# srun no longer takes it from sbatch
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# torchrun and mpirun lose exit statuses, so the run writes how it ended
export LOCKSTEP_STATUS=$PWD/.lockstep-$job.json

# Prints one field of what Slurm knows about this job.
field() { scontrol --oneliner show job "$job" | grep -o " $1=[^ ]*" | cut -d= -f2; }

# The environment has the size that sbatch asked for; `scontrol update` may have changed it before
# this start.
fit_allocation() {
  local tasks
  [ -n "${SLURM_NTASKS:-}" ] || return 0
  tasks=$(field NumTasks)
  [ "${tasks:-$SLURM_NTASKS}" != "$SLURM_NTASKS" ] || return 0
  export SLURM_NTASKS=$tasks SLURM_NPROCS=$tasks
  unset SLURM_NTASKS_PER_NODE # Slurm spreads the tasks as they fit
}

to_its_end() {
  rm -f "$LOCKSTEP_STATUS"
  local command='' status late
  fit_allocation
  trap 'kill -USR1 $command 2>/dev/null' USR1 # out of time, or preempted: save, to be queued again
  trap 'kill -TERM $command 2>/dev/null' TERM # save and stop
  "$@" & # in the background: bash handles a signal only while it waits
  command=$!
  # each signal interrupts `wait`
  while wait $command; status=$?; kill -0 $command 2>/dev/null; do :; done
  wait $command; late=$?
  [ $late = 127 ] || status=$late # it ended between a signal and `kill -0`
  trap '' USR1
  trap - TERM
  conclude "$status"
  exit "$status"
}

conclude() {
  local reason
  reason=$(sed -n 's/^ *"reason": "\(.*\)",$/\1/p' "$LOCKSTEP_STATUS" 2>/dev/null)
  if queued_already; then
    rm -f "$LOCKSTEP_STATUS"
    echo "job $job: ${reason:-interrupted}; Slurm has queued it again"
    return
  fi
  if asks_for_more || { [ "$1" != 0 ] && preempted; }; then
    rm -f "$LOCKSTEP_STATUS"
    if [ -n "${CHAIN:-}" ] && [ -z "$(squeue --noheader --states=PENDING --name="$CHAIN")" ]; then
      echo "job $job: ${reason:-interrupted}; that was the last job of the chain: start another one with the same line"
    elif [ -n "${CHAIN:-}" ]; then
      echo "job $job: ${reason:-interrupted}; the next job of $CHAIN goes on"
    elif scontrol requeue "$job"; then
      echo "job $job: ${reason:-interrupted}; queued again, to start in about two minutes; at once: scontrol update JobId=$job StartTime=now"
      sleep 300 # Slurm ends this script when it takes the job back
    else
      echo "job $job: ${reason:-interrupted}; Slurm refuses to queue it again, so submit it again, or use launch/chain.sh"
    fi
    return
  fi
  rm -f "$LOCKSTEP_STATUS"
  [ "$1" = 0 ] || echo "job $job: ended with status $1${reason:+ ($reason)}; not queued again"
  [ -z "${CHAIN:-}" ] || scancel --state=PENDING --name="$CHAIN"
}

# By `scontrol requeue`, or because a node failed.
queued_already() { local restarts; restarts=$(field Restarts); [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; }

asks_for_more() { grep -q '"state": "requeue"' "$LOCKSTEP_STATUS" 2>/dev/null; }

# A run that was still starting comes back, too; and where a site sends SIGTERM, so does one that
# stopped.
preempted() { [[ $(field PreemptTime) == [0-9]* ]]; }

#!/bin/bash
# One run under Open MPI or MPICH, on this machine, on several hosts, or on the nodes of a job's
# allocation.
#   RANKS=4 launch/mpirun.sh experiment=demo
#   RANKS=16 HOSTS=node1:8,node2:8 launch/mpirun.sh arch=trm data_path=… epochs=50000 shards=16
# All arguments go to pretrain.py, which all hosts must see at the same path. Variables: RANKS (1),
# HOSTS, MPIRUN (mpirun), OMP_NUM_THREADS (1), MASTER_ADDR (an address of the first host, if it
# cannot be derived), PYTHON (.venv/bin/python).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$root/.venv/bin/python}
command -v "$PYTHON" >/dev/null || {
  echo "PYTHON=$PYTHON: not found; run make setup, or give another, for example PYTHON=python3" >&2
  exit 2
}
MPIRUN=${MPIRUN:-mpirun}
ranks=${RANKS:-1}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || {
  echo "RANKS=$ranks: must be a number of processes; for example RANKS=2" >&2
  exit 2
}
command -v "$MPIRUN" >/dev/null || {
  echo "MPIRUN=$MPIRUN: not found; install Open MPI or MPICH, or load its module" >&2
  exit 2
}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

kind=$("$MPIRUN" --version 2>&1 || true)
case $kind in
*"Open MPI"* | *OpenRTE*)
  # ranks may share cores, get these variables, and have 10 s to save when they are asked to end
  options=(--oversubscribe --bind-to none -x OMP_NUM_THREADS --mca odls_base_sigkill_timeout 10)
  [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
  [ -z "${MASTER_ADDR:-}" ] || options+=(-x MASTER_ADDR)
  [ -z "${LOCKSTEP_STATUS:-}" ] || options+=(-x LOCKSTEP_STATUS)
  [ -z "${HOSTS:-}" ] || options+=(--host "$HOSTS")
  ;;
*HYDRA* | *MPICH* | *Intel*)
  options=()
  if [ -n "${HOSTS:-}" ]; then
    options+=(-hosts "$HOSTS")
    first=${HOSTS%%,*}
    export MASTER_ADDR=${MASTER_ADDR:-${first%%:*}}
  fi
  ;;
*) echo "MPIRUN=$MPIRUN: neither Open MPI nor MPICH" >&2; exit 2 ;;
esac
exec "$MPIRUN" ${options[@]+"${options[@]}"} -n "$ranks" "$PYTHON" "$root/pretrain.py" "$@"

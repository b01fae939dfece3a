#!/bin/bash
# One run on this machine: one rank per GPU, or RANKS of them.
#   launch/local.sh experiment=demo
#   RANKS=4 RESTARTS=3 launch/local.sh arch=trm data_path=… epochs=50000
# All arguments go to pretrain.py. Variables: RANKS, RESTARTS (0: how often torchrun restarts the
# ranks), PYTHON (.venv/bin/python).
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
PYTHON=${PYTHON:-$root/.venv/bin/python}
command -v "$PYTHON" >/dev/null || {
  echo "PYTHON=$PYTHON: not found; run make setup, or give another, for example PYTHON=python3" >&2
  exit 2
}
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
fi
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || {
  echo "RANKS=$ranks: must be a number of processes; for example RANKS=2" >&2
  exit 2
}
[[ ${RESTARTS:-0} =~ ^[0-9]+$ ]] || {
  echo "RESTARTS=$RESTARTS: must be a number; for example RESTARTS=3" >&2
  exit 2
}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

[ "$ranks" -gt 1 ] || [ "${RESTARTS:-0}" != 0 ] || exec "$PYTHON" "$root/pretrain.py" "$@"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$ranks" --max-restarts="${RESTARTS:-0}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$root/pretrain.py" "$@"

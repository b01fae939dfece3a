#!/bin/bash
# One run on hosts that come and go. Start the store on a host that stays, then this script on each
# host, at any time:
#   launch/elastic.sh store                                                        # prints the STORE to give
#   STORE=host0:29400 launch/elastic.sh arch=trm data_path=… epochs=50000          # on each host
# All arguments go to pretrain.py. Variables: STORE; RANKS (per host: its GPUs, or 1); NODES (64:
# hosts at most); RUN (lockstep: a name for each run that shares a store); RESTARTS (20: how many
# failures a host's ranks survive); WAIT_S (10: how long a start waits for more hosts); PORT (29400:
# the store's); PYTHON (.venv/bin/python).
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
PYTHON=${PYTHON:-$root/.venv/bin/python}
command -v "$PYTHON" >/dev/null || {
  echo "PYTHON=$PYTHON: not found; run make setup, or give another, for example PYTHON=python3" >&2
  exit 2
}
number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "$1=$2: must be a number; for example $1=$3" >&2; exit 2; }; }

if [ "$*" = store ]; then
  number PORT "${PORT:=29400}" 29400
  exec "$PYTHON" -c '
import os, signal, socket, sys
from torch.distributed import TCPStore
try:
    store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
except Exception:
    sys.exit(f"PORT={sys.argv[1]}: cannot listen there; give another, for example PORT=29401")
print(f"STORE={socket.gethostname()}:{sys.argv[1]}", flush=True)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: os._exit(0))
signal.pause()' "$PORT"
fi

[[ ${STORE:-} =~ ^.+:[0-9]+$ ]] || {
  echo "STORE=${STORE:-}: must be HOST:PORT, as launch/elastic.sh store prints it" >&2
  exit 2
}
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
fi
number RANKS "${RANKS:=$((gpus > 0 ? gpus : 1))}" 2
number NODES "${NODES:=64}" 4
number RESTARTS "${RESTARTS:=20}" 20
number WAIT_S "${WAIT_S:=10}" 10
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > RANKS ? cores / RANKS : 1))}

# without this variable PyTorch 2.13 loses all hosts when one joins (DistStoreError … MASTER_ADDR)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$PYTHON" -m torch.distributed.run --nnodes="1:$NODES" --nproc-per-node="$RANKS" --max-restarts="$RESTARTS" \
  --rdzv-backend=c10d --rdzv-id="${RUN:-lockstep}" --rdzv-endpoint="$STORE" \
  --rdzv-conf="is_host=0,last_call_timeout=$WAIT_S" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$root/pretrain.py" "$@"

"""Which process am I? Reads the environment of every launcher we support; imports nothing heavy."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from utils.errors import ConfigError

# name -> (rank, world size, local rank) variables, most specific launcher first: mpirun inside an srun
# allocation sets both families, and the innermost launcher is the one that numbered the processes.
FAMILIES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mvapich2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
# The batch script and an interactive shell carry these instead of a step number; they are no srun step.
NOT_A_STEP = {"", "batch", "extern", "interactive", "4294967291", "4294967292", "4294967290"}


@dataclass(frozen=True)
class Launch:
    """The place of one process in its run."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def detect(env: Mapping[str, str]) -> Launch:
    """The launcher, rank, world size and local rank that the environment tells."""
    for name, keys in FAMILIES.items():
        if not _applies(name, env, keys):
            continue
        rank, world_size = (_integer(env, key) for key in keys[:2])
        local_rank = _integer(env, keys[2]) if keys[2] in env else _local_rank_of(name, env, rank)
        if not 0 <= rank < world_size:
            raise ConfigError(f"{keys[0]}={rank} is outside 0..{world_size - 1} ({keys[1]}={world_size}); unset both or correct them")
        return Launch(name, rank, world_size, local_rank)
    return Launch()


def rendezvous(env: Mapping[str, str], launch: Launch, parent: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, derived from the job where the launcher gives none."""
    address = env.get("MASTER_ADDR") or _address(env, launch)
    if address is None:
        raise ConfigError(
            f"MASTER_ADDR is not set and {launch.launcher} on several hosts does not tell it; export MASTER_ADDR=<host of rank 0>"
        )
    if "MASTER_PORT" in env:
        return address, _integer(env, "MASTER_PORT")
    job = next((env[k] for k in ("SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_ID_NAMESPACE") if k in env), str(parent))
    step = env.get("SLURM_STEP_ID", "")
    return address, 20000 + zlib.crc32(f"{job}.{step}".encode()) % 20000


def _applies(name: str, env: Mapping[str, str], keys: tuple[str, str, str]) -> bool:
    if not (env.get(keys[0]) and env.get(keys[1])):
        return False
    if name == "torchrun":
        return "TORCHELASTIC_RUN_ID" in env
    if name == "srun":
        return env.get("SLURM_STEP_ID", "") not in NOT_A_STEP
    return True


def _integer(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise ConfigError(f"{key}={env[key]!r} is not a whole number; unset it or let the launcher set it") from None


def _local_rank_of(name: str, env: Mapping[str, str], rank: int) -> int:
    per_node = next((env[k] for k in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") if k in env), None)
    if per_node is not None:
        return rank % int(per_node)
    if name == "env":
        raise ConfigError(f"RANK={rank} is set but LOCAL_RANK is not; export LOCAL_RANK=<number of this process on its host>")
    return rank


def _address(env: Mapping[str, str], launch: Launch) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    if launch.launcher == "openmpi":
        uri = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_SERVER_URI41") or ""
        if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env.get("OMPI_COMM_WORLD_SIZE"):
            found = re.search(r"tcp4?://([0-9.]+)", uri)
            return found.group(1) if found else None
        return "127.0.0.1"
    local_size = env.get("MPI_LOCALNRANKS") or env.get("MV2_COMM_WORLD_LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE")
    if local_size is None or int(local_size) == launch.world_size:
        return "127.0.0.1"
    return None


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login1` gives `gpu03`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist)
    if not found:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodelist!r} cannot be read; export MASTER_ADDR=<first host>")
    head, number, tail = found.groups()
    return head + (number or "") + tail

"""Reads which rank this process is from the environment of any launcher; imports nothing slow."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from utils.errors import ConfigError


class Family(NamedTuple):
    """The variables in which one launcher numbers its processes."""

    rank: str
    world_size: tuple[str, ...]  # the first one that is set counts
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# The innermost launcher is first, because its numbers are the true ones: mpirun in a Slurm job
# starts its daemons with srun, so its ranks see SLURM_PROCID too, and torchrun's workers see the
# variables of whatever started torchrun.
FAMILIES = {
    "torchrun": Family("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "openmpi": Family(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "mvapich2": Family(
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    "mpich": Family(
        "PMI_RANK",
        ("PMI_SIZE",),
        # with srun --mpi=pmi2 only Slurm gives the local rank
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    "srun": Family(
        "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()
    ),
    "env": Family("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
}
# SLURM_STEP_ID in a batch script, an interactive shell and the like, which are no steps of srun
NOT_A_STEP = {"", "batch", "extern", "interactive", *map(str, range(2**32 - 7, 2**32))}
# Variables that identify a job: all of its ranks derive one port from them
JOB_NAMES = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
    "mvapich2": ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "mpich": ("PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "srun": ("SLURM_JOB_ID",),
}
# launchers that stay the parents of their ranks
PARENTS = ("torchrun", "openmpi", "mvapich2", "mpich", "srun")
PARENT = os.getppid()  # when this program began
DEFAULT_PORT = 29500  # PyTorch's own, if nothing identifies the job
FIRST_PORT, PORTS = 20000, 12000  # below the range from which Linux takes its ephemeral ports


@dataclass(frozen=True)
class Launch:
    """Which process of the run this is."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def orphaned(self) -> bool:
        """True if the launcher was this process's parent and has died."""
        return self.launcher in PARENTS and os.getppid() != PARENT


def detect(env: Mapping[str, str]) -> Launch:
    """The launcher, rank, world size and local rank, from the environment."""
    for name, family in FAMILIES.items():
        size_key = next((key for key in family.world_size if env.get(key)), None)
        if not env.get(family.rank) or (name == "srun" and not _in_step(env)):
            continue
        if name == "torchrun" and not env.get("TORCHELASTIC_RUN_ID"):
            continue
        if size_key is None:
            if name != "env":
                continue
            raise ConfigError(
                f"RANK={env['RANK']} is set but WORLD_SIZE is not; export WORLD_SIZE=<number of"
                " processes> or unset RANK"
            )
        rank, world_size = int(env[family.rank]), int(env[size_key])
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"{family.rank}={rank} is outside 0..{world_size - 1} ({size_key}={world_size});"
                " unset both or correct them"
            )
        return Launch(name, rank, world_size, _local_rank(name, env, rank, world_size))
    return Launch()


def master_address(env: Mapping[str, str], launch: Launch, parent: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, derived from the job if the launcher gives none; `parent` is the
    parent's process id.
    """
    one_host = on_one_host(env, launch)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else _first_address(env, launch))
    if address is None:
        raise ConfigError(
            f"MASTER_ADDR is not set and {launch.launcher} on several hosts does not tell it;"
            " export MASTER_ADDR=<host of rank 0>"
        )
    if env.get("MASTER_PORT"):
        if not 0 < (port := int(env["MASTER_PORT"])) < 1 << 16:
            raise ConfigError(f"MASTER_PORT={port} is not a port; export one from 1024 to 65535")
        return address, port
    job = next((env[key] for key in JOB_NAMES.get(launch.launcher, ()) if env.get(key)), None)
    if launch.launcher == "srun":
        # another step of the same job needs another port
        job = f"{job}.{env.get('SLURM_STEP_ID') or env.get('SLURM_STEPID')}"
    if job is None and launch.launcher in PARENTS and one_host and not env.get("MASTER_ADDR"):
        job = str(parent)  # one process started all ranks of this host
    return address, DEFAULT_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login1` gives `gpu03`."""
    first = re.match(r"(?:[^,\[\]]|\[[\d,-]+\])+", nodelist)
    if not first:
        raise ConfigError(
            f"SLURM_JOB_NODELIST={nodelist!r} cannot be read; export MASTER_ADDR=<first host>"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _in_step(env: Mapping[str, str]) -> bool:
    return env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "")) not in NOT_A_STEP


def _local_rank(name: str, env: Mapping[str, str], rank: int, world_size: int) -> int:
    for key in FAMILIES[name].local_rank:
        if env.get(key):
            return int(env[key])
    local_size = _local_size(name, env)
    if local_size:
        return rank % local_size
    if name == "env" and world_size > 1:
        raise ConfigError(
            f"RANK={rank} is set but LOCAL_RANK is not; export LOCAL_RANK=<number of this process"
            " on its host>"
        )
    return rank


def _local_size(name: str, env: Mapping[str, str]) -> int | None:
    return next((int(env[key]) for key in FAMILIES[name].local_size if env.get(key)), None)


def on_one_host(env: Mapping[str, str], launch: Launch) -> bool:
    """True if all ranks run on this host, as far as the environment tells."""
    if launch.world_size == 1:
        return True
    local_size = _local_size(launch.launcher, env)
    if local_size is not None:
        return local_size == launch.world_size
    if _in_step(env):
        return env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")) == "1"
    return launch.rank == launch.local_rank


def _first_address(env: Mapping[str, str], launch: Launch) -> str | None:
    # Only srun's own ranks share a step; others may run in the step of a daemon, which lists the
    # daemon's hosts.
    step = launch.launcher == "srun" or (
        launch.launcher == "mpich" and "SLURM_LOCALID" in env and "MPI_LOCALRANKID" not in env
    )
    nodes = (env.get("SLURM_STEP_NODELIST") if step else None) or env.get("SLURM_JOB_NODELIST")
    host = first_host(nodes) if nodes else None
    if host and _is_known(host):
        return host
    # Slurm may know nodes by names that do not resolve. A batch script runs on the first node, and
    # so do the srun and mpirun in it. srun gives the address of that node to everything it starts,
    # MPICH's daemons included; Open MPI 4 gives the address at which mpirun listens.
    if launch.launcher == "openmpi" and (
        uri := re.search(r"tcp://([0-9.]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    ):
        return uri.group(1)
    return env.get("SLURM_LAUNCH_NODE_IPADDR") or host

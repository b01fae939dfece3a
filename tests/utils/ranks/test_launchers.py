"""Launchers over faked environments: what each sets, alone and nested in another."""

from __future__ import annotations

import pytest

from utils.errors import ConfigError
from utils.ranks import launchers
from utils.ranks.launchers import (
    DEFAULT_PORT,
    FIRST_PORT,
    PORTS,
    Launch,
    detect,
    first_host,
    master_address,
)


def variables(line: str) -> dict[str, str]:
    """The variables of a line such as `A=1 B=2`."""
    return dict(word.split("=", 1) for word in line.split())


SALLOC = variables("SLURM_JOB_ID=77 SLURM_JOB_NODELIST=gpu[03-04] SLURM_NTASKS=8 SLURM_NNODES=2")
BATCH = SALLOC | variables("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
STEP = SALLOC | variables("""
    SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NODELIST=gpu[03-04]
""")
# A daemon that mpirun started by srun, one a node, on all nodes but mpirun's own: its children
# inherit its step.
DAEMON = SALLOC | variables("""
    SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=gpu04
""")


@pytest.fixture(autouse=True)
def known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster, whose nodes know each other by name."""
    monkeypatch.setattr(launchers, "_is_known", lambda host: True)


def torchrun(rank: int = 3, size: int = 8, local: int = 1) -> dict[str, str]:
    return variables(f"""
        RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} LOCAL_WORLD_SIZE=2
        TORCHELASTIC_RUN_ID=none MASTER_ADDR=gpu03 MASTER_PORT=29512
    """)


def openmpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return variables(f"""
        OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} OMPI_COMM_WORLD_LOCAL_RANK={local}
        OMPI_COMM_WORLD_LOCAL_SIZE={local_size} PMIX_NAMESPACE=2023292929 PMIX_RANK={rank}
        OMPI_MCA_ess_base_jobid=2023292929 PMIX_SERVER_URI41=2023292928.0;tcp4://127.0.0.1:45695
        OMPI_MCA_orte_hnp_uri=2023292928.0;tcp://192.0.2.7,10.1.0.7:56619;tcp6://[fd00::2]:33829
    """)


def mpich(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return variables(f"""
        PMI_RANK={rank} PMI_SIZE={size} MPI_LOCALRANKID={local} MPI_LOCALNRANKS={local_size}
    """)


def mvapich2(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return variables(f"""
        MV2_COMM_WORLD_RANK={rank} MV2_COMM_WORLD_SIZE={size} MV2_COMM_WORLD_LOCAL_RANK={local}
        MV2_COMM_WORLD_LOCAL_SIZE={local_size}
    """)


def plain(rank: int, size: int, local: int) -> dict[str, str]:
    return variables(f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local}")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch()),
        ({"RANK": "", "WORLD_SIZE": ""}, Launch()),
        ({"WORLD_SIZE": "8"}, Launch()),
        (torchrun(), Launch("torchrun", 3, 8, 1)),
        (openmpi(3, 4, 1, 2), Launch("openmpi", 3, 4, 1)),
        (mvapich2(3, 4, 1, 2), Launch("mvapich2", 3, 4, 1)),
        (mpich(3, 4, 1, 2), Launch("mpich", 3, 4, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}, Launch("mpich", 3, 4, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, Launch("mpich", 3, 4, 1)),
        (STEP, Launch("srun", 5, 8, 1)),
        ({k: v for k, v in STEP.items() if k != "SLURM_STEP_NUM_TASKS"}, Launch("srun", 5, 8, 1)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6"}, Launch("srun", 5, 6, 1)),  # srun -n 6 in a job of 8
        (plain(3, 4, 1), Launch("env", 3, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("env", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Launch("env", 3, 4, 1)),
        # plain python inside an allocation, in its batch script, or in its interactive shell is one
        # process
        (SALLOC, Launch()),
        (BATCH, Launch()),
        ({**BATCH, "SLURM_STEP_ID": "4294967290"}, Launch()),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, Launch()),
        ({**BATCH, "SLURM_STEP_ID": "batch"}, Launch()),
        # one launcher inside another: the inner one numbered the processes
        ({**BATCH, **openmpi(3, 4, 1, 2)}, Launch("openmpi", 3, 4, 1)),
        ({**DAEMON, **openmpi(3, 4, 1, 2)}, Launch("openmpi", 3, 4, 1)),
        ({**DAEMON, **mpich(3, 4, 1, 2)}, Launch("mpich", 3, 4, 1)),
        ({**STEP, **torchrun()}, Launch("torchrun", 3, 8, 1)),
        ({**openmpi(1, 2, 0, 1), **torchrun()}, Launch("torchrun", 3, 8, 1)),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("mpich", 5, 8, 1)),  # srun --mpi=pmi2
        ({**plain(0, 1, 0), **openmpi(3, 4, 1, 2)}, Launch("openmpi", 3, 4, 1)),
    ],
)
def test_detect(env: dict[str, str], expected: Launch) -> None:
    assert detect(env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 is set but LOCAL_RANK is not"),
        (plain(4, 4, 0), "RANK=4 is outside 0..3"),
        ({**STEP, "SLURM_PROCID": "-1"}, "SLURM_PROCID=-1 is outside 0..7"),
    ],
)
def test_detect_names_what_is_wrong(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        detect(env)
    assert "\n" not in str(caught.value)


def meeting(env: dict[str, str], parent: int = 1) -> tuple[str, int]:
    return master_address(env, detect(env), parent)


@pytest.mark.parametrize(
    ("env", "address"),
    [
        (openmpi(1, 2, 1, 2), "127.0.0.1"),
        (openmpi(3, 4, 1, 2), "192.0.2.7"),
        ({**BATCH, **openmpi(3, 4, 1, 2)}, "gpu03"),
        ({**DAEMON, **openmpi(3, 4, 1, 2)}, "gpu03"),
        ({**BATCH, **openmpi(1, 2, 1, 2)}, "127.0.0.1"),
        (mvapich2(1, 2, 1, 2), "127.0.0.1"),
        (mpich(1, 2, 1, 2), "127.0.0.1"),
        ({**DAEMON, **mpich(3, 4, 1, 2)}, "gpu03"),
        (STEP, "gpu03"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu04", "SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, "gpu03"),
        (plain(1, 2, 1), "127.0.0.1"),
        (torchrun(), "gpu03"),
        ({**openmpi(3, 4, 1, 2), "MASTER_ADDR": "login7"}, "login7"),
    ],
)
def test_address_of_rank_0(env: dict[str, str], address: str) -> None:
    assert meeting(env)[0] == address


def test_a_name_that_only_slurm_knows_is_replaced_by_the_address_of_the_batch_scripts_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launchers, "_is_known", lambda host: host == "gpu04")
    step = {**STEP, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3"}
    assert meeting(step)[0] == "10.0.0.3"
    assert meeting({**step, "SLURM_STEP_NODELIST": "gpu04,gpu05"})[0] == "gpu04"
    assert meeting(STEP)[0] == "gpu03"
    assert (
        meeting({**BATCH, **openmpi(3, 4, 1, 2)})[0]
        == meeting({**DAEMON, **openmpi(3, 4, 1, 2)})[0]
        == "192.0.2.7"
    )


def test_given_addresses_and_ports_win() -> None:
    assert meeting(torchrun()) == ("gpu03", 29512)
    assert meeting({**plain(1, 2, 0), "MASTER_ADDR": "a"}) == ("a", DEFAULT_PORT)
    # two shells of one host have two parents
    assert meeting(plain(1, 2, 1), 1) == meeting(plain(1, 2, 1), 2) == ("127.0.0.1", DEFAULT_PORT)
    with pytest.raises(ConfigError, match="MASTER_PORT=70000 is not a port"):
        meeting({**plain(1, 2, 1), "MASTER_PORT": "70000"})


@pytest.mark.parametrize("env", [mvapich2(3, 4, 1, 2), mpich(3, 4, 1, 2), plain(3, 4, 1)])
def test_several_hosts_need_an_address(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="export MASTER_ADDR="):
        meeting(env)


def test_all_ranks_of_a_job_meet_at_one_port_and_other_jobs_elsewhere() -> None:
    """Ranks on several hosts have different parents, and mpirun's own host has no step."""
    across = [{**BATCH, **openmpi(0, 4, 0, 2)}, {**DAEMON, **openmpi(3, 4, 1, 2)}]
    assert len({meeting(env, parent) for parent, env in enumerate(across)}) == 1
    steps = [{**STEP, "SLURM_PROCID": str(rank)} for rank in range(8)]
    assert len({meeting(env, parent) for parent, env in enumerate(steps)}) == 1
    intel = [{**BATCH, **mpich(0, 4, 0, 2)}, {**DAEMON, **mpich(3, 4, 1, 2)}]
    assert len({meeting(env, parent) for parent, env in enumerate(intel)}) == 1

    others = [
        across[0],
        {**across[0], "PMIX_NAMESPACE": "9"},
        STEP,
        {**STEP, "SLURM_STEP_ID": "1"},
        {**STEP, "SLURM_JOB_ID": "78"},
    ]
    ports = [meeting(env)[1] for env in others] + [
        meeting(mpich(0, 2, 0, 2), parent)[1] for parent in (1, 2)
    ]
    assert len(set(ports)) == len(ports)
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("login1,gpu[03-05]", "login1"),
        ("node-a[10-12]-ib", "node-a10-ib"),
        ("rack[1-2]n[03-05]", "rack1n03"),
        ("gpu3.cluster.example", "gpu3.cluster.example"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host

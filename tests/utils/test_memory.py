"""Memory that is free, on machines that tell it in several ways."""

import sys
from pathlib import Path

import pytest

from utils.memory import free_bytes

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"}
JOB = {  # of 1000 bytes, a hundred of its 700 are of files
    **MACHINE,
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "1000\n",
    "sys/fs/cgroup/job/memory.current": "700\n",
    "sys/fs/cgroup/job/memory.stat": "anon 600\ninactive_file 100\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "600\n",
}
CONTAINER = {  # which does not see the group that it is in by its name on the host
    **MACHINE,
    "proc/self/cgroup": "4:memory:/docker/1f\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [({}, sys.maxsize), (MACHINE, 4000 * 1024), (JOB, 400), (CONTAINER, 1700)],
    ids=["unknown", "machine", "job", "container"],
)
def test_the_narrowest_limit_counts(files: dict[str, str], free: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path) == free

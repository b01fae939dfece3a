"""How much memory the machine has to give."""

from __future__ import annotations

import sys
from pathlib import Path

# the files of a cgroup, in its second and first version: the limit, what is used, and in its
# statistics what the kernel keeps of files until other processes need the memory
NAMES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_bytes(root: Path = Path("/")) -> int:
    """Returns how much more memory this process may take: what is left of the machine's, or of its
    job's or container's share. Where the system does not tell, as on macOS, that is a huge number.
    """
    left = [sys.maxsize]
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        left += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kind, path = line.split(":", 2)
            if kind in NAMES:
                top = root / "sys/fs/cgroup" / kind
                own = top / path.lstrip("/")
                groups = [each for each in (own, *own.parents) if each.is_relative_to(top)]
                left += [_left_in(group, *NAMES[kind]) for group in groups]
    except (OSError, ValueError):
        pass
    return min(left)


def _left_in(group: Path, limit: str, used: str, cached: str) -> int:
    """Returns how much more memory a cgroup may take."""
    try:
        most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
        numbers = (group / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no such group in this container, or no limit: "max"
        return sys.maxsize
    return most - now + int(numbers[numbers.index(cached) + 1])

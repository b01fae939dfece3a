"""Decides what `compile=auto` means for a run on a CPU.

Compiling changes bits, so a run decides once, before its first step, and its configuration keeps
the answer. A run is long enough or not by its configuration alone, at any number of ranks.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from utils.errors import brief
from utils.ranks.distributed import Dist

# steps from which compiling has been worth its time: nets from the demo's size to HRM's won it back
# after 350 to 1,500
LONG = 5_000


def keep_compiled_code() -> None:
    """Puts PyTorch's cache of compiled code into the user's cache folder, unless the environment
    names a place. Called before anything loads the compiler, which settles it.

    The default lies in the folder for temporary files. A home may be shared by machines of
    different kinds, and code is compiled for one.
    """
    try:
        about = Path("/proc/cpuinfo").read_bytes().partition(b"\n\n")[0]
        kind = b"".join(
            line for line in about.splitlines() if line.startswith((b"model", b"flags"))
        )
    except OSError:
        kind = platform.node().encode()
    with suppress(OSError):  # without a home it stays there
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(base) / "lockstep" / f"inductor-{sha256(kind).hexdigest()[:12]}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def is_long(cfg: Any, dtype: torch.dtype, steps: int) -> bool:
    """Returns whether a run on a CPU should be compiled: in float32 little is gained, and `exact`
    needs the same code for every rank's bits.
    """
    return dtype == torch.bfloat16 and steps >= LONG and not (cfg.exact or cfg.eval_only)


def compile_if_possible(
    dist: Dist,
    one_pass: Callable[[], object],
    compile_net: Callable[[], None],
    say: Callable[[str], None],
) -> bool:
    """Compiles on all ranks, and returns whether it worked: a machine may lack a C++ compiler, or
    Python's headers. `one_pass` is tried, and compiled in it.
    """
    say("compiling the net, as the run is long (compile=false does without) …")
    one_pass()  # an error of the net itself is no reason to go on
    torch.compiler.set_stance("default")
    compile_net()
    start, problem = time.perf_counter(), ""
    try:
        one_pass()
    except Exception as error:  # compilers have many; the net itself has just done the same
        problem = brief(error).partition(" Set TORCH")[0]  # advice for PyTorch's developers
    problem = next(filter(None, dist.all_gather_text(problem)), "")
    if problem:
        torch.compiler.set_stance("force_eager")
        say(f"not compiled: {problem}; the run goes on without")
    else:
        say(f"compiled in {time.perf_counter() - start:.0f} s; results differ by rounding")
    return not problem

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

# Four nets won back the time of compiling after 1 to 7 · 10¹³ operations (see RESULTS.md), and
# evaluations are compiled, too. The bound on steps spares short runs the counting.
LEAST_STEPS, LEAST_OPERATIONS = 2_000, 2e14
LEAST_GAIN = 1.1
PASSES, ENOUGH_S = 3, 2.0


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


def is_long(
    cfg: Any, dtype: torch.dtype, steps: int, operations_per_step: Callable[[], float]
) -> bool:
    """Returns whether a run may win by compiling: in float32 it does not, and `exact` needs the
    same code for every rank's bits.
    """
    return (
        dtype == torch.bfloat16
        and not (cfg.exact or cfg.eval_only)
        and steps >= LEAST_STEPS
        and steps * operations_per_step() >= LEAST_OPERATIONS
    )


def compile_if_faster(
    dist: Dist,
    one_pass: Callable[[], object],
    compile_net: Callable[[], None],
    say: Callable[[str], None],
) -> bool:
    """Compiles, and returns whether that gained anything; else the run goes on eagerly.

    All ranks compile and take part; rank 0's clock decides. Errors of the compiler are one line.
    """
    say("compiling the net, as the run is long (compile=false does without) …")
    one_pass()  # the first one allocates
    eager_s, compiled_s = _fastest(one_pass), float("inf")
    start, problem = time.perf_counter(), ""
    torch.compiler.set_stance("default")
    compile_net()
    try:
        one_pass()
    except Exception as error:  # compilers have many; the net itself has just done the same
        problem = brief(error).partition(" Set TORCH")[0]  # advice for PyTorch's developers
    else:
        taken_s = time.perf_counter() - start
        compiled_s = _fastest(one_pass)
    problem = next(filter(None, dist.all_gather_text(problem)), "")
    text = dist.broadcast_text(
        f"{eager_s * 1e3:.1f} ms eagerly, {compiled_s * 1e3:.1f} ms compiled"
    )
    gains = bool(dist.broadcast_text("yes" if eager_s >= LEAST_GAIN * compiled_s else ""))
    if gains and not problem:
        say(f"compiled in {taken_s:.0f} s: a pass takes {text}; results differ by rounding")
        return True
    torch.compiler.set_stance("force_eager")
    say(f"not compiled: {problem or f'a pass takes {text}'}; the run goes on without")
    return False


def _fastest(one_pass: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of a few passes, or of one that takes long."""
    taken: list[float] = []
    while len(taken) < PASSES and sum(taken) < ENOUGH_S:
        start = time.perf_counter()
        one_pass()
        taken.append(time.perf_counter() - start)
    return min(taken)

"""The progress bar: tqdm's on a terminal, and a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from tqdm import tqdm

PLAIN_S = 10.0


class ProgressBar:
    """Writes the bar, and through `say` every other line, so that they never mix."""

    def __init__(self, launcher: str = "none", shown: bool = True) -> None:
        # sys.stdout is None if it was closed before the run began
        self._shown = shown and sys.stdout is not None
        known = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        # mpirun gives its ranks a pseudo-terminal even when its own output goes to a file
        mpi = launcher in ("openmpi", "mpich")
        self._animated = self._shown and sys.stdout.isatty() and known and not mpi
        self._bar: tqdm | None = None
        self._drawn = time.monotonic()  # so that the first plain line comes after PLAIN_S

    def update(
        self,
        step: int,
        total: int,
        loss: float | None,
        headline: tuple[str, float | None],
        examples_per_s: float | None,
    ) -> None:
        """Shows where the run is."""
        if not self._shown:
            return
        facts = describe(loss, headline, examples_per_s)
        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=step, unit=" steps", dynamic_ncols=True, leave=True,
                file=sys.stdout, disable=not self._animated,
            )  # fmt: skip
        if self._animated:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update(step - self._bar.n)
        elif step >= total or time.monotonic() - self._drawn >= PLAIN_S:
            self._drawn = time.monotonic()
            self._print(f"{100 * step / max(1, total):3.0f}%  step {step}/{total}  {facts}")

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        if self._shown:
            self._print(text)

    def close(self) -> None:
        """Leaves the bar as it stands and starts a new line."""
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()

    def _print(self, text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        # the reader may have gone (`| head`), the disk be full, or the stream closed
        with suppress(OSError, ValueError):
            tqdm.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
            sys.stdout.flush()


def describe(
    loss: float | None, headline: tuple[str, float | None], examples_per_s: float | None
) -> str:
    """Returns the loss, the headline and the speed; None stands for what is not known yet."""
    name, value = headline
    number = ".1%" if "accuracy" in name else ".4g"
    facts = {
        "loss": None if loss is None else f"{loss:.3g}",
        name.replace("_", " "): None if value is None else format(value, number),
        "examples/s": None if examples_per_s is None else f"{examples_per_s:,.0f}",
    }
    return "  ".join(f"{key} {text}" for key, text in facts.items() if text is not None)

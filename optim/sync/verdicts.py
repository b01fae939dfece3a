"""Reads verdicts on steps late, so that the host does not wait for a step that it just launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from optim.sync.base import Verdict
from utils.errors import RunError
from utils.ranks.notices import NONE, Notices

LAG = {"cuda": 1}  # steps by which a device is behind its host


class Verdicts:
    """The verdicts on the last steps. All ranks read the same verdicts at the same points.

    On CUDA the verdict on a step is read in the next one, when an update that should not have been
    made is already made. This does no harm to a run that then ends, as long as every step is
    settled before anything is logged, evaluated or saved. Where such steps are skipped, the host
    waits.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.lag = LAG.get(device.type, 0) if policy == "raise" else 0
        self._policy = policy
        self._open: deque[tuple[int, Callable[[], Verdict]]] = deque()
        self._notices = NONE

    @property
    def settled(self) -> bool:
        """Returns whether every step so far is known to be finite."""
        return not self._open

    @property
    def noticed(self) -> bool:
        """Returns whether a rank's notice is waiting to be taken."""
        return bool(self._notices)

    def add(self, step: int, read: Callable[[], Verdict]) -> None:
        """Adds the newest step; `read` waits for its verdict."""
        self._open.append((step, read))

    def settle(self, behind: int = 0) -> str:
        """Reads the verdicts on all steps but the last `behind`.

        Raises an error that ends the run, or returns why the newest step must be skipped; empty if
        it need not be.
        """
        while len(self._open) > behind:
            step, read = self._open.popleft()
            verdict = read()
            self._notices += verdict.notices
            if verdict.finite:
                continue
            if self._policy == "raise":
                raise RunError(
                    f"on_nonfinite=raise: step {step}: {verdict.problem}; lower lr, set grad_clip,"
                    " or use on_nonfinite=skip"
                )
            return verdict.problem
        return ""

    def take_notices(self) -> Notices:
        """Returns the notices that all ranks sent with the steps settled since the last call."""
        taken, self._notices = self._notices, NONE
        return taken

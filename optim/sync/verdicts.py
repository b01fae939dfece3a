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

    On CUDA a step's verdict is read during the next step, after its update was made even if it
    should not have been. That does no harm if the run then ends and every verdict is read before
    anything is logged, evaluated or saved. With `on_nonfinite=skip` the run goes on, so the host
    waits for each step's verdict.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.lag = LAG.get(device.type, 0) if policy == "raise" else 0
        self._policy = policy
        self._unread: deque[tuple[int, Callable[[], Verdict]]] = deque()
        self._notices = NONE

    @property
    def all_checked(self) -> bool:
        """Whether the verdict on every step so far has been read."""
        return not self._unread

    @property
    def has_notices(self) -> bool:
        """Whether any rank has sent a notice since the last `take_notices`."""
        return bool(self._notices)

    def add(self, step: int, read: Callable[[], Verdict]) -> None:
        """Adds the newest step; `read` waits for its verdict."""
        self._unread.append((step, read))

    def check(self, except_last: int = 0) -> str:
        """Reads the verdicts on all steps except the last few.

        Returns why the newest step must be skipped, or an empty string; with `on_nonfinite=raise`,
        raises the error that ends the run instead.
        """
        while len(self._unread) > except_last:
            step, read = self._unread.popleft()
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
        """Returns the notices that ranks sent with the steps checked since the last call."""
        notices, self._notices = self._notices, NONE
        return notices

"""How many shards go through at once: asked for, or found by running out of memory."""

from typing import Any

import pytest
import torch

from utils.errors import ConfigError
from utils.plan.attempts import largest_that_fits


class Memory:
    """Room for so many shards, in which an attempt leaves nothing behind."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def __call__(self, shards: int) -> None:
        self.tried.append(shards)
        if shards > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.parametrize(
    ("owned", "room", "tried"),
    [(8, 8, [8]), (8, 7, [8, 4]), (8, 1, [8, 4, 2, 1]), (3, 2, [3, 2])],  # 3: halved upwards
)
def test_it_is_halved_until_it_fits(owned: int, room: int, tried: list[int]) -> None:
    memory = Memory(room)
    assert largest_that_fits(owned, memory, (), "one shard") == tried[-1]
    assert memory.tried == tried


def test_where_nothing_fits_the_line_says_so() -> None:
    line = r"^micro_batch_size=auto: not even one shard of 3 examples fits .*; raise shards"
    with pytest.raises(ConfigError, match=line):
        largest_that_fits(8, Memory(0), (), "one shard of 3 examples")


def test_a_failed_attempt_is_freed_before_the_next() -> None:
    """The error's traceback holds the frames of the attempt, and they hold its tensors."""
    alive: list[Any] = []

    class Held:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def attempt(shards: int) -> None:
        assert not alive, "the former attempt's memory is still taken"
        held = Held()
        if shards > 1:
            raise torch.OutOfMemoryError(f"with {held}")

    assert largest_that_fits(8, attempt, (), "one shard") == 1

"""Nested state: there and back, whole and by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from utils.checkpoint.carries import Carries
from utils.checkpoint.nested import flatten, rebuild, split


@dataclass(frozen=True)
class Carry:
    """As an objective with adaptive computation time has it."""

    state: tuple[Tensor, Tensor]
    steps: Tensor
    halted: Tensor
    batch: dict[str, Tensor]
    extra: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor | None]


def carry(slots: int, start: int = 0) -> Carry:
    """Each slot's values tell which slot it is."""
    slot = torch.arange(start, start + slots)
    state = (slot.view(-1, 1, 1).expand(-1, 2, 3).to(torch.bfloat16), -slot.view(-1, 1).double())
    return Carry(
        state,
        slot.int(),
        slot % 2 == 0,
        {"inputs": slot.view(-1, 1) + torch.arange(4), "ids": slot},
        Pair(slot, [None, slot]),
    )


def assert_same(one: Any, other: Any) -> None:
    left, right = flatten(one), flatten(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def test_names_say_the_way() -> None:
    names = [
        "state/0",
        "state/1",
        "steps",
        "halted",
        "batch/inputs",
        "batch/ids",
        "extra/0",
        "extra/1/1",
    ]
    assert list(flatten(carry(2))) == names
    assert flatten(carry(2))["batch/inputs"].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert flatten(None) == {}
    assert list(flatten(torch.ones(2))) == [""]


def test_there_and_back() -> None:
    old, template = carry(3, start=5), carry(3)
    new = rebuild(template, flatten(old))
    assert isinstance(new, Carry)
    assert isinstance(new.state, tuple)
    assert isinstance(new.extra, Pair)
    assert new.extra.second[0] is None
    assert_same(new, old)
    assert_same(template, carry(3))
    assert rebuild(None, {}) is None
    elsewhere = rebuild({"a": torch.ones(1, device="meta")}, {"a": torch.ones(1)})
    assert elsewhere["a"].device.type == "meta"


@pytest.mark.parametrize("sizes", [(8,), (1,) * 8, (3, 3, 2), (4, 4)])
def test_a_carry_is_cut_by_shard_and_put_together_on_other_ranks(sizes: tuple[int, ...]) -> None:
    whole = carry(16)  # 8 shards of two slots
    shards = split(whole, 8)
    assert [shard.steps.tolist() for shard in shards] == [[2 * i, 2 * i + 1] for i in range(8)]
    parts = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    carries = Carries(parts, lambda: carry(2))
    carries.load({shard: flatten(value) for shard, value in enumerate(shards)})
    for number, part in enumerate(parts):
        assert_same(
            carries.get(number, lambda part=part: carry(2 * len(part))),
            carry(2 * len(part), start=2 * part.start),
        )
    one = Carries([range(8)], lambda: carry(2))
    one.load(carries.state())
    assert_same(one.get(0, lambda: carry(16)), whole)
    carries.put(carry(2 * len(part), start=2 * part.start) for part in parts)
    assert {shard: state["steps"].tolist() for shard, state in carries.state().items()} == {
        i: [2 * i, 2 * i + 1] for i in range(8)
    }


def test_nothing_stays_nothing() -> None:
    assert split(None, 3) == [None, None, None]
    carries = Carries([range(2)], lambda: None)
    carries.load(carries.state())
    assert carries.get(0, lambda: None) is None


def test_what_cannot_be_is_not_done_silently() -> None:
    with pytest.raises(AssertionError, match=r"steps of shape \(3,\) cannot be cut into 2"):
        split({"steps": torch.ones(3)}, 2)
    with pytest.raises(AssertionError, match=r"scale of shape \(\) cannot be cut"):
        split({"scale": torch.ones(())}, 1)
    with pytest.raises(AssertionError, match="two tensors are named a/b"):
        flatten({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(TypeError, match="steps is of type int"):
        flatten({"steps": 3})

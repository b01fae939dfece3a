"""The model of a step on many GPUs, against cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.ring import Links, Timeline

LINKS = Links(within_gb_s=100.0, between_gb_s=10.0, latency_us=5.0, gpus_per_node=4)
# Two buckets of a gigabyte that may leave at 2 and 5 s, the end of a backward of 6 s, an optimizer
# of 1 s, and the last, of nothing
LINE = Timeline(backward_s=6.0, step_s=7.0, buckets=[(2.0, 10**9), (5.0, 10**9), (6.5, 0)])


def test_the_ring_sends_nearly_everything_twice() -> None:
    assert LINKS.all_reduce_s(10**9, 1) == 0, "nobody to send to"
    assert LINKS.all_reduce_s(10**9, 2) == pytest.approx(0.01 + 2 * 5e-6), (
        "a half there, a half back"
    )
    assert LINKS.all_reduce_s(10**9, 4) == pytest.approx(2 * 3 / 4 * 0.01 + 6 * 5e-6)
    assert LINKS.all_reduce_s(10**9, 8) == pytest.approx(2 * 7 / 8 * 0.1 + 14 * 5e-6), (
        "by the slower links, between nodes"
    )
    assert LINKS.all_reduce_s(0, 512) == pytest.approx(1022 * 5e-6), "latency alone"


def test_one_gpu_takes_what_a_process_takes() -> None:
    assert LINE.on(1, LINKS) == LINE.on(1, LINKS, overlaps=False) == 7


@pytest.mark.parametrize(
    ("gb_s", "overlaps", "seconds"),
    [
        (10.0, True, 7.0),  # 0.1 s each, all behind the backward
        (1.0, True, 7.0),  # from 2 to 3 and from 5 to 6: just in time
        (0.5, True, 8.0),  # from 2 to 4 and from 5 to 7: a second is left over
        (0.25, True, 11.0),  # from 2 to 6, and the second one waits for it until 10
        (0.25, False, 15.0),  # both after the backward
    ],
)
def test_buckets_travel_one_by_one_behind_the_backward(
    gb_s: float, overlaps: bool, seconds: float
) -> None:
    assert LINE.on(2, Links(gb_s, gb_s, 0.0, 8), overlaps) == pytest.approx(seconds)


def test_the_last_bucket_waits_for_the_end_of_backward() -> None:
    alone = Timeline(6.0, 7.0, [(2.0, 10**9)])
    assert alone.on(2, Links(1.0, 1.0, 0.0, 8)) == pytest.approx(8.0)


def test_a_faster_device_leaves_less_to_hide_behind() -> None:
    slow, links = LINE.on(2, Links(1.0, 1.0, 0.0, 8)), Links(1.0, 1.0, 0.0, 8)
    assert LINE.faster(1.0).on(2, links) == slow
    assert LINE.faster(7.0).step_s == pytest.approx(1.0)
    assert LINE.faster(1e9).on(2, links) == pytest.approx(2.0), (
        "two gigabytes at a gigabyte a second"
    )

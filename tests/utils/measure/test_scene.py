"""Scenes are small JSON files, and an evaluation leaves only so much of them."""

from __future__ import annotations

import json

import pytest

from utils.measure import scene


def test_a_scene_is_json_that_a_browser_reads() -> None:
    made = scene.scene("a", "bars", "</script>", y=[float("nan"), 1 / 3, {"z": float("inf")}], n=3)
    assert json.loads(made["a.scene.json"]) == {
        "kind": "bars",
        "title": "</script>",
        "y": [None, 0.33333, {"z": None}],
        "n": 3,
    }


def test_as_many_items_as_fit() -> None:
    def made(items: list[str]) -> dict[str, str | bytes]:
        return scene.scene("a", "text", "", items=items)

    kept = json.loads(scene.fitting(["x" * 20_000] * 5, made)["a.scene.json"])["items"]
    assert len(kept) == 2
    assert scene.fitting(["x" * scene.MOST], made) == {}
    assert scene.fitting([], made) == {}


def test_scenes_without_room_are_left_out_and_other_files_stay() -> None:
    files = {"a.scene.json": "x" * 60, "b.json": "x" * 999, "c.scene.json": "x" * 50}
    kept, room = scene.within(files, 100)
    assert ([*kept], room) == (["a.scene.json", "b.json"], 40)
    assert scene.within({"d.scene.json": "x" * 40}, room)[1] == 0


@pytest.mark.parametrize(
    ("last", "most", "wanted"),
    [(1, 32, [1]), (4, 32, [1, 2, 3, 4]), (16, 4, [1, 6, 11, 16]), (9, 1, [9])],
)
def test_numbers_are_spread_evenly(last: int, most: int, wanted: list[int]) -> None:
    assert scene.spread(last, most) == wanted


def test_levels_are_one_character_each() -> None:
    assert scene.levels([-1, 0, 1 / 63, 0.5, 1, 2]) == "AABg//"

"""Scenes drawn in a real browser: the model at work, on the report page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import opened
from utils.measure.scene import levels, scene
from utils.report.__main__ import main
from utils.rundir.folders import CONFIG_FILE, MARK
from utils.rundir.maker import REPORT_FILE

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&lt;b&gt;"
SOLUTION = "1234341221434321"
GIVEN = "12..3.1.2.4..32."
# two cells wrong, then one of them fixed and a right one broken, then all right
ANSWERS = ["1243341221434321", "1234341221434312", SOLUTION]


def board(kind: str, **more: Any) -> dict[str, Any]:
    """An example of each sort, with a hostile caption."""
    solved = {
        "index": 3,
        "solved": True,
        "inputs": GIVEN,
        "labels": SOLUTION,
        "answers": [ANSWERS[0], ANSWERS[1], {"14": "2", "15": "1"}],
        "halting": [0.1, None, 0.9],
        "halt_step": 3,
    }
    unsolved = {**solved, "index": 8, "solved": False, "halt_step": 0}
    unsolved["answers"] = [ANSWERS[0], {}, {}]
    if kind == "maze":
        maze = {"inputs": "S#    # G", "labels": "S# oo #oG"}
        said = ["S# o  #oG", {"4": "o", "5": "o"}, {"5": " "}]
        solved = {**solved, **maze, "answers": said}
        unsolved = {**unsolved, **maze, "answers": ["##   o?oG", {}, {}]}
    if kind == "grid":  # two rows; the last column is beyond the answer
        grid = {"inputs": "012a34", "labels": "01-a3-"}
        said = ["02 13 ", {"1": "1"}, {"3": "a"}]
        solved = {**solved, **grid, "answers": said}
        unsolved = {**unsolved, **grid, "answers": ["02 13 ", {}, {}]}
    side = 4 if kind == "sudoku" else 3
    data = {"board": kind, "side": side, "box": [2, 2] if kind == "sudoku" else None}
    data |= {"rows": 2} if kind == "grid" else {}
    return scene(
        kind, "boards", kind, HOSTILE, **data, steps=[1, 2, 3], examples=[solved, unsolved]
    )


def all_scenes() -> dict[str, Any]:
    """A scene of each kind, hostile texts in every place for one."""
    arc = {"grid": ["01", "23"], "votes": 3, "confidence": 0.5}
    answers = [{**arc, "right": True}, {**arc, "grid": [], "right": False}]
    pair = {"name": HOSTILE, "input": ["0123456789"], "truth": ["01", "23"], "answers": answers}
    good = {"name": HOSTILE, "colour": "good"}
    bars = [
        {**good, "values": [1, 2]},
        {"name": "b", "values": [0, 1], "colour": "red;background:url(http://x.invalid)"},
    ]
    classes = {"name": HOSTILE, "rows": ["0", "1"], "columns": ["0", "1"]}
    gates = {"name": "W", "rows": [0, 1], "columns": [7, 4], "levels": ["/A", "Ag"]}
    image = {"answer": HOSTILE, "truth": 1, "share": 0.4, "index": 9}
    image["pixels"] = levels([0, 0.5, 1, 0])
    by_class = {"row_label": "true class", "column_label": "answer", "shares": True}
    by_feature = {"row_label": "input feature", "column_label": "component"}
    x, percent = {"label": HOSTILE, "values": [1, 2, 3]}, {"percent": True, "min": 0, "max": 1}
    data: dict[str, tuple[str, dict[str, Any]]] = {
        "lines": ("lines", {"x": x, "y": percent, "lines": [{**good, "values": [0.1, None, 0.9]}]}),
        "upright": ("bars", {"x": {"label": HOSTILE, "values": [1, HOSTILE]},
                             "y": {"label": HOSTILE}, "diverging": True, "series": bars}),
        "matrix": ("matrix", {**by_class, "panels": [{**classes, "values": [[3, 1], [0, 5]]}]}),
        "gates": ("matrix", {**by_feature, "panels": [gates]}),
        "images": ("images", {"width": 2, "height": 2, "items": [image]}),
        "arc": ("arc", {"pairs": [{**pair, "votes": 8}]}),
        "text": ("text", {"items": [{"prompt": HOSTILE, "continuation": HOSTILE}]}),
        "table": ("table", {"columns": [HOSTILE, "b"], "percent": [1], "rows": [[HOSTILE, 0.5]]}),
        "unknown": (HOSTILE, {}),
    }  # fmt: skip
    scenes = board("sudoku") | board("maze") | board("grid")
    for name, (kind, facts) in data.items():
        scenes |= scene(name, kind, HOSTILE, **facts)
    return scenes


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that has left a scene of each kind."""
    directory = tmp_path_factory.mktemp("scenes") / "run"
    folder = directory / "evaluations" / "step_7" / "all"
    folder.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(MARK)
    for name, content in all_scenes().items():
        (folder / name).write_text(content)
    assert main([str(directory)]) == 0
    return directory / REPORT_FILE


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    with opened(browser) as window:
        yield window.open(report)
        assert window.problems == []


def at(page: Any, name: str) -> Any:
    """The panel of a scene, by the order of the scenes' names."""
    place = sorted(all_scenes()).index(f"{name}.scene.json")
    return page.locator(".panel.scene").nth(place)


def facts(panel: Any) -> list[str]:
    return panel.locator(".board-facts dd").all_inner_texts()


def test_a_board_step_by_step_with_the_keyboard(page: Any) -> None:
    panel = at(page, "sudoku")
    slider = panel.get_by_role("slider", name="Thinking step")
    assert slider.get_attribute("aria-valuetext") == "Step 1 of 3, 14 of 16 cells right"
    assert facts(panel) == ["14 of 16", "–", "–", "10\xa0%", "step 3"]
    digits = panel.locator(".board .digit")
    wrong = panel.locator(".board .digit.wrong")
    assert (digits.count(), wrong.all_text_contents()) == (16, ["4", "3"])
    assert panel.locator(".board .digit.clue").count() == 8
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert facts(panel) == ["14 of 16", "2", "2", "–", "step 3"]
    # four cells changed: a square around each, and a stroke through what is wrong
    changed = panel.locator(".board .mark-changed").get_attribute("d")
    assert changed.count("M") == 4
    assert panel.locator(".board .mark-wrong").get_attribute("d").count("M") == 2
    page.keyboard.press("End")
    assert facts(panel)[0] == "16 of 16"
    page.keyboard.press("Home")
    assert panel.locator(".step-name").inner_text() == "The puzzle as given"
    assert digits.all_text_contents() == [cell for cell in GIVEN if cell != "."]


def test_play_runs_to_the_end_and_thumbnails_choose(page: Any) -> None:
    panel = at(page, "sudoku")
    panel.get_by_role("button", name="Play").click()
    assert panel.get_by_role("button", name="Pause").is_visible()
    panel.locator(".step-name", has_text="Step 3 of 3").wait_for()
    panel.get_by_role("button", name="Play").wait_for()
    other = panel.get_by_role("button", name="Example 8, not solved")
    other.focus()
    page.keyboard.press("Enter")
    assert other.get_attribute("aria-pressed") == "true"
    assert facts(panel) == ["14 of 16", "0", "0", "90\xa0%", "no step"]


def test_a_maze_has_walls_ends_and_marks(page: Any) -> None:
    panel = at(page, "maze")
    marks = {
        name: panel.locator(f".board .{name}").get_attribute("d").count("M")
        for name in ("wall", "path-right", "path-missing", "mark-wrong")
    }
    assert marks == {"wall": 2, "path-right": 2, "path-missing": 1, "mark-wrong": 0}
    assert panel.locator(".board .letter").all_text_contents() == ["S", "G"]
    panel.get_by_role("button", name="Example 8, not solved").click()
    # the start taken for a wall, a path where none is, a token that means nothing for a wall
    assert panel.locator(".board .mark-wrong").get_attribute("d").count("M") == 3
    assert panel.locator(".board .letter").all_text_contents() == ["S", "G"]


def test_a_grid_has_its_symbols_and_marks(page: Any) -> None:
    panel = at(page, "grid")
    assert facts(panel)[0] == "2 of 4"
    assert panel.locator(".board text").all_text_contents() == ["0", "2", "1", "3"]
    assert panel.locator(".board .mark-wrong").get_attribute("d").count("M") == 2
    assert panel.locator(".board svg").get_attribute("viewBox").split()[2:] == ["3.12", "2.12"]
    panel.get_by_role("slider", name="Thinking step").focus()
    page.keyboard.press("End")
    assert facts(panel)[0] == "4 of 4"
    assert panel.locator(".board .mark-changed").get_attribute("d").count("M") == 1
    page.keyboard.press("Home")
    assert panel.locator(".board text").all_text_contents() == [*"012a34"]
    assert "clue" not in panel.locator(".legend").inner_text()


def test_values_by_pointer_and_arrow_keys(page: Any) -> None:
    panel = at(page, "matrix")
    panel.locator("svg.matrix").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert panel.locator("p.over").inner_text() == "true class 0, answer 1: 1 of 4 (25\xa0%)"
    gates = at(page, "gates")
    gates.locator("svg.matrix").hover()
    assert "component" in gates.locator("p.over").inner_text()
    upright = at(page, "upright")
    upright.locator("svg[role=img]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Home")
    assert upright.locator(".tip").inner_text().split()[-3:] == ["1", "b", "0"]
    arc = at(page, "arc")
    arc.get_by_role("button", name="Colours as numbers").click()
    assert arc.locator(".arc-grid text").first.is_visible()


def test_hostile_text_stays_text_and_nothing_is_wider_than_a_phone(
    browser: Any, report: Path
) -> None:
    for width, dark in ((390, True), (1280, False)):
        with opened(browser, width, dark) as window:
            page = window.open(report)
            assert page.locator(".panel.scene").count() == len(all_scenes())
            assert page.get_by_text("This page cannot draw").count() == 1
            assert page.locator("img, script[src], b:text-is('b')").count() == 0
            assert HOSTILE in at(page, "text").inner_text()

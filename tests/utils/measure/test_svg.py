"""Pictures: XML that any browser reads, and every value in its place."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from utils.measure.svg import COLOURS, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def texts(root: ElementTree.Element) -> dict[tuple[float, float], str]:
    return {
        (float(text.get("x", "")), float(text.get("y", ""))): text.text or ""
        for text in root.iter(f"{SVG}text")
    }


def test_a_line_chart_holds_every_value() -> None:
    lines = {"accuracy": [0.0, 0.25, 1.0], "<exact> & more": [0.5, 0.125]}
    root = ElementTree.fromstring(line_chart(lines, "by step"))
    for (name, values), group in zip(lines.items(), root.findall(f"{SVG}g"), strict=True):
        title, *numbered = (group.findtext(f"{SVG}title") or "").split("\n")
        assert title == name
        assert numbered == [f"{step}: {value:g}" for step, value in enumerate(values, start=1)]
        points = [
            tuple(map(float, point.split(",")))
            for point in group.find(f"{SVG}polyline").get("points", "").split()
        ]  # type: ignore[union-attr]
        assert points == [
            (float(dot.get("cx", "")), float(dot.get("cy", "")))
            for dot in group.findall(f"{SVG}circle")
        ]
        bottom, top = (
            next(y for (_, y), text in texts(root).items() if text == share) for share in ("0", "1")
        )
        assert [(bottom - 4 - y) / (bottom - top) for _, y in points] == pytest.approx(
            values, abs=1e-3
        )
    assert {"1", "2", "3", "by step", *lines} <= {*texts(root).values()}


@pytest.mark.parametrize(
    "lines",
    [{}, {"a": []}, {"a": [0.3]}, {str(number): [0.1, 0.2] for number in range(len(COLOURS) + 1)}],
)
def test_few_values_and_many_lines_are_a_picture_too(lines: dict[str, list[float]]) -> None:
    root = ElementTree.fromstring(line_chart(lines, "title", first=0))
    assert len(root.findall(f"{SVG}g")) == len(lines)
    assert len(list(root.iter(f"{SVG}circle"))) == sum(map(len, lines.values()))

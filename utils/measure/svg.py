"""Small pictures as SVG, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f6feb", "#d1495b", "#2a9d5c", "#b7791f", "#7048a8")
MARGIN = 48
WIDTH, HEIGHT = 420, 240


def line_chart(lines: Mapping[str, Sequence[float]], title: str, first: int = 1) -> str:
    """Draws shares between 0 and 1, one line each, over whole numbers from `first`."""
    elements = [
        _text(MARGIN - 6, _height(share) + 4, f"{share:g}", "end") for share in (0.0, 0.5, 1.0)
    ]
    elements += [
        f'<path d="M{MARGIN} {_height(share)}H{WIDTH - 8}" stroke="#ddd"/>'
        for share in (0.0, 0.5, 1.0)
    ]
    longest = max((len(line) for line in lines.values()), default=1)
    step = (WIDTH - MARGIN - 24) / max(1, longest - 1)
    for x in sorted({0, (longest - 1) // 2, longest - 1}):
        elements.append(_text(MARGIN + x * step, HEIGHT - 8, str(first + x), "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [f"{MARGIN + x * step:.1f},{_height(share):.1f}" for x, share in enumerate(line)]
        # browsers show them where the pointer rests
        values = "".join(f"\n{first + x}: {share:g}" for x, share in enumerate(line))
        elements.append(
            f'<g fill="none" stroke="{colour}"'
            f' stroke-width="2"><title>{escape(name)}{values}</title>'
        )
        elements.append(f'<polyline points="{" ".join(points)}"/>')
        elements += [
            f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in (point.split(",") for point in points)
        ]
        elements += [
            "</g>",
            _text(WIDTH - 12, _height(line[-1] if line else 0.0) - 6, name, "end", colour),
        ]
    return _picture(WIDTH, HEIGHT, title, elements)


def _height(share: float) -> float:
    return HEIGHT - 24 - share * (HEIGHT - 24 - MARGIN)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _picture(width: int, height: int, title: str, elements: Sequence[str]) -> str:
    width = max(width, 16 + 6 * len(title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join(
        [
            head,
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            _text(8, 18, title, "start"),
            *elements,
            "</svg>\n",
        ]
    )

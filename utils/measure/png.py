"""Pictures as PNG files, drawn by matplotlib; none if it is not installed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

MOST = 24  # panels in one picture


def panels(
    file: str,
    names: Sequence[str],
    draw: Callable[[Any, str], None],
    width: float = 4.0,
    left: float = 0.7,
) -> dict[str, bytes]:
    """Draws a small panel for each name, side by side; nothing without names."""
    names = names[:MOST]
    if not names or find_spec("matplotlib") is None:
        return {}
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(names))
    height = 3.2
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(width * columns, height * rows))
    FigureCanvasAgg(figure)
    # margins in inches: matplotlib's own layouts draw everything twice to find them
    bottom = 0.55
    figure.subplots_adjust(
        left=left / (width * columns),
        right=1 - 0.1 / (width * columns),
        wspace=left / (width - left - 0.1),
        bottom=bottom / (height * rows),
        top=1 - 0.35 / (height * rows),
        hspace=(bottom + 0.35) / (height - bottom - 0.35),
    )
    for number, name in enumerate(names, start=1):
        draw(figure.add_subplot(rows, columns, number), name)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100, metadata={"Software": None})
    return {file: content.getvalue()}

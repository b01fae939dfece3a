"""Draws components as PNG files with matplotlib; without it, there are none."""

# N features, C components of a matrix, D numbers that they write

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.measure.png import panels

MOST_NUMBERS = 24  # numbers of components at an axis that can be read


def gate_matrices(
    gates: Mapping[str, np.ndarray], components: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """Draws the gates of each matrix by feature (rows) and component (columns).

    `components` has the number of the component in each column.
    """

    def draw(axes: Any, name: str) -> None:
        # later columns are closed, or the matrix is not an identity
        shown = gates[name][:, : 2 * len(gates[name])]
        image = axes.imshow(
            shown, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest"
        )
        axes.set(title=name, xlabel="component, by its number", ylabel="feature")
        number_axis(axes.set_xticks, components[name][: shown.shape[1]])
        number_axis(axes.set_yticks, range(len(shown)), most=12)
        axes.tick_params(axis="x", labelsize=8, labelrotation=90 if shown.shape[1] > 12 else 0)
        axes.figure.colorbar(image, ax=axes, label="gate", pad=0.03)

    return panels("gates.png", list(gates), draw, width=4.6)


def number_axis(
    set_ticks: Any, numbers: Sequence[int] | np.ndarray, most: int = MOST_NUMBERS
) -> None:
    """Labels places 0, 1, 2 … with whole numbers, as many as there is room for."""
    step = -(-len(numbers) // most)
    places = range(0, len(numbers), step)
    set_ticks(list(places), [str(numbers[place]) for place in places])


def directions(
    parts: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> dict[str, bytes]:
    """Draws the weights of each feature and the directions in which live components write: arrows
    in two dimensions, otherwise rows.

    `parts` has the weights [N, D] of each matrix, what its live components write [C, D], and their
    numbers.
    """

    def draw(axes: Any, name: str) -> None:
        weights, written, numbers = parts[name]
        if weights.shape[1] == 2:
            _draw_arrows(axes, weights, written, numbers)
        else:
            _draw_rows(axes, weights, written, numbers)
        axes.set_title(name)

    return panels("directions.png", list(parts), draw, width=4.6)


def _draw_arrows(axes: Any, weights: np.ndarray, written: np.ndarray, numbers: np.ndarray) -> None:
    reach = max(1e-12, float(np.linalg.norm(weights, axis=1).max()))
    unit = written / np.linalg.norm(written, axis=1, keepdims=True).clip(1e-12)
    for number, (x, y) in zip(numbers, 1.15 * reach * unit, strict=True):
        axes.plot([0, x], [0, y], color="tab:orange", linewidth=4, alpha=0.6)
        axes.text(1.12 * x, 1.12 * y, str(number), ha="center", va="center", color="tab:orange")
    for x, y in weights:
        arrow = {"arrowstyle": "->", "color": "tab:blue"}
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="tab:blue", label="weights of a feature"),
        Line2D([], [], color="tab:orange", linewidth=4, alpha=0.6, label="live component"),
    ]
    # below all arrows
    axes.legend(handles=handles, loc="lower center", ncols=2, fontsize=8, frameon=False)
    edge = 1.5 * reach
    axes.set_ylim(-1.25 * edge, edge)
    axes.set_aspect("equal", adjustable="datalim")


def _draw_rows(axes: Any, weights: np.ndarray, written: np.ndarray, numbers: np.ndarray) -> None:
    scaled = [rows / np.abs(rows).max(1, keepdims=True).clip(1e-12) for rows in (weights, written)]
    image = axes.imshow(
        np.concatenate(scaled), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
    )
    axes.axhline(len(weights) - 0.5, color="black")
    labels = [f"f{feature}" for feature in range(len(weights))] + [f"c{each}" for each in numbers]
    step = -(-len(labels) // MOST_NUMBERS)
    axes.set_yticks(range(0, len(labels), step), labels[::step], fontsize=6)
    axes.set(
        xlabel="number, as a share of its row's largest", ylabel="features (f), live components (c)"
    )
    axes.figure.colorbar(image, ax=axes, pad=0.03)


def histograms(
    gates: Mapping[str, np.ndarray], shares: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """Draws a histogram of the gates of each matrix, and the share of inputs that need each of its
    components, the most needed first. Components that no input needs have no point.
    """

    def opened(axes: Any, name: str) -> None:
        edges = np.linspace(0, 1, len(gates[name]) + 1)
        axes.stairs(gates[name] + 1, edges, fill=True)
        axes.set(title=name, xlabel="gate", ylabel="count", yscale="log", ylim=(1, None))
        axes.minorticks_off()

    def needed(axes: Any, name: str) -> None:
        ordered = np.sort(shares[name])[::-1]
        some = ordered[ordered > 0]
        axes.plot(range(1, len(some) + 1), some, marker=".", drawstyle="steps-mid")
        never = len(ordered) - len(some)
        axes.set(
            title=f"{name}: {never} of {len(ordered)} never needed",
            xlabel="components, the most needed first",
            ylabel="share of inputs",
            yscale="log",
        )
        lowest = some[-1] if len(some) else 1e-3
        axes.set(xlim=(0.5, max(5, len(some)) + 0.5), ylim=(min(1e-3, lowest / 2), 1.5))
        whole_numbers(axes.xaxis)
        axes.minorticks_off()

    return panels("histograms.png", list(gates), opened) | panels(
        "needed.png", list(shares), needed
    )


def whole_numbers(axis: Any) -> None:
    """Puts ticks only at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def over_time(counts: Mapping[int, Mapping[str, int]]) -> dict[str, bytes]:
    """Draws how many components were live after each of these steps."""
    names = list(next(iter(counts.values())))

    def draw(axes: Any, name: str) -> None:
        live = [each[name] for each in counts.values()]
        axes.plot(list(counts), live, marker=".")
        # room above the highest point
        axes.set(title=name, xlabel="step", ylabel="live components", ylim=(0, 1.1 * max(*live, 1)))
        whole_numbers(axes.yaxis)

    return panels("live.png", names, draw)

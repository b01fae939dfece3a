"""Pictures of components as PNG files, drawn by matplotlib. Where that is not installed there are
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from utils.measure.png import panels


def gate_matrices(gates: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The gates of each matrix by feature (rows) and component (columns), in matched order."""

    def draw(axes: Any, name: str) -> None:
        # behind these, all are closed or it is no identity
        shown = gates[name][:, : 2 * len(gates[name])]
        axes.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest")
        axes.set(title=name, xlabel="component", ylabel="feature")

    return panels("gates.png", list(gates), draw)


def directions(parts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, bytes]:
    """Draws each feature's weights and what live components write: as arrows in two dimensions,
    else as rows.
    """

    def draw(axes: Any, name: str) -> None:
        weights, written = parts[name]
        if weights.shape[1] == 2:
            unit = written / np.linalg.norm(written, axis=1, keepdims=True).clip(1e-12)
            for x, y in unit:
                axes.plot([0, 1.2 * x], [0, 1.2 * y], color="tab:orange", linewidth=3, alpha=0.6)
            for x, y in weights:
                axes.annotate(
                    "", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": "tab:blue"}
                )
            axes.set(
                xlim=(-1.4, 1.4),
                ylim=(-1.4, 1.4),
                aspect="equal",
                title=f"{name}: weights, components",
            )
        else:
            scaled = [
                rows / np.abs(rows).max(1, keepdims=True).clip(1e-12) for rows in (weights, written)
            ]
            axes.imshow(
                np.concatenate(scaled),
                cmap="RdBu",
                vmin=-1,
                vmax=1,
                aspect="auto",
                interpolation="nearest",
            )
            axes.axhline(len(weights) - 0.5, color="black")
            axes.set(title=f"{name}: weights, below them components", xlabel="number")

    return panels("directions.png", list(parts), draw)


def histograms(
    gates: Mapping[str, np.ndarray], shares: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """For each matrix, a histogram of its gates, and how often each component is needed, the most
    needed first.
    """

    def opened(axes: Any, name: str) -> None:
        edges = np.linspace(0, 1, len(gates[name]) + 1)
        axes.stairs(gates[name] + 1, edges, fill=True)
        axes.set(title=name, xlabel="gate", ylabel="how often", yscale="log", ylim=(1, None))
        axes.minorticks_off()

    def needed(axes: Any, name: str) -> None:
        axes.plot(np.sort(shares[name])[::-1].clip(1e-6), drawstyle="steps-mid")
        axes.set(title=name, xlabel="component", ylabel="share of inputs", yscale="log")
        axes.minorticks_off()

    return panels("histograms.png", list(gates), opened) | panels(
        "needed.png", list(shares), needed
    )


def over_time(counts: Mapping[int, Mapping[str, int]]) -> dict[str, bytes]:
    """How many components were live after each of these steps."""
    names = list(next(iter(counts.values())))

    def draw(axes: Any, name: str) -> None:
        axes.plot(list(counts), [live[name] for live in counts.values()], marker=".")
        axes.set(title=name, xlabel="step", ylabel="live components", ylim=(0, None))

    return panels("live.png", names, draw)

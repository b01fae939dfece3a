"""Draws exact match against bytes, for latents and for truncated texts of the same size, in one
panel for each length of text.

python -m data.latent.curve RUN_OR_SWEEP [RUN_OR_SWEEP …] PICTURE.png
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from data.latent.answers import FILE
from utils.errors import ConfigError, exit_status
from utils.files import read_row, read_text, write_whole


class Point(NamedTuple):
    """The last evaluation of a run. Exact match is the mean over its models."""

    text_bytes: int
    sent_bytes: float
    deflated: float
    latents: float
    cut: float
    whole: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 and one line about what is wrong."""
    return exit_status(lambda: draw(arguments), (ConfigError, OSError))


def draw(arguments: Sequence[str] | None) -> str:
    """Writes the picture, and returns its points as a table."""
    parser = argparse.ArgumentParser(prog="data.latent.curve", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_OR_SWEEP")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    given = parser.parse_args(arguments)
    points = sorted(point_of(run) for folder in given.runs for run in runs_in(folder))
    write_whole(given.picture, _picture(points))
    header = ("text", "bytes", "deflate", "latents", "its first bytes", "whole")
    rows = [
        [f"{one:.0f}" for one in point[:3]] + [f"{one:.1%}" for one in point[3:]]
        for point in points
    ]
    return "\n".join("".join(f"{cell:>17}" for cell in row) for row in (header, *rows))


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs of a sweep, or the run itself."""
    jobs = folder / "jobs.json"
    if not jobs.is_file():
        return [folder]
    return [Path(job["directory"]) for job in json.loads(read_text(jobs))]


def point_of(run: Path) -> Point:
    """Reads a run's last evaluation."""
    found = sorted(run.glob(f"evaluations/step_*/*/{FILE}"), key=_step)
    row = read_row(found[-1]) if found else {}
    if "bytes/cut" not in row:
        raise ConfigError(f"{run}: holds no evaluation of latents; give a run of arch=prefix")
    way = OmegaConf.create(read_text(run / "config.yaml")).arch.send
    exact = [_mean_over_models(row, each) for each in (way, "cut", "text")]
    return Point(round(row["bytes/text"]), row[f"bytes/{way}"], row["bytes/deflated_size"], *exact)


def _step(file: Path) -> int:
    return int(file.parents[1].name.removeprefix("step_"))


def _mean_over_models(row: Mapping[str, float], way: str) -> float:
    values = [value for key, value in row.items() if key.startswith(f"exact/{way}/")]
    return sum(values) / len(values)


def _picture(points: Sequence[Point]) -> bytes:
    from matplotlib.figure import Figure

    lengths = sorted({point.text_bytes for point in points})
    figure = Figure(figsize=(5 * len(lengths), 3.4), layout="constrained")
    for axes, length in zip(
        figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True
    ):
        some = [point for point in points if point.text_bytes == length]
        sizes = [point.sent_bytes for point in some]
        cuts = [*(point.cut for point in some), some[-1].whole]
        axes.plot(sizes, [point.latents for point in some], marker="o", label="latents")
        axes.plot(
            [*sizes, length],
            cuts,
            marker="s",
            color="tab:gray",
            label="the text's first bytes, all of them at the right",
        )
        axes.axvline(some[0].deflated, color="tab:red", ls="--", label="the text, deflated")
        title = f"texts of {length} bytes"
        axes.set(title=title, xlabel="bytes", ylabel="exact match", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100, metadata={"Software": None})
    return content.getvalue()


if __name__ == "__main__":
    sys.exit(main())

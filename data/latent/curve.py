"""Draws exact match against bytes, for latents and for truncated texts of the same size, in one
panel for each length of text.

python -m data.latent.curve RUN_OR_SWEEP [RUN_OR_SWEEP …] PICTURE.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.latent.answers import FILE
from utils.errors import ConfigError, exit_status
from utils.files import read_row, read_text, write_whole
from utils.measure.png import panels

USAGE = "usage: python -m data.latent.curve RUN_OR_SWEEP [RUN_OR_SWEEP …] PICTURE.png"


@dataclass(frozen=True)
class Point:
    """The last evaluation of a run: exact match is the mean of its models."""

    text_bytes: int
    deflated: float
    sent_bytes: float
    latents: float
    cut: float
    whole: float


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit status."""
    return exit_status(lambda: draw(arguments), (ConfigError, OSError))


def draw(arguments: Sequence[str]) -> str:
    """Writes the picture, and returns what it shows as a table."""
    if len(arguments) < 2:
        raise ConfigError(USAGE)
    *folders, picture = map(Path, arguments)
    if picture.suffix != ".png":
        raise ConfigError(f"{picture}: is no name of a picture; end it with .png\n{USAGE}")
    points = sorted(
        (point_of(run) for folder in folders for run in runs_in(folder)),
        key=lambda point: (point.text_bytes, point.sent_bytes),
    )
    for content in _picture(points).values():
        write_whole(picture, content)
    return _table(points)


def runs_in(folder: Path) -> list[Path]:
    """The runs of a sweep, or the run itself."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give that of a run or of a sweep")
    jobs = folder / "jobs.json"
    return (
        [Path(job["directory"]) for job in json.loads(read_text(jobs))]
        if jobs.is_file()
        else [folder]
    )


def point_of(run: Path) -> Point:
    """Reads a run's last evaluation."""
    found = sorted(run.glob(f"evaluations/step_*/*/{FILE}"), key=_step)
    row = read_row(found[-1]) if found else {}
    if "bytes/cut" not in row:
        raise ConfigError(f"{run}: holds no evaluation of latents; give a run of arch=prefix")
    way = OmegaConf.create(read_text(run / "config.yaml")).arch.send
    return Point(
        round(row["bytes/text"]),
        row["bytes/deflated_size"],
        row[f"bytes/{way}"],
        _mean_over_models(row, way),
        _mean_over_models(row, "cut"),
        _mean_over_models(row, "text"),
    )


def _step(file: Path) -> int:
    return int(file.parents[1].name.removeprefix("step_"))


def _mean_over_models(row: Mapping[str, float], way: str) -> float:
    values = [value for key, value in row.items() if key.startswith(f"exact/{way}/")]
    return sum(values) / len(values)


def _table(points: Sequence[Point]) -> str:
    lines = [
        f"{'text':>6}{'deflate':>9}{'bytes':>7}{'latents':>9}{'its first bytes':>17}{'whole':>8}"
    ]
    lines += [
        f"{point.text_bytes:>6}{point.deflated:>9.0f}{point.sent_bytes:>7.0f}{point.latents:>9.1%}"
        f"{point.cut:>17.1%}{point.whole:>8.1%}"
        for point in points
    ]
    return "\n".join(lines)


def _picture(points: Sequence[Point]) -> dict[str, bytes]:
    lengths = {f"texts of {point.text_bytes} bytes": point.text_bytes for point in points}

    def axes_of(axes: Any, name: str) -> None:
        some = [point for point in points if point.text_bytes == lengths[name]]
        sizes = [point.sent_bytes for point in some]
        axes.plot(sizes, [point.latents for point in some], marker="o", label="latents")
        axes.plot(
            [*sizes, lengths[name]],
            [*(point.cut for point in some), some[-1].whole],
            marker="s",
            color="tab:gray",
            label="the text's first bytes, all of them at the right",
        )
        axes.axvline(some[0].deflated, color="tab:red", ls="--", label="the text, deflated")
        axes.set(title=name, xlabel="bytes", ylabel="exact match", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")

    return panels("curve.png", list(lengths), axes_of, width=5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

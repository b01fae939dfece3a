"""Exports the components of a run.

python -m models.component_files RUN FOLDER

writes the factors of every matrix as safetensors, and the table of components that the run's last
evaluation wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from utils.checkpoint import reader
from utils.errors import ConfigError, exit_status
from utils.files import read_row, read_text, write_whole

TABLE, MATRICES, WEIGHTS = "components.tsv", "matrices.json", "components.safetensors"
PARTS = "model.parts."


def export(*arguments: str) -> str:
    """Writes the files into a folder; returns a line that says what was written."""
    from safetensors.torch import save

    if len(arguments) != 2:
        raise ConfigError(
            "usage: python -m models.component_files RUN FOLDER    (a run folder or a step_*"
            " folder; where to write)"
        )
    checkpoint, folder = arguments
    if (
        reader.config_in(checkpoint).get("arch", {}).get("_target_")
        != "models.decomposition.components.Components"
    ):
        raise ConfigError(
            f"{checkpoint}: is not a run of arch=components; give the folder of one, or one of its"
            " step_* folders"
        )
    groups, meta = reader.load(checkpoint, ["model", "ema"])
    saved = groups["model"] | {
        name.removeprefix("dense/"): tensor for name, tensor in groups.get("ema", {}).items()
    }
    step, evaluated = _evaluated(reader.step_folder(Path(checkpoint)).parents[1], int(meta["step"]))
    matrices = read_row(evaluated / MATRICES)
    weights: dict[str, Tensor] = {
        name.removeprefix("model."): saved[name].clone()
        for name in saved
        if name.startswith("model.gates.")
    }
    for name, about in matrices.items():
        own = about.get("tied_to", name).replace(".", "-")
        V, U = (saved[f"{PARTS}{own}.{factor}"] for factor in "VU")
        V, U = (U.t(), V.t()) if about.get("transposed") else (V, U)
        weights |= {
            f"{name}.{factor}": matrix.clone(memory_format=torch.contiguous_format)
            for factor, matrix in (("V", V), ("U", U))
        }
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole(Path(folder) / WEIGHTS, save(weights, {"format": "pt"}))
    write_whole(Path(folder) / TABLE, read_text(evaluated / TABLE))
    return (
        f"{folder}: components of {', '.join(matrices)} after step {meta['step']}; the table is of"
        f" step {step}, set {evaluated.name}"
    )


def _evaluated(run: Path, step: int) -> tuple[int, Path]:
    """Returns the step and folder of the last evaluation up to a step that wrote a table."""
    tables = {
        table: table.parents[1].name.removeprefix("step_")
        for table in sorted(run.glob(f"evaluations/step_*/*/{TABLE}"))
    }
    done = [
        (int(number), table.parent)
        for table, number in tables.items()
        if number.isdecimal() and int(number) <= step
    ]
    if not done:
        raise ConfigError(
            f"{run}: no evaluation up to step {step} left a {TABLE}; train on to one, on data with"
            " held-out examples"
        )
    return max(done)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: export(*arguments), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

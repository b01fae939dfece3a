"""Reads the files of evaluations in a run directory: scenes and others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from utils.files import read_bytes
from utils.measure.scene import SUFFIX
from utils.report.page import escape

STEP = re.compile(r"step_(\d{1,18})")


def evaluated_sets(directory: Path) -> list[tuple[int, Path]]:
    """Returns the folders that evaluations have left, with their steps, the newest first."""
    folders = [
        (int(named[1]), folder)
        for folder in directory.glob("evaluations/step_*/*/")
        if (named := STEP.fullmatch(folder.parent.name))
    ]
    return sorted(folders, key=lambda each: (-each[0], each[1].name))


def read_evaluations(directory: Path, room: int) -> dict[str, Any]:
    """Returns the scenes that fit in `room` bytes, the newest first, and the paths and sizes of all
    files.
    """
    scenes: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    for step, folder in evaluated_sets(directory):
        of = {"step": step, "set": unquote(folder.name)}
        for file in sorted(folder.iterdir()):
            if not file.is_file():
                continue
            path = file.relative_to(directory).as_posix()
            files.append({"path": path, "bytes": file.stat().st_size})
            if file.name.endswith(SUFFIX) and (scene := _read_scene(file, room)):
                size = len(escape(scene))
                if size <= room:
                    name = file.name.removesuffix(SUFFIX)
                    scenes.append({**of, "name": name, "scene": scene})
                    room -= size
    return {"scenes": scenes, "files": files}


def _read_scene(file: Path, room: int) -> dict[str, Any] | None:
    try:
        scene = json.loads(read_bytes(file, room))
    except (OSError, ValueError, RecursionError):
        return None
    return scene if isinstance(scene, dict) else None

"""Reads the files of evaluations in a run directory: scenes, pictures and others."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from utils.files import read_bytes
from utils.report.page import escape

Payload = dict[str, Any]
SCENE = ".scene.json"
PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}
STEP = re.compile(r"step_(\d{1,18})")


def list_evaluated_sets(directory: Path) -> list[tuple[int, Path]]:
    """Returns the folders that evaluations have left, with their steps, the newest first."""
    folders = []
    try:
        for folder in (directory / "evaluations").iterdir():
            if (named := STEP.fullmatch(folder.name)) and folder.is_dir():
                sets = [each for each in sorted(folder.iterdir()) if each.is_dir()]
                folders += [(int(named[1]), each) for each in sets]
    except OSError:
        pass
    return sorted(folders, key=lambda each: (-each[0], each[1].name))


def read_scenes(directory: Path, room: int) -> tuple[list[Payload], int]:
    """Returns the scenes of evaluations that fit in `room` bytes, the newest first, and the bytes
    left.
    """
    scenes: list[Payload] = []
    for step, folder in list_evaluated_sets(directory):
        for file in sorted(folder.glob(f"*{SCENE}")):
            try:
                scene = json.loads(read_bytes(file, room))
                size = len(escape(scene))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(scene, dict) and size <= room:
                room -= size
                name = file.name.removesuffix(SCENE)
                scenes.append({"step": step, "set": folder.name, "name": name, "scene": scene})
    return scenes, room


def read_pictures(
    directory: Path, room: int, drawn: Collection[tuple[str, str]] = ()
) -> list[Payload]:
    """Returns the figures of the newest evaluation that fit in `room` bytes, without those that a
    scene of the same set and name (`drawn`) shows better.
    """
    pictures: list[Payload] = []
    for step, folder in list_evaluated_sets(directory):
        if pictures and pictures[0]["step"] != step:
            break
        for file in sorted(folder.iterdir()):
            seen = any(name.startswith(file.stem) for of, name in drawn if of == folder.name)
            kind = None if seen else PICTURES.get(file.suffix)
            try:
                content = read_bytes(file, room * 3 // 4) if kind else b""
            except (OSError, ValueError):
                continue
            if content:
                text = base64.b64encode(content).decode()
                room -= len(text)
                uri = f"data:{kind};base64,{text}"
                name = file.stem
                pictures.append({"step": step, "set": folder.name, "name": name, "uri": uri})
    return pictures


def files_of(directory: Path) -> list[Payload]:
    """Returns the files that evaluations have left, by path, with their sizes, the newest first."""
    files: list[Payload] = []
    for _, folder in list_evaluated_sets(directory):
        for file in sorted(folder.iterdir()):
            if file.is_file():
                path = file.relative_to(directory).as_posix()
                files.append({"path": path, "bytes": file.stat().st_size})
    return files

"""Names of runs: each is the name of a directory, and no two jobs may share one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from utils.command.arguments import key_of
from utils.command.keys import fields_of, is_marked
from utils.command.marks import SAME_RUN
from utils.command.root import Plain
from utils.errors import ConfigError, short

LONGEST = 200  # bytes; file systems take 255, and `.old-1` and the like are put behind a name
READABLE = 80  # of a job's own part
LONGEST_JOB = 210  # bytes of a job's name before its digest
# characters of a value that a name may have, and those that it may not
FIT, UNFIT = re.compile(r"[\w.+-]+", re.ASCII), re.compile(r"[^\w.,=+-]+", re.ASCII)


def check_name(key: str, name: str) -> None:
    """Refuses a name that cannot be a folder's; it may have parts, as `group/one`."""
    for part in name.split("/"):
        if part in (".", "..") or not part.strip() or len(os.fsencode(part)) > LONGEST:
            raise ConfigError(
                f"{key}={short(name)}: must be the name of a folder, of at most"
                f" {LONGEST} bytes; for example {key}=mine"
            )


def sweep_name(overrides: Sequence[str]) -> str:
    """The name of a sweep's folder: the keys with several values, and a digest of all overrides but
    those that say how it runs.
    """
    chosen = [override for override in overrides if not override.startswith(("sweep.", "hydra."))]
    several = [override.partition("=")[0] for override in chosen if re.search(r"=.*[,(]", override)]
    digest = hashlib.sha256(os.fsencode("\0".join(chosen))).hexdigest()[:8]
    return f"{re.sub(UNFIT, '_', ','.join(several))[:READABLE]}-{digest}".lstrip("-")


def folder_name(path: str) -> str:
    """The last name of a path, however the path is written."""
    name = Path(path).name
    return name if name not in ("", "..") else Path(os.path.realpath(path)).name


class SweepJob(NamedTuple):
    """A job of a sweep: its own overrides, and the name of the sweep's folder."""

    overrides: Sequence[str]
    sweep: str = ""


def job_name(name: str, config: Plain, choices: Mapping[str, str], job: SweepJob) -> str:
    """The name of one job of a sweep that fixes `run_name`: that name, and every override that
    makes the job another run.

    Only the keys of the overrides count: two ways to write a value are one job. A long name begins
    with the keys that the sweep is named after, is cut, and ends with a digest.
    """
    keys = {*map(key_of, job.overrides)}
    if "run_name" not in keys:
        keys.discard("experiment")  # the name is the experiment's, and implies it
    nested, fields = OmegaConf.create(config), fields_of(config)
    values = {
        key: choices[key] if key in choices else OmegaConf.select(nested, key)
        for key in sorted(keys)
        if re.split(r"[./]", key)[0] != "hydra" and not is_marked(key, fields, SAME_RUN)
    }
    text = ",".join(f"{key}={value}" for key, value in values.items())
    if not text:
        return name
    room = min(READABLE, LONGEST_JOB - len(os.fsencode(name)))
    if len(text) <= room and all(FIT.fullmatch(str(value)) for value in values.values()):
        return f"{name}-{text}"
    digest = hashlib.sha256(os.fsencode(repr(values))).hexdigest()[:8]
    swept = job.sweep.rpartition("-")[0].split(",")
    first = sorted(values, key=lambda key: key not in swept)
    text = ",".join(f"{key}={values[key]}" for key in first)
    return f"{name}-{re.sub(UNFIT, '_', text)[:room]}-{digest}"

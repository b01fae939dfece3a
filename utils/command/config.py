"""From what Hydra composed to one checked, resolved, named configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from utils.command.instantiate import check
from utils.command.keys import GROUPS, fields_of, is_marked, leaves, marked
from utils.command.limits import check_combinations
from utils.command.marks import NAMES_PROJECT, SAME_RUN
from utils.command.naming import SweepJob, check_name, folder_name, job_name
from utils.command.root import Config, Plain
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.ranks.launchers import Launch

Choices = Mapping[str, str]  # what was chosen of each group


def resolve(
    raw: DictConfig, choices: Choices, launch: Launch, job: SweepJob | None = None
) -> Config:
    """Checks every key, value and combination, and names the run; raises ConfigError."""
    checked = check(_plain(raw, resolve=True))
    names = names_of(checked.plain(), _plain(raw, resolve=False), choices, job)
    set_keys = checked.model_fields_set | names.keys()
    config = Config.model_construct(set_keys, **dict(checked) | names)
    check_combinations(config, launch)
    if config.sweep.only is not None and job is None:
        raise ConfigError(f"sweep.only={config.sweep.only}: chooses a job of a sweep; add -m")
    return config


def publish(config: Config, dist: Dist) -> Config:
    """Sends rank 0's configuration to every rank, as text."""
    text = dist.broadcast_text(OmegaConf.to_yaml(config.plain()))
    return Config.model_validate(OmegaConf.to_container(OmegaConf.create(text)))


def with_arithmetic(config: Config, then: Plain, dist: Dist, suits: str) -> Config:
    """Returns the configuration with `arch.forward_dtype=auto` as in the run's configuration
    `then`, or as the type that `suits` rank 0's machine, and `compile=auto` as what suits the
    device.

    Written down, they stay the same on every rank, and the type also on every machine.
    """
    values: dict[str, Any] = {}
    if config.compile == "auto":
        values["compile"] = dist.device.type == "cuda"
    if config.arch.get("forward_dtype") == "auto":
        dtype = then.get("arch", {}).get("forward_dtype", "auto")
        values["arch.forward_dtype"] = dist.broadcast_text(suits) if dtype == "auto" else dtype
    return config.with_values(values)


def _plain(composed: DictConfig, resolve: bool) -> Plain:
    own = OmegaConf.masked_copy(composed, [key for key in map(str, composed) if key != "hydra"])
    plain: Any = OmegaConf.to_container(own, resolve=resolve)
    return plain


def names_of(config: Plain, written: Plain, choices: Choices, job: SweepJob | None) -> Plain:
    """Names a run after its configuration, so that the same command finds its own run.

    `written` is the configuration with its interpolations.
    """
    run_name, named_after = config["run_name"], marked(config, fields_of(config), NAMES_PROJECT)
    data = next((value for _, value in named_after if value), None)
    project_name = config["project_name"] or (data and folder_name(data)) or choices["data"]
    check_name("project_name", project_name)
    if run_name is None:
        content = json.dumps(_chosen_and_changed(config, written, choices), sort_keys=True)
        run_name = f"{choices['arch']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    check_name("run_name", run_name)
    if config["run_name"] and job is not None:
        # jobs of a sweep that share a name must not share a directory
        run_name = job_name(run_name, config, choices, job)
    if config["eval_only"]:  # beside the run that it evaluates, and never in its place
        run_name += "-evaluation"
    path = config["checkpoint_path"] or f"runs/{project_name}/{run_name}"
    return {"run_name": run_name, "project_name": project_name, "checkpoint_path": path}


def _chosen_and_changed(config: Plain, written: Plain, choices: Choices) -> Plain:
    """Returns the choices, and the values that differ from their defaults: a key that is new does
    not rename old runs.
    """
    chosen = {group: choices[group] for group in GROUPS if group != "sync"}
    default = compose("pretrain", [f"{group}={choice}" for group, choice in chosen.items()])
    # lists are compared whole
    values, now, defaults = (
        dict(leaves(each, into_lists=False))
        for each in (config, written, _plain(default, resolve=False))
    )
    fields = fields_of(config)
    differing = {
        path: values.get(path)
        for path in now.keys() | defaults.keys()
        if now.get(path) != defaults.get(path)
        and values.get(path) != defaults.get(path)
        and not is_marked(path, fields, SAME_RUN)
        and not path.startswith("sync.")
    }
    return chosen | differing

"""Published code beside which benchmarks measure ours."""

from pathlib import Path

from utils.errors import ConfigError


def check_checkout(option: str, folder: str | Path, file: str) -> None:
    """Refuses a folder that does not hold a file of the published code."""
    if not Path(folder, file).is_file():
        raise ConfigError(
            f"{option} {folder}: no {file} there; give a checkout of the published code"
        )

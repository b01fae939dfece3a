"""`make gpu`: is it right on a GPU, and how fast is it? Every figure is written to gpu-results.md
as soon as it is known.

Settings are variables: PART=1, 2, 3 or 4 (all), OUT=folder of the results (here); for part 3,
which trains `experiment=sudoku_extreme`, DATA=folder of boards, TRAIN_S=seconds, KEYS=keys; for
part 4, HRM and TRM, folders of the published code.
Without a GPU the parts are rehearsed on the CPU with tiny sizes, and gpu-rehearsal.md says how that
went.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bring_packages() -> None:
    """Adds missing packages from wheels/ to this process and its children; installed ones stay."""
    if importlib.util.find_spec("hydra"):
        return
    wheels = [str(wheel) for wheel in sorted(ROOT.glob("wheels/*.whl")) if not installed(wheel)]
    site = str(ROOT / "wheels" / "site")
    if not wheels:
        sys.exit(
            f"{sys.executable} has no hydra: run `make wheels` where there is a network, and bring"
            " the folder wheels/ along"
        )
    print("installing wheels/ into wheels/site", flush=True)
    options = "--quiet --no-index --no-deps --no-compile --upgrade"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--target", site]
    if subprocess.run([*pip, *wheels], check=False).returncode:
        sys.exit(
            f"this is Python {sys.version.split()[0]}, and `make wheels` makes them for 3.12 on"
            " x86-64 Linux"
        )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, site)


def installed(wheel: Path) -> bool:
    """True if a package is installed, in any version."""
    try:
        return bool(importlib.metadata.distribution(wheel.name.partition("-")[0]))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    bring_packages()
    from tests.gpu import parts

    sys.exit(parts.main())

"""A training step of decompositions on one CPU thread; with a checkout of the published trainer,
beside it.

`python -m tests.bench.bench_components --spd CHECKOUT --python PYTHON` (a Python that has what the
checkout imports). Each is a separate process, and steps are taken in turn, so that other load on
the machine affects both alike. Targets are untrained: a step costs the same.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.checkouts import check_checkout
from tests.bench.turns import Process, serve
from tests.ranks import ROOT
from utils.errors import exit_status

# batch, steps at once
RECIPES = {
    "tms_5_2": (512, 40),
    "tms_5_2_paper": (4096, 10),
    "tms_40_10": (1024, 5),
    "resid_mlp_1": (2048, 3),
}
TARGETS = {
    "tms_5_2": ["experiment=tms_target"],
    "tms_40_10": ["experiment=tms_target", "data.num_features=40", "arch.hidden_size=10"],
    "resid_mlp_1": ["experiment=resid_mlp_target"],
}


def ours(recipe: str, folder: Path, variant: list[str]) -> None:
    """Answers each number on standard input with how long one of so many steps took."""
    from tests.runs import train
    from tests.steps import steps_of, trainer_on
    from utils.ranks.distributed import Dist

    target = train(
        folder / "target", *TARGETS[recipe.removesuffix("_paper")], "max_steps=1", "data.held_out=0"
    ).directory
    # the published recipes have no faithfulness beyond the warm-up
    trainer = trainer_on(
        Dist(),
        folder / "run",
        f"experiment={recipe}",
        f"arch.target={target}",
        "arch.loss.faithfulness=0",
        *variant,
    )
    steps = steps_of(trainer, 100_000)
    for _ in range(5):
        next(steps)()
    serve(lambda: next(steps)())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spd", help="checkout of github.com/goodfire-ai/spd at 3f0bb61")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        ours(given.ours[0], Path(given.ours[1]), given.ours[2:])
        return
    if given.spd:
        check_checkout("--spd", given.spd, "spd/run_spd.py")
    print("| recipe, batch | published, ms | ours, ms | ratio |\n|---|---|---|---|")
    for recipe, (batch, steps) in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            module = ["-m", "tests.bench.bench_components", "--ours", recipe, folder]
            children = [Process([sys.executable, *module])]
            if given.spd:
                paths = os.pathsep.join([given.spd, *filter(None, [os.environ.get("PYTHONPATH")])])
                script = str(ROOT / "tests/bench/spd_step.py")
                peer = [given.python, script, recipe.removesuffix("_paper"), str(batch)]
                children.append(Process(peer, PYTHONPATH=paths, SPD_OUT_DIR=folder))
            try:
                rounds = [
                    [1e3 * child.seconds(steps) for child in children] for _ in range(given.rounds)
                ]
            finally:
                for child in children:
                    child.end()
        mine, *theirs = map(statistics.median, zip(*rounds, strict=True))
        ratio = statistics.median(other / own for own, other in rounds) if theirs else None
        beside = [f"{theirs[0]:.1f}", f"{ratio:.2f}"] if theirs else ["–", "–"]
        print(f"| {recipe}, {batch} | {beside[0]} | {mine:.1f} | {beside[1]} |", flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))

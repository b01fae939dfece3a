"""Train any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Top to bottom: the command line becomes a configuration (`main`), a configuration becomes the parts of a run
(`build_problem`, `build`), and the parts become a trained model (`train`: step, log, evaluate, decide, save).
"""

from __future__ import annotations

import sys

from utils.checkpoint import reader
from utils.command import cli
from utils.sweep import entry

if __name__ == "__main__":
    cli.check(sys.argv, reader.config_in, entry.sweep)  # what is wrong with the command line is said before anything slow is loaded

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from data.source import Source
from data.stream import ShardStream, eval_batches, to_tensors, train_loader
from models.objectives.base import Context, Objective, make_objective, to_device
from optim.ema import EMA
from optim.groups import build_dense, build_sparse
from optim.memory import Memory
from optim.replicas import check_files, check_same, same_everywhere
from optim.schedule import Schedule, build_schedule, set_lr
from optim.sparse_signsgd import SparseSignSGD
from optim.split_tables import WithTables
from optim.sync.base import Sync
from optim.sync.verdicts import Verdicts
from utils.checkpoint import resume
from utils.checkpoint.carries import Carries
from utils.checkpoint.init_from import begin_with
from utils.checkpoint.policy import NOTICES, Keeper
from utils.checkpoint.registry import Origin, Registry, Standing
from utils.command import config
from utils.command.instantiate import make
from utils.command.limits import check_passes
from utils.measure import hardware, plan
from utils.measure.evaluation import Evaluation, check_names
from utils.measure.metrics import Clock, Meter, Metric
from utils.measure.micro_batch import shards_at_once
from utils.noise import Noise
from utils.ranks import distributed, signals
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.sweep.earlier import made_first


@dataclass
class Trainer:
    """The parts of one run. Ranks differ in `dist`, `parts` and `carries` alone."""

    cfg: DictConfig
    dist: Dist
    run: RunDirectory
    source: Source
    objective: Objective
    sync: Sync
    wrapped: torch.nn.Module  # the objective as training calls it
    verdicts: Verdicts  # on steps that the device may not have finished
    parts: list[range]  # this rank's shards, cut into micro-batches
    carries: Carries
    meter: Meter
    sparse: list[SparseSignSGD]
    dense: list[torch.optim.Optimizer]
    schedule: Schedule
    ema: EMA | None
    headline: Metric  # what the run is judged by, by its name in evaluations
    flops_per_example: int = 0
    saved: Registry = field(init=False)  # what checkpoints hold
    keeper: Keeper = field(init=False)

    @property
    def total_steps(self) -> int:
        return self.source.plan.total_steps

    @property
    def standing(self) -> Standing:
        return self.saved.standing

    @property
    def step(self) -> int:
        return self.standing.step


@hydra.main(config_path=str(config.CONF), config_name="pretrain", version_base="1.3")
def app(raw: DictConfig) -> float | None:
    return cli.run_job(raw, pretrain)


main = partial(cli.main, app)


def pretrain(cfg: DictConfig) -> float | None:
    """One run from its resolved configuration; the objective metric on every rank, for sweepers."""
    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s, Path(cfg.checkpoint_path or "."))
    signals.defer()
    cfg = made_first(config.publish(cfg, dist), dist, pretrain)
    hardware.tune(cfg.exact)
    with RunDirectory(Path(cfg.checkpoint_path), dist, cfg.eval_only) as run, cli.reporting():
        return train_or_evaluate(cfg, dist, run)


def train_or_evaluate(cfg: DictConfig, dist: Dist, run: RunDirectory) -> float | None:
    """The run, once its directory is its own."""
    start = resume.find(cfg, dist, run.say)
    resume.fix_arithmetic(cfg, start, dist)
    source, objective, sync, wrapped = build_problem(cfg, dist, run, start)
    with dist.agreed():
        trainer = build(cfg, dist, run, source, objective, sync, wrapped)
    start = resume.take_up(start, trainer.saved, cfg, run, trainer.total_steps)
    check_names(cfg, source, objective, lambda rows: to_device(to_tensors([rows]), dist.device))
    standing = trainer.standing
    if start.is_finished(trainer.total_steps):
        run.confirm_finished(standing.step)
        run.say(f"{cfg.run_name} is finished, {standing.step:,} steps: {run.directory}; resume=false would begin again")
        return standing.results.get(trainer.headline.name)
    wandb = {"mode": cfg.wandb.mode, "project": cfg.project_name, "name": cfg.run_name, "id": start.meta.get("wandb_id")}
    text = OmegaConf.to_yaml({**cfg, "objective_metric": str(trainer.headline)})  # who compares runs need not know objectives
    run.begin(text, wandb, start.step if start.continues else None, standing.evaluation_due)  # last: it moves a former run aside
    size = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    run.say(f"{cfg.run_name}: {size:,} parameters, {trainer.total_steps:,} steps on {source.spec.name}")
    run.say(hardware.describe(dist, objective.model.dtype))
    if cfg.eval_only:
        if stop := evaluate(trainer):
            run.stop(stop, standing.step, "an evaluation saves nothing")
    else:
        # an error is reported before the keeper waits for what is being written
        with Keeper(cfg, run, trainer.saved, objective.judged_by, start.step if start.continues else -1) as trainer.keeper, cli.reporting():
            train(trainer)
    run.finish(standing.step)
    return standing.results.get(trainer.headline.name)


def build_problem(cfg: DictConfig, dist: Dist, run: RunDirectory, start: resume.Start) -> tuple[Source, Objective, Sync, torch.nn.Module]:
    """The data and the net, the same on every rank, and what keeps it so; as training calls it, the net may be wrapped."""
    with dist.main_first():  # it may fill a cache
        source = make(cfg.data, "data")
    check_files({f"data_path={cfg.data_path}: the dataset": source.spec.fingerprint}, dist)
    if cfg.plan:
        net = make_objective(cfg.arch, cfg.seed, source.spec, plan.NOWHERE)
        remembered = Memory(build_dense(cfg.optim.dense, net.trained())).like({}, 1)
        plan.settle(cfg, dist, source.plan, net, remembered, partial(beginning, cfg, source, plan.NOWHERE), run.say)
    with dist.agreed():
        objective = make_objective(cfg.arch, cfg.seed, source.spec)
        if cfg.init_from and dist.is_main and start.folder is None:
            objective.load_saved(begin_with(cfg.init_from, "model", objective, run.say))
        sync = make(cfg.sync, "sync", notices=NOTICES)
    objective.place(dist)
    check_files({f"{part['path']}: {name}": part["sha256"] for name, part in objective.frozen().items()}, dist)
    same_everywhere(objective.shared(), dist)
    if start.folder is None and not cfg.eval_only:
        objective.prepare(dist, source, Noise(cfg.seed, 0, dist.owned_shards(cfg.shards), dist.device))
        check_same(objective.shared(), dist)
    return source, objective, sync, sync.wrap(objective, dist)


def beginning(cfg: DictConfig, source: Source, device: torch.device, shards: Sequence[int]) -> tuple[dict[str, torch.Tensor], Context]:
    """What the first step would see of these shards."""
    batch = to_device(to_tensors([source.train_batch(0, shard) for shard in shards]), device)
    return batch, Context(0.0, Noise(cfg.seed, 0, shards, device))


def build(
    cfg: DictConfig, dist: Dist, run: RunDirectory, source: Source, objective: Objective, sync: Sync, wrapped: torch.nn.Module
) -> Trainer:
    """Everything that updates the weights."""
    parameters, tables = sync.parameters, objective.tables()
    owned, shard_size = dist.owned_shards(cfg.shards), source.plan.examples_per_update // cfg.shards
    check_passes(cfg, dist.world_size, shard_size)

    first = partial(beginning, cfg, source, dist.device)
    weights, most_rows = list(parameters.values()), shard_size * len(dist.owned_shards(cfg.shards, rank=0))
    size = shards_at_once(cfg, shard_size, len(owned), dist.device, weights, lambda n: objective.rehearse(*first(owned[:n])))
    parts = [owned[i : i + size] for i in range(0, len(owned), size)]
    ema = EMA(parameters, tables if cfg.ema_tables else {}, cfg.ema_rate) if cfg.ema else None
    trainer = Trainer(
        cfg=cfg, dist=dist, run=run, source=source, objective=objective, sync=sync, wrapped=wrapped,
        verdicts=Verdicts(cfg.on_nonfinite, dist.device, NOTICES), meter=Meter(cfg.shards),
        parts=parts, carries=Carries(parts, lambda: objective.initial_carry(first(owned[:1])[0])),
        sparse=build_sparse(cfg.optim.get("sparse"), tables, most_rows, dist, [ema.before_rows_change] if ema is not None else []),
        dense=build_dense(cfg.optim.dense, parameters),
        schedule=build_schedule(cfg.optim.schedule, source.plan.total_steps, source.plan.steps_per_epoch),
        ema=ema,
        headline=objective.judged_by(cfg.objective_metric),
    )  # fmt: skip
    if hardware.peak_flops(dist.device, objective.model.dtype):
        trainer.flops_per_example = objective.flops_per_example(*first(owned[:1]))
    if cfg.compile in (True, "max") or (cfg.compile == "auto" and dist.device.type == "cuda"):
        objective.compile_net(graphs=cfg.compile == "max")
    trainer.saved = enter_parts(trainer)
    return trainer


def enter_parts(trainer: Trainer) -> Registry:
    """Every part enters what checkpoints hold of it; for an evaluation, the weights alone."""
    cfg, objective, ema, meter, carries = trainer.cfg, trainer.objective, trainer.ema, trainer.meter, trainer.carries

    def origin() -> Origin:
        assert trainer.verdicts.settled, "nothing is saved that may not have been finite"
        lr = trainer.dense[-1].param_groups[0]["base_lr"] * trainer.schedule(trainer.step)
        return Origin.here(OmegaConf.to_yaml(cfg), trainer.source.spec.fingerprint, trainer.run.wandb_id, lr, objective.frozen())

    saved = Registry(origin, WithTables(trainer.sync, objective.tables(), trainer.dist))
    saved.add("model", objective.saved, objective.load_saved, any_precision=cfg.eval_only)
    if ema is not None:
        saved.add("ema", ema.state, ema.load, otherwise="use ema=false")
    if not cfg.eval_only:
        memory, owned = Memory(trainer.dense, refusing=cfg.on_nonfinite == "skip"), trainer.dist.owned_shards(cfg.shards)
        saved.add("optimizer", memory.state, memory.load, memory.like)
        saved.add_by_shard("carry", carries.state, carries.load, carries.like, any_precision=True)
        saved.add_by_shard("meter", partial(meter.state, owned), partial(meter.load, device=trainer.dist.device), meter.like)
        trainer.source.enter(saved)
    return saved


def train(trainer: Trainer) -> None:
    """Step, log, then evaluate, decide and save, until the run has its length or somebody asks it to stop."""
    cfg, standing, plan = trainer.cfg, trainer.standing, trainer.source.plan
    trainer.objective.train()
    stream = ShardStream(trainer.source, trainer.parts, standing.step, plan.total_steps)
    with closing(train_loader(stream, cfg.num_workers, trainer.dist.device.type == "cuda")) as loader:
        after_step(trainer, trainer.dist.sums(trainer.keeper.report()))  # what was left to do when the run was interrupted
        clock = Clock()
        while standing.step < plan.total_steps:
            with clock.waiting():
                _, parts = next(loader)
            train_step(trainer, parts)
            standing.step += 1
            clock.steps, clock.examples = clock.steps + 1, clock.examples + plan.examples_per_update
            logs = standing.step % cfg.log_interval == 0 or standing.step == plan.total_steps
            standing.evaluation_due = plan.evaluates_after(standing.step)
            if logs or standing.evaluation_due or trainer.verdicts.noticed or trainer.keeper.saves_now():
                trainer.verdicts.settle()  # what is not finite is neither shown nor kept
            if logs:
                log(trainer, clock)
                clock = Clock()
            if after_step(trainer, trainer.verdicts.take_notices()):
                clock = Clock()
        trainer.keeper.wait_until_saved()


def train_step(trainer: Trainer, parts: list[dict]) -> None:
    """One step: statistics of the whole batch first, then sum locally, reduce, divide once, update."""
    cfg, objective, sync, verdicts = trainer.cfg, trainer.objective, trainer.sync, trainer.verdicts
    sync.zero()
    seen = []
    for i, (shards, part) in enumerate(zip(trainer.parts, parts, strict=True)):
        batch = to_device(part, trainer.dist.device)
        context = Context(trainer.step / trainer.total_steps, Noise(cfg.seed, trainer.step, shards, trainer.dist.device))
        seen.append((batch, trainer.carries.get(i, partial(objective.initial_carry, batch)), context))
    objective.look_ahead([part[:2] for part in seen])
    with torch.no_grad():
        totals = sync.sums([objective.statistics(*part) for part in seen])
    outs = []
    for i, (batch, carry, context) in enumerate(seen):
        with sync.backward(last=i == len(seen) - 1):
            outs.append(trainer.wrapped(batch, carry, replace(context, totals=totals)))
            outs[-1].loss.backward()
    checked = [grad for optimizer in trainer.sparse for grad in optimizer.local_grads()]
    verdicts.add(trainer.step + 1, sync.finish([out.weight for out in outs], checked, trainer.keeper.report(), verdicts.lag > 0))
    if problem := verdicts.settle(verdicts.lag):
        skip(trainer, problem)
        return
    for shards, out in zip(trainer.parts, outs, strict=True):
        trainer.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])
    if cfg.grad_clip is not None:
        sync.clip(cfg.grad_clip)
    set_lr([*trainer.sparse, *trainer.dense], trainer.schedule(trainer.step + 1))
    for optimizer in (*trainer.sparse, *trainer.dense):
        optimizer.step()
    if trainer.ema is not None:
        trainer.ema.update()
    trainer.carries.put(out.carry for out in outs)


def skip(trainer: Trainer, problem: str) -> None:
    """A step that is not taken: all ranks know, and all do the same."""
    for optimizer in trainer.sparse:
        optimizer.zero_grad()  # forgets the step's look-ups
    trainer.carries.put([None] * len(trainer.parts))  # fresh carries: the same ones would fail again, as the weights stay
    trainer.run.say(f"skipped step {trainer.step + 1}: {problem}")


def log(trainer: Trainer, clock: Clock) -> None:
    """One row of metrics, named as users of the published code know them."""
    means, plan = trainer.meter.read(trainer.dist), trainer.source.plan
    row = {f"train/{name}": value for name, value in means.items()}
    row["train/lr"] = trainer.dense[-1].param_groups[0]["lr"]
    if plan.steps_per_epoch is not None:
        row["epoch"] = trainer.step / plan.steps_per_epoch
    row |= clock.speeds(max(1, trainer.source.spec.seq_len), trainer.sync.take_wait_s(), trainer.keeper.take_stall_s())
    row |= hardware.load(trainer.dist, trainer.objective.model.dtype, trainer.flops_per_example * row["speed/examples_per_s"])
    trainer.run.log(trainer.step, row)
    headline = trainer.objective.headline.name
    trainer.run.progress(trainer.step, trainer.total_steps, means.get("loss"), headline, means.get(headline), row["speed/examples_per_s"])


def after_step(trainer: Trainer, reports: Sequence[float]) -> bool:
    """Evaluate, decide, save and perhaps end, by the sums of all ranks' reports. Returns whether there was an evaluation."""
    cfg, standing, keeper = trainer.cfg, trainer.standing, trainer.keeper
    stop, wanted = keeper.decide(reports)
    evaluated = standing.evaluation_due and not stop
    if evaluated:
        stop = evaluate(trainer)
        wanted = wanted or cfg.checkpoint_every_eval or standing.step == trainer.total_steps
    keeper.save_if(wanted, bool(stop), evaluated and not stop)
    if stop:
        keeper.wait_until_saved()
        same = "the same command" if cfg.resume is not False else "the same command without resume=false"
        trainer.run.stop(stop, standing.step, f"{same} goes on from there")
    return evaluated


def evaluate(trainer: Trainer) -> int:
    """Every example of every set exactly once over all ranks. Returns the signal that cut it short, or 0."""
    cfg, dist, source, objective, standing = trainer.cfg, trainer.dist, trainer.source, trainer.objective, trainer.standing
    size = cfg.eval_batch_size or min(1024, max(1, source.plan.examples_per_update // 8))
    evaluation = Evaluation(dist, standing.step, trainer.run, cfg.eval_save_outputs)
    objective.eval()
    try:
        with torch.no_grad(), trainer.ema.applied() if trainer.ema is not None else nullcontext():
            for name, examples in source.eval_sets().items():
                evaluators = [*source.evaluators(name), *objective.evaluators(examples.padding(1))]
                mine = eval_batches(examples, size, dist.rank, dist.world_size)
                if stop := evaluation.run(name, mine, lambda batch: objective.predict(to_device(batch, dist.device)), evaluators):
                    return stop
    finally:
        objective.train()
    standing.evaluation_due, standing.results = False, evaluation.finish()
    if standing.results:
        trainer.run.log(standing.step, standing.results)
        trainer.run.say(f"step {standing.step}, held out: {evaluation.summary}")
    if evaluation.text and (cfg.eval_only or standing.step == trainer.total_steps):
        trainer.run.say(evaluation.text)
    return 0


if __name__ == "__main__":
    main()

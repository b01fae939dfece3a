"""Trains any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Read it from top to bottom. `pretrain` turns a configuration into a run: it opens the data, and a
`Trainer` builds the net and what updates the weights. Then `Trainer.train` takes steps
(`train_step`), and logs, evaluates and saves between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

# read when torch is imported: where the host of a store dies, PyTorch prints a page of C++ frames
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# and how long OpenMP's threads spin while they wait for one another: by default so long that beside
# other work on the same cores a step takes many times as long
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from contract import Batch, Carry, Context, Noise, Objective, Prediction, Source
from data.source import fingerprints_of, source_of
from data.stream import (
    Cursors,
    eval_batches,
    first_batch,
    naming_step,
    not_finite,
    train_loader,
)
from models.objective import (
    flops_per_example,
    frozen_files,
    judging_metric,
    load_tensors,
    lower_is_better,
    make_objective,
    prepare,
    saved_tensors,
    shared_tensors,
    start_from,
    statistics_of,
    tables_of,
    to_devices,
)
from optim.averages import EMA
from optim.groups import build_dense, build_sparse
from optim.optimizer_state import OptimizerState, swapping, weights_to_evaluate
from optim.schedule import build_schedule, set_lr
from optim.sync.base import Sync
from optim.sync.replicas import broadcast_from_rank_0, check_same
from trial.memory import group_shards, with_plan
from trial.objective import try_objective
from trial.optimizers import try_optimizers
from trial.predictions import try_predictions
from trial.source import try_source
from utils import carries
from utils.checkpoint import folders, reader, resume
from utils.checkpoint.policy import Checkpointer
from utils.checkpoint.registry import Group, Registry
from utils.command import cli, config
from utils.command.instantiate import make
from utils.command.keys import CONF, HYDRA_ARGUMENTS
from utils.command.limits import check_sync
from utils.command.root import Config
from utils.measure import hardware
from utils.measure.evaluation import Evaluation
from utils.measure.metrics import Clock, Meter
from utils.measure.profile import traced
from utils.plan.cards import forward_dtype
from utils.ranks import distributed, signals
from utils.ranks.alike import check_same_data, check_same_files
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.status import confirm_finished, started_again
from utils.sweep.needed_runs import with_needed_runs
from utils.transfer import batch_to_device


@hydra.main(config_path=str(CONF), config_name="pretrain", **HYDRA_ARGUMENTS)
def app(raw: DictConfig) -> float | None:
    return cli.run_job(raw, reader.config_in, pretrain)


def pretrain(cfg: Config) -> float | None:
    """Trains or evaluates one run. Returns a value for sweepers, the same on every rank."""
    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s)
    signals.defer()  # a request to stop waits for the end of a step, where all ranks save
    cfg = config.publish(cfg, dist)
    with RunDirectory(Path(cfg.checkpoint_path), dist, cfg.eval_only) as run, cli.reporting():
        # a run that its launcher has restarted continues, also with resume=false
        again = started_again(Path(cfg.checkpoint_path))
        start = resume.find(cfg, dist, run.say, again)
        cfg, needed_runs = with_needed_runs(cfg, start.meta, dist, pretrain)
        hardware.tune(cfg.exact, cfg.float64)
        then = start.meta.get("config", {})
        cfg = config.with_arithmetic(cfg, then, dist, forward_dtype(cfg, dist.device))

        # a run that restores no checkpoint begins with its net's initial weights
        is_new = start.folder is None and not cfg.eval_only
        source, fingerprints = open_source(cfg, dist, is_new)
        cfg = with_plan(cfg, source, dist, run.say)
        trainer = Trainer(cfg, dist, run, source, is_new)
        registry = trainer.register_parts(fingerprints, needed_runs)
        start = resume.restore(start, registry, cfg, run.say, trainer.total_steps, trainer.lr_after)
        trainer.try_all(is_new)
        return trainer.train_or_evaluate(start, registry)


def open_source(cfg: Config, dist: Dist, is_new: bool) -> tuple[Source, dict[str, str]]:
    """Returns the data, and texts by which a run recognises its parts."""
    with dist.main_first():  # rank 0 may fill a cache, which the others then read
        source = source_of(cfg.plain())
    with dist.agreed():  # an error on one rank ends all
        shard = dist.owned_shards(cfg.shards)[0]
        fingerprints = fingerprints_of(source, None if cfg.eval_only else shard)
        if cfg.trial and is_new:
            try_source(source, cfg.shards, shard, dist.device)
    # ranks on hosts with other files would train on a mixture, without any error
    check_same_data(fingerprints, cfg.data_path, dist)
    return source, fingerprints


def build_net(
    cfg: Config, source: Source, dist: Dist, say: Callable[[str], None], is_new: bool
) -> Objective:
    """Builds the net with its losses, with the same bits on every rank."""
    with dist.agreed():
        objective = make_objective(cfg.arch, cfg.seed, source.spec)
        if cfg.init_from and dist.is_main and is_new:
            start_from(objective, cfg.init_from, say)
    to_devices(objective, dist)
    frozen = frozen_files(objective).items()
    check_same_files({f"{part['path']}: {name}": part["sha256"] for name, part in frozen}, dist)
    # another machine may draw other initial weights: those of rank 0 count
    broadcast_from_rank_0(shared_tensors(objective), dist)
    # a warm-up before the first step must leave the same bits on all ranks
    if is_new:
        noise = Noise(cfg.seed, 0, dist.owned_shards(cfg.shards), dist.device)
        prepare(objective, dist, source, noise)
        check_same(shared_tensors(objective), dist)
    return objective


class Trainer:
    """One run on one rank.

    Every rank has its own `dist`, its own shards, and hence its own `shard_groups`, `carries` and
    sums in `meter`. It reads data and measures speed by itself, and only rank 0 writes to `run`.
    Where `sync` splits weights, a rank holds its share of `sync.parameters`, `optimizers` and
    `ema`. All else that the training depends on is equal on all ranks at every step.
    """

    checkpointer: Checkpointer  # decides when checkpoints are written

    def __init__(
        self, cfg: Config, dist: Dist, run: RunDirectory, source: Source, is_new: bool
    ) -> None:
        """`is_new`: no checkpoint is restored, so the run begins with this net's weights."""
        self.cfg, self.dist, self.run, self.source = cfg, dist, run, source
        self.total_steps = source.length.total_steps
        self.step = 0  # how many are done
        self.evaluation_due, self.results = False, dict[str, float]()  # of this step

        self.objective = objective = build_net(cfg, source, dist, run.say, is_new)
        with dist.agreed():
            self.sync: Sync = make(cfg.sync, "sync")
        self.sync.wrap(objective, dist)

        with dist.agreed():
            shard_size = source.length.examples_per_update // cfg.shards
            check_sync(cfg, dist.world_size, shard_size)
            # this rank's shards, one group for each micro-batch
            self.shard_groups = group_shards(cfg, source, objective, self.sync)
            # state that passes from step to step, of each micro-batch; None: it begins afresh
            self.carries: list[Carry] = [None] * len(self.shard_groups)
            self.meter = Meter(cfg.shards)
            parameters = self.sync.parameters
            self.ema = EMA(parameters, cfg.ema_rate, cfg.ema_warmup) if cfg.ema else None
            most_rows = shard_size * len(dist.owned_shards(cfg.shards, rank=0))
            tables = tables_of(objective)
            self.sparse = build_sparse(cfg.optim.get("sparse"), tables, most_rows, dist)
            dense = build_dense(cfg.optim["dense"], parameters, self.sync.whole)
            self.optimizers: list[torch.optim.Optimizer] = [*self.sparse, *dense]
            self.schedule = build_schedule(cfg.optim.get("schedule"), source.length)
            self.flops_per_example = 0
            if hardware.peak_flops(dist.device, objective.dtype):
                shards = self.shard_groups[0][:1]
                batch = first_batch(source, cfg.seed, dist.device, shards)
                self.flops_per_example = flops_per_example(objective, *batch)
            if cfg.compile is True:
                objective.compile_net()

    def register_parts(
        self, fingerprints: Mapping[str, str], needed_runs: Mapping[str, str]
    ) -> Registry:
        """Lists what checkpoints hold; an evaluation needs only weights and averages."""
        cfg, objective, ema, sync = self.cfg, self.objective, self.ema, self.sync
        owned, device = self.dist.owned_shards(cfg.shards), self.dist.device
        origin = {
            "config": cfg.plain(),
            "data": fingerprints,
            "frozen": frozen_files(objective),
            "needed_runs": needed_runs,
            **resume.made_with(device, cfg.compile is True),
        }
        weights, load_weights = partial(saved_tensors, objective), partial(load_tensors, objective)
        shared = {"model": Group(weights, load_weights, any_precision=cfg.eval_only)}
        if ema is not None:
            shared["ema"] = Group(ema.state, ema.load, otherwise="use ema=false")
        dense = self.optimizers[len(self.sparse) :]
        if not cfg.eval_only or (swapping(dense) and ema is None):
            optimizers = OptimizerState(dense, sync.parameters)
            shared["optimizer"] = Group(optimizers.state, optimizers.load, optimizers.expected)
        by_shard = {} if cfg.eval_only else self.state_of_shards(owned)
        return Registry(origin, self.dist, owned, shared, by_shard, sync.gathered, sync.share_of)

    def state_of_shards(self, owned: Sequence[int]) -> dict[str, Group]:
        """Lists state that belongs to shards, so that a resume may have another number of ranks."""
        cfg, objective, device = self.cfg, self.objective, self.dist.device

        def initial_carry(shards: Sequence[int]) -> Carry:
            return objective.initial_carry(first_batch(self.source, cfg.seed, device, shards)[0])

        def load_carries(by_shard: carries.ByShard) -> None:
            self.carries = [
                carries.join(by_shard, shards, partial(initial_carry, shards))
                for shards in self.shard_groups
            ]

        @cache
        def shapes_of_a_shard() -> Mapping[str, Tensor]:
            tensors = carries.flatten(initial_carry(owned[:1]))
            return {name: tensor.to("meta") for name, tensor in tensors.items()}

        meter = self.meter
        sums_of_owned, load_sums = partial(meter.state, owned), partial(meter.load, device=device)
        groups = {
            "carry": Group(
                lambda: carries.cut(self.carries, self.shard_groups),
                load_carries,
                lambda there, step: shapes_of_a_shard() if there else {},
                any_precision=True,
            ),
            "meter": Group(sums_of_owned, load_sums, meter.expected, any_precision=True),
        }
        if hasattr(self.source, "cursor"):
            cursors = Cursors(self.source, lambda: self.step, owned)
            groups["cursor"] = Group(cursors.state, cursors.load, cursors.expected)
        return groups

    def lr_after(self, step: int) -> float:
        """Returns the rate of the last optimizer after so many steps, by this run's schedule."""
        return self.optimizers[-1].param_groups[0]["base_lr"] * float(self.schedule(step))

    def progress(self) -> dict[str, Any]:
        """Returns what a checkpoint records of this moment beside tensors."""
        assert self.sync.all_read, "a step that may not be finite must not be saved"
        return {
            "step": self.step,
            "lr": self.lr_after(self.step),
            "evaluation_due": self.evaluation_due,
            "results": self.results,
            "wandb_id": self.run.wandb_id,
        }

    def try_all(self, is_new: bool) -> None:
        """Checks the optimizers, the objective of a new run, and the names of metrics."""
        cfg, objective, source, sync = self.cfg, self.objective, self.source, self.sync
        device, is_tried = self.dist.device, cfg.trial and is_new
        with self.dist.agreed():
            if cfg.trial:
                try_optimizers(cfg.optim["dense"], sync.parameters, sync.splits_weights)
            if is_tried:
                first = partial(first_batch, source, cfg.seed, device)
                try_objective(objective, first, cfg.shards, self.dist.owned_shards(cfg.shards))
        asked, outputs = cfg.objective_metric, cfg.eval_save_outputs
        try_predictions(asked, outputs, source, objective, device, not is_tried)

    def train_or_evaluate(self, start: resume.Start, registry: Registry) -> float | None:
        """Does what is left of the run, which may be nothing. Returns the metric that judges it, or
        its negative, so that lower is better.
        """
        cfg, run = self.cfg, self.run
        self.step, self.evaluation_due = start.step, start.meta.get("evaluation_due", False)
        self.results = start.meta.get("results", {})
        # of evaluations; decides which checkpoint is the best
        metric = judging_metric(self.objective, cfg.objective_metric)
        if start.is_finished(self.total_steps):
            if self.dist.is_main:
                confirm_finished(run.directory, self.step, run.say)
                folders.tidy(run.directory / "checkpoints", run.say)
            run.say(
                f"{cfg.run_name} is finished, {self.step:,} steps: {run.directory}; resume=false"
                " would begin again"
            )
            return lower_is_better(metric, self.results)
        self.open_directory(start, metric)
        if cfg.eval_only:
            if stop := self.evaluate():
                run.stop(stop, self.step, "an evaluation saves nothing")
        else:
            self.checkpointer = Checkpointer(cfg, run, registry, metric, start)
            # an error is reported before the checkpointer waits for what is being written
            with self.checkpointer, cli.reporting():
                self.train()
        run.finish(self.step)
        return lower_is_better(metric, self.results)

    def open_directory(self, start: resume.Start, metric: str) -> None:
        """Opens the run's directory and log.

        Called after everything that can be refused, because it moves an earlier run aside.
        """
        cfg, run, objective = self.cfg, self.run, self.objective
        # tools that compare runs look up here which metric judges them
        text = OmegaConf.to_yaml(cfg.plain() | {"objective_metric": metric})
        loggers = {
            "log": cfg.log,
            "mode": cfg.wandb.mode,
            "project": cfg.project_name,
            "name": cfg.run_name,
            "id": start.meta.get("wandb_id") if start.continues else None,
        }
        saved_step = start.step if start.continues else None
        size = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        data = self.source.spec.name
        facts = {
            "parameters": size,
            "dtype": str(objective.dtype).removeprefix("torch."),
            "data": data,
            "fingerprint": self.source.spec.fingerprint,
            "total_steps": self.step if cfg.eval_only else self.total_steps,
            "examples_per_step": self.source.length.examples_per_update,
            "tokens_per_example": self.source.spec.seq_len,
        }
        run.begin(text, loggers, saved_step, self.evaluation_due, facts, cfg.report)
        length = "evaluated" if cfg.eval_only else f"{self.total_steps:,} steps"
        judged = ""
        if self.source.eval_sets() and not cfg.eval_only:
            way = "lowest" if metric.startswith("-") else "highest"
            judged = f"; best: {way} {metric.removeprefix('-')}"
        run.say(f"{cfg.run_name}: {size:,} parameters, {length} on {data}{judged}")
        run.say(hardware.describe(self.dist, objective.dtype))
        remarks = [hardware.known_fault(self.dist.device), self.source.remark]
        if cfg.compile is True:
            remarks.append("the net is compiled when it is first used, which may take minutes")
        last = self.total_steps
        if not cfg.eval_only and last > 1 and self.lr_after(last) > self.lr_after(last - 1):
            warm = f"lr_warmup_steps={cfg.lr_warmup_steps}"
            remarks.append(f"the learning rate still rises in the last step, {last:,} ({warm})")
        for remark in filter(None, remarks):
            run.say(remark)

    def train(self) -> None:
        """Takes steps; after each one logs, evaluates and saves as due."""
        cfg, length, sync, checkpointer = self.cfg, self.source.length, self.sync, self.checkpointer
        device = self.dist.device
        steps, pins_memory = range(self.step, self.total_steps), device.type == "cuda"
        groups, workers = self.shard_groups, cfg.num_workers
        loader = train_loader(self.source, groups, steps, workers, pins_memory)
        self.objective.train()
        for optimizer in swapping(self.optimizers):
            optimizer.train()
        traces = cfg.profile_steps if self.dist.is_main else None
        with (
            closing(loader),
            traced(traces, self.run.directory, self.run.say) as step_is_done,
        ):
            # does what was due when the run was interrupted
            self.after_step(self.dist.sums(checkpointer.requests()))
            clock = Clock({"all_reduce": sync.take_wait_s, "checkpoint": checkpointer.take_stall_s})
            while self.step < self.total_steps:
                with clock.waiting():
                    _, micro_batches = next(loader)
                batches = [batch_to_device(rows, device) for rows in micro_batches]
                norms = self.train_step(batches, checkpointer.requests)
                self.step, self.results = self.step + 1, {}
                step_is_done()
                clock.tick(length.examples_per_update)
                logs = self.is_logged(self.step)
                self.evaluation_due = length.evaluates_after(self.step)
                pauses = logs or self.evaluation_due or checkpointer.saves_after(self.step)
                if pauses or sync.has_requests:
                    # before anything is logged or saved
                    sync.check_finite(cfg.on_nonfinite, newest=True)
                if logs:
                    self.log(clock, norms)
                    clock.restart()
                if self.after_step(sync.take_requests()):
                    clock.restart()
            checkpointer.wait_until_saved(self.progress())

    def is_logged(self, step: int) -> bool:
        return step % self.cfg.log_interval == 0 or step == self.total_steps

    def train_step(
        self, micro_batches: list[Batch], requests: Callable[[], Sequence[float]]
    ) -> dict[str, Tensor]:
        """Sums gradients over micro-batches and ranks, divides once, then updates.

        `requests` says what this rank asks of all. Returns the norms of a step that is logged.
        """
        objective, sync = self.objective, self.sync
        progress, logs = self.step / self.total_steps, self.is_logged(self.step + 1)
        if self.cfg.compile is True:  # CUDA graphs may use the memory of the last step's results
            torch.compiler.cudagraph_mark_step_begin()
        sync.zero()

        # All that a micro-batch begins with follows from the seed, the step and its shards, so that
        # the numbers of ranks and micro-batches change nothing but the rounding of sums.
        inputs = []
        for i, (shards, batch) in enumerate(zip(self.shard_groups, micro_batches, strict=True)):
            carry = self.carries[i]
            if carry is None:
                carry = objective.initial_carry(batch)
            noise = Noise(self.cfg.seed, self.step, shards, self.dist.device)
            inputs.append((batch, carry, Context(progress, noise)))

        # A loss of the whole batch, such as a contrastive one, needs sums over all ranks before its
        # first forward pass. Most need none, and then nothing is sent.
        with torch.no_grad():
            totals = sync.sum_statistics([statistics_of(objective, *given) for given in inputs])

        # Gradients add up over micro-batches. A sync may send them from within the last backward
        # pass; the others send nothing before `finish`.
        outputs = []
        for i, (batch, carry, context) in enumerate(inputs):
            with naming_step(context.noise, batch), sync.micro_batch(last=i == len(inputs) - 1):
                outputs.append(sync.forward(batch, carry, replace(context, totals=totals)))
                outputs[-1].loss.backward()

        # Sums of dense gradients over all ranks are complete here, and not divided yet; the rows of
        # tables are gathered in their optimizer's step.
        norms = sync.finish()

        # All ranks learn the weight of the whole batch, and whether the step is finite on every
        # rank, so that all skip it or none. On CUDA they read the latter one step later, because
        # the host does not wait for the device.
        weights = [out.weight for out in outputs]
        row_grads = [grad for optimizer in self.sparse for grad in optimizer.local_grads()]
        blame = partial(not_finite, self.shard_groups, micro_batches)
        weight = sync.agree(self.step + 1, weights, norms, row_grads, requests(), blame)
        if reason := sync.check_finite(self.cfg.on_nonfinite):
            self.skip(reason)
            return {}

        # By the first shard, not by rank: with `exact`, where each micro-batch is one shard, the
        # meter adds the same rows in one order at any number of ranks.
        for shards, out in zip(self.shard_groups, outputs, strict=True):
            self.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])

        # From here on, every rank does the same to the same weights, or to its share of them.
        measured = dict[str, Tensor]()
        if logs:
            measured["grad_norm"] = sync.total_norm(norms.values()) / weight
            before = [p.detach().clone() for p in sync.parameters.values()]
        # The one division, by the weight of the whole batch: a mean of the ranks' means would
        # depend on who had how many tokens.
        sync.divide(weight, norms.values(), self.cfg.grad_clip)
        # The step that is being taken counts, so that a warm-up does not begin with a rate of 0.
        set_lr(self.optimizers, self.schedule(self.step + 1))
        for optimizer in self.optimizers:
            optimizer.step()
        if logs:
            measured |= sync.norms_since(before)
        if self.ema is not None:
            self.ema.update()
        self.carries = [out.carry for out in outputs]
        return measured

    def skip(self, reason: str) -> None:
        """Skips a step whose gradients are not finite: the weights stay. All ranks do the same."""
        for optimizer in self.sparse:
            optimizer.zero_grad()  # drops the step's look-ups
        # unchanged weights and carries would fail again, so slots start afresh
        self.carries = [None] * len(self.shard_groups)
        self.run.event("skipped", self.step + 1, reason=reason)
        self.run.say(f"skipped step {self.step + 1}: {reason}")

    def log(self, clock: Clock, norms: Mapping[str, Tensor]) -> None:
        """Logs one row of metrics, named as users of the published code know them."""
        spec, objective = self.source.spec, self.objective
        means = self.meter.read(self.dist)
        row = {f"train/{name}": value for name, value in means.items()}
        row["train/lr"] = float(self.optimizers[-1].param_groups[0]["lr"])
        row |= {f"train/{name}": float(norm) for name, norm in norms.items()}
        if (steps_per_epoch := self.source.length.steps_per_epoch) is not None:
            row["epoch"] = self.step / steps_per_epoch
        row |= clock.speeds(max(1, spec.seq_len))
        speed = row["speed/examples_per_s"]
        row |= hardware.use_of_devices(self.dist, objective.dtype, self.flops_per_example * speed)
        self.run.log(self.step, row)
        name = objective.headline
        self.run.progress(
            "step", self.step, self.total_steps, means.get("loss"), name, means.get(name), speed
        )

    def after_step(self, requests: Sequence[float]) -> bool:
        """Evaluates, saves and stops as due and as ranks asked; `requests` are sums over all ranks.

        Returns True if it evaluated.
        """
        cfg, checkpointer, is_last = self.cfg, self.checkpointer, self.step == self.total_steps
        stop, wanted = checkpointer.decide(requests)
        evaluated = self.evaluation_due and not stop
        if evaluated:
            if is_last:  # an evaluation that fails must not lose the trained weights
                checkpointer.save_unsaved(self.progress())
            stop = self.evaluate()
            wanted = wanted or cfg.checkpoint_every_eval or is_last
        if stop or wanted or evaluated or checkpointer.saves_after(self.step):
            checkpointer.save_if(self.progress(), wanted, bool(stop), evaluated and not stop)
        if stop:
            checkpointer.wait_until_saved(self.progress())
            without = " without resume=false" if cfg.resume is False else ""
            self.run.stop(stop, self.step, f"the same command{without} goes on from there")
        return evaluated

    def evaluate(self) -> int:
        """Evaluates every example of every set, or the first `eval_examples`, exactly once, split
        over the ranks.

        Returns the signal that cut it short, or 0.
        """
        cfg, dist, source, objective = self.cfg, self.dist, self.source, self.objective
        size = cfg.eval_batch_size or min(1024, max(1, source.length.examples_per_update // 8))
        evaluation = Evaluation(dist, self.step, self.run, cfg.eval_save_outputs)
        optimizers_own = weights_to_evaluate(self.optimizers, self.sync.parameters)
        averages = self.ema.applied() if self.ema is not None else nullcontext()
        objective.progress = self.run.progress
        started = time.perf_counter()

        def predict(batch: Batch) -> Prediction:
            return objective.predict(batch_to_device(batch, dist.device))

        # with averages in place of the weights, if there are any; all is put back afterwards
        objective.eval()
        try:
            with torch.no_grad(), optimizers_own, averages:
                for name, examples in source.eval_sets().items():
                    evaluators = [
                        *source.evaluators(name),
                        *objective.evaluators(examples.padding(1)),
                    ]
                    place = dist.rank, dist.world_size
                    count = min(len(examples), cfg.eval_examples or len(examples))
                    batches = eval_batches(examples, size, *place, count)
                    if stop := evaluation.run(name, count, batches, predict, evaluators):
                        return stop
        finally:
            objective.train()
        self.evaluation_due, self.results = False, evaluation.finish()
        if self.results:
            seconds = round(time.perf_counter() - started, 3)
            self.run.log(self.step, self.results)
            what = "evaluated" if cfg.eval_only else "held out"  # or whatever data the user gives
            self.run.say(f"step {self.step}, {what}: {evaluation.summary}")
            self.run.event("evaluated", self.step, seconds=seconds)
            self.run.draw_report()
        if evaluation.text and (cfg.eval_only or self.step == self.total_steps):
            self.run.say(evaluation.text)
        return 0


if __name__ == "__main__":
    cli.main(app)

"""Trains any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Read it from top to bottom. `pretrain` turns a configuration into a run. A `Trainer` is that run: it
builds the data, the net and what updates the weights, then `train` takes steps (`train_step`) and
logs, evaluates and saves between them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

# read when torch is imported: where the host of a store dies, PyTorch prints a page of C++ frames
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from contract import Arrays, Batch, Context, Noise, Objective, Prediction
from data.source import fingerprints_of, source_of
from data.stream import (
    Cursors,
    ShardStream,
    eval_batches,
    naming_step,
    not_finite,
    read_shards,
    to_tensors,
    train_loader,
)
from models.objective import (
    flops_per_example,
    frozen_files,
    load_tensors,
    make_objective,
    prepare,
    rehearse,
    saved_tensors,
    shared_tensors,
    start_from,
    statistics_of,
    tables_of,
    to_devices,
    trained,
)
from optim.averages import EMA
from optim.groups import build_dense, build_sparse
from optim.optimizer_state import OptimizerState, swapping, weights_to_evaluate
from optim.schedule import build_schedule, set_lr
from optim.sync.agreement import Agreement
from optim.sync.base import Sync
from optim.sync.norms import Norms
from optim.sync.replicas import broadcast_from_rank_0, check_same
from trial.objective import try_objective
from trial.optimizers import remembered, try_optimizers
from trial.predictions import try_predictions
from trial.source import try_source
from utils.carries import Carries
from utils.checkpoint import folders, reader, resume
from utils.checkpoint.policy import Checkpointer, Metric
from utils.checkpoint.registry import Origin, Registry, RunState
from utils.command import cli, config
from utils.command.instantiate import make
from utils.command.keys import CONF, HYDRA_ARGUMENTS
from utils.command.limits import check_sync
from utils.command.root import Config
from utils.measure import hardware
from utils.measure.evaluation import Evaluation
from utils.measure.metrics import Clock, Meter
from utils.measure.profile import traced
from utils.plan.attempts import largest_that_fits
from utils.plan.cards import forward_dtype
from utils.plan.needs import META, count
from utils.plan.settle import with_plan
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
    """Trains or evaluates one run. Returns the objective metric on every rank, for sweepers."""
    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s)
    signals.defer()  # a request to stop waits for the end of a step, where all ranks save
    cfg = config.publish(cfg, dist)
    with RunDirectory(Path(cfg.checkpoint_path), dist, cfg.eval_only) as run, cli.reporting():
        # a launcher that starts a failed run again must not begin it afresh, whatever resume= says
        again = started_again(Path(cfg.checkpoint_path))
        start = resume.find(cfg, dist, run.say, again)
        cfg, needed_runs = with_needed_runs(cfg, start.meta, dist, pretrain)
        hardware.tune(cfg.exact, cfg.float64)
        cfg = resume.with_arithmetic(cfg, start, dist, forward_dtype(cfg, dist.device))
        is_new = start.folder is None and not cfg.eval_only
        trainer = Trainer(cfg, dist, run, needed_runs, is_new)
        start = resume.restore(start, trainer.saved, cfg, dist, run.say, trainer.total_steps)
        trainer.try_all()
        trainer.train_or_evaluate(start)
        return trainer.run_state.results.get(trainer.judging_metric.name)


class Trainer:
    """One run on one rank.

    Every rank has its own `dist`, its own shards, and hence its own `shard_groups`, `carries` and
    sums in `meter`. It reads data and measures speed by itself, and only rank 0 writes to `run`.
    Where `sync` or a table splits weights, a rank holds its share of `sync.parameters`, `dense`,
    `sparse` and `ema`. All else that the training depends on is equal on all ranks at every step.
    """

    checkpointer: Checkpointer  # decides when checkpoints are written

    def __init__(
        self,
        cfg: Config,
        dist: Dist,
        run: RunDirectory,
        needed_runs: Mapping[str, str],
        is_new: bool,
    ) -> None:
        """`is_new`: no checkpoint is restored, so the run begins with this net's weights."""
        self.cfg, self.dist, self.run = cfg, dist, run
        self.needed_runs, self.is_new = needed_runs, is_new
        self.owned = dist.owned_shards(cfg.shards)
        with dist.main_first():  # rank 0 may fill a cache, which the others then read
            self.source = source_of(cfg.plain())
        with dist.agreed():
            self.fingerprints = fingerprints_of(
                self.source, None if cfg.eval_only else self.owned[0]
            )
            if cfg.trial and is_new:
                try_source(self.source, cfg.shards, self.owned[0], dist.device)
        # ranks on hosts with other files would train on a mixture, without any error
        check_same_data(self.fingerprints, cfg.data_path, dist)
        with dist.agreed():  # an error on one rank ends all
            self.sync: Sync = make(cfg.sync, "sync")
        if cfg.plan:
            self.cfg = self.with_plan()
        self.objective = self.build_net()
        self.wrapped = self.sync.wrap(self.objective, dist)  # the objective as training calls it
        with dist.agreed():
            self.build_updates()

    def build_net(self) -> Objective:
        """Builds the net with its losses, with the same bits on every rank."""
        cfg, dist, source = self.cfg, self.dist, self.source
        with dist.agreed():
            objective = make_objective(cfg.arch, cfg.seed, source.spec)
            if cfg.init_from and dist.is_main and self.is_new:
                start_from(objective, cfg.init_from, self.run.say)
        to_devices(objective, dist)
        frozen = frozen_files(objective).items()
        check_same_files({f"{part['path']}: {name}": part["sha256"] for name, part in frozen}, dist)
        # another machine may draw other initial weights: those of rank 0 count
        broadcast_from_rank_0(shared_tensors(objective), dist)
        # what the net does before its first step must leave the same bits on all ranks
        if self.is_new:
            prepare(objective, dist, source, Noise(cfg.seed, 0, self.owned, dist.device))
            check_same(shared_tensors(objective), dist)
        return objective

    def build_updates(self) -> None:
        """Builds everything that updates the weights."""
        cfg, dist, objective, sync = self.cfg, self.dist, self.objective, self.sync
        length, parameters, tables = self.source.length, sync.parameters, tables_of(objective)
        check_sync(cfg, dist.world_size, self.shard_size)
        # this rank's shards, one group for each micro-batch
        self.shard_groups = self.group_shards()
        # state that slots keep from step to step
        self.carries = Carries(
            self.shard_groups, lambda: objective.initial_carry(self.first_batch(self.owned[:1])[0])
        )
        self.meter = Meter(cfg.shards)
        # whether recent steps were finite, and requests; read late on CUDA
        self.agreement = Agreement(cfg.on_nonfinite, sync)
        self.ema = EMA(parameters, cfg.ema_rate, cfg.ema_warmup) if cfg.ema else None
        most_rows = self.shard_size * len(dist.owned_shards(cfg.shards, rank=0))
        self.sparse = build_sparse(cfg.optim.get("sparse"), tables, most_rows, dist)
        self.dense = build_dense(cfg.optim["dense"], parameters, sync.whole)
        self.optimizers: list[torch.optim.Optimizer] = [*self.sparse, *self.dense]
        self.schedule = build_schedule(cfg.optim.get("schedule"), length)
        self.norms = Norms(sync)  # of logged steps
        # of evaluations; decides which checkpoint is the best
        self.judging_metric = Metric.judging(objective, cfg.objective_metric)
        self.flops_per_example = 0
        if hardware.peak_flops(dist.device, objective.dtype):
            self.flops_per_example = flops_per_example(objective, *self.first_batch(self.owned[:1]))
        if cfg.compile is True:
            objective.compile_net()
        self.saved = self.register_parts()  # what checkpoints hold

    def register_parts(self) -> Registry:
        """Registers what checkpoints hold; an evaluation needs only weights and averages."""
        cfg, objective, ema = self.cfg, self.objective, self.ema
        saved = Registry(self.origin, self.sync, self.owned)
        weights, load_weights = partial(saved_tensors, objective), partial(load_tensors, objective)
        saved.add("model", weights, load_weights, any_precision=cfg.eval_only)
        if ema is not None:
            saved.add("ema", ema.state, ema.load, otherwise="use ema=false")
        optimizers = OptimizerState(self.dense, self.sync.parameters)
        if not cfg.eval_only or (swapping(self.dense) and ema is None):
            saved.add("optimizer", optimizers.state, optimizers.load, optimizers.like)
        if cfg.eval_only:
            return saved
        # state that belongs to shards, so that a resume may have another number of ranks
        carries, meter = self.carries, self.meter
        saved.add_by_shard("carry", carries.state, carries.load, carries.like, any_precision=True)
        sums_of_owned = partial(meter.state, self.owned)
        load_sums = partial(meter.load, device=self.dist.device)
        saved.add_by_shard("meter", sums_of_owned, load_sums, meter.like, any_precision=True)
        if hasattr(self.source, "cursor"):
            cursors = Cursors(self.source, lambda: self.step, self.owned)
            saved.add_by_shard("cursor", cursors.state, cursors.load, cursors.like)
        return saved

    def origin(self) -> Origin:
        """Returns what a checkpoint records about the run that writes it."""
        assert self.agreement.all_read, "a step that may not be finite must not be saved"
        base_lr = self.dense[-1].param_groups[0]["base_lr"]
        lr = base_lr * float(self.schedule(self.step))
        frozen, wandb_id = frozen_files(self.objective), self.run.wandb_id
        device = self.dist.device.type
        config, compiled = self.cfg.plain(), self.cfg.compile is True
        return Origin(
            config,
            self.fingerprints,
            wandb_id,
            lr,
            frozen,
            self.needed_runs,
            compile=compiled,
            device=device,
        )

    @property
    def shard_size(self) -> int:
        return self.source.length.examples_per_update // self.cfg.shards

    @property
    def total_steps(self) -> int:
        return self.source.length.total_steps

    @property
    def run_state(self) -> RunState:
        return self.saved.run_state

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.run_state.step

    def first_batch(
        self, shards: Sequence[int], device: torch.device | None = None
    ) -> tuple[Batch, Context]:
        """Returns what the first step would see of these shards."""
        device = device or self.dist.device
        rows = read_shards(self.source, 0, shards)
        noise = Noise(self.cfg.seed, 0, shards, device)
        return batch_to_device(rows, device), Context(0.0, noise)

    def to_batch(self, rows: Arrays) -> Batch:
        return batch_to_device(to_tensors([rows]), self.dist.device)

    def group_shards(self) -> list[range]:
        """Groups this rank's shards into micro-batches, which the device computes one after
        another. Ranks may differ in it: results do not depend on it.
        """
        cfg, owned, shard_size = self.cfg, self.owned, self.shard_size
        at_once = len(owned)
        if cfg.exact:
            at_once = 1  # gradients are added shard by shard
        elif isinstance(cfg.micro_batch_size, int):
            at_once = cfg.micro_batch_size // shard_size
        elif cfg.micro_batch_size == "auto" and self.dist.device.type == "cuda":

            def attempt(shards: int) -> None:
                rehearse(self.objective, *self.first_batch(owned[:shards]))

            smallest, parameters = f"one shard of {shard_size} examples", self.sync.parameters
            at_once = largest_that_fits(at_once, attempt, parameters.values(), smallest)
        return [owned[i : i + at_once] for i in range(0, len(owned), at_once)]

    def with_plan(self) -> Config:
        """Returns the configuration with the micro-batch that fits, counted on a net without
        numbers. With plan=show, prints what was counted and ends the run.
        """
        cfg = self.cfg
        net = make_objective(cfg.arch, cfg.seed, self.source.spec, META)
        optimizer_state = remembered(cfg.optim["dense"], trained(net)).values()
        first_batch = partial(self.first_batch, device=META)
        train_on = partial(rehearse, net, keep=True)
        needs = count(net, optimizer_state, cfg.ema, first_batch, train_on)
        split = self.sync.splits_weights
        return with_plan(cfg, needs, self.shard_size, split, self.dist, self.run.say)

    def try_all(self) -> None:
        """Tries the optimizers, the objective of a new run, and the names of metrics."""
        cfg, objective, is_tried = self.cfg, self.objective, self.cfg.trial and self.is_new
        with self.dist.agreed():
            if cfg.trial:
                parameters, splits = self.sync.parameters, self.sync.splits_weights
                try_optimizers(cfg.optim["dense"], parameters, splits)
            if is_tried:
                try_objective(objective, self.first_batch, cfg.shards, self.owned)
        asked, outputs = cfg.objective_metric, cfg.eval_save_outputs
        try_predictions(asked, outputs, self.source, objective, self.to_batch, not is_tried)

    def train_or_evaluate(self, start: resume.Start) -> None:
        """Does what is left of the run, which may be nothing."""
        cfg, run = self.cfg, self.run
        if start.is_finished(self.total_steps):
            if self.dist.is_main:
                confirm_finished(run.directory, self.step, run.say)
                folders.tidy(run.directory / "checkpoints", run.say)
            run.say(
                f"{cfg.run_name} is finished, {self.step:,} steps: {run.directory}; resume=false"
                " would begin again"
            )
            return
        self.open_directory(start)
        if cfg.eval_only:
            if stop := self.evaluate():
                run.stop(stop, self.step, "an evaluation saves nothing")
        else:
            metric, saved_step = self.judging_metric, start.step if start.continues else -1
            self.checkpointer = Checkpointer(cfg, run, self.saved, metric, saved_step)
            # an error is reported before the checkpointer waits for what is being written
            with self.checkpointer, cli.reporting():
                self.train()
        run.finish(self.step)

    def open_directory(self, start: resume.Start) -> None:
        """Opens the run's directory and log.

        Called after everything that can be refused, because it moves an earlier run aside.
        """
        cfg, run, objective = self.cfg, self.run, self.objective
        # tools that compare runs look up here which metric judges them
        text = OmegaConf.to_yaml(cfg.plain() | {"objective_metric": str(self.judging_metric)})
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
            "total_steps": self.total_steps,
            "examples_per_step": self.source.length.examples_per_update,
            "tokens_per_example": self.source.spec.seq_len,
        }
        run.begin(text, loggers, saved_step, self.run_state.evaluation_due, facts, cfg.report)
        length = "evaluated" if cfg.eval_only else f"{self.total_steps:,} steps"
        run.say(f"{cfg.run_name}: {size:,} parameters, {length} on {data}")
        run.say(hardware.describe(self.dist, objective.dtype))
        for remark in (hardware.known_fault(self.dist.device), self.source.remark):
            if remark:
                run.say(remark)

    def train(self) -> None:
        """Takes steps; after each one logs, evaluates and saves as due."""
        cfg, run_state, length = self.cfg, self.run_state, self.source.length
        device = self.dist.device
        pins_memory = device.type == "cuda"
        stream = ShardStream(self.source, self.shard_groups, run_state.step, length.total_steps)
        self.objective.train()
        for optimizer in swapping(self.dense):
            optimizer.train()
        traces = cfg.profile_steps if self.dist.is_main else None
        with (
            closing(train_loader(stream, cfg.num_workers, pins_memory)) as loader,
            traced(traces, self.run.directory, self.run.say) as step_is_done,
        ):
            # does what was due when the run was interrupted
            self.after_step(self.dist.sums(self.checkpointer.requests()))
            clock = self.restarted_clock()
            while run_state.step < length.total_steps:
                with clock.waiting():
                    _, micro_batches = next(loader)
                self.train_step([batch_to_device(rows, device) for rows in micro_batches])
                run_state.step += 1
                step_is_done()
                clock.tick(length.examples_per_update)
                logs = self.is_logged(run_state.step)
                run_state.evaluation_due = length.evaluates_after(run_state.step)
                pauses = logs or run_state.evaluation_due or self.checkpointer.saves_now()
                if pauses or self.agreement.has_requests:
                    self.agreement.read()  # before anything is logged or saved
                if logs:
                    self.log(clock)
                    clock = self.restarted_clock()
                if self.after_step(self.agreement.take_requests()):
                    clock = self.restarted_clock()
            self.checkpointer.wait_until_saved()

    def restarted_clock(self) -> Clock:
        """Returns a new clock, and drops the waits that belong to the time before it."""
        self.sync.take_wait_s()
        self.checkpointer.take_stall_s()
        return Clock()

    def is_logged(self, step: int) -> bool:
        return step % self.cfg.log_interval == 0 or step == self.total_steps

    def train_step(self, micro_batches: list[Batch]) -> None:
        """Sums gradients over micro-batches and ranks, divides once, then updates."""
        objective, sync, agreement = self.objective, self.sync, self.agreement
        progress, logs = self.step / self.total_steps, self.is_logged(self.step + 1)
        if self.cfg.compile is True:  # CUDA graphs may use the memory of the last step's results
            torch.compiler.cudagraph_mark_step_begin()
        sync.zero()

        # All that a micro-batch begins with follows from the seed, the step and its shards, so that
        # neither the number of ranks nor that of micro-batches changes a result.
        inputs = []
        for i, (shards, batch) in enumerate(zip(self.shard_groups, micro_batches, strict=True)):
            carry = self.carries.get(i, partial(objective.initial_carry, batch))
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
            with naming_step(context.noise, batch), sync.backward(last=i == len(inputs) - 1):
                outputs.append(self.wrapped(batch, carry, replace(context, totals=totals)))
                outputs[-1].loss.backward()

        # The sums over all ranks are complete here, and not divided yet.
        norms = sync.finish()

        # All ranks learn the weight of the whole batch, and whether the step is finite on every
        # rank, so that all skip it or none. On CUDA they read the latter one step later, because
        # the host does not wait for the device.
        weights = [out.weight for out in outputs]
        row_grads = [grad for optimizer in self.sparse for grad in optimizer.local_grads()]
        requests = self.checkpointer.requests()
        blame = partial(not_finite, self.shard_groups, micro_batches)
        weight = agreement.ask(self.step + 1, weights, norms, row_grads, requests, blame)
        if reason := agreement.read(except_last=agreement.lag):
            self.skip(reason)
            return

        # By shard, not by rank: the meter adds its rows in one order at any number of ranks.
        for shards, out in zip(self.shard_groups, outputs, strict=True):
            self.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])

        # From here on, every rank does the same to the same weights, or to its share of them.
        if logs:
            self.norms.before_update(weight, norms.values())
        # The one division, by the weight of the whole batch: a mean of the ranks' means would
        # depend on who had how many tokens.
        sync.divide(weight, norms.values(), self.cfg.grad_clip)
        # The step that is being taken counts, so that a warm-up does not begin with a rate of 0.
        set_lr(self.optimizers, self.schedule(self.step + 1))
        for optimizer in self.optimizers:
            optimizer.step()
        if logs:
            self.norms.after_update()
        if self.ema is not None:
            self.ema.update()
        self.carries.put(out.carry for out in outputs)

    def skip(self, reason: str) -> None:
        """Skips a step whose gradients are not finite: the weights stay. All ranks do the same."""
        for optimizer in self.sparse:
            optimizer.zero_grad()  # drops the step's look-ups
        # unchanged weights and carries would fail again, so slots start afresh
        self.carries.put([None] * len(self.shard_groups))
        self.run.event("skipped", self.step + 1, reason=reason)
        self.run.say(f"skipped step {self.step + 1}: {reason}")

    def log(self, clock: Clock) -> None:
        """Logs one row of metrics, named as users of the published code know them."""
        spec, objective = self.source.spec, self.objective
        means = self.meter.read(self.dist)
        row = {f"train/{name}": value for name, value in means.items()}
        row["train/lr"] = float(self.dense[-1].param_groups[0]["lr"])
        row |= {f"train/{name}": norm for name, norm in self.norms.take().items()}
        if (steps_per_epoch := self.source.length.steps_per_epoch) is not None:
            row["epoch"] = self.step / steps_per_epoch
        waited_s, stalled_s = self.sync.take_wait_s(), self.checkpointer.take_stall_s()
        row |= clock.speeds(max(1, spec.seq_len), waited_s, stalled_s)
        speed = row["speed/examples_per_s"]
        row |= hardware.use_of_devices(self.dist, objective.dtype, self.flops_per_example * speed)
        self.run.log(self.step, row)
        name = objective.headline
        self.run.progress(
            "step", self.step, self.total_steps, means.get("loss"), name, means.get(name), speed
        )

    def after_step(self, requests: Sequence[float]) -> bool:
        """Evaluates, saves and stops as due, and as the sums of all ranks' requests say.

        Returns whether it evaluated.
        """
        cfg, run_state, checkpointer = self.cfg, self.run_state, self.checkpointer
        stop, wanted = checkpointer.decide(requests)
        evaluated = run_state.evaluation_due and not stop
        if evaluated:
            if run_state.step == self.total_steps:
                # an evaluation that fails must not lose the trained weights
                checkpointer.save_unsaved()
            stop = self.evaluate()
            wanted = wanted or cfg.checkpoint_every_eval or run_state.step == self.total_steps
        checkpointer.save_if(wanted, bool(stop), evaluated and not stop)
        if stop:
            checkpointer.wait_until_saved()
            without = " without resume=false" if cfg.resume is False else ""
            self.run.stop(stop, run_state.step, f"the same command{without} goes on from there")
        return evaluated

    def evaluate(self) -> int:
        """Evaluates every example of every set exactly once, split over the ranks.

        Returns the signal that cut it short, or 0.
        """
        cfg, dist, source, run_state = self.cfg, self.dist, self.source, self.run_state
        objective = self.objective
        size = cfg.eval_batch_size or min(1024, max(1, source.length.examples_per_update // 8))
        evaluation = Evaluation(dist, run_state.step, self.run, cfg.eval_save_outputs)
        optimizers_own = weights_to_evaluate(self.dense, self.sync.parameters)
        averages = self.ema.applied() if self.ema is not None else nullcontext()
        clock = Clock()

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
        run_state.evaluation_due, run_state.results = False, evaluation.finish()
        if run_state.results:
            self.run.log(run_state.step, run_state.results)
            self.run.say(f"step {run_state.step}, held out: {evaluation.summary}")
            self.run.event("evaluated", run_state.step, seconds=round(clock.seconds, 3))
            self.run.draw_report()
        if evaluation.text and (cfg.eval_only or run_state.step == self.total_steps):
            self.run.say(evaluation.text)
        return 0


if __name__ == "__main__":
    cli.main(app)

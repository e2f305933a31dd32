"""The parts of a run, each given what it uses. A world has chosen who starts workers, and where."""

from __future__ import annotations

from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.inbox import FromLearner, Inbox
from dora_rl.controller.loop import Control
from dora_rl.controller.ports import FleetPort, FromInstances, KeeperPort, LearnerPort, RewardPort
from dora_rl.controller.recovery import Ranks, Recovery, Staff
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import RunFiles
from dora_rl.controller.scoring import EnvRelay, ScoringPool
from dora_rl.controller.world import Notify, World
from dora_rl.setup.prepare import Prepared
from dora_rl.workers.pool import Workers


def build_run(
    prepared: Prepared,
    files: RunFiles,
    control: Control,
    workers: Workers,
    world: World,
    notify: Notify,
) -> Run:
    config, layout, train = prepared.config, prepared.layout, prepared.train
    carrier, section = world.carrier, config.reward
    num_scorers = section.num_workers if section.functions or section.teacher_url else 0
    scoring = ScoringPool(workers, num_scorers, section.worker_timeout_s, {"base_dir": "."})
    envs = EnvRelay(
        workers,
        config,
        lambda request, epoch: (
            train.prompt(control.state.groups[request.group].prompt)
            if control.is_generating(request, epoch)
            else None
        ),
    )
    ranks = Ranks(workers, layout, files.run_dir)
    kept = KeptVersions(config, files, carrier, workers, notify)
    recovery = Recovery(control, workers, files.journals, ranks, scoring, envs, notify)
    if prepared.evaluation is not None:
        recovery.evaluations = kept.evaluate_on(
            prepared.evaluation, scoring, prepared.decode, layout.evaluator_extra()
        )
    instances = FromInstances(control, files, workers, carrier, envs, prepared.decode, notify)
    handlers = {
        "instance": instances.hear,
        "learner": FromLearner(control, files, train, world, recovery, kept, notify).hear,
        "reward": scoring.hear,
        "env": envs.hear,
        "evaluator": kept.hear,
    }
    inbox = Inbox(workers, recovery, files, notify, handlers, world.services)
    control.connect(
        workers,
        FleetPort(control, files, train, workers, carrier, envs),
        LearnerPort(control, files, train, workers, ranks, world, notify),
        RewardPort(control, files, train, scoring, notify, bool(section.teacher_url)),
        KeeperPort(control, files, kept, envs, notify),
        files.log,
    )
    staff = Staff(config, layout, workers, ranks, scoring, envs, kept)
    return Run(config, layout, control, files, world, inbox, workers, staff, kept, notify)

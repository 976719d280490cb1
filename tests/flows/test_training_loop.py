# SPDX-License-Identifier: Apache-2.0
"""The training loop's own decisions: which prompts an iteration takes, and which weights the rollout is left with."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from prefect.logging import disable_run_logger

import flows.train as loop
from models.algorithms.rollout_correction import RatioError
from models.weights.canary import Agreement, CanaryLimits
from tasks.actors.reward_group import Scores
from tasks.actors.trainer_group import Synced
from tasks.config.sections import CUDA_CANARY_TOLERANCE, OTHER_ENGINE_TOLERANCE
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.model_registry import HELD_OUT_TAG
from tasks.records.run_store import CheckpointStore
from tasks.records.tracking import Tracker
from tasks.run import instruments
from tasks.run.collect import Iteration
from tasks.run.kept_stages import KeptStages
from tasks.run.schedule import is_exported, is_measured, is_saved, is_validated
from tasks.run.summary import version_tags
from tasks.run.training import OPTIMIZER_STEPS, TrainingRun
from tasks.stages.sync import sync_weights
from tasks.system.stopwatch import Stopwatch
from tests.support.mlflow_store import mlflow_in

SHARING = {"fsdp_config": {"ulysses_sequence_parallel_size": 2}}
PROMPTS = [f"prompt {number}" for number in range(7)]


def run_of(settings: dict[str, Any], **parts: Any) -> TrainingRun:
    """A run of these settings without actors: `parts` are what a test needs of it."""
    empty: Any = dict.fromkeys(("trainer", "tracker", "store", "stages", "guards", "report"))
    return TrainingRun(TrainConfig.model_validate(settings), **empty | parts)


def order_of(prompts: list[str], batch: int, iterations: range, seed: int = 3) -> list[list[str]]:
    """The prompts of some iterations."""
    settings = {
        "data": {"train_batch_size": batch},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": batch}},
        "trainer": {"seed": seed},
    }
    run = run_of(settings, inputs=SimpleNamespace(train=prompts))
    return [run.prompts(iteration) for iteration in iterations]


def test_every_epoch_takes_every_prompt_once_in_an_order_of_its_own() -> None:
    first, second = (order_of(PROMPTS[:6], 2, range(start, start + 3)) for start in (1, 4))
    for epoch in (first, second):
        assert sorted(prompt for part in epoch for prompt in part) == PROMPTS[:6]
    assert first != second
    assert first != order_of(PROMPTS[:6], 2, range(1, 4), seed=4)


def test_the_order_is_that_of_the_first_release() -> None:
    """A resumed run goes on in the order that it began with; seven prompts in twos leave one out of each epoch."""
    taken = order_of(PROMPTS, 2, range(1, 7))
    numbers = [[int(prompt[-1]) for prompt in part] for part in taken]
    assert numbers == [[2, 4], [1, 3], [5, 0], [1, 4], [5, 0], [2, 3]]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ((2, 3, 5), {is_saved: [2, 4, 6, 7], is_validated: [3, 6, 7], is_exported: [5], is_measured: [3, 5, 6, 7]}),
        ((0, 0, 0), {is_saved: [7], is_validated: [7], is_exported: [], is_measured: [7]}),
    ],
)
def test_each_nth_iteration_and_the_last_are_saved_and_validated(every: tuple[int, int, int], expected: dict) -> None:
    """The end's weights are exported in any case, so `export_freq` counts the others alone."""
    frequencies = dict(zip(("save_freq", "test_freq", "export_freq"), every, strict=True))
    config = TrainConfig.model_validate({"trainer": frequencies | {"total_training_steps": 7}})
    found = {chosen: [number for number in range(1, 8) if chosen(config, number)] for chosen in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("averages", "made", "why"),
    [
        (False, 0, "no iteration made an optimiser step"),
        (False, 1, None),
        (True, 0, "no iteration made an optimiser step"),
        (True, 7, "of the 8 optimiser steps after which actor.ema first moves its average only 7 were made"),
        (True, 8, None),
        (True, None, None),
    ],
)
def test_what_is_exported_has_moved_once_the_average_has(averages: bool, made: int | None, why: str | None) -> None:
    """`None` steps: an engine that does not count them."""
    run = run_of({"actor_rollout_ref": {"actor": {"ema": {"enable": averages}}}}, inputs=None)
    run.learned = {} if made is None else {OPTIMIZER_STEPS: float(made)}
    assert (run.why_unmoved, run.moved) == (why, why is None)


@pytest.mark.parametrize(
    ("trainer", "policy", "tolerance"),
    [
        ({}, {}, 0.0),
        ({}, {"rollout": {"name": "vllm_omni"}}, OTHER_ENGINE_TOLERANCE),
        ({"n_gpus_per_node": 2}, {"actor": SHARING}, OTHER_ENGINE_TOLERANCE),
        ({"device": "cuda"}, {}, CUDA_CANARY_TOLERANCE),
        ({"device": "cuda", "canary_tolerance": 0.5}, {}, 0.5),
        ({"canary_tolerance": 0.0}, {"rollout": {"name": "vllm_omni"}}, 0.0),
    ],
)
def test_a_sync_allows_a_difference_only_where_both_engines_sum_in_another_order(
    trainer: dict[str, Any], policy: dict[str, Any], tolerance: float
) -> None:
    """Else weights that did not arrive would pass."""
    settings = {"trainer": trainer | {"canary_missing_share": 0.25}, "actor_rollout_ref": policy}
    assert run_of(settings, inputs=None).canary_limits == CanaryLimits(tolerance, 0.25)


def test_an_update_without_an_optimiser_step_is_marked() -> None:
    """The engine counts the steps of the whole run, also over a restart; one that counts none is believed."""
    run = run_of({}, inputs=None)
    with disable_run_logger():  # there is no flow here
        for iteration, (made, skipped) in enumerate(((0.0, 1.0), (2.0, 0.0), (2.0, 1.0), (4.0, 0.0)), 1):
            run.take_update(iteration, {OPTIMIZER_STEPS: made})
            assert run.learned == {OPTIMIZER_STEPS: made, "actor/update_skipped": skipped}
        run.take_update(5, {"actor/lr": 0.5})
    assert run.learned == {"actor/lr": 0.5, "actor/update_skipped": 0.0}


@pytest.mark.parametrize("saved", [0, 2])
def test_a_run_that_goes_on_knows_what_was_spent_and_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    """Also one that was killed before its first checkpoint: what it makes again is in MLflow and not counted twice."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())
    tracker, store, loaded = Tracker(tracking, "a-run"), CheckpointStore(tmp_path / "checkpoints"), []
    parts: Any = {"store": store, "stages": KeptStages(tmp_path / "stages"), "inputs": SimpleNamespace(digest="data")}
    run = run_of({}, tracker=tracker, trainer=SimpleNamespace(load=loaded.append), **parts)
    tracker.log_step(0, {"val/reward/mean": 0.25})
    for step in (1, 2, 3):
        tracker.log_step(step, {"cost/gpu_hours": 0.5 * step} | ({"val/reward/mean": 0.75} if step == 2 else {}))
        if step == saved:
            store.save(run.state(step, {OPTIMIZER_STEPS: 6.0}), lambda folder: (folder / "weights").write_text("new"))
    run.resume(store.latest(run.config.digest(), "data"))
    assert run.learned == ({OPTIMIZER_STEPS: 6.0} if saved else {}), "by which an update without a step is known"
    assert (run.iteration, loaded) == (saved, [store.path(saved) / "trainer"] if saved else [])
    assert (run.spent, run.held_out, run.held_out_of) == ({"cost/gpu_hours": 1.5}, 0.75, 2)


@pytest.mark.parametrize(("kept", "follows"), [(False, 3), (True, 2)])
def test_a_run_whose_mlflow_run_is_gone_goes_on_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, follows: int
) -> None:
    """The last iteration's record was in the old one. Where its scores are kept, the new one gets it, too."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())
    old, new = Tracker(tracking, "a-run"), Tracker(tracking, "a-run")
    store, stages = CheckpointStore(tmp_path / "checkpoints"), KeptStages(tmp_path / "stages")
    parts: Any = {"store": store, "stages": stages, "inputs": SimpleNamespace(digest="data")}
    before = run_of({}, tracker=old, **parts)
    store.save(before.state(2), lambda folder: (folder / "weights").write_text("new"))
    for iteration in (1, 2) if kept else ():
        scores = Scores(pd.DataFrame({"uid": ["a"], "reward": [0.5]}), {}, {})
        stages.keep_scores(before.state(iteration), iteration - 1, scores, [])
    for tracker, next_iteration in ((old, 2), (new, follows)):
        run = run_of({}, tracker=tracker, trainer=SimpleNamespace(load=lambda folder: None), **parts)
        run.resume(store.latest(run.config.digest(), "data"))
        assert (run.iteration, run.next_iteration) == (2, next_iteration)
        assert [stages.has_scores(number) for number in (1, 2)] == [False, kept], "what nothing asks for is gone"


@pytest.mark.parametrize(("measured", "told"), [(None, None), (0, None), (2, "0.750")])
def test_a_version_tells_the_held_out_reward_of_its_own_weights_alone(measured: int | None, told: str | None) -> None:
    """With `trainer.export_freq` between two validations the last one is of other weights, of the base model's even."""
    run = run_of({}, inputs=None, guards=SimpleNamespace(sentence=lambda now: None))
    run.iteration, run.held_out, run.held_out_of = 2, 0.75, measured
    assert version_tags(run).get(HELD_OUT_TAG) == told


def test_what_is_kept_of_an_iteration_goes_once_a_checkpoint_has_it(tmp_path: Path) -> None:
    """A run that is killed now goes on after iteration 2, and need not sample and score iteration 3 anew."""
    store, stages = CheckpointStore(tmp_path / "checkpoints", keep=2), KeptStages(tmp_path / "stages")
    known: Any = {"tracker": SimpleNamespace(run_id="run"), "inputs": SimpleNamespace(digest="data")}
    run = run_of({}, store=store, stages=stages, **known)
    scores = Scores(pd.DataFrame({"uid": ["a"], "reward": [0.5]}), {}, {})
    for run.iteration in (1, 2, 3):
        stages.keep_scores(run.state(run.iteration), 0, scores, [])
        if run.iteration < 3:
            store.save(run.state(run.iteration), lambda folder: (folder / "weights").write_text("new"))
    run.forget_stages()
    assert [stages.scores(run.state(number), {}) for number in (1, 2)] == [None, None]
    found = stages.scores(run.state(3), {})
    assert found is not None
    assert found[0] == 0, "the policy that sampled, which may be older than the iteration before"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("resumed", "kept"), [(False, None), (True, None), (True, 2)])
def test_a_rollouts_trace_has_the_sampling_of_its_iteration(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, resumed: bool, kept: int | None
) -> None:
    """One step ahead that is done during the update before; after a restart, before the first iteration. Where the
    rollout is kept nothing is sampled again, and the trace of a process that was killed is not written over."""
    sampled: list[int] = []
    traces: dict[str, list[int]] = {}

    def submit(run: Any, number: int, clock: Stopwatch) -> Any:
        return SimpleNamespace(number=number)

    def finish_ahead(run: Any, iteration: Any, clock: Stopwatch) -> None:
        sampled.append(iteration.number)

    def collect(run: Any, number: int, clock: Stopwatch, asked: Any) -> Any:
        if asked is None and number != kept:
            sampled.append(number)
        return SimpleNamespace(number=number, metrics={})

    def update_and_save(run: TrainingRun, iteration: Any, clock: Stopwatch) -> None:
        run.iteration = iteration.number

    def log_bytes(data: bytes, name: str) -> None:
        traces[name] = [*sampled]
        sampled.clear()

    monkeypatch.setattr(instruments, "start_traces", lambda group, numbers, settings: sampled.clear() or {0: None})
    monkeypatch.setattr(instruments, "collect_traces", lambda actors: {0: b"trace"})
    for stage in (submit, finish_ahead, collect, update_and_save):
        monkeypatch.setattr(loop, stage.__name__, stage)
    monkeypatch.setattr(loop, "sync", lambda run, clock, which: Synced(Agreement(0.0), 0.0, {}))
    settings = {"one_step_off_policy": ahead, "total_training_steps": 4, "profile": {"iterations": [2, 4]}}
    parts: Any = {
        "trainer": SimpleNamespace(group=None),
        "tracker": SimpleNamespace(log_bytes=log_bytes),
        "stages": SimpleNamespace(has_rollout=lambda iteration: iteration == kept),
        "online_parts": SimpleNamespace(rollout=SimpleNamespace(group=object()), reward=None),
    }
    run = run_of({"trainer": settings}, inputs=None, **parts)
    monkeypatch.setattr(run, "actor_groups", lambda: {"rollout": object()})
    monkeypatch.setattr(run, "recorded", lambda number: True)
    run.iteration = 1 if resumed else 0
    asked = loop.sample_again(run, Stopwatch())
    for number in range(run.next_iteration, 5):
        _, asked = loop.iterate(run, number, asked, Stopwatch(number))
    assert traces == {f"profile/{number:06d}/rollout_0.json.gz": [number] for number in (2, 4) if number != kept}


def test_every_iteration_but_the_first_is_sampled_ahead_and_none_that_there_will_not_be() -> None:
    """Nor one that an earlier process has sampled."""
    settings = {"one_step_off_policy": True, "total_training_steps": 4}
    run = run_of({"trainer": settings}, inputs=None, stages=SimpleNamespace(has_rollout=lambda number: number == 3))
    assert [number for number in range(2, 7) if loop._is_sampled_ahead(run, number)] == [2, 4]


@pytest.mark.parametrize("first", [{OPTIMIZER_STEPS: 1.0, "actor/nonfinite_steps": 1.0}, {OPTIMIZER_STEPS: 0.0}])
def test_an_update_that_left_its_first_step_out_is_not_the_one_whose_ratios_are_looked_at(
    first: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step with a gradient of NaN nothing is recorded, nor of one for which every group tied, so the next update
    is the first that shows rounding."""
    far_off = {"actor/ratio_deviation/first": 1.0, "actor/pg_clipfrac": 1.0}
    updates = iter(
        [
            first,
            {OPTIMIZER_STEPS: 3.0, "actor/nonfinite_steps": 0.0} | far_off,
        ]
    )
    monkeypatch.setattr(loop, "update", lambda *_: next(updates))
    monkeypatch.setattr(loop, "profiled", lambda *_: nullcontext())
    said: list[str] = []
    monkeypatch.setattr(loop, "say", said.append)
    online = SimpleNamespace(rollout=SimpleNamespace(asleep=lambda clock, with_policy: nullcontext()))
    run = run_of({"trainer": {"save_freq": 0}}, inputs=None, online_parts=online)
    monkeypatch.setattr(run, "actor_groups", dict)
    with disable_run_logger():  # there is no flow here
        loop.update_and_save(run, Iteration(number=1), Stopwatch())
        assert (run.iteration, run.has_updated) == (1, False)
        with pytest.raises(RatioError):
            loop.update_and_save(run, Iteration(number=2), Stopwatch())
    assert run.iteration == 1, "no checkpoint has the second"
    assert [line.split(" after ")[0] for line in said] == ["the first update was done"], "once, though it made no step"


class Weights:
    """Stands for the ranks and their way to the workers: `held` are those that the rollout samples with, and
    `version` the iteration that they are said to be of."""

    def __init__(self, held: str) -> None:
        self.held, self.version = held, -1

    def broadcast(self, rollout: Any, canary: Any, version: int, limits: Any, which: str) -> Synced:
        self.held, self.version = which, version
        return Synced(Agreement(0.0), 0.0, {})


@pytest.mark.parametrize(("which", "version"), [("policy", 3), ("old", 3), ("average", 3), ("previous", 2)])
def test_weights_are_sent_as_those_of_the_iteration_that_made_them(
    monkeypatch: pytest.MonkeyPatch, which: Any, version: int
) -> None:
    """What is sampled again, one step ahead, is by the policy of the update before: its lag is 1 as it was."""
    weights = Weights("nothing")
    monkeypatch.setattr(loop, "sync_weights", sync_weights.fn)  # the task's function alone: there is no flow here
    run = run_of({}, inputs=None, trainer=weights, online_parts=SimpleNamespace(rollout=None, canary=None))
    run.iteration = 3
    loop.sync(run, Stopwatch(), which)
    assert (weights.held, weights.version) == (which, version)


@pytest.mark.parametrize(
    ("actor", "algorithm", "iteration", "samples_with", "measured"),
    [
        ({}, {"name": "flow_grpo"}, 1, "policy", "policy"),
        ({"ema": {"enable": True}}, {"name": "flow_grpo"}, 1, "policy", "average"),
        ({}, {"name": "diffusion_nft"}, 1, "old", "policy"),
        ({"ema": {"enable": True}}, {"name": "diffusion_nft"}, 1, "old", "average"),
        # One and the same, so nothing is sent: the old policy is a copy, or nothing has been trained yet.
        ({}, {"name": "diffusion_nft", "old_policy_decay_schedule": "copy"}, 1, "policy", "policy"),
        ({"ema": {"enable": True}}, {"name": "diffusion_nft"}, 0, "old", "old"),
    ],
)
def test_a_validation_measures_its_weights_and_gives_the_rollout_its_own_back(
    monkeypatch: pytest.MonkeyPatch, actor: dict, algorithm: dict, iteration: int, samples_with: str, measured: str
) -> None:
    """Else every iteration after a validation would sample with the average."""
    weights, seen = Weights(samples_with), []

    def draw_and_score(*arguments: Any) -> Any:
        seen.append(weights.held)
        return SimpleNamespace(reward=0.5, sheet=None)

    monkeypatch.setattr(loop, "sync_weights", sync_weights.fn)  # the task's function alone: there is no flow here
    monkeypatch.setattr(loop, "draw_and_score", draw_and_score)
    monkeypatch.setattr(loop, "keep_grid", lambda config, iteration, grid: None)
    settings = {"algorithm": algorithm, "actor_rollout_ref": {"actor": actor}}
    online = SimpleNamespace(rollout=SimpleNamespace(embeddings=None), reward=None, canary=None)
    run = run_of(settings, inputs=SimpleNamespace(test=[]), trainer=weights, online_parts=online)
    run.iteration = iteration
    assert run.sampling_weights == samples_with
    loop.validate_weights(run, Stopwatch())
    assert (seen, weights.held) == ([measured], samples_with)

# SPDX-License-Identifier: Apache-2.0
"""A sweep's study, in a file of its own: what was tried, what came of it, and what is left to try."""

from itertools import product
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import check_distribution_compatibility
from optuna.trial import FixedTrial, TrialState

from models.config.bounds import MOST_NUMPY_SEED
from tasks.config.errors import ConfigError
from tasks.config.identity import shaping
from tasks.config.overrides import flat
from tasks.config.sweep import SweepConfig
from tasks.config.tree import TrainConfig

COMPARED = "compared"
"""Attribute of a study: `_compared` at the sweep's first start."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
optuna.logging.set_verbosity(optuna.logging.WARNING)  # else it tells the terminal that there is a study


def open_study(search: SweepConfig, folder: Path) -> optuna.Study:
    """The sweep's study, in a file of its own.

    Its sampler draws on: by `search.seed` alone it would draw the first points again in a study that has them.
    """
    warmup = max(search.warmup_steps, 1)  # at iteration 0 the base model is measured: that is no trial's merit
    median = optuna.pruners.MedianPruner(n_startup_trials=search.startup_trials, n_warmup_steps=warmup)
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'optuna.db'}",
        study_name=search.name,
        pruner=median if search.pruner == "median" else optuna.pruners.NopPruner(),
        direction=search.direction,
        load_if_exists=True,
    )
    study.sampler = _sampler(search, len(study.get_trials(deepcopy=False)))
    return study


def check_continued(study: optuna.Study, search: SweepConfig, config: TrainConfig) -> None:
    """What a sweep compares stays what it was at its first start, which is kept in the study.

    Raises:
        ConfigError: the metric, what the runs have in common or the kind of a field's values is another: the study
            would take old runs for new points, and Optuna the new values for none.
    """
    now = _compared(search, config)
    before = study.user_attrs.get(COMPARED, now) | {"search.direction": study.direction.name.lower()}
    advice = f"but the sweep {search.name} of before, which a sweep of its name continues,"
    for path in sorted(before.keys() & now.keys()):
        if now[path] != before[path]:
            raise ConfigError(f"{path} is {now[path]}, {advice} began with {before[path]}: give another search.name")
    for name, dimension in search.space.items():
        drawn = [trial.distributions[name] for trial in study.get_trials(deepcopy=False) if name in trial.distributions]
        here = FixedTrial({name: dimension.ends()[0]})
        dimension.suggest(here, name)
        for distribution in drawn:
            try:
                check_distribution_compatibility(distribution, here.distributions[name])
            except ValueError as error:
                raise ConfigError(
                    f"search.space: {name} is {dimension.model_dump(exclude_unset=True)}, {advice} drew it from "
                    f"{distribution}: choices stay the same, and so does the kind of a range; give another search.name"
                ) from error
    if COMPARED not in study.user_attrs:  # it begins, or is older than this record
        study.set_user_attr(COMPARED, now)


def _compared(search: SweepConfig, config: TrainConfig) -> dict[str, Any]:
    """Dotted path -> value of what makes the runs' results comparable, but for the fields that are tried."""
    rollout = {"val_kwargs": config.actor_rollout_ref.rollout.val_kwargs.model_dump(mode="json")}
    beside = {
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"total_training_steps": config.trainer.total_training_steps},
    }
    shared = flat(shaping(config)) | flat(beside)
    tried = tuple(f"{path}." for path in search.space)
    shared = {path: value for path, value in shared.items() if not f"{path}.".startswith(tried)}
    return shared | {"search.metric": search.metric, "search.direction": search.direction}


def _sampler(search: SweepConfig, trials: int) -> optuna.samplers.BaseSampler:
    """What draws the points of a study that has so many trials; each start has a seed of its own."""
    seed = (search.seed + trials) % (MOST_NUMPY_SEED + 1)
    if search.sampler == "tpe":
        return optuna.samplers.TPESampler(n_startup_trials=search.startup_trials, seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed)  # a grid's points are queued; nothing is drawn


def prepare_trials(study: optuna.Study, search: SweepConfig) -> int:
    """Queue what a sweep before this one left undone, and a grid's points; how many runs are left."""
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
    finished = [trial.params for trial in study.get_trials(states=DONE)]
    queued = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(states=[TrialState.WAITING])]
    undone = [trial.params for trial in study.get_trials(states=[TrialState.FAIL])]
    if search.sampler == "grid":
        points = product(*(dimension.grid() for dimension in search.space.values()))
        undone = [dict(zip(search.space, point, strict=True)) for point in points]
    for params in undone:
        if params not in finished and params not in queued:
            study.enqueue_trial(params)
            queued.append(params)
    return len(queued) if search.sampler == "grid" else max(search.trials - len(finished), 0)


def numbers(study: optuna.Study) -> dict[str, int]:
    """State -> trials in it; of those that failed the points that no later trial has done."""
    found = {state.name.lower(): len(study.get_trials(deepcopy=False, states=[state])) for state in TrialState}
    done = [trial.params for trial in study.get_trials(deepcopy=False, states=DONE)]
    failed: list[dict[str, Any]] = []
    for trial in study.get_trials(deepcopy=False, states=[TrialState.FAIL]):
        if trial.params not in done and trial.params not in failed:
            failed.append(trial.params)
    return found | {"fail": len(failed)}

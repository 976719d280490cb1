# SPDX-License-Identifier: Apache-2.0
"""All targets, and the inputs of each."""

from collections.abc import Callable

from benchmarks.bad_inputs import configs, datasets, given, prompts, readers, records, rewards, stores
from benchmarks.bad_inputs.cases import Case

TARGETS: dict[str, Callable[[int], list[Case]]] = {
    configs.MUTATIONS: configs.random_mutations,
    configs.CHOSEN: configs.chosen_values,
    configs.SET: configs.set_strings,
    readers.OVERRIDES: readers.override_files,
    readers.SCRIPTS: readers.scripts,
    readers.PARAMS: readers.params,
    prompts.PROMPTS: prompts.prompt_files,
    readers.CHATS: readers.raw_files,
    given.REWRITTEN: given.functions,
    given.REWARDS: given.rewards,
    rewards.SERVER: rewards.requests,
    rewards.CLIENT: rewards.answers,
    stores.CHECKPOINTS: stores.checkpoints,
    stores.RUN_JSON: stores.run_records,
    datasets.EMBEDDINGS: datasets.embeddings,
    datasets.PAIRS: datasets.preferences,
    records.LINEAGE: records.repositories,
    records.PIDS: records.pid_records,
    records.SWEEPS: records.sweeps,
    records.NAMES: records.names,
}


def all_cases(target: str, seed: int = 0) -> list[Case]:
    """The inputs of one target, a function of the seed."""
    return TARGETS[target](seed)


def whole() -> list[Case]:
    """Inputs of each kind that are right: a code that refused everything would pass all the others."""
    parts = (configs, readers, prompts, given, rewards, stores, datasets, records)
    return [case for part in parts for case in part.whole()]

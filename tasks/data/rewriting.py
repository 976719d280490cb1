# SPDX-License-Identifier: Apache-2.0
"""Prompts that change from iteration to iteration, by a function of the user's own."""

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from models.registry import import_object
from tasks.data.prompt_files import DatasetError, checked_row
from tasks.data.prompts import Prompt

FIELD = "data.rewrite_prompts"
Rewriting = Callable[[Sequence[Prompt], int, int], Sequence[Prompt]]
"""(an iteration's prompts, its number from 1, the run's seed) -> as many prompts with the same uids in the same order.

The same arguments must give the same prompts: a run that is started again asks again.
"""


def get_rewriting(path: str) -> Rewriting:
    """The function at an import path.

    Raises:
        ModuleNotAllowed: this machine's setting does not allow the module.
        ValueError: there is none, or it cannot be called so.
    """
    found = import_object(path, f"{FIELD} is {path}, which")
    if not callable(found):
        raise ValueError(f"{FIELD} {path} is a {type(found).__name__}; it must be a function")
    try:
        inspect.signature(found).bind((), 1, 0)
    except TypeError as error:
        raise ValueError(
            f"{FIELD} {path} cannot be called as function(prompts, iteration, seed): {error}; these are its arguments"
        ) from error
    return found


def rewritten(rewrite: Rewriting, prompts: Sequence[Prompt], iteration: int, seed: int) -> list[Prompt]:
    """What the function makes of an iteration's prompts.

    Raises:
        DatasetError: these are other prompts, or one holds what no prompt may.
    """
    where = f"{FIELD} in iteration {iteration}"
    given = rewrite(list(prompts), iteration, seed)
    if not isinstance(given, Iterable):
        raise DatasetError(f"{where} returned a {type(given).__name__}: it must return a list of Prompts")
    made = list(given)
    if not all(isinstance(prompt, Prompt) for prompt in made):
        kinds = ", ".join(sorted({type(prompt).__name__ for prompt in made}))
        raise DatasetError(f"{where} returned a list of {kinds}: it must return Prompts, as dataclasses.replace makes")
    if [prompt.uid for prompt in made] != [prompt.uid for prompt in prompts]:
        raise DatasetError(
            f"{where} returned {len(made)} prompts that are not the {len(prompts)} given, by uid and order: change "
            "only their text, target and metadata"
        )
    sources = [f"{old.source}, rewritten in iteration {iteration}" for old in prompts]
    made = [replace(new, source=source) for new, source in zip(made, sources, strict=True)]
    for prompt in made:
        _check_metadata(prompt)
        checked_row(prompt.metadata | {"prompt": prompt.prompt, "target": prompt.target}, prompt.source)
    return made


def _check_metadata(prompt: Prompt) -> None:
    """Raise DatasetError for what JSON does not give back: a run started again could not tell that it is the same."""
    try:
        kept = isinstance(prompt.metadata, dict) and json.loads(json.dumps(prompt.metadata)) == prompt.metadata
    except (TypeError, ValueError, RecursionError):
        kept = False
    if not kept:
        raise DatasetError(f"{prompt.source}: the metadata is not what JSON can hold: give a dict of texts and numbers")


def prompts_number(prompts: Iterable[Prompt]) -> int:
    """A whole number below 2^48 that stands for prompts with all that a reward reads of them, as a digest does."""
    said = [(prompt.uid, prompt.prompt, prompt.target, prompt.metadata) for prompt in prompts]
    text = json.dumps(said, sort_keys=True, default=repr)
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest())

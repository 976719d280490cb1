# SPDX-License-Identifier: Apache-2.0
"""Rewards that fail in known ways, imported by reward workers; `folder` is where they remember that they did."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tasks.rewards import Reward, RewardError, RewardResult


def brightness(images, prompts):
    """Mean of all channels, in [0, 255]; the batch's size as a detail."""
    return RewardResult(images.mean(axis=(1, 2, 3)), {"batch": [len(images)] * len(images)})


async def slow_echo(images, prompts):
    """The number in each prompt, all waited for at once."""

    async def answer(prompt):
        await asyncio.sleep(0.01)
        return float(prompt.prompt)

    return np.array(await asyncio.gather(*map(answer, prompts)))


def dies_once(images, prompts, folder):
    """kill -9 of its own process at the first batch it sees."""
    if _count(folder) == 1:
        print("the GPU is gone", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return images.mean(axis=(1, 2, 3))


def hangs_once(images, prompts, folder):
    """Sleeps for a minute at the first batch it sees."""
    if _count(folder) == 1:
        time.sleep(60)
    return images.mean(axis=(1, 2, 3))


def raises_and_hangs(images, prompts, folder):
    """Raises at every other call, and sleeps for a minute at those between."""
    calls = _count(folder)
    if calls % 2 == 0:
        time.sleep(60)
    raise ConnectionError(f"attempt {calls} was refused")


def dies_then_hangs(images, prompts, folder):
    """kill -9 of its own process at the first batch it sees, then a minute's sleep."""
    if _count(folder) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fails_before(images, prompts, folder, attempts):
    """Raises at the first `attempts` calls."""
    calls = _count(folder)
    if calls <= attempts:
        raise ConnectionError(f"attempt {calls} was refused")
    return images.mean(axis=(1, 2, 3))


class OfTwoParts(Exception):
    """As many libraries have them: pickled, it is made again of one argument, which it refuses."""

    def __init__(self, code, text):
        super().__init__(f"{code} {text}")


def fails_for_dark_in_its_own_way(images, prompts):
    """As `fails_for_dark`, with an error that no other process can make again."""
    if (images.max(axis=(1, 2, 3)) == 0).any():
        raise OfTwoParts(7, "the lens cap is on")
    return images.mean(axis=(1, 2, 3))


def fails_for_dark(images, prompts):
    """Always raises where a batch has a black picture."""
    if (images.max(axis=(1, 2, 3)) == 0).any():
        raise ConnectionError("the lens cap is on")
    return images.mean(axis=(1, 2, 3))


def misused(images, prompts, folder):
    """Says that it cannot be used so."""
    _count(folder)
    raise RewardError("misused: the prompts have no target")


def nan_for_dark(images, prompts):
    """NaN for black pictures, without an error."""
    means = images.mean(axis=(1, 2, 3))
    return np.where(means == 0, np.nan, means)


def infinite_for_dark(images, prompts):
    """The logarithm of brightness, which a black picture has none of."""
    with np.errstate(divide="ignore"):
        return np.log(images.mean(axis=(1, 2, 3)))


def latent_size(latents, prompts):
    """Mean square of each latent."""
    return (latents**2).mean(axis=tuple(range(1, latents.ndim)))


latent_size.wants = "latents"


def with_a_detail(images, prompts, detail):
    """The mean of all channels, and a five for each picture as this detail."""
    return RewardResult(images.mean(axis=(1, 2, 3)), {detail: [5] * len(images)})


class SecondDies(Reward):
    """Loads in the first process that tries and dies in all others, once the first one has loaded."""

    name = version = "second-dies"

    def __init__(self, folder):
        first = _count(folder) == 1
        if not first:
            print("CUDA out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def score(self, images, prompts):
        """Never asked."""


class Unloadable(Reward):
    """Dies while it loads, `by` a signal, or raises where that is no number."""

    name = version = "unloadable"

    def __init__(self, folder, by=None):
        _count(folder)
        if by is None:
            raise OfTwoParts(8, "weights are missing")
        os.kill(os.getpid(), by)

    def score(self, images, prompts):
        """Never asked."""


class HangsAgain(Reward):
    """Loads once, dies at its first batch, and hangs while it loads again."""

    name = version = "hangs-again"

    def __init__(self, folder):
        if _count(folder) > 1:
            time.sleep(600)

    def score(self, images, prompts):
        """It does not."""
        os.kill(os.getpid(), signal.SIGKILL)


class AnotherAfterDeath(Reward):
    """kill -9 of its first process at the first batch; each process has a version of its own, which is a number."""

    name = "another-after-death"

    def __init__(self, folder):
        """Count the processes."""
        self.version = _count(folder)

    def score(self, images, prompts):
        """As `brightness`."""
        if self.version == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return images.mean(axis=(1, 2, 3))


def _count(folder) -> int:
    """Calls so far, this one included, over all processes."""
    with (Path(folder) / "calls").open("a") as file:
        file.write(".")
        return file.tell()

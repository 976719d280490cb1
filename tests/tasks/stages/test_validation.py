# SPDX-License-Identifier: Apache-2.0
"""What is shown and told of a validation."""

import numpy as np
import pandas as pd
import pytest

from tasks.stages.validation import GRID_PICTURES, Validation

ACROSS, SIDE, MIDDLE = 8, 150, 75
"""Pictures side by side in a sheet, and pixels of each with its gap."""


def test_a_sheet_shows_the_first_picture_of_each_of_the_first_prompts_in_their_order() -> None:
    """Two pictures a prompt, and more prompts than a sheet has room for: each has a colour of its own."""
    prompts, each = GRID_PICTURES + 2, 2
    colours = np.arange(prompts * each, dtype=np.uint8) + 1
    pictures = np.broadcast_to(colours[:, None, None, None], (len(colours), 2, 2, 3))
    rows = pd.DataFrame({"sample_index": list(range(each)) * prompts, "reward": 0.0})
    sheet = np.asarray(Validation(rows, pictures, ()).sheet)
    assert sheet.shape[:2] == (GRID_PICTURES // ACROSS * SIDE, ACROSS * SIDE)
    shown = [sheet[SIDE * row + MIDDLE, SIDE * column + MIDDLE, 0] for row in range(6) for column in range(ACROSS)]
    assert shown == colours[::each][:GRID_PICTURES].tolist()


def test_missing_rewards_are_counted_and_left_out_of_the_means() -> None:
    rows = pd.DataFrame(
        {
            "sample_index": [0, 1, 0],
            "prompt": ["a", "a", "b"],
            "finite": [True, False, True],
            "reward": [0.5, np.nan, 1.0],
            "reward/ocr": [0.5, np.nan, 1.0],
            "reward/taste": [np.nan] * 3,
            "ocr/distance": [3, 4, 5],
        }
    )
    found = Validation(rows, np.zeros((3, 2, 2, 3), np.uint8), ("ocr", "taste"))
    assert found.reward == 0.75
    assert found.metrics() == pytest.approx(
        {
            "val/reward/mean": 0.75,
            "val/reward/ocr/mean": 0.75,
            "val/ocr/distance/mean": 4.0,
            "val/reward/missing": 1.0,
            "val/reward/ocr/missing": 1.0,
            "val/reward/taste/missing": 3.0,
            "val/rollout/not_finite": 1.0,
        }
    )

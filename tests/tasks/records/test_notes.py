# SPDX-License-Identifier: Apache-2.0
"""The descriptions of runs and registered versions, and the runs' names."""

from tasks.config.tree import TrainConfig
from tasks.records.notes import LEARNT, RunNote, Weights, version_note
from tasks.run.note import run_label

FULL = Weights("/runs/a/weights", "QwenImagePipeline", "data/base_model", lora=False)
SPENT = {"cost/hours": 0.5, "cost/gpu_hours": 2.0, "cost/images": 19200.0, "1_headline/images_per_second": 8.04}


def test_a_runs_description_has_five_lines() -> None:
    note = RunNote({0: 0.53, 100: 0.94}, {1: 0.5, 100: 0.9}, SPENT, True, "6c51b8e" + 33 * "0", False)
    lines = note.text().split("\n")
    assert len(lines) == 5
    assert lines[0].startswith(LEARNT)
    assert "held-out reward 0.530 → 0.940" in lines[0]
    assert lines[0].endswith("in 100 iterations")
    assert lines[1] == "- **Links:** none"
    assert lines[2] == "- **Cost:** 2 GPU-hours (30.0 minutes), 19,200 images, 8.04 images/s"
    assert lines[3:] == ["- **Code:** commit 6c51b8e00000 as it is", "- **Weights:** not exported yet"]


def test_what_is_not_known_is_said() -> None:
    text = RunNote({}, {}, {}, False, "", True).text()
    assert "held-out reward not measured, in 0 iterations" in text
    assert "0.0 minutes on the CPU, 0 images" in text
    assert "no commit is known" in text
    once = RunNote({2: 0.5}, {}, {}, False, "6c51b8e", True, FULL, {"report": "#/there"}).text()
    assert "held-out reward 0.500, in 2 iterations" in once
    assert "commit 6c51b8e and the changes in" in once
    assert "[report](#/there)" in once


def test_the_snippet_loads_full_weights_and_lora_from_the_folder_or_the_registry() -> None:
    assert FULL.snippet() == 'pipe = QwenImagePipeline.from_pretrained("/runs/a/weights")'
    lora = Weights("/runs/a/weights", "QwenImagePipeline", "data/base_model", True, "models:/quickstart/3")
    first, second = lora.snippet().split("; ")
    assert first == 'pipe = QwenImagePipeline.from_pretrained("data/base_model")'
    assert second == 'pipe.load_lora_weights(mlflow.artifacts.download_artifacts("models:/quickstart/3"))'
    note = version_note(lora, 4, "0.556")
    assert note.startswith("Held-out reward **0.556**, after 4 iterations from data/base_model.")
    assert f"{first}\n{second}" in note
    assert "`/runs/a/weights`" in note
    assert "**not measured**" in version_note(lora, 4, None)


def test_a_runs_name_says_what_differs_from_the_recipe() -> None:
    recipe = TrainConfig(trainer={"experiment_name": "quickstart"})
    assert run_label(recipe, recipe) == f"quickstart ({recipe.digest()})"
    changed = recipe.with_changes({"trainer": {"seed": 5, "save_freq": 7}, "data": {"train_batch_size": 64}})
    name = run_label(changed, recipe)
    assert name == f"quickstart train_batch_size=64 seed=5 ({changed.digest()})", "save_freq shapes nothing"
    many = recipe.with_changes(
        {"trainer": {"seed": 5}, "actor_rollout_ref": {"rollout": {"n": 5, "algo": {"noise_level": 0.1}}}}
        | {"data": {"train_batch_size": 64}, "algorithm": {"global_std": not recipe.algorithm.global_std}}
    )
    assert "and 1 more" in run_label(many, recipe)

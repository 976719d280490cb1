# SPDX-License-Identifier: Apache-2.0
"""What a validation sweep draws: the recipe's own validation, unless the measurement says otherwise, and its labels."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from models.config.pipeline import DiffusionPipelineConfig
from tasks.config.errors import ConfigError
from tasks.config.measurement import Measurement
from tasks.config.tree import TrainConfig
from tasks.data.prompts import Prompt, load_prompts
from tasks.records.comparison import PAIR, Interval
from tasks.rewards import RewardError
from tasks.run import measuring
from tasks.run.measuring import Cell, Verdict, cells, for_measuring, labelled, measurement_digest
from tasks.stages.validation import Validation
from tests.support.helpers import model_config
from tests.tasks.data.test_pairs import encode_into

Folder = Callable[[str], Path]
INPUTS: Any = SimpleNamespace(test=["a prompt", "another"], embeddings=None)


def config_of(model: Path, own: dict[str, float], validated: dict[str, float]) -> TrainConfig:
    """The rollout samples with one guidance and validates with another, in other steps."""
    rollout = {
        "pipeline": {"num_inference_steps": 4, **own},
        "val_kwargs": {"pipeline": {"num_inference_steps": 7, **validated}},
    }
    return TrainConfig.model_validate({"actor_rollout_ref": {"model": {"path": str(model)}, "rollout": rollout}})


def drawn(config: TrainConfig, measurement: Measurement) -> list[tuple[str, DiffusionPipelineConfig]]:
    """Label and sampling of every cell, as the sweep draws them."""
    config = for_measuring(config, measurement)
    found: list[Cell] = list(cells(config, INPUTS, measurement))
    validation = config.actor_rollout_ref.rollout.validation_pipeline()
    return [(cell.label, cell.drawn_by(validation)) for cell in found]


@pytest.mark.parametrize(
    ("family", "field", "other"),
    [("qwen_image", "true_cfg_scale", "guidance_scale"), ("stable_diffusion_3", "guidance_scale", "true_cfg_scale")],
)
def test_a_cell_is_drawn_by_the_field_that_guides_the_model(
    tiny_folder: Folder, family: str, field: str, other: str
) -> None:
    config = config_of(tiny_folder(family), {field: 2.0}, {field: 5.0})
    (label, pipeline), *more = drawn(config, Measurement())
    assert more == []
    assert pipeline == config.actor_rollout_ref.rollout.validation_pipeline()  # as validation in training draws
    assert (label, getattr(pipeline, field)) == (f"test/steps_7/{field}_5", 5.0)
    measurement = Measurement.model_validate({field: [1.0, 3.5], "num_inference_steps": [9]})
    both = drawn(config, measurement)
    assert [label for label, _ in both] == [f"test/steps_9/{field}_1", f"test/steps_9/{field}_3.5"]
    assert [getattr(pipeline, field) for _, pipeline in both] == [1.0, 3.5]
    assert [pipeline.num_inference_steps for _, pipeline in both] == [9, 9]
    prepared = for_measuring(config, measurement).actor_rollout_ref.rollout.pipeline
    assert getattr(prepared, field) == 3.5, "the negative prompt is there for the cell that needs it"
    with pytest.raises(ConfigError, match=rf"measurement.{other} is \[3.5\], but the model .* is guided by {field}"):
        drawn(config, Measurement.model_validate({other: [3.5]}))


def test_guidance_that_is_off_stays_off(tiny_folder: Folder) -> None:
    ((label, pipeline),) = drawn(config_of(tiny_folder("stable_diffusion_3"), {}, {}), Measurement())
    assert (label, pipeline.guidance_scale) == ("test/steps_7/guidance_scale_0", None)


@pytest.mark.parametrize("wrong", [{"num_inference_steps": [0]}, {"true_cfg_scale": [0.5]}, {"guidance_scale": [-1.0]}])
def test_a_measurement_has_the_bounds_of_the_pipelines_fields(wrong: dict[str, list[float]]) -> None:
    with pytest.raises(ValidationError, match="greater than or equal"):
        Measurement.model_validate(wrong)


def test_a_pictures_row_says_how_it_was_drawn() -> None:
    """Two measurements are paired row by row by that."""
    nothing: Any = None  # no text is read
    cell = Cell("ood", [], nothing, steps=7, guided_by="true_cfg_scale", guidance=3.5, seed=5)
    rows = pd.DataFrame({"uid": ["a", "a"], "sample_index": [0, 1], "reward": [0.5, 1.0]})
    found = labelled(cell, Validation(rows, np.zeros((2, 1, 1, 3), np.uint8), ()))
    assert {*PAIR} <= {*found.columns}
    drawn_as = {"set": "ood", "steps": 7, "guidance": 3.5, "seed": 5}
    assert found.to_dict("records") == [row | drawn_as for row in rows.to_dict("records")]


UP, LEVEL, DOWN = Interval(0.2, 0.1, 0.3), Interval(0.1, -0.1, 0.3), Interval(-0.2, -0.3, -0.1)
BELOW = Interval(-0.1, -0.3, 0.1)
"""Its mean, but not all of it."""


@pytest.mark.parametrize(
    ("base", "best", "better", "worse"),
    [
        (None, None, False, None),
        (UP, None, True, None),
        (LEVEL, None, False, None),
        (DOWN, None, False, "the base model by -0.2000 [-0.3000, -0.1000]"),
        (BELOW, BELOW, False, None),
        (UP, UP, True, None),
        (UP, LEVEL, False, None),  # as good as the champion is no reason to replace it
        (LEVEL, UP, True, None),
        (UP, DOWN, False, "the best so far by -0.2000 [-0.3000, -0.1000]"),
        (
            DOWN,
            DOWN,
            False,
            "the base model by -0.2000 [-0.3000, -0.1000] and the best so far by -0.2000 [-0.3000, -0.1000]",
        ),
    ],
)
def test_a_verdict_needs_an_interval_without_zero(
    base: Interval | None, best: Interval | None, better: bool, worse: str | None
) -> None:
    """Better than the best so far, or than the base where there is none; worse than either."""
    verdict = Verdict(base, best)
    assert (verdict.better, verdict.wrong) == (better, worse and f"is worse than {worse}")


def test_what_cannot_be_compared_is_wrong_and_not_better() -> None:
    verdict = Verdict(None, None, "only 0 prompts have a reward in both measurements: at least 2 are needed")
    assert not verdict.better
    assert verdict.wrong is not None
    assert verdict.wrong.startswith("cannot be judged: only 0 prompts have")


@pytest.mark.parametrize(("targets", "refused"), [(["a", "b"], False), (["a", None], True)])
def test_the_prompts_of_a_set_say_what_the_rewards_look_for(
    tiny_folder: Folder, tmp_path: Path, targets: list[str | None], refused: bool
) -> None:
    """Known before a worker starts, as a run's own prompts are."""
    config = config_of(tiny_folder("qwen_image"), {}, {}).with_changes({"reward": {"functions": {"ocr": {}}}})
    prompts = [Prompt(f"uid-{text}", text, None, {}, "here:1") for text in ("one", "two")]
    encode_into(tmp_path / "embeddings", prompts)
    table = pd.DataFrame({"uid": [p.uid for p in prompts], "prompt": [p.prompt for p in prompts], "target": targets})
    table.assign(split="test", metadata="{}", source="here:1").to_parquet(tmp_path / "prompts.parquet", index=False)
    of_set = {"prompts": tmp_path / "prompts.parquet", "embeddings": tmp_path / "embeddings", "split": "test"}
    own = model_config(Path(config.actor_rollout_ref.model.path))
    inputs: Any = SimpleNamespace(test=[], embeddings=None, model_config=own)
    with pytest.raises(RewardError, match="ocr: the prompt 'two' has no target") if refused else nullcontext():
        (cell,) = cells(config, inputs, Measurement.model_validate({"sets": {"ood": of_set}}))
        assert cell.prompts == load_prompts(tmp_path / "prompts.parquet", "test")


LIVE: dict[str, Any] = {
    "data": {"embeddings": "live"},
    "actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 8}}},
}
OTHERS: list[dict[str, Any]] = [
    {"reward": {"functions": {"jpeg_compressibility": {}}}},
    {"reward": {"functions": {"jpeg_compressibility": {"options": {"quality": 50}}}}},
    {"reward": {"reward_model": {"model_path": "a-judge", "num_gpus": 1}}},
    {"reward": {"reward_model": {"model_path": "a-judge", "num_gpus": 1, "arguments": ["--dtype", "float16"]}}},
    {"actor_rollout_ref": {"rollout": {"val_kwargs": {"pipeline": {"num_inference_steps": 9}}}}},
    {"actor_rollout_ref": {"rollout": {"name": "vllm_omni"}}},
    {"actor_rollout_ref": {"model": {"path": "another"}}},
    LIVE,
    LIVE | {"data": {"embeddings": "live", "text_encoder": {"negative_prompt": "blurred"}}},
]
SAME: list[dict[str, Any]] = [
    {"reward": {"functions": {"ocr": {"num_workers": 3, "timeout_s": 7, "batch_size": 2}}}},
    {"reward": {"max_missing_fraction": 0.5}},
    {"actor_rollout_ref": {"model": {"initial_weights": "elsewhere"}}},
    {"trainer": {"total_training_steps": 7}},
]


def inputs_of(digest: str, *prompts: str) -> Any:
    return SimpleNamespace(digest=digest, test=[Prompt(text, text, None, {}, "here:1") for text in prompts])


def test_a_measurement_is_another_one_where_what_it_depends_on_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was measured before, with another reward for example, would stand for it."""
    config, same = TrainConfig(), Measurement()
    all_of_them = [inputs_of("these", "a", "b"), inputs_of("others", "a", "b"), inputs_of("these", "a")]
    found = [measurement_digest(config.with_changes(change), all_of_them[0], same) for change in OTHERS]
    found += [measurement_digest(config, inputs, same) for inputs in all_of_them]
    found += [measurement_digest(config, all_of_them[0], Measurement(seeds=[5]))]
    monkeypatch.setattr(measuring, "DRAWN_AS", measuring.DRAWN_AS + 1)
    found += [measurement_digest(config, all_of_them[0], same)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("change", SAME, ids=str)
def test_what_changes_no_score_measures_nothing_anew(change: dict[str, Any]) -> None:
    """All versions would be drawn once more, for hours on a GPU."""
    config, inputs, measurement = TrainConfig(), inputs_of("these", "a", "b"), Measurement(confidence=0.9)
    rewarded = measurement.model_copy(update={"reward": config.reward})
    plain = measurement_digest(config, inputs, Measurement())
    assert measurement_digest(config.with_changes(change), inputs, measurement) == plain
    assert measurement_digest(config, inputs, rewarded) == plain


def test_a_measurement_is_another_one_where_the_files_of_its_sets_are_others(tmp_path: Path) -> None:
    """At the same paths: else what was measured on the old prompts would stand for the new ones."""
    prompts, embeddings = tmp_path / "prompts.parquet", tmp_path / "embeddings"
    embeddings.mkdir()
    inputs = inputs_of("same")
    measurement = Measurement.model_validate({"sets": {"ood": {"prompts": prompts, "embeddings": embeddings}}})

    def digest(table: str, index: str) -> str:
        prompts.write_text(table)
        (embeddings / "index.json").write_text(index)
        return measurement_digest(TrainConfig(), inputs, measurement)

    found = [digest(*content) for content in (("a", "b"), ("c", "b"), ("a", "d"), ("a", "b"))]
    assert len(set(found)) == 3
    assert found[0] == found[3]
    prompts.unlink()
    with pytest.raises(ConfigError, match=r"measurement.sets.ood.prompts: .*prompts.parquet is missing"):
        measurement_digest(TrainConfig(), inputs, measurement)

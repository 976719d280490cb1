# SPDX-License-Identifier: Apache-2.0
"""What of the vLLM-Omni engine needs no vLLM-Omni: its requests, and what the driver refuses."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config.algo import DiffusionRolloutAlgoConfig
from models.rollout.vllm_omni.answers import RolloutEngineError, agree, reply
from models.rollout.vllm_omni.engine import check_tensor_split, pipeline_class
from models.rollout.vllm_omni.families import QwenImageRollout
from models.rollout.vllm_omni.lora_names import lora_tensors
from models.rollout.vllm_omni.sample_request import check_alike, join, split, table_digest
from models.weights.trainable import WeightSyncError
from tasks.config.tree import TrainConfig
from tests.support.helpers import model_config, prompt_table, rollout_request


def test_a_request_comes_back_from_its_samples(tiny_model: Path) -> None:
    request, config = rollout_request(samples=3, record_means=True), model_config(tiny_model)
    samples = split(request, "table", config, config.pipeline)
    joined = join(samples, request.prompts)
    assert torch.equal(joined.prompt_index, request.prompt_index)
    # Not the requests: from Python 3.13 on equality of dataclasses asks tensors, also where they are the same.
    assert vars(replace(joined, prompt_index=request.prompt_index)) == vars(request)
    assert [sample.place for sample in samples] == list(range(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (1, 2)}, "window"),
        ({"record_means": True}, "record_means"),
        ({"outputs": frozenset()}, "outputs"),
        ({"algo": DiffusionRolloutAlgoConfig(init_same_noise=True)}, "algo.init_same_noise"),
    ],
)
def test_samples_that_do_not_agree_share_no_batch(tiny_model: Path, change: dict, message: str) -> None:
    config = model_config(tiny_model)
    first, second, *_ = split(rollout_request(), "table", config, config.pipeline)
    check_alike([first, second])
    with pytest.raises(ValueError, match=f"one batch holds samples with {message} "):
        check_alike([first, replace(second, **change)])


def test_a_table_is_named_by_all_that_it_holds() -> None:
    table = prompt_table()
    names = {
        table_digest(table),
        table_digest(replace(table, prompt_embeds=table.prompt_embeds + 1e-6)),
        table_digest(replace(table, prompt_embeds_mask=~table.prompt_embeds_mask)),
        table_digest(replace(table, negative_prompt_embeds=torch.zeros(1, 2, 3))),
        table_digest(replace(table, extras={"pooled_prompt_embeds": torch.zeros(3, 4)})),
    }
    assert len(names) == 5
    assert table_digest(prompt_table()) == table_digest(table)


@pytest.mark.parametrize("answer", [{"error": "out of memory"}, {"supported": False}, [{"error": "out of memory"}]])
def test_a_failure_among_the_answers_is_raised(answer: object) -> None:
    with pytest.raises(RolloutEngineError, match="worker failed at load_named_weights"):
        reply("load_named_weights", [answer])


@pytest.mark.parametrize("answers", [[], [[]], [[1, 2]]])
def test_an_answer_too_few_or_too_many_is_an_error(answers: list) -> None:
    with pytest.raises(RolloutEngineError, match="answers to sleep where one was due"):
        reply("sleep", answers)


def test_an_empty_list_can_be_an_answer() -> None:
    assert reply("load_named_weights", [[[]]]) == []


def test_lora_names_are_those_of_the_packed_model() -> None:
    tensor = torch.zeros(2, 2)
    given = {"transformer_blocks.0.attn.to_out.0.lora_A.default.weight": tensor}
    assert list(lora_tensors(QwenImageRollout, given)) == [
        "base_model.model.transformer.transformer_blocks.0.attn.to_out.lora_A.weight"
    ]


def test_an_architecture_without_a_pipeline_is_refused(tiny_model: Path) -> None:
    unknown = replace(model_config(tiny_model), architecture="SomePipeline")
    with pytest.raises(ValueError, match=r"no vLLM-Omni pipeline for architecture 'SomePipeline' .* rollout.name"):
        pipeline_class(unknown)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_run_is_refused(tiny_model: Path) -> None:
    """A ValueError, as for anything that was given: the command line shows no traceback of it."""
    with pytest.raises(ValueError, match=r"rollout.name is vllm_omni, but vllm and vllm_omni cannot .*set rollout"):
        pipeline_class(model_config(tiny_model))


def test_colocated_workers_are_as_many_as_ranks() -> None:
    rollout = {"placement": "colocated", "num_actors": 2}
    with pytest.raises(ValueError, match=r"rollout.num_actors is 2, set it to the 1 ranks"):
        TrainConfig.model_validate({"actor_rollout_ref": {"rollout": rollout}})


# ---- tensor parallelism


def parallel(size: int, **rollout: object) -> TrainConfig:
    settings = {"name": "vllm_omni", "vllm_omni": {"tensor_parallel_size": size}} | rollout
    return TrainConfig.model_validate({"actor_rollout_ref": {"rollout": settings}, "trainer": {"device": "cuda"}})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"name": "diffusers"}, "rollout.name is diffusers, .* set name to vllm_omni"),
        ({"placement": "colocated"}, "rollout.placement is colocated, .* set placement to separate"),
        ({"weight_transport": "collective"}, "weight_transport is collective, .* set weight_transport to object_store"),
        ({"num_gpus_per_actor": 0.5}, "rollout.num_gpus_per_actor 0.5, but each process .* leave num_gpus_per_actor"),
    ],
)
def test_what_a_worker_of_several_processes_cannot_do_is_refused(rollout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2.*{message}"):
        parallel(2, **rollout)


def test_all_gpus_of_a_worker_count() -> None:
    config = parallel(4, num_actors=2)
    assert config.gpus_needed() == config.trainer.world_size + 8
    assert config.rollout_devices == 8
    assert config.digest() == parallel(1).digest()  # where it computes shapes no weights


def test_heads_that_do_not_divide_are_refused(tiny_model: Path) -> None:
    check_tensor_split(model_config(tiny_model), 2)
    with pytest.raises(ValueError, match="tensor_parallel_size is 4, which does not divide the 2 attention heads"):
        check_tensor_split(model_config(tiny_model), 4)


def test_ranks_that_predict_different_things_are_found_out() -> None:
    velocity = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(agree([velocity]), velocity)
    assert torch.equal(agree([velocity, velocity * (1 + 1e-7)]), velocity)
    for other in (velocity * 1.001, velocity * float("nan")):
        with pytest.raises(WeightSyncError, match="rank 2 of a rollout worker predicts something else"):
            agree([velocity, velocity, other])

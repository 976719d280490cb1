# SPDX-License-Identifier: Apache-2.0
"""Operations of rollout and update against torch's own count of the real sampler and trainer, for every family."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.algorithms import get_diffusion_loss_fn
from models.cost.device_peaks import PEAK_TFLOPS, peak_tflops
from models.cost.flops import Batch, PolicyFlops, compared_passes
from models.cost.meta_pass import pass_cost
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import LATENTS, RolloutRequest
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.tree import TrainConfig
from tasks.records.metrics import compute_utilisation_metrics
from tasks.run.expectation import expect
from tasks.run.utilisation import UNMEASURED, Utilisation
from tests.support.cases import crossed
from tests.support.helpers import actor_config, model_config, noise_keys
from tests.support.tiny_models import FAMILIES, embeddings_of

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 3
WINDOW = (0, 1)


def attention_flops(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two matrix products: scores, and their weighted sum of the values."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Four: the gradients of both products. The kernel's recomputed scores are none that the model needs."""
    return 2 * attention_flops(query, key, value)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
COUNTED = {
    ATTENTION: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
"""torch's counter knows the attention kernels of CUDA alone."""


# `test_real_size.py` counts a forward of every family.
@pytest.mark.parametrize(
    ("name", "settings"),
    crossed(FAMILIES, {"full_guided": {}, "lora": {"lora_rank": 4}}, slow=("flux", "flux_2_klein", "z_image")),
)
def test_an_iteration_costs_what_torch_counts(
    name: str, settings: dict[str, Any], tiny_folder: Callable[[str], Path]
) -> None:
    """A rollout, then two epochs with a missing reward and a KL term; with LoRA also gradient checkpointing."""
    family, guided, checkpointing = FAMILIES[name], not settings, bool(settings)
    height, width = family.sizes[0]
    pipeline = family.guided if guided else family.plain
    config = model_config(
        tiny_folder(name), height=height, width=width, num_inference_steps=STEPS, **pipeline, **settings
    )
    prompts = embeddings_of(config, lengths=(40, 5), negative_length=4 if guided else None)
    request = RolloutRequest(
        noise_keys(2, 2), prompts, torch.tensor([0, 0, 1, 1]), WINDOW, outputs=frozenset({LATENTS})
    )
    rollout = DiffusersRolloutEngine(config)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as sampled:
        _, trajectories = rollout.generate(request)

    actor = actor_config(use_kl_loss=True, kl_loss_coef=0.1, gradient_checkpointing=checkpointing)
    trainer = DiffusersFSDPEngine(config, actor)
    trainer.initialize()
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -1.0, float("nan"), 0.5]))], 3)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as updated:
        metrics = trainer.update_policy([batch, batch])
    assert metrics["sample_steps"] == 2 * 3 * len(WINDOW)

    one = replace(prompts, prompt_embeds=prompts.prompt_embeds[:1], prompt_embeds_mask=prompts.prompt_embeds_mask[:1])
    one = replace(one, extras={key: tensor[:1] for key, tensor in prompts.extras.items()})
    flops = PolicyFlops(config, pass_cost(config, one, checkpointing=checkpointing), Batch(1, *prompts.lengths))
    shapes = [Batch(4, *prompts.lengths)]
    computed = 2 * 4 * len(WINDOW)  # a missing reward's row is computed with the others, and weighs nothing
    policy, others = (passes * computed for passes in compared_passes(trainer.loss_fn, actor))
    assert flops.rollout(shapes) == pytest.approx(sampled.get_total_flops(), rel=0.02)
    needed = flops.update(shapes, computed, policy, others)
    done = flops.update(shapes, computed, policy, others, recompute=True)
    assert done == pytest.approx(updated.get_total_flops(), rel=0.02)
    assert (done > 1.2 * needed) == checkpointing


def test_a_recorded_half_is_not_counted(tiny_model: Path) -> None:
    """Two epochs: the half without the prompt is missing from the first one."""
    config = model_config(tiny_model, true_cfg_scale=3.0, lora_rank=4, num_inference_steps=STEPS)
    prompts = embeddings_of(config, lengths=(40,), negative_length=8)
    request = RolloutRequest(
        noise_keys(1, 2), prompts, torch.tensor([0, 0]), WINDOW, record_unconditional=True, outputs=frozenset({LATENTS})
    )
    _, trajectories = DiffusersRolloutEngine(config).generate(request)
    trainer = DiffusersFSDPEngine(config, actor_config(guidance_gradient="conditional"))
    trainer.initialize()
    batch = ActorBatch([(trajectories, torch.tensor([1.0, -1.0]))], 2)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as updated:
        metrics = trainer.update_policy([batch, batch])
    assert (metrics["sample_steps"], metrics["recorded_steps"]) == (8, 4)
    cost = pass_cost(config, prompts, constant_half=True)
    flops = PolicyFlops(config, cost, Batch(1, *prompts.lengths))
    shapes = [Batch(2, *prompts.lengths)]
    assert flops.update(shapes, 8, 0, 0, recorded=4) == pytest.approx(updated.get_total_flops(), rel=0.02)
    assert flops.update(shapes, 8, 0, 0) > 1.05 * updated.get_total_flops()


def test_a_longer_text_costs_more_than_the_one_that_was_measured(tiny_model: Path) -> None:
    """The formulas carry one measured length to others; text that leads nowhere is a large share of two layers."""
    config = model_config(tiny_model)
    costs = {}
    for length in (8, 40):
        prompts = embeddings_of(config, lengths=(length,))
        costs[length] = PolicyFlops(config, pass_cost(config, prompts), Batch(1, length))
    for text in (8, 40):
        shapes = [Batch(3, text)]
        assert costs[8].rollout(shapes) == pytest.approx(costs[40].rollout(shapes), rel=1e-6)
        assert costs[8].update(shapes, 6, 6, 6) == pytest.approx(costs[40].update(shapes, 6, 6, 6), rel=0.05)
    assert costs[8].rollout([Batch(3, 40)]) > 1.5 * costs[8].rollout([Batch(3, 8)])


@pytest.mark.parametrize(
    ("loss", "settings", "passes"),
    [
        ("flow_grpo", {}, (0, 0)),
        ("flow_grpo", {"use_kl_loss": True, "kl_loss_coef": 0.1}, (0, 1)),
        ("distill_kl", {}, (0, 1)),
        ("dpo", {}, (0, 1)),
        ("diffusion_nft", {}, (1, 0)),
        ("awm", {"use_kl_loss": True, "kl_loss_coef": 0.1}, (2, 1)),
    ],
)
def test_what_a_loss_compares_with_is_counted(loss: str, settings: dict[str, Any], passes: tuple[int, int]) -> None:
    assert compared_passes(get_diffusion_loss_fn(loss), actor_config(loss_mode=loss, **settings)) == passes


def test_utilisation_is_a_share_of_the_peak() -> None:
    flops = {"rollout": 4e14, "update": 6e14, "update/recomputed": 8e14}
    seconds = {"rollout": 2.0, "update": 4.0, "update/recomputed": 4.0}
    assert compute_utilisation_metrics(flops, seconds, {"update": 300.0}) == {
        "perf/tflops/rollout": 200.0,
        "perf/tflops/update": 150.0,
        "perf/mfu/update": 0.5,
        "perf/hfu/update": pytest.approx(2 / 3),
    }


def test_unknown_devices_have_no_peak() -> None:
    assert peak_tflops("NVIDIA H200", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA B200", "float32") is None
    assert peak_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None
    assert all(peaks["bfloat16"] > peaks.get("float32", 0.0) for peaks in PEAK_TFLOPS.values())


@pytest.mark.parametrize(("ranks", "sharing", "data_ranks"), [(1, 1, 1), (4, 1, 4), (4, 2, 2)])
def test_an_iterations_metrics_are_of_what_it_trained_on_and_of_all_its_devices(
    tiny_model: Path, ranks: int, sharing: int, data_ranks: int
) -> None:
    """A rank's mean of steps, times the ranks that have samples of their own; its seconds, times all ranks. Two
    workers that were busy for 6 s together are two devices for 3 s each."""
    config = TrainConfig.model_validate(
        {
            "actor_rollout_ref": {
                "model": {"path": str(tiny_model)},
                "rollout": {
                    "num_actors": 2,
                    "pipeline": {"height": 16, "width": 24, "num_inference_steps": 4, "true_cfg_scale": 3.0},
                },
                "actor": {
                    **{"use_kl_loss": True, "kl_loss_coef": 0.1, "guidance_gradient": "conditional"},
                    "fsdp_config": {"ulysses_sequence_parallel_size": sharing, "gradient_checkpointing": True},
                },
            },
            "trainer": {"device_peak_tflops": 0.5, "n_gpus_per_node": ranks},
        }
    )
    rollout = config.actor_rollout_ref.rollout
    model = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    prompts = embeddings_of(model, lengths=(9,), negative_length=8)
    flops = PolicyFlops(model, pass_cost(model, prompts, constant_half=True), Batch(1, 9, 8))
    batches: Any = [SimpleNamespace(keys=range(8), text=(9, 8)), SimpleNamespace(keys=range(4), text=(7, 8))]
    shapes, group = [Batch(8, 9, 8), Batch(4, 7, 8)], cast(Any, [None, None])
    measured = {"actor/sample_steps": 6.0, "actor/recorded_steps": 2.0, "perf/rollout_busy_s": 6.0}
    utilisation, seconds = Utilisation(config, flops, group, group), {"update_actor": 2.0}
    found = utilisation.metrics(batches, measured, seconds)
    trained = 6.0 * data_ranks
    work = (shapes, trained, 0.0, trained)  # the KL's reference sees what is trained on, older weights nothing
    needed = flops.update(*work, recorded=2.0 * data_ranks) / (2.0 * ranks) / 1e12
    done = flops.update(*work, recorded=2.0 * data_ranks, recompute=True) / (2.0 * ranks) / 1e12
    sampled = flops.rollout(shapes) / 6.0 / 1e12
    expected = {"tflops/update": needed, "tflops/rollout": sampled, "mfu/update": needed / 0.5}
    expected |= {"mfu/rollout": sampled / 0.5, "hfu/update": done / 0.5}
    assert found == pytest.approx({f"perf/{name}": value for name, value in expected.items()})
    # Of steps that began before all was scored the last ones alone are waited for: then what the ranks spent counts.
    measured |= {"perf/update_busy_s": 4.0}
    for early, share in ((0.0, 1.0), (1.0, 0.5)):
        longer = utilisation.metrics(batches, measured | {"perf/early_steps": early}, seconds)
        changed = {name: value * (1.0 if name.endswith("/rollout") else share) for name, value in found.items()}
        assert longer == pytest.approx(changed)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_an_iteration_should_take_at_its_devices_peak(tiny_model: Path, ahead: bool) -> None:
    """8 samples of 4 steps by two workers, 3 steps of each trained on by one rank; the longer one if they overlap."""
    config = TrainConfig.model_validate(
        {
            "data": {"train_batch_size": 2},
            "actor_rollout_ref": {
                "model": {"path": str(tiny_model)},
                "rollout": {
                    **{"n": 4, "micro_batch_size": 4, "num_actors": 2},
                    "pipeline": {"height": 16, "width": 24, "num_inference_steps": 4},
                },
                "actor": {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 4, "ppo_epochs": 2},
            },
            "trainer": {"device_peak_tflops": 0.5, "one_step_off_policy": ahead},
        }
    )
    rollout = config.actor_rollout_ref.rollout
    model = DiffusionModelConfig.load(config.actor_rollout_ref.model, rollout.pipeline, rollout.algo)
    flops = PolicyFlops(model, pass_cost(model, embeddings_of(model, lengths=(9,))), Batch(1, 9))
    group: Any = None  # a peak that is given asks no actor
    utilisation = Utilisation(config, flops, [], group)  # type: ignore[arg-type]
    found, shapes = expect(config, flops, utilisation.peaks, measured=False), [Batch(8, 9)]
    assert found is not None
    assert found.placed.rollout == pytest.approx(flops.rollout(shapes) / (0.5e12 * 2))
    assert found.placed.training == pytest.approx(flops.update(shapes, 2 * 8 * 3, 0, 0) / 0.5e12)
    parts = found.placed.rollout, found.placed.training
    whole = max(parts) if ahead else sum(parts)
    (line,) = utilisation.expectation()
    assert line.startswith(
        f"at its devices' peak an iteration takes {whole:.3g} s, {8 / whole:.3g} images/s: rollout {parts[0]:.3g} s, "
        f"update {parts[1]:.3g} s; "
    )
    assert line.endswith(UNMEASURED), "of a CPU no share of a peak was measured"
    unknown = Utilisation(config.with_changes({"trainer": {"device_peak_tflops": None}}), flops, [], group)  # type: ignore[arg-type]
    (line,) = unknown.expectation()
    assert line.startswith("an iteration's time cannot be estimated: the peak of this cpu is not known")

# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the training flow on Prefect, Ray and MLflow."""

import base64
import gzip
import json
import re
import signal
import sys
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from diffusers import QwenImagePipeline
from mlflow import MlflowClient
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from tasks.records.history import RunHistory
from tasks.rewards.jpeg import jpeg_kilobytes
from tasks.system.host_memory import all_bytes
from tests.support.lost_answers import ENDS_RUN, lost_answers
from tests.support.patience import PATIENCE, get, post, wait_until
from tests.support.platform_helpers import RayHead, Workspace, make_workspace, write_module

ROOT = Path(__file__).parents[2]
DOCUMENTED_METRICS = {
    *(f"critic/rewards/{name}" for name in ("mean", "max", "min", "zero_std_ratio", "std_mean", "group_size")),
    *(f"critic/{kind}/{name}" for kind in ("advantages", "returns") for name in ("mean", "max", "min")),
    *(f"timing_s/{stage}" for stage in ("gen", "reward", "adv", "update_actor", "update_weights", "step")),
    *(f"timing_per_image_ms/{stage}" for stage in ("gen", "adv", "update_actor")),
    *(f"perf/{name}" for name in ("total_num_images", "time_per_step", "throughput", "orchestration_share")),
    *(f"perf/{kind}/{stage}" for kind in ("tflops", "mfu") for stage in ("rollout", "update")),
    "reward/jpeg_incompressibility/missing",
    "perf/reward_busy_s/jpeg_incompressibility",
    *(f"train/image/{name}/mean" for name in ("edge_density", "entropy", "saturation", "diversity")),
    *(f"actor/{name}" for name in ("ppo_kl", "pg_clipfrac", "pg_loss", "grad_norm", "lr")),
}


@pytest.fixture
def workspace(workspace: Workspace, ray_head: RayHead) -> Workspace:
    """On one cluster, most of them."""
    return workspace.on(ray_head)


@dataclass(frozen=True)
class Recorded:
    """A run with the recipe's own settings, and what it printed."""

    workspace: Workspace
    output: str


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str]) -> Recorded:
    """On a cluster of its own, in a folder without a database, as a user's first run."""
    folder = tmp_path_factory.mktemp("recorded") / "workspace"
    workspace = make_workspace(folder, prepared, prefect_server, has_database=False)
    # Ray warns of four workers to a core. It counts all but two for each of these, which nothing here needs.
    few = replace(workspace, environment=workspace.environment | {"RAY_max_io_workers": "0"})
    settings = ("trainer.profile.iterations=[2]", "trainer.device_peak_tflops=2.0")
    many = ("ray_init.num_cpus=1", "reward.functions.jpeg_incompressibility.num_workers=3")
    short = ("actor_rollout_ref.rollout.max_queued_batches=1",)
    return Recorded(workspace, few.train(*settings, *many, *short))


def test_a_run_leaves_its_whole_record(recorded: Recorded) -> None:
    workspace = recorded.workspace
    (run,) = workspace.mlflow_runs()
    client = workspace.client()
    assert run.info.status == "FINISHED"
    assert run.data.metrics.keys() >= DOCUMENTED_METRICS
    assert run.data.metrics["actor/sample_steps"] == 16 * 2
    for stage in ("rollout", "update"):
        assert run.data.metrics[f"perf/mfu/{stage}"] == run.data.metrics[f"perf/tflops/{stage}"] / 2
    assert {m.step for m in client.get_metric_history(run.info.run_id, "critic/rewards/mean")} == {1, 2, 3}
    assert {m.step for m in client.get_metric_history(run.info.run_id, "val/reward/mean")} == {0, 2, 3}
    assert client.get_metric_history(run.info.run_id, "actor/optimizer_steps")[-1].value == 6
    assert run.data.params["actor_rollout_ref.rollout.n"] == "4"
    assert json.loads((workspace.run_folder() / "run.json").read_text())["mlflow_run_id"] == run.info.run_id
    assert "held-out" in recorded.output
    of_the_peak = re.findall(r"^at its devices' peak (.*)$", recorded.output, re.MULTILINE)
    assert [re.sub(r"[\d.]+(e[+-]\d+)?", "#", line).split(" s")[0] for line in of_the_peak] == [
        "an iteration takes #",
        "#",
    ]
    assert re.match(r"[\d.e-]+ s, iteration 3 took [\d.]+: rollout [\d.]+ s \([\d.e-]+\), update ", of_the_peak[1])
    check_start(recorded.output, client, run.info.run_id)
    assert other_lines(recorded.output) == [], "of what libraries print nothing is about the run"

    pictures = [item.path for item in client.list_artifacts(run.info.run_id, "images") if item.path.endswith(".png")]
    steps = sorted(
        (m[1], int(m[3])) for m in (re.match(r"images/1_headline~(\w+)(\W)step\2(\d+)", p) for p in pictures) if m
    )
    assert steps == [("samples", step) for step in (1, 2, 3)] + [("validation", step) for step in (0, 2, 3)]
    samples = pd.read_parquet(client.download_artifacts(run.info.run_id, "samples/000003.parquet"))
    assert len(samples) == 16
    assert {"uid", "prompt", "sample_index", "reward", "advantage", "seed", "iteration"} <= set(samples.columns)
    assert samples.groupby("uid")["advantage"].mean().abs().max() < 1e-5
    assert set(samples["policy_version"]) == {2}
    picture = np.array(Image.open(client.download_artifacts(run.info.run_id, samples["image"][5])))
    assert jpeg_kilobytes(picture) == pytest.approx(samples["reward"][5], rel=1e-6)
    check_first_sight(workspace, run)
    of_the_start = {Path(item.path).name for item in client.list_artifacts(run.info.run_id, "lineage/000000")}
    assert of_the_start == {"code.patch", "config.json", "environment.json"}

    assert [item.path for item in client.list_artifacts(run.info.run_id, "profile")] == ["profile/000002"]
    for name, ran in (
        ("rollout_0", "aten::randn"),
        ("trainer_0", "autograd::engine::evaluate_function: AddmmBackward0"),
    ):
        file = client.download_artifacts(run.info.run_id, f"profile/000002/{name}.json.gz")
        trace = json.loads(gzip.decompress(Path(file).read_bytes()))
        operations = {event.get("name") for event in trace["traceEvents"]}
        assert {"aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", ran} <= operations

    check_page(recorded, run.info.run_id)
    weights = workspace.registered("tiny/1")
    base = load_file(workspace.folder / "data/base_model/transformer/diffusion_pytorch_model.safetensors")
    pipeline = QwenImagePipeline.from_pretrained(weights)
    trained = pipeline.transformer.state_dict()
    assert trained.keys() == base.keys()
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    pipeline.set_progress_bar_config(disable=True)
    call = {"height": 16, "width": 24, "num_inference_steps": 2, "true_cfg_scale": 1.0}
    assert pipeline("the number 480", **call).images[0].size == (24, 16)


def other_lines(output: str) -> list[str]:
    """What is no line of an iteration, its expected seconds, the start or the summary, which is indented."""
    lines = [line for line in re.split("[\r\n]+", output) if line.strip()]
    own = "training:", "at its devices' peak", "an iteration's time", "the first update", "iteration ", "  "
    return [line for line in lines if not line.startswith(own)]


def test_prefects_page_of_a_run_says_what_was_done_and_what_came_of_it(recorded: Recorded) -> None:
    """Names, one line of log an iteration in page and terminal, the curve and the pictures, links both ways."""
    workspace = recorded.workspace
    address, (run,) = workspace.environment["PREFECT_API_URL"], workspace.mlflow_runs()
    page = run.data.tags["doubleflow.flow_run"]
    flow_run = get(f"{address}/flow_runs/{page.rpartition('/')[2]}")
    mine = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    assert flow_run["name"] == f"tiny {workspace.run_folder().name.removeprefix('tiny-')}"
    tasks = {task["name"] for task in post(f"{address}/task_runs/filter", mine)}
    assert {"rollout 1", "reward 2", "update 3", "sync-weights 0", "validate 0", "register 3"} <= tasks
    assert not [name for name in tasks if not re.fullmatch(r"[a-z-]+ \d", name)]

    logs = post(f"{address}/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "limit": 100})
    told = [log["message"] for log in sorted(logs, key=lambda log: log["timestamp"])]
    assert told[:2] == ["Ray starts", "Ray is there: the workers start and load their models"]
    lines = [message for message in told if message.startswith("iteration")]
    line = r"iteration \d/3: reward [\d.]+, held-out [\d.]+, clipped [\d.]+%, [\d.]+ s, [\d.]+ images/s, [\d:]+ left"
    assert sorted(line[:13] for line in lines) == [f"iteration {number}/3" for number in range(4)]
    assert len([text for text in lines if re.fullmatch(line, text)]) == 3
    assert all(recorded.output.count(text) == 1 for text in lines)

    end = flow_run["state"]["message"]
    assert re.search(
        r"held-out [\d.]+ -> [\d.]+ after 3 iterations; weights runs/tiny-\w+/weights, models:/tiny/1", end
    )
    (artifact,) = post(f"{address}/artifacts/filter", mine | {"artifacts": {"key": {"any_": ["training"]}}})
    assert artifact["data"] == 100
    first, *_ = artifact["description"].split("\n\n")
    assert end.startswith(f"{first}; "), "without the addresses, which stand below"
    pictures = re.findall(r"!\[[^]]+\]\(data:image/([\w+]+);base64,([\w+/=]+)\)", artifact["description"])
    (chart, drawn), (grid, held_out) = [(kind, base64.b64decode(data)) for kind, data in pictures]
    assert (chart, grid) == ("svg+xml", "webp")
    assert drawn.count(b"<polyline") == 2
    assert np.asarray(Image.open(BytesIO(held_out))).std() > 0
    page = (workspace.run_folder() / "report.html").read_text()
    assert base64.b64encode(held_out).decode() in page, "the same copy as on the run's page"
    assert "held-out pictures, iteration 3" in artifact["description"]


def check_first_sight(workspace: Workspace, run: Any) -> None:
    """What MLflow's pages show before anything is looked for: the name, the description, source, flow run, version."""
    metrics, tags, client = run.data.metrics, run.data.tags, workspace.client()
    copies = {"reward": "critic/rewards/mean", "held_out": "val/reward/mean", "gpu_hours": "cost/gpu_hours"}
    for name, source in copies.items():
        assert metrics[f"1_headline/{name}"] == pytest.approx(metrics[source], rel=1e-3), "rounded for reading"
    assert metrics["1_headline/images_per_second"] > 0
    digest = tags["doubleflow.config_digest"]
    assert re.fullmatch(rf"tiny .*\({digest}\)", run.info.run_name)
    assert tags["doubleflow.run_name"] == f"tiny-{digest}" == workspace.run_folder().name
    assert tags["mlflow.source.name"] == "flows/train.py"
    assert tags["mlflow.source.type"] == "LOCAL"
    server = workspace.environment["PREFECT_API_URL"].removesuffix("/api")
    assert re.fullmatch(rf"{server}/runs/flow-run/[0-9a-f-]{{36}}", tags["doubleflow.prefect_flow_run"])
    learnt, links, cost, code, weights = tags["mlflow.note.content"].split("\n")
    assert re.search(r"held-out reward \d+\.\d+ → \d+\.\d+, .* in 3 iterations", learnt)
    assert "minutes on the CPU, 48 images" in cost
    assert tags["mlflow.source.git.commit"][:12] in code
    assert 'QwenImagePipeline.from_pretrained(mlflow.artifacts.download_artifacts("models:/tiny/1"))' in weights
    assert "before_after.png" in links
    assert "#/models/tiny/versions/1" in links
    assert tags["doubleflow.prefect_flow_run"] in links
    version = client.get_model_version("tiny", "1")
    assert f"{version.tags['doubleflow.held_out_reward']}**, after 3 iterations" in version.description
    assert str(workspace.run_folder() / "weights") in version.description


def check_page(recorded: Recorded, run_id: str) -> None:
    """The run's page: here, in MLflow and in the terminal, of the whole run; and the same again from the record."""
    workspace, client = recorded.workspace, recorded.workspace.client()
    page = workspace.run_folder() / "report.html"
    html = page.read_text()
    assert Path(client.download_artifacts(run_id, "report.html")).read_text() == html
    assert f"page           {page.relative_to(workspace.folder)}" in recorded.output
    assert 'class="state finished"' in html
    assert "iteration 3 of 3" in html
    assert re.findall(r'class="frame" data-step="(\d+)"', html) == ["0", "2", "3"]
    for said in ("Held-out pictures, iteration 3", "trainer.profile.iterations", "update_actor", "seed <code>0</code>"):
        assert said in html
    kept = json.loads(Path(client.download_artifacts(run_id, "extremes/000002.json")).read_text())
    assert {sample["end"] for sample in kept["samples"]} == {"best", "worst"}
    assert json.loads(Path(client.download_artifacts(run_id, "overrides.json")).read_text()) == {
        "actor_rollout_ref.rollout.max_queued_batches": ["16", "1"],
        "ray_init.num_cpus": ["None", "1"],
        "reward.functions.jpeg_incompressibility.num_workers": ["1", "3"],
        "trainer.device_peak_tflops": ["None", "2.0"],
        "trainer.profile.iterations": ["[]", "[2]"],
    }
    check_seconds(recorded.workspace, run_id)
    assert not client.get_metric_history(run_id, "report/failures")

    page.unlink()
    printed = workspace.run("-m", "flows.report", workspace.run_folder().name)
    assert printed.strip().endswith(str(page.relative_to(workspace.folder)))
    again = page.read_text()
    for part in (r'class="frame" data-step="\d+"', r'<polyline class="line[^>]*>', r"<dd>[^<]*</dd>"):
        assert re.findall(part, again) == re.findall(part, html), part


def check_start(output: str, client: MlflowClient, run_id: str) -> None:
    """What a run says of its start is what MLflow has of it, once, and the parts are the whole."""
    ((whole, parts),) = re.findall(r"^the first update was done after ([\d.]+) s: (.*)$", output, re.MULTILINE)
    (point,) = client.get_metric_history(run_id, "perf/start_s")
    assert (point.step, round(point.value, 1)) == (1, float(whole))
    seconds = {part.rsplit(" ", 1)[0]: float(part.rsplit(" ", 1)[1]) for part in parts.split(", ")}
    assert [*seconds] == [
        *("the process", "checks", "Ray and MLflow", "workers and models", "weights to the rollout"),
        *("first validation", "samples and scores", "update"),
    ]
    assert sum(seconds.values()) == pytest.approx(float(whole), abs=0.05 * (len(seconds) + 1))
    assert seconds["the process"] > 0.5


def check_seconds(workspace: Workspace, run_id: str) -> None:
    """The parts of an iteration's seconds are the whole; what was written behind it is told apart."""
    metrics = RunHistory(workspace.client(), run_id).metrics()
    parts = {name: points for name, points in metrics.items() if name.startswith("timing_s/")}
    whole = parts.pop("timing_s/step")
    behind = {name.removeprefix("timing_s/behind/"): parts.pop(name) for name in [*parts] if "/behind/" in name}
    assert behind.keys() == {"kept_stages", "save_checkpoint", "memory", "log", "report"}
    assert all(points.keys() == {1, 2, 3} for points in behind.values())
    of_syncs = {name.removeprefix("timing_s/sync/"): parts.pop(name) for name in [*parts] if "/sync/" in name}
    worker = {"load", "digests", "rollout_canary", "wait", "compare"}
    assert of_syncs.keys() == worker | {"gather", "trainer_canary"}
    assert parts.keys() >= {"timing_s/gen", "timing_s/update_actor", "timing_s/progress", "timing_s/orchestration"}
    for step, seconds in whole.items():
        assert sum(points.get(step, 0.0) for points in parts.values()) == pytest.approx(seconds, rel=1e-9)
        assert all(points.get(step, 0.0) >= 0 for points in parts.values())
        # What the slowest worker did, one after the other, is within the stage.
        assert 0 < sum(of_syncs[name][step] for name in worker) <= parts["timing_s/update_weights"][step]
        assert metrics["perf/orchestration_s"][step] == parts["timing_s/orchestration"][step]
        # Its one worker's queue holds one batch, so the driver waits while it hands them out.
        assert parts["timing_s/gen"][step] >= metrics["perf/rollout_busy_s"][step]


def test_trainer_ranks_and_rollout_actors_do_not_change_the_first_iterations(
    recorded: Recorded, workspace: Workspace
) -> None:
    """Rewards of iteration 1 come from the base weights: equal bits. What is learned from them agrees closely.

    Nor does how the ranks hold the model, and the run's end waits for the checkpoint in the background.
    """
    workspace.train(
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.n_gpus_per_node=2",
        "trainer.full_determinism=true",
        "actor_rollout_ref.actor.fsdp_config={param_offload: true, ulysses_sequence_parallel_size: 2}",
        "actor_rollout_ref.rollout.num_actors=2",
    )
    assert len(list(workspace.folder.glob("runs/*/checkpoints/iter_000002/state.json"))) == 1
    tables, norms, measured = [], [], []
    for family in (recorded.workspace, workspace):
        client, (run,) = family.client(), family.mlflow_runs()
        tables.append(pd.read_parquet(client.download_artifacts(run.info.run_id, "samples/000001.parquet")))
        norms.append(client.get_metric_history(run.info.run_id, "actor/grad_norm")[0].value)
        history = client.get_metric_history(run.info.run_id, "val/reward/mean")
        measured += [point.value for point in history if point.step == 2]
    pd.testing.assert_frame_equal(*tables)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert measured[1] == pytest.approx(measured[0], rel=1e-3)


def in_the_run(*more: str) -> list[str]:
    """Options that have the prompts encoded in the run, as `prepared` has encoded them."""
    length = "actor_rollout_ref.rollout.pipeline.max_sequence_length=1024"
    return [word for setting in ("data.embeddings=live", length, *more) for word in ("--set", setting)]


def checkpoint(workspace: Workspace, iteration: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's weights and optimiser, by where they stand."""
    file = workspace.folder / "checkpoint.pt"
    dcp_to_torch_save(workspace.run_folder() / f"checkpoints/iter_{iteration:06d}/trainer", file)
    state = torch.load(file, weights_only=False)
    found, _ = tree_flatten_with_path({name: state[name] for name in ("model", "optimizer")})
    return {keystr(path): value for path, value in found if isinstance(value, torch.Tensor)}


LATER_WORDS = """
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread


def die_once_sampled():
    while not [*Path().glob("runs/*/*/rollout/iter_000003")]:  # gone with the iteration: too soon for another process
        time.sleep(0.001)
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def from_the_third_on(prompts, iteration, seed):
    if iteration < 3:
        return prompts
    if not Path("killed").exists():
        Thread(target=die_once_sampled, daemon=True).start()
    return [replace(prompt, prompt=f"{prompt.prompt} {iteration} {seed}") for prompt in prompts]
"""


def test_text_encoders_in_the_run_change_nothing_and_prompts_may_change_also_after_a_kill(
    recorded: Recorded, workspace: Workspace
) -> None:
    """Two iterations as with embeddings on disk, bit for bit. The process dies in the third, which has other prompts,
    and goes on with what it has sampled of them; those of the validation stay."""
    write_module(workspace, "later_words", LATER_WORDS)
    command = ("-m", "flows.train", "tiny", *in_the_run("data.rewrite_prompts=later_words:from_the_third_on"))
    first = workspace.start(*command)
    assert first.wait(PATIENCE) == -signal.SIGKILL, first.output()[-6000:]
    workspace.run(*command)
    pair = (workspace, recorded.workspace)
    (run,), (other,) = (family.mlflow_runs() for family in pair)
    assert run.info.status == "FINISHED"

    def tables(path: str) -> list[pd.DataFrame]:
        ids = (run.info.run_id, other.info.run_id)
        return [
            pd.read_parquet(family.client().download_artifacts(run_id, path))
            for family, run_id in zip(pair, ids, strict=True)
        ]

    for iteration in (1, 2):
        pd.testing.assert_frame_equal(*tables(f"samples/{iteration:06d}.parquet"))
    ours, theirs = (checkpoint(family, 2) for family in pair)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert len(theirs) > 50
    third, before = tables("samples/000003.parquet")
    assert (third["prompt"] == before["prompt"] + " 3 0").all()
    assert (third["uid"] == before["uid"]).all()
    measured, before = tables("validation/000003.parquet")
    assert (measured["prompt"] == before["prompt"]).all()
    metrics = RunHistory(workspace.client(), run.info.run_id).metrics()
    assert set(metrics["perf/embedding_cache_hits"].values()) == {0.0}, "each text is met for the first time"
    assert metrics["memory/text_encoder_0_mb"].keys() == {1, 2, 3}
    assert 0 < min(metrics["memory/machine_free_gib"].values()) < all_bytes() / 2**30
    for step, seconds in metrics["timing_s/step"].items():
        parts = {name: points.get(step, 0.0) for name, points in metrics.items() if name.startswith("timing_s/")}
        if step < 3:  # the third may have been in a checkpoint already when the process died
            assert min(parts["timing_s/encode_prompts"], parts["timing_s/rewrite_prompts"]) > 0
        apart = ("timing_s/behind/", "timing_s/sync/", "timing_s/step")
        inner = [taken for name, taken in parts.items() if not name.startswith(apart)]
        assert sum(inner) == pytest.approx(seconds, rel=1e-9)


OWN_KERNEL = """
from models.schedulers import ReverseStep, register_kernel


@register_kernel("fading")
def fading_step(sample, velocity, sigma, sigma_next, sigma_max, noise_level, *, power):
    return ReverseStep(sample + velocity * (sigma_next - sigma), noise_level * sigma**power)
"""


def test_many_choices_together_run_and_the_export_validates(workspace: Workspace) -> None:
    """LoRA, KL, moving average, guidance, batches of any size, single steps, several rewards, one of them a judge that
    the run serves, and a corrected Guard, whose stage is timed: equal engines need no correction. `flows.validate` then
    measures the same number, with prompts that it encodes itself.

    The kernel is a user's, known by its name to driver, rollout workers and ranks through external_lib.
    """
    write_module(workspace, "own_kernel", OWN_KERNEL)
    settings = (
        "trainer.total_training_steps=2",
        "actor_rollout_ref.model.external_lib=own_kernel",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.ema={enable: true, update_interval: 1}",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=auto",
        "actor_rollout_ref.rollout.micro_batch_size=auto",
        "algorithm={name: grpo_guard, adv_estimator: gdpo}",
        "algorithm.rollout_correction={bypass_mode: false, rollout_is: step}",
        "algorithm.rollout_correction.rollout_rs=seq_max_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.1",
        "actor_rollout_ref.rollout.algo={sde_window_size: 2, sde_window_range: [0, 3], sde_contiguous: false}",
        "actor_rollout_ref.rollout.algo.sde_type=fading",
        "actor_rollout_ref.rollout.algo.sde_options.power=0.5",
        "reward.functions={jpeg_incompressibility: {}, jpeg_compressibility: {weight: 0.5}, "
        "judge_grade: {weight: 0.1, options: {axes: [alignment]}}}",
        f"reward.reward_model={json.dumps(served_judge(workspace))}",
    )
    offline = replace(workspace, environment=workspace.environment | {"WANDB_MODE": "offline"})
    offline.train(*settings, "tracking.also=[tensorboard, wandb]")
    (run,) = workspace.mlflow_runs()
    metrics = run.data.metrics
    assert not [name for name in metrics if name.startswith("tracking/")]
    assert Path(run.data.tags["doubleflow.tensorboard"]) == workspace.run_folder().resolve() / "tensorboard"
    assert list(Path(run.data.tags["doubleflow.wandb"]).glob("run-*.wandb"))
    rates = workspace.client().get_metric_history(run.info.run_id, "actor/lr")
    assert [rate.value for rate in rates] == pytest.approx([0.875e-3, 0.375e-3])  # two of the run's four steps each
    assert run.data.params["actor_rollout_ref.rollout.micro_batch_size"] == "8"  # two batches of an iteration's 16
    assert metrics["actor/kl_loss"] > 0
    assert metrics["timing_s/old_log_prob"] > 0
    assert metrics["rollout_corr/logprob_abs_diff_max"] == 0.0
    assert metrics["rollout_corr/rollout_is_mean"] == 1.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert metrics["actor/mean_drift"] > 0
    pipeline = QwenImagePipeline.from_pretrained(workspace.folder / "data/base_model")
    pipeline.load_lora_weights(workspace.registered("tiny/1"))
    assert pipeline.get_active_adapters()
    changes = [word for setting in settings for word in ("--set", setting)]
    weights, other = workspace.run_folder() / "weights", "actor_rollout_ref.model.lora_alpha=2"
    validate = ("-m", "flows.validate", "tiny", "--weights", str(weights), *changes, *in_the_run())
    said = workspace.run(*validate, "--set", other, check=False)
    assert re.search(r"error: weights is .*, which was trained with lora_alpha \d+, but model.lora_alpha is 2", said)
    assert "Traceback" not in said
    assert "Ray" not in said
    workspace.run(*validate)
    measured = workspace.mlflow_runs()[-1]
    assert measured.info.run_id != run.info.run_id
    assert measured.data.metrics["val/reward/mean"] == metrics["val/reward/mean"]
    assert 0 <= metrics["val/reward/judge_grade/mean"] <= 1
    served = [line.split() for line in (workspace.folder / "journal").read_text().splitlines()]
    assert [word for word, *_ in served] == ["start", "start"], "of the run and of the validation"
    judges = [int(pid) for _, *pids in served for pid in pids]
    wait_until(lambda: not any(map(psutil.pid_exists, judges)), "the end of the judges and of what they had started")


def served_judge(workspace: Workspace) -> dict[str, Any]:
    """`reward.reward_model` of the judge of `tests.support.served_judge`, which writes to the folder's journal."""
    (workspace.folder / "judge").mkdir()
    (workspace.folder / "judge/model.safetensors").write_bytes(b"weights")
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.served_judge import main"
    command = [
        sys.executable,
        "-c",
        f"{begin}; main(*sys.argv[1:])",
        "{port}",
        "{name}",
        str(workspace.folder / "journal"),
    ]
    return {"model_path": str(workspace.folder / "judge"), "command": command}


HACKED_REWARD = """
import os, signal
from pathlib import Path

import numpy as np


def climb(latents, prompts, sign=1.0, dies_at=0, after=0):
    with Path(f"calls{sign}").open("a") as file:
        file.write(".")
        calls = file.tell()
    if calls == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return sign * max(calls - after, 0) + (sign > 0) * np.tanh(latents.mean(axis=(1, 2)))


climb.wants = "latents"
"""


def test_latents_are_enough_a_worker_may_die_and_a_guard_stops_the_run(workspace: Workspace) -> None:
    """One reward climbs with every call; the guard falls from the second iteration on. Both see latents, so training
    decodes no picture.

    Stopped at the second validation that finds it fallen, the run has ended in every record, says where the last good
    weights are, and does not go on until somebody says that it shall.
    """
    write_module(workspace, "hacked_reward", HACKED_REWARD)
    climbs = "{reward: 'hacked_reward:climb', options: {dies_at: 6}, retry_wait_s: 0}"
    falls = "{reward: 'hacked_reward:climb', options: {sign: -1.0, after: 7}, guard: true}"
    settings = [
        f"reward.functions={{climbs: {climbs}, taste: {falls}}}",
        "reward.guards={window: 5, p_value: 0.05, statistics: false, action: stop}",
        "trainer={total_training_steps: 5, test_freq: 1, save_freq: 0, export_freq: 1}",
    ]
    output = " ".join(workspace.train(*settings, check=False).split())
    (run,) = workspace.mlflow_runs()
    metrics, client, folder = run.data.metrics, workspace.client(), workspace.run_folder()
    assert (run.info.status, metrics["trainer/global_step"]) == ("FAILED", 3)
    assert metrics["reward/climbs/missing"] == 0
    assert metrics["perf/reward_busy_s/climbs"] > 0
    samples = pd.read_parquet(client.download_artifacts(run.info.run_id, "samples/000003.parquet"))
    assert not [column for column in samples if column.startswith("image/")]
    assert (samples["reward"] == samples["reward/climbs"]).all(), "the guard is no part of it"

    flags = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "guard/taste/flag")}
    assert flags == {1: 0.0, 2: 0.0, 3: 1.0}
    sentence = "the held-out reward rises while taste falls (since iteration 3)"
    assert run.data.tags["doubleflow.reward_hacking"] == sentence
    assert f"this may be reward hacking: {sentence}" in output
    assert [path.name for path in (folder / "last_good").iterdir()] == ["000001"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iter_000003"]
    assert (
        f"error: stopped after iteration 3 by reward.guards.action stop: {sentence}; the weights of the last" in output
    )
    assert "are those of iteration 1, in runs/" in output
    assert "Traceback" not in output
    versions = {v.tags["doubleflow.iteration"]: v.tags for v in client.search_model_versions("name = 'tiny'")}
    assert versions.keys() == {"1", "2", "3"}
    assert {step for step, tags in versions.items() if tags.get("doubleflow.reward_hacking") == sentence} == {"2", "3"}

    output = " ".join(workspace.train(*settings, check=False).split())
    assert "is stopped by its guards: the held-out reward rises while taste falls (since iteration 3); the" in output
    (run,) = workspace.mlflow_runs()
    assert (run.info.status, run.data.metrics["trainer/global_step"]) == ("FAILED", 3)

    output = " ".join(workspace.train(*settings, "reward.guards.action=flag").split())
    assert f"goes on although it is flagged: {sentence}" in output
    (run,) = workspace.mlflow_runs()
    assert (run.info.status, run.data.metrics["trainer/global_step"]) == ("FINISHED", 5)
    assert run.data.metrics["guard/taste/flag"] == 1
    taus = [m.step for m in client.get_metric_history(run.info.run_id, "guard/taste/tau")]
    assert taus == [5], "the trends have the iterations of both processes"


BLIND_REWARD = """
import numpy as np


def blind(images, prompts):
    return np.full(len(images), 0.25)
"""


@dataclass(frozen=True)
class Blind(Recorded):
    """And paths of the requests to Prefect whose first answer was lost."""

    lost: set[str]


@pytest.fixture(scope="module")
def blind(
    tmp_path_factory: pytest.TempPathFactory, prepared: Path, prefect_server: dict[str, str], ray_head: RayHead
) -> Blind:
    """A run of which every group ties and is dropped, at a Prefect server whose last answers to it are lost."""
    workspace = make_workspace(tmp_path_factory.mktemp("blind") / "workspace", prepared, prefect_server).on(ray_head)
    write_module(workspace, "blind_reward", BLIND_REWARD)
    server = httpx.URL(workspace.environment["PREFECT_API_URL"])
    with lost_answers(server.host, server.port, ENDS_RUN) as lossy:
        far = replace(workspace, environment=workspace.environment | {"PREFECT_API_URL": f"{lossy.address}/api"})
        output = far.train(
            "reward.functions={blind: {reward: 'blind_reward:blind'}}",
            "reward.guards={floor_iterations: 2, statistics: false}",
            "algorithm.drop_equal_groups=true",
            "trainer={total_training_steps: 2, val_before_train: false, test_freq: 0, save_freq: 0, export_freq: 1}",
        )
    return Blind(workspace, output, lossy.lost)


def test_a_reward_that_tells_nothing_apart_is_told_and_weights_that_never_moved_are_not_registered(
    blind: Blind,
) -> None:
    """Each update is skipped, and nothing is there to be called trained."""
    workspace, said = blind.workspace, " ".join(blind.output.split())
    (run,) = workspace.mlflow_runs()
    metrics, client = run.data.metrics, workspace.client()
    assert run.info.status == "FINISHED"
    assert (metrics["actor/optimizer_steps"], metrics["actor/update_skipped"]) == (0, 1)
    assert metrics["critic/advantages/missing"] == 16
    assert metrics["reward/blind/at_floor"] == 1
    sentence = (
        "the scores of blind were all near the lowest there can be, or all alike, in each of the first 2 iterations"
    )
    assert run.data.tags["doubleflow.reward_at_floor"] == sentence
    assert f"the reward may not work: {sentence}" in said
    assert "the update of iteration 2 was skipped" in said
    assert not client.search_registered_models()
    assert not (workspace.run_folder() / "weights").exists()
    kept = "neither exported nor registered: no iteration made an optimiser step, so they still are those of"
    assert f"weights {kept} data/base_model" in said
    assert run.data.tags["doubleflow.weights_never_moved"].startswith(kept)
    assert "held-out 0.250 (measured once)" in said


def test_a_failing_reward_fails_the_run_and_leaves_nothing_running(workspace: Workspace) -> None:
    source = "def score(images, prompts):\n    raise RuntimeError('the scorer is out of order')\n"
    write_module(workspace, "broken_reward", source)
    output = workspace.train("reward.functions={'broken_reward:score': {retry_wait_s: 0}}", check=False)
    assert "is missing for 4 of 4 samples, more than reward.max_missing_fraction 0.1 allows" in " ".join(output.split())
    assert "its error: RuntimeError: the scorer is out of order" in " ".join(output.split())
    said = other_lines(output)
    assert [line.split()[0] for line in said] == ["error:", "continue:"], said
    assert said[1].endswith(
        "-m flows.train tiny --set 'reward.functions={'\"'\"'broken_reward:score'\"'\"': {retry_wait_s: 0}}'"
    )
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "FAILED"
    assert not list((workspace.run_folder() / "checkpoints").iterdir())
    page = workspace.run_folder() / "report.html"
    assert Path(workspace.client().download_artifacts(run.info.run_id, "report.html")).read_text() == page.read_text()
    assert 'class="state failed"' in page.read_text()
    assert "RuntimeError: the scorer is out of order" in page.read_text()


def test_a_wrong_answer_of_own_code_ends_the_run_which_goes_on_once_that_is_right(workspace: Workspace) -> None:
    source = "def own(sample_level_rewards, index, **options):\n    return {answer}\n"
    run = ("algorithm.adv_estimator='own_advantage:own'", "trainer={total_training_steps: 1, val_before_train: false}")
    write_module(workspace, "own_advantage", source.format(answer="None"))
    said = other_lines(workspace.train(*run, check=False))
    assert [line.split()[0] for line in said] == ["error:", "continue:"], said
    assert "which returned" in said[0]
    write_module(
        workspace,
        "own_advantage",
        source.format(answer="sample_level_rewards - sample_level_rewards.mean(), sample_level_rewards"),
    )
    assert "iteration 1/1: reward" in workspace.train(*run)
    (finished,) = workspace.mlflow_runs()
    assert finished.info.status == "FINISHED"


def test_ratios_that_are_rounding_stop_the_run_at_its_first_update(workspace: Workspace) -> None:
    """No checkpoint has that update."""
    formats = ("actor_rollout_ref.model.dtype=bfloat16", "actor_rollout_ref.actor.fsdp_config.param_dtype=float32")
    short = ("trainer={total_training_steps: 1, val_before_train: false, canary_tolerance: 0.1}", *formats)
    output = workspace.train(*short, check=False)
    assert re.search(
        r"the clip acts on that, not on the policy. Set algorithm.rollout_correction.bypass_mode false", output
    )
    (run,) = workspace.mlflow_runs()
    assert run.info.status == "FAILED"
    assert not list((workspace.run_folder() / "checkpoints").iterdir())


def test_a_run_whose_end_prefect_wrote_down_but_did_not_answer_has_ended_well(blind: Blind) -> None:
    """A server under load: the request is sent again, and the answer, that this was done, holds no result."""
    (run,) = blind.workspace.mlflow_runs()
    flow_run = run.data.tags["doubleflow.flow_run"].rpartition("/")[2]
    assert f"/api/flow_runs/{flow_run}/set_state" in blind.lost
    assert get(f"{blind.workspace.environment['PREFECT_API_URL']}/flow_runs/{flow_run}")["state_type"] == "COMPLETED"
    assert "\n  run            tiny" in blind.output, "the summary"

# SPDX-License-Identifier: Apache-2.0
"""The trainer's actors on a real Ray: another engine by its path, checkpoints in the background, determinism."""

import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from models.config.actor import ForwardProcessConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import Trajectories
from models.schedulers.noise_keys import NoiseKey
from models.training.gradients import GradientNotFinite
from models.weights.buckets import from_host
from models.weights.canary import Canary
from tasks.actors.actor_group import ActorGroup
from tasks.actors.cluster import WorkerNeeds, ray_cluster
from tasks.actors.messages import BUSY_SECONDS, BothLogProbs, OldBatch, RankMiniBatch, Rescored
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.trainer_group import TrainerGroup
from tasks.actors.update_plan import OldScores
from tasks.config.trainer import RayConfig, TrainerConfig
from tasks.data.prompts import Prompt
from tasks.records.run_store import CheckpointStore, RunState
from tests.support.helpers import actor_config, largest_difference, model_config, prompt_table, rollout_request
from tests.support.other_environment import make_environment

ADVANTAGES = np.array([1.0, -0.8, 0.3, -1.5], np.float32)
HANG_S = 60
"""Of a rank that waits for another; only a defect lets it pass."""
SETTINGS = {"clip_grad": 0.1, "ppo_micro_batch_size_per_gpu": 2}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that others may read, as yet."""
    folder = tmp_path_factory.mktemp("compiled")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cluster(compiled: Path, shared_forks: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where the workers find the other engine
        with ray_cluster(
            RayConfig(num_cpus=2), WorkerNeeds(full_determinism=True, compiles=True, compile_cache=str(compiled))
        ):
            yield


@pytest.fixture(scope="module")
def trajectories(one_block_model: Path) -> Trajectories:
    _, sampled = DiffusersRolloutEngine(model_config(one_block_model)).generate(rollout_request())
    return sampled


def new_group(model: Path, ranks: int = 1, **settings: object) -> TrainerGroup:
    return TrainerGroup(
        model_config(model, lora_rank=4, lora_alpha=8),
        actor_config(**SETTINGS, **settings),
        ForwardProcessConfig(),
        TrainerConfig(n_gpus_per_node=ranks),
        mini_batch_samples=4,
    )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of another environment, which has a training engine in a package that this one lacks."""
    source = "from tests.support.plain_engine import PlainEngine\n\n\nclass Engine(PlainEngine):\n    pass\n"
    return make_environment(tmp_path_factory.mktemp("else where") / "venv", {"only_there.py": source})


@pytest.fixture(scope="module")
def groups(cluster: None, one_block_model: Path, elsewhere: Path) -> dict[str, TrainerGroup]:
    """The same trainer three times: FSDP2, another engine in another environment, and two ranks of FSDP2 that share
    their samples' tokens."""
    made = {
        "fsdp2": new_group(one_block_model),
        "other": new_group(one_block_model, strategy="only_there:Engine", python=str(elsewhere)),
        "shared": new_group(one_block_model, ranks=2, ulysses_sequence_parallel_size=2),
    }
    ray.get([ready for group in made.values() for ready in group.start()])
    return made


def batch(trajectories: Trajectories) -> PendingBatch:
    done = ray.put(0.0)
    prompts = tuple(Prompt(key.prompt_uid, "", None, {}, "") for key in trajectories.keys)
    return PendingBatch(prompts, trajectories.keys, (5, 0), ray.put(trajectories), None, None, done, done, 0)


def numbered(count: int) -> list[PendingBatch]:
    """So many batches of two samples, each of which has its number in place of trajectories."""
    prompts = (Prompt("prompt", "0", None, {}, ""),) * 2
    keys = tuple(NoiseKey(0, 1, "prompt", index) for index in range(2))
    done, numbers = ray.put(0.0), [torch.full((2, 1), float(number)) for number in range(count)]
    return [PendingBatch(prompts, keys, (5, 0), ray.put(number), None, None, done, done, 0) for number in numbers]


def scores(group: TrainerGroup, batches: list[PendingBatch]) -> tuple[list[OldBatch], list[torch.Tensor]]:
    return group.old_log_probs(group.begin_old_log_probs(batches))


def weights_of(group: TrainerGroup) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    gathered, *_ = group.group.call_all("gather_weights", "policy")
    answer, *_ = group.group.call_all("canary", Canary(prompt_table((5, 3))), "policy")
    weights = {name: tensor for bucket in gathered.tensors for name, tensor in from_host(bucket, "cpu").items()}
    return weights, answer.velocity


def test_other_engines_train_through_the_same_actor(
    groups: dict[str, TrainerGroup], trajectories: Trajectories, tmp_path: Path
) -> None:
    """Chosen by the config alone. Updates, log-probs, canary and weights are those of one rank of FSDP2."""
    given, reference = [batch(trajectories)], groups["fsdp2"]
    for _ in range(2):
        metrics = {name: group.update(given, ADVANTAGES, None) for name, group in groups.items()}
        for other in metrics.values():
            assert other["grad_norm"] == pytest.approx(metrics["fsdp2"]["grad_norm"], rel=1e-4)
            assert other["pg_loss"] == pytest.approx(metrics["fsdp2"]["pg_loss"], rel=1e-3, abs=1e-6)
    (weights, canary), (scored,) = weights_of(reference), [old.log_probs for old in scores(reference, given)[0]]
    assert (scored - trajectories.log_probs).abs().max() > 1e-4  # the weights have moved
    for group in groups.values():
        own_weights, own_canary = weights_of(group)
        assert largest_difference(own_weights, weights) < 1e-6
        torch.testing.assert_close(own_canary, canary, rtol=1e-5, atol=1e-5)
        (own_scored,) = [old.log_probs for old in scores(group, given)[0]]
        torch.testing.assert_close(own_scored, scored, rtol=1e-5, atol=1e-5)

    # A checkpoint in the background is of the moment it was asked for, whatever is trained meanwhile.
    for name, group in groups.items():
        store = CheckpointStore(tmp_path / name, keep=2)
        store.save_in_background(RunState(2, "c", "d", "r"), group.start_saving, group.wait_until_saved)
        group.update(given, ADVANTAGES, None)
        assert largest_difference(weights_of(group)[0], weights) > 1e-4
        store.settle()
        state, folder = store.latest("c", "d")
        assert state.iteration == 2
        group.load(folder)
        assert largest_difference(weights_of(group)[0], weights) < 1e-6
        group.export(tmp_path / f"exported_{name}")
        assert (tmp_path / f"exported_{name}" / "pytorch_lora_weights.safetensors").is_file()


def test_steps_that_are_taken_early_are_the_updates_own(
    groups: dict[str, TrainerGroup], trajectories: Trajectories, tmp_path: Path
) -> None:
    """The first of two mini-batches before the second is there, and one in which nothing can be learnt: none of it.
    With the rollout's log-probs, or with others."""
    given, advantages = [batch(trajectories)] * 2, np.concatenate([ADVANTAGES, -ADVANTAGES])
    assert {name: group.steps_early for name, group in groups.items()} == {
        "fsdp2": True,
        "other": False,
        "shared": True,
    }
    others = [OldBatch(trajectories.log_probs + 0.1, None, ray.put(None))] * 2
    for name, old in (("fsdp2", OldScores(others, {})), ("shared", None)):
        group, first = groups[name], old and OldScores(others[:1], {})
        group.save(tmp_path)
        expected, wanted = group.update(given, advantages, old), weights_of(group)
        group.load(tmp_path)
        assert group.step_early(given[:1], np.full(4, np.nan, np.float32), first) == 0
        assert group.step_early(given[:1], advantages[:4], first) == 1
        metrics, found = group.update(given[1:], advantages[4:], first), weights_of(group)
        assert largest_difference(found[0], wanted[0]) == 0.0
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        assert metrics.pop(BUSY_SECONDS) > 0
        assert metrics == {name: value for name, value in expected.items() if name != BUSY_SECONDS}


def test_an_error_of_a_step_that_is_taken_early_is_the_updates(
    groups: dict[str, TrainerGroup], trajectories: Trajectories, tmp_path: Path
) -> None:
    """Not that of the checkpoint that is being written, which stays, nor of what is asked of the ranks before."""
    group, store, failed = groups["fsdp2"], CheckpointStore(tmp_path / "checkpoints", keep=2), threading.Event()
    group.save(tmp_path / "before")
    broken = trajectories.rows(torch.arange(4))
    broken.latents[2, 1, 0, 0] = float("nan")
    given, advantages = [batch(broken), batch(trajectories), batch(trajectories)], np.concatenate([ADVANTAGES] * 3)

    def write_on_once_it_has_failed() -> None:
        failed.wait()
        group.wait_until_saved()

    store.save_in_background(RunState(1, "c", "d", "r"), group.start_saving, write_on_once_it_has_failed)
    assert group.step_early(given[:1], advantages[:4], None) == 1
    ray.get(group.group.actors[0].__ray_ready__.remote())
    failed.set()
    assert group.step_early(given[1:2], advantages[4:8], None) == 1
    assert len(scores(group, given[1:])[0]) == 2
    store.settle()
    assert store.iterations() == [1]
    with pytest.raises(GradientNotFinite, match="norm of optimiser step"):
        group.update(given[2:], advantages[8:], None)
    group.load(tmp_path / "before")
    group.update(given[1:], advantages[4:], None)


@pytest.mark.parametrize("sharing", [1, 2])
def test_old_log_probs_come_back_in_the_order_of_the_batches(cluster: None, sharing: int) -> None:
    """Of four batches on two ranks, or on two pairs of ranks that share their samples' tokens."""

    class Scorer:  # stands for a rank: a batch's number is its log-prob
        def __init__(self) -> None:
            self.scored: list[float] = []

        def rescore(self, number: torch.Tensor, with_means: bool) -> Rescored:
            self.scored.append(number[0, 0].item())
            return Rescored(BothLogProbs(number, -number), number)

    group = TrainerGroup.__new__(TrainerGroup)  # without its own ranks
    group.actor_config, group.sharing = actor_config(), sharing
    group.group = ActorGroup(Scorer, 2 * sharing, 0.0)
    old, rollout = scores(group, numbered(4))
    assert [found.log_probs[0, 0].item() for found in old] == [0, 1, 2, 3]
    assert [found[0, 0].item() for found in rollout] == [0, -1, -2, -3]
    assert [found[0, 0].item() for found in ray.get([one.means for one in old])] == [0, 1, 2, 3]
    scored = ray.get([actor.__ray_call__.remote(lambda scorer: scorer.scored) for actor in group.group.actors])
    assert scored == [[0, 2]] * sharing + [[1, 3]] * sharing, "those that share a sequence score the same batches"
    for actor in group.group.actors:
        ray.kill(actor)


@pytest.mark.parametrize("sharing", [1, 2])
def test_each_rank_takes_its_own_share_into_every_step(cluster: None, sharing: int) -> None:
    """Of the mini-batches in their order, whether early or not, on two ranks, or on two pairs of ranks that share."""

    class Learner:  # stands for a rank: a batch's number is its advantage
        def __init__(self) -> None:
            self.learnt: list[list[float]] = []

        def step_early(self, step: RankMiniBatch) -> None:
            self.learnt.append([float(part.advantages[0]) for part in step.parts])

        def update(self, steps: Sequence[RankMiniBatch], epochs: int) -> dict[str, float]:
            for step in steps:
                self.step_early(step)
            return {"epochs": epochs}

    group = TrainerGroup.__new__(TrainerGroup)  # without its own ranks
    group.actor_config, group.sharing, group.mini_batch_samples = actor_config(), sharing, 4
    group.group, group._early = ActorGroup(Learner, 2 * sharing, 0.0), []
    batches, advantages = numbered(6), np.repeat(np.arange(6, dtype=np.float32), 2)
    assert group.step_early(batches[:4], advantages[:8], None) == 2
    assert group.update(batches[4:], advantages[8:], None) == {"epochs": 1}
    learnt = ray.get([actor.__ray_call__.remote(lambda learner: learner.learnt) for actor in group.group.actors])
    assert learnt == [[[0], [2], [4]]] * sharing + [[[1], [3], [5]]] * sharing
    for actor in group.group.actors:
        ray.kill(actor)


@pytest.mark.parametrize("failing", ["warm_up", "rescore"])
def test_an_error_of_any_rank_ends_the_old_log_probs(cluster: None, failing: str) -> None:
    """Here of the second of two ranks that share samples: the first, whose answer counts, waits for it."""

    class Partner:
        def __init__(self) -> None:
            self.failing = ""

        def warm_up(self, _: object) -> None:
            self.take_part("warm_up")

        def rescore(self, number: torch.Tensor, with_means: bool) -> Rescored:
            self.take_part("rescore")
            return Rescored(BothLogProbs(number, -number), None)

        def take_part(self, method: str) -> None:
            if self.failing == method:
                raise MemoryError(f"no room for {method}")
            if self.failing == "the other":
                time.sleep(HANG_S)

    group = TrainerGroup.__new__(TrainerGroup)  # without its own ranks
    group.actor_config, group.sharing, group.group = actor_config(), 2, ActorGroup(Partner, 2, 0.0)
    for actor, fails in zip(group.group.actors, ("the other", failing), strict=True):
        ray.get(actor.__ray_call__.remote(lambda partner, fails: setattr(partner, "failing", fails), fails))
    number = torch.zeros(2, 1)
    asked = PendingBatch((), (), (5, 0), ray.put(number), None, None, ray.put(0.0), ray.put(0.0), 0)
    group.warm_up(Canary(prompt_table((5, 3))))
    with pytest.raises(MemoryError, match=f"no room for {failing}"):
        scores(group, [asked])
    assert not ray.wait([group.group.actors[0].__ray_ready__.remote()], timeout=0)[0], "it was raised after the wait"
    for actor in group.group.actors:
        ray.kill(actor)


def test_actors_run_under_the_interpreter_that_the_config_names(
    groups: dict[str, TrainerGroup], elsewhere: Path
) -> None:
    def environment(_actor: object) -> str:
        return sys.prefix

    assert find_spec("only_there") is None
    for name, group in groups.items():
        expected = elsewhere.parents[1] if name == "other" else Path(sys.prefix)
        for actor in group.group.actors:
            assert ray.get(actor.__ray_call__.remote(environment)) == str(expected)


def test_every_actor_computes_with_deterministic_kernels_alone(groups: dict[str, TrainerGroup]) -> None:
    def computes_deterministically(_actor: object) -> tuple[bool, bool, str]:
        """That, and what torch says of an operation without a deterministic kernel. Sent by value: this file is not
        imported there."""
        import torch

        try:
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
        except RuntimeError as error:
            said = str(error)
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, said

    actors = [actor for group in groups.values() for actor in group.group.actors]
    for enabled, cudnn, said in ray.get([actor.__ray_call__.remote(computes_deterministically) for actor in actors]):
        assert enabled
        assert cudnn
        assert "does not have a deterministic implementation" in said


def test_no_actor_has_imported_the_drivers_libraries(groups: dict[str, TrainerGroup]) -> None:
    """Neither by the modules that it names nor by what Ray brings it."""

    def found(_actor: object) -> list[str]:
        import sys

        return sorted({"prefect", "mlflow"} & sys.modules.keys())

    assert ray.get([actor.__ray_call__.remote(found) for actor in groups["fsdp2"].group.actors]) == [[]]


def test_every_actor_keeps_what_it_compiles_in_one_folder_of_this_user(
    groups: dict[str, TrainerGroup], compiled: Path
) -> None:
    def place(_actor: object) -> str:
        from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

        return f"{cache_dir()} {triton_cache_dir(0)}"

    actors = [actor for group in groups.values() for actor in group.group.actors]
    for said in ray.get([actor.__ray_call__.remote(place) for actor in actors]):
        assert said == f"{compiled} {compiled}/triton/0"
    assert stat.S_IMODE(compiled.stat().st_mode) == 0o700


def test_an_error_of_the_writing_fails_the_run(groups: dict[str, TrainerGroup], tmp_path: Path) -> None:
    """It is raised at the latest where the run would end, nothing half-written stays, and the trainer can go on."""
    group, store = groups["fsdp2"], CheckpointStore(tmp_path / "checkpoints", keep=2)

    def start_where_nothing_can_be_written(folder: Path) -> None:
        (folder / "__0_0.distcp").mkdir()  # in the way of the first rank's file
        group.start_saving(folder)

    with pytest.raises(IsADirectoryError, match="__0_0"), store.behind.settled():
        store.save_in_background(RunState(1, "c", "d", "r"), start_where_nothing_can_be_written, group.wait_until_saved)
    assert list(store.folder.iterdir()) == []
    with pytest.raises(IsADirectoryError, match="__0_0"):
        store.behind.check()  # what comes after it is not written by this process
    store = CheckpointStore(store.folder, keep=2)
    store.save_in_background(RunState(2, "c", "d", "r"), group.start_saving, group.wait_until_saved)
    store.settle()
    assert store.iterations() == [2]

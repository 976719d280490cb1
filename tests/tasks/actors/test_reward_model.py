# SPDX-License-Identifier: Apache-2.0
"""A reward model's server as a process of the run: started, asked, put to sleep, started again and ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import ray
import torch
from pydantic import ValidationError
from transformers import AutoProcessor, LlavaForConditionalGeneration

from models.schedulers.noise_keys import NoiseKey
from tasks.actors import reward_model_server
from tasks.actors.cluster import ray_cluster
from tasks.actors.reward_group import RewardGroup
from tasks.actors.reward_model import RewardModel, check_reward_model, served_reward_model
from tasks.actors.reward_model_server import GUARD, RewardModelError, RewardModelServer, server_command
from tasks.actors.rollout_group import PendingBatch
from tasks.actors.server_log import MOST_BYTES, READ_BYTES
from tasks.config.errors import ConfigError
from tasks.config.reward import RewardConfig, RewardModelConfig
from tasks.config.trainer import RayConfig
from tasks.data.prompts import Prompt
from tasks.rewards import RewardError, check_reward, get_reward
from tasks.system.processes import runs, wait_until_ended
from tests.support.patience import PATIENCE
from tests.support.processes import pid_of
from tests.support.tiny_judges import save_llava

ROOT = Path(__file__).parents[3]
SERVER = [sys.executable, "-m", "tests.support.served_judge", "{port}", "{name}"]
PER_SAMPLE = f"{__name__}:compute_score"
LEVELS = [0, 60, 120, 180]
ASKED = [
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/load_model"),
    ("POST", "/reset"),
    ("OPTIONS", "/v1/models"),
]


async def compute_score(solution_image, reward_router_address, model_name):
    """In the reference's form: whom to ask is handed on to it."""
    answer = httpx.get(f"http://{reward_router_address}/v1/models")
    return {"score": float(answer.status_code), "model": model_name}


@pytest.fixture(scope="module")
def cluster(shared_forks: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(ROOT))
        with ray_cluster(RayConfig(num_cpus=2)):
            yield


def config(folder: Path, *options: str, functions: dict | None = None, **settings) -> RewardConfig:
    """Rewards that ask the judge of `tests.support.served_judge`, which writes to the folder's journal."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    command = [*SERVER, str(folder / "journal"), *options]
    model = {"model_path": str(folder / "model"), "command": command} | settings
    asking = functions or {"judge_grade": {"options": {"axes": ["alignment"]}, "num_workers": 2}}
    return RewardConfig(functions=asking, reward_model=model, guards={"statistics": False})


def batches() -> list[PendingBatch]:
    """Two rollout batches of two plain pictures each."""
    done, finite, found = ray.put(0.0), ray.put(np.ones(2, bool)), []
    for start in (0, 2):
        levels = np.array(LEVELS[start : start + 2])
        pictures = np.broadcast_to(levels[:, None, None, None], (2, 6, 5, 3)).astype(np.uint8)
        prompts = tuple(Prompt(f"uid-{start}", "a cat", None, {}, "") for _ in levels)
        keys = tuple(NoiseKey(0, 1, f"uid-{start}", index) for index in range(2))
        found.append(PendingBatch(prompts, keys, (5, 0), done, ray.put(pictures), None, finite, done, 0))
    return found


def journal(folder: Path) -> list[str]:
    return (folder / "journal").read_text().splitlines()


def processes(folder: Path) -> list[psutil.Process]:
    """Of the server that was started last: it and its engine."""
    _, *pids = [line for line in journal(folder) if line.startswith("start")][-1].split()
    return [psutil.Process(int(pid)) for pid in pids]


def wait_until_dead(process: psutil.Process) -> None:
    """On a busy machine it lives on for a moment after its end has begun, and would be asked."""
    while runs(process):
        time.sleep(0.01)


def assert_all_end(found: list[psutil.Process]) -> None:
    left = wait_until_ended(found, PATIENCE)
    assert not left


def test_a_run_starts_its_judge_lets_it_sleep_and_ends_it(cluster: None, tmp_path: Path) -> None:
    settings = config(tmp_path, sleep=True)
    check_reward_model(settings)
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        (version,) = group.versions().values()
        assert f"{tmp_path / 'model'} " in version, "the version names the model and its weights"
        assert journal(tmp_path)[1:] == ["/sleep?level=1&mode=wait"], "until something is to be scored"
        expected = [[0, 0.25, 0.5, 0.75], [0, 0.25, 0.5, 0.75]]
        assert [group.table(shards, group.submit(shards, training=True)).rewards.tolist() for _ in range(2)] == expected
        once = ["/sleep?level=1&mode=wait", "/wake_up"]
        assert journal(tmp_path)[1:] == [*once, *once, once[0]], "never asked while asleep, asleep between and after"
        # Scores of the next iteration are under way: it stays awake.
        first, second = group.submit(shards, training=True), group.submit(shards, training=True)
        group.table(shards, first)
        assert journal(tmp_path)[-1] == "/wake_up"
        group.table(shards, second)
        assert journal(tmp_path)[-1] == "/sleep?level=1&mode=wait"
        loaded = ray.get(model.actor.__ray_call__.remote(lambda _: set(sys.modules)))
        assert not loaded & {"prefect", "mlflow", "tasks.actors.cluster"}, "the driver's"
        # It asks for the secret, and no other machine reaches it.
        server, engine = processes(tmp_path)
        (socket,) = [one for one in server.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert socket.laddr.ip == "127.0.0.1"
        assert httpx.get(f"http://127.0.0.1:{socket.laddr.port}/v1/models").status_code == 401
        assert ray.get(model.actor.connection.remote()).key not in " ".join(server.cmdline())
        # Killed as it sleeps, and its engine left over: the next scores come from another one, and the engine is gone.
        model.rest()
        server.kill()
        wait_until_dead(server)
        assert group.table(shards, group.submit(shards, training=True)).rewards.tolist() == expected[0]
        assert_all_end([server, engine])
        last = processes(tmp_path)
        assert last[0].pid != server.pid
        assert journal(tmp_path)[-2:] == [f"start {last[0].pid} {last[1].pid}", once[0]], "it starts awake"
        # Of one that was ended nobody has another.
        ray.get(model.actor.stop.remote())
        with pytest.raises(RewardModelError, match="was ended with its run"):
            model.wait()
    assert_all_end(last)
    assert sum(line.startswith("start") for line in journal(tmp_path)) == 2


def test_a_judge_of_validations_alone_sleeps_while_the_run_trains(cluster: None, tmp_path: Path) -> None:
    judge = {"options": {"axes": ["alignment"]}, "guard": True, "training_share": 0}
    settings = config(tmp_path, functions={"jpeg_compressibility": {}, "judge_grade": judge}, sleep=True)
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        group.versions()
        asleep = journal(tmp_path)
        group.table(shards, group.submit(shards, training=True))
        assert journal(tmp_path) == asleep
        found = group.table(shards, group.submit(shards, training=False))
        assert found.by_reward["judge_grade"].tolist() == [0, 0.25, 0.5, 0.75]
        assert journal(tmp_path) == [*asleep, "/wake_up", "/sleep?level=1&mode=wait"]


def test_the_log_of_a_judge_that_lives_long_is_cut_as_it_is_asked(cluster: None, tmp_path: Path) -> None:
    settings = config(tmp_path)
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        model.wait()
        log = Path(f"/proc/{processes(tmp_path)[0].pid}/fd/1")
        os.truncate(log, MOST_BYTES + 1)
        assert group.table(shards, group.submit(shards, training=True)).rewards.tolist() == [0, 0.25, 0.5, 0.75]
        assert READ_BYTES <= log.stat().st_size < 2 * READ_BYTES


@pytest.mark.parametrize("order", ["/sleep", "/wake_up"])
def test_a_judge_that_is_killed_as_it_is_to_sleep_or_to_wake_up_has_a_successor(
    cluster: None, tmp_path: Path, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections are gone a while before its process is. No score is lost of it, though none is asked again: they
    come from another one, which sleeps after."""
    functions = {"judge_grade": {"options": {"axes": ["alignment"]}, "retries": 0}}
    settings = config(tmp_path, f"dies-of={order}", functions=functions, sleep=True)
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        model.wait()
        server, _ = processes(tmp_path)
        model.rest()
        assert runs(server) == (order == "/wake_up")
        model.rest()
        assert group.table(shards, group.submit(shards, training=True)).rewards.tolist() == [0, 0.25, 0.5, 0.75]
        assert not runs(server)
    asleep = "/sleep?level=1&mode=wait"
    before = [asleep] if order == "/wake_up" else []
    found = [line.split()[0] for line in journal(tmp_path)]
    assert found[: len(before) + 3] == ["start", *before, "dies", "start"]
    assert found[len(before) + 3 :].count("start") == 0
    assert found[-1] == asleep
    assert len([record for record in caplog.records if "(code -9; " in record.message]) == 1


def test_a_killed_actor_takes_its_server_along_and_another_begins(cluster: None, tmp_path: Path) -> None:
    """A function in the reference's form is told where the judge is, and rewards of a mapping ask it, too."""
    inner = {"reward": "judge_grade", "options": {"axes": ["alignment"]}}
    functions = {PER_SAMPLE: {}, "by_data_source": {"options": {"sources": {"a": inner}}}}
    settings = config(
        tmp_path, functions={PER_SAMPLE: {}, "sources": {"reward": "by_data_source"} | functions["by_data_source"]}
    )
    check_reward_model(settings)
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        group.versions()
        shards = [
            PendingBatch(
                tuple(Prompt(p.uid, p.prompt, None, {"data_source": "a"}, "") for p in b.prompts),
                *list(vars(b).values())[1:],
            )
            for b in shards
        ]
        found = group.table(shards, group.submit(shards, training=True))
        assert found.by_reward["sources"].tolist() == [0, 0.25, 0.5, 0.75]
        assert found.by_reward[PER_SAMPLE].tolist() == [401.0] * 4
        assert set(found.samples[f"{PER_SAMPLE}/model"]) == {str(tmp_path / "model")}
        first = processes(tmp_path)
        os.kill(pid_of(model.actor), signal.SIGKILL)
        assert_all_end(first)
        found = group.table(shards, group.submit(shards, training=True))
        assert found.by_reward["sources"].tolist() == [0, 0.25, 0.5, 0.75]
        last = processes(tmp_path)
    assert_all_end(last)


def test_what_a_judge_had_not_scored_when_it_died_is_asked_again(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as `retries` says: the third picture's question kills it three times."""
    options = {"axes": ["alignment"], "concurrency": 1, "max_retries": 0}
    functions = {"judge_grade": {"options": options, "batch_size": 4, "retries": 1}}
    settings = config(tmp_path, "dies=3:3", functions=functions).model_copy(update={"max_missing_fraction": 1.0})
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        group.versions()
        found = group.table(shards, group.submit(shards, training=True))
        assert found.rewards.tolist()[:2] == [0, 0.25]
        assert np.isnan(found.rewards[2:]).all(), "it has killed two"
        assert found.metrics()["reward/judge_grade/missing"] == 2
        assert found.samples["judge_grade/error"].str.startswith("APIConnectionError").tolist()[2:] == [True, True]
        wait_until_dead(processes(tmp_path)[0])
        again = group.table(shards, group.submit(shards, training=True))
        assert again.rewards.tolist() == [0, 0.25, 0.5, 0.75]
        assert again.samples["judge_grade/text"].str.startswith("Alignment").all()
        assert again.samples["judge_grade/alignment"].tolist() == [1, 2, 3, 4]
        assert "judge_grade/error" not in again.samples or again.samples["judge_grade/error"].isna().all()
        assert sum(line.startswith("start") for line in journal(tmp_path)) == 4, "none more than was asked of"
        told = [record.message for record in caplog.records if "was started again" in record.message]
        assert len(told) == 3
        assert all("(code 3; the end of its log: out of memory)" in line for line in told), "its own log"


def test_a_server_that_does_not_start_or_sleep_says_why(cluster: None, tmp_path: Path) -> None:
    words = "import os, sys; sys.exit('no such device, key ' + os.environ['REWARD_MODEL_KEY'])"
    settings = config(tmp_path, command=[sys.executable, "-c", words, "{port}"])
    with (
        served_reward_model(settings) as model,
        pytest.raises(RewardModelError, match=r"code 1 .*no such device, key \*\*\*"),
    ):
        model.wait()
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    (kept,) = [log for log in logs.glob("worker-*.err") if "--- what the server wrote ---" in log.read_text()]
    assert "no such device, key ***" in kept.read_text()
    settings = config(tmp_path, "fails-to-wake", sleep=True)
    with served_reward_model(settings) as model:
        model.wait()
        model.rest()
        with pytest.raises(RewardModelError, match="answers POST /wake_up with 500"):
            model.wait()
    settings = config(tmp_path, "without-sleep", sleep=True)
    with served_reward_model(settings) as model:
        model.wait()
        with pytest.raises(RewardModelError, match=r"does not offer /sleep.*reward.reward_model.sleep to false"):
            model.rest()
    settings = config(
        tmp_path, command=[sys.executable, "-c", "import time; time.sleep(7200)", "{port}"], start_timeout_s=1
    )
    with served_reward_model(settings) as model:
        with pytest.raises(RewardModelError, match=r"within .*start_timeout_s 1"):
            model.wait()
        ended = ray.get(model.actor.__ray_call__.remote(lambda server: server._process.wait(PATIENCE)))
        assert ended == -signal.SIGTERM, "it keeps no GPU"


def test_a_judge_that_starts_no_more_ends_the_run_after_one_try(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though every score may be missing and each of four calls may be repeated; a worker of after that says it, too."""
    functions = {"judge_grade": {"options": {"axes": ["alignment"]}, "batch_size": 1, "retry_wait_s": 0}}
    settings = config(tmp_path, "starts=1", functions=functions).model_copy(update={"max_missing_fraction": 1.0})
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        group.versions()
        server = processes(tmp_path)[0]
        server.kill()
        wait_until_dead(server)
        pending = group.submit(shards, training=True)
        why = r"^the reward model's server ended with code 1 .* its log: no such device -- .* had ended: code -9; "
        with pytest.raises(RewardError, match=why):
            group.table(shards, pending)
        for call in pending.calls["judge_grade"]:
            assert isinstance(ray.get(call.answer), RewardError), "no call waits for a start of its own"
        (worker,) = group.pools["judge_grade"].group.actors
        os.kill(pid_of(worker), signal.SIGKILL)
        with pytest.raises(RewardError, match=why):
            group.table(shards, group.submit(shards, training=True))
        with pytest.raises(RewardModelError, match=why[1:]):
            model.wait()
    assert [line.split()[0] for line in journal(tmp_path)] == ["start", "no"]
    assert not [record for record in caplog.records if "was started again" in record.message]


def answers_within_a_second(actor: RewardModelServer) -> None:
    """Or is taken not to answer a sleep or a wake-up, in the actor's process."""
    reward_model_server.SLEEP_SECONDS = 1.0


def test_a_judge_that_does_not_wake_up_ends_the_run_after_one_try(cluster: None, tmp_path: Path) -> None:
    """It lives; and each of four calls of two workers could ask it again, as often as `retries` says."""
    options = {"options": {"axes": ["alignment"]}, "batch_size": 1, "retry_wait_s": 0, "num_workers": 2}
    settings = config(tmp_path, "never-wakes", functions={"judge_grade": options}, sleep=True)
    settings = settings.model_copy(update={"max_missing_fraction": 1.0})
    with served_reward_model(settings) as model:
        group, shards = RewardGroup(settings, model), batches()
        group.versions()
        ray.get(model.actor.__ray_call__.remote(answers_within_a_second))
        asleep, pending = processes(tmp_path), group.submit(shards, training=True)
        why = r"did not answer POST /wake_up within 1 s: set reward.reward_model.sleep to false, .* end of its log: "
        with pytest.raises(RewardError, match=why):
            group.table(shards, pending)
        for call in pending.calls["judge_grade"]:
            assert isinstance(ray.get(call.answer), RewardError), "no call waits for a wake-up of its own"
        with pytest.raises(RewardModelError, match=why):
            model.wait()
        assert_all_end(asleep)
    assert journal(tmp_path)[1:] == ["/sleep?level=1&mode=wait", "/wake_up"]


DRIVER = """
import sys, time
from prefect.exceptions import TerminationSignal
import signal
from tasks.actors.cluster import ray_cluster
from tasks.actors.reward_model import served_reward_model
from tasks.config.reward import RewardConfig
from tasks.config.trainer import RayConfig

def stop(number, frame):
    raise TerminationSignal(number)

signal.signal(signal.SIGTERM, stop)
with ray_cluster(RayConfig(num_cpus=1)), served_reward_model(RewardConfig.model_validate_json(sys.argv[1])) as model:
    model.wait()
    print("served", flush=True)
    while True:
        time.sleep(0.2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_the_driver(tmp_path: Path, number: signal.Signals) -> None:
    settings = config(tmp_path).model_dump_json()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, settings],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "served\n"
    found = processes(tmp_path)
    driver.send_signal(number)
    driver.wait(PATIENCE)
    if number == signal.SIGTERM:
        assert not any(runs(one) for one in found), "before the driver itself"
    assert_all_end(found)


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    judge = {"judge_grade": {}}
    cases = [
        (RewardConfig(functions=judge), r"judge_grade has no base_url, and there is no reward.reward_model"),
        (config(tmp_path, functions={"brightness": {}}), "which no reward asks"),
        (RewardConfig(functions=judge, reward_model={"model_path": "Qwen/judge"}), "give the commit as revision"),
        (config(tmp_path, revision="a" * 40), "is a folder, which has no revision"),
        (config(tmp_path, command=[], python=tmp_path / "bin/python"), f"there is no {tmp_path}/bin/vllm"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_reward_model(settings)
    for wrong, message in (
        ({"command": ["serve"]}, "has no {port}"),
        ({"engine": "transformers", "sleep": True}, "not offer"),
    ):
        with pytest.raises(ValidationError, match=message):
            RewardModelConfig(model_path="a", **wrong)
    with pytest.raises(RewardError, match="api_key_env is given without base_url"):
        check_reward("judge_ocr", api_key_env="JUDGE_KEY")
    with pytest.raises(RewardError, match="base_url is missing and this process has no served model"):
        get_reward("judge_ocr")


def test_the_engines_commands(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    vllm = RewardModelConfig(
        model_path="m/j", revision="a" * 40, python=python, sleep=True, arguments=["--max-model-len", "8192"]
    )
    place = ["--host", "127.0.0.1", "--port", "5"]
    serve = [f"{tmp_path}/bin/vllm", "serve", "m/j", *place, "--served-model-name", "m/j"]
    guarded = ["--middleware", "doubleflow_server_guard.Guard", "--revision", "a" * 40]
    assert server_command(vllm, 5) == [*serve, *guarded, "--enable-sleep-mode", "--max-model-len", "8192"]
    other = vllm.model_copy(update={"engine": "transformers", "sleep": False, "arguments": []})
    program = [str(python), str(GUARD), f"{tmp_path}/bin/transformers"]
    assert server_command(other, 5) == [*program, "serve", f"m/j@{'a' * 40}", *place]


def test_an_engine_finds_the_secret_the_guard_and_no_gpu(cluster: None, tmp_path: Path) -> None:
    """vLLM itself would ask for the secret in a user's variable, and take a GPU that the run does not give."""
    for engine, own in (("vllm", {"VLLM_SERVER_DEV_MODE": "1"}), ("transformers", {})):
        model = RewardModel(RewardModelConfig(model_path=str(tmp_path), engine=engine, sleep=bool(own)))
        found, key = ray.get(model.actor.__ray_call__.remote(lambda server: (server._environment(), server._key)))
        model.stop()
        own |= {"VLLM_API_KEY": key} if engine == "vllm" else {}
        assert found.items() >= (own | {"REWARD_MODEL_KEY": key, "CUDA_VISIBLE_DEVICES": ""}).items()
        assert str(GUARD.parent) in found["PYTHONPATH"].split(os.pathsep)


def test_an_engine_that_answers_whoever_asks_is_not_used(cluster: None, tmp_path: Path) -> None:
    """A vLLM of a version that takes no notice of the guard, as far as the run can tell."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "health").write_text("well")
    serve = f'exec "{sys.executable}" -m http.server "$6" --bind 127.0.0.1 --directory "{tmp_path}"\n'
    (tmp_path / "bin" / "vllm").write_text(f"#!/bin/sh\n{serve}")
    (tmp_path / "bin" / "vllm").chmod(0o700)
    settings = config(tmp_path, command=[], python=tmp_path / "bin" / "python")
    check_reward_model(settings)
    with (
        served_reward_model(settings) as model,
        pytest.raises(RewardModelError, match="answers /health without the run's secret"),
    ):
        model.wait()


def test_an_engine_that_dies_once_it_has_answered_is_told_with_its_last_words(cluster: None, tmp_path: Path) -> None:
    """It is asked whether it answers whoever asks; what comes of no answer is no word of Prefect's server."""
    words = [
        "import http.server, os, sys",
        "class Handler(http.server.BaseHTTPRequestHandler):",
        "    def do_GET(self):",
        "        if 'Authorization' not in self.headers:",
        "            print('out of memory', flush=True)",
        "            os._exit(3)",
        "        self.send_response(200)",
        "        self.end_headers()",
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[6])), Handler).serve_forever()",
    ]
    (tmp_path / "bin").mkdir()
    (tmp_path / "engine.py").write_text("\n".join(words))
    (tmp_path / "bin" / "vllm").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "engine.py"}" "$@"\n')
    (tmp_path / "bin" / "vllm").chmod(0o700)
    settings = config(tmp_path, command=[], python=tmp_path / "bin" / "python")
    with (
        served_reward_model(settings) as model,
        pytest.raises(RewardModelError, match=r"answered, and then not to /health \(.*out of memory"),
    ):
        model.wait()


def test_transformers_own_server_answers_as_the_model_does(cluster: None, tmp_path: Path) -> None:
    """A random LLaVA, served by `transformers serve`, against generation by the model itself."""
    folder = str(save_llava(tmp_path / "llava"))
    options = {"template": "What?", "max_tokens": 24}
    settings = RewardConfig(
        functions={"judge_ocr": {"options": options}},
        reward_model={"model_path": folder, "engine": "transformers"},
        guards={"statistics": False},
        max_missing_fraction=1.0,
    )
    check_reward_model(settings)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (3, 24, 24, 3), dtype=np.uint8)
    expected = [said_by(folder, picture, **options) for picture in pictures]
    assert all(expected)
    assert len(set(expected)) == 3, "pictures matter"
    prompts = tuple(Prompt(f"uid-{i}", "a cat", text, {}, "") for i, text in enumerate(expected))
    keys = tuple(NoiseKey(0, 1, prompt.uid, 0) for prompt in prompts)
    finite = ray.put(np.ones(len(keys), bool))
    batch = PendingBatch(prompts, keys, (5, 0), ray.put(0.0), ray.put(pictures), None, finite, ray.put(0.0), 0)
    with served_reward_model(settings) as model:
        group = RewardGroup(settings, model)
        found = group.table([batch], group.submit([batch], training=True)).samples
        # Whoever has no secret, another user or a page in a browser, cannot even have it load a model.
        served = ray.get(model.actor.connection.remote())
        address = served.url.removesuffix("/v1")
        for method, path in ASKED:
            for given in ({}, {"Authorization": "Bearer other"}, {"Origin": "http://evil.example"}):
                assert httpx.request(method, address + path, headers=given).status_code == 401
        server = psutil.Process(ray.get(model.actor.pid.remote()))
        assert served.key not in " ".join(server.cmdline())
        (socket,) = [one for one in server.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert socket.laddr.ip == "127.0.0.1"
    assert found["judge_ocr/text"].tolist() == expected
    assert found["reward/judge_ocr"].tolist() == [1, 1, 1]


@torch.no_grad()
def said_by(folder: str, picture: np.ndarray, template: str, max_tokens: int) -> str:
    model, processor = (
        LlavaForConditionalGeneration.from_pretrained(folder).eval(),
        AutoProcessor.from_pretrained(folder),
    )
    content = [{"type": "image"}, {"type": "text", "text": template}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=chat, images=[picture], return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(answer, skip_special_tokens=True)

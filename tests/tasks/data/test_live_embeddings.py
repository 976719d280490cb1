# SPDX-License-Identifier: Apache-2.0
"""Text encoders in the run: the same bits as the data stage's, a cache by the text, and what is refused before."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flows.prepare import app
from models.schedulers.noise_keys import NoiseKey
from tasks.actors.cluster import ray_cluster
from tasks.actors.text_encoder import TextEncoder
from tasks.actors.text_encoder_group import TextEncoderGroup
from tasks.config.data import TextEncoderConfig
from tasks.config.errors import ConfigError
from tasks.config.trainer import RayConfig
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import PromptEmbeddings, Row
from tasks.data.live_embeddings import LiveEmbeddings
from tasks.data.prompt_files import DatasetError
from tasks.data.prompts import Prompt, load_prompts, prompt_uid
from tasks.data.rewriting import get_rewriting, prompts_number, rewritten
from tasks.data.text_encoding import EncodingSettings, TextEncoding, adapter_of
from tasks.records.run_store import CheckpointError, RunState
from tasks.run.kept_stages import KeptStages
from tasks.run.live_text import encoding_settings
from tasks.run.preflight import check_inputs
from tests.support.processes import pid_of

PARAMS = Path(__file__).parents[3] / "params.yaml"
LENGTH = 24
TEXTS = ["the number 472", "the number 473", "hi", "the number 480"]


def prepare(*arguments: str) -> None:
    """`python -m flows.prepare ...`"""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module", params=["qwen_image", "stable_diffusion_3"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]
) -> Path:
    """A folder in which the stages encoded prompts, one of them with a negative prompt of its own, by one encoder or
    three."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "data" / "raw").mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"prompt": text, "target": None} for text in TEXTS]
    rows[1]["negative_prompt"] = "the number hello"
    (folder / "data" / "raw" / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = yaml.safe_load(PARAMS.read_text())
    params["data_sets"]["digits"]["prompts"] |= {"n_test": 1, "n_train": 3, "files": ["data/raw/few.jsonl"]}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    shutil.copytree(tiny_folder(request.param), folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare("prompts")
        prepare("embeddings", "--model", "model", "--out", "embeddings", "--max-sequence-length", str(LENGTH))
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def live(**data: Any) -> TrainConfig:
    """A run on the prompts of `made`, at the tiny models' size."""
    length: dict[str, Any] = {"max_sequence_length": LENGTH}
    return TrainConfig.model_validate(
        {
            "data": {"embeddings": "live", "train_batch_size": 2} | data,
            "actor_rollout_ref": {
                "model": {"path": str(Path("model").resolve())},  # config files are cached by path
                "rollout": {"n": 2, "micro_batch_size": 2, "pipeline": {"height": 16, "width": 32} | length},
                "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
            },
            "reward": {"functions": {"jpeg_incompressibility": {}}},
        }
    )


def opened(config: TrainConfig) -> LiveEmbeddings:
    """The config's embeddings, encoded in this process."""
    embeddings = check_inputs(config).embeddings
    assert isinstance(embeddings, LiveEmbeddings)
    embeddings.encode = TextEncoder("model", encoding_settings(config), 1, sleeps=False).encode
    return embeddings


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


@pytest.mark.usefixtures("here")
def test_the_runs_embeddings_are_the_stages_bit_for_bit() -> None:
    """Prompts in another order and together, the negative prompt of all, and one of a prompt's own."""
    stored, ours = PromptEmbeddings.open("embeddings"), opened(live())
    prompts = load_prompts("data/prompts.parquet")[::-1]
    taken = ours.take(prompts, needs_negative=True)
    assert (taken.texts, taken.hits) == (6, 0)
    assert ours.extras == stored.extras
    for uids in ([p.uid for p in prompts], [prompts[0].uid], [p.uid for p in prompts if p.negative is None]):
        assert same_bits(ours.get(uids), stored.get(uids))
        assert same_bits(ours.negatives(uids), stored.negatives(uids))
    assert len(stored.negatives([p.uid for p in prompts])["prompt_embeds"]) == 4
    spread = stored.get([p.uid for p in prompts])["prompt_embeds"].std(0)
    assert spread.max() > 0.01, "not one embedding like another"


@pytest.mark.usefixtures("here")
def test_what_a_pass_costs_is_told_from_the_length_that_a_prompt_may_have() -> None:
    """The largest embedding that the stage could have written has just that shape."""
    inputs = check_inputs(live())
    assert inputs.flops is not None
    table = inputs.embeddings.longest_table(inputs.uids, needs_negative=True)
    assert table is not None
    stored = PromptEmbeddings.open("embeddings").get(inputs.uids)
    assert table.prompt_embeds.shape[1] >= stored["prompt_embeds"].shape[1]
    assert table.prompt_embeds.shape[2] == stored["prompt_embeds"].shape[2]
    for name in inputs.embeddings.extras:
        assert table.extras[name].shape[1:] == stored[name].shape[1:]
    if inputs.embeddings.extras:  # Stable Diffusion 3 pads: CLIP's tokens and T5's
        assert table.prompt_embeds.shape[1] == stored["prompt_embeds"].shape[1]


class Counted:
    """An encoder of one number a character, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, prompts: Sequence[Prompt]) -> list[Row]:
        self.asked.append([prompt.prompt for prompt in prompts])
        return [{"prompt_embeds": torch.tensor([[float(ord(c))] for c in prompt.prompt])} for prompt in prompts]


def named(*texts: str) -> list[Prompt]:
    return [Prompt(prompt_uid(text), text, None, {}, f"p.txt:{i}") for i, text in enumerate(texts, 1)]


def counted(prompts: list[Prompt], cache_bytes: float) -> tuple[LiveEmbeddings, Counted]:
    shapes = {"prompt_embeds": (8, 1)}
    embeddings = LiveEmbeddings(
        prompts, negative_prompt=" ", max_sequence_length=8, shapes=shapes, cache_bytes=cache_bytes
    )
    embeddings.encode = encoder = Counted()
    return embeddings, encoder


def test_a_text_is_encoded_once_while_it_is_in_the_cache() -> None:
    prompts = named("aaaa", "bbbb", "cccc", "dddd")
    embeddings, encoder = counted(prompts, cache_bytes=48)  # of three prompts
    first = embeddings.take(prompts[:2], needs_negative=False)
    again = embeddings.take([*prompts[:2], replace(prompts[2], prompt="bbbb")], needs_negative=False)
    assert (first.share, again.texts, again.share) == (0.0, 2, 1.0), "by the text, whatever the uid"
    assert encoder.asked == [["aaaa", "bbbb"]]
    assert embeddings.get([prompts[2].uid])["prompt_embeds"].flatten().tolist() == [98.0] * 4, "its uid's text now"
    embeddings.take(prompts[2:], needs_negative=False)
    assert embeddings.take([prompts[1]], needs_negative=False).share == 1.0, "the one used last is kept"
    assert embeddings.take([prompts[0]], needs_negative=False).share == 0.0, "the one used longest ago is not"


def test_what_an_iteration_needs_stays_however_small_the_cache() -> None:
    prompts = named("aaaa", "bbbb", "cccc")
    embeddings, encoder = counted(prompts, cache_bytes=0)
    assert embeddings.take(prompts, needs_negative=False).hits == 0
    for _ in range(2):
        embeddings.get([prompt.uid for prompt in prompts])
    assert len(encoder.asked) == 1
    embeddings.take(prompts[:1], needs_negative=False)
    embeddings.get([prompts[1].uid])
    assert encoder.asked[1:] == [["bbbb"]], "of the iteration before nothing is kept"


def test_a_negative_prompt_follows_its_prompt() -> None:
    (prompt,) = named("aaaa")
    embeddings, _ = counted([prompt], cache_bytes=1e6)
    own = replace(prompt, metadata={"negative_prompt": "nnnn"})
    assert embeddings.take([own], needs_negative=True).texts == 2
    assert embeddings.negatives([prompt.uid])["prompt_embeds"].flatten().tolist() == [110.0] * 4
    embeddings.take([prompt], needs_negative=True)
    assert embeddings.negatives([prompt.uid])["prompt_embeds"].flatten().tolist() == [32.0], "that of all"


class Slow(Counted):
    """The same, which gives what is asked for ahead only when it is waited for."""

    def start(self, prompts: Sequence[Prompt]) -> Callable[[], list[Row]]:
        self.asked.append([f"ahead: {prompt.prompt}" for prompt in prompts])
        rows = [{"prompt_embeds": torch.tensor([[float(ord(c))] for c in prompt.prompt])} for prompt in prompts]
        return lambda: rows


def test_what_is_encoded_ahead_is_not_encoded_again_and_no_uid_changes_before_its_time() -> None:
    """Though the cache keeps nothing, and a validation of other prompts comes between."""
    prompts = named("aaaa", "bbbb", "cccc")
    embeddings, _ = counted(prompts, cache_bytes=0)
    embeddings.encode_ahead(prompts, needs_negative=True)
    assert embeddings.take(prompts[:1], needs_negative=False).hits == 0, "nothing that starts ahead: nothing was begun"
    slow = Slow()
    embeddings.encode, embeddings.start = slow, slow.start
    other = [replace(prompts[0], prompt="dddd"), prompts[1]]
    embeddings.encode_ahead(other, needs_negative=True)
    assert slow.asked == [["ahead: dddd", "ahead: bbbb", "ahead:  "]]
    assert embeddings.get([prompts[0].uid])["prompt_embeds"].flatten().tolist() == [97.0] * 4, "still its text"
    assert embeddings.take(prompts[2:], needs_negative=False).hits == 0
    taken = embeddings.take(other, needs_negative=True)
    assert (taken.texts, taken.hits) == (3, 0), "what was encoded for it was no hit of the cache"
    assert slow.asked[1:] == [["cccc"]]
    assert embeddings.get([prompts[0].uid])["prompt_embeds"].flatten().tolist() == [100.0] * 4
    embeddings.take([prompts[2]], needs_negative=False)
    assert slow.asked[2:] == [["cccc"]], "room was made once it was taken"


# ---- the actor


@pytest.fixture(scope="module")
def cluster(shared_forks: None) -> Iterator[None]:
    with ray_cluster(RayConfig(num_cpus=2)):
        yield


@pytest.mark.usefixtures("cluster")
def test_the_actor_encodes_again_after_its_process_was_killed(tiny_model: Path) -> None:
    """And says which prompt is too long, in the words of the data stage."""
    settings = EncodingSettings(dtype="float32", device="cpu", max_sequence_length=LENGTH)
    group = TextEncoderGroup(str(tiny_model), TextEncoderConfig(), settings)
    prompts = named(*TEXTS)
    group.check(prompts)
    expected = TextEncoder(str(tiny_model), settings, 1, sleeps=False).encode(prompts)
    process = pid_of(group.group.actors[0])
    first = group.encode(prompts)
    os.kill(process, signal.SIGKILL)
    begun = group.start(prompts)
    for rows in (first, begun(), group.encode(prompts)):
        assert all(same_bits(ours, theirs) for ours, theirs in zip(rows, expected, strict=True))
    with pytest.raises(ValueError, match=r"p.txt:1: the prompt has \d+ tokens with its template"):
        group.encode(named("the number " * LENGTH))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("ahead", [False, True])
def test_the_run_says_once_that_prompts_are_cut(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, ahead: bool
) -> None:
    """Before the first iteration, or of prompts that were rewritten in it."""
    settings = EncodingSettings(dtype="float32", device="cpu", max_sequence_length=LENGTH)
    long, longer = "the number " * LENGTH, "the number " * 2 * LENGTH
    cut, before = named(long, longer), named("hi")
    group = TextEncoderGroup(str(tiny_model), TextEncoderConfig(too_long="cut"), settings)
    group.check(before)
    group.encode(before)
    assert not caplog.messages
    rows = group.start(cut)() if ahead else group.encode(cut)
    assert [len(row["prompt_embeds"]) for row in rows] == [LENGTH, LENGTH]
    (said,) = caplog.messages
    assert said.startswith("data.text_encoder.too_long is cut; prompts that are cut to max_sequence_length=24 tokens")
    assert ": 2 (p.txt:1 of " in said
    group.check(cut)
    group.encode(named(longer))
    assert len(caplog.messages) == 1
    known = TextEncoderGroup(str(tiny_model), TextEncoderConfig(too_long="cut"), settings)
    known.check([*before, *cut])
    known.encode(cut)
    assert [": 2 (p.txt:1 of " in message for message in caplog.messages] == [True, True], "another run, once again"


# ---- prompts that change


def shout(prompts: Sequence[Prompt], iteration: int, seed: int) -> list[Prompt]:
    """Prompts as a user's function changes them."""
    return [replace(prompt, prompt=f"{prompt.prompt} {iteration} {seed}", target="x") for prompt in prompts]


def test_a_function_by_its_import_path_rewrites_prompts() -> None:
    rewrite = get_rewriting(f"{__name__}:shout")
    (made,) = rewritten(rewrite, named("a cat"), 3, 7)
    assert (made.prompt, made.target, made.uid) == ("a cat 3 7", "x", prompt_uid("a cat"))
    assert prompts_number([made]) == prompts_number(rewritten(rewrite, named("a cat"), 3, 7)) < 2**48
    assert prompts_number([made]) != prompts_number(named("a cat"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda prompts, iteration, seed: [p.prompt for p in prompts],
            "returned a list of str: it must return Prompts",
        ),
        (lambda prompts, iteration, seed: prompts[1:], "returned 1 prompts that are not the 2 given"),
        (lambda prompts, iteration, seed: prompts[::-1], "are not the 2 given, by uid and order"),
        (
            lambda prompts, iteration, seed: [replace(p, prompt=" ") for p in prompts],
            r"p.txt:1, rewritten in iteration 3: the prompt must be a text that is not blank",
        ),
        (
            lambda prompts, iteration, seed: [replace(p, prompt="a\0b") for p in prompts],
            r"p.txt:1, rewritten in iteration 3: character 2 of the prompt is a control character",
        ),
    ],
)
def test_prompts_that_cannot_be_sampled_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewritten(function, named("a", "b"), 3, 0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{__name__}:nothing", r"data.rewrite_prompts is .*:nothing, which cannot be imported"),
        (f"{__name__}:TEXTS", "is a list; it must be a function"),
        (f"{__name__}:named", None),
        ("os.path:exists", r"cannot be called as function\(prompts, iteration, seed\)"),
    ],
)
def test_a_path_that_leads_to_no_such_function_is_refused(path: str, message: str | None) -> None:
    if message is None:
        assert get_rewriting(path) is named, "what it does is found out in the run"
        return
    with pytest.raises(ValueError, match=message):
        get_rewriting(path)


def test_samples_of_other_prompts_than_the_function_gives_now_are_refused(tmp_path: Path) -> None:
    """After a kill: a function that does not give the same prompts again would have their pictures scored by others."""
    stages, state = KeptStages(tmp_path), RunState(3, "config", "data", "run")
    group: Any = SimpleNamespace(
        batch_keys=lambda prompts, n, iteration: [[NoiseKey(0, iteration, p.uid, 0)] for p in prompts]
    )
    stages.keep_rollout(state, 2, [])
    with pytest.raises(CheckpointError, match=r"samples of iteration 3, but not of the prompts that data.rewrite_pr"):
        stages.rollout(state, group, named("a cat"), 1)


# ---- what is refused before anything loads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": None}}}},
            "data.embeddings is live, but .*max_sequence_length is null: say how many",
        ),
        (
            {"data": {"embeddings": "e", "rewrite_prompts": "a:b"}},
            "data.rewrite_prompts is a:b, but data.embeddings e holds those of prompts as they are: set",
        ),
        ({"data": {"rewrite_prompts": "no path"}}, "data.rewrite_prompts"),
        (
            {"data": {"rewrite_prompts": "a:b"}, "algorithm": {"name": "dpo", "sample_source": "offline"}},
            "data.rewrite_prompts is a:b, but algorithm.sample_source offline learns from pictures",
        ),
        (
            {"data": {"text_encoder": {"placement": "colocated"}}},
            "placement is colocated, which is a GPU's, and device cpu",
        ),
        ({"data": {"text_encoder": {"device": "cuda", "num_gpus": 0}}}, "device is cuda and num_gpus 0: give it a GPU"),
        (
            {"data": {"text_encoder": {"device": "cuda", "placement": "colocated"}}},
            "on a trainer rank's GPU, but trainer.device is cpu: set placement to separate",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        live().with_changes(changes)


def test_text_encoders_that_do_not_fit_their_config_are_refused(here: Path, tmp_path: Path) -> None:
    model = shutil.copytree(here / "model", tmp_path / "model")
    file = model / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    text["intermediate_size"] += 8
    file.write_text(json.dumps(config))
    said = rf"^model.path is {model}, whose text_encoder does not fit text_encoder/config.json: \S*mlp\S* is \["
    with pytest.raises(ConfigError, match=said):
        check_inputs(live().with_changes({"actor_rollout_ref": {"model": {"path": str(model)}}}))


def test_a_folder_without_text_encoders_is_refused(here: Path, tmp_path: Path) -> None:
    lacking = tmp_path / "model"
    shutil.copytree(here / "model", lacking)
    shutil.rmtree(lacking / "text_encoder")
    changes = {"actor_rollout_ref": {"model": {"path": str(lacking)}}}
    with pytest.raises(ConfigError, match=f"text_encoder of actor_rollout_ref.model.path {lacking} holds no weights"):
        check_inputs(live().with_changes(changes))
    lacking = lacking.rename(tmp_path / "another")  # config files are cached by path
    index = json.loads((lacking / "model_index.json").read_text())
    kept = {name: part for name, part in index.items() if not name.startswith("text_encoder")}
    (lacking / "model_index.json").write_text(json.dumps(kept))
    changes = {"actor_rollout_ref": {"model": {"path": str(lacking)}}}
    with pytest.raises(ConfigError, match="names no text encoder: give the whole model, or embeddings on disk"):
        check_inputs(live().with_changes(changes))
    lacking = lacking.rename(tmp_path / "a third")
    (lacking / "model_index.json").write_text(json.dumps(index | {"text_encoder_2": [None, None]}))
    changes = {"actor_rollout_ref": {"model": {"path": str(lacking)}}}
    with pytest.raises(
        ConfigError, match="leaves out text_encoder_2, without which its prompts cannot be encoded: give"
    ):
        check_inputs(live().with_changes(changes))


@pytest.mark.usefixtures("here")
def test_more_tokens_than_the_pipeline_reads_are_refused(tmp_path: Path) -> None:
    """Qwen-Image's cuts at 1,024 whatever it is told, and says nothing."""
    longest = live().with_changes({"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 1024}}}})
    longer = live().with_changes({"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": 1025}}}})
    check_inputs(longest)
    if adapter_of("model")[0].most_text_tokens is None:
        check_inputs(longer)
        return
    said = r"max_sequence_length is 1025, but QwenImage's pipeline reads no more than 1024 tokens of a prompt"
    with pytest.raises(ConfigError, match=rf"rollout.pipeline.{said}"):
        check_inputs(longer)
    with pytest.raises(DatasetError, match=f"^{said}"):
        TextEncoding("model", EncodingSettings("float32", "cpu", 1025))
    stored = Path(shutil.copytree("embeddings", tmp_path / "embeddings"))
    record = json.loads((stored / "index.json").read_text()) | {"max_sequence_length": 1025}
    del record["index_sha256"]
    (stored / "index.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"max_sequence_length of data.embeddings {stored} is 1025, but QwenImage's"):
        check_inputs(
            live(embeddings=str(stored)).with_changes(
                {"actor_rollout_ref": {"rollout": {"pipeline": {"max_sequence_length": None}}}}
            )
        )


@pytest.mark.usefixtures("here")
def test_what_guidance_contrasts_with_is_looked_at_before_the_run() -> None:
    """With the prompts that the run encodes; not where nothing is guided."""
    field = adapter_of("model")[0].pipeline_fields[0]
    for scale in (1.0, 4.0):
        config = live(text_encoder={"negative_prompt": "blurry"}).with_changes(
            {"actor_rollout_ref": {"rollout": {"pipeline": {field: scale}}}}
        )
        inputs = check_inputs(config)
        for trains, prompts in ((True, inputs.train + inputs.test), (False, inputs.test)):
            found = inputs.to_encode(trains)
            assert found[: len(prompts)] == prompts
            assert [prompt.prompt for prompt in found[len(prompts) :]] == ["blurry"] * (scale > 1)


@pytest.mark.usefixtures("here")
def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.rewrite_prompts is nowhere:f, which cannot be imported"):
        check_inputs(live(rewrite_prompts="nowhere:f"))


@pytest.mark.usefixtures("here")
def test_a_run_is_named_by_what_shapes_its_embeddings() -> None:
    """Where they are made and how many are kept is no part of its name; another encoder is another run's data."""
    base = live()
    younger: dict[str, Any] = {"too_long": "refuse"}  # what every run did before there was the field
    for same in ({"cache_mib": 1}, {"threads": 2}, {"device": "cuda", "num_gpus": 0.5}, {"max_restarts": 0}, younger):
        assert live(text_encoder=same).digest() == base.digest()
    for other in ({"dtype": "bfloat16"}, {"negative_prompt": "blurry"}, {"too_long": "cut"}):
        assert live(text_encoder=other).digest() != base.digest()
    assert live(rewrite_prompts="a:b").digest() != base.digest()
    before = check_inputs(base).digest
    (weights,) = Path("model/text_encoder").glob("*.safetensors")
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-4] + bytes(4))
        assert check_inputs(base).digest != before
    finally:
        weights.write_bytes(kept)


def test_the_gpus_that_text_encoders_take_are_counted() -> None:
    """Beside one trainer rank, one rollout worker of its own, or one on the rank's GPU."""
    on_gpu = {"trainer": {"device": "cuda"}}
    shared = {"actor_rollout_ref": {"rollout": {"placement": "colocated"}}}

    def gpus(changes: dict[str, Any], trains: bool = True, **encoder: Any) -> float:
        asked = live().with_changes(on_gpu).with_changes(changes)
        return asked.with_changes({"data": {"text_encoder": encoder}}).gpus_needed(trains)

    assert gpus({}) == 2
    assert gpus({}, device="cuda") == 3
    assert gpus({}, device="cuda", num_gpus=0.25) == 2.25
    assert gpus(shared, device="cuda", num_gpus=0.25) == 1.25
    assert gpus(shared, device="cuda", placement="colocated") == 1
    assert gpus({}, device="cuda", placement="colocated") == 2
    assert gpus(shared, trains=False, device="cuda", placement="colocated") == 1
    assert gpus({}, trains=False, device="cuda", placement="colocated") == 2
    assert gpus({}, trains=False, device="cuda", num_gpus=0.5) == 1.5
    assert live(text_encoder={"device": "cuda", "num_gpus": 0.5}).gpus == 0.5, "though the rest is on the CPU"
    assert live().with_changes({"data": {"embeddings": "e", "text_encoder": {"device": "cuda"}}}).gpus == 0

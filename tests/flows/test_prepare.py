# SPDX-License-Identifier: Apache-2.0
"""The data stages with a model of another family: the commands of docs/data.md for preference pairs of one's own."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flows.prepare import app
from models.config.actor import ForwardProcessConfig
from models.families.base import DiffusionModelBase
from models.training.fsdp import DiffusersFSDPEngine
from models.training.micro_batches import ActorBatch
from tasks.config.errors import ConfigError
from tasks.config.measurement import Measurement
from tasks.config.tree import TrainConfig
from tasks.data.digests import SCHEME
from tasks.data.embeddings import PromptEmbeddings
from tasks.data.pairs import PairDataset, read_pictures
from tasks.data.prompts import DatasetError
from tasks.run.measuring import cells, for_measuring
from tasks.run.preflight import check_inputs
from tests.support.helpers import actor_config, model_config

PARAMS = Path(__file__).parents[2] / "params.yaml"
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SMALL = {"images_per_prompt": 2, "height": 16, "width": 32, "steps": 1, "batch_size": 3}
MODEL = "models/tiny-sd3"
ENCODE = ("embeddings", "--model", MODEL, "--max-sequence-length", "24")


def prepare(*arguments: str, fails: bool = False) -> str:
    """What `python -m flows.prepare ...` prints."""
    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code != 0) == fails, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> Path:
    """A folder in which every stage ran with a tiny Stable Diffusion 3."""
    folder = tmp_path_factory.mktemp("sd3")
    (folder / "data" / "raw").mkdir(parents=True)
    (folder / "data" / "raw" / "numbers.txt").write_text("".join(f"the number {n}\n" for n in range(470, 476)))
    params = yaml.safe_load(PARAMS.read_text())
    params["data_sets"]["digits"]["prompts"] |= {"n_test": 1, "n_train": 5}
    params["preferences"] |= SMALL
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    shutil.copytree(tiny_folder("stable_diffusion_3"), folder / MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_all()
    return folder


def make_all() -> None:
    """Every stage, in this folder."""
    prepare("prompts")
    prepare("embeddings", "--model", MODEL, "--out", "data/sd3_embeddings", "--max-sequence-length", "24")
    said = prepare(
        *("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--out", "data/sd3.parquet"),
        *("--reward", "brightness", "--set", "guidance_scale=4.5"),
    )
    assert "data/sd3.parquet: 5 pairs" in said
    said = prepare("pairs", "--model", MODEL, "--table", "data/sd3.parquet", "--out", "data/sd3_pairs")
    assert "data/sd3_pairs: 5 pairs" in said


def files_of(folder: Path) -> dict[str, bytes]:
    """What the stages made."""
    files = [path for path in (folder / "data").rglob("*") if path.is_file() and "raw" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def offline(**data: str) -> TrainConfig:
    """The run of docs/data.md, at the tiny model's size."""
    settings: dict[str, Any] = {
        "data": {"embeddings": "data/sd3_embeddings", "pairs": "data/sd3_pairs", "train_batch_size": 2} | data,
        "actor_rollout_ref": {
            "model": {"path": MODEL},
            "rollout": {"pipeline": {"height": 16, "width": 32, "num_inference_steps": 4}},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
        },
        "algorithm": {"name": "dpo", "sample_source": "offline"},
    }
    return TrainConfig.model_validate(settings)


def test_pairs_of_stable_diffusion_3_are_made_and_a_run_takes_them(here: Path) -> None:
    """The latents are those of the pictures that the table holds, by this model's VAE."""
    inputs = check_inputs(offline())
    assert inputs.pairs is not None
    assert len(inputs.pairs.pairs) == 5
    pictures = read_pictures(here / "data" / "sd3.parquet")
    store = PromptEmbeddings.open(here / "data" / "sd3_embeddings")
    (batch,) = inputs.pairs.batches(inputs.pairs.pairs[:2], store, 2, seed=0, iteration=1)
    assert batch.trajectories.prompts.extras["pooled_prompt_embeds"].shape == (2, 32)
    config = model_config(here / MODEL, height=16, width=32)
    adapter = DiffusionModelBase.get_class(config)
    pixels = np.array(Image.open(io.BytesIO(pictures[1][1]["rejected"]["image"])))
    encoded = adapter.encode(adapter.load_vae(config), config, torch.from_numpy(pixels)[None])
    assert torch.allclose(batch.trajectories.latents[3], encoded[0], rtol=0, atol=1e-5)
    assert batch.trajectories.latents.std() > 0.01, "not one grey picture like another"


def test_made_in_another_folder_the_data_is_the_same_to_the_byte(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another clone: `dvc.lock` has their hashes. The base model: test_pretraining_repeats_itself_and_learns."""
    expected = files_of(made)
    shutil.copytree(made, tmp_path / "clone")
    monkeypatch.chdir(tmp_path / "clone")
    for name in expected:
        Path(name).unlink()
    make_all()
    again = files_of(Path.cwd())
    assert {"data/prompts.parquet", "data/sd3.parquet", "data/sd3_embeddings/index.json"} < again.keys()
    assert again == {name: expected[name] for name in again}


@pytest.mark.usefixtures("one_rank")
def test_a_trainer_learns_from_these_pairs(here: Path) -> None:
    """It starts knowing nothing of them, and orders them rightly after some steps over the same two."""
    pairs, store = PairDataset.open("data/sd3_pairs"), PromptEmbeddings.open("data/sd3_embeddings")
    (batch,) = pairs.batches(pairs.pairs[:2], store, 2, seed=0, iteration=1)
    settings = actor_config(loss_mode="dpo", dpo_beta=100.0, lr=1e-3, eps=1e-8)
    engine = DiffusersFSDPEngine(
        model_config(here / MODEL, height=16, width=32), settings, forward_config=ForwardProcessConfig()
    )
    engine.initialize()
    trained = ActorBatch([(batch.trajectories, torch.tensor(batch.advantages))], 4)
    metrics = [engine.update_policy([trained]) for _ in range(8)]
    assert metrics[0]["rewards/margins"] == 0.0
    assert metrics[-1]["rewards/margins"] > 0.0
    assert metrics[-1]["implicit_acc"] == 1.0


def test_guidance_shows_in_the_pictures(here: Path) -> None:
    """As the option says, with the negative prompt's embedding."""
    plain = ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--reward", "brightness")
    prepare(*plain, "--out", "data/plain.parquet")
    tables = [pd.read_parquet(here / "data" / name) for name in ("sd3.parquet", "plain.parquet")]
    assert tables[0]["prompt"].tolist() == tables[1]["prompt"].tolist()
    assert (tables[0]["image"] != tables[1]["image"]).all()


def size(table: str) -> tuple[int, int]:
    """Width and height of a preference table's first picture."""
    return Image.open(io.BytesIO(pd.read_parquet(table)["image"][0])).size


def test_options_go_in_place_of_what_the_parameters_say(here: Path, tmp_path: Path) -> None:
    """1024 tokens, float32, 16 x 32 pixels."""
    assert PromptEmbeddings.open("data/sd3_embeddings").max_sequence_length == 24
    assert size("data/sd3.parquet") == (32, 16)
    short = ("--max-sequence-length", "23", "--dtype", "bfloat16", "--set", "negative_prompt=blurred")
    prepare("embeddings", "--model", MODEL, "--out", f"{tmp_path}/new", *short)
    encoded = PromptEmbeddings.open(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "index.json").read_text())["negative_prompt"] == "blurred"
    assert (encoded.max_sequence_length, encoded.negative()["prompt_embeds"].dtype) == (23, torch.bfloat16)
    sampled = ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--reward", "brightness")
    tall = (*sampled, "--set", "height=32", "--set", "width=16")
    scores = []
    for dtype in ("float32", "bfloat16"):
        prepare(*tall, "--dtype", dtype, "--out", f"{tmp_path}/{dtype}.parquet")
        assert size(f"{tmp_path}/{dtype}.parquet") == (16, 32)
        scores.append(pd.read_parquet(tmp_path / f"{dtype}.parquet")["score"].tolist())
    assert scores[0] != scores[1]


@pytest.fixture
def signs(copied: Path) -> Path:
    """A data set of its own beside `digits`, with other prompts and no embeddings yet."""
    (copied / "data" / "raw" / "signs.txt").write_text("a sign that says open\na sign that says shut\n")
    params = yaml.safe_load((copied / "params.yaml").read_text())
    prompts = {"files": ["data/raw/signs.txt"], "n_test": 0, "n_train": None, "seed": 0, "target_pattern": None}
    encoding = params["data_sets"]["digits"]["embeddings"] | {"model": MODEL, "max_sequence_length": 24}
    encoding["adapter"] = "models/families/stable_diffusion_3.py"
    encoding["splits"] = ["train"]
    params["data_sets"]["signs"] = {"folder": "data/signs", "prompts": prompts, "embeddings": encoding}
    (copied / "params.yaml").write_text(yaml.safe_dump(params))
    prepare("prompts", "signs")
    return copied


@pytest.mark.usefixtures("signs")
def test_preferences_are_of_a_data_sets_own_prompts_model_and_embeddings() -> None:
    prepare("embeddings", "signs")
    assert "data/signs/preferences.parquet: 2 pairs" in prepare("preferences", "signs", "--reward", "brightness")
    drawn = set(pd.read_parquet("data/signs/preferences.parquet")["prompt"])
    assert drawn == {"a sign that says open", "a sign that says shut"}
    given = ("--model", MODEL, "--prompts", "data/signs/prompts.parquet", "--embeddings", "data/signs/embeddings")
    prepare("preferences", *given, "--reward", "brightness", "--out", "again.parquet")
    assert Path("again.parquet").read_bytes() == Path("data/signs/preferences.parquet").read_bytes()


def test_prompts_that_are_not_encoded_are_told_before_a_model_loads(
    signs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that encodes them."""
    monkeypatch.setattr("tasks.data.preferences.DiffusersRolloutEngine", None)

    def told(*arguments: str) -> str:
        return " ".join(prepare("preferences", "signs", "--reward", "brightness", *arguments, fails=True).split())

    lacks = r"data/sd3_embeddings lacks the embedding of 'a sign that says \w+' \(2 in all\): "
    given = ("--model", MODEL, "--embeddings", "data/sd3_embeddings")
    command = f"`python -m flows.prepare embeddings signs --model {MODEL} --out data/sd3_embeddings` makes them"
    assert re.search(lacks + command, told(*given))
    of_another = told(
        "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--prompts", "data/signs/prompts.parquet"
    )
    assert "--prompts data/signs/prompts.parquet --out data/sd3_embeddings`" in of_another
    prepare("embeddings", "signs")
    table = pd.read_parquet("data/signs/prompts.parquet")
    table.loc[0, "uid"] = "new"
    table.to_parquet("data/signs/prompts.parquet", index=False)
    assert "(1 in all): `dvc repro embeddings@signs` makes them" in told()
    table["uid"] = ["row-0", "row-1"]
    table.to_parquet("data/signs/prompts.parquet", index=False)
    prepare("embeddings", "signs")
    table.loc[0, "prompt"] = "another text under its uid"
    table.to_parquet("data/signs/prompts.parquet", index=False)
    assert "lacks the embedding of 'another text under its uid' (1 in all)" in told()


def test_pictures_with_a_transparency_are_those_without(here: Path, tmp_path: Path) -> None:
    table = pd.read_parquet("data/sd3.parquet")
    pictures = []
    for picture in table["image"]:
        stream = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGBA").save(stream, format="PNG")
        pictures.append(stream.getvalue())
    table.assign(image=pictures).to_parquet(tmp_path / "rgba.parquet")
    prepare("pairs", "--model", MODEL, "--table", f"{tmp_path}/rgba.parquet", "--out", f"{tmp_path}/pairs")
    (made,) = (tmp_path / "pairs").glob("*.safetensors")
    assert made.read_bytes() == (here / "data" / "sd3_pairs" / made.name).read_bytes()


def test_pictures_that_do_not_fit_the_model_are_told_by_height_and_width(here: Path, tmp_path: Path) -> None:
    table = pd.read_parquet("data/sd3.parquet")
    picture = io.BytesIO()
    Image.new("RGB", (18, 16)).save(picture, format="PNG")
    table.assign(image=[picture.getvalue()] * len(table)).to_parquet(tmp_path / "odd.parquet")
    told = prepare(
        "pairs", "--model", MODEL, "--table", f"{tmp_path}/odd.parquet", "--out", f"{tmp_path}/out", fails=True
    )
    assert "odd.parquet do not fit the model: pipeline.height 16 and pipeline.width 18 must be multiples of" in told


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("preferences", "--model", "nowhere"), "error: nowhere holds no model; put the published checkpoint there"),
        (("preferences",), "error: data/base_model holds no model; `dvc repro base_model` makes data/base_model"),
        (("pairs", "--model", "nowhere"), "error: nowhere holds no model"),
        (("pairs", "--model", MODEL, "--table", "none.parquet"), "none.parquet is missing"),
        (("pairs", "--model", MODEL, "--table", "data"), "data is a folder: give the preference table itself, such as"),
        (("pairs", "--model", MODEL, "--device", "tpu"), "error: --device is tpu: give cpu or cuda"),
        (("preferences", "--model", MODEL, "--device", "gpu"), "error: --device is gpu: give cpu or cuda"),
        (
            ("embeddings", "--model", MODEL, "--out", "new", "--prompts", "data"),
            "data is a folder: give the prompt table itself, such as data/prompts.parquet",
        ),
        (
            (
                *("embeddings", "--model", MODEL, "--out", "new", "--max-sequence-length", "24"),
                *("--set", f"negative_prompt={'blurred ' * 40}"),
            ),
            "embeddings.negative_prompt: the prompt has ",
        ),
        (
            ("embeddings", "--model", MODEL, "--out", "new", "--max-sequence-length", "2"),
            "tokens with its template, but max_sequence_length=2 (prompts that are too long: 6)",
        ),
        (
            ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--dtype", "half"),
            f"error: {MODEL} cannot be sampled so: dtype is 'half'; it should be 'float32' or 'bfloat16'",
        ),
        (
            ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--set", "num_inference_steps=0"),
            "num_inference_steps is 0; it should be greater than or equal to 1",
        ),
        (("preferences", "--model", MODEL, "--set", "steps"), "--set 'steps' must have the form name=value"),
        (
            ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--set", "true_cfg_scale=4"),
            "true_cfg_scale is 4.0, which StableDiffusion3Pipeline does not read",
        ),
        (
            ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--set", "guidance=4"),
            "cannot be sampled so",
        ),
        (("preferences", "--model", MODEL, "--option", "x=["), "--option x: the value '[' is not YAML: "),
        (("embeddings", "--set", "too_long=left"), "too_long is 'left'; it should be 'refuse' or 'cut'"),
        (("embeddings", "--set", "dtype=["), "--set dtype: the value '[' is not YAML: "),
        (("preferences", "--model", MODEL, "--reward", "ocrr"), "there is no reward 'ocrr'"),
        (("preferences", "--model", MODEL, "--reward", "ocr", "--option", "detekt=1"), "argument 'detekt'"),
    ],
)
def test_a_wrong_option_is_one_line(here: Path, arguments: tuple[str, ...], complaint: str) -> None:
    assert complaint in " ".join(prepare(*arguments, fails=True).split())


@pytest.mark.parametrize(
    ("stage", "out", "complaint"),
    [
        ("embeddings", "data", "--out is data, which holds something else than embeddings"),
        ("embeddings", "data/sd3_pairs", "--out is data/sd3_pairs, which holds something else than embeddings"),
        ("embeddings", "params.yaml", "--out is params.yaml, which is a file: give a folder for the embeddings"),
        ("embeddings", "params.yaml/new", "--out is params.yaml/new, where nothing can be written"),
        ("pairs", MODEL, f"--out is {MODEL}, which holds something else than pairs"),
        ("pairs", "data/sd3.parquet", "--out is data/sd3.parquet, which is a file: give a folder for the pairs"),
        ("preferences", MODEL, f"--out is {MODEL}, which is a folder: give a file, such as data/preferences.parquet"),
        ("preferences", "params.yaml/new", "the folder of --out is params.yaml, where nothing can be written"),
    ],
)
def test_an_out_that_holds_something_else_stays(copied: Path, stage: str, out: str, complaint: str) -> None:
    """A stage puts its output in a folder's place, with all that is in it: a model must not go for its own pairs."""
    inputs = {"preferences": ("--embeddings", "data/sd3_embeddings"), "pairs": ("--table", "data/sd3.parquet")}
    before = sorted(path for path in copied.rglob("*"))
    told = prepare(stage, "--model", MODEL, "--out", out, *inputs.get(stage, ()), fails=True)
    assert complaint in " ".join(told.split())
    assert sorted(path for path in copied.rglob("*")) == before


def test_a_data_sets_folder_and_adapter_are_what_dvc_watches(copied: Path) -> None:
    params = yaml.safe_load((copied / "params.yaml").read_text())
    entry = params["data_sets"]["digits"]
    params["data_sets"]["signs"] = entry | {"folder": "data/elsewhere"}
    (copied / "params.yaml").write_text(yaml.safe_dump(params))
    said = " ".join(prepare("embeddings", fails=True).split())
    assert "signs.folder is data/elsewhere: it must be data/signs" in said
    del params["data_sets"]["signs"]
    entry["embeddings"] |= {"model": MODEL, "adapter": "models/families/wan.py", "max_sequence_length": 24}
    (copied / "params.yaml").write_text(yaml.safe_dump(params))
    said = " ".join(prepare("embeddings", fails=True).split())
    assert re.search(r"but the model's adapter is in \S*models/families/stable_diffusion_3.py: name that file", said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("stage", ["embeddings", "preferences", "pairs"])
def test_a_gpu_that_is_not_there_is_one_line(here: Path, stage: str) -> None:
    told = prepare(stage, "--model", MODEL, "--device", "cuda", fails=True)
    assert re.fullmatch(
        r"error: (--|embeddings\.)device is cuda, but torch finds no GPU here: .*, or run where one is\n", told
    )


def test_the_pages_commands_are_known(here: Path) -> None:
    """Every option of them: what is missing is the model alone."""
    section = PAGE.split("### Pairs of another model")[1].split("\n## ")[0]
    commands = [line.split()[3:] for line in section.replace("\\\n", "").splitlines() if "flows.prepare" in line]
    assert [command[0] for command in commands] == ["embeddings", "preferences", "pairs"]
    for command in commands:
        assert "error: models/sd3.5-medium holds no model" in prepare(*command, fails=True)


# ---- data of another model, and data that is damaged


@pytest.fixture
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may damage."""
    folder = shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(folder)
    return folder


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("text_encoder_3/model.safetensors", r"data.embeddings .* made with another text_encoder and tokenizer than"),
        ("tokenizer_3/tokenizer.json", "data.embeddings .* made with another text_encoder and tokenizer than"),
        (
            "vae/diffusion_pytorch_model.safetensors",
            r"data.pairs .* made with another vae than .*pairs --model",
        ),
    ],
)
def test_data_of_another_model_of_the_same_width_is_refused(copied: Path, changed: str, message: str) -> None:
    check_inputs(offline())
    flip(copied / MODEL / changed, -2)
    with pytest.raises(ConfigError, match=message):
        check_inputs(offline())


def test_embeddings_of_another_model_sample_no_preferences(copied: Path) -> None:
    flip(copied / MODEL / "text_encoder" / "model.safetensors", -2)
    arguments = ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--reward", "brightness")
    assert "was made with other text encoders than" in " ".join(prepare(*arguments, fails=True).split())


def test_a_model_that_draws_nothing_finite_is_told(copied: Path) -> None:
    """With one weight of NaN all of them would be the same black."""
    (weights,) = (copied / MODEL / "transformer").glob("*.safetensors")
    given = ("preferences", "--model", MODEL, "--embeddings", "data/sd3_embeddings", "--reward", "brightness")
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, weights)
    said = " ".join(prepare(*given, "--out", "data/none.parquet", fails=True).split())
    assert re.search(rf"none of the \d+ pictures that {MODEL} draws in float32 is finite", said)


def test_a_folder_without_its_encoders_cannot_be_compared(copied: Path) -> None:
    for part in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
        files = [*(copied / MODEL / part).glob("*.safetensors")]
        assert files
        for file in files:
            file.unlink()
    check_inputs(offline())


@pytest.mark.parametrize("name", ["sd3_embeddings", "sd3_pairs"])
def test_a_flipped_bit_a_lost_file_and_a_broken_index_are_named(copied: Path, name: str) -> None:
    (shard,) = (copied / "data" / name).glob("*.safetensors")
    whole = shard.read_bytes()
    flip(shard, -3)
    with pytest.raises(DatasetError, match=rf"{shard.name} is damaged: its SHA-256 is not the one that the index"):
        check_inputs(offline())
    shard.unlink()
    with pytest.raises(DatasetError, match=rf"{shard.name} is missing, but the index lists it"):
        check_inputs(offline())
    shard.write_bytes(whole)
    check_inputs(offline())
    index = copied / "data" / name / "index.json"
    index.write_text(index.read_text()[:-9])
    with pytest.raises(DatasetError, match=r"index.json is damaged: .*`dvc repro (embeddings|pairs)` makes it anew"):
        check_inputs(offline())


def test_a_flipped_bit_of_a_preference_table_is_noticed(copied: Path) -> None:
    """By its pages' checksums, before a picture is looked at."""
    table = copied / "data" / "sd3.parquet"
    flip(table, table.stat().st_size // 3)
    told = prepare("pairs", "--model", MODEL, "--table", "data/sd3.parquet", "--out", "data/new", fails=True)
    assert "data/sd3.parquet is not a readable parquet file" in told


def test_a_shard_that_cannot_be_read_is_named(copied: Path) -> None:
    """Where no digest was compared before, as in a worker."""
    (shard,) = (copied / "data" / "sd3_embeddings").glob("*.safetensors")
    flip(shard, 0)
    store = PromptEmbeddings.open(copied / "data" / "sd3_embeddings")
    with pytest.raises(DatasetError, match=rf"{shard.name} cannot be read: .*; make the data anew"):
        store.negative()
    (shard,) = (copied / "data" / "sd3_pairs").glob("*.safetensors")
    flip(shard, 0)
    pairs = PairDataset.open(copied / "data" / "sd3_pairs")
    store = PromptEmbeddings.open(copied / "data" / "sd3_embeddings")
    with pytest.raises(DatasetError, match="cannot be read"):
        list(pairs.batches(pairs.pairs[:2], store, 2, seed=0, iteration=1))


def test_a_sweeps_set_is_checked_as_the_runs_own_data_is(copied: Path) -> None:
    """Another text encoder of the same width made its embeddings."""
    config = offline()
    entry = {"prompts": "data/prompts.parquet", "embeddings": "data/sd3_embeddings", "split": "train"}
    measurement = Measurement.model_validate({"sets": {"mine": entry}})
    inputs = check_inputs(offline())
    assert len(list(cells(config, inputs, measurement))) == 1
    flip(copied / MODEL / "text_encoder_3" / "model.safetensors", -1)
    with pytest.raises(ConfigError, match=r"measurement.sets.mine.embeddings .* was made with another text_encoder"):
        list(cells(config, inputs, measurement))


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("prompt", "another text", r"other.parquet: the uid '\w{16}' is of another text than 'another text'"),
        ("metadata", '{"negative_prompt": "ugly"}', "encoded with another negative prompt than other.parquet has for"),
    ],
)
def test_a_sweeps_set_whose_table_was_changed_since_is_refused(
    copied: Path, column: str, value: str, complaint: str
) -> None:
    table = pd.read_parquet("data/prompts.parquet")
    table.loc[table.index[table["split"] == "train"][0], column] = value
    table.to_parquet("other.parquet", index=False)
    entry = {"prompts": "other.parquet", "embeddings": "data/sd3_embeddings", "split": "train"}
    measurement = Measurement.model_validate({"sets": {"mine": entry}, "guidance_scale": [4.0]})
    config = for_measuring(offline(), measurement)
    with pytest.raises(ConfigError, match=complaint):
        list(cells(config, check_inputs(offline()), measurement))


def test_a_sweeps_set_with_uids_of_its_own_is_of_the_texts_that_were_encoded(copied: Path) -> None:
    table = pd.read_parquet("data/prompts.parquet")
    table["uid"] = [f"row-{number}" for number in range(len(table))]
    table.to_parquet("own.parquet", index=False)
    prepare(*ENCODE, "--prompts", "own.parquet", "--out", "data/own")
    entry = {"prompts": "own.parquet", "embeddings": "data/own", "split": "train"}
    measurement, inputs = Measurement.model_validate({"sets": {"mine": entry}}), check_inputs(offline())
    assert len(list(cells(offline(), inputs, measurement))) == 1
    table.loc[table.index[table["split"] == "train"][0], "prompt"] = "another text"
    table.to_parquet("own.parquet", index=False)
    with pytest.raises(ConfigError, match=r"data/own has another text under the uid 'row-\d' than own.parquet"):
        list(cells(offline(), inputs, measurement))


def test_a_run_on_texts_of_which_the_beginning_was_encoded_says_so(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of ten tokens and fewer."""
    for length, warned in (("64", 0), ("4", 1)):
        prepare(*ENCODE, "--out", "data/sd3_embeddings", "--max-sequence-length", length, "--set", "too_long=cut")
        caplog.clear()  # diffusers has its own word for it
        check_inputs(offline())
        assert len(caplog.records) == warned
    (record,), cut = caplog.records, PromptEmbeddings.open("data/sd3_embeddings").cut
    told = "the first 4 tokens alone were encoded (too_long: cut), such as that of"
    assert record.getMessage() == f"data.embeddings data/sd3_embeddings: of {len(cut)} texts {told} {min(cut)}"


def test_texts_that_all_were_changed_since_are_refused(copied: Path) -> None:
    """Under the uids that their first texts gave them, as one that was."""
    table = pd.read_parquet("data/prompts.parquet")
    table["prompt"] += ", at night"
    table.to_parquet("data/prompts.parquet", index=False)
    complaint = r"has another text under the uid '\w{16}' than .*, at night' \(\d+ in all\): run `dvc repro embeddings`"
    with pytest.raises(ConfigError, match=complaint):
        check_inputs(offline())


def test_data_of_an_older_version_is_taken_with_a_warning(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_inputs(offline())
    assert not caplog.records
    for name in ("sd3_embeddings", "sd3_pairs"):
        index = copied / "data" / name / "index.json"
        record = json.loads(index.read_text())
        assert record["model_digest"].startswith(SCHEME)
        del record["sha256"], record["index_sha256"]
        index.write_text(json.dumps(record | {"model_digest": "0123456789abcdef0123456789abcdef"}))
    check_inputs(offline())
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert all("is of an older version: whether the" in message for message in warned)
    assert {message.split()[0] for message in warned} == {"data.embeddings", "data.pairs"}

# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: the table, the encoded data set, and what a run refuses before any model loads."""

import io
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config.exported import LORA_FILE
from models.families.qwen_image import QwenImage
from models.schedulers.noise_keys import NoiseKey
from models.weights.trainable import export_weights, make_trainable, trainable
from tasks.config.errors import ConfigError
from tasks.config.recipes import parse_changes
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.pairs import (
    COLUMNS,
    Pair,
    PairBatch,
    PairDataset,
    best_and_worst,
    common_size,
    read_pictures,
    write_pairs,
)
from tasks.data.prompts import DatasetError, Prompt, prompt_uid
from tasks.rewards import RewardError
from tasks.run.collect import pair_iteration
from tasks.run.early import check_files
from tasks.run.preflight import check_inputs
from tasks.stages.pairs import read_pairs
from tasks.system.stopwatch import Stopwatch
from tests.support.helpers import TEXT_DIM, edit_config, model_config

TEXTS, HELD_OUT = ("a red sign", "the number 472", "hi"), "a blue sign"


def png(shade: int, width: int = 6, height: int = 4) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 255 - shade)).save(stream, format="PNG")
    return stream.getvalue()


def rows_of(pair: str, prompt: str = TEXTS[0], scores: tuple = (0.9, 0.1), shade: int = 10) -> list[tuple]:
    """The chosen and the rejected row of one pair."""
    return [(pair, prompt, png(shade), True, scores[0]), (pair, prompt, png(shade + 1), False, scores[1])]


def table(folder: Path, rows: list[tuple]) -> Path:
    file = folder / "preferences.parquet"
    pd.DataFrame(rows, columns=list(COLUMNS)).to_parquet(file, index=False)
    return file


# ---- the table


def test_a_table_is_read_pair_by_pair_whatever_the_order_of_its_rows(tmp_path: Path) -> None:
    rows = rows_of("a", shade=10) + rows_of("b", TEXTS[1], (None, None), shade=20)
    pictures = read_pictures(table(tmp_path, [rows[i] for i in (1, 2, 0, 3)]))
    assert [pair.uid for pair, _ in pictures] == ["a", "b"]
    assert pictures[0][0] == Pair("a", prompt_uid(TEXTS[0]), 0.9, 0.1)
    assert pictures[0][1]["chosen"]["image"] == rows[0][2]
    assert pictures[0][1]["rejected"]["image"] == rows[1][2]
    assert pictures[1][0] == Pair("b", prompt_uid(TEXTS[1]), None, None)
    assert common_size(pictures, "t") == (4, 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of("a")[:1], "pair 'a' has 1 pictures, 1 of them chosen; a pair is one chosen and one rejected picture"),
        (rows_of("a")[:1] * 2, "pair 'a' has 2 pictures, 2 of them chosen"),
        (rows_of("a")[1:] * 2, "pair 'a' has 2 pictures, 0 of them chosen"),
        (rows_of("a") + rows_of("a"), "pair 'a' has 4 pictures, 2 of them chosen"),
        ([rows_of("a")[0], rows_of("a", "other")[1]], r"of pair 'a' have two prompts, \['a red sign', 'other'\]; give"),
        (rows_of("a", scores=(0.1, 0.4)), "of pair 'a' scores 0.1, not more than the rejected one's 0.4; swap them or"),
        (rows_of("a", scores=(0.4, 0.4)), "of pair 'a' scores 0.4, not more than the rejected one's 0.4"),
        (
            [rows_of("a")[0], (*rows_of("a")[1][:3], None, 0.1)],
            "`chosen` of a picture of pair 'a' is neither true nor false",
        ),
        ([], "must have the columns pair, prompt, image, chosen, score and at least one pair"),
    ],
)
def test_odd_tables_are_refused_by_pair(tmp_path: Path, rows: list[tuple], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_pictures(table(tmp_path, rows_of("fine", TEXTS[1]) * bool(rows) + rows))


def test_a_missing_table_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none.parquet is missing; `dvc repro preferences` makes it"):
        read_pictures(tmp_path / "none.parquet")
    file = table(tmp_path, rows_of("a"))
    pd.read_parquet(file).drop(columns="chosen").to_parquet(file)
    with pytest.raises(DatasetError, match="must have the columns"):
        read_pictures(file)


def test_pictures_of_another_size_or_of_no_format_are_named(tmp_path: Path) -> None:
    wide = [("b", TEXTS[0], png(1, width=8), True, None), ("b", TEXTS[0], png(2), False, None)]
    with pytest.raises(DatasetError, match="t: a picture of pair 'b' is 8 x 4 but those before it are 6 x 4; give all"):
        common_size(read_pictures(table(tmp_path, rows_of("a") + wide)), "t")
    broken = [("b", TEXTS[0], b"GIF?", True, None), ("b", TEXTS[0], png(2), False, None)]
    with pytest.raises(DatasetError, match="t: the chosen picture of pair 'b' is no PNG or JPEG"):
        common_size(read_pictures(table(tmp_path, broken)), "t")


# ---- a model's own pairs


def turned(orientation: int, high: int = 4, wide: int = 6) -> bytes:
    """A JPEG that is to be shown turned, with its upper half white as it is stored."""
    pixels, stream, exif = np.zeros((high, wide, 3), np.uint8), io.BytesIO(), Image.Exif()
    pixels[: high // 2] = 255
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(stream, format="JPEG", quality=100, exif=exif)
    return stream.getvalue()


def test_a_picture_is_read_as_it_is_shown(tmp_path: Path) -> None:
    """Whoever chose it, and wrote its prompt, saw it upright."""
    name, text, *_ = rows_of("a")[0]
    sideways = [(name, text, turned(6), True, 0.9), (name, text, png(9, 4, 6), False, 0.1)]
    assert common_size(read_pictures(table(tmp_path, sideways)), "here") == (6, 4)
    seen: list[np.ndarray] = []

    def keep(pictures: np.ndarray) -> Tensor:
        seen.append(pictures)
        return shades(pictures)

    down = [(name, text, turned(3), True, 0.9), (name, text, png(9), False, 0.1)]
    write_pairs(read_pictures(table(tmp_path, down)), keep, tmp_path / "pairs", shard_size=2, model_digest="")
    upside = np.concatenate(seen)[0]
    assert upside[0].max() < 50
    assert upside[-1].min() > 200


def test_a_picture_of_more_than_8_bits_is_refused(tmp_path: Path) -> None:
    """What is above 255 would be white."""
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 6), 1000, np.uint16)).save(stream, format="PNG")
    first, second = rows_of("a")
    rows = [(*first[:2], stream.getvalue(), *first[3:]), second]
    with pytest.raises(DatasetError, match=r"has more than 8 bits a pixel .*: save it as 8 bits"):
        write_pairs(read_pictures(table(tmp_path, rows)), shades, tmp_path / "pairs", shard_size=2, model_digest="")


def test_a_picture_that_is_transparent_is_refused(tmp_path: Path) -> None:
    """What is below shows where nobody saw it; one with an opaque fourth channel is as it looks."""
    first, second = rows_of("a")
    pixels = np.full((4, 6, 4), 255, np.uint8)
    for alpha in (255, 0):
        pixels[0, 0, 3] = alpha
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, format="PNG")
        pictures = read_pictures(table(tmp_path, [(*first[:2], stream.getvalue(), *first[3:]), second]))
        if alpha:
            write_pairs(pictures, shades, tmp_path / "pairs", shard_size=2, model_digest="")
            continue
        with pytest.raises(
            DatasetError, match=r"picture of pair .* is transparent in places: save it as it was looked"
        ):
            write_pairs(pictures, shades, tmp_path / "pairs", shard_size=2, model_digest="")


def test_a_prompt_is_the_prompt_tables_whatever_blanks_are_around_it(tmp_path: Path) -> None:
    (pair, _), *_ = read_pictures(table(tmp_path, rows_of("a", " hello \n")))
    assert pair.prompt_uid == prompt_uid("hello")


def test_best_and_worst_of_each_prompt(tmp_path: Path) -> None:
    """Ties and missing scores give no pair, or the best of what is left; pictures come back bit for bit."""
    nan = float("nan")
    scores = np.array([0.2, 0.9, 0.1, 0.5, 0.5, 0.5, nan, 0.3, 0.7, nan, nan, 0.6, nan, nan, nan])
    pictures = np.random.default_rng(0).integers(0, 255, (15, 4, 6, 3), dtype=np.uint8)
    prompts = [*TEXTS, "one score", "none"]
    file = tmp_path / "preferences.parquet"
    best_and_worst(prompts, pictures, scores, images_per_prompt=3).to_parquet(file, index=False)
    found = read_pictures(file)
    assert [(pair.uid, pair.chosen_score, pair.rejected_score) for pair, _ in found] == [
        (prompt_uid(TEXTS[0]), 0.9, 0.1),
        (prompt_uid(TEXTS[2]), 0.7, 0.3),
    ]
    for (_, sides), chosen, rejected in zip(found, (1, 8), (2, 7), strict=True):
        for side, number in (("chosen", chosen), ("rejected", rejected)):
            read = np.asarray(Image.open(io.BytesIO(sides[side]["image"])))
            assert np.array_equal(read, pictures[number])


# ---- the data set


def shades(pictures: np.ndarray) -> Tensor:
    """Stands in for the VAE: each picture's red as a latent [24, 16], the tiny model's shape at 16 x 24 pixels."""
    return torch.from_numpy(pictures[:, 0, 0, 0].astype(np.float32))[:, None, None].expand(-1, 24, 16)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with five pairs of train prompts in three shards, prompts and embeddings."""
    write_five_pairs(tmp_path, TEXTS)
    write_prompts(tmp_path, {text: prompt_uid(text) for text in (*TEXTS, HELD_OUT)})
    return tmp_path


def write_five_pairs(folder: Path, texts: tuple[str, ...]) -> None:
    rows = [row for i in range(5) for row in rows_of(f"pair-{i}", texts[i % 3], shade=10 * i)]
    write_pairs(read_pictures(table(folder, rows)), shades, folder / "pairs", shard_size=2, model_digest="0123")


def write_prompts(folder: Path, uids: dict[str, str]) -> None:
    """A table of these texts, of which `HELD_OUT` is in the test split, and their embeddings."""
    encode_into(folder / "embeddings", [Prompt(uid, text, None, {}, "here:1") for text, uid in uids.items()])
    splits = ["test" if text == HELD_OUT else "train" for text in uids]
    frame = pd.DataFrame({"uid": uids.values(), "prompt": uids.keys(), "split": splits, "target": "red"})
    frame.assign(metadata="{}", source="here:1").to_parquet(folder / "prompts.parquet", index=False)


def encode_into(folder: Path, prompts: list[Prompt]) -> None:
    def encode(texts: list[str]) -> dict[str, Tensor]:
        mask = torch.ones(len(texts), 3, dtype=torch.bool)
        return {
            "prompt_embeds": torch.full((len(texts), 3, TEXT_DIM), float(len(texts[0]))),
            "prompt_embeds_mask": mask,
        }

    settings = {"batch_size": 1, "negative_prompt": " ", "max_sequence_length": 24}
    write_embeddings(prompts, encode, folder, 8, model="lengths", model_digest="0", **settings)


def test_pairs_come_back_chosen_before_rejected(stored: Path) -> None:
    data = PairDataset.open(stored / "pairs")
    assert data.latent_shape == (24, 16)
    assert len(list((stored / "pairs").glob("*.safetensors"))) == 3
    order = [data.pairs[i] for i in (4, 1, 0, 3)]
    batches = list(data.batches(order, PromptEmbeddings.open(stored / "embeddings"), 2, seed=7, iteration=3))
    assert all(isinstance(batch, PairBatch) for batch in batches)
    first, second = (batch.trajectories for batch in batches)
    assert first.latents[:, 0, 0].tolist() == [40, 41, 10, 11]
    assert second.latents[:, 5, 3].tolist() == [0, 1, 30, 31]
    assert [key.prompt_uid for key in first.keys] == ["pair-4", "pair-4", "pair-1", "pair-1"]
    assert first.keys[1] == NoiseKey(7, 3, "pair-4", 1)
    assert batches[0].advantages.tolist() == [1, -1, 1, -1]
    # Pairs 4 and 1 are of one prompt, 0 and 3 of another: each travels once.
    assert first.prompts.prompt_embeds.shape[0] == second.prompts.prompt_embeds.shape[0] == 1
    assert first.prompts.prompt_embeds[0, 0, 0] == len(TEXTS[1])
    assert second.prompts.prompt_embeds[0, 0, 0] == len(TEXTS[0])
    assert batches[1].keys == second.keys


def test_a_data_set_that_was_tampered_with_is_refused(stored: Path) -> None:
    index = stored / "pairs" / "index.json"
    record = json.loads(index.read_text())
    record["pairs"][2] |= {"chosen_score": 0.1, "rejected_score": 0.2}
    index.write_text(json.dumps(record))
    with pytest.raises(DatasetError, match=r"index.json is damaged: its digest is of another content"):
        PairDataset.open(stored / "pairs")
    del record["index_sha256"]  # an older version's has none
    index.write_text(json.dumps(record))
    with pytest.raises(
        DatasetError, match=r"index.json: the chosen picture of pair 'pair-2' scores 0.1, not more than"
    ):
        PairDataset.open(stored / "pairs")


@pytest.mark.parametrize("part", ["pairs", "embeddings"])
def test_data_that_changes_while_a_run_reads_it_is_refused(stored: Path, part: str) -> None:
    """Other data in the old place would be trained on without a word; the same bytes again are the same data."""
    pairs, embeddings = PairDataset.open(stored / "pairs"), PromptEmbeddings.open(stored / "embeddings")
    for file in (stored / part).glob("*.safetensors"):
        os.utime(file, (1, 1))
    read = partial(pairs.batches, pairs.pairs, embeddings, 2, seed=7, iteration=4)
    list(read())
    for file in (stored / part).glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(DatasetError, match=rf"{part}.*\.safetensors was changed while a run reads it"):
        list(read())


# ---- what a run refuses


def offline(stored: Path, model: Path, *settings: str) -> TrainConfig:
    base: dict[str, Any] = {
        "data": {
            "prompts": stored / "prompts.parquet",
            "embeddings": stored / "embeddings",
            "pairs": stored / "pairs",
            "train_batch_size": 4,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "rollout": {"pipeline": {"height": 16, "width": 24, "num_inference_steps": 4}},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
        },
        "algorithm": {"name": "dpo", "sample_source": "offline"},
    }
    return TrainConfig.model_validate(base).with_changes(parse_changes(list(settings)))


def without_transformer(model: Path, folder: Path) -> Path:
    """The model's folder with no weights in it: what reads it has loaded no model."""
    return shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def test_an_offline_run_finds_its_pairs(stored: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = without_transformer(tiny_model, tmp_path / "model")
    inputs = check_inputs(offline(stored, model))
    assert inputs.pairs is not None
    assert len(inputs.pairs.pairs) == 5
    online = check_inputs(offline(stored, model, "algorithm.sample_source=online", "data.train_batch_size=2"))
    assert online.pairs is None
    assert online.digest != inputs.digest


def test_a_validation_asks_for_nothing_that_training_alone_reads(stored: Path, tiny_model: Path) -> None:
    """Neither pairs nor a batch of prompts; its rewards have to know the prompts, which those of offline need not."""
    shutil.rmtree(stored / "pairs")
    config = offline(stored, tiny_model, "reward.functions={brightness: {}}", "data.train_batch_size=100")
    check_files(config, trains=False)
    assert check_inputs(config, trains=False).pairs is None
    with pytest.raises(ConfigError, match=r"data.pairs is .*/pairs, but .*/index.json does not exist"):
        check_files(config)
    with pytest.raises(DatasetError, match=r"pairs/index.json is missing"):
        check_inputs(config)
    with pytest.raises(RewardError, match=r"geneval"):
        check_inputs(
            offline(stored, tiny_model, f"reward.functions={{geneval: {{options: {{model: {tiny_model}}}}}}}"),
            trains=False,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("actor_rollout_ref.rollout.pipeline={height: 24, width: 24, num_inference_steps: 4}",),
            r"holds latents \[24, 16\] but rollout.pipeline height and width make \[36, 16\]: set them to the size of",
        ),
        (("data.train_batch_size=8",), "train_batch_size is 8 but .*pairs has only 5 pairs: lower it or add pairs"),
        (("data.pairs=nowhere",), r"nowhere/index.json is missing; `dvc repro pairs` makes it"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_before_a_model_loads(
    stored: Path, tiny_model: Path, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    config = offline(stored, without_transformer(tiny_model, tmp_path / "model"), *settings)
    with pytest.raises((ConfigError, DatasetError), match=message):
        check_inputs(config)


def test_pairs_of_held_out_prompts_are_refused(stored: Path, tiny_model: Path) -> None:
    shutil.rmtree(stored / "pairs")
    write_five_pairs(stored, (TEXTS[0], HELD_OUT, TEXTS[1]))
    with pytest.raises(ConfigError, match=r"prompts.parquet holds out, pair 'pair-1' for example \(2 in all\): leave"):
        check_inputs(offline(stored, tiny_model))


def test_pairs_find_prompts_that_have_uids_of_their_own(stored: Path, tiny_model: Path) -> None:
    shutil.rmtree(stored / "embeddings")
    write_prompts(stored, {text: f"own-{number}" for number, text in enumerate((*TEXTS, HELD_OUT))})
    pairs = check_inputs(offline(stored, tiny_model)).pairs
    assert pairs is not None
    assert [pair.prompt_uid for pair in pairs.pairs] == ["own-0", "own-1", "own-2", "own-0", "own-1"]
    (batch,) = pairs.batches(pairs.pairs[:2], PromptEmbeddings.open(stored / "embeddings"), 2, seed=0, iteration=1)
    assert batch.trajectories.prompts.prompt_embeds[:, 0, 0].tolist() == [len(text) for text in TEXTS[:2]]
    shutil.rmtree(stored / "pairs")
    write_five_pairs(stored, (HELD_OUT, *TEXTS[:2]))
    with pytest.raises(ConfigError, match=r"prompts.parquet holds out, pair 'pair-0'"):
        check_inputs(offline(stored, tiny_model))


def test_a_text_that_was_changed_under_its_uid_is_refused(stored: Path, tiny_model: Path) -> None:
    """Its embedding is of the old text, and the reward would be asked for the new one."""
    table = pd.read_parquet(stored / "prompts.parquet")
    table.loc[0, "prompt"] = "another text"
    table.to_parquet(stored / "prompts.parquet", index=False)
    with pytest.raises(ConfigError, match=r"prompts.parquet: the uid '\w{16}' is of another text than 'another text'"):
        check_inputs(offline(stored, tiny_model))


def test_a_text_that_was_changed_under_a_uid_of_ones_own_is_refused(stored: Path, tiny_model: Path) -> None:
    """The uid says nothing of the text, so the index does: `own-0` of another data set is another prompt."""
    shutil.rmtree(stored / "embeddings")
    write_prompts(stored, {text: f"own-{number}" for number, text in enumerate((*TEXTS, HELD_OUT))})
    online = offline(stored, tiny_model, "algorithm.sample_source=online", "data.train_batch_size=2")
    check_inputs(online)
    table = pd.read_parquet(stored / "prompts.parquet")
    table.loc[table["uid"] == "own-0", "prompt"] = "another text"
    table.to_parquet(stored / "prompts.parquet", index=False)
    complaint = r"embeddings has another text under the uid 'own-0' than .*prompts.parquet, where it is 'another text' "
    with pytest.raises(ConfigError, match=complaint + r"\(1 in all\): run `dvc repro embeddings`"):
        check_inputs(online)


def test_a_changed_text_that_pairs_alone_are_of_is_refused(stored: Path, tiny_model: Path) -> None:
    """Training without rollout reads pairs of any split but test, and their prompts by their text."""
    shutil.rmtree(stored / "embeddings")
    write_prompts(stored, {text: f"own-{number}" for number, text in enumerate((*TEXTS, HELD_OUT))})
    table = pd.read_parquet(stored / "prompts.parquet")
    table.loc[table["uid"] == "own-0", ["prompt", "split"]] = ["another text", "pretrain"]
    table.to_parquet(stored / "prompts.parquet", index=False)
    shutil.rmtree(stored / "pairs")
    write_five_pairs(stored, ("another text",) * 3)
    with pytest.raises(ConfigError, match=r"has another text under the uid 'own-0' .*\(1 in all\)"):
        check_inputs(offline(stored, tiny_model))


def test_embeddings_without_digests_of_texts_are_taken_with_one_warning(
    stored: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(stored / "embeddings")
    write_prompts(stored, {text: f"own-{number}" for number, text in enumerate((*TEXTS, HELD_OUT))})
    index = stored / "embeddings" / "index.json"
    record = json.loads(index.read_text())
    del record["text_digests"], record["index_sha256"]
    index.write_text(json.dumps(record))
    caplog.clear()
    check_inputs(offline(stored, tiny_model))
    (warned,) = [said for said in caplog.messages if "digests of texts" in said]
    assert "prompts.parquet has for its 4 uids of your own is not checked; `dvc repro embeddings` makes" in warned


@pytest.mark.parametrize(("encoded", "asked"), [(None, "ugly"), ("ugly", None), ("ugly", "uglier"), ("ugly", " ")])
def test_a_negative_prompt_that_was_changed_is_refused(
    stored: Path, tiny_model: Path, encoded: str | None, asked: str | None
) -> None:
    """Where a picture is drawn by contrast with it: the embeddings have the old one's."""

    def said(negative: str | None) -> dict[str, str]:
        return {} if negative is None else {"negative_prompt": negative}

    texts = (*TEXTS, HELD_OUT)
    own = {HELD_OUT: said(encoded)}
    shutil.rmtree(stored / "embeddings")
    encode_into(stored / "embeddings", [Prompt(prompt_uid(t), t, None, own.get(t, {}), "here:1") for t in texts])
    table = pd.read_parquet(stored / "prompts.parquet")
    table.loc[table["prompt"] == HELD_OUT, "metadata"] = json.dumps(said(encoded))
    table.to_parquet(stored / "prompts.parquet", index=False)
    guided = offline(stored, tiny_model, "actor_rollout_ref.rollout.val_kwargs.pipeline.true_cfg_scale=4.0")
    check_inputs(guided)
    table.loc[table["prompt"] == HELD_OUT, "metadata"] = json.dumps(said(asked))
    table.to_parquet(stored / "prompts.parquet", index=False)
    check_inputs(offline(stored, tiny_model))
    complaint = rf"encoded with another negative prompt than .*prompts.parquet has for {HELD_OUT!r} \(1 in all\)"
    with pytest.raises(ConfigError, match=complaint):
        check_inputs(guided)


def test_pairs_of_prompts_that_are_not_encoded_are_refused(stored: Path, tiny_model: Path) -> None:
    shutil.rmtree(stored / "embeddings")
    encode_into(stored / "embeddings", [Prompt(prompt_uid(text), text, None, {}, "raw.txt:1") for text in TEXTS[:1]])
    with pytest.raises(ConfigError, match=r"lacks the embedding of the prompt of pair 'pair-1' \(3 in all\): put the"):
        check_inputs(offline(stored, tiny_model))


@pytest.mark.parametrize(("split", "text"), [("train", TEXTS[1]), ("test", HELD_OUT)])
def test_prompts_that_are_not_encoded_are_refused(stored: Path, tiny_model: Path, split: str, text: str) -> None:
    """Those of the validation too: without the check the run would fail after its first iterations."""
    shutil.rmtree(stored / "embeddings")
    others = [Prompt(prompt_uid(t), t, None, {}, "raw.txt:1") for t in (*TEXTS, HELD_OUT) if t != text]
    encode_into(stored / "embeddings", others)
    settings = ("algorithm.sample_source=online", "data.train_batch_size=2")
    with pytest.raises(ConfigError, match=rf"embeddings lacks the embedding of '{text}' \(1 in all\): run `dvc repro"):
        check_inputs(offline(stored, tiny_model, *settings))


def test_a_prompt_that_its_reward_cannot_score_is_refused(stored: Path, tiny_model: Path) -> None:
    """It would end the run when its picture is scored. What rewrites prompts may give train prompts a target."""
    frame = pd.read_parquet(stored / "prompts.parquet")
    frame.loc[frame["prompt"] == TEXTS[1], "target"] = None
    frame.to_parquet(stored / "prompts.parquet", index=False)
    config = offline(stored, tiny_model, "algorithm.sample_source=online", "data.train_batch_size=2")
    with pytest.raises(RewardError, match=rf"^ocr: the prompt '{TEXTS[1]}' has no target \(see prompts.target_pattern"):
        check_inputs(config)


@pytest.mark.parametrize(("ranks", "sharing", "sizes"), [(1, 1, [4, 4]), (2, 1, [2, 2, 2, 2]), (2, 2, [4, 4])])
def test_offline_each_rank_with_samples_of_its_own_has_a_batch_in_every_step(
    stored: Path, tiny_model: Path, ranks: int, sharing: int, sizes: list[int]
) -> None:
    """Four pairs in optimiser steps of two; ranks that share a sequence share the batch. Each iteration has noise of
    its own, of the run's seed."""
    config = offline(
        stored,
        tiny_model,
        "trainer.seed=5",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sharing}",
    )
    assert config.data_ranks == ranks // sharing
    data, embeddings = PairDataset.open(stored / "pairs"), PromptEmbeddings.open(stored / "embeddings")
    found = pair_iteration(3, data.pairs[:4], read_pairs.fn(Stopwatch(), data, embeddings, config, data.pairs[:4], 3))
    assert {(key.seed, key.iteration) for batch in found.batches for key in batch.trajectories.keys} == {(5, 3)}
    assert [len(batch.trajectories) for batch in found.batches] == sizes  # two samples a pair
    assert len(found.advantages) == len(found.samples) * 2 == 8


def test_an_optimiser_step_of_pairs_is_dealt_evenly(stored: Path, tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"ppo_mini_batch_size 2 \(pairs\) must be a multiple of the 4 trainer ranks"):
        offline(stored, tiny_model, "trainer.n_gpus_per_node=4")
    shared = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    assert offline(stored, tiny_model, "trainer.n_gpus_per_node=4", shared).data_ranks == 2


# ---- teachers


def distilling(stored: Path, model: Path, teacher: Path) -> TrainConfig:
    named = ("algorithm={name: distill_fm_mse, sample_source: online}", "data.train_batch_size=2")
    return offline(stored, model, *named, f"actor_rollout_ref.actor.teacher_path={teacher}")


def test_a_teacher_must_be_a_model_of_the_same_architecture(stored: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = without_transformer(tiny_model, tmp_path / "model")
    check_inputs(distilling(stored, model, model))
    with pytest.raises(
        ConfigError, match=r"teacher_path is .*nowhere, which has neither model_index.json nor pytorch_lora"
    ):
        check_inputs(distilling(stored, model, tmp_path / "nowhere"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(ConfigError, match=r"is a StableDiffusion3Pipeline but model.path a QwenImagePipeline: teach"):
        check_inputs(distilling(stored, model, other))


def edited(model: Path, folder: Path, component: str, **fields: Any) -> Path:
    """The model's folder with fields of a component's config changed, whose weights are another's then."""
    edit_config(shutil.copytree(model, folder) / component / "config.json", **fields)
    return folder


def test_a_teachers_weights_fit_its_config(stored: Path, tiny_model: Path, tmp_path: Path) -> None:
    check_inputs(distilling(stored, tiny_model, tiny_model))
    teacher = edited(tiny_model, tmp_path / "teacher", "transformer", num_layers=3)
    with pytest.raises(ConfigError, match=rf"^actor.teacher_path is {teacher}, whose transformer does not fit .*block"):
        check_inputs(distilling(stored, tiny_model, teacher))


def test_an_offline_run_has_no_vae_that_must_fit(stored: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = edited(tiny_model, tmp_path / "model", "vae", num_res_blocks=2)
    check_inputs(offline(stored, model))
    with pytest.raises(ConfigError, match=r"whose vae does not fit vae/config.json: \S+ is not there and should be"):
        check_inputs(offline(stored, model, "algorithm.sample_source=online", "data.train_batch_size=2"))


def test_a_teachers_lora_is_of_the_students_model_whatever_its_rank(
    stored: Path, tiny_model: Path, one_block_model: Path, tmp_path: Path
) -> None:
    """diffusers would load what it finds of it, and distil from the rest of the model as it is."""
    for name, model in (("own", tiny_model), ("other", one_block_model)):
        config = model_config(model, lora_rank=3, lora_alpha=6)
        module = QwenImage.load_transformer(config, config.dtype)
        make_trainable(QwenImage, module, config)
        export_weights(QwenImage, config, trainable(module), tmp_path / name)
    check_inputs(distilling(stored, tiny_model, tmp_path / "own"))
    with pytest.raises(
        ConfigError, match=r"actor.teacher_path is .*/other, whose pytorch_lora.* is of another model than .*tiny"
    ):
        check_inputs(distilling(stored, tiny_model, tmp_path / "other"))
    for name, header, message in (
        ("foreign", {"r": 3, "lora_alpha": 6, "target_modules": ["attn2.to_q"]}, "attn2.to_q.*does not have"),
        ("bare", {}, "does not say its r: give an export of this project"),
    ):
        (tmp_path / name).mkdir()
        named = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in header.items()})}
        save_file(load_file(tmp_path / "own" / LORA_FILE), tmp_path / name / LORA_FILE, named)
        with pytest.raises(ConfigError, match=f"actor.teacher_path is .*/{name}, whose .*{message}"):
            check_inputs(distilling(stored, tiny_model, tmp_path / name))


def test_the_model_folders_grid_decides_the_latent_shape(tiny_model: Path) -> None:
    """What `stored` writes by hand is the tiny model's shape."""
    assert QwenImage.latent_shape(model_config(tiny_model)) == (24, 16)

# SPDX-License-Identifier: Apache-2.0
"""Raw files as the field has them: chats in parquet, lists with quoted text, folders that `datasets` saved."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from models.samples.trajectories import PromptTable
from tasks.config.data import DataConfig
from tasks.config.params import RawFile
from tasks.config.tree import TrainConfig
from tasks.data.embeddings import PromptEmbeddings, prompt_table, write_embeddings
from tasks.data.prompts import DatasetError, Prompt, build_prompt_table, load_prompts, prompt_uid

SYSTEM = "Describe the image by detailing the color:"


def table(*files: RawFile | str, pattern: str | None = None, n_test: int = 0) -> pd.DataFrame:
    return build_prompt_table(list(files), n_test=n_test, n_train=None, seed=0, target_pattern=pattern)


def raw(file: Path, **settings: Any) -> RawFile:
    return RawFile.model_construct(file=str(file), **settings)


def chat(text: str, system: str | None = SYSTEM) -> list[dict[str, str]]:
    said = [{"role": "user", "content": text}]
    return said if system is None else [{"role": "system", "content": system}, *said]


def reference_rows() -> list[dict[str, Any]]:
    """As VeRL-Omni's preprocessors of OCR prompts write them."""
    return [
        {
            "data_source": "flow_grpo/ocr",
            "prompt": chat(f'a sign that says "{text}"'),
            "negative_prompt": chat(" " if number else "blurred"),
            "ability": "ocr",
            "reward_model": {"style": "model", "ground_truth": text},
            "extra_info": {"split": "test" if number == 2 else "train", "index": number},
        }
        for number, text in enumerate(("open", "shut", "sold"))
    ]


def test_the_references_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pd.DataFrame(reference_rows()).to_parquet(file)
    found = table(str(file))
    assert found["prompt"].tolist() == [f'a sign that says "{text}"' for text in ("open", "shut", "sold")]
    assert found["target"].tolist() == ["open", "shut", "sold"]
    assert found["split"].tolist() == ["train", "train", "test"]
    metadata = json.loads(found["metadata"][0])
    assert metadata["data_source"] == "flow_grpo/ocr"
    assert metadata["extra_info"] == {"split": "train", "index": 0}
    assert metadata["system_prompt"] == SYSTEM
    assert found.attrs["chats"] == 3
    found.to_parquet(tmp_path / "prompts.parquet")
    prompts = load_prompts(tmp_path / "prompts.parquet")
    assert [prompt.negative and prompt.negative.prompt for prompt in prompts] == ["blurred", " ", " "]


def test_a_whole_number_that_a_picture_is_judged_by_is_its_target(tmp_path: Path) -> None:
    rows = [row | {"reward_model": {"ground_truth": number}} for number, row in enumerate(reference_rows())]
    pd.DataFrame(rows).to_parquet(tmp_path / "p.parquet")
    assert table(str(tmp_path / "p.parquet"))["target"].tolist() == ["0", "1", "2"]


def test_a_rows_own_target_goes_before_what_its_chat_is_judged_by(tmp_path: Path) -> None:
    pd.DataFrame([row | {"target": "OPEN"} for row in reference_rows()]).to_parquet(tmp_path / "p.parquet")
    assert table(str(tmp_path / "p.parquet"))["target"].tolist() == ["OPEN"] * 3


def test_hidden_characters_are_removed_from_every_text_that_is_drawn_or_encoded(tmp_path: Path) -> None:
    row = {"prompt": "a \ufeffsign", "target": "o\ufeffpen", "negative_prompt": "blu\ufeffrred"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    found = table(raw(tmp_path / "p.jsonl", hidden="remove")).iloc[0]
    assert (found["prompt"], found["target"]) == ("a sign", "open")
    assert json.loads(found["metadata"]) == {"negative_prompt": "blurred"}


@pytest.mark.parametrize("word", ["validation", "Test", "", 3])
def test_a_row_of_a_split_that_is_not_ours_is_drawn_for_none(tmp_path: Path, word: Any) -> None:
    """Held-out rows would come into training; the file's own `split` says where they belong."""
    rows = [row | {"extra_info": {"split": word}} for row in reference_rows()]
    pd.DataFrame(rows).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(DatasetError, match=rf"p.parquet:1: extra_info.split {word!r} is no split; it must be one of"):
        table(str(tmp_path / "p.parquet"))
    assert set(table(raw(tmp_path / "p.parquet", split="test"))["split"]) == {"test"}


def test_rows_that_differ_in_their_number_alone_are_one(tmp_path: Path) -> None:
    row = reference_rows()[0]
    again = row | {"extra_info": row["extra_info"] | {"index": 7}}
    pd.DataFrame([row, again]).to_parquet(tmp_path / "p.parquet")
    assert table(str(tmp_path / "p.parquet")).attrs["repeated"] == 1
    pd.DataFrame([row, again | {"data_source": "other"}]).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(DatasetError, match=r"p.parquet:2: the prompt .* already stands at .*p.parquet:1"):
        table(str(tmp_path / "p.parquet"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": [*chat("a"), {"role": "assistant", "content": "b"}]}, "a chat of 1 of system, 1 of user, 1 of ass"),
        ({"prompt": [*chat("a"), *chat("b", None)]}, "a chat of 1 of system, 2 of user; it must be one user message"),
        ({"prompt": []}, "the prompt is a chat of no message"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "holds more than text"),
        ({"prompt": "a", "negative_prompt": 3}, "negative_prompt must be a text or a chat"),
        ({"prompt": "a", "negative_prompt": [*chat("x"), *chat("y")]}, "the negative_prompt is a chat of 2 of system"),
    ],
)
def test_a_chat_that_is_no_prompt_is_named_with_its_line(tmp_path: Path, row: dict, complaint: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DatasetError, match=rf"p.jsonl:1: .*{complaint}"):
        table(str(tmp_path / "p.jsonl"))


def test_a_message_in_parts_of_text_is_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a red "}, {"type": "text", "text": "cup"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": parts}]}) + "\n")
    assert table(str(tmp_path / "p.jsonl"))["prompt"].tolist() == ["a red cup"]


def test_lists_of_two_splits_with_quoted_text(tmp_path: Path) -> None:
    """As flow_grpo has its OCR prompts: what is drawn stands between quotes, the split in the file's name."""
    (tmp_path / "train.txt").write_text('A menu that reads "Fish" in chalk\nA "Stop" sign, "Go" beside it\n')
    (tmp_path / "test.txt").write_text('A door plate, "Room 7"\n')
    files = [raw(tmp_path / f"{split}.txt", split=split) for split in ("train", "test")]
    found = table(*files, pattern='"([^"]+)"')
    assert found["target"].tolist() == ["Fish", "Stop", "Room 7"]
    assert found["split"].tolist() == ["train", "train", "test"]


def test_characters_that_nobody_sees_go_where_the_file_says_so(tmp_path: Path) -> None:
    """The PickScore prompts have a byte order mark within three of their 25,432 lines."""
    (tmp_path / "p.txt").write_text("a cat, \ufeffoil on canvas\na dog\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"p.txt:1: character 8 of the prompt is a byte order mark"):
        table(raw(tmp_path / "p.txt"))
    assert table(raw(tmp_path / "p.txt", hidden="remove"))["prompt"].tolist() == ["a cat, oil on canvas", "a dog"]


def saved(folder: Path, rows: list[dict[str, Any]], files: int = 1, **state: Any) -> Path:
    """What `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        part = pa.Table.from_pylist(rows[number::files])
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    given = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(given | state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def test_a_saved_folder_is_read_with_its_columns_renamed(tmp_path: Path) -> None:
    rows = [{"caption": f"cup {n}", "word": str(n), "picture": {"bytes": b"\0"}} for n in range(4)]
    folder = saved(tmp_path / "cups", rows, files=2)
    found = table(raw(folder, columns={"caption": "prompt", "word": "target"}), n_test=1)
    assert sorted(found["prompt"]) == ["cup 0", "cup 1", "cup 2", "cup 3"]
    assert set(found["metadata"]) == {"{}"}
    assert (found["split"] == "test").sum() == 1
    with pytest.raises(DatasetError, match=r"cups/data-0.*: there is no column 'text'; there are caption, word, pic"):
        table(raw(folder, columns={"text": "prompt"}))
    with pytest.raises(DatasetError, match="cups:1: the prompt must be a text"):
        table(raw(folder))
    with pytest.raises(ValueError, match="caption and word are both to be prompt: name one of them"):
        RawFile(file="data/raw/cups", columns={"caption": "prompt", "word": "prompt"})


def captions_beside_what_cannot_be_read() -> list[dict[str, Any]]:
    """In place of pictures of many GB, a day that Python has no value for: whoever reads it sees an error."""
    return [{"caption": text, "day": pa.scalar(2**62, pa.timestamp("us"))} for text in ("a cup", "a jug")]


@pytest.mark.parametrize("kind", ["p.parquet", "saved"])
def test_columns_that_an_entry_does_not_name_are_not_read(tmp_path: Path, kind: str) -> None:
    rows = captions_beside_what_cannot_be_read()
    if kind == "saved":
        saved(tmp_path / kind, rows, files=2)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / kind)
    found = table(raw(tmp_path / kind, columns={"caption": "prompt"}))
    assert found["prompt"].tolist() == ["a cup", "a jug"]
    assert set(found["metadata"]) == {"{}"}
    with pytest.raises(DatasetError, match="is not a readable"):
        table(raw(tmp_path / kind))
    with pytest.raises(DatasetError, match=rf"{kind}.*: there is no column 'text'; there are caption, day"):
        table(raw(tmp_path / kind, columns={"text": "prompt"}))


def test_a_column_that_stands_there_twice_is_refused_where_it_is_wanted(tmp_path: Path) -> None:
    columns = [pa.array([text]) for text in ("a cup", "x", "y")]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "tag", "tag"]), tmp_path / "p.parquet")
    for wanted in (None, {"prompt": "prompt", "tag": "tag"}):
        with pytest.raises(DatasetError, match=r"p\.parquet has more than one column 'tag'; keep one"):
            table(raw(tmp_path / "p.parquet", columns=wanted))
    assert table(raw(tmp_path / "p.parquet", columns={"prompt": "prompt"}))["prompt"].tolist() == ["a cup"]


def test_a_picture_among_the_metadata_is_named_with_what_leaves_it_out(tmp_path: Path) -> None:
    pd.DataFrame([{"prompt": "a cup", "width": 8, "image": {"bytes": b"PNG"}}]).to_parquet(tmp_path / "p.parquet")
    complaint = r"p.parquet:1: 'image' cannot be kept as metadata in JSON: .*bytes.*; leave it out, as by naming the "
    with pytest.raises(DatasetError, match=complaint):
        table(raw(tmp_path / "p.parquet"))
    assert table(raw(tmp_path / "p.parquet", columns={"prompt": "prompt"}))["prompt"].tolist() == ["a cup"]


def test_row_labels_of_pandas_are_no_content(tmp_path: Path) -> None:
    """A prompt that stands there twice with the same content is one."""
    rows = pd.DataFrame({"prompt": ["b", "a", "a"], "tag": ["y", "x", "x"]}).sort_values("prompt")
    rows.to_parquet(tmp_path / "p.parquet")
    found = table(str(tmp_path / "p.parquet"))
    assert (found["prompt"].tolist(), set(found["metadata"])) == (["a", "b"], {'{"tag": "x"}', '{"tag": "y"}'})


def test_a_saved_folder_of_splits_brings_them_along(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    for split in ("train", "test"):
        saved(folder / split, [{"prompt": f"a {split}ing cup"}])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert table(raw(folder))["split"].tolist() == ["train", "test"]
    for split in ("train", "test"):
        shutil.rmtree(folder / split)
        saved(folder / split, [{"caption": f"a {split}ing cup", "split": None}])
    assert table(raw(folder, columns={"caption": "prompt"}))["split"].tolist() == ["train", "test"]
    assert table(raw(folder, columns={"caption": "prompt", "split": "split"}))["split"].tolist() == ["train", "test"]
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    with pytest.raises(DatasetError, match=r"both has a split 'validation', .* name its folders one by one"):
        table(raw(folder))


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"empty is a folder without state.json"):
        table(raw(tmp_path / "empty"))
    chosen = saved(tmp_path / "chosen", [{"prompt": "a"}], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DatasetError, match=r"chosen holds a choice of rows .*flatten_indices"):
        table(raw(chosen))
    broken = saved(tmp_path / "broken", [{"prompt": "a"}])
    next(broken.glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DatasetError, match=r"broken/data-00000-of-00001.arrow is not a readable Arrow file"):
        table(raw(broken))


# ---- negative prompts of one's own


def encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """A token a character, and one vector a text."""
    rows = [torch.tensor([[float(ord(letter)), 1.0] for letter in text]) for text in texts]
    embeds = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(embeds.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "pooled_prompt_embeds": embeds.sum(1)}


def prompt(text: str, negative: str | None = None) -> Prompt:
    metadata = {} if negative is None else {"negative_prompt": negative}
    return Prompt(prompt_uid(text), text, None, metadata, "p.txt:1")


def stored(folder: Path, *prompts: Prompt) -> PromptEmbeddings:
    made: dict[str, Any] = {"negative_prompt": " ", "max_sequence_length": 77, "model": "m", "model_digest": "0"}
    write_embeddings(prompts, encode, folder, 2, batch_size=1, **made)
    return PromptEmbeddings.open(folder)


def test_each_sample_is_contrasted_with_its_own_negative_prompt(tmp_path: Path) -> None:
    prompts = [prompt("cup", "ugly"), prompt("jar"), prompt("mug", "ugly"), prompt("pot", " ")]
    embeddings = stored(tmp_path / "own", *prompts)
    found = prompt_table(embeddings, [text.uid for text in prompts], needs_negative=True)
    rows = found.expand(torch.tensor([0, 0, 1, 2, 3]))
    wanted = encode(["ugly", "ugly", " ", "ugly", " "])
    for name, tensor in wanted.items():
        assert torch.equal(rows[f"negative_{name}"], tensor), name
    one = prompt_table(embeddings, [prompts[1].uid], needs_negative=True)
    assert one.lengths == (3, 1), "the data set's own alone, where no prompt here has another"


def test_a_data_set_without_own_negative_prompts_is_written_as_before(tmp_path: Path) -> None:
    stored(tmp_path / "one", prompt("cup"), prompt("jar", " "))
    assert "negatives" not in json.loads((tmp_path / "one" / "index.json").read_text())
    found = prompt_table(PromptEmbeddings.open(tmp_path / "one"), [prompt_uid("cup")], needs_negative=True)
    assert found.lengths == (3, 1)


def test_joined_tables_keep_whose_negative_prompt_is_whose(tmp_path: Path) -> None:
    """Also of tables of one prompt each, whose one negative prompt is not everybody's."""
    prompts = [prompt("cup", "ugly"), prompt("jug", "dim")]
    embeddings = stored(tmp_path / "own", *prompts)
    parts = [prompt_table(embeddings, [text.uid], needs_negative=True) for text in prompts]
    whole = prompt_table(embeddings, [text.uid for text in prompts], needs_negative=True)
    joined, index = PromptTable.join(parts), torch.tensor([0, 1])
    for name, tensor in whole.expand(index).items():
        assert torch.equal(joined.expand(index)[name], tensor), name
    same = PromptTable.join([parts[0], parts[0]])
    assert same.negative_prompt_embeds is not None
    assert len(same.negative_prompt_embeds) == 1


# ---- a data set by its name


def test_a_recipes_files_follow_from_the_name_of_its_data_set() -> None:
    named = TrainConfig.model_validate({"data": {"name": "signs", "train_batch_size": 32}})
    assert named.data.prompts == Path("data/signs/prompts.parquet")
    assert (named.data.embeddings, named.data.pairs) == (Path("data/signs/embeddings"), Path("data/signs/pairs"))
    spelt = TrainConfig.model_validate(
        {
            "data": {
                "prompts": "data/signs/prompts.parquet",
                "embeddings": "data/signs/embeddings",
                "pairs": "data/signs/pairs",
                "train_batch_size": 32,
            }
        }
    )
    assert named.digest() == spelt.digest()
    assert TrainConfig(data={"name": "digits"}).digest() == TrainConfig().digest()  # type: ignore[arg-type]
    assert TrainConfig.model_validate(named.model_dump(mode="json")) == named


def test_a_path_goes_before_the_name_and_another_name_before_the_recipes_path() -> None:
    config = TrainConfig.model_validate({"data": {"name": "signs", "embeddings": "elsewhere"}})
    assert config.data.embeddings == Path("elsewhere")
    assert config.data.prompts == Path("data/signs/prompts.parquet")
    other = config.with_changes({"data": {"name": "boards"}})
    assert other.data.embeddings == Path("data/boards/embeddings")
    assert config.with_changes({"data": {"prompts": "p.parquet"}}).data.embeddings == Path("elsewhere")
    assert config.with_changes({"data": {"name": None}}).data.prompts == DataConfig().prompts


def test_a_name_that_is_no_part_of_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.name"):
        TrainConfig.model_validate({"data": {"name": "../other"}})


@pytest.mark.parametrize("name", ["../../elsewhere.arrow", "/etc/passwd", "..", 5, None])
def test_a_saved_data_set_is_of_its_own_folder(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "data" / "saved"
    folder.mkdir(parents=True)
    rows = pa.Table.from_pylist([{"prompt": "a cat"}])
    with pa.ipc.new_stream(str(tmp_path / "elsewhere.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DatasetError, match="has no list of the folder's Arrow files"):
        table(str(folder))


def test_a_part_of_a_message_without_its_text_is_refused(tmp_path: Path) -> None:
    for part in ({"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": 5}):
        file = tmp_path / "p.jsonl"
        file.write_text(json.dumps({"prompt": [{"role": "user", "content": [part]}]}))
        with pytest.raises(DatasetError, match=r"p\.jsonl:1: a message of the prompt holds more than text"):
            table(str(file))

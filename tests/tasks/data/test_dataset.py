# SPDX-License-Identifier: Apache-2.0
"""Raw prompt files -> prompt table -> embeddings, with every complaint they should make."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tasks.data.embeddings import PromptEmbeddings, write_embeddings
from tasks.data.prompts import DatasetError, Prompt, build_prompt_table, check_prompt_lengths, load_prompts, prompt_uid
from tasks.system.files import put_in_place

NUMBERS = Path(__file__).parents[3] / "data" / "raw" / "numbers.txt"
GENEVAL = '{"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "a photo of two cups"}'


def table(*files: Path, n_test: int = 0, n_train: int | None = None, pattern: str | None = None, seed: int = 0):
    return build_prompt_table(
        [str(file) for file in files], n_test=n_test, n_train=n_train, seed=seed, target_pattern=pattern
    )


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_numbers_are_the_thousand_prompts():
    assert NUMBERS.read_text() == "".join(f"the number {i:03d}\n" for i in range(1000))


def test_splits_are_seeded_and_do_not_depend_on_the_order_of_lines(tmp_path):
    first = table(NUMBERS, n_test=48, n_train=200, pattern=r"(\d+)$")
    assert first["split"].value_counts().to_dict() == {"pretrain": 752, "train": 200, "test": 48}
    assert first.equals(table(NUMBERS, n_test=48, n_train=200, pattern=r"(\d+)$"))
    assert (first["prompt"].str[-3:] == first["target"]).all()
    assert first["uid"].is_unique

    backwards = written(tmp_path / "backwards.txt", *reversed(NUMBERS.read_text().split("\n")[:-1]))
    second = table(backwards, n_test=48, n_train=200)
    assert dict(zip(first["uid"], first["split"], strict=True)) == dict(
        zip(second["uid"], second["split"], strict=True)
    )
    other = table(NUMBERS, n_test=48, n_train=200, seed=1)
    assert (first["split"] != other["split"]).any()
    larger = table(NUMBERS, n_test=48, n_train=400)
    assert (first["split"] == "test").equals(larger["split"] == "test"), "held out stays held out"


def test_a_uid_is_the_hash_of_the_text_alone():
    # As `printf 'the number 472' | b2sum -l 64` prints it.
    assert prompt_uid("the number 472") == "b24943d37f959c67"


def test_without_n_train_all_the_rest_is_train(tmp_path):
    counts = table(written(tmp_path / "p.txt", *"abcdef"), n_test=2)["split"].value_counts()
    assert counts.to_dict() == {"train": 4, "test": 2}


def test_jsonl_keeps_unknown_keys_as_metadata_and_honours_known_ones(tmp_path):
    file = written(
        tmp_path / "p.jsonl",
        GENEVAL,
        '{"prompt": "a sign \\"open\\"", "target": "open", "split": "test", "uid": "sign-1"}',
        '{"prompt": "a dog", "target": null}',
    )
    table(file, pattern="(cup)").to_parquet(tmp_path / "t.parquet")
    cups, dog = load_prompts(tmp_path / "t.parquet", "train")
    assert cups.metadata == {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    assert (cups.target, cups.source) == ("cup", f"{file}:1")
    assert dog.target is None
    assert load_prompts(tmp_path / "t.parquet", "test") == [Prompt("sign-1", 'a sign "open"', "open", {}, f"{file}:2")]


def test_rows_that_repeat_are_one_row_and_the_others_are_counted(tmp_path):
    """GenEval's list has each of its 553 rows four times."""
    other = GENEVAL.replace("cups", "mugs").replace("two", "three")
    spaced = '{"prompt": "a photo of two cups ", "include": [{"count": 2, "class": "cup"}], "tag": "counting"}'
    file = written(tmp_path / "p.jsonl", GENEVAL, other, GENEVAL, other, GENEVAL)
    again = written(tmp_path / "q.jsonl", spaced)
    found = table(file, again)
    assert found["prompt"].tolist() == ["a photo of two cups", "a photo of three mugs"]
    assert found["source"].tolist() == [f"{file}:1", f"{file}:2"]
    assert found.attrs["repeated"] == 4
    found.to_parquet(tmp_path / "t.parquet")
    assert len(load_prompts(tmp_path / "t.parquet")) == 2
    for number in ("1.0", "true"):  # equal to 1 in Python
        with pytest.raises(DatasetError, match="already stands at"):
            table(written(tmp_path / "typed.jsonl", GENEVAL.replace("2", "1"), GENEVAL.replace("2", number)))
    lines = table(written(tmp_path / "p.txt", "one", "two", "one"))
    assert (lines["prompt"].tolist(), lines.attrs["repeated"]) == (["one", "two"], 1)
    counted = GENEVAL.replace('"count": 2', '"count": 3')
    with pytest.raises(
        DatasetError, match=r"r.jsonl:3: the prompt 'a photo of two cups' already stands at .*r.jsonl:1"
    ):
        table(written(tmp_path / "r.jsonl", GENEVAL, GENEVAL, counted))


def test_parquet_is_read_like_jsonl(tmp_path):
    pd.DataFrame(
        {"prompt": ["a cat", "a dog"], "target": [None, "dog"], "tags": [["x", "y"], []], "split": ["test", None]}
    ).to_parquet(tmp_path / "raw.parquet")
    table(tmp_path / "raw.parquet").to_parquet(tmp_path / "t.parquet")
    cat, dog = load_prompts(tmp_path / "t.parquet")
    assert (cat.target, cat.metadata, cat.source) == (None, {"tags": ["x", "y"]}, f"{tmp_path}/raw.parquet:1")
    assert (dog.target, dog.metadata) == ("dog", {"tags": []})
    assert [p.uid for p in load_prompts(tmp_path / "t.parquet", "test")] == [cat.uid]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.txt", "", "p.txt is empty"),
        ("p.txt", "one\n\nthree\n", "p.txt:2: the prompt must be a text that is not blank"),
        (
            "p.jsonl",
            '{"prompt":"a"}\n{"prompt":"a","n":1}\n',
            "p.jsonl:2: the prompt 'a' already stands at .*p.jsonl:1 with",
        ),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: broken JSON"),
        ("p.jsonl", '["a"]\n', "p.jsonl:1: a line must be one JSON object"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl:1: the prompt must be a text that is not blank, not None"),
        ("p.jsonl", '{"prompt": " "}\n', "p.jsonl:1: the prompt must be a text that is not blank"),
        ("p.jsonl", '{"prompt": 7}\n', "p.jsonl:1: the prompt must be a text that is not blank, not 7"),
        ("p.jsonl", '{"prompt": "a", "split": "valid"}\n', "p.jsonl:1: 'valid' is no split; .* train, test, pretrain"),
        ("p.jsonl", '{"prompt": "a", "target": 472}\n', "p.jsonl:1: target must be a text, not 472"),
        ("p.jsonl", '{"prompt": "a", "uid": "negative"}\n', "p.jsonl:1: the uid 'negative' is reserved"),
        ("p.jsonl", '{"prompt":"a","uid":"x"}\n{"prompt":"b","uid":"x"}\n', "p.jsonl:2: the uid 'x' already stands"),
        (
            "p.jsonl",
            '{"prompt":"caf\u00e9","split":"train"}\n{"prompt":"cafe\u0301","split":"test"}\n',
            "p.jsonl:2: the prompt 'caf\u00e9' already stands at .*p.jsonl:1",
        ),
        ("p.parquet", "no parquet", "p.parquet is not a readable parquet file"),
        ("p.csv", "prompt\na\n", "p.csv must end in one of .txt, .jsonl, .parquet"),
    ],
)
def test_unusable_files_are_named_with_their_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=complaint):
        table(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.txt", "one\nt\0wo", r"p.txt:2: character 2 of the prompt is a control character \(U\+0000\)"),
        ("p.txt", "one\n\x1b[31mtwo", r"p.txt:2: character 1 of the prompt is a control character \(U\+001B\)"),
        ("p.txt", "one\ntwo\x1f", r"p.txt:2: character 4 .* a control character"),
        ("p.txt", "one\nt\u202ewo", r"p.txt:2: .* reorders the text shown \(U\+202E\)"),
        ("p.txt", "one\n\u200b\u200d", "p.txt:2: the prompt must be a text that is not blank"),
        ("p.txt", "\ufeff\ufeffone", "p.txt:1: .* a byte order mark within the text"),
        ("p.txt", "one\rtwo\rthree", "p.txt:1: a carriage return .* stands alone"),
        ("p.txt", "one\n" + "x" * 2**15, "p.txt:2: the prompt has 32768 characters; the longest may have 16384"),
        ("p.txt", "one\n" + "x" * 2**21, "p.txt:2: a line of 2097152 characters"),
        ("p.jsonl", '{"prompt":"a"}\n{"prompt":"b","prompt":"c"}', "p.jsonl:2: .* the key 'prompt' stands there twice"),
        ("p.jsonl", '{"prompt":"a","m":{"x":1,"x":2}}', "p.jsonl:1: .* the key 'x' stands there twice"),
        ("p.jsonl", '{"prompt":"a","m":[NaN]}', "p.jsonl:1: the metadata holds nan"),
        ("p.jsonl", '{"prompt":"a","m":1e999}', "p.jsonl:1: the metadata holds inf"),
        ("p.jsonl", '{"prompt":"a"}\n{"prompt":"b\\ud800"}', "p.jsonl:2: .* half of a surrogate pair"),
        ("p.jsonl", '{"prompt":"a","m":{"\\udfff":1}}', "p.jsonl:1: the metadata holds half of a surrogate pair"),
        ("p.jsonl", '{"prompt":"a","target":"\\u001b"}', "p.jsonl:1: character 1 of the target is a control character"),
        ("p.jsonl", '{"prompt":"a"}\n{"m":' + "[" * 200_000, "p.jsonl:2: unusable JSON: .*recursion"),
        ("p.jsonl", '{"prompt":"a","m":' + "9" * 5000 + "}", "p.jsonl:1: unusable JSON: .*4300"),
    ],
    ids=range(18),
)
def test_what_no_one_can_have_meant_is_named_with_its_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(DatasetError, match=complaint):
        table(tmp_path / name)


def test_what_scripts_and_emoji_need_is_text(tmp_path):
    texts = ["\ufeffa\tb", "\u05d0\u200f1", "\U0001f468\u200d\U0001f469", "e\u0301", "crlf\r"]
    (tmp_path / "p.txt").write_bytes("\n".join(texts).encode())
    table(tmp_path / "p.txt").to_parquet(tmp_path / "t.parquet")
    assert [prompt.prompt for prompt in load_prompts(tmp_path / "t.parquet")] == ["a\tb", *texts[1:4], "crlf"]


def test_parquet_that_arrow_fails_on_in_other_ways_is_named(tmp_path):
    """Not ArrowInvalid: a page that cannot be decoded, text that is not UTF-8, a zone that nobody knows."""
    file = tmp_path / "p.parquet"
    pd.DataFrame({"prompt": ["a", "bb"]}).to_parquet(file, compression="none")
    file.write_bytes(file.read_bytes().replace(b"bb", b"\xff\xff"))
    with pytest.raises(DatasetError, match=r"p.parquet is not a readable parquet file: .*utf"):
        table(file)
    when = pa.array([0], pa.timestamp("us", tz="Nowhere/Land"))
    pq.write_table(pa.table({"prompt": ["a"], "when": when}), file)
    with pytest.raises(DatasetError, match=r"p.parquet is not a readable parquet file: .*Nowhere"):
        table(file)
    file.write_bytes(file.read_bytes()[:8] + b"\xff" * 8 + file.read_bytes()[16:])
    with pytest.raises(DatasetError, match=r"p.parquet is not a readable parquet file"):
        table(file)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
@pytest.mark.parametrize("uid", ["a/pooled", "../x", "a\0b", "a b", " ", "", "a\n", "x" * 129, "__metadata__"])
def test_a_uid_that_is_no_name_for_a_tensor_is_named_with_its_line(tmp_path, name, uid):
    """`a/pooled` would be the extra `pooled` of the prompt `a`."""
    rows = [{"prompt": "a", "uid": "a"}, {"prompt": "b", "uid": uid}]
    if name == "p.parquet":
        pd.DataFrame(rows).to_parquet(tmp_path / name)
    else:
        written(tmp_path / name, *map(json.dumps, rows))
    with pytest.raises(DatasetError, match=rf"{name}:2: the uid '.*(is reserved|must be 1 to 128 letters)") as raised:
        table(tmp_path / name)
    assert len(str(raised.value)) < len(str(tmp_path)) + 200


def test_uids_are_letters_digits_and_three_more_characters(tmp_path):
    uids = ["sign-1", "v1.2_b", "x" * 128, "0", "été", prompt_uid("a")]
    rows = [json.dumps({"prompt": f"p{i}", "uid": uid}) for i, uid in enumerate(uids)]
    assert table(written(tmp_path / "p.jsonl", *rows))["uid"].tolist() == uids


def test_other_complaints(tmp_path):
    with pytest.raises(DatasetError, match=r"none.txt is missing"):
        table(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("one\ncafé\n".encode("latin-1"))
    with pytest.raises(DatasetError, match=r"latin.txt:2: byte 0xe9 is not UTF-8"):
        table(tmp_path / "latin.txt")
    two = written(tmp_path / "two.txt", "number 1", "no digits")
    with pytest.raises(DatasetError, match=r"two.txt:2: prompts.target_pattern .* does not match 'no digits'"):
        table(two, pattern=r"(\d+)")
    for pattern in (r"number( \d)?", r"number ([a-z]*)"):
        with pytest.raises(DatasetError, match=r"bare.txt:1: prompts.target_pattern .* does not match 'a number'"):
            table(written(tmp_path / "bare.txt", "a number"), pattern=pattern)
    with pytest.raises(DatasetError, match="n_test=2 and n_train=1 ask for more than the 2 prompts"):
        table(two, n_test=2, n_train=1)
    with pytest.raises(DatasetError, match=r"two.txt:1: the prompt 'number 1' already stands at .*numbers.jsonl:1"):
        table(written(tmp_path / "numbers.jsonl", '{"prompt": "number 1", "target": "1"}'), two)


def test_load_prompts_complains(tmp_path):
    table(written(tmp_path / "p.txt", "a")).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match="'valid' is no split"):
        load_prompts(tmp_path / "t.parquet", "valid")
    with pytest.raises(DatasetError, match="a row of split 'test'"):
        load_prompts(tmp_path / "t.parquet", "test")
    with pytest.raises(DatasetError, match=r"gone.parquet is missing; `dvc repro prompts` makes it"):
        load_prompts(tmp_path / "gone.parquet")
    blank = table(written(tmp_path / "two.txt", "a", "b")).replace({"prompt": {"b": " \N{NO-BREAK SPACE}"}})
    blank.to_parquet(tmp_path / "blank.parquet")
    with pytest.raises(DatasetError, match=r"blank.parquet:\d: the prompt is blank; `dvc repro prompts` makes it anew"):
        load_prompts(tmp_path / "blank.parquet")


def test_too_long_prompts_are_named_with_their_line():
    from models.tiny_qwen_image.build import train_tokenizer

    prompts = [Prompt("a", "the number 123", None, {}, "p.txt:1"), Prompt("b", "the " * 9, None, {}, "p.txt:2")]
    tokenizer = train_tokenizer([prompt.prompt for prompt in prompts], 4096)
    lengths = [len(tokenizer(prompt.prompt)["input_ids"]) for prompt in prompts]
    check_prompt_lengths(prompts, lengths, max_sequence_length=max(lengths))
    with pytest.raises(DatasetError, match=rf"^p.txt:2: the prompt has {lengths[1]} tokens .*too long: 1\)"):
        check_prompt_lengths(prompts, lengths, max_sequence_length=max(lengths) - 1)


# --- embeddings


def encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """A text encoder of one table: a fixed random vector for each character, padded, as the pipelines do it."""
    vectors = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    rows = [vectors[list(text.encode())] for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"prompt_embeds": padded, "prompt_embeds_mask": mask}


def encode_with_sum(texts: list[str]) -> dict[str, torch.Tensor]:
    """The same, and one vector a text beside its sequence."""
    encoded = encode(texts)
    return encoded | {"pooled_prompt_embeds": encoded["prompt_embeds"].sum(1)}


def prompts_named(*texts: str) -> list[Prompt]:
    return [Prompt(prompt_uid(text), text, None, {}, f"p.txt:{i}") for i, text in enumerate(texts, 1)]


MADE_BY: dict[str, Any] = {
    "negative_prompt": " ",
    "max_sequence_length": 77,
    "model": "bytes",
    "model_digest": "0123",
}


def stored(folder: Path, prompts: list[Prompt], shard_size: int = 2, batch_size: int = 3, encode=encode) -> Path:
    write_embeddings(prompts, encode, folder, shard_size, batch_size=batch_size, **MADE_BY)
    return folder


def test_embeddings_come_back_as_encoded_and_padded(tmp_path):
    prompts = prompts_named("red", "a green cup", "blue", "cyan cups")
    embeddings = PromptEmbeddings.open(stored(tmp_path / "e", prompts))
    assert (embeddings.dim, embeddings.model, embeddings.model_digest) == (8, "bytes", "0123")
    assert (embeddings.max_sequence_length, embeddings.extras) == (77, ())
    chosen = [prompts[3], prompts[0], prompts[3]]
    batch = embeddings.get([prompt.uid for prompt in chosen])
    expected = encode([prompt.prompt for prompt in chosen])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert torch.equal(embeddings.negative()["prompt_embeds"], encode([" "])["prompt_embeds"])
    assert embeddings.negative()["prompt_embeds_mask"].tolist() == [[True]]
    assert prompts[0].uid in embeddings


def test_what_a_model_needs_besides_the_sequence_comes_back_under_its_name(tmp_path):
    prompts = prompts_named("red", "a green cup", "blue")
    embeddings = PromptEmbeddings.open(stored(tmp_path / "e", prompts, encode=encode_with_sum))
    assert embeddings.extras == ("pooled_prompt_embeds",)
    batch = embeddings.get([prompts[2].uid, prompts[0].uid])
    assert torch.allclose(batch["pooled_prompt_embeds"], encode_with_sum(["blue", "red"])["pooled_prompt_embeds"])
    assert embeddings.negative()["pooled_prompt_embeds"].shape == (1, 8)


def test_embeddings_are_sharded_and_their_bytes_repeat(tmp_path):
    prompts = prompts_named(*"abcdefg")
    first, second = (stored(tmp_path / name, prompts, shard_size=3) for name in ("one", "two"))
    names = sorted(path.name for path in first.iterdir())
    assert names == [*(f"embeddings-0000{i}-of-00003.safetensors" for i in range(3)), "index.json"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_a_uid_of_ones_own_is_known_with_the_text_that_was_encoded(tmp_path):
    """And the index of prompts that are named by their texts is what it was before."""
    own, named = Prompt("row-17", "a red cup", None, {}, "p.txt:1"), prompts_named("blue")[0]
    folder = stored(tmp_path / "own", [own, named])
    assert json.loads((folder / "index.json").read_text())["text_digests"] == {"row-17": prompt_uid("a red cup")}
    embeddings = PromptEmbeddings.open(folder)
    assert embeddings.has_text_of(own)
    assert embeddings.has_text_of(named)
    assert embeddings.has_text_of(replace(own, prompt="a green cup")) is False
    assert embeddings.has_text_of(replace(named, prompt="green")) is False
    folder = stored(tmp_path / "named", [named])
    assert "text_digests" not in json.loads((folder / "index.json").read_text())
    embeddings = PromptEmbeddings.open(folder)
    assert embeddings.has_text_of(named)
    assert embeddings.has_text_of(own) is None, "as of an index that was written before it had digests of texts"


def test_a_missing_embedding_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"index.json is missing; `dvc repro embeddings` makes it"):
        PromptEmbeddings.open(tmp_path)
    (tmp_path / "index.json").write_text('{"model": "bytes", "shards": {}}')
    with pytest.raises(DatasetError, match=r"is of an older version .*; `dvc repro embeddings` makes it anew"):
        PromptEmbeddings.open(tmp_path)
    embeddings = PromptEmbeddings.open(stored(tmp_path / "e", prompts_named("a")))
    with pytest.raises(DatasetError, match="no embedding of prompt uid 'feedbeef'"):
        embeddings.get(["feedbeef"])


def test_embeddings_that_are_not_finite_are_refused_and_the_old_ones_stay(tmp_path):
    folder = stored(tmp_path / "e", prompts_named("a", "b"))
    before = (folder / "index.json").read_bytes()

    def broken(texts: list[str]):
        encoded = encode(texts)
        return encoded | {"prompt_embeds": encoded["prompt_embeds"] / (0 if "c" in texts else 1)}

    with pytest.raises(DatasetError, match=re.escape(f"'c' (uid {prompt_uid('c')}) values that are not finite")):
        write_embeddings(prompts_named("a", "c"), broken, folder, 1, batch_size=1, **MADE_BY)
    assert (folder / "index.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


# --- outputs appear whole or not at all


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_put_in_place_replaces_only_on_success(tmp_path, kind):
    target = tmp_path / "out"

    def put(text: str, error: type[BaseException] | None = None) -> None:
        with put_in_place(target) as path:
            if kind == "folder":
                path.mkdir()
            (path / "file" if kind == "folder" else path).write_text(text)
            if error:
                raise error

    put("first")
    put("second")
    with pytest.raises(KeyboardInterrupt):
        put("third", KeyboardInterrupt)
    assert (target / "file" if kind == "folder" else target).read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_what_safetensors_writes_may_be_read_as_the_umask_has_it(tmp_path, mask):
    before = os.umask(mask)
    try:
        with put_in_place(tmp_path / "out") as folder:
            (folder / "transformer").mkdir(parents=True)
            save_file({"weight": torch.zeros(2)}, folder / "transformer/model.safetensors")
            (folder / "script").touch(mode=0o755)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {"model.safetensors": 0o666 & ~mask, "script": 0o755 & ~mask}


def test_put_in_place_recovers_from_a_kill_between_its_two_renames(tmp_path):
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "file").write_text(json.dumps("old"))
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(ZeroDivisionError), put_in_place(tmp_path / "out"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]

# SPDX-License-Identifier: Apache-2.0
"""Prompts of more tokens than a prompt may have: refused, or cut to the beginning that the family's pipeline keeps."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from torch import Tensor
from typer.testing import CliRunner

from flows.prepare import app
from tasks.actors.text_encoder import TextEncoder
from tasks.data.embeddings import PromptEmbeddings
from tasks.data.live_embeddings import LiveEmbeddings
from tasks.data.prompt_files import NEGATIVE_UID, DatasetError
from tasks.data.prompts import load_prompts, prompt_uid
from tasks.data.text_encoding import EncodingSettings, TextEncoding
from tests.support.tiny_models import FAMILIES

PARAMS = Path(__file__).parents[3] / "params.yaml"
LENGTH = 24
SHORT = "the number 472"
LONG, LONGER = "the " * 30 + "number 473", "the " * 30 + "number 480 hello"
OWN_NEGATIVE, NEGATIVE = "hello " * 40, "number " * 40
CUT = {prompt_uid(LONG), prompt_uid(LONGER), NEGATIVE_UID, f"{NEGATIVE_UID}/{prompt_uid(OWN_NEGATIVE)}"}
ENCODE = ("embeddings", "--model", "model", "--max-sequence-length", str(LENGTH))
SETTINGS = EncodingSettings("float32", "cpu", LENGTH, NEGATIVE)
SAID = "prompts that are cut to max_sequence_length=24 tokens, as the model's pipeline does"
ENDS_TEXTS = ("stable_diffusion_3", "flux", "wan")
"""Families whose tokenizer puts a token at a text's end; the others' templates do, before the pipeline cuts."""


def prepare(*arguments: str, fails: bool = False) -> str:
    """What `python -m flows.prepare ...` prints, in one line."""
    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code != 0) == fails, done.output
    return " ".join(done.output.split())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(family: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> tuple[Path, str]:
    """A folder in which the stage cut two prompts of three and both negative prompts, and what it said."""
    folder = tmp_path_factory.mktemp(family)
    (folder / "data" / "raw").mkdir(parents=True)
    rows = [{"prompt": SHORT}, {"prompt": LONG}, {"prompt": LONGER, "negative_prompt": OWN_NEGATIVE}]
    (folder / "data" / "raw" / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = yaml.safe_load(PARAMS.read_text())
    files = {"n_test": 1, "n_train": 2, "files": ["data/raw/few.jsonl"], "target_pattern": None}
    params["data_sets"]["digits"]["prompts"] |= files
    params["data_sets"]["digits"]["embeddings"] |= {"negative_prompt": NEGATIVE, "too_long": "cut"}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    shutil.copytree(tiny_folder(family), folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare("prompts")
        return folder, prepare(*ENCODE, "--out", "embeddings")


@pytest.fixture
def here(made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made[0])
    return made[0]


def seen_by_the_denoiser(family: str, text: str) -> dict[str, Tensor]:
    """The text as the family's whole pipeline in diffusers hands it to its denoiser, when it is called with it."""
    pipeline = DiffusionPipeline.from_pretrained("model")
    pipeline.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {}

    def look(module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.update(named)
        if "encoder_hidden_states" not in named:  # Z-Image gives latents, times and texts in a row, unpadded
            given["encoder_hidden_states"] = torch.stack(positional[2])

    tested = FAMILIES[family]
    height, width = tested.sizes[0]
    call = tested.plain | tested.unguided_call | {"max_sequence_length": LENGTH, "num_inference_steps": 2}
    with pipeline.transformer.register_forward_pre_hook(look, with_kwargs=True):
        pipeline(prompt=text, height=height, width=width, output_type="latent", **call)
    names = {"encoder_hidden_states": "prompt_embeds", "pooled_projections": "pooled_prompt_embeds"}
    return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("text", [SHORT, LONG, LONGER, OWN_NEGATIVE, NEGATIVE])
def test_what_is_kept_of_a_text_is_what_the_familys_pipeline_keeps(family: str, text: str) -> None:
    """Of prompts and negative prompts alike, to the bit."""
    named = {OWN_NEGATIVE: f"{NEGATIVE_UID}/{prompt_uid(OWN_NEGATIVE)}", NEGATIVE: NEGATIVE_UID}
    stored = PromptEmbeddings.open("embeddings").get([named.get(text, prompt_uid(text))])
    expected = seen_by_the_denoiser(family, text)
    assert expected.keys() == stored.keys() - {"prompt_embeds_mask"}
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name
    assert expected["prompt_embeds"].std() > 0.01


@pytest.mark.usefixtures("here")
def test_the_end_of_a_text_is_kept_where_a_token_stands_for_it(family: str) -> None:
    """T5's tokenizers cut before it, so that a text is like the one that ends there. The templates of the others end
    behind the prompt and are cut with it: what is left is the beginning of the whole text, which is read in order."""
    encoding = TextEncoding("model", SETTINGS)
    cut = encoding.encode([LONG])
    if family in ENDS_TEXTS:
        ended = encoding.encode(["the " * (LENGTH - 1)])
        assert all(torch.equal(cut[name], ended[name]) for name in ended)
        assert not torch.equal(cut["prompt_embeds"], encoding.encode(["the " * (LENGTH - 2)])["prompt_embeds"])
    else:
        whole = encoding.adapter.encode_prompts(encoding._pipeline, [LONG], 4 * LENGTH)["prompt_embeds"]
        assert whole.shape[1] > cut["prompt_embeds"].shape[1] == LENGTH
        assert torch.allclose(cut["prompt_embeds"], whole[:, :LENGTH], atol=1e-5)


@pytest.mark.usefixtures("here")
def test_the_runs_own_text_encoders_cut_alike() -> None:
    """Bit for bit, in another order and together with others; and say so in the same words."""
    stored, prompts = PromptEmbeddings.open("embeddings"), load_prompts("data/prompts.parquet")[::-1]
    encoder = TextEncoder("model", SETTINGS, 1, sleeps=False, too_long="cut")
    ours = LiveEmbeddings(
        prompts, negative_prompt=NEGATIVE, max_sequence_length=LENGTH, shapes=None, extras=stored.extras
    )
    ours.encode = encoder.encode
    uids = [prompt.uid for prompt in prompts]
    for theirs, own in ((stored.get(uids), ours.get(uids)), (stored.negatives(uids), ours.negatives(uids))):
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)
    assert encoder.first_cut() == encoder.check(prompts), "what its first call cut"
    assert f"{SAID}: 3 (" in encoder.check(prompts), "with the negative prompt of a prompt's own"
    assert "more" not in encoder.check(prompts)
    assert encoder.check([prompt for prompt in prompts if prompt.prompt == SHORT]) == ""


@pytest.mark.usefixtures("here")
def test_a_text_of_just_as_many_tokens_as_there_may_be_is_whole() -> None:
    (prompt,) = [prompt for prompt in load_prompts("data/prompts.parquet") if prompt.prompt == SHORT]
    encoding = TextEncoding("model", SETTINGS)
    (length,) = encoding.adapter.prompt_lengths(encoding._pipeline, [SHORT])
    for most, cut in ((length, []), (length - 1, [SHORT])):
        shorter = TextEncoding("model", replace(SETTINGS, max_sequence_length=most))
        assert [found.prompt.prompt for found in shorter.check_lengths([prompt], "cut")] == cut


@pytest.mark.usefixtures("here")
def test_each_text_that_is_cut_is_told_once() -> None:
    """A negative prompt that two prompts share, that is the data set's, or that comes beside its own prompt."""
    (prompt,) = [prompt for prompt in load_prompts("data/prompts.parquet") if prompt.prompt == SHORT]
    first, second = (
        replace(prompt, uid=uid, prompt=f"{SHORT} {uid}", metadata={"negative_prompt": OWN_NEGATIVE}) for uid in "ab"
    )
    encoding, own = TextEncoding("model", SETTINGS), first.negative
    assert own is not None
    for texts in ([first], [first, second], [first, own], [first, replace(own, uid=NEGATIVE_UID)]):
        assert [found.prompt.prompt for found in encoding.check_lengths(texts, "cut")] == [OWN_NEGATIVE]


@pytest.mark.usefixtures("here")
def test_a_negative_prompt_with_the_text_of_a_prompt_is_listed_too(tmp_path: Path) -> None:
    """It is stored under a uid of its own."""
    table = pd.read_parquet("data/prompts.parquet")
    table.loc[table["prompt"] == SHORT, "metadata"] = json.dumps({"negative_prompt": LONG})
    table.to_parquet(tmp_path / "own.parquet", index=False)
    said = prepare(*ENCODE, "--prompts", str(tmp_path / "own.parquet"), "--out", str(tmp_path / "embeddings"))
    assert f"{SAID}: 4 (" in said
    assert PromptEmbeddings.open(tmp_path / "embeddings").cut == CUT | {f"{NEGATIVE_UID}/{prompt_uid(LONG)}"}


def test_the_stage_says_what_it_cut_and_the_index_names_it(made: tuple[Path, str], here: Path) -> None:
    said = made[1]
    assert re.search(rf"{SAID}: 4 \((\S+ of \d\d, ){{2}}embeddings.negative_prompt of \d\d and 1 more\)", said)
    assert all(f"data/raw/few.jsonl:{line} of " in said for line in (2, 3))
    assert PromptEmbeddings.open("embeddings").cut == CUT


@pytest.mark.usefixtures("here")
def test_without_the_setting_they_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "refused")
    told = prepare(*ENCODE, "--out", out, "--set", "too_long=refuse", fails=True)
    advice = (
        "(prompts that are too long: 3): raise it, shorten them, or set too_long to cut, which encodes the beginning"
    )
    assert "tokens with its template, but max_sequence_length=24" in told
    assert advice in told
    assert not Path(out).exists()
    with pytest.raises(DatasetError, match="set too_long to cut"):
        TextEncoder("model", SETTINGS, 1, sleeps=False).encode(load_prompts("data/prompts.parquet"))
    (short,) = [prompt for prompt in load_prompts("data/prompts.parquet") if prompt.prompt == SHORT]
    own = replace(short, metadata={"negative_prompt": OWN_NEGATIVE})
    with pytest.raises(DatasetError, match=r"negative_prompt: the prompt has \d+ tokens .* set too_long to cut"):
        TextEncoder("model", SETTINGS, 1, sleeps=False).encode([own])


@pytest.mark.usefixtures("here")
def test_where_nothing_is_cut_the_embeddings_are_the_same_with_either_setting(tmp_path: Path) -> None:
    """To the byte, index and all: a run on them is no other run."""
    made = []
    for setting in ("refuse", "cut"):
        long = ("--max-sequence-length", "256", "--set", f"too_long={setting}")
        said = prepare("embeddings", "--model", "model", "--out", f"{tmp_path}/{setting}", *long)
        assert "cut to" not in said
        made.append({file.name: file.read_bytes() for file in (tmp_path / setting).iterdir()})
    assert made[0] == made[1]
    assert b'"cut"' not in made[0]["index.json"]
    assert b'"cut"' in Path("embeddings/index.json").read_bytes()

# SPDX-License-Identifier: Apache-2.0
"""The data stages of dvc.yaml: `python -m flows.prepare` prompts, base-model, embeddings, preferences or pairs.

Prompts and embeddings are made of each data set of params.yaml, the rest of the tiny model's. Each stage reads that
file and puts its output in place only when all of it is made, so a stage that fails leaves the old output as it was. A
stage that samples or encodes imports the model families, seconds of work, and the others do not.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tasks.cli.terminal import commands
from tasks.config.data import DIGITS
from tasks.config.errors import ConfigError
from tasks.config.named_values import named_values
from tasks.config.params import (
    BASE_MODEL,
    BASE_MODEL_METRICS,
    PAIRS,
    PREFERENCES,
    PROMPTS,
    GateParams,
    PrepareError,
    changed,
    load_params,
)
from tasks.data.base_model import score_base_model, train_base_model
from tasks.data.digests import IMAGE_SIDE, TEXT_SIDE, parts_digest
from tasks.data.embeddings import write_embeddings
from tasks.data.pairs import common_size, read_pictures, write_pairs
from tasks.data.preferences import check_encoded, sampled_preferences
from tasks.data.prompt_files import NEGATIVE_UID
from tasks.data.prompts import Prompt, build_prompt_table, load_prompts
from tasks.data.text_encoding import TextEncoding, adapter_of, check_adapter_file, told_of_cut, uids_of_cut
from tasks.rewards import get_reward
from tasks.run.early import check_folder
from tasks.system.files import put_in_place

PARAMS = Path("params.yaml")
app = commands("Make the data sets; usually called by `dvc repro`.")
DataSet = Annotated[str, typer.Argument(help="A data set of params.yaml.")]


@app.command()
def prompts(data_set: DataSet = DIGITS) -> None:
    """Read a data set's raw prompt files, split them, and write its prompts.parquet."""
    entry = load_params(PARAMS).data_set(data_set)
    params = entry.prompts
    table = build_prompt_table(
        params.files,
        n_test=params.n_test,
        n_train=params.n_train,
        seed=params.seed,
        target_pattern=params.target_pattern,
    )
    repeated, chats = table.attrs.pop("repeated"), table.attrs.pop("chats")  # the file is the rows alone
    with put_in_place(entry.table) as path:
        table.to_parquet(path, index=False)
    counts = ", ".join(f"{split} {n}" for split, n in table["split"].value_counts().items())
    merged = f", {repeated} rows merged with an equal one" if repeated else ""
    said = f", {chats} with a system message, in whose place the model's own template stands" if chats else ""
    typer.echo(f"{entry.table}: {len(table)} prompts ({counts}{merged}{said})")


@app.command("base-model")
def base_model() -> None:
    """Pre-train the tiny Qwen-Image model, test it on held-out prompts, and write data/base_model/."""
    params = load_params(PARAMS).base_model
    held_out = load_prompts(PROMPTS, "test")
    if len(held_out) < params.gate.prompts:
        raise PrepareError(
            f"base_model.gate.prompts is {params.gate.prompts}, but {PROMPTS} holds {len(held_out)} test prompts"
        )
    with put_in_place(BASE_MODEL) as folder, put_in_place(BASE_MODEL_METRICS) as metrics_file:
        losses = train_base_model(load_prompts(PROMPTS), held_out, params.model, folder)
        scores = score_base_model(
            folder,
            held_out[: params.gate.prompts],
            params.model,
            sampling_steps=params.gate.steps,
            images_per_prompt=params.gate.images_per_prompt,
            seed=params.gate.seed,
        )
        metrics = scores | losses
        _check_gate(metrics["held_out_reward"], params.gate)
        metrics_file.write_text(json.dumps(metrics, indent=2) + "\n")
    typer.echo(f"{BASE_MODEL}: held-out reward {metrics['held_out_reward']:.3f}")


Changes = Annotated[list[str] | None, typer.Option("--set", help="field=value; may be repeated.")]


@app.command()
def embeddings(
    data_set: DataSet = DIGITS,
    model: Annotated[Path | None, typer.Option(help="Folder in diffusers format whose text encoders encode.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Number format of the text encoders and the embeddings.")] = None,
    device: Annotated[str | None, typer.Option(help="Where they compute: cpu or cuda.")] = None,
    table: Annotated[Path | None, typer.Option("--prompts", help="Prompt table whose prompts are encoded.")] = None,
    changes: Changes = None,
) -> None:
    """Encode a data set's prompts once with its model's text encoders, as the model's own pipeline does.

    An option goes in place of what params.yaml says of the data set; --set takes any field of its embeddings.
    """
    entry = load_params(PARAMS).data_set(data_set)
    given = {"max_sequence_length": max_sequence_length, "dtype": dtype, "device": device}
    given = {name: value for name, value in given.items() if value is not None}
    params = changed(entry.embeddings, given | _named_values(changes, "--set"))
    folder, table, out = model or Path(params.model), table or entry.table, out or entry.embedded
    _require_model(folder)
    _require_place(out, "embeddings")
    chosen = [prompt for split in params.splits for prompt in load_prompts(table, split)]
    encoding = TextEncoding(folder, params)
    if model is None:
        check_adapter_file(encoding.adapter, params.adapter, f"data_sets.{data_set}.embeddings.adapter")
    negative = Prompt(NEGATIVE_UID, encoding.negative_prompt, None, {}, "embeddings.negative_prompt")
    cut = encoding.check_lengths([*chosen, negative], params.too_long)
    if cut:  # before they are encoded, which may take hours
        typer.echo(told_of_cut(cut, params.max_sequence_length))
    write_embeddings(
        chosen,
        encoding.encode,
        out,
        params.shard_size,
        batch_size=params.batch_size,
        negative_prompt=encoding.negative_prompt,
        max_sequence_length=params.max_sequence_length,
        model=folder.as_posix(),
        model_digest=_digest(folder, TEXT_SIDE),
        cut=uids_of_cut(cut, chosen),
    )
    typer.echo(f"{out}: {len(chosen)} prompts and the negative prompt")


Model = Annotated[Path, typer.Option("--model", help="Folder in diffusers format.")]
Table = Annotated[Path | None, typer.Option("--prompts", help="Prompt table whose train prompts are sampled.")]
Device = Annotated[str, typer.Option("--device", help="Where the model computes: cpu or cuda.")]
Options = Annotated[list[str] | None, typer.Option("--option", help="name=value of the reward; may be repeated.")]


@app.command()
def preferences(  # noqa: PLR0913 (an argument for each of the command's)
    data_set: DataSet = DIGITS,
    model: Annotated[Path | None, typer.Option(help="Folder in diffusers format.")] = None,
    embeddings: Annotated[Path | None, typer.Option(help="Folder of those by this model's encoders.")] = None,
    table: Table = None,
    out: Annotated[Path | None, typer.Option(help="Table to write.")] = None,
    reward: Annotated[str | None, typer.Option(help="In place of the one in params.yaml.")] = None,
    option: Options = None,
    changes: Changes = None,
    dtype: Annotated[str, typer.Option(help="Number format of the model.")] = "float32",
    device: Device = "cpu",
) -> None:
    """Sample a model on a data set's train prompts, and write each one's best and worst picture.

    An option goes in place of what params.yaml says of the data set; --set takes fields of rollout.pipeline.
    """
    stages = load_params(PARAMS)
    params, entry = stages.preferences, stages.data_set(data_set)
    encoded_by = _encoding_command(data_set, model, table, embeddings)
    model, embeddings = model or Path(entry.embeddings.model), embeddings or entry.embedded
    table, out = table or entry.table, out or entry.table.with_name(PREFERENCES.name)
    _require_model(model)
    _require_device(device)
    check_folder(out.parent, "the folder of --out")
    if out.is_dir():
        raise PrepareError(f"--out is {out}, which is a folder: give a file, such as {PREFERENCES}")
    sampling = {"height": params.height, "width": params.width, "num_inference_steps": params.steps}
    sampling |= _named_values(changes, "--set")
    name = reward or params.reward
    judge, chosen = get_reward(name, **_named_values(option, "--option")), load_prompts(table, "train")
    check_encoded(embeddings, chosen, encoded_by)
    sampled = sampled_preferences(
        model,
        embeddings,
        chosen,
        reward=judge,
        settings=params,
        pipeline=sampling,
        dtype=dtype,
        device=device,
        external_lib=entry.embeddings.external_lib,
    )
    if sampled.empty:
        raise PrepareError(
            f"no train prompt of {table} has two pictures that {name} scores differently; set more "
            "preferences.images_per_prompt or another preferences.reward"
        )
    with put_in_place(out) as path:
        sampled.to_parquet(path, index=False, write_page_checksum=True)
    typer.echo(f"{out}: {len(sampled) // 2} pairs")


@app.command()
def pairs(
    model: Model = BASE_MODEL,
    table: Annotated[Path | None, typer.Option(help="Preference table, in place of the one in params.yaml.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = PAIRS,
    device: Device = "cpu",
) -> None:
    """Encode a preference table with a model's VAE, and write data/pairs/."""
    params = load_params(PARAMS).pairs
    table = table or Path(params.table)
    _require_model(model)
    _require_device(device)
    _require_place(out, "pairs")
    pictures = read_pictures(table)
    height, width = common_size(pictures, str(table))
    adapter, model_config = adapter_of(model, height=height, width=width)
    try:
        adapter.latent_shape(model_config)
    except ValueError as error:
        raise PrepareError(f"the pictures of {table} do not fit the model: {error}") from error
    vae = adapter.load_vae(model_config).to(device)
    write_pairs(
        pictures,
        lambda images: adapter.encode(vae, model_config, torch.from_numpy(images).to(device)).cpu(),
        out,
        shard_size=params.shard_size,
        model_digest=_digest(model, IMAGE_SIDE),
        where=str(table),
    )
    typer.echo(f"{out}: {len(pictures)} pairs")


def _encoding_command(data_set: str, model: Path | None, table: Path | None, out: Path | None) -> str:
    """What makes the embeddings of a data set, of which something else may be given than params.yaml says.

    It writes into no data set's own folder what is not all that data set's.
    """
    given = {"--model": model, "--prompts": table, "--out": out}
    if not any(given.values()):
        return f"dvc repro embeddings@{data_set}"
    given["--out"] = out or Path("<folder for --embeddings>")
    options = "".join(f" {option} {shlex.quote(str(path))}" for option, path in given.items() if path is not None)
    return f"python -m flows.prepare embeddings {data_set}{options}"


def _named_values(settings: list[str] | None, flag: str) -> dict[str, Any]:
    """`named_values` of a flag, which an error names."""
    try:
        return named_values(settings or [])
    except ConfigError as error:
        raise PrepareError(f"{flag} {error}") from error


def _require_model(model: Path) -> None:
    if not (model / "model_index.json").is_file():
        own = f"`dvc repro base_model` makes {BASE_MODEL}"
        theirs = "put the published checkpoint there, in diffusers format (docs/data.md, The recipes' data sets)"
        raise PrepareError(f"{model} holds no model; {own if model == BASE_MODEL else theirs}")


def _require_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise PrepareError(f"--device is {device}: give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise PrepareError("--device is cuda, but torch finds no GPU here: give cpu, or run where one is")


def _require_place(out: Path, kind: str) -> None:
    """What is written takes the whole folder's place: it may be new, empty, or hold data of this kind already."""
    if out.exists() and not out.is_dir():
        raise PrepareError(f"--out is {out}, which is a file: give a folder for the {kind}")
    check_folder(out, "--out")
    if out.is_dir() and any(out.iterdir()) and not any(out.glob(f"{kind}-*.safetensors")):
        raise PrepareError(
            f"--out is {out}, which holds something else than {kind} and would be replaced: give a new one"
        )


def _check_gate(reward: float, gate: GateParams) -> None:
    if not gate.min_reward <= reward <= gate.max_reward:
        change = "more" if reward < gate.min_reward else "fewer"
        raise PrepareError(
            f"the base model's held-out reward {reward:.3f} is not within base_model.gate [{gate.min_reward}, "
            f"{gate.max_reward}]; set {change} base_model.model.steps in {PARAMS}"
        )


def _digest(model: Path, parts: tuple[str, ...]) -> str:
    """Of the parts of a model that encode, by which a run knows its data. Raises PrepareError where it has none."""
    found = parts_digest(model, parts)
    if found is None:
        raise PrepareError(f"{model} holds no weights in {', '.join(parts)}: give a whole model in diffusers format")
    return found


if __name__ == "__main__":
    app()

"""The data stages of dvc.yaml: `python -m flows.prepare prompts|base-model|embeddings|preferences|pairs`.

Each reads params.yaml and puts its output in place only when all of it is made, so a stage that fails leaves the old
output as it was. A stage that samples or encodes imports the model families, seconds of work, and the others do not.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.prepare_config import (
    BASE_MODEL,
    BASE_MODEL_METRICS,
    EMBEDDINGS,
    PAIRS,
    PREFERENCES,
    PROMPTS,
    GateParams,
    PrepareError,
    load_params,
)
from flows.terminal import commands
from tasks.base_model import score_base_model, train_base_model
from tasks.dataset import (
    build_prompt_table,
    check_prompt_lengths,
    load_prompts,
    put_in_place,
    write_embeddings,
)

if TYPE_CHECKING:
    from models.base import DiffusionModelBase, DiffusionModelConfig

PARAMS = Path("params.yaml")
app = commands("Make the data sets; usually called by `dvc repro`.")


@app.command()
def prompts() -> None:
    """Read the raw prompt files, split them, and write data/prompts.parquet."""
    params = load_params(PARAMS).prompts
    table = build_prompt_table(
        params.files,
        n_test=params.n_test,
        n_train=params.n_train,
        seed=params.seed,
        target_pattern=params.target_pattern,
    )
    with put_in_place(PROMPTS) as path:
        table.to_parquet(path, index=False)
    counts = ", ".join(f"{split} {n}" for split, n in table["split"].value_counts().items())
    typer.echo(f"{PROMPTS}: {len(table)} prompts ({counts})")


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


@app.command()
def embeddings(
    model: Annotated[Path, typer.Option(help="Folder in diffusers format whose text encoders encode.")] = BASE_MODEL,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = EMBEDDINGS,
    max_sequence_length: Annotated[int | None, typer.Option(help="In place of the one in params.yaml.")] = None,
    dtype: Annotated[str, typer.Option(help="Number format of the text encoders and the embeddings.")] = "float32",
    device: Annotated[str, typer.Option(help="Where they compute: cpu or cuda.")] = "cpu",
) -> None:
    """Encode the prompts once with the model's text encoders, as its own pipeline does, and write data/embeddings/."""
    import torch

    params = load_params(PARAMS).embeddings
    if not (model / "model_index.json").is_file():
        raise PrepareError(f"{model} holds no model; `dvc repro base_model` makes {BASE_MODEL}")
    chosen = [prompt for split in params.splits for prompt in load_prompts(PROMPTS, split)]
    limit = max_sequence_length or params.max_sequence_length
    torch.set_num_threads(params.threads)
    adapter, _ = _adapter_of(model)
    pipeline = adapter.load_text_pipeline(model, getattr(torch, dtype)).to(device)
    check_prompt_lengths(chosen, adapter.prompt_lengths(pipeline, [prompt.prompt for prompt in chosen]), limit)

    @torch.no_grad()
    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        return adapter.encode_prompts(pipeline, texts, limit)

    write_embeddings(
        chosen,
        encode,
        out,
        params.shard_size,
        batch_size=params.batch_size,
        negative_prompt=adapter.negative_prompt if params.negative_prompt is None else params.negative_prompt,
        max_sequence_length=limit,
        model=model.as_posix(),
        model_digest=_digest(sorted([*model.glob("text_encoder*"), *model.glob("tokenizer*")])),
    )
    typer.echo(f"{out}: {len(chosen)} prompts and the negative prompt")


def _adapter_of(model: Path, **pipeline: int) -> "tuple[type[DiffusionModelBase], DiffusionModelConfig]":
    """The adapter of a model folder, and its settings; `pipeline` are sampling fields, such as the height."""
    import models.families  # noqa: F401  registers the adapters
    from models.base import DiffusionModelBase, DiffusionModelConfig
    from models.config import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig, ModelConfig

    sections = ModelConfig(path=str(model)), DiffusionPipelineConfig(**pipeline), DiffusionRolloutAlgoConfig()
    model_config = DiffusionModelConfig.load(*sections)
    return DiffusionModelBase.get_class(model_config), model_config


@app.command()
def preferences() -> None:
    """Sample the base model on the train prompts, and write each one's best and worst picture."""
    from tasks.preferences import sampled_preferences

    params = load_params(PARAMS).preferences
    _require_base_model()
    table = sampled_preferences(BASE_MODEL, EMBEDDINGS, load_prompts(PROMPTS, "train"), **params.model_dump())
    if table.empty:
        raise PrepareError(
            f"no train prompt of {PROMPTS} has two pictures that {params.reward} scores differently; set more "
            "preferences.images_per_prompt or another preferences.reward"
        )
    with put_in_place(PREFERENCES) as path:
        table.to_parquet(path, index=False)
    typer.echo(f"{PREFERENCES}: {len(table) // 2} pairs")


@app.command()
def pairs() -> None:
    """Encode a preference table with the base model's VAE, and write data/pairs/."""
    import torch

    from tasks.pairs import common_size, read_pictures, write_pairs

    params = load_params(PARAMS).pairs
    _require_base_model()
    pictures = read_pictures(Path(params.table))
    height, width = common_size(pictures, params.table)
    adapter, model_config = _adapter_of(BASE_MODEL, height=height, width=width)
    try:
        adapter.latent_shape(model_config)
    except ValueError as error:
        raise PrepareError(f"the pictures of {params.table} do not fit the model: {error}") from error
    vae = adapter.load_vae(model_config)
    write_pairs(
        pictures,
        lambda images: adapter.encode(vae, model_config, torch.from_numpy(images)),
        PAIRS,
        shard_size=params.shard_size,
        model_digest=_digest([BASE_MODEL / "vae"]),
    )
    typer.echo(f"{PAIRS}: {len(pictures)} pairs")


def _require_base_model() -> None:
    if not (BASE_MODEL / "model_index.json").is_file():
        raise PrepareError(f"{BASE_MODEL} holds no model; `dvc repro base_model` makes it")


def _check_gate(reward: float, gate: GateParams) -> None:
    if not gate.min_reward <= reward <= gate.max_reward:
        change = "more" if reward < gate.min_reward else "fewer"
        raise PrepareError(
            f"the base model's held-out reward {reward:.3f} is not within base_model.gate [{gate.min_reward}, "
            f"{gate.max_reward}]; set {change} base_model.model.steps in {PARAMS}"
        )


def _digest(folders: Sequence[Path]) -> str:
    """BLAKE2b of the names and bytes of all files in `folders`."""
    digest = blake2b(digest_size=16)
    for folder in folders:
        for path in sorted(file for file in folder.rglob("*") if file.is_file()):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    app()

# SPDX-License-Identifier: Apache-2.0
"""The data stages of the words model: `python -m flows.prepare_words prompts|base-model`, usually by `dvc repro`.

Its embeddings are made by `python -m flows.prepare embeddings`. As there, an output appears whole or not at all.
"""

import json
from pathlib import Path
from time import perf_counter

import typer

from tasks.cli.terminal import commands
from tasks.config.params import WORDS_METRICS, WORDS_MODEL, WORDS_PROMPTS, GateParams, PrepareError, load_params
from tasks.data.prompts import load_prompts
from tasks.data.words_base_model import score_words_model, train_words_model, words_prompt_table
from tasks.system.files import put_in_place

PARAMS = Path("params.yaml")
app = commands("Make the words model and its data; usually called by `dvc repro`.")


@app.command()
def prompts() -> None:
    """Make up the words, split them, and write data/words/prompts.parquet."""
    table = words_prompt_table(load_params(PARAMS).words.model)
    with put_in_place(WORDS_PROMPTS) as path:
        table.to_parquet(path, index=False)
    counts = ", ".join(f"{split} {n}" for split, n in table["split"].value_counts().items())
    typer.echo(f"{WORDS_PROMPTS}: {len(table)} prompts ({counts})")


@app.command("base-model")
def base_model() -> None:
    """Pre-train the words model, test it on held-out prompts, and write data/words/base_model/."""
    started = perf_counter()
    params = load_params(PARAMS).words
    gate = params.gate
    _check_device(params.device)
    held_out = load_prompts(WORDS_PROMPTS, "test")
    if len(held_out) < gate.prompts:
        raise PrepareError(
            f"words.gate.prompts is {gate.prompts}, but {WORDS_PROMPTS} holds {len(held_out)} test prompts"
        )
    learnt = [prompt for split in ("train", "pretrain") for prompt in load_prompts(WORDS_PROMPTS, split)]
    with put_in_place(WORDS_MODEL) as folder, put_in_place(WORDS_METRICS) as metrics_file:
        metrics = train_words_model(learnt, params.model, folder, device=params.device, processes=params.processes)
        metrics |= score_words_model(
            folder,
            held_out[: gate.prompts],
            params.model,
            sampling_steps=gate.steps,
            images_per_prompt=gate.images_per_prompt,
            seed=gate.seed,
            device=params.device,
            processes=params.processes,
        )
        check_gate(metrics["held_out_reward"], gate)
        metrics_file.write_text(json.dumps(metrics, indent=2) + "\n")
    minutes = (perf_counter() - started) / 60
    typer.echo(f"{WORDS_MODEL}: held-out reward {metrics['held_out_reward']:.3f}, {minutes:.1f} minutes")


def check_gate(reward: float, gate: GateParams) -> None:
    """Raise PrepareError for a held-out reward outside the gate."""
    if not gate.min_reward <= reward <= gate.max_reward:
        change = "higher" if reward < gate.min_reward else "lower"
        raise PrepareError(
            f"the words model's held-out reward {reward:.3f} is not within words.gate [{gate.min_reward}, "
            f"{gate.max_reward}]; set a {change} words.model.target_reward in {PARAMS}"
        )


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise PrepareError(
            f"words.device in {PARAMS} is cuda, but torch finds no GPU here: set cpu, and a smaller words.model"
        )


if __name__ == "__main__":
    app()

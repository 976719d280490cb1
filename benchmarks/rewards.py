# SPDX-License-Identifier: Apache-2.0
"""What rewards cost: 512 generated pictures one by one, in batches, and through the HTTP scorer.

    python -m benchmarks.rewards [--images 512] [--write]
    python -m benchmarks.rewards --only ocr clip_score       # their rows alone, on the screen
    python -m benchmarks.rewards --device cuda [--write]     # those with a model, on a GPU

The pictures come from the quickstart's base model, 24 x 48 pixels, and are enlarged to 512 x 512 where that is the
size in question. CLIP and BLIP models have their published sizes and random weights: speed does not depend on them.
Each is built when its row comes, and deleted after it; the largest, ViT-H/14, took 8 GB of memory. On the CPU one
thread each, and CPU time, client and server together, which says the same on a busy machine as on an idle one; on a GPU
wall time, for which the machine must be idle. --write puts the table into docs/rewards.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.docs import put_table
from tasks.data.prompts import Prompt, load_prompts
from tasks.rewards import Reward, get_reward
from tasks.rewards.statistics import picture_statistics

DOCS = Path("docs/rewards.md")
BATCH = 32
SMALL, LARGE = (24, 48), (512, 512)


@dataclass(frozen=True)
class Published:
    """A model's published sizes: (width, layers, heads) of its two encoders, the picture's patches, the embedding."""

    architecture: str
    patch: int
    vision: tuple[int, int, int]
    text: tuple[int, int, int]
    embedding: int


CLIP_B32 = Published("CLIPModel", 32, (768, 12, 12), (512, 12, 8), 512)
CLIP_L14 = Published("CLIPModel", 14, (1024, 24, 16), (768, 12, 12), 768)
CLIP_H14 = Published("CLIPModel", 14, (1280, 32, 16), (1024, 24, 16), 1024)
# ImageReward's: BLIP-large with BERT-base as its text encoder.
BLIP_L16 = Published("BlipForImageTextRetrieval", 16, (1024, 24, 16), (768, 12, 12), 256)


@dataclass(frozen=True)
class Case:
    """One row: a reward with options, the pictures' size, and how many at most on the CPU, where 512 would take hours.

    `model` and `head`, the widths of a head's layers, say what is built for it.
    """

    reward: str
    size: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    images: int = 512
    note: str = ""
    model: Published | None = None
    head: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """Seconds for 1,000 pictures."""

    case: Case
    images: int
    alone: float
    batched: float
    http: float | None


CASES = (
    Case("picture statistics", SMALL),
    Case("picture statistics", LARGE),
    Case("brightness", LARGE),
    Case("jpeg_incompressibility", SMALL),
    Case("jpeg_incompressibility", LARGE),
    Case("shapes", LARGE),
    Case("ocr", SMALL, note="whole picture"),
    Case("ocr", LARGE, {"detect": True, "upscale": 1}, note="detect"),
    Case("clip_score", LARGE, note="ViT-B/32", model=CLIP_B32),
    Case("hps", LARGE, images=8, note="ViT-H/14", model=CLIP_H14),
    Case("pickscore", LARGE, images=8, note="ViT-H/14", model=CLIP_H14),
    Case("aesthetic", LARGE, images=16, note="ViT-L/14, linear head", model=CLIP_L14, head=(768, 1)),
    Case("clip_preference", LARGE, images=16, note="ViT-L/14, linear head", model=CLIP_L14, head=(2 * 768, 1)),
    Case(
        "image_reward",
        LARGE,
        images=16,
        note="BLIP ViT-L/16 at 224, its head of five layers",
        model=BLIP_L16,
        head=(768, 1024, 128, 64, 16, 1),
    ),
)
"""Every local reward, and the picture statistics."""


def generate(count: int, prompts: Sequence[Prompt]) -> np.ndarray:
    """Pictures [count, 24, 48, 3] of the base model, eight steps each."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained("data/base_model")
    pipeline.set_progress_bar_config(disable=True)
    settings = {"height": SMALL[0], "width": SMALL[1], "num_inference_steps": 8, "true_cfg_scale": 1.0}
    pictures: list[Any] = []
    for start in range(0, count, 64):
        texts = [prompt.prompt for prompt in prompts[start : start + 64]]
        pictures += pipeline(texts, generator=torch.Generator().manual_seed(start), **settings).images
    return np.stack([np.asarray(picture) for picture in pictures])


def enlarged(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pictures of that height and width."""
    if pictures.shape[1:3] == size:
        return pictures
    resize = [Image.fromarray(p).resize(size[::-1], Image.Resampling.BICUBIC) for p in pictures]
    return np.stack([np.asarray(picture) for picture in resize])


def save_random_model(published: Published, folder: Path) -> None:
    """The model with random weights, at 224 x 224 pixels, and a tokenizer of single characters."""
    import transformers

    def encoder(width: int, layers: int, heads: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        return sizes | {"num_attention_heads": heads, "initializer_range": 0.02}

    letters = [chr(code) for code in range(33, 127)]
    size = {"height": 224, "width": 224}
    if published.architecture == "CLIPModel":
        words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        tokenizer = transformers.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
        processor = transformers.CLIPProcessor(transformers.CLIPImageProcessor(), tokenizer)
    else:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
        special = {"bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
        tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
        processor = transformers.BlipProcessor(transformers.BlipImageProcessor(size=size), tokenizer)
    # A smaller table of embeddings than the published one: looking a row up takes no time in either.
    text = encoder(*published.text) | special | {"vocab_size": len(words)}
    vision = encoder(*published.vision) | {"patch_size": published.patch, "image_size": size["height"]}
    network = getattr(transformers, published.architecture)
    embedding = {"projection_dim": published.embedding, "image_text_hidden_size": published.embedding}
    config = network.config_class(text_config=text, vision_config=vision, **embedding)
    # Half the disk; the reward loads it in its own number format.
    network(config).bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)


def save_random_head(widths: Sequence[int], path: Path) -> None:
    """Linear layers of these widths."""
    from safetensors.torch import save_file

    tensors = {}
    for number, (into, out) in enumerate(pairwise(widths)):
        tensors |= {f"{number}.weight": torch.randn(out, into), f"{number}.bias": torch.zeros(out)}
    save_file(tensors, path)


@contextmanager
def built(case: Case, device: str) -> Iterator[Case]:
    """The case, with options that name its random model and head as long as this lasts, and the model's device."""
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), dict(case.options)
        if case.model:
            save_random_model(case.model, folder / "model")
            options |= {"model": str(folder / "model"), "processor": str(folder / "model"), "device": device}
        if case.head:
            save_random_head(case.head, folder / "head.safetensors")
            options["head"] = str(folder / "head.safetensors")
        yield replace(case, options=options)


@contextmanager
def served(case: Case) -> Iterator[tuple[str, psutil.Process]]:
    """The case's reward in a server process of its own: its address, and the process."""
    options = [word for name, value in case.options.items() for word in ("--option", f"{name}={value}")]
    command = [sys.executable, "-m", "tasks.rewards.serve", "--reward", case.reward, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " is served at " not in line:
            raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
        yield line.rpartition(" ")[2].strip(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def seconds_a_thousand(
    score: Callable[[np.ndarray, Sequence[Prompt]], Any],
    images: np.ndarray,
    prompts: Sequence[Prompt],
    batch: int,
    server: psutil.Process | None = None,
    *,
    wall: bool = False,
) -> float:
    """CPU seconds, this process's and the server's, or `wall` seconds for 1,000 pictures in calls of `batch`.

    One call before them warms up.
    """

    def clock() -> float:
        if wall:
            return time.perf_counter()
        return time.process_time() + (sum(server.cpu_times()[:2]) if server else 0.0)

    score(images[:batch], prompts[:batch])
    start = clock()
    for first in range(0, len(images), batch):
        score(images[first : first + batch], prompts[first : first + batch])
    return (clock() - start) * 1000 / len(images)


def measure(case: Case, pictures: np.ndarray, prompts: Sequence[Prompt], device: str) -> Row:
    """One row of the table."""
    wall = device == "cuda"
    count = len(pictures) if wall else min(case.images, len(pictures))
    images, asked = enlarged(pictures[:count], case.size), prompts[:count]
    if case.reward == "picture statistics":
        alone, batched = (
            seconds_a_thousand(lambda part, _: picture_statistics(part), images, asked, size) for size in (1, BATCH)
        )
        return Row(case, count, alone, batched, None)
    reward: Reward | None = get_reward(case.reward, **case.options)
    alone, batched = (seconds_a_thousand(reward, images, asked, size, wall=wall) for size in (1, BATCH))
    reward = None  # The server holds its own, and two of the large ones may be more than the memory.
    with served(case) as (address, server):
        http = seconds_a_thousand(get_reward("remote", url=address), images, asked, BATCH, server, wall=wall)
    return Row(case, count, alone, batched, http)


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = [
        f"| Reward | Pixels | Pictures timed | One by one | In batches of up to {BATCH} | HTTP, the same batches |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        note = f" ({row.case.note})" if row.case.note else ""
        name = f"`{row.case.reward}`" if " " not in row.case.reward else row.case.reward
        numbers = [f"{value:.3g}" if value is not None else "" for value in (row.alone, row.batched, row.http)]
        size = "{} x {}".format(*row.case.size)
        lines.append(f"| {name}{note} | {size} | {row.images} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Generate, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(case.reward for case in CASES))
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the rewards with a model alone")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="rewards, if not all")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    given = parser.parse_args()
    if given.only and given.write:
        parser.error("--write puts the whole table into the docs: leave out --only")
    on_gpus = given.device == "cuda"
    cases = [case for case in CASES if case.reward in (given.only or names) and (case.model or not on_gpus)]
    on_cpu = [name for name in given.only or () if all(case.reward != name for case in cases)]
    if on_cpu:
        parser.error(f"--only {', '.join(on_cpu)}: not with --device cuda, which is for rewards with a model")
    torch.set_num_threads(1)
    known = load_prompts("data/prompts.parquet")
    chosen = [known[i % len(known)] for i in range(given.images)]
    # What `shapes` wants to know; the others do not look at it.
    scene = {"count": 3, "colour": "red", "shape": "circle"}
    prompts = [Prompt(p.uid, p.prompt, p.target, scene, p.source) for p in chosen]
    pictures = generate(given.images, prompts)
    rows = []
    for case in cases:
        with built(case, given.device) as ready:
            rows.append(measure(ready, pictures, prompts, given.device))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if given.write:
        script = "rewards.py --device cuda" if on_gpus else "rewards.py"
        put_table(DOCS, script, table(rows).rstrip())


if __name__ == "__main__":
    main()

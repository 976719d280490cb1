"""What rewards cost in CPU time: 512 generated pictures one by one, in batches, and through the HTTP scorer.

    python -m benchmarks.rewards [--images 512] [--only ocr clip_score] [--write]

The pictures come from the quickstart's base model, 24 x 48 pixels, and are enlarged to 512 x 512 where that is the
size in question. CLIP models have their published sizes and random weights: speed does not depend on them. One CPU
thread each. CPU time, client and server together, says the same on a busy machine as on an idle one. --write puts
the table into docs/rewards.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from tasks.dataset import Prompt, load_prompts
from tasks.picture_statistics import picture_statistics
from tasks.rewards import Reward, get_reward

DOCS = Path("docs/rewards.md")
BEGIN, END = "<!-- benchmarks/rewards.py -->\n", "<!-- end -->\n"
BATCH = 32
SMALL, LARGE = (24, 48), (512, 512)


@dataclass(frozen=True)
class Case:
    """One row: a reward with options, the pictures' size, and at most how many, where 512 would take too long."""

    reward: str
    size: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    images: int = 512
    note: str = ""


@dataclass(frozen=True)
class Row:
    """CPU seconds for 1,000 pictures."""

    case: Case
    images: int
    alone: float
    batched: float
    http: float | None


def cases(folder: Path) -> list[Case]:
    """Every local reward. The CLIP folders are made on demand, since they are large."""
    head = folder / "head.safetensors"
    return [
        Case("picture statistics", SMALL),
        Case("picture statistics", LARGE),
        Case("brightness", LARGE),
        Case("jpeg_incompressibility", SMALL),
        Case("jpeg_incompressibility", LARGE),
        Case("shapes", LARGE, images=128),
        Case("ocr", SMALL, note="whole picture"),
        Case("ocr", LARGE, {"detect": True, "upscale": 1}, 32, "detect"),
        Case("clip_score", LARGE, {"model": str(folder / "clip_b32")}, 64, "ViT-B/32"),
        Case("aesthetic", LARGE, {"model": str(folder / "clip_l14"), "head": str(head)}, 16, "ViT-L/14, linear head"),
    ]


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


def save_random_clip(folder: Path) -> None:
    """CLIP ViT-B/32 or ViT-L/14 with random weights and a tokenizer of single characters."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    large = folder.name == "clip_l14"
    vision = {"patch_size": 32}
    text: dict[str, int] = {}
    if large:
        vision = {"patch_size": 14, "hidden_size": 1024, "intermediate_size": 4096}
        vision |= {"num_hidden_layers": 24, "num_attention_heads": 16}
        text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    letters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    # A smaller table of embeddings than the published one: looking a row up takes no time in either.
    text |= {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768 if large else 512)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    CLIPProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(folder)


def save_random_head(path: Path) -> None:
    """A linear head on ViT-L/14's embedding."""
    from safetensors.torch import save_file

    save_file({"0.weight": torch.randn(1, 768), "0.bias": torch.zeros(1)}, path)


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
) -> float:
    """CPU seconds for 1,000 pictures in calls of `batch`, after one call to warm up."""

    def clock() -> float:
        return time.process_time() + (sum(server.cpu_times()[:2]) if server else 0.0)

    score(images[:batch], prompts[:batch])
    start = clock()
    for first in range(0, len(images), batch):
        score(images[first : first + batch], prompts[first : first + batch])
    return (clock() - start) * 1000 / len(images)


def measure(case: Case, pictures: np.ndarray, prompts: Sequence[Prompt]) -> Row:
    """One row of the table."""
    count = min(case.images, len(pictures))
    images, asked = enlarged(pictures[:count], case.size), prompts[:count]
    if case.reward == "picture statistics":
        alone, batched = (
            seconds_a_thousand(lambda part, _: picture_statistics(part), images, asked, size) for size in (1, BATCH)
        )
        return Row(case, count, alone, batched, None)
    reward: Reward = get_reward(case.reward, **case.options)
    alone, batched = (seconds_a_thousand(reward, images, asked, size) for size in (1, BATCH))
    with served(case) as (address, server):
        http = seconds_a_thousand(get_reward("remote", url=address), images, asked, BATCH, server)
    return Row(case, count, alone, batched, http)


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = [
        f"| Reward | Pixels | Pictures timed | One by one | In batches of {BATCH} | HTTP, batches of {BATCH} |",
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
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="rewards, if not all")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = load_prompts("data/prompts.parquet")
    chosen = [known[i % len(known)] for i in range(given.images)]
    # What `shapes` wants to know; the others do not look at it.
    scene = {"count": 3, "colour": "red", "shape": "circle"}
    prompts = [Prompt(p.uid, p.prompt, p.target, scene, p.source) for p in chosen]
    pictures = generate(given.images, prompts)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name)):
            if given.only and case.reward not in given.only:
                continue
            model = case.options.get("model")
            if model and not Path(model).exists():
                save_random_clip(Path(model))
                save_random_head(Path(name) / "head.safetensors")
            rows.append(measure(case, pictures, prompts))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if given.write:
        text = DOCS.read_text()
        pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        DOCS.write_text(pattern.sub(lambda _: BEGIN + table(rows) + END, text))


if __name__ == "__main__":
    main()

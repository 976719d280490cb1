# SPDX-License-Identifier: Apache-2.0
"""What becomes of a VeRL-Omni script: nothing is lost, the recipe is valid, and its silent defaults come along."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.algorithms import DiffusionAdvantageEstimator
from models.families.flux import Flux
from models.families.flux_2_klein import Flux2Klein
from models.families.qwen_image import QwenImage
from models.families.stable_diffusion_3 import StableDiffusion3
from models.families.wan import Wan
from models.families.z_image import ZImage
from tasks.config.errors import ConfigError, field_paths
from tasks.config.migration.outcome import Elsewhere, Problem, Taken
from tasks.config.migration.rules import DEFAULTS, ESTIMATORS, FAMILIES, NUMBERS, RULES, SECTIONS, VERL_OMNI
from tasks.config.migration.script import Override, read_overrides
from tasks.config.migration.translate import Translation, translate
from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.config.unread import without_effect

SCRIPT = r"""#!/bin/bash
# A script in the reference's manner: data.seed=1 in a comment is none of its overrides.
GPUS=${GPUS:-4}
TP=1
export MODEL=${MODEL:-Some/Model-1.5}
here=$(dirname "$0")
if [ "$GPUS" = 8 ]; then
    micro=8
else
    micro=6
fi

CUDA_VISIBLE_DEVICES=0,1 python3 -m verl_omni.trainer.main_diffusion \
    data.train_files=$HOME/train.parquet \
    data.train_batch_size=8 \
    actor_rollout_ref.model.algorithm=mix_grpo \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.target_modules="['to_q','to_k']" \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$micro \
    actor_rollout_ref.rollout.name=vllm_omni \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.agent.num_workers=$((GPUS / TP)) \
    actor_rollout_ref.rollout.algo.sample_strategy=progressive \
    +actor_rollout_ref.rollout.engine_kwargs.vllm_omni.request_batch_max_wait_ms=10 \
    reward.custom_reward_function.path=$here/jpeg_compressibility.py \
    reward.custom_reward_function.name=compute_score \
    trainer.logger='["console", "wandb"]' \
    trainer.n_gpus_per_node=$GPUS \
    trainer.save_freq=-1 \
    trainer.no_such_field=1 \
    trainer.total_training_steps=20 "$@"
"""

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
CORRECTION = "algorithm.rollout_correction"
RUN = f"data.train_batch_size=256\n{ROLLOUT}.n=16\n"


def made(script: str = SCRIPT) -> Translation:
    return translate(read_overrides(script))


def test_a_script_is_read_as_a_shell_would_read_it() -> None:
    found = {override.path: override.value for override in read_overrides(SCRIPT)}
    assert found["data.train_files"] == "$HOME/train.parquet"
    assert found["actor_rollout_ref.model.path"] == "Some/Model-1.5"
    assert found["actor_rollout_ref.model.target_modules"] == ["to_q", "to_k"]
    assert found["actor_rollout_ref.actor.optim.lr"] == 3e-4
    assert found["actor_rollout_ref.rollout.agent.num_workers"] == 4
    assert found["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == 6
    assert found["trainer.logger"] == ["console", "wandb"]
    assert "data.seed" not in found
    assert len(found) == SCRIPT.count("=", SCRIPT.index("main_diffusion"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=$((7 / 2))", 3),
        ("x=3; y=$x", None),
        ("N=3\na.b=$((N * (N + 1)))", 12),
        ("N=3\na.b=${M:-$N}", 3),
        ("a.b=$(nproc)", "$SET_BY_A_COMMAND"),
        ("+a.b=1", 1),
        ("++a.b=null", None),
        ("a.b=1\na.b=2", 2),
        ("a.b='$0 costs'", "$0 costs"),
    ],
)
def test_values(text: str, value: Any) -> None:
    found = read_overrides(text + "\na.c=0")
    assert {one.path: one.value for one in found}.get("a.b") == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("M=a/Wan\nrun a.b=out/${M##*/} a.c=1 # a.d=2", {"a.b": "out/${M##*/}", "a.c": 1}),
        ("run a.b=one#1 \\\n  a.c=1 # don't", {"a.b": "one#1", "a.c": 1}),
        ("export M=/m; export N=4\na.b=$M a.c=$N", {"a.b": "/m", "a.c": 4}),
        ("N=2\nif true; then N=5; fi\na.b=$N", {"a.b": 5}),
        ("a.b={c:1,d:{e:x}} a.c='{\"f\":2}'", {"a.b": {"c": 1, "d": {"e": "x"}}, "a.c": {"f": 2}}),
    ],
)
def test_a_line_is_taken_apart_as_a_shell_and_hydra_do(text: str, found: dict[str, Any]) -> None:
    assert {one.path: one.value for one in read_overrides(text)} == found


@pytest.mark.parametrize("value", ["${a.b}/x", "$1/x", "${2:-x}", "${M##*/}", "`date`"])
def test_what_nothing_here_fills_in_is_told(value: str) -> None:
    lines = made(f"trainer.default_local_dir='{value}' data.train_batch_size='{value}'").lines
    assert "in it is not filled in here: write what it stands for" in str(lines[0])
    assert str(lines[1]).endswith("set elsewhere: set it yourself")


def test_of_two_fields_that_are_one_here_the_order_does_not_choose() -> None:
    """The update's micro-batch goes before the rollout's, and the data's seed before the rollout's."""
    rollout = "actor_rollout_ref.rollout"
    lines = ["data.seed=7", f"{rollout}.seed=8", f"{rollout}.n=8", f"{rollout}.max_num_seqs=4"]
    lines.append("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8")
    for given in (lines, lines[::-1]):
        config = made(" ".join(given)).config
        assert config["trainer"]["seed"] == 7
        assert config["actor_rollout_ref"]["rollout"]["micro_batch_size"] == 8


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(ConfigError, match=r"the script, line 2 cannot be read as a shell would .*: mend its quotes"):
        read_overrides("a.b=1\na.c='open\n")
    with pytest.raises(ConfigError, match=r"holds no override of the form section\.field=value"):
        read_overrides("echo hello\n")


def test_a_script_of_two_runs_is_refused() -> None:
    """Their overrides would be mixed; a run that stands there twice, as in both branches of an if, is one."""
    run = "python3 -m verl_omni.trainer.main_diffusion a.b={}"
    with pytest.raises(ConfigError, match="the script starts 2 runs, whose overrides would be mixed: give one of them"):
        read_overrides(f"{run.format(1)} a.c=2\n{run.format(2)}\n")
    again = f"if [ -z $X ]; then {run.format(1)}; else {run.format(1)}; fi\n"
    assert read_overrides(f"python3 -m verl_omni.utils.download --to data\n{again}")[-1] == Override("a.b", 1)


def test_every_override_has_a_line_and_the_recipe_is_valid() -> None:
    one = made()
    assert one.problem is None
    assert [line.override.path for line in one.lines] == [override.path for override in read_overrides(SCRIPT)]
    kinds = {line.override.path: line.kind for line in one.lines}
    assert kinds.pop("trainer.no_such_field") == "unknown"
    assert "unknown" not in kinds.values()
    assert kinds["data.train_batch_size"] == "taken"
    assert kinds["actor_rollout_ref.rollout.algo.sample_strategy"] == "renamed"
    assert kinds["actor_rollout_ref.rollout.agent.num_workers"] == "explained"


def test_what_is_written_is_what_was_meant() -> None:
    config = TrainConfig.model_validate(yaml.safe_load(yaml.safe_dump(made().config)))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.algorithm.name == "mix_grpo"
    # The script's own; their defaults for what this algorithm does not read, as dpo_beta, are left out.
    assert list(without_effect(config)) == ["actor_rollout_ref.model.target_modules"]
    assert rollout.algo.sde_window_mode == "progressive"
    assert rollout.vllm_omni.request_batch_max_wait_ms == 10
    assert (actor.use_kl_loss, actor.kl_loss_type, actor.kl_loss_coef) == (True, "flow_grpo", 0.001)
    assert config.reward.functions["reward"].reward == "jpeg_compressibility"
    assert config.trainer.save_freq == 0
    assert config.tracking.also == ("wandb",)
    assert (rollout.placement, rollout.num_actors, config.trainer.n_gpus_per_node) == ("colocated", 4, 4)
    # 4 prompts of 16 samples on 4 ranks are 16 a rank, which 6 does not divide.
    assert actor.ppo_micro_batch_size_per_gpu == rollout.micro_batch_size == 4


@pytest.mark.parametrize(
    ("model", "loss", "shift"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", "dpo", 3.0),
        ("Qwen/Qwen-Image", "dpo", None),
        ("stabilityai/stable-diffusion-3.5-medium", "diffusion_nft", None),
    ],
)
def test_pairs_are_noised_at_the_levels_of_their_scheduler(model: str, loss: str, shift: float | None) -> None:
    """Their levels are taken from the model's own table, and Stable Diffusion 3's alone has a static shift."""
    one = made(f"actor_rollout_ref.model.path={model}\nactor_rollout_ref.model.algorithm={loss}")
    assert one.config["algorithm"].get("logit_normal_shift") == shift


@pytest.mark.parametrize(("loss", "shared"), [("dance_grpo", True), ("flow_grpo", None)])
def test_wans_samples_of_a_prompt_start_from_the_same_noise(loss: str, shared: bool | None) -> None:
    """As their pipeline has it by default, without a field of the script's."""
    one = made(f"actor_rollout_ref.model.path=Wan-AI/Wan2.2-TI2V-5B\nactor_rollout_ref.model.algorithm={loss}")
    assert one.config["actor_rollout_ref"]["rollout"]["algo"].get("init_same_noise") == shared


@pytest.mark.parametrize(
    ("lines", "divided"),
    [
        ("", True),
        ("actor_rollout_ref.model.lora_rank=32", None),
        ("actor_rollout_ref.actor.use_no_sync_for_gradient_accumulation=true", False),
        ("actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=false", True),
    ],
)
def test_gradients_are_divided_as_often_as_theirs(lines: str, divided: bool | None) -> None:
    """After every pass, unless the script says otherwise; of all weights this is half of the memory."""
    one = made(f"actor_rollout_ref.model.path=Qwen/Qwen-Image\n{lines}")
    assert one.config["actor_rollout_ref"]["actor"]["fsdp_config"].get("shard_gradients") == divided


def test_the_rollout_of_its_own_gpus() -> None:
    config = made(
        SCRIPT.replace(
            "trainer.logger=",
            "actor_rollout_ref.rollout.nnodes=2 actor_rollout_ref.rollout.n_gpus_per_node=4 "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.logger=",
        )
    ).config
    rollout = config["actor_rollout_ref"]["rollout"]
    assert (rollout["placement"], rollout["num_actors"], rollout["weight_transport"]) == ("separate", 4, "collective")
    assert rollout["vllm_omni"]["tensor_parallel_size"] == 2


def test_a_schedule_of_theirs_is_one_of_transformers() -> None:
    optim = "actor_rollout_ref.actor.optim"
    cosine = f"{optim}.lr_scheduler_type=cosine\n{optim}.num_cycles=0.5\n{optim}.min_lr_ratio=0.1\n"
    for script, name, kwargs in (
        (cosine, "cosine_with_min_lr", {"num_cycles": 0.5, "min_lr_rate": 0.1}),
        (cosine.replace("0.1", "0.0"), "cosine", {"num_cycles": 0.5}),
        (f"{optim}.lr_scheduler_type=constant\n{optim}.lr_warmup_steps=3", "constant_with_warmup", None),
        (f"{optim}.lr_scheduler_type=constant\n{optim}.min_lr_ratio=0.1", "constant", None),
        (f"{optim}.lr_scheduler_type=linear\n{optim}.num_cycles=0.5", "linear", None),
    ):
        one = made(f"{script}\ndata.train_batch_size=256\nactor_rollout_ref.rollout.n=16")
        settings = one.config["actor_rollout_ref"]["actor"]["optim"]
        assert one.problem is None
        assert (settings["lr_scheduler_type"], settings.get("lr_scheduler_kwargs")) == (name, kwargs)
        assert all(line.kind != "unknown" for line in one.lines)


def test_one_that_is_not_valid_says_why() -> None:
    assert "rollout.n is 1" in str(made("data.train_batch_size=8\nactor_rollout_ref.rollout.n=1").problem)


def test_defaults_that_differ_come_along() -> None:
    """Every row of docs/defaults.md whose other side is a value a run could have, but for the reasons given."""
    meant_otherwise = {
        "actor_rollout_ref.rollout.pipeline.max_sequence_length": "embeddings are made before",
        "actor_rollout_ref.rollout.pipeline.num_frames": "null means pictures, as 1 does there",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "how weights travel shapes no run",
        "actor_rollout_ref.model.target_modules": "each family names its linear layers",
        "trainer.total_training_steps": "follows from the number of prompts, which a script does not say",
        "trainer.max_actor_ckpt_to_keep": "keeping all of them fills a disk",
    }
    page = (Path(__file__).parents[3] / "docs/defaults.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `[^`]*` \| `([^`]+)`", page, re.MULTILINE)
    config = flat(made(f"{ACTOR}.use_kl_loss=True\n{ROLLOUT}.name=vllm_omni").config)
    assert len(rows) > 15
    for path, theirs in rows:
        if path in meant_otherwise:
            continue
        expected = yaml.safe_load(theirs)
        assert (
            float(config[path]) == max(float(expected), 0)
            if not isinstance(expected, str)
            else config[path] == expected
        ), path


@pytest.mark.parametrize(
    ("given", "eager"),
    [
        (f"{ROLLOUT}.name=vllm_omni", False),
        (f"{ROLLOUT}.name=vllm_omni\n{ROLLOUT}.enforce_eager=True", True),
        (f"{ROLLOUT}.name=diffusers", None),
    ],
)
def test_vllm_omni_compiles_as_it_does_there(given: str, eager: bool | None) -> None:
    assert flat(made(f"{RUN}{given}").config).get(f"{ROLLOUT}.vllm_omni.enforce_eager") is eager


def test_both_sides_compute_in_the_format_of_their_rollout() -> None:
    """bfloat16 where a script is silent; fp32 weights in the trainer's memory say nothing of it."""
    for given in ("", f"{ACTOR}.fsdp_config.model_dtype=fp32", f"{ACTOR}.fsdp_config.model_dtype=bfloat16"):
        config = flat(made(f"{RUN}{given}").config)
        assert (config[f"{MODEL}.dtype"], config[f"{ACTOR}.fsdp_config.param_dtype"]) == ("bfloat16", "bfloat16"), given
    assert flat(made(f"{RUN}{ROLLOUT}.dtype=float32").config)[f"{MODEL}.dtype"] == "float32"


ODD: tuple[Any, ...] = (
    None,
    "auto",
    "null",
    1,
    -1,
    2.5,
    True,
    [],
    [1],
    {},
    {"a": 1},
    "$ELSEWHERE",
    "${x.y}",
    float("inf"),
    10**30,
    "0.5_2",
    "",
)


def line_of(one: Translation, path: str) -> str:
    return next(str(line) for line in one.lines if line.override.path == path)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_whatever_a_value_is_it_gets_a_line(value: Any) -> None:
    paths = [*RULES, *NUMBERS, *(f"{section}x" for section in SECTIONS), "reward", ROLLOUT, MODEL]
    odd = [Override(path, value) for path in dict.fromkeys(paths)]
    assert len(translate(odd).lines) == len(odd)
    given = dict.fromkeys(paths, 2)
    for path, rule in RULES.items():  # each beside others that are right
        if callable(rule) and VERL_OMNI.unusable(path, value) is None:
            assert isinstance(rule(path, value, given | {path: value}), Taken | Elsewhere | Problem)


@pytest.mark.parametrize("field", ["trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.n", f"{ROLLOUT}.nnodes"])
def test_a_variable_of_the_outside_goes_into_no_field(field: str) -> None:
    one = made(f"{RUN}{ACTOR}.ppo_micro_batch_size_per_gpu=8\n{field}=$SLURM_NNODES\n")
    assert line_of(one, field) == f"explained {field}=$SLURM_NNODES: set elsewhere: set it yourself"
    assert "SLURM" not in yaml.safe_dump(one.config)


@pytest.mark.parametrize(
    ("override", "right"),
    [
        (f"{ROLLOUT}.n=null", "a whole number from 1 to 10000000"),
        ("trainer.save_freq=null", "a whole number from -1 to 10000000"),
        ("trainer.save_freq=abc", "a whole number from -1 to 10000000"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto", "a whole number from 1 to 10000000"),
        ("data.val_max_samples=all", "a whole number from -1 to 10000000"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=some", "a number from 0 to 10000000"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_problem(override: str, right: str) -> None:
    path, _, value = override.partition("=")
    one = made(f"{RUN}trainer.total_training_steps=10\n{ACTOR}.ppo_micro_batch_size_per_gpu=8\n{override}\n")
    assert f"{path} is {yaml.safe_load(value)!r} and should be {right}" in str(one.problem)
    assert line_of(one, path).startswith(f"problem   {path}=")


def test_null_is_what_a_field_is_if_it_is_left_out() -> None:
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    assert made(f"{RUN}{micro}=null").config == made(RUN).config
    assert line_of(made(f"{RUN}{micro}=null"), micro).startswith("explained")


def test_a_section_is_no_field() -> None:
    assert f"{MODEL} is a section, to which 'x' is given" in str(made(f"{RUN}{MODEL}=x\n{MODEL}.path=y").problem)
    one = made(f"{RUN}reward.reward_functions.x=1")
    assert "should be a section: give reward.reward_functions.x.path" in str(one.problem)


def test_what_is_no_override_of_one_field_has_a_line_too() -> None:
    command = "OMP=1 python3 -m verl_omni.trainer.main_diffusion --config-name=own --config-path conf {} 2>&1 | tee a=b"
    words = f"diffusion/model_engine=veomni_diffusion +x@y.z=a ~trainer.logger ~data.seed=1 plain=3 {MODEL}.path=m $@"
    lines = {line.override.path: str(line) for line in translate(read_overrides(command.format(words))).lines}
    assert list(lines) == [
        *("--config-name", "--config-path", "diffusion/model_engine", "+x@y.z", "~trainer.logger", "~data.seed"),
        *("plain", f"{MODEL}.path"),
    ]
    assert lines.pop("diffusion/model_engine").startswith("explained diffusion/model_engine=veomni_diffusion: fsdp2")
    assert lines.pop(f"{MODEL}.path").startswith("taken")
    assert all(line.startswith("unknown") for line in lines.values()), lines
    assert lines["--config-path"].startswith("unknown   --config-path=conf: ")
    assert lines["~trainer.logger"] == "unknown   ~trainer.logger: nothing is taken away here: leave the field out"


def test_of_other_commands_no_word_is_taken() -> None:
    for script in (
        "docker run -e A=b image --flag=x\na.b=c",
        "A=1 B=2\nexport C=3\na.b=c",
        "torchrun --nproc_per_node=8 --master=h train.py a.b=c > log=x",
        "ray job submit --address=x -- python3 -m verl_omni.trainer.main_diffusion a.b=c && echo d=e",
    ):
        assert [one.path for one in read_overrides(script)] == ["a.b"], script


def test_a_bracket_in_quotes_or_a_comment_closes_no_array() -> None:
    script = """ARGS=(   # text :)
      a.b=1  # more :)
      "a.c=x) y" 'a.d=(' a.e=\\)
      plain=2
    )  # all :)
    python -m verl_omni.trainer.main_diffusion "${ARGS[@]}" a.f=3
    """
    found = {override.path: override.value for override in read_overrides(script)}
    assert found == {"a.b": 1, "a.c": "x) y", "a.d": "(", "a.e": ")", "plain": 2, "a.f": 3}


def test_an_array_is_of_the_command_too() -> None:
    script = """NAMES=(one two)
    local -a ARGS=(a.b=1 plain=2)
    MORE+=(
        ~a.c
        "a.d=$((6 / 2))"  # three
        model_engine=veomni
    )
    OUT=3
    """
    found = [str(override) for override in read_overrides(script)]
    assert found == ["a.b=1", "plain=2", "~a.c", "a.d=3", "model_engine=veomni"]


def test_a_line_that_is_commented_out_of_a_command_takes_no_other_with_it() -> None:
    found = read_overrides("python -m verl_omni.main \\\n a.b=1 \\\n # a.c=2 \\\n a.d=3\n")
    assert [str(override) for override in found] == ["a.b=1", "a.d=3"]


def test_what_is_added_to_a_variable_is_of_the_command_too() -> None:
    script = """EXTRA="a.b=1 a.c=2"
    EXTRA+=" a.c=3 a.d=$((2 * 2))"
    export EXTRA+=' a.e=5'
    NEW+="a.f=6"
    echo $EXTRA $NEW
    EXTRA=
    python -m verl_omni.trainer.main a.g=7 $EXTRA
    """
    found = [str(override) for override in read_overrides(script)]
    assert found == ["a.b=1", "a.c=3", "a.d=4", "a.e=5", "a.f=6", "a.g=7"]


def test_a_variable_in_a_folder_is_told() -> None:
    line = line_of(made(f"{RUN}{MODEL}.path=$HOME/Qwen-Image"), f"{MODEL}.path")
    assert line.endswith("a folder in diffusers format; $HOME in it is not filled in here: write what it stands for")


def test_a_training_engine_that_is_not_here_is_a_problem() -> None:
    assert "megatron is no training engine here" in str(made(f"{RUN}diffusion/model_engine=megatron").problem)
    assert made(f"python -m verl_omni.main {RUN} model_engine=veomni".replace("\n", " ")).problem is None


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [("0.9_3", [1 / 3, 1 / 0.9]), ("0.5_5", [0.2, 2.0]), ("'\"0.5_2.0\"'", [0.5, 2.0]), ("4", [0.25, 4.0])],
)
def test_bounds_of_k1_are_upside_down(threshold: str, bounds: list[float]) -> None:
    script = f"{RUN}{CORRECTION}.rollout_rs=token_k1\n{CORRECTION}.rollout_rs_threshold={threshold}\n"
    one = made(script + f"{MODEL}.algorithm=flow_grpo")
    assert one.problem is None
    correction = TrainConfig.model_validate(one.config).algorithm.rollout_correction
    assert correction.rollout_rs == "step_k1"
    assert correction.rollout_rs_threshold == pytest.approx(tuple(bounds))


def test_other_bounds_of_rollout_correction() -> None:
    largest = made(f"{RUN}{CORRECTION}.rollout_rs=seq_max_k3\n{CORRECTION}.rollout_rs_threshold=0.9").config
    assert largest["algorithm"]["rollout_correction"]["rollout_rs_threshold"] == 0.9
    ice_pop = made(f"{RUN}{CORRECTION}.rollout_is=token\n{CORRECTION}.rollout_is_threshold=0.5_5")
    correction = TrainConfig.model_validate(ice_pop.config).algorithm.rollout_correction
    assert (correction.rollout_is_bounds, correction.rollout_is_threshold) == ((0.5, 5.0), 5.0)
    for bounds in ("3_0.9", "0.0_2"):
        wrong = made(f"{RUN}{CORRECTION}.rollout_rs=token_k1\n{CORRECTION}.rollout_rs_threshold={bounds}")
        assert "should be two bounds above 0, lo_hi" in str(wrong.problem)


def test_a_share_of_the_steps_is_rounded_down_as_there_and_their_number_goes_before_it() -> None:
    warm_up = f"{ACTOR}.optim.lr_warmup_steps"
    for given, steps in ((-1, 1), (5, 5)):
        config = made(f"{RUN}trainer.total_training_steps=19\n{warm_up}={given}\n{warm_up}_ratio=0.1").config
        assert flat(config)[warm_up] == steps


UPDATES = "data.train_batch_size=24\nactor_rollout_ref.actor.ppo_mini_batch_size=12\n"
NFT = f"{MODEL}.algorithm=diffusion_nft\nalgorithm.trainer_type=direct_preference\n"


@pytest.mark.parametrize(("kernel", "form"), [("sde", "flow_grpo"), ("cps", "gaussian"), ("dance_sde", "gaussian")])
def test_a_kl_is_of_the_deviation_that_their_kernel_hands_on(kernel: str, form: str) -> None:
    """Of the whole one but for sde, whose g it is: see `FlowMatchSDEDiscreteScheduler.sample_previous_step` there."""
    script = f"{RUN}{ACTOR}.use_kl_loss=True\n{ROLLOUT}.algo.noise_level=0.8\n{ROLLOUT}.algo.sde_type={kernel}"
    assert TrainConfig.model_validate(made(script).config).actor_rollout_ref.actor.kl_loss_type == form


def test_what_an_algorithms_name_sets_here_is_what_it_is_there() -> None:
    """A silence of theirs is the field's default, whatever the algorithm."""
    nft = TrainConfig.model_validate(made(f"{RUN}{NFT}").config)
    assert nft.algorithm.old_policy_decay_schedule == "copy"
    assert not nft.actor_rollout_ref.actor.use_kl_loss
    weighed = made(f"{RUN}{NFT}{ACTOR}.diffusion_loss.ref_kl_coef=0.002").config
    actor = TrainConfig.model_validate(weighed).actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.002)
    guard = flat(made(f"{RUN}{ACTOR}.diffusion_loss.loss_mode=grpo_guard").config)
    assert guard[f"{ACTOR}.diffusion_loss.clip_ratio"] == 1e-4
    dance = flat(made(f"{RUN}{MODEL}.algorithm=dance_grpo").config)
    assert dance[f"{ROLLOUT}.algo.sde_type"] == "sde"


def test_a_share_of_the_levels_is_drawn_of_all() -> None:
    """timestep_fraction here leaves out the clean end, and there another part for each sample."""
    half = flat(made(f"{RUN}{NFT}algorithm.timestep_fraction=0.55").config)
    assert half["algorithm.num_train_timesteps"] == 5
    assert "algorithm.timestep_fraction" not in half
    every = flat(made(f"{RUN}{NFT}algorithm.timestep_fraction=1.0").config)
    assert not {"algorithm.num_train_timesteps", "algorithm.timestep_fraction"} & every.keys()


def test_what_is_counted_in_iterations_there_is_told_or_counted_in_optimiser_steps() -> None:
    """Their learning rate and old policy go on once an iteration."""
    warm_up, old = f"{ACTOR}.optim.lr_warmup_steps", "algorithm.old_policy_decay_schedule"
    found = made(f"{RUN}{UPDATES}{NFT}{warm_up}=20\n{old}=delayed_linear_to_0_999")
    assert flat(found.config)[warm_up] == 40
    (line,) = [line for line in found.lines if line.override.path == old]
    assert "an iteration has 2, and there in iterations" in line.text
    # Twice over the samples of an iteration is twice as many steps. A share of the iterations is rounded down first.
    again = f"{RUN}{UPDATES}{NFT}{ACTOR}.ppo_epochs=2\n"
    assert flat(made(f"{again}{warm_up}=20").config)[warm_up] == 80
    assert flat(made(f"{again}trainer.total_training_steps=19\n{warm_up}_ratio=0.1").config)[warm_up] == 4


def test_a_script_that_is_silent_about_its_prompts_means_theirs() -> None:
    """1,024 in an iteration, of which 256 are an optimiser step."""
    warm_up = f"{ACTOR}.optim.lr_warmup_steps"
    silent = made(f"{ROLLOUT}.n=16\n{warm_up}=20")
    assert silent.problem is None
    found = flat(silent.config)
    assert (found["data.train_batch_size"], found[f"{ACTOR}.ppo_mini_batch_size"], found[warm_up]) == (1024, 256, 80)
    assert flat(made(f"{RUN}{warm_up}=20").config)["data.train_batch_size"] == 256


def test_epochs_without_a_number_of_iterations_are_told_apart_from_the_recipes() -> None:
    path, steps = "trainer.total_epochs", "trainer.total_training_steps"
    for given in ("", f"{steps}=null\n", f"{steps}=$OUTSIDE\n"):
        one = made(f"{RUN}{given}{path}=15")
        assert line_of(one, path) == (
            f"explained {path}=15: a run is counted in iterations, of which the recipe has 100: set {steps}, to 15 x "
            "(prompts of the table // 256)"
        )
        assert TrainConfig.model_validate(one.config).trainer.total_training_steps == 100
    assert line_of(made(f"{RUN}{steps}=20\n{path}=15"), path).endswith("counted in iterations, " + steps)


def test_a_run_that_is_not_to_go_on_does_not() -> None:
    for theirs, ours in (("disable", "disable"), ("auto", "auto")):
        assert made(f"{RUN}trainer.resume_mode={theirs}").config["trainer"]["resume_mode"] == ours


def test_the_samples_that_pairs_are_made_of_are_kept_together() -> None:
    script = f"{RUN}{MODEL}.algorithm=dpo\nalgorithm.paired_preference=True\n{ACTOR}.ppo_micro_batch_size_per_gpu=4"
    config = flat(made(script).config)
    assert (config[f"{ROLLOUT}.micro_batch_size"], config[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]) == (16, 4)


def test_a_model_gets_the_sampling_settings_that_it_reads() -> None:
    def sampling(model: str, *fields: str) -> dict[str, Any]:
        one = made("\n".join([RUN, f"{MODEL}.path={model}", *(f"{ROLLOUT}.pipeline.{field}" for field in fields)]))
        assert one.problem is None
        return one.config["actor_rollout_ref"]["rollout"].get("pipeline", {})

    wan = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    both = ("true_cfg_scale=4.0", "guidance_scale=5.0", "num_frames=8")
    assert sampling(wan, *both) == {"guidance_scale": 5.0, "num_frames": 9}
    assert sampling(wan, "true_cfg_scale=4.0", "num_frames=81") == {"guidance_scale": 4.0, "num_frames": 81}
    assert sampling("$HOME/Qwen-Image", *both[:2], "num_frames=1") == {"true_cfg_scale": 4.0}
    assert sampling("/models/stable-diffusion-3.5", *both[:2]) == {"guidance_scale": 5.0}
    assert sampling("/models/stable-diffusion-3.5", both[0]) == {}, "theirs does not read it either"
    assert sampling("black-forest-labs/FLUX.2-klein-base-4B", *both[:2]) == {"guidance_scale": 5.0}
    assert sampling("/models/own", *both) == {"true_cfg_scale": 4.0, "guidance_scale": 5.0, "num_frames": 8}


def test_families_read_what_their_adapters_say() -> None:
    adapters = {"qwen-image": QwenImage, "stable-diffusion-3": StableDiffusion3, "wan": Wan}
    adapters |= {"z-image": ZImage, "flux.2": Flux2Klein, "flux2": Flux2Klein, "flux": Flux}
    assert {name: family.reads for name, family in FAMILIES.items()} == {
        name: adapter.pipeline_fields for name, adapter in adapters.items()
    }


def test_where_the_denoiser_is() -> None:
    ours = f"{RUN}{MODEL}.path=m\n{MODEL}.transformer_subfolder=transformer\n{MODEL}.config_path="
    for value in ("null", "m/transformer"):
        one = made(ours + value)
        assert one.problem is None
        assert [line.kind for line in one.lines[-2:]] == ["explained", "explained"]
    elsewhere = made(f"{ours}other/config/transformer")
    assert elsewhere.problem is None
    model = elsewhere.config["actor_rollout_ref"]["model"]
    assert model["config_path"] == "other/config/transformer"
    other = made(f"{RUN}{MODEL}.path=m\n{MODEL}.transformer_subfolder=ema\n{MODEL}.config_path=m/ema")
    assert other.problem is None
    assert other.config["actor_rollout_ref"]["model"]["transformer_subfolder"] == "ema"
    assert "config_path" not in other.config["actor_rollout_ref"]["model"], "that is where it is looked for"


def test_an_algorithm_that_is_not_here_is_a_problem() -> None:
    assert "algorithm gspo is not here" in str(made(f"{RUN}{MODEL}.algorithm=gspo").problem)
    assert "estimator grpo is not here" in str(made(f"{RUN}algorithm.adv_estimator=grpo").problem)


def test_rules_lead_to_fields_that_there_are() -> None:
    fields = set(field_paths(TrainConfig))
    given: dict[str, Any] = dict.fromkeys(RULES, 2)
    for path, rule in RULES.items():
        became = rule(path, 2, given) if callable(rule) else rule
        for to in became.settings if isinstance(became, Taken) else ():
            assert to in fields or to.startswith("reward.functions."), f"{path} -> {to}"
    assert set(DEFAULTS) <= fields
    assert set(ESTIMATORS) == {one.value for one in DiffusionAdvantageEstimator}

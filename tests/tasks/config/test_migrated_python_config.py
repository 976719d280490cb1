# SPDX-License-Identifier: Apache-2.0
"""What becomes of a configuration function of flow_grpo or DiffusionNFT: every setting that it makes has a line."""

from pathlib import Path
from typing import Any

import pytest

from tasks.config.errors import ConfigError, field_paths
from tasks.config.migration.flow_grpo import FLOW_GRPO, READS, RULES
from tasks.config.migration.outcome import Elsewhere, Problem, Taken
from tasks.config.migration.python_config import COMPUTED, read_config
from tasks.config.migration.script import Override
from tasks.config.migration.starting_command import Start, named_by
from tasks.config.migration.translate import Translation, translate
from tasks.config.overrides import flat
from tasks.config.tree import TrainConfig
from tasks.rewards import check_reward
from tests.tasks.config.test_migration import ODD

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 7
    config.mixed_precision = "fp16"
    config.sample = sample = ml_collections.ConfigDict()
    sample.global_std = True
    config.train = train = ml_collections.ConfigDict()
    train.learning_rate = 3e-4
    train.timestep_fraction = 0.99
    config.reward_fn = ml_collections.ConfigDict()
    return config
"""
DOUBLING = (
    "def get_config():\n    config = ml.ConfigDict()\n    x = [1]\n"
    + "    x = [x, x]\n" * 20
    + "    config.a = x\n    config.b = {'n': x}\n    return config\n"
)
CONFIG = """
import os
other = load("base", os.path.join(os.path.dirname(__file__), "base.py"))

def common(gpus, rewards={}):
    config = other.get_config()
    config.dataset = os.path.join(os.getcwd(), "dataset")
    config.sample.num_image_per_prompt = 24
    size = 10
    while True:
        if size < 1:
            assert False
        if 24 * 24 % (gpus * size) == 0 and size * gpus % 24 == 0:
            config.sample.train_batch_size = size
            break
        size -= 1
    config.sample.num_batches_per_epoch = int(48 * 24 / (gpus * config.sample.train_batch_size))
    config.train.batch_size = config.sample.train_batch_size if gpus > 1 else 1
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch // 2
    if os.path.exists("here"):
        config.sample.num_steps = 20
    config.reward_fn = rewards
    return config

def ocr():
    gpu_number = 8
    config = common(gpu_number, rewards={"ocr": 1.0})
    config.sample.num_steps = 10
    config.train.beta = 0.04
    return config

def fast():
    config = ocr()
    config.sample.sde_window_size = 2
    config.sample.sde_window_range = (0, 5)
    config.sample.eval_guidance_scale = 4.5
    config.sample.same_latent = True
    config.activation_checkpointing = True
    config.fsdp_optimizer_offload = True
    config.train.clip_range_lt = 1e-5
    return config

def nft():
    n_gpus = 8
    config = common(n_gpus, {"pickscore": 1.0, "mine": 0.5})
    config.beta = 0.1
    config.decay_type = 2
    return config

def endless():
    config = common(8)
    while True:
        config.seed = config.seed + 1
"""


STEPS = {"sample.num_steps": 25}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "grpo.py").write_text(CONFIG)
    return tmp_path / "grpo.py"


def made(file: Path, function: str, processes: int | None = None) -> Translation:
    return translate(read_config(file, function, Start(str(file), gpus=processes)), FLOW_GRPO)


def test_a_function_is_read_as_python_would_run_it(file: Path) -> None:
    found = settings_of(file, "ocr")
    assert found == {
        **{"gpus": 8, "seed": 7, "mixed_precision": "fp16", "dataset": COMPUTED, "reward_fn": {"ocr": 1.0}},
        **{"sample.global_std": True, "sample.num_image_per_prompt": 24, "sample.num_steps": 10},
        **{"sample.train_batch_size": 9, "sample.num_batches_per_epoch": 16},
        **{"train.learning_rate": 3e-4, "train.timestep_fraction": 0.99, "train.batch_size": 9, "train.beta": 0.04},
        "train.gradient_accumulation_steps": 8,
    }


def test_what_hangs_on_the_unknown_is_not_known(file: Path) -> None:
    found = settings_of(file, "nft")
    assert found["sample.num_steps"] == COMPUTED, "set or not, by what is on their disk"
    line = next(line for line in made(file, "nft").lines if line.override.path == "sample.num_steps")
    assert (line.kind, line.text) == ("explained", "the file computes it: set it yourself")


def test_a_config_becomes_a_recipe(file: Path) -> None:
    one = made(file, "ocr")
    assert one.problem is None
    assert one.count("unknown") == 0
    config = TrainConfig.model_validate(one.config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (48, 24, 24)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.04, "flow_grpo")
    assert (config.trainer.n_gpus_per_node, rollout.num_actors, rollout.placement) == (8, 8, "colocated")
    assert config.reward.functions["ocr"].options["detect"] is True
    assert config.actor_rollout_ref.model.dtype == "bfloat16"


def test_a_window_and_what_is_beside_it(file: Path) -> None:
    one = made(file, "fast")
    assert (one.problem, one.count("unknown")) == (None, 0)
    policy = TrainConfig.model_validate(one.config).actor_rollout_ref
    algo, sharding = policy.rollout.algo, policy.actor.fsdp_config
    assert (algo.sde_window_size, algo.sde_window_range, algo.init_same_noise) == (2, (0, 5), True)
    assert policy.rollout.val_kwargs.pipeline.guidance_scale == 4.5
    assert (sharding.gradient_checkpointing, sharding.optimizer_offload) == (True, True)
    texts = {line.override.path: line.text for line in one.lines}
    assert "one range for both sides" in texts["train.clip_range_lt"]


def test_the_processes_of_the_command_are_the_gpus(file: Path) -> None:
    config = made(file, "ocr", processes=16).config
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (2, 8)
    assert config["data"]["train_batch_size"] == 96


def test_the_other_ones_loss_has_a_beta_of_its_own(file: Path) -> None:
    one = made(file, "nft")
    assert one.problem == "the reward mine is not here: name one under reward.functions"
    assert one.config["algorithm"]["name"] == "diffusion_nft"
    assert one.config["algorithm"]["old_policy_decay_schedule"] == "delayed_linear_to_0_999"
    assert one.config["actor_rollout_ref"]["actor"]["diffusion_loss"]["nft_beta"] == 0.1
    assert one.config["reward"]["functions"]["mine"] == {"reward": "mine", "weight": 0.5}


def test_what_a_script_does_without_a_setting_is_that_scripts() -> None:
    """Of the average of the weights, and of the steps that are trained: in NFT they are levels."""
    for nft, every in (({"beta": 0.1}, 1), ({}, 8)):
        told = {"train.ema": True, "sample.num_steps": 10, "train.timestep_fraction": 0.99, "train.adam_beta1": 0.8}
        told |= {"train.adam_beta2": 0.9, "sample.num_image_per_prompt": 24} | nft
        config = flat(translate([Override(path, value) for path, value in told.items()], FLOW_GRPO).config)
        assert config["actor_rollout_ref.actor.ema.update_interval"] == every
        assert config["actor_rollout_ref.actor.optim.betas"] == [0.8, 0.9]
        assert config.get("algorithm.num_train_timesteps") == (9 if nft else None)
        assert "actor_rollout_ref.rollout.algo.sde_window_range" not in config
        assert config.get("algorithm.drop_equal_groups") is (None if nft else True)


@pytest.mark.parametrize(
    ("told", "betas"), [({"adam_beta1": 0.8}, [0.8, 0.999]), ({"adam_beta2": 0.95}, [0.9, 0.95]), ({}, None)]
)
def test_a_decay_of_adams_that_is_told_alone_has_the_default_beside_it(
    told: dict[str, float], betas: list[float] | None
) -> None:
    config = translate([Override(f"train.{name}", value) for name, value in told.items()], FLOW_GRPO).config
    assert flat(config).get("actor_rollout_ref.actor.optim.betas") == betas


def test_rewards_that_are_not_known_are_a_problem() -> None:
    one = translate([Override("reward_fn", COMPUTED), Override("sample.num_image_per_prompt", 24)], FLOW_GRPO)
    assert "the script's reward has no counterpart here" in str(one.problem)


def settings_of(file: Path, function: str | None = "run") -> dict[str, Any]:
    """Path -> value of what is read of a function, or of the file's own lines."""
    return {override.path: override.value for override in read_config(file, function)}


def test_another_algorithm_is_a_problem() -> None:
    one = translate([Override("train.algorithm", "dpo"), Override("sample.num_image_per_prompt", 24)], FLOW_GRPO)
    assert "train.algorithm is 'dpo', but of their configurations those of GRPO and NFT" in str(one.problem)


def test_a_file_of_lines_alone_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("gpu_number = 4\nconfig.sample.num_steps = 10\nconfig.beta = -1\n")
    found = settings_of(tmp_path / "run.py", None)
    assert found == {"gpus": 4, "sample.num_steps": 10, "beta": -1}


def test_what_cannot_be_read_is_said(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 4 configurations: give one as .*py:NAME, of ocr, fast, nft, endless"):
        read_config(file, None)
    with pytest.raises(ConfigError, match=r"has no function other: give one of ocr, fast, nft, endless"):
        read_config(file, "other")
    with pytest.raises(ConfigError, match=r"grpo.py, line \d+: more than 10000 statements"):
        read_config(file, "endless")
    (tmp_path / "sum.py").write_text("def get_config():\n    config.a = 1" + " + 1" * 3000)
    (tmp_path / "broken.py").write_text("def get_config(:")
    (tmp_path / "empty.py").write_text("def get_config():\n    pass")
    for name, reason in (
        ("sum", "sums too long|cannot be read"),
        ("broken", "cannot be read"),
        ("empty", "no line of the"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_config(tmp_path / f"{name}.py", None)


def test_a_command_names_its_configuration() -> None:
    launch = "# --config no.py:no\naccelerate launch --num_processes=4 \\\n train.py --config {} # --config no.py\n"
    assert named_by(launch.format("config/grpo.py:ocr")) == Start("config/grpo.py", "ocr", 4)
    assert named_by(launch.format("config/grpo.py")) == Start("config/grpo.py", None, 4)
    assert named_by("python -m verl_omni.trainer.main_diffusion a.b=c") is None


@pytest.mark.parametrize(
    ("command", "start"),
    [
        (
            'torchrun --nproc_per_node=4 --nnodes 2 t.py --config="c/nft.py:ocr" --config.train.ema --config.a.b 1e-5',
            Start("c/nft.py", "ocr", 8, {"train.ema": True, "a.b": 1e-5}),
        ),
        ("CFG=c/grpo.py:ocr\nlaunch --num_processes $N t.py --config $CFG", Start("c/grpo.py", "ocr", "$N")),
        (
            "ARGS=(\n  --config c/grpo.py:ocr\n\n  --config.seed=3 # three\n)\nALL=(--num_processes=4)\n"
            'RUN=(launch "${ALL[@]}" t.py)\necho "${ARGS[@]}"\n"${RUN[@]}" ${ARGS[*]} "${NONE[@]}"',
            Start("c/grpo.py", "ocr", 4, {"seed": 3}),
        ),
        ('A=(\n)\nB=(--config b.py:two)\n"${A[@]}"\nrun --config a.py:one', Start("a.py", "one")),
        (
            'A=(--config a.py:f --config.lr=1e-2)\nA=(--config a.py:g)\nA+=(\n  --config.seed=3\n)\nrun "${A[@]}"',
            Start("a.py", "g", None, {"seed": 3}),
        ),
        ('A=(--config a.py:f --config.a=1)\nA=()\nA+=(--config a.py:g)\nrun "${A[@]}"', Start("a.py", "g")),
        (
            'A=(--config a.py:f)\nA=(\n  "${A[@]}"\n  --config.a=1\n)\nrun "${A[@]}"',
            Start("a.py", "f", None, {"a": 1}),
        ),
        ('A=(--config a.py:f)\nrun --num_processes=4 ${A[@]+"${A[@]}"}', Start("a.py", "f", 4)),
        ('A=(--config a.py:f)\neval "torchrun --nproc_per_node=4 t.py ${A[*]}"', Start("a.py", "f", 4)),
        ('A=(--config a.py:f)\nbash -lc "cd x && torchrun --nproc_per_node=4 ${A[*]}"', Start("a.py", "f", 4)),
        ('A=(--config a.py:f)\neval "it\'s ${A[*]}"', Start("a.py", "f")),
        (
            'A=(--config a.py:f)\nB=("${A[@]}" --num_processes=4)\nssh host "python t.py ${B[*]}"',
            Start("a.py", "f", 4),
        ),
        (
            'A=(\n  --config x.py:f  # text :)\n  "--config.prompt=a) b"\n  --config.lr=1\n) # all :)\nrun "${A[@]}"',
            Start("x.py", "f", None, {"prompt": "a) b", "lr": 1}),
        ),
        ('A=(--config x.py:f); run --num_processes=4 "${A[@]}"', Start("x.py", "f", 4)),
        (
            "if x; then\n  A=(--config a.py:f --config.a=1)\nelse\n  A=(--config a.py:f)\nfi\nrun ${A[@]}",
            Start("a.py", "f"),
        ),
    ],
)
def test_what_the_command_says_itself_is_read(command: str, start: Start) -> None:
    assert named_by(command) == start


def test_a_setting_of_the_command_goes_before_the_functions(file: Path) -> None:
    start = Start(str(file), settings={"sample.num_steps": 14, "own": "x"})
    found = {one.path: one.value for one in read_config(file, "ocr", start)}
    assert (found["sample.num_steps"], found["own"]) == (14, "x")


def test_a_script_of_several_runs_is_refused() -> None:
    lines = "python t.py --config a.py:one\npython t.py --config a.py:two\npython t.py --config a.py:one"
    arrays = 'A=(--config a.py:one)\nB=(--config a.py:two)\npython t.py "${A[@]}"\npython t.py "${B[@]}"'
    unread = 'A=(--config a.py:one)\nB=(--config a.py:two)\nssh host "t.py ${A[*]}"\nssh host "t.py ${B[*]}"'
    branches = 'if x; then\n  A=(--config a.py:two)\nelse\n  A=(--config a.py:one)\nfi\nrun --num_processes=4 "${A[@]}"'
    for script in (lines, arrays, unread, branches):
        with pytest.raises(ConfigError, match=r"starts 2 runs \(a.py:one, a.py:two\): give one of them"):
            named_by(script)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("shared(config)", {"sample.num_steps": 10}),
        ("config.sample.update({'num_steps': 10})", {"sample.num_steps": 10}),
        ("config.update(seed=3)", {"seed": 3}),
        ("config['seed'] = 3", {"seed": 3}),
        ("config.reward_fn['b'] = 2.0", {"reward_fn": {"a": 1.0, "b": 2.0}}),
        ("config.seed, config.resolution = 3, 256", {"seed": 3, "resolution": 256}),
        ("config.seed: int = 3", {"seed": 3}),
        ("setattr(config.sample, 'num_steps', 10)", {"sample.num_steps": 10}),
        ("setattr()\n    setattr(config)\n    config.seed = 3", {"seed": 3}),
        ("steps = 0\n    config.sample.num_steps = steps or 10", {"sample.num_steps": 10}),
        ("config.train.beta = +0.5", {"train.beta": 0.5}),
        ("config.reward_fn = {**config.reward_fn, 'b': 2.0}", {"reward_fn": {"a": 1.0, "b": 2.0}}),
        ("config.reward_fn = {**more}", {"reward_fn": {COMPUTED: COMPUTED}}),
        ("config.sample.update(more)", {"sample.update": COMPUTED}),
        ("del config.seed", {"seed": COMPUTED}),
        ("config.sample = ml.ConfigDict(dict(num_steps=25, inner={'a': 1}))", {**STEPS, "sample.inner.a": 1}),
        ("config.sample = ml.ConfigDict({'num_steps': 25}, type_safe=False)", {**STEPS, "sample.type_safe": None}),
        ("config.sample = ml.ConfigDict(initial_dictionary={'num_steps': 25})", STEPS),
        ("config.sample = ConfigDict(num_steps=25)", STEPS),
        ("config.sample = part = ConfigDict()\n    part.num_steps = 25", STEPS),
        ("part = ConfigDict(num_steps=2)\n    config.sample = part\n    part.num_steps = 25", STEPS),
        ("config.train = ConfigDict({'a': 1, 'b': ConfigDict(c=2)})", {"train.a": 1, "train.b.c": 2}),
        ("config.sample = ConfigDict(made_elsewhere())", {"sample": COMPUTED}),
        ("config.sample = ConfigDict({**more, 'num_steps': 25})", {"sample": COMPUTED, "sample.num_steps": None}),
        ("config.sample = part = ConfigDict(more)\n    part.num_steps = 25", {"sample": COMPUTED, **STEPS}),
        ("config.sample = dict(num_steps=25, more=dict(a=1))", {**STEPS, "sample.more.a": 1}),
        ("config.sample.old = 1\n    config.sample = ConfigDict(num_steps=25)", {**STEPS, "sample.old": None}),
        ("config.sample.old = 1\n    config.sample = more", {"sample": COMPUTED, "sample.old": COMPUTED}),
        ("config.reward_fn = ConfigDict(dict(b=2.0))", {"reward_fn": {"b": 2.0}}),
        ("config.reward_fn = dict(config.reward_fn, b=2.0)", {"reward_fn": {"a": 1.0, "b": 2.0}}),
        ("config.reward_fn = dict(more, b=2.0)", {"reward_fn": COMPUTED}),
        (
            "config.update({'sample': {'num_steps': 25}, 'reward_fn': {'b': 2}})",
            {**STEPS, "reward_fn": {"a": 1, "b": 2}},
        ),
        ("config.update(ConfigDict(sample=dict(num_steps=25)))", STEPS),
        ("config = copy.deepcopy(config)\n    config.resolution = 256", {"seed": 1, "resolution": 256}),
        ("config = deepcopy(config)\n    config.seed = 3\n    return config", {"seed": 3, "reward_fn": {"a": 1.0}}),
        ("config = config.copy_and_resolve_references()\n    config.sample.num_steps = 25", {"seed": 1, **STEPS}),
        ("kept = copy.deepcopy(config)\n    kept.seed = 3", {"seed": 1}),
        ("kept = copy.deepcopy(config)\n    kept.seed = 3\n    return config", {"seed": 1}),
        ("config.sample.num_steps = 25\n    config.train = copy.copy(config.sample)", {**STEPS, "train.num_steps": 25}),
        ("config.sample = ConfigDict(more)\n    config.train = copy.copy(config.sample)", {"train": COMPUTED}),
        ("config.train.rewards = copy.copy(config.reward_fn)", {"train.rewards.a": 1.0}),
        ("config.train.other = copy.copy(config.unset)", {"train.other": COMPUTED}),
    ],
)
def test_whatever_way_a_setting_is_made_it_is_read_or_told(lines: str, found: dict[str, Any], tmp_path: Path) -> None:
    """None stands for a path that nothing sets."""
    before = "config.seed = 1\n    config.reward_fn = {'a': 1.0}\n    config.sample = ml_collections.ConfigDict()\n"
    (tmp_path / "run.py").write_text(
        f"def shared(config):\n    config.sample.num_steps = 10\n\n"
        f"def run():\n    {before}    config.train = ml_collections.ConfigDict()\n    {lines}\n"
    )
    made = settings_of(tmp_path / "run.py")
    assert {path: made.get(path) for path in found} == found


@pytest.mark.parametrize(
    "lines",
    [
        "match 3:\n        case 3: config.sample.a = 5",
        "def g(c): c.a = 9\n    g(config.sample)",
        "def g(): config.sample.a = 9\n    config.sample.a = 1\n    g()",
        "def g(c):\n        c.a = 9\n        g(c)\n    config.sample.a = 1\n    g(config.sample)",
        "imported(config)",
        "other.imported(0, given=config.sample)",
        "sample = config.sample\n    imported([sample])",
        "assert imported(config)",
        "done = [imported(part) for part in (config.sample, config.train)]",
        "for part in (config.sample, config.train):\n        part.a = 5",
        "for one in others:\n        part = config.sample\n        part.a = 5",
        "with opened() as file:\n        shared(config)",
        "if more:\n        shared(config.sample)",
        "if config.unset:\n        config.sample.a = 5",
        "config.sample[more] = 5",
        "setattr(config.sample, more, 5)",
        "config.sample.update(more)",
        "config.sample.update({**more})",
        "(config.sample or more).update(config.sample)",
        "def log(c): c.a = 9\n    log(config.sample)",
        "def copy(c): c.a = 9\n    copy(config.sample)",
        "config = imported(config)\n    config.seed = 3",
        "config = imported()\n    config.seed = 3",
    ],
)
def test_what_is_not_known_to_be_set_is_no_longer_known(lines: str, tmp_path: Path) -> None:
    """A value of before would be taken for the run's."""
    (tmp_path / "run.py").write_text(
        "def shared(config):\n    config.a = 10\n\ndef run():\n    config.sample = ConfigDict()\n"
        f"    config.train = ConfigDict()\n    config.sample.a = 1\n    config.seed = 3\n    {lines}\n"
    )
    made = settings_of(tmp_path / "run.py")
    assert made["sample.a"] == COMPUTED
    if lines.startswith("config = "):
        assert made["seed"] == 3, "what is set later is known, whatever the function made"


@pytest.mark.parametrize(
    "lines",
    [
        "print(config, config.sample.keys())",
        "config.lock()",
        "path = os.path.join(config.sample.folder, 'x')",
        "text = f'{config.sample} {config.sample.a}'",
        "import os as config",
        "logging.info(config)\n    logger.log(20, config)\n    if more:\n        logging.debug(config)",
        "pprint.pprint(config)\n    text = pformat(config)",
        "wandb.config.update(config)\n    os.makedirs(config.sample)",
        "kept = json.dumps(config, default=str)",
        "if more:\n        kept = copy.deepcopy(config)",
        "n: int",
        "def g(c): return c.a",
    ],
)
def test_what_only_reads_a_config_leaves_it_known(lines: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "def run():\n    config.sample = ConfigDict()\n    config.sample.a = 1\n    n = 2\n"
        f"    {lines}\n    config.b = n\n"
    )
    found = settings_of(tmp_path / "run.py")
    assert found == {"sample.a": 1, "b": 2}


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("rewards['b'] = 2.0", {"a": 1.0, "b": 2.0}),
        ("rewards[more] = 2.0", COMPUTED),
        ("rewards.update(b=2.0)", COMPUTED),
        ("rewards.update(config)", COMPUTED),
        ("rewards.get('a')", {"a": 1.0}),
    ],
)
def test_a_mapping_that_is_made_first_is_the_one_of_then(lines: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        f"def run():\n    rewards = {{'a': 1.0}}\n    {lines}\n    config.reward_fn = rewards\n"
    )
    assert settings_of(tmp_path / "run.py") == {"reward_fn": value}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def run():\n    return ConfigDict(dict(seed=3, sample=dict(a=1)))", {"seed": 3, "sample.a": 1}),
        ("def run():\n    return dict(seed=3, reward_fn=dict(a=1))", {"seed": 3, "reward_fn": {"a": 1}}),
        (
            "def part():\n    own = ConfigDict()\n    own.a = 1\n    return own\n\n"
            "def run(x=0):\n    made = ConfigDict()\n    made.sample = part()\n    return made",
            {"sample.a": 1},
        ),
        (
            "def run():\n    made = ConfigDict(more)\n    made.a = 1\n    return made",
            {"a": 1, "ConfigDict(...)": COMPUTED},
        ),
        ("def shared(config):\n    config.a = 1\n\nshared(config)", {"a": 1}),
        ("import other\nother.shared(config)\nconfig.a = 1", {"a": 1, "other.shared(...)": COMPUTED}),
    ],
)
def test_a_config_of_another_make_is_read_too(text: str, found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(text)
    name = "run" if "def run" in text else None
    assert settings_of(tmp_path / "run.py", name) == found


def test_a_call_that_may_have_set_anything_has_a_line_of_its_own() -> None:
    (line,) = translate([Override("imported(...)", COMPUTED)], FLOW_GRPO).lines
    assert (line.kind, line.text) == ("explained", "it is not read: set what it sets yourself")


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_whatever_a_value_is_it_gets_a_line(value: Any) -> None:
    odd = [Override(path, value) for path in RULES]
    assert len(translate(odd, FLOW_GRPO).lines) == len(odd)
    given = dict.fromkeys(RULES, 2)
    for path, rule in RULES.items():
        if callable(rule) and FLOW_GRPO.unusable(path, value) is None:
            assert isinstance(rule(path, value, {**given, path: value}), Taken | Elsewhere | Problem)


def test_rules_lead_to_fields_and_rewards_that_there_are() -> None:
    fields, given = set(field_paths(TrainConfig)), dict.fromkeys(RULES, 2)
    for path, rule in RULES.items():
        became = rule(path, 2, given) if callable(rule) else rule
        assert set(became.settings if isinstance(became, Taken) else ()) <= fields, path
    assert set(FLOW_GRPO.defaults) <= fields
    revisions = {"model": "revision", "processor": "processor_revision", "clip": "clip_revision"}
    for reward, options in READS.values():
        check_reward(reward, **options, **{revisions[name]: "0" * 40 for name in options if name in revisions})


def test_a_page_has_the_rules_most_asked_for() -> None:
    page = (Path(__file__).parents[3] / "docs/coming-from.md").read_text()
    for path in ("sample.num_image_per_prompt", "sample.noise_level", "train.gradient_accumulation_steps", "beta"):
        assert f"| `{path}`" in page
        assert path in RULES


def test_a_list_that_holds_another_twice_which_holds_one_twice_is_not_written_out(tmp_path: Path) -> None:
    """2^20 values would be, and with twice as many lines nothing would come back."""
    (tmp_path / "config.py").write_text(DOUBLING)
    read = settings_of(tmp_path / "config.py", "get_config")
    assert read.keys() == {"a", "b.n"}
    assert len(str(read)) < 10_000

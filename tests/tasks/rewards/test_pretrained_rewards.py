# SPDX-License-Identifier: Apache-2.0
"""Rewards by transformers on small random checkpoints, against the model's own processor and a direct forward."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BertTokenizer,
    BlipConfig,
    BlipForImageTextRetrieval,
    BlipImageProcessor,
    BlipProcessor,
    CLIPModel,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from tasks.data.prompts import Prompt
from tasks.rewards import Reward, RewardError, check_reward, get_reward, image_reward
from tests.support.tiny_judges import LETTERS, SMALL, save_clip, save_qwen2_vl

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3), dtype=np.uint8)
TEXTS = ["a red cat", "the number 472", "a red cat", "long " * 30]
PROMPTS = [Prompt(f"uid-{i}", text, None, {}, "") for i, text in enumerate(TEXTS)]
VISION = SMALL | {"image_size": 24, "patch_size": 8}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BLIP with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("blip")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    text = SMALL | {"vocab_size": len(words), "max_position_embeddings": 24, "encoder_hidden_size": 32}
    text |= {"bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(1)
    vision = VISION | {"initializer_range": 0.1}  # BLIP's own, 1e-10, draws a picture encoder that sees nothing
    BlipForImageTextRetrieval(BlipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    BlipProcessor(BlipImageProcessor(size={"height": 24, "width": 24}), tokenizer).save_pretrained(folder)
    return folder


def save_head(path: Path, *widths: int) -> str:
    """A head of linear layers named as LAION's are, saved in another order."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for number in reversed(range(len(widths) - 1)):
        name = f"layers.{4 * number}"
        tensors[f"{name}.weight"] = torch.randn(widths[number + 1], widths[number], generator=generator)
        tensors[f"{name}.bias"] = torch.randn(widths[number + 1], generator=generator)
    save_file(tensors, path)
    return str(path)


def through_head(path: str, values: torch.Tensor) -> np.ndarray:
    layers = load_file(path)
    for number in sorted({int(name.split(".")[1]) for name in layers}):
        values = values @ layers[f"layers.{number}.weight"].T + layers[f"layers.{number}.bias"]
    return values[:, 0].numpy()


@torch.no_grad()
def direct(folder: Path) -> tuple[CLIPModel, object]:
    """The model and one forward of it on all pictures and prompts, each prompt by itself."""
    model, processor = CLIPModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    limit = model.config.text_config.max_position_embeddings
    inputs = processor(
        text=TEXTS, images=list(IMAGES), padding=True, truncation=True, max_length=limit, return_tensors="pt"
    )
    assert inputs["input_ids"].shape == (4, 20)
    return model, model(**inputs)


def test_clip_scores_are_those_of_a_direct_forward(clip: Path) -> None:
    model, output = direct(clip)
    logits = output.logits_per_image.diag().numpy()
    scale = model.logit_scale.exp().item()
    assert len(set(logits.round(4))) == 4, "pictures and prompts all differ"
    options = {"model": str(clip)}
    assert get_reward("clip_score", **options)(IMAGES, PROMPTS).scores == pytest.approx(logits / scale, abs=1e-5)
    assert get_reward("hps", **options)(IMAGES, PROMPTS).scores == pytest.approx(logits / scale, abs=1e-5)
    pick = get_reward("pickscore", **options, processor=None)
    assert pick(IMAGES, PROMPTS).scores == pytest.approx(logits, abs=1e-4)
    flow_grpo = get_reward("pickscore", **options, processor=str(clip), divide_by=26)
    assert flow_grpo(IMAGES, PROMPTS).scores == pytest.approx(logits / 26, abs=1e-5)


def test_heads_on_clip_are_those_of_a_direct_forward(clip: Path, tmp_path: Path) -> None:
    _, output = direct(clip)
    linear, deep = (
        save_head(tmp_path / "one.safetensors", 16, 1),
        save_head(tmp_path / "mlp.safetensors", 16, 8, 4, 4, 1),
    )
    for head in (linear, deep):
        found = get_reward("aesthetic", model=str(clip), head=head)(IMAGES, PROMPTS).scores
        assert found == pytest.approx(through_head(head, output.image_embeds), abs=1e-4)
    both = save_head(tmp_path / "both.safetensors", 32, 8, 1)
    expected = through_head(both, torch.cat([output.image_embeds, output.text_embeds], 1))
    found = get_reward("clip_preference", model=str(clip), head=both, mean=0.3, std=2.0)(IMAGES, PROMPTS).scores
    assert found == pytest.approx((expected - 0.3) / 2, abs=1e-4)


def test_image_reward_is_a_head_on_blips_grounded_text(blip: Path, tmp_path: Path) -> None:
    model, processor = BlipForImageTextRetrieval.from_pretrained(blip).eval(), AutoProcessor.from_pretrained(blip)
    inputs = processor(
        images=list(IMAGES), text=TEXTS, padding=True, truncation=True, max_length=24, return_tensors="pt"
    )
    with torch.no_grad():
        read = model(**inputs, use_itm_head=True).question_embeds[:, 0]
    head = save_head(tmp_path / "head.safetensors", 32, 8, 1)
    expected = through_head(head, read)
    assert expected.std() > 0.01
    found = get_reward("image_reward", model=str(blip), head=head, mean=0.5, std=0.25)(IMAGES, PROMPTS).scores
    assert found == pytest.approx((expected - 0.5) / 0.25, abs=1e-3)
    # The prompt matters, and so does the picture.
    reward = get_reward("image_reward", model=str(blip), head=head)
    assert " tokens=35 " in reward.version
    with pytest.MonkeyPatch.context() as patch:  # of more tokens than these the published head saw none
        patch.setattr(image_reward, "TOKENS", 3)
        same = [Prompt("uid", f"a {word}", None, {}, "") for word in ("red fox", "red dog")]
        assert reward(IMAGES[:1], same[:1]).scores == reward(IMAGES[:1], same[1:]).scores
    assert abs(reward(IMAGES[:1], PROMPTS[:1]).scores - reward(IMAGES[:1], PROMPTS[1:2]).scores) > 1e-4
    assert abs(reward(IMAGES[:1], PROMPTS[:1]).scores - reward(IMAGES[1:2], PROMPTS[:1]).scores) > 1e-4


def test_scores_do_not_depend_on_the_batch_and_versions_name_the_weights(clip: Path, tmp_path: Path) -> None:
    reward = get_reward("clip_score", model=str(clip))
    together = reward(IMAGES, PROMPTS).scores
    alone = [reward(IMAGES[i : i + 1], PROMPTS[i : i + 1]).scores[0] for i in range(4)]
    assert together == pytest.approx(alone, abs=1e-6)
    model = CLIPModel.from_pretrained(clip)
    with torch.no_grad():
        model.visual_projection.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(clip).save_pretrained(tmp_path)
    other: Reward = get_reward("clip_score", model=str(tmp_path))
    assert other.version.replace(str(tmp_path), "") != reward.version.replace(str(clip), "")
    assert "transformers==" in reward.version
    half = get_reward("clip_score", model=str(clip), dtype="bfloat16")(IMAGES, PROMPTS).scores
    assert half == pytest.approx(together, abs=0.02)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("clip_score", {"threads": 0}),
        ("pickscore", {"divide_by": 0}),
        ("clip_preference", {"std": 0}),
        ("image_reward", {"std": -1.0}),
    ],
)
def test_a_number_out_of_range_is_told_before_anything_loads(
    tmp_path: Path, name: str, wrong: dict[str, float]
) -> None:
    place = {"model": str(tmp_path)} | ({"processor": str(tmp_path)} if name == "pickscore" else {})
    head = {"head": "none"} if "std" in wrong else {}
    (option,) = wrong
    with pytest.raises(
        RewardError, match=f"^reward '{name}': {option} is {wrong[option]}; it should be greater than 0"
    ):
        check_reward(name, **place, **head, **wrong)


@pytest.mark.parametrize("dtype", ["float33", "int8", "nn"])
def test_a_number_format_that_torch_has_not_for_weights_is_told_before_anything_loads(
    tmp_path: Path, dtype: str
) -> None:
    with pytest.raises(
        RewardError, match=f"^reward 'clip_score': dtype '{dtype}' is no floating-point format of torch"
    ):
        check_reward("clip_score", model=str(tmp_path), dtype=dtype)


def test_what_cannot_be_loaded_is_one_sentence(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=f"clip_score: {tmp_path} cannot be loaded as CLIPModel"):
        get_reward("clip_score", model=str(tmp_path))
    with pytest.raises(RewardError, match=r"head .*none\.safetensors does not exist"):
        get_reward("aesthetic", model=str(clip), head=str(tmp_path / "none.safetensors"))
    for widths in ((17, 1), (16, 8, 2)):
        head = save_head(tmp_path / "wrong.safetensors", *widths)
        with pytest.raises(RewardError, match="they must lead from the model's 16 to 1"):
            get_reward("aesthetic", model=str(clip), head=head)
    with pytest.raises(RewardError, match="unexpected keyword argument 'reversion'"):
        get_reward("pickscore", reversion="main")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"model openai/clip-vit-large-patch14 is no folder here, so it is a hub id, and revision is missing"),
        ({"revision": "main"}, r"revision is 'main': give the commit as revision, 40 hex digits"),
        ({"revision": "ab12"}, r"revision is 'ab12'"),
    ],
)
def test_a_hub_id_wants_its_commit(options: dict, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        check_reward("clip_score", **options)
    # What is wrong is known before a model is asked for.
    with pytest.raises(RewardError, match=said):
        get_reward("clip_score", **options)


def test_a_processor_of_its_own_wants_its_commit(clip: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    with pytest.raises(RewardError, match=r"processor laion/\S+ is no folder .* processor_revision is missing"):
        check_reward("pickscore", revision=commit)
    check_reward("pickscore", revision=commit, processor_revision=commit)
    check_reward("pickscore", revision=commit, processor=None)
    check_reward("pickscore", model=str(clip), processor=str(clip))


@torch.no_grad()
def test_hpsv3_is_a_direct_forward_of_each_sample_alone(tmp_path: Path) -> None:
    """Mean and sigma at the reward's token, whatever stands beside the sample in its batch."""
    folder = save_qwen2_vl(tmp_path / "qwen", "<|Reward|>")
    head = tmp_path / "head.safetensors"
    generator, tensors = torch.Generator().manual_seed(3), {}
    for number, (width, into) in {0: (6, 32), 3: (5, 6), 5: (2, 5)}.items():
        tensors[f"rm_head.{number}.weight"] = torch.randn(width, into, generator=generator)
        tensors[f"rm_head.{number}.bias"] = torch.randn(width, generator=generator)
    save_file(tensors, head)
    template = "{picture}: {prompt}?<|Reward|> and more"
    pixels = {"min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28}
    reward = get_reward("hpsv3", model=str(folder), head=str(head), template=template, **pixels)
    found = reward(IMAGES, PROMPTS)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer, pictures = AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    expected = []
    for image, text in zip(IMAGES, TEXTS, strict=True):
        seen = pictures(images=[image], return_tensors="pt")
        pads = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
        ids = tokenizer(f"<|vision_start|>{pads}<|vision_end|>: {text}?<|Reward|>", return_tensors="pt")["input_ids"]
        # As the published forward, which hands the language model what it has merged, without positions.
        vision = model.model.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"]).pooler_output
        merged = model.get_input_embeddings()(ids)
        merged[ids == model.config.image_token_id] = vision
        state = model.model.language_model(inputs_embeds=merged).last_hidden_state[0, -1]
        for number in (0, 3, 5):
            state = tensors[f"rm_head.{number}.weight"] @ state + tensors[f"rm_head.{number}.bias"]
            state = state.relu() if number < 5 else state
        expected.append(state.tolist())
    assert len({round(mean, 3) for mean, _ in expected}) == 4, "pictures and prompts all differ"
    assert np.stack([found.scores, found.details["sigma"]], 1) == pytest.approx(np.array(expected), rel=1e-4, abs=1e-4)
    assert "positions=sequential pixels=784,12544 " in reward.version
    # Resized as the published weights saw pictures: to 256 tokens or, where it was smaller, the next whole patches.
    usual = get_reward("hpsv3", model=str(folder), head=str(head), template=template)
    assert [usual._count(picture) for picture in usual._pictures(IMAGES)["image_grid_thw"]] == [14 * 20] * 4
    assert "pixels=200704,200704 " in usual.version
    with pytest.raises(RewardError, match="min_pixels 200704 is above max_pixels 9: give one that is not larger"):
        check_reward("hpsv3", model=str(folder), head=str(head), max_pixels=9)
    with pytest.raises(RewardError, match="min_pixels is 'abc'; it should be a valid integer"):
        check_reward("hpsv3", model=str(folder), head=str(head), min_pixels="abc")
    # A prompt brings no token of the model's own: it stays text.
    spoof = Prompt("uid", "<|Reward|>", None, {}, "")
    assert np.isfinite(reward(IMAGES[:1], [spoof]).scores).all()
    with pytest.raises(RewardError, match=r"template must have \{picture\}"):
        check_reward("hpsv3", model=str(folder), head=str(head), template="{prompt}<|Reward|>{picture}")
    plain = save_qwen2_vl(tmp_path / "plain")
    with pytest.raises(RewardError, match=r"does not know <\|Reward\|>"):
        get_reward("hpsv3", model=str(plain), head=str(head))


def test_weights_that_the_files_lack_are_refused_and_not_drawn(clip: Path, tmp_path: Path) -> None:
    tensors = load_file(clip / "model.safetensors")
    renamed = {name.replace("vision_model.", "open_clip.vision_model."): tensor for name, tensor in tensors.items()}
    shutil.copytree(clip, tmp_path / "wrong")
    save_file(renamed, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    said = (
        r"hps: \S+wrong lacks \d+ of the weights of CLIPModel, the first of them vision_model\S+, .*; they have \d+ "
        r"that it does not know, as open_clip\.vision_model\S+: give files that belong to it"
    )
    with pytest.raises(RewardError, match=said):
        get_reward("hps", model=str(tmp_path / "wrong"))


def test_a_bfloat16_clip_has_a_float32_cosine(clip: Path) -> None:
    """A cosine in bfloat16 has .001 at .2, which makes ties of pictures that differ."""
    reward = get_reward("pickscore", model=str(clip), processor=None, dtype="bfloat16")
    with torch.no_grad():
        images = reward.model.get_image_features(reward.pixels(IMAGES)).pooler_output
        inputs, rows = reward.tokens(PROMPTS)
        texts = reward.model.get_text_features(**inputs).pooler_output[rows]
    scale = CLIPModel.from_pretrained(clip).logit_scale.double().exp().item()
    assert images.dtype == torch.bfloat16
    expected = scale * torch.cosine_similarity(images.double(), texts.double())
    assert reward(IMAGES, PROMPTS).scores == pytest.approx(expected.numpy(), rel=1e-5)
    assert " bfloat16 cosine=float32 scale=float32 " in reward.version
    assert " float32 transformers" in get_reward("pickscore", model=str(clip), processor=None).version


def test_a_head_may_be_one_bare_layer_and_must_have_biases(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    layer = torch.nn.Linear(16, 1)
    save_file(layer.state_dict(), tmp_path / "linear.safetensors")
    _, output = direct(clip)
    found = get_reward("aesthetic", model=str(clip), head=str(tmp_path / "linear.safetensors"))(IMAGES, PROMPTS).scores
    assert found == pytest.approx(layer(output.image_embeds).detach().numpy()[:, 0], abs=1e-4)
    save_file({"linear.weight": layer.weight.detach()}, tmp_path / "biasless.safetensors")
    with pytest.raises(RewardError, match=r"has linear\.weight; of each layer it must have `<name>\.weight` and"):
        get_reward("aesthetic", model=str(clip), head=str(tmp_path / "biasless.safetensors"))


def test_weights_that_no_score_depends_on_may_be_missing(blip: Path, clip: Path, tmp_path: Path) -> None:
    """ImageReward's own code has no `itm_head`, and a head on pictures needs no text."""
    for folder, begins in ((blip, "itm_head."), (clip, "text_model.")):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(begins)}
        assert len(kept) < len(tensors)
        save_file(kept, copy / "model.safetensors", {"format": "pt"})
    heads = save_head(tmp_path / "text.safetensors", 32, 1), save_head(tmp_path / "picture.safetensors", 16, 1)
    for name, folder, head in (("image_reward", blip, heads[0]), ("aesthetic", clip, heads[1])):
        whole, part = (get_reward(name, model=str(of), head=head) for of in (folder, tmp_path / folder.name))
        assert np.array_equal(part(IMAGES, PROMPTS).scores, whole(IMAGES, PROMPTS).scores)
    with pytest.raises(RewardError, match="lacks"):
        get_reward("clip_score", model=str(tmp_path / clip.name))

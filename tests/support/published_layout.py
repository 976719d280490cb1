# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint's folder as the hub has such a model: shards, variants, old config and tokenizer files, and more.

What is read in place of the files that count has other numbers, so that it shows. The layouts are those of
stabilityai/stable-diffusion-3.5-medium and -3-medium-diffusers, Qwen/Qwen-Image, black-forest-labs/FLUX.1-dev
and FLUX.2-klein-base-4B, Tongyi-MAI/Z-Image, Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan2.2-TI2V-5B-Diffusers.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.tiny_models import (
    enliven,
    save_flux,
    save_flux_2_klein,
    save_stable_diffusion_3,
    save_wan,
    save_z_image,
)

STRAY = torch.full((64, 64), 9.0)
"""In files that nobody is to read."""
KL_VAE = (
    *("act_fn", "block_out_channels", "down_block_types", "force_upcast", "in_channels", "latent_channels"),
    *("latents_mean", "latents_std", "layers_per_block", "mid_block_add_attention", "norm_num_groups", "out_channels"),
    *("sample_size", "scaling_factor", "shift_factor", "up_block_types", "use_post_quant_conv", "use_quant_conv"),
)
WAN_VAE = (
    *("attn_scales", "base_dim", "dim_mult", "dropout", "latents_mean", "latents_std", "num_res_blocks"),
    *("temperal_downsample", "z_dim"),
)
WAN_2_2_VAE = (
    *WAN_VAE,
    *("decoder_base_dim", "in_channels", "is_residual", "out_channels", "patch_size"),
    *("scale_factor_spatial", "scale_factor_temporal"),
)
SD3 = (
    *("attention_head_dim", "caption_projection_dim", "in_channels", "joint_attention_dim", "num_attention_heads"),
    *("num_layers", "out_channels", "patch_size", "pooled_projection_dim", "pos_embed_max_size", "sample_size"),
)
WAN = (
    *("added_kv_proj_dim", "attention_head_dim", "cross_attn_norm", "eps", "ffn_dim", "freq_dim", "image_dim"),
    *("in_channels", "num_attention_heads", "num_layers", "out_channels", "patch_size", "qk_norm"),
    *("rope_max_seq_len", "text_dim"),
)
STATIC = ("num_train_timesteps", "shift")
DYNAMIC = (
    *("base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift", "num_train_timesteps", "shift"),
    "use_dynamic_shifting",
)
SOLVER = (
    *("beta_end", "beta_schedule", "beta_start", "disable_corrector", "dynamic_thresholding_ratio"),
    *("final_sigmas_type", "flow_shift", "lower_order_final", "num_train_timesteps", "predict_x0", "prediction_type"),
    *("rescale_betas_zero_snr", "sample_max_value", "solver_order", "solver_p", "solver_type", "steps_offset"),
    *("thresholding", "timestep_spacing", "trained_betas", "use_beta_sigmas", "use_exponential_sigmas"),
    *("use_flow_sigmas", "use_karras_sigmas"),
)


@dataclass(frozen=True)
class Layout:
    """How one model is published.

    Attributes:
        save: writes the tiny checkpoint.
        fields: component -> fields of its config file; what is left out is the class's default.
        shards: component -> number of its files, where it is more than one.
        variants: components that are there in fp16 besides.
        text: component -> what becomes of its config and of the names of its weights.
        tokenizers: component -> which files it is made of.
        index: keys of model_index.json beside the components that are there.
        stray: further files of weights.
        pipeline: sampling settings.
    """

    save: Callable[[Path], None]
    fields: Mapping[str, tuple[str, ...]]
    shards: Mapping[str, int] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    text: Mapping[str, Callable[[dict, dict], tuple[dict, dict]]] = field(default_factory=dict)
    tokenizers: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    index: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] = field(default_factory=dict)

    def publish(self, folder: Path) -> None:
        """Turn the tiny checkpoint in `folder` into this layout."""
        for component, names in self.fields.items():
            _keep_fields(folder / component, names)
        for component, change in self.text.items():
            _rewrite(folder / component, change)
        for component in self.variants:
            _write(folder / component, _stem(folder / component), self.shards.get(component, 1), stray=True)
        for component, count in self.shards.items():
            _write(folder / component, _stem(folder / component), count)
        for component, write in self.tokenizers.items():
            write(folder / component)
        _rewrite_index(folder, self.index)
        for name in self.stray:
            (folder / name).parent.mkdir(exist_ok=True)
            save_file({"model.diffusion_model.x": STRAY}, folder / name)
        for name in ("README.md", "LICENSE.md", ".gitattributes", ".cache/huggingface/download/README.md.metadata"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("as published\n")


def _stem(component: Path) -> str:
    return next(component.glob("*.safetensors")).name.partition(".")[0]


def _keep_fields(component: Path, names: tuple[str, ...]) -> None:
    file = next(component / name for name in ("config.json", "scheduler_config.json") if (component / name).is_file())
    config = json.loads(file.read_text())
    lacking = [name for name in names if name not in config]
    assert not lacking, f"{file} has no {lacking}"
    kept = {"_class_name": config["_class_name"], "_diffusers_version": "0.30.0.dev0"}
    file.write_text(json.dumps(kept | {name: config[name] for name in names}, indent=2))


def _rewrite(component: Path, change: Callable[[dict, dict], tuple[dict, dict]]) -> None:
    (file,) = component.glob("*.safetensors")
    config, tensors = change(json.loads((component / "config.json").read_text()), load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    config["torch_dtype"] = config.pop("dtype")
    (component / "config.json").write_text(json.dumps(config | {"transformers_version": "4.43.3"}, indent=2))


def _write(component: Path, stem: str, count: int, stray: bool = False) -> None:
    """A component's weights in `count` files with their index; as the variant fp16 they are stray."""
    whole = component / f"{stem}.safetensors"
    tensors, variant = load_file(whole), ".fp16" if stray else ""
    if stray:
        tensors = {name: torch.full_like(tensor, 9.0).half() for name, tensor in tensors.items()}
    if count == 1:
        save_file(tensors, component / f"{stem}{variant}.safetensors", metadata={"format": "pt"})
        return
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        place = 1 + number * count // len(tensors)
        files.setdefault(f"{stem}{variant}-{place:05d}-of-{count:05d}.safetensors", {})[name] = tensor
    for name, part in files.items():
        save_file(part, component / name, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    listed = {tensor: name for name, part in files.items() for tensor in part}
    index = component / f"{stem}.safetensors.index{variant}.json"
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": listed}))
    if not stray:
        whole.unlink()


def _rewrite_index(folder: Path, names: tuple[str, ...]) -> None:
    file, fast = folder / "model_index.json", {"T5Tokenizer": "T5TokenizerFast"}
    index = json.loads(file.read_text())
    there = {name: kind for name, kind in index.items() if isinstance(kind, list) and kind[0]}
    named = {name: [library, fast.get(kind, kind)] for name, (library, kind) in there.items()}
    kept = {name: index[name] for name in ("_class_name", *names)}
    file.write_text(json.dumps(kept | {"_diffusers_version": "0.30.0.dev0"} | named, indent=2))


# ---- text encoders as older versions of transformers wrote them


def as_it_was(config: dict, tensors: dict) -> tuple[dict, dict]:
    """The names of the weights and of the settings are the same."""
    return config, tensors


def untied_t5(config: dict, tensors: dict) -> tuple[dict, dict]:
    """T5 v1.1's and UMT5's output is not tied, and the encoder's embedding stands there as `shared` alone."""
    shared = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    return config | {"tie_word_embeddings": False}, shared


def clip(config: dict, tensors: dict) -> tuple[dict, dict]:
    """CLIP's text model had a name of its own within the model; where it has a projection, it has it still."""
    return config, {f"text_model.{name}": tensor for name, tensor in tensors.items()}


def qwen3_for_text(config: dict, tensors: dict) -> tuple[dict, dict]:
    """A language model whose output is its embedding."""
    changed = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, **_old_rotary(config)}
    return changed, {f"model.{name}": tensor for name, tensor in tensors.items()}


def qwen3(config: dict, tensors: dict) -> tuple[dict, dict]:
    """A language model of whose layers some are taken."""
    return _old_rotary(config), tensors


def qwen2_5_vl(config: dict, tensors: dict) -> tuple[dict, dict]:
    """The text model's settings stood in the config itself, and once more in `text_config`."""
    text = _old_rotary(config["text_config"])
    flat = {name: value for name, value in text.items() if name not in ("model_type", "layer_types")}
    changed = {name: value for name, value in config.items() if name != "text_config"}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    return flat | changed | {"text_config": text, "tie_word_embeddings": False}, tensors | head


def _old_rotary(config: dict) -> dict:
    rotary = dict(config["rope_parameters"])
    kept = {name: value for name, value in config.items() if name != "rope_parameters"}
    kept["rope_theta"] = rotary.pop("rope_theta")
    return kept | {"rope_scaling": rotary | {"type": "default"} if "mrope_section" in rotary else None}


# ---- tokenizers, of several files


def clip_files(folder: Path) -> None:
    """vocab.json and merges.txt, and no tokenizer.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, end = "<|startoftext|>", "<|endoftext|>"
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": _decoder(tokenizer, [begin, end]),
        "bos_token": begin,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "eos_token": end,
        "errors": "replace",
        "model_max_length": tokenizer.model_max_length,
        "pad_token": end,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": end,
    }
    special = {"bos_token": _token(begin), "eos_token": _token(end), "pad_token": end, "unk_token": _token(end)}
    _write_tokenizer(folder, config, special, tokenizer.get_vocab(), keep=())


def t5_files(folder: Path) -> None:
    """tokenizer.json and spiece.model, with a hundred tokens of its pre-training beyond the vocabulary."""
    tokenizer, extra = AutoTokenizer.from_pretrained(folder), [f"<extra_id_{number}>" for number in range(100)]
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    tokenizer.save_pretrained(folder)
    config = {
        "added_tokens_decoder": _decoder(tokenizer, ["<pad>", "</s>", "<unk>", *extra]),
        "additional_special_tokens": extra,
        "clean_up_tokenization_spaces": True,
        "eos_token": "</s>",
        "extra_ids": 100,
        "legacy": True,
        "model_max_length": 512,
        "pad_token": "<pad>",
        "tokenizer_class": "T5Tokenizer",
        "unk_token": "<unk>",
    }
    special = {"additional_special_tokens": extra} | {
        name: _token(config[name]) for name in ("eos_token", "pad_token", "unk_token")
    }
    _write_tokenizer(folder, config, special, None, keep=("tokenizer.json",))
    (folder / "spiece.model").write_bytes(b"\x0anot read where tokenizer.json is")


def qwen_files(folder: Path) -> None:
    """vocab.json, merges.txt and the chat's tokens in added_tokens.json, and no tokenizer.json."""
    _qwen(folder, keep=())


def qwen_files_with_json(folder: Path) -> None:
    """The same, and tokenizer.json; the chat's template stands in the config."""
    _qwen(folder, keep=("tokenizer.json",))


def _qwen(folder: Path, keep: tuple[str, ...]) -> None:
    tokenizer, template = AutoTokenizer.from_pretrained(folder), folder / "chat_template.jinja"
    special = [token for token in tokenizer.get_vocab() if token.startswith("<|")]
    added = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": _decoder(tokenizer, special),
        "additional_special_tokens": [token for token in special if token != "<|endoftext|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": {},
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if template.is_file():
        config["chat_template"] = template.read_text()
    base = {token: number for token, number in tokenizer.get_vocab().items() if token not in added}
    names = {"eos_token": _token("<|im_end|>"), "pad_token": _token("<|endoftext|>")}
    _write_tokenizer(folder, config, names, base, keep)
    (folder / "added_tokens.json").write_text(json.dumps(added))


def _write_tokenizer(folder: Path, config: dict, special: dict, vocab: dict | None, keep: tuple[str, ...]) -> None:
    merges = json.loads((folder / "tokenizer.json").read_text())["model"].get("merges", [])
    for file in folder.iterdir():
        if file.name not in keep:
            file.unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    if vocab is not None:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")


def _decoder(tokenizer: Any, tokens: list[str]) -> dict[str, Any]:
    return {str(tokenizer.convert_tokens_to_ids(token)): _token(token) | {"special": True} for token in tokens}


def _token(content: str) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


# ---- the models


def save_sd3_medium(folder: Path) -> None:
    """Stable Diffusion 3, before the second attention and the norms of 3.5."""
    save_stable_diffusion_3(folder, dual_attention_layers=(), qk_norm=None)


def save_wan_2_1(folder: Path) -> None:
    """A VAE 8 times smaller a side, and one timestep a sample."""
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.3, 0.7, 1.1, 0.9],
    )
    save_wan(folder, vae=enliven(vae), expand_timesteps=False)


def save_qwen_image(folder: Path) -> None:
    """The quickstart's, untrained."""
    from tests.support.helpers import save_tiny_model

    save_tiny_model(folder)


CLIPS = {"tokenizer": clip_files, "tokenizer_2": clip_files}
SD3_TEXT = {"text_encoder": as_it_was, "text_encoder_2": as_it_was, "text_encoder_3": untied_t5}
SD3_VARIANTS = ("text_encoder", "text_encoder_2", "text_encoder_3")
SIZE = {"height": 32, "width": 64}

LAYOUTS = {
    "sd3.5-medium": Layout(
        save_stable_diffusion_3,
        {"transformer": (*SD3, "dual_attention_layers", "qk_norm"), "vae": KL_VAE, "scheduler": DYNAMIC},
        {"text_encoder_3": 2},
        SD3_VARIANTS,
        SD3_TEXT,
        CLIPS | {"tokenizer_3": t5_files},
        stray=("sd3.5_medium.safetensors", "text_encoders/clip_l.safetensors", "text_encoders/t5xxl_fp16.safetensors"),
        pipeline={"guidance_scale": 4.5},
    ),
    "sd3-medium": Layout(
        save_sd3_medium,
        {"transformer": SD3, "vae": KL_VAE, "scheduler": STATIC},
        {"text_encoder_3": 2},
        SD3_VARIANTS,
        SD3_TEXT,
        CLIPS | {"tokenizer_3": t5_files},
        pipeline={"guidance_scale": 4.5},
    ),
    "flux.1-dev": Layout(
        save_flux,
        {
            # The published file has no axes_dims_rope either: the class's belong to heads of 128 channels.
            "transformer": (
                *("attention_head_dim", "guidance_embeds", "in_channels", "joint_attention_dim"),
                *("num_attention_heads", "num_layers", "num_single_layers", "patch_size", "pooled_projection_dim"),
                "axes_dims_rope",
            ),
            "vae": KL_VAE,
            "scheduler": DYNAMIC,
        },
        {"transformer": 3, "text_encoder_2": 2},
        text={"text_encoder": clip, "text_encoder_2": untied_t5},
        tokenizers={"tokenizer": clip_files, "tokenizer_2": t5_files},
        stray=("flux1-dev.safetensors", "ae.safetensors"),
        pipeline={"guidance_scale": 3.5},
    ),
    "flux.2-klein-base-4b": Layout(
        save_flux_2_klein,
        {
            "transformer": (
                *("attention_head_dim", "axes_dims_rope", "eps", "guidance_embeds", "in_channels"),
                *("joint_attention_dim", "mlp_ratio", "num_attention_heads", "num_layers", "num_single_layers"),
                *("out_channels", "patch_size", "rope_theta", "timestep_guidance_channels"),
            ),
            "vae": (
                *("act_fn", "batch_norm_eps", "batch_norm_momentum", "block_out_channels", "down_block_types"),
                *("force_upcast", "in_channels", "latent_channels", "layers_per_block", "mid_block_add_attention"),
                *("norm_num_groups", "out_channels", "patch_size", "sample_size", "up_block_types"),
                *("use_post_quant_conv", "use_quant_conv"),
            ),
            "scheduler": DYNAMIC,
        },
        {"text_encoder": 2},
        text={"text_encoder": qwen3},
        tokenizers={"tokenizer": qwen_files_with_json},
        stray=("flux-2-klein-base-4b.safetensors",),
        pipeline={"guidance_scale": 4.0},
    ),
    "qwen-image": Layout(
        save_qwen_image,
        {
            "transformer": (
                *("attention_head_dim", "axes_dims_rope", "guidance_embeds", "in_channels", "joint_attention_dim"),
                *("num_attention_heads", "num_layers", "out_channels", "patch_size"),
            ),
            "vae": WAN_VAE,
            "scheduler": (*DYNAMIC, "invert_sigmas", "shift_terminal", "stochastic_sampling", "time_shift_type"),
        },
        {"transformer": 9, "text_encoder": 4},
        text={"text_encoder": qwen2_5_vl},
        tokenizers={"tokenizer": qwen_files},
        pipeline={"true_cfg_scale": 4.0},
    ),
    "z-image": Layout(
        save_z_image,
        {
            "transformer": (
                *("all_f_patch_size", "all_patch_size", "axes_dims", "axes_lens", "cap_feat_dim", "dim"),
                *("in_channels", "n_heads", "n_kv_heads", "n_layers", "n_refiner_layers", "norm_eps", "qk_norm"),
                *("rope_theta", "t_scale"),
            ),
            "vae": KL_VAE,
            "scheduler": (*STATIC, "use_dynamic_shifting"),
        },
        {"transformer": 2, "text_encoder": 3},
        text={"text_encoder": qwen3_for_text},
        tokenizers={"tokenizer": qwen_files_with_json},
        pipeline={"guidance_scale": 4.0},
    ),
    "wan2.1-t2v-1.3b": Layout(
        save_wan_2_1,
        {"transformer": (*WAN, "pos_embed_seq_len"), "vae": WAN_VAE, "scheduler": SOLVER},
        {"transformer": 2, "text_encoder": 5},
        text={"text_encoder": untied_t5},
        tokenizers={"tokenizer": t5_files},
        pipeline={"guidance_scale": 5.0, "num_frames": 5},
    ),
    "wan2.2-ti2v-5b": Layout(
        save_wan,
        {"transformer": (*WAN, "pos_embed_seq_len"), "vae": WAN_2_2_VAE, "scheduler": SOLVER},
        {"transformer": 3, "text_encoder": 3},
        text={"text_encoder": untied_t5},
        tokenizers={"tokenizer": t5_files},
        index=("boundary_ratio", "expand_timesteps", "transformer_2"),
        pipeline={"guidance_scale": 5.0, "num_frames": 5},
    ),
}


def save_both(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny checkpoint as diffusers writes it today, and the same as it is published."""
    plain, published = folder / "plain", folder / "published"
    LAYOUTS[name].save(plain)
    shutil.copytree(plain, published)
    LAYOUTS[name].publish(published)
    return plain, published

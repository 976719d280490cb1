# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of vision-language models, CLIP and a detector: judges that answer nonsense."""

from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    ResNetConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}PICTURE{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def save_clip(folder: Path) -> Path:
    """A random CLIP of 24 x 24 pixels with a tokenizer of single characters."""
    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    text = SMALL | {"vocab_size": len(words), "max_position_embeddings": 20}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = SMALL | {"image_size": 24, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, logit_scale_init_value=2.3))
    for parameter in model.vision_model.parameters():  # as drawn, they are too small for a picture to make a difference
        parameter.data *= 8 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    sizes = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer).save_pretrained(folder)
    return folder


def save_detr(folder: Path, *labels: str) -> Path:
    """A random DETR that looks at 64 x 64 pixels, finds up to eight objects, and needs neither timm nor torchvision."""
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=8,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    torch.manual_seed(4)
    model = DetrForObjectDetection(config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():  # as transformers draws them, all objects are the same one
        if parameter.ndim == 2:
            parameter.data.normal_(std=5.0 if "query_position" in name else 0.25)
    model.save_pretrained(folder)
    DetrImageProcessorPil(size={"height": 64, "width": 64}, do_pad=False).save_pretrained(folder)
    return folder


def byte_tokenizer(picture: str, *special: str) -> Qwen2Tokenizer:
    """A token a byte, and the special ones after them; `picture` is what a chat has in a picture's place."""
    words = [*bytes_to_unicode().values(), "<|endoftext|>", START, END, *special]
    tokenizer = Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        eos_token=END,
        pad_token="<|endoftext|>",
        additional_special_tokens=[START, *special],
    )
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", picture)
    return tokenizer


def save_llava(folder: Path) -> Path:
    """A random LLaVA of 24 x 24 pixels, which needs no torchvision."""
    tokenizer = byte_tokenizer("<image>", "<image>")
    vision = SMALL | {"image_size": 24, "patch_size": 8, "projection_dim": 16, "model_type": "clip_vision_model"}
    text = SMALL | {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    picture = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=picture, vision_feature_layer=-1)
    model = LlavaForConditionalGeneration(config)
    # It never says what it was not taught: of the bytes that it may say, one in four ends its answer.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 256, 4)]
    for parameter in model.parameters():  # as drawn, they are too small for a picture to make a difference
        parameter.data *= 8 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)
    return folder


def save_qwen2_vl(folder: Path, *special: str) -> Path:
    """A random Qwen2-VL of pictures of up to 16 tokens, with these special tokens beside its own."""
    own = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *own, *special)
    begins, ends, image, video = tokenizer.convert_tokens_to_ids(list(own))
    text = SMALL | {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 2048}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    ids = {"image_token_id": image, "video_token_id": video}
    ids |= {"vision_start_token_id": begins, "vision_end_token_id": ends}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    for parameter in model.parameters():  # as drawn, they are too small for a picture to make a difference
        parameter.data *= 8 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28).save_pretrained(folder)
    return folder

"""Builds real models small: 2 layers, 64 wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn
import transformers as hf
from timm_alone import import_timm

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
VISION = {name: size for name, size in SIZES.items() if name != "vocab_size"}
STATE = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "vocab_size": 128}
LAYERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
GROUPED = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def bert(model: type[nn.Module], num_labels: int) -> nn.Module:
    return model(hf.BertConfig(**SIZES, num_labels=num_labels))


def deepseek_v3() -> nn.Module:
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **heads, **experts, moe_intermediate_size=48))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**GROUPED, **experts, head_dim=16))


def qwen2_5_vl() -> nn.Module:
    text = {**GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    tokens = {"vision_start_token_id": 2, "image_token_id": 3, "video_token_id": 0, "vision_end_token_id": 1}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def whisper() -> nn.Module:
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in LAYERS.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 128}
    lengths = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(d_model=64, **layers, **tokens, **lengths))


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel  # which takes seconds

    sides = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    heads = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "caption_projection_dim": 64}
    return SD3Transformer2DModel(**sides, **heads, joint_attention_dim=32, pooled_projection_dim=32)


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sides = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "norm_num_groups": 1, "num_embeds_ada_norm": 10}
    return DiTTransformer2DModel(**sides, num_layers=2, num_attention_heads=4, attention_head_dim=16)


def timm(name: str, **sizes: Any) -> nn.Module:
    return import_timm().create_model(name, **sizes, num_classes=10)


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "tied llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen3 moe": qwen3_moe,
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
    "deepseek v3": deepseek_v3,
    "qwen2.5 vl": qwen2_5_vl,
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, image_size=32, patch_size=8, num_labels=10)),
    "whisper": whisper,
    "bert, 2 classes": lambda: bert(hf.BertForSequenceClassification, 2),
    "bert, 3 classes": lambda: bert(hf.BertForSequenceClassification, 3),
    "bert, answers of 2": lambda: bert(hf.BertForQuestionAnswering, 2),
    "bert, answers of 3": lambda: bert(hf.BertForQuestionAnswering, 3),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**STATE)),
    "mamba2": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**STATE, num_heads=8, head_dim=16, n_groups=2)),
    "sd3": sd3,
    "dit": dit,
    "timm vit": lambda: timm("vit_tiny_patch16_224", depth=2, embed_dim=64, num_heads=2),
    "timm convnext": lambda: timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 16, 16)),
    "timm resnet": lambda: timm("resnet18", layers=(1, 1, 1, 1)),
}

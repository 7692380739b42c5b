"""Builds the architectures that `views_for` knows, 2 layers small, and runs their attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import transformers as hf
from real_models import GROUPED, VISION, deepseek_v3, qwen3_moe

LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WIDE_HEADS = {**GROUPED, "head_dim": 24}  # not hidden_size / num_attention_heads
PICTURE = {**VISION, "image_size": 16, "patch_size": 8}
WORDS = {**VISION, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}


def deepseek_v2(q_lora_rank: int | None) -> nn.Module:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    sizes = {**GROUPED, "num_key_value_heads": 4, **LATENT, **experts, "q_lora_rank": q_lora_rank}
    return hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**sizes))


def paligemma() -> nn.Module:
    text = {**WIDE_HEADS, "model_type": "gemma"}
    picture = {**PICTURE, "model_type": "siglip_vision_model"}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=picture, projection_dim=64, image_token_id=3)
    return hf.PaliGemmaForConditionalGeneration(config)


def siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config=WORDS, vision_config=PICTURE))


def qwen2_moe() -> nn.Module:
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=32))


def phi3() -> nn.Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, pad_token_id=0, max_position_embeddings=64))


def glm4_moe() -> nn.Module:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**WIDE_HEADS, **experts, use_qk_norm=True))


def olmo2() -> nn.Module:
    model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED, pad_token_id=0))
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()  # these norm all heads together
    return model


def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{**VISION, "vocab_size": 128}))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama, wide heads": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WIDE_HEADS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE_HEADS)),
    "qwen2 moe": qwen2_moe,
    "qwen3 moe": qwen3_moe,
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**WIDE_HEADS)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**WIDE_HEADS)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**WIDE_HEADS)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**GROUPED)),
    "helium": lambda: hf.HeliumForCausalLM(hf.HeliumConfig(**GROUPED, head_dim=16)),
    "olmo2": olmo2,
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED, pad_token_id=0)),
    "glm4 moe": glm4_moe,
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**GROUPED)),
    "phi3": phi3,
    "gpt neox": gpt_neox,
    "deepseek v2": lambda: deepseek_v2(16),
    "deepseek v2 lite": lambda: deepseek_v2(None),
    "deepseek v3": deepseek_v3,
    "paligemma": paligemma,
    "siglip": siglip,
}


def run(model: nn.Module) -> None:
    """Computes every attention of a model. Its towers run one by one."""
    tokens = torch.arange(4, 12)[None]
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    if isinstance(model, hf.PaliGemmaForConditionalGeneration):
        model.model.language_model(input_ids=tokens, use_cache=False)
        model.model.vision_tower(pixel_values=pixels)
    elif isinstance(model, hf.SiglipModel):
        model.text_model(input_ids=tokens)
        model.vision_model(pixel_values=pixels)
    else:
        model(input_ids=tokens, use_cache=False)

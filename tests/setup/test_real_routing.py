"""Who updates the parameters of real models: tables to read. Numbers of layers are `*`, vectors are left out.

"see rows" stands for "if it holds several, see dmuon.views.rows".
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route
from real_models import BUILD

# Whatever the number of classes.
_BERT_CLASSIFIES = """
        AdamW  bert.embeddings: word_embeddings, position_embeddings, token_type_embeddings  (embedding)
        Muon   bert.encoder.layer.*.attention.self: query, key, value  (matrix of Linear)
        Muon   bert.encoder.layer.*.attention.output: dense  (matrix of Linear)
        Muon   bert.encoder.layer.*.intermediate: dense  (matrix of Linear)
        Muon   bert.encoder.layer.*.output: dense  (matrix of Linear)
        Muon   bert.pooler: dense  (matrix of Linear)
        AdamW  classifier  (output head, by its name 'classifier')
    """
_BERT_ANSWERS = """
        AdamW  bert.embeddings: word_embeddings, position_embeddings, token_type_embeddings  (embedding)
        Muon   bert.encoder.layer.*.attention.self: query, key, value  (matrix of Linear)
        Muon   bert.encoder.layer.*.attention.output: dense  (matrix of Linear)
        Muon   bert.encoder.layer.*.intermediate: dense  (matrix of Linear)
        Muon   bert.encoder.layer.*.output: dense  (matrix of Linear)
        AdamW  qa_outputs  (output head, by its name 'qa_outputs')
    """

TABLES = {
    "llama": """
        AdamW  model: embed_tokens  (embedding)
        Muon   model.layers.*.self_attn: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   model.layers.*.mlp: gate_proj, up_proj, down_proj  (matrix of Linear)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "tied llama": """
        AdamW  model: embed_tokens  (tied to an embedding)
        Muon   model.layers.*.self_attn: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   model.layers.*.mlp: gate_proj, up_proj, down_proj  (matrix of Linear)
    """,
    "qwen3 moe": """
        AdamW  model: embed_tokens  (embedding)
        Muon   model.layers.*.self_attn: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   model.layers.*.mlp.experts: gate_up_proj  (a matrix for each expert; see gate_up or columns)
        Muon   model.layers.*.mlp.experts: down_proj  (a matrix for each expert)
        Muon   model.layers.*.mlp: gate  (matrix of a router, by its class's name)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "mixtral": """
        AdamW  model: embed_tokens  (embedding)
        Muon   model.layers.*.self_attn: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   model.layers.*.mlp: gate  (matrix of a router, by its class's name)
        Muon   model.layers.*.mlp.experts: gate_up_proj  (a matrix for each expert; see gate_up or columns)
        Muon   model.layers.*.mlp.experts: down_proj  (a matrix for each expert)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "deepseek v3": """
        AdamW  model: embed_tokens  (embedding)
        Muon   model.layers.*.self_attn: q_a_proj, q_b_proj, o_proj  (matrix of Linear)
        Muon   model.layers.*.self_attn: kv_a_proj_with_mqa  (matrix of Linear; see rows)
        Muon   model.layers.*.self_attn: kv_b_proj  (matrix of Linear; see interleaved)
        Muon   model.layers.*.mlp: gate_proj, up_proj, down_proj  (matrix of Linear)
        Muon   model.layers.*.mlp.experts: gate_up_proj  (a matrix for each expert; see gate_up or columns)
        Muon   model.layers.*.mlp.experts: down_proj  (a matrix for each expert)
        Muon   model.layers.*.mlp: gate  (matrix of a router, by its class's name)
        Muon   model.layers.*.mlp.shared_experts: gate_proj, up_proj, down_proj  (matrix of Linear)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "qwen2.5 vl": """
        AdamW  model.visual.patch_embed: proj  (no rule for Conv3d (5-D))
        Muon   model.visual.blocks.*.attn: qkv  (matrix of Linear; see qkv)
        Muon   model.visual.blocks.*.attn: proj  (matrix of Linear)
        Muon   model.visual.blocks.*.mlp: gate_proj, up_proj, down_proj  (matrix of Linear)
        Muon   model.visual.merger.mlp: *  (matrix of Linear)
        AdamW  model.language_model: embed_tokens  (embedding)
        Muon   model.language_model.layers.*.self_attn: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   model.language_model.layers.*.mlp: gate_proj, up_proj, down_proj  (matrix of Linear)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "gpt2": """
        AdamW  transformer: wte  (tied to an embedding)
        AdamW  transformer: wpe  (embedding)
        Muon   transformer.h.*.attn: c_attn  (matrix of Conv1D; see columns)
        Muon   transformer.h.*.attn: c_proj  (matrix of Conv1D)
        Muon   transformer.h.*.mlp: c_fc, c_proj  (matrix of Conv1D)
    """,
    "vit": """
        AdamW  vit.embeddings: cls_token  (embedding, by its name 'vit.embeddings.cls_token')
        AdamW  vit.embeddings: position_embeddings  (embedding, by its name 'vit.embeddings.position_embeddings')
        AdamW  vit.embeddings.patch_embeddings: projection  (no rule for Conv2d (4-D))
        Muon   vit.layers.*.attention: q_proj, k_proj, v_proj, o_proj  (matrix of Linear)
        Muon   vit.layers.*.mlp: fc1, fc2  (matrix of Linear)
        AdamW  classifier  (output head, by its name 'classifier')
    """,
    "whisper": """
        AdamW  model.encoder: conv1, conv2  (no rule for Conv1d (3-D))
        nobody  model.encoder: embed_positions  (frozen)
        Muon   model.encoder.layers.*.self_attn: k_proj, v_proj, q_proj, out_proj  (matrix of Linear)
        Muon   model.encoder.layers.*: fc1, fc2  (matrix of Linear)
        AdamW  model.decoder: embed_tokens  (tied to an embedding)
        AdamW  model.decoder: embed_positions  (embedding)
        Muon   model.decoder.layers.*.self_attn: k_proj, v_proj, q_proj, out_proj  (matrix of Linear)
        Muon   model.decoder.layers.*.encoder_attn: k_proj, v_proj, q_proj, out_proj  (matrix of Linear)
        Muon   model.decoder.layers.*: fc1, fc2  (matrix of Linear)
    """,
    "bert, 2 classes": _BERT_CLASSIFIES,
    "bert, 3 classes": _BERT_CLASSIFIES,
    "bert, answers of 2": _BERT_ANSWERS,
    "bert, answers of 3": _BERT_ANSWERS,
    "t5": """
        AdamW  shared  (tied to an embedding)
        Muon   encoder.block.*.layer.*.SelfAttention: q, k, v, o  (matrix of Linear)
        AdamW  encoder.block.*.layer.*.SelfAttention: relative_attention_bias  (embedding)
        Muon   encoder.block.*.layer.*.DenseReluDense: wi, wo  (matrix of Linear)
        Muon   decoder.block.*.layer.*.SelfAttention: q, k, v, o  (matrix of Linear)
        AdamW  decoder.block.*.layer.*.SelfAttention: relative_attention_bias  (embedding)
        Muon   decoder.block.*.layer.*.EncDecAttention: q, k, v, o  (matrix of Linear)
        Muon   decoder.block.*.layer.*.DenseReluDense: wi, wo  (matrix of Linear)
    """,
    "mamba": """
        AdamW  backbone: embeddings  (tied to an embedding)
        AdamW  backbone.layers.*.mixer: A_log  (no rule for MambaMixer)
        AdamW  backbone.layers.*.mixer: conv1d  (no rule for Conv1d (3-D))
        Muon   backbone.layers.*.mixer: in_proj  (matrix of Linear; see rows or interleaved)
        Muon   backbone.layers.*.mixer: x_proj, dt_proj, out_proj  (matrix of Linear)
    """,
    "mamba2": """
        AdamW  backbone: embeddings  (embedding)
        AdamW  backbone.layers.*.mixer: conv1d  (no rule for Conv1d (3-D))
        Muon   backbone.layers.*.mixer: in_proj  (matrix of Linear; see rows or interleaved)
        Muon   backbone.layers.*.mixer: out_proj  (matrix of Linear)
        AdamW  lm_head  (output head, by get_output_embeddings())
    """,
    "sd3": """
        AdamW  pos_embed: proj  (no rule for Conv2d (4-D))
        Muon   time_text_embed.timestep_embedder: linear_1, linear_2  (matrix of Linear)
        Muon   time_text_embed.text_embedder: linear_1, linear_2  (matrix of Linear)
        Muon   context_embedder  (matrix of Linear)
        Muon   transformer_blocks.*.norm1: linear  (matrix of Linear; see rows)
        Muon   transformer_blocks.*.norm1_context: linear  (matrix of Linear; see rows)
        Muon   transformer_blocks.*.attn: to_q, to_k, to_v, add_k_proj, add_v_proj, add_q_proj, to_add_out  (matrix of Linear)
        Muon   transformer_blocks.*.attn.to_out: *  (matrix of Linear)
        Muon   transformer_blocks.*.ff.net.*: proj  (matrix of Linear)
        Muon   transformer_blocks.*.ff.net: *  (matrix of Linear)
        Muon   transformer_blocks.*.ff_context.net.*: proj  (matrix of Linear)
        Muon   transformer_blocks.*.ff_context.net: *  (matrix of Linear)
        Muon   norm_out: linear  (matrix of Linear; see rows)
        AdamW  proj_out  (output head, by its name 'proj_out')
    """,  # noqa: E501
    "dit": """
        AdamW  pos_embed: proj  (no rule for Conv2d (4-D))
        Muon   transformer_blocks.*.norm1.emb.timestep_embedder: linear_1, linear_2  (matrix of Linear)
        AdamW  transformer_blocks.*.norm1.emb.class_embedder: embedding_table  (embedding)
        Muon   transformer_blocks.*.norm1: linear  (matrix of Linear; see rows)
        Muon   transformer_blocks.*.attn1: to_q, to_k, to_v  (matrix of Linear)
        Muon   transformer_blocks.*.attn1.to_out: *  (matrix of Linear)
        Muon   transformer_blocks.*.ff.net.*: proj  (matrix of Linear)
        Muon   transformer_blocks.*.ff.net: *  (matrix of Linear)
        Muon   proj_out_1  (matrix of Linear)
        AdamW  proj_out_2  (output head, by its name 'proj_out_2')
    """,
    "timm vit": """
        AdamW  cls_token  (a side of 1)
        AdamW  pos_embed  (embedding, by its name 'pos_embed')
        AdamW  patch_embed: proj  (no rule for Conv2d (4-D))
        Muon   blocks.*.attn: qkv  (matrix of Linear; see qkv)
        Muon   blocks.*.attn: proj  (matrix of Linear)
        Muon   blocks.*.mlp: fc1, fc2  (matrix of Linear)
        AdamW  head  (output head, by get_classifier())
    """,
    "timm convnext": """
        AdamW  stem: *  (no rule for Conv2d (4-D))
        AdamW  stages.*.blocks.*: conv_dw  (no rule for Conv2d (4-D))
        AdamW  stages.*.blocks.*.mlp: fc1, fc2  (no rule for Conv2d (4-D))
        AdamW  stages.*.downsample: *  (no rule for Conv2d (4-D))
        AdamW  head: fc  (output head, by get_classifier())
    """,
    "timm resnet": """
        AdamW  conv1  (no rule for Conv2d (4-D))
        AdamW  layer1.*: conv1, conv2  (no rule for Conv2d (4-D))
        AdamW  layer2.*: conv1, conv2  (no rule for Conv2d (4-D))
        AdamW  layer2.*.downsample: *  (no rule for Conv2d (4-D))
        AdamW  layer3.*: conv1, conv2  (no rule for Conv2d (4-D))
        AdamW  layer3.*.downsample: *  (no rule for Conv2d (4-D))
        AdamW  layer4.*: conv1, conv2  (no rule for Conv2d (4-D))
        AdamW  layer4.*.downsample: *  (no rule for Conv2d (4-D))
        AdamW  fc  (output head, by get_classifier())
    """,
}


def table_of(model: nn.Module) -> list[str]:
    """A line for what one updates in a module, and why: "who  module: its parameters  (why)"."""
    who = {"muon": "Muon", "adamw": "AdamW", "frozen": "nobody"}
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in route(model, None)[1]:
        if len(row.shape) > 1:
            name = re.sub(r"[.]\d+(?=[.])", ".*", row.name.removesuffix(".weight") + ".").removesuffix(".")
            module, _, short = name.rpartition(".")
            why = row.why.replace("if it holds several, see dmuon.views.", "see ")
            names = lines.setdefault((who[row.algorithm], module, why), [])
            if short not in names:
                names.append(short)
    return [
        f"{who:5}  {module + ': ' if module else ''}{', '.join(names)}  ({why})"
        for (who, module, why), names in lines.items()
    ]


def built(name: str) -> nn.Module:
    with torch.device("meta"):
        return BUILD[name]()


@pytest.mark.parametrize("name", BUILD)
def test_each_kind_of_parameter_goes_where_a_reader_would_send_it(name):
    assert table_of(built(name)) == [line.strip() for line in TABLES[name].strip().splitlines()]

"""Trains LoRA adapters of a frozen Llama, with PEFT; their matrices by Muon.

    torchrun --nproc-per-node 4 examples/peft_lora.py

get_peft_model comes first: dedicate_params takes the matrices that are trainable then. Frozen weights stay with FSDP2,
which shards them. They have no optimizer state.
"""

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

VOCABULARY, LENGTH, BATCH_SIZE, NUM_STEPS = 64, 17, 8, 40  # the batch of a rank
LR, WEIGHT_DECAY, MAX_NORM = 1e-2, 0.1, 1.0


def sentences(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    """[BATCH_SIZE, LENGTH] tokens: sentences that count on from a random number."""
    generator = torch.Generator().manual_seed(step * num_ranks + rank)
    first = torch.randint(0, VOCABULARY, (BATCH_SIZE, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def make_model() -> PeftModel:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    # This stands for a trained model, so its weights are larger than an untrained one's.
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **sizes))
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/peft_lora"), help="folder for the adapter")
    out = parser.parse_args().out

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (num_ranks,))
    model = make_model().to(device)
    dmuon.dedicate_params(model, mesh)
    for module in [*model.get_base_model().model.layers, model]:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY)

    for step in range(NUM_STEPS):
        tokens = sentences(step, rank, num_ranks).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        dmuon.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    # Gathers trainable weights only, not the base.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(out, state_dict=weights)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

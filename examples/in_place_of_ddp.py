"""Trains a Llama whose weights are whole on every rank, as under DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/in_place_of_ddp.py

Three lines of a program for DistributedDataParallel change: `replicated=True` takes the place of the wrapper. Owners
alone have masters and momenta of matrices.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

VOCABULARY, LENGTH, BATCH_SIZE, NUM_STEPS, NUM_MICRO_STEPS = 64, 17, 8, 40, 2  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 2e-2, 3e-3, 0.1, 1.0


def sentences(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    """[BATCH_SIZE, LENGTH] tokens: sentences that count on from a random number."""
    generator = torch.Generator().manual_seed(step * num_ranks + rank)
    first = torch.randint(0, VOCABULARY, (BATCH_SIZE, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/in_place_of_ddp.pt"), help="file for the weights")
    out = parser.parse_args().out

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (num_ranks,))
    model = make_model().to(device)
    dmuon.dedicate_params(model, mesh, replicated=True)  # instead of model = DistributedDataParallel(model)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    for step in range(NUM_STEPS):
        parts = sentences(step, rank, num_ranks).to(device).chunk(NUM_MICRO_STEPS)
        for index, tokens in enumerate(parts):
            is_last = index == NUM_MICRO_STEPS - 1
            with contextlib.nullcontext() if is_last else dmuon.no_sync(model):  # instead of model.no_sync()
                loss = model(input_ids=tokens, labels=tokens).loss / NUM_MICRO_STEPS
                loss.backward()
        dmuon.clip_grad_norm_(model, MAX_NORM)  # instead of torch.nn.utils.clip_grad_norm_
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item() * NUM_MICRO_STEPS:.3f}")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

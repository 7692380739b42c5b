"""Trains a Llama of Transformers with Accelerate.

    torchrun --nproc-per-node 4 examples/accelerate_llama.py

The program shards the model by itself: dedicate_params, fully_shard, Muon. Accelerate gets the result and does the
rest: it distributes the data, moves it, scales losses, clips. Call prepare_model with evaluation_mode=True and use the
model that it returns. This call puts no DDP around the model; prepare would.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

VOCABULARY, LENGTH = 64, 17
NUM_SENTENCES, BATCH_SIZE = 640, 8  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 5e-3, 2e-3, 0.1, 1.0


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sentences that count on from a random number."""

    def __init__(self) -> None:
        first = torch.randint(0, VOCABULARY, (NUM_SENTENCES, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (first + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return NUM_SENTENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/accelerate_llama"), help="folder for the whole model")
    out = parser.parse_args().out

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    model = make_model().to(accelerator.device)
    dmuon.dedicate_params(model, mesh)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, data = accelerator.prepare(optimizer, DataLoader(Counting(), batch_size=BATCH_SIZE))
    for step, batch in enumerate(data):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}: loss {loss.item():.3f}")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        model.save_pretrained(out, state_dict=weights)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Trains a Llama of Transformers with Accelerate, which shards it by FSDP2.

    torchrun --nproc-per-node 4 examples/accelerate_llama.py

dmuon.prepare follows accelerator.prepare and exchanges the optimizer. Everything else is as without dmuon. With
--resume the program goes on from the checkpoint that its first run saved after half of the steps.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

VOCABULARY, LENGTH = 64, 17
NUM_SENTENCES, BATCH_SIZE = 640, 8  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 1e-2, 4e-3, 0.1, 1.0


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


def make_accelerator() -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, step_scheduler_with_optimizer=False
    )
    if accelerator.device.type == "cpu":  # which Accelerate would not shard on
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/accelerate_llama"), help="folder for the whole model")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/accelerate_llama_half"), help="folder")
    parser.add_argument("--resume", action="store_true", help="begin with the checkpoint")
    arguments = parser.parse_args()

    accelerator = make_accelerator()
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    num_steps = NUM_SENTENCES // BATCH_SIZE // accelerator.num_processes
    schedule = LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    data = DataLoader(Counting(), batch_size=BATCH_SIZE)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    model, optimizer, schedule = dmuon.prepare(
        accelerator, model, optimizer, schedule, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY
    )

    first = num_steps // 2 if arguments.resume else 0
    if arguments.resume:
        accelerator.load_state(arguments.checkpoint)
    for step, batch in enumerate(accelerator.skip_first_batches(data, first), first + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
        if step == num_steps // 2:
            accelerator.save_state(arguments.checkpoint)

    weights = accelerator.get_state_dict(model)  # on all ranks
    accelerator.unwrap_model(model).save_pretrained(
        arguments.out, state_dict=weights, is_main_process=accelerator.is_main_process
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

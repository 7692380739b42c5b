"""Trains a Qwen2 of Transformers with its Trainer, which shards it by FSDP2.

    torchrun --nproc-per-node 4 examples/transformers_trainer.py

Trainer makes its own optimizer and lets Accelerate shard the model. Then it calls create_scheduler, and dmuon.prepare
exchanges the optimizer. Everything else is Trainer's, checkpoints too. With --resume the program goes on from the
checkpoint that its first run saved after half of the steps.
"""

import argparse
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

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


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


class MuonTrainer(Trainer):
    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        dmuon.prepare(self.accelerator, self.model, self.optimizer, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)
        return super().create_scheduler(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.use_cpu:  # which Accelerate would not shard on
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out/transformers_trainer", help="folder for checkpoints and the whole model")
    parser.add_argument("--resume", help="folder of a checkpoint to begin with, such as OUT/checkpoint-10")
    arguments = parser.parse_args()

    args = TrainingArguments(
        output_dir=arguments.out,
        use_cpu=not torch.cuda.is_available(),
        fsdp=True,
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="linear",
        logging_steps=5,
        save_strategy="steps",
        save_steps=0.5,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MuonTrainer(make_model(), args, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model()


if __name__ == "__main__":
    main()

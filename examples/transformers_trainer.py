"""Trains a Qwen2 of Transformers with its Trainer.

    torchrun --nproc-per-node 4 examples/transformers_trainer.py

The program shards the model by itself: dedicate_params, fully_shard, Muon, on the device that Trainer has chosen.
Trainer gets the optimizer and does the rest. The program changes two defaults of Trainer: prepare_model with
evaluation_mode=True keeps Trainer from putting DDP around the model, and save_model saves a state dict that all ranks
gather.
"""

import argparse

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

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


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


class Arguments(TrainingArguments):
    place_model_on_device = False  # the model is there already


class ShardedTrainer(Trainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)  # on all ranks
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=weights)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out/transformers_trainer", help="folder for the whole model")
    out = parser.parse_args().out

    args = Arguments(
        output_dir=out,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    model = make_model().to(args.device)
    dmuon.dedicate_params(model, mesh)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    trainer = ShardedTrainer(model, args, train_dataset=Counting(), optimizers=(optimizer, None))
    trainer.accelerator.prepare_model(model, evaluation_mode=True)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

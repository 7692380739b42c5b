"""Trains a small GPT with Lightning, goes on from Lightning's own checkpoint, and evaluates one.

    torchrun --nproc-per-node 4 examples/lightning_gpt.py
    torchrun --nproc-per-node 4 examples/lightning_gpt.py --epochs 2 --resume out/lightning_gpt.ckpt
    torchrun --nproc-per-node 4 examples/lightning_gpt.py --validate out/lightning_gpt.ckpt

ModelParallelStrategy lets the module shard itself: configure_model calls dedicate_params and fully_shard. Lightning
calls configure_optimizers next, which makes the Muon. To evaluate alone it makes no optimizer, so configure_model
leaves dedicate_params out.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dmuon

VOCABULARY, LENGTH = 64, 17
NUM_SENTENCES, BATCH_SIZE = 320, 8  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 5e-3, 2e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return x


class Gpt(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make_model() -> Gpt:
    torch.manual_seed(0)  # the same weights on every rank
    return Gpt()


def sentences() -> torch.Tensor:
    """[NUM_SENTENCES, LENGTH] tokens: sentences that count on from a random number."""
    first = torch.randint(0, VOCABULARY, (NUM_SENTENCES, 1), generator=torch.Generator().manual_seed(0))
    return (first + torch.arange(LENGTH)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Training(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Gpt | None = None

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this for fit, and again for validate and test
            return
        self.model = make_model().to(self.device)
        mesh = self.device_mesh["data_parallel"]
        if self.trainer.state.fn == "fit":  # validate, test and predict of a new module make no Muon
            dmuon.dedicate_params(self, mesh)  # the module that Lightning saves
        for module in [*self.model.blocks, self.model]:
            fully_shard(module, mesh=mesh)

    def configure_optimizers(self) -> dmuon.Muon:
        return dmuon.Muon(self, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = loss_of(self.model, batch[0])
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: loss {loss.item():.3f}")
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", loss_of(self.model, batch[0]), sync_dist=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="a file that --out wrote")
    parser.add_argument("--validate", type=Path, help="a file that --out wrote, to evaluate without training")
    parser.add_argument("--out", type=Path, default=Path("out/lightning_gpt.ckpt"), help="file for the checkpoint")
    arguments = parser.parse_args()

    num_ranks, on_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = ModelParallelStrategy(
        data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    trainer = lightning.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=on_node,
        num_nodes=num_ranks // on_node,
        strategy=strategy,
        max_epochs=arguments.epochs,
        gradient_clip_val=MAX_NORM,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = DataLoader(TensorDataset(sentences()), batch_size=BATCH_SIZE)
    if arguments.validate is None:
        trainer.fit(Training(), data, ckpt_path=arguments.resume)
        trainer.save_checkpoint(arguments.out)
    else:
        (found,) = trainer.validate(Training(), data, ckpt_path=arguments.validate, verbose=False)
        if trainer.is_global_zero:
            print(f"validation: loss {found['loss']:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

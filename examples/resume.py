"""Trains with checkpoints. Started again, it goes on from the newest whole one, on any number of ranks.

    torchrun --nproc-per-node 4 examples/resume.py

Stop it and run it again, or say --steps 60, on as many ranks as you like: the loss goes on where it was. The folder
out/resume holds the checkpoints; without it the program starts anew. A batch depends on the step alone and is divided
between the ranks, so the training does not depend on their number, as long as that divides the batch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

NUM_WORDS, BATCH_SIZE, NUM_STEPS, SAVE_EVERY = 96, 96, 30, 5  # the batch of all ranks
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 5e-3, 2e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Embedding(NUM_WORDS, 64), *(Block(64) for _ in range(3)), nn.Linear(64, NUM_WORDS))


def words(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    """This rank's part of the batch of a step."""
    drawn = torch.randint(0, NUM_WORDS, (BATCH_SIZE,), generator=torch.Generator().manual_seed(step))
    return drawn[rank::num_ranks]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of predicting the next number from each number."""
    return nn.functional.cross_entropy(model(tokens), (tokens + 1) % NUM_WORDS)


def is_whole(checkpoint: Path) -> bool:
    """True if a save came to its end and no file has been cut off since."""
    if not (checkpoint / ".metadata").exists():
        return False
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    places = dcp.FileSystemReader(checkpoint).read_metadata().storage_data.values()
    return all(sizes.get(place.relative_path, 0) >= place.offset + place.length for place in places)


def save(model: nn.Module, optimizer: dmuon.Muon, folder: Path, step: int) -> None:
    weights, state = dsd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")


def resume(model: nn.Module, optimizer: dmuon.Muon, folder: Path) -> int:
    """The step of the newest whole checkpoint, which is loaded; 0: there is none."""
    step = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if is_whole(path)), default=0)
    if step > 0:
        weights, state = dsd.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
        dsd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="to end after, counted from the first start")
    parser.add_argument("--folder", type=Path, default=Path("out/resume"), help="for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/resume.pt"), help="file for the whole weights")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (num_ranks,))
    model = make_model().to(device)
    dmuon.dedicate_params(model, mesh)
    for module in [*list(model)[1:-1], model]:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    first = resume(model, optimizer, arguments.folder)
    if rank == 0 and first > 0:
        print(f"goes on after step {first}")
    for step in range(first, arguments.steps):
        loss = loss_of(model, words(step, rank, num_ranks).to(device))
        loss.backward()
        dmuon.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            save(model, optimizer, arguments.folder, step + 1)

    weights = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, arguments.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

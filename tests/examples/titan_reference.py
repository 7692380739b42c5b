"""Trains as torchtitan's trainer does on NUM_RANKS ranks, in one process, by the reference optimizer.

    python titan_reference.py NUM_RANKS OUT --module torchtitan_muon --config ...

Builds the model, the data of each rank and the schedule by torchtitan's config. Saves the weights before and after
training, in the form of the model's state dict, and the losses.
"""

import sys
from pathlib import Path

import titan_on_cpu  # noqa: F401  (before torchtitan)
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from reference import ReferenceMuon
from torchtitan.config import ConfigManager


def main() -> None:
    num_ranks, out = int(sys.argv[1]), sys.argv[2]
    config = ConfigManager().parse_args(sys.argv[3:])
    training, arguments = config.training, config.optimizer
    config.model_spec.model.update_from_config(config=config)
    torch.manual_seed(config.debug.seed)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()

    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    sizes = {"seq_len": training.seq_len, "local_batch_size": training.local_batch_size}
    data = [
        iter(config.dataloader.build(dp_world_size=num_ranks, dp_rank=rank, tokenizer=tokenizer, **sizes))
        for rank in range(num_ranks)
    ]
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    heads = {  # the fused weight by heads of Q, K and V
        name: lambda matrix: matrix.split(model.layers["0"].attention.head_dim) for name in matrices if "wqkv" in name
    }
    optimizer = ReferenceMuon(
        model, matrices, arguments.lr, arguments.weight_decay, adamw_lr=arguments.adamw_lr, cuts=heads
    )
    rate = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the factor of the rates
    (schedule,) = config.lr_scheduler.build(optimizers=[rate], training_steps=training.steps)

    initial, losses = {name: value.clone() for name, value in model.state_dict().items()}, []
    for _ in range(training.steps):
        batches = [next(batches) for batches in data]
        num_tokens, total = sum(int((labels != -100).sum()) for _, labels in batches), 0.0
        for inputs, labels in batches:
            masks = model.get_attention_masks(positions=inputs["positions"])
            logits = model(inputs["input"], positions=inputs["positions"], attention_masks=masks)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / num_tokens).backward()
            total += loss.item() / num_tokens
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        factor = rate.param_groups[0]["lr"]
        optimizer.lr, optimizer.adamw.param_groups[0]["lr"] = arguments.lr * factor, arguments.adamw_lr * factor
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        schedule.step()
    torch.save({"initial": initial, "final": model.state_dict(), "losses": losses}, out)


if __name__ == "__main__":
    main()

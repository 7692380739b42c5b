"""Each program of examples/ runs on four ranks, its loss falls, and it ends with the weights of one process.

That process imports the recipe's model and data, and trains with the reference optimizer, which shares no code with
dmuon. Half of them run on one node of four ranks, half on two nodes of two; RECIPE_NODES in the environment, 1 or 2,
says it for all.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import peft
import pytest
import torch
import torch.nn as nn
import transformers
from models import weights_of_plain
from reference import ReferenceMuon
from scenario import assert_equal_to_reference
from torch.utils.data import DistributedSampler

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_RANKS = 4
RUN_S = 600  # a limit for hangs: the slowest run takes 12 s on an idle machine

BOUND = 1e-4  # of |W - W_ref| / |W_ref - W_0|; seen: 1e-5

Weights = dict[str, torch.Tensor]


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, *command: str) -> dict[int, float]:
    """Runs a program on ranks, in `folder`; the loss that it prints of each step."""
    own = {"OMP_NUM_THREADS": "1", "DMUON_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def run_in_fp32(folder: Path, name: str, *options: str, num_ranks: int = NUM_RANKS, nodes: int = 1) -> dict[int, float]:
    nodes = math.gcd(int(os.environ.get("RECIPE_NODES", nodes)), num_ranks)
    launcher = str(Path(__file__).parent / "ranks_in_fp32.py")
    return run(folder, launcher, str(num_ranks), str(nodes), str(EXAMPLES / f"{name}.py"), *options)


def reference(
    module: ModuleType,
    model: nn.Module,
    is_matrix: Callable[[str], bool],
    loss: Callable[[int], torch.Tensor],
    num_steps: int,
    decays: bool = False,
) -> tuple[Weights, Weights]:
    """(initial, final) weights; `loss` of a step is the mean over the ranks. `decays`: the rates do, linearly to 0."""
    initial = weights_of_plain(model)
    names = [name for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad and is_matrix(name)]
    adamw_lr = getattr(module, "ADAMW_LR", 3e-4)
    optimizer = ReferenceMuon(model, names, module.LR, module.WEIGHT_DECAY, adamw_lr=adamw_lr)
    for step in range(num_steps):
        if decays:
            optimizer.lr = module.LR * (1 - step / num_steps)
            optimizer.adamw.param_groups[0]["lr"] = adamw_lr * (1 - step / num_steps)
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), module.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return initial, weights_of_plain(model)


def of_all_ranks(module: ModuleType, step: int) -> torch.Tensor:
    return torch.cat([module.sentences(step, rank, NUM_RANKS) for rank in range(NUM_RANKS)])


def assert_falls(losses: dict[int, float], num_steps: int) -> None:
    assert list(losses) == list(range(1, num_steps + 1))
    assert losses[num_steps] < losses[1] / 2


def assert_same_file(folder: Path, *models: str) -> None:
    """Bit by bit: Transformers writes weights and names in one order."""
    first, second = ((folder / model / "model.safetensors").read_bytes() for model in models)
    assert first == second


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_its_first_lines_say_the_command(name):
    first_lines = (EXAMPLES / name).read_text().split('"""')[1]
    assert f"torchrun --nproc-per-node 4 examples/{name}" in first_lines


def test_train(tmp_path):
    """By torchrun itself, as all of them say; the others' ranks are started in a cheaper way."""
    # The address: a host name may not resolve.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    losses = run(tmp_path, *torchrun, "--nproc-per-node", str(NUM_RANKS), str(EXAMPLES / "train.py"))
    assert list(losses) == [5, 10, 15, 20]
    assert losses[20] < losses[5] - 0.5


def test_accelerate_llama(tmp_path):
    checkpoint = ("--checkpoint", "half")
    losses = run_in_fp32(tmp_path, "accelerate_llama", "--out", "model", *checkpoint, nodes=2)
    rest = run_in_fp32(tmp_path, "accelerate_llama", "--out", "resumed", *checkpoint, "--resume", nodes=2)
    module = recipe("accelerate_llama")
    tokens, size = module.Counting().tokens, NUM_RANKS * module.BATCH_SIZE
    num_steps = len(tokens) // size
    assert_falls(losses, num_steps)
    assert rest == {step: loss for step, loss in losses.items() if step > num_steps // 2}
    assert_same_file(tmp_path, "model", "resumed")

    def loss(step: int) -> torch.Tensor:
        batch = tokens[step * size : (step + 1) * size]
        return model(input_ids=batch, labels=batch).loss

    model = module.make_model()
    initial, expected = reference(module, model, lambda name: "layers" in name, loss, num_steps, decays=True)
    got = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal_to_reference(initial, expected, weights_of_plain(got), BOUND)


def test_transformers_trainer(tmp_path):
    run_in_fp32(tmp_path, "transformers_trainer", "--out", "model")
    run_in_fp32(tmp_path, "transformers_trainer", "--out", "resumed", "--resume", "model/checkpoint-10")
    assert_same_file(tmp_path, "model", "resumed")
    module = recipe("transformers_trainer")
    size = NUM_RANKS * module.BATCH_SIZE
    seed = transformers.TrainingArguments(use_cpu=True).seed  # by which Trainer shuffles
    order = torch.randperm(module.NUM_SENTENCES, generator=torch.Generator().manual_seed(seed))
    batches = module.Counting().tokens[order].split(size)

    def loss(step: int) -> torch.Tensor:
        return model(input_ids=batches[step], labels=batches[step]).loss

    model = module.make_model()
    initial, expected = reference(module, model, lambda name: "layers" in name, loss, len(batches), decays=True)
    assert loss(0) < 2
    got = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal_to_reference(initial, expected, weights_of_plain(got), BOUND)


def test_lightning_gpt(tmp_path):
    losses = run_in_fp32(tmp_path, "lightning_gpt", "--out", "first.ckpt")
    losses |= run_in_fp32(tmp_path, "lightning_gpt", "--epochs", "2", "--resume", "first.ckpt", "--out", "second.ckpt")
    module = recipe("lightning_gpt")
    tokens, size = module.sentences(), module.BATCH_SIZE
    num_steps = len(tokens) // (NUM_RANKS * size)
    assert_falls(losses, 2 * num_steps)
    samplers = [DistributedSampler(tokens, NUM_RANKS, rank) for rank in range(NUM_RANKS)]  # as Lightning deals out

    def loss(step: int) -> torch.Tensor:
        epoch, step = divmod(step, num_steps)
        batch = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            batch += list(sampler)[step * size : (step + 1) * size]
        return module.loss_of(model, tokens[batch])

    model = module.make_model()
    initial, expected = reference(module, model, lambda name: "blocks" in name, loss, 2 * num_steps)
    saved = torch.load(tmp_path / "second.ckpt", weights_only=True)["state_dict"]
    assert_equal_to_reference(initial, expected, {name.removeprefix("model."): w for name, w in saved.items()}, BOUND)


def test_torchtitan_order(tmp_path):
    losses = run_in_fp32(tmp_path, "torchtitan_order", "--folder", "checkpoints", "--out", "first.pt", nodes=2)
    losses |= run_in_fp32(tmp_path, "torchtitan_order", "--folder", "checkpoints", "--out", "second.pt", nodes=2)
    module = recipe("torchtitan_order")
    assert_falls(losses, 2 * module.NUM_STEPS)

    def loss(step: int) -> torch.Tensor:
        return module.loss_of(model, of_all_ranks(module, step))

    model = module.Transformer()
    torch.manual_seed(0)
    model.init_weights()
    initial, expected = reference(module, model, lambda name: "layers" in name, loss, 2 * module.NUM_STEPS)
    assert_equal_to_reference(initial, expected, torch.load(tmp_path / "second.pt", weights_only=True), BOUND)


def test_peft_lora(tmp_path):
    losses = run_in_fp32(tmp_path, "peft_lora", "--out", "adapter", nodes=2)
    module = recipe("peft_lora")
    assert_falls(losses, module.NUM_STEPS)

    def loss(step: int) -> torch.Tensor:
        tokens = of_all_ranks(module, step)
        return model(input_ids=tokens, labels=tokens).loss

    model = module.make_model()
    initial, expected = reference(module, model, lambda name: True, loss, module.NUM_STEPS)
    got = module.make_model()
    found = peft.set_peft_model_state_dict(got, peft.load_peft_weights(str(tmp_path / "adapter"), device="cpu"))
    assert found.unexpected_keys == []
    assert_equal_to_reference(initial, expected, weights_of_plain(got), BOUND)


def test_pipeline(tmp_path):
    losses = run_in_fp32(tmp_path, "pipeline", "--out", "stages")
    module = recipe("pipeline")
    assert list(losses) == list(range(1, module.NUM_STEPS + 1))
    assert losses[module.NUM_STEPS] < 0.7 * losses[1]

    def loss(step: int) -> torch.Tensor:
        batches = [module.batch(step, rank) for rank in range(2)]
        return module.mean_square(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))

    model = module.make_model()
    initial, expected = reference(module, model, lambda _: True, loss, module.NUM_STEPS)
    got = {}
    for index in range(module.NUM_STAGES):
        got |= torch.load(tmp_path / "stages" / f"stage_{index}.pt")
    assert_equal_to_reference(initial, expected, got, BOUND)


def test_resume_on_another_number_of_ranks(tmp_path):
    losses = run_in_fp32(tmp_path, "resume", "--steps", "12", "--folder", "checkpoints", "--out", "first.pt", nodes=2)
    module = recipe("resume")
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-10", "step-5"]
    # What a save that was killed leaves: files, but not .metadata, which is written last.
    shutil.copytree(tmp_path / "checkpoints/step-5", tmp_path / "checkpoints/step-15")
    (tmp_path / "checkpoints/step-15/.metadata").unlink()
    rest = run_in_fp32(tmp_path, "resume", "--folder", "checkpoints", "--out", "second.pt", num_ranks=3)
    assert next(iter(rest)) == 11
    assert_falls(losses | rest, module.NUM_STEPS)

    def loss(step: int) -> torch.Tensor:
        return module.loss_of(model, module.words(step, 0, 1))

    model = module.make_model()
    initial, expected = reference(module, model, lambda name: "up" in name or "down" in name, loss, module.NUM_STEPS)
    assert_equal_to_reference(initial, expected, torch.load(tmp_path / "second.pt", weights_only=True), BOUND)

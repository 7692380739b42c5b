"""Each program of examples/ runs on four ranks, its loss falls, and it ends with the weights of one process.

That process imports the recipe's model and data, and trains with the reference optimizer, which shares no code with
dmuon. Half of them run on one node of four ranks, half on two nodes of two; RECIPE_NODES in the environment, 1 or 2,
says it for all.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import torch.nn as nn
import transformers
from models import weights_of_plain
from reference import ReferenceMuon
from scenario import assert_equal_to_reference
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DistributedSampler

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parents[1] / "examples"
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
    """Runs a program on ranks, in `folder`; the loss that it prints of each step, 0 of a validation."""
    own = {"OMP_NUM_THREADS": "1", "DMUON_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    own |= {"HF_HOME": str(folder / "cache"), "PYTHONPATH": str(EXAMPLES)}
    own["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no thread before ranks are forked
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    found += [(0, loss) for loss in re.findall(r"^validation: loss (\S+)$", done.stdout, re.MULTILINE)]
    found += re.findall(r"step: +(\d+) +loss: +(\S+) ", done.stdout)  # torchtitan's
    return {int(step): float(loss) for step, loss in found}


def run_in_fp32(folder: Path, name: str, *options: str, num_ranks: int = NUM_RANKS, nodes: int = 1) -> dict[int, float]:
    nodes = math.gcd(int(os.environ.get("RECIPE_NODES", nodes)), num_ranks)
    launcher = str(TESTS / "ranks_in_fp32.py")
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


def assert_same_tree(first: Any, second: Any) -> None:
    """Dicts with the same keys and, below them, equal values; tensors bit by bit."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_same_tree(value, second[key])
    else:
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_its_first_lines_say_the_command(name):
    first_lines = (EXAMPLES / name).read_text().split('"""')[1]
    of_trainer = f"-m torchtitan.train --module {Path(name).stem}" if "torchtitan" in name else f"examples/{name}"
    assert f"torchrun --nproc-per-node 4 {of_trainer}" in first_lines


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
    evaluated = run_in_fp32(tmp_path, "lightning_gpt", "--validate", "second.ckpt")
    assert evaluated == pytest.approx({0: module.loss_of(model, tokens).item()}, abs=1e-3)  # three digits are printed


def write_counting_data(folder: Path) -> None:
    """A tokenizer of words and 200 sentences that count, in the files that torchtitan reads."""
    words = ["<bos>", "<eos>", *map(str, range(100))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    sentences = [" ".join(str((first * 7 + i) % 100) for i in range(40)) for first in range(200)]
    (folder / "data").mkdir()
    (folder / "data/data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11")
@pytest.mark.parametrize(
    ("num_parts", "on_mesh"),
    [
        (4, ["--parallelism.data_parallel_replicate_degree", "2"]),
        (2, ["--parallelism.tensor_parallel_degree", "2"]),
    ],
    ids=["hsdp", "tensor parallel"],
)
def test_torchtitan_muon(tmp_path, num_parts, on_mesh):
    """By torchtitan's own trainer: it trains, clips, saves every two steps and at the end, and resumes."""
    write_counting_data(tmp_path / "assets")
    options = ["--module", "titan_on_cpu", "--config", "two_layers", "--debug.seed", "1"]
    options += ["--hf_assets_path", "assets", "--dataloader.dataset_path", "assets/data"]
    options += ["--training.steps", "6", "--training.seq_len", "64", "--training.local_batch_size", "1"]
    options += ["--training.max_norm", "0.3", "--training.mixed_precision_param", "float32"]
    options += [*on_mesh, "--metrics.disable_color_printing"]
    options += ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only"]

    def train(*more: str) -> dict[int, float]:
        program = str(TESTS / "titan_train.py")
        return run(tmp_path, str(TESTS / "ranks_in_fp32.py"), str(NUM_RANKS), "1", program, *options, *more)

    losses = train("--dump_folder", "whole")
    shutil.copytree(tmp_path / "whole/checkpoint/step-4", tmp_path / "rest/checkpoint/step-4")
    rest = train("--dump_folder", "rest")
    assert rest == {step: loss for step, loss in losses.items() if step > 4}
    states = []
    for part in "whole", "rest":
        dcp_to_torch_save(tmp_path / part / "checkpoint/step-6", tmp_path / f"{part}.pt")
        states.append(torch.load(tmp_path / f"{part}.pt", weights_only=False))
    assert_same_tree(*states)

    run(tmp_path, str(TESTS / "titan_reference.py"), str(num_parts), "reference.pt", *options)
    reference = torch.load(tmp_path / "reference.pt")
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert list(losses.values()) == pytest.approx(reference["losses"], abs=2e-5)  # five digits are printed
    assert losses[6] < losses[1] - 0.1
    got = {name: states[0][name] for name in reference["final"]}
    assert_equal_to_reference(reference["initial"], reference["final"], got, BOUND)


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


def test_in_place_of_ddp(tmp_path):
    losses = run_in_fp32(tmp_path, "in_place_of_ddp", "--out", "weights.pt", nodes=2)
    module = recipe("in_place_of_ddp")
    assert_falls(losses, module.NUM_STEPS)

    def loss(step: int) -> torch.Tensor:
        tokens = of_all_ranks(module, step)
        return model(input_ids=tokens, labels=tokens).loss

    model = module.make_model()
    is_matrix = re.compile(r"model\.layers\.\d+\..*_proj\.weight").fullmatch
    initial, expected = reference(module, model, lambda name: bool(is_matrix(name)), loss, module.NUM_STEPS)
    assert_equal_to_reference(initial, expected, torch.load(tmp_path / "weights.pt"), BOUND)


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


def test_tensor_parallel(tmp_path):
    """Resumed on the same mesh it has the same bits; without tensor parallelism, the same weights."""
    losses = run_in_fp32(tmp_path, "tensor_parallel", "--checkpoint", "half", "--out", "model.pt")
    rest = run_in_fp32(tmp_path, "tensor_parallel", "--checkpoint", "half", "--out", "resumed.pt", "--resume")
    on_data_ranks = ("--tensor", "1", "--checkpoint", "half", "--out", "other.pt", "--resume")
    run_in_fp32(tmp_path, "tensor_parallel", *on_data_ranks)
    module = recipe("tensor_parallel")
    assert_falls(losses, module.NUM_STEPS)
    assert rest == {step: loss for step, loss in losses.items() if step > module.NUM_STEPS // 2}
    model, resumed, other = (torch.load(tmp_path / f"{name}.pt") for name in ("model", "resumed", "other"))
    assert_same_tree(model, resumed)

    def loss(step: int) -> torch.Tensor:
        return module.loss_of(alone, module.sentences(step))

    alone = module.make_model()
    initial, expected = reference(module, alone, lambda name: "blocks" in name, loss, module.NUM_STEPS)
    for weights in model, other:
        assert_equal_to_reference(initial, expected, weights, BOUND)

"""Updates by dmuon's CUDA kernels, which the fake driver runs as entries of the asynchronous device's streams.

Each rank's device has another compute capability, so each reads another cubin.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import async_device
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from checkpoints import dicts_of, full_state, group_of, unlike
from default_device import on_default_device
from dmuon._planning import elementwise
from dmuon._planning.choices import Result, Setting, store
from dmuon._planning.tuning import polynomial
from dmuon._setup.hyperparameters import Tuned, native_group, plain_choice
from models import batch, loss_of, make_gpt, part
from pool import RankPool
from training import AHEAD, dedicate, place_of, shard

import dmuon
from dmuon import _C

pytestmark = [
    pytest.mark.skipif(not async_device.has_cuda_kernels(), reason="the fake CUDA driver is not built: no nvcc"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="this PyTorch shows no kernel its stream"
    ),
    pytest.mark.xdist_group("cuda_kernels"),
]

CAPABILITIES = (80, 90, 100, 120)
DTYPES = (torch.float16, torch.bfloat16)
ROWS = _C.resolve_coefficients("polar_express", 5)
LR, DECAY, MOMENTUM = 0.25, 0.4, 0.95
PRODUCTS = {"products": "cuda", "full": "cuda_full", "fused": "cuda_fused"}


def begin(mesh: Any) -> list[list[str]]:
    async_device.use_cuda_kernels(CAPABILITIES[mesh.get_rank()])
    places = torch.device("emulated", mesh.get_rank()), torch.device("emulated")
    return [_C.elementwise(place, dtype) for place in places for dtype in (*DTYPES, torch.float32)]


@pytest.fixture(scope="module")
def gpus():
    pool = RankPool(4, device_type="emulated")
    usual, preferred = ["aten", "cuda"], ["cuda", "aten"]  # the default comes first
    found = [preferred if capability == 90 else usual for capability in CAPABILITIES]
    assert pool.run(begin, (4,)) == [[names, names, ["aten"]] * 2 for names in found]
    yield pool
    pool.close()


class Case(NamedTuple):
    shape: tuple[int, ...]
    blocks: int = 1
    transposed: bool = False
    batched: bool = True
    dtype: torch.dtype = torch.float16

    @property
    def sides(self) -> tuple[int, int]:
        return self.shape[-2], self.shape[-1] // self.blocks

    def matrices(self, x: torch.Tensor) -> torch.Tensor:
        rows, cols = self.sides
        return x.view(-1, rows, self.blocks, cols).transpose(1, 2).reshape(-1, rows, cols)


CASES = [
    Case((2, 24, 40)),
    Case((40, 24)),
    Case((3, 41, 27), transposed=True, batched=False),
    Case((2, 24, 48), blocks=3),
    Case((2, 24, 39), blocks=3, batched=False),
    Case((1, 80, 136), batched=False),
]

# Scale of the gradient, and if the step applies. Scales of x must change from step to step.
STEPS = ((1.0, True), (1e-3, True), (float("nan"), False), (1e6, True))


def choice_for(case: Case, elementwise: str) -> _C.Choice:
    """The first candidate. A backend of PRODUCTS stands for the CUDA kernels of both, in the direct form.

    Mirrored products make the Gram form's error larger in 16 bits, so `dmuon tune` refuses that choice.
    """
    place = ROWS, len(ROWS), torch.device("emulated", 0), case.dtype
    fits = [one for one in _C.candidates(*case.sides, *place) if one.batched == case.batched]
    if elementwise not in PRODUCTS:
        found = next(one for one in fits if one.backend == "aten")
        return _C.Choice(found.backend, found.form, found.batched, found.panel_rows, elementwise)
    backend = PRODUCTS[elementwise]
    found = next(one for one in fits if one.backend == backend and one.form == _C.Form.DIRECT)
    return _C.Choice(backend, found.form, found.batched, found.panel_rows, "cuda")


def group_for(case: Case, elementwise: str) -> _C.MuonGroup:
    group = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "nesterov": True, "adjust_lr_fn": None}
    group |= {"eps": 1e-7, "ns_coefficients": "polar_express", "ns_steps": 5, "ns_dtype": case.dtype}
    tuned = Tuned(case.dtype, ROWS, {case.sides: choice_for(case, elementwise)})
    return native_group(group, torch.device("emulated", 0), tuned)


def gradients_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(case.shape, generator=generator) for scale, _ in STEPS]


def memo_for(case: Case) -> torch.Tensor:
    return torch.zeros((*case.shape[:-2], 1, _C.memo_words(torch.device("emulated")) * case.blocks), device="emulated")


def updates(case: Case, elementwise: str, keeps_memo: bool = False) -> list[torch.Tensor]:
    """Weights and momentum after each step, [steps, 2, *shape]. On a side stream, as in training."""
    group = group_for(case, elementwise)
    weights = torch.ones(case.shape).to("emulated")
    momentum = torch.zeros_like(weights)
    memo = memo_for(case) if keeps_memo else None
    side = torch.emulated.Stream()
    found = []
    for gradient, (_, applies) in zip(gradients_of(case), STEPS, strict=True):
        given = gradient.to("emulated"), torch.tensor(applies).to("emulated")
        side.wait_stream(torch.emulated.current_stream())
        with torch.emulated.stream(side):
            _C.muon_update(weights, momentum, given[0], group, given[1], case.blocks, case.transposed, memo)
        torch.emulated.current_stream().wait_stream(side)
        found.append(torch.stack([weights, momentum]))
    return torch.stack(found).cpu()


class Check(NamedTuple):
    """A case by the kernels of this name, in these orders."""

    case: Case
    name: str
    orders: tuple[str, ...]


def checks(*names: str) -> list[Check]:
    """Each case by each name, with either dtype in two of the orders."""
    pairs = [*zip(DTYPES, (async_device.ORDERS[::2], async_device.ORDERS[1::2]), strict=True)]
    return [
        Check(case._replace(dtype=dtype), name, orders)
        for case, name, (dtype, orders) in itertools.product(CASES, names, pairs)
    ]


def in_orders(mesh: Any, case: Case, name: str, orders: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """By kernels and by ATen. The kernels' bits are the same in all orders, with a memo and without."""
    found = []
    for order in orders:
        async_device.configure(order=order, seed=mesh.get_rank(), races="raise")
        found.append(updates(case, name, keeps_memo=order != orders[0]))
        assert found[-1].equal(found[0]), order
    return found[0], updates(case, "aten")


def error_of(case: Case, before: torch.Tensor, after: torch.Tensor, direction: torch.Tensor) -> float:
    """Of the update of a step, relative to the polynomial in fp64; in all matrices together."""
    update = case.matrices((1 - LR * DECAY) * before.double() - after.double()) / LR
    rows, cols = case.sides[::-1] if case.transposed else case.sides
    exact = max(1, rows / cols) ** 0.5 * polynomial(case.matrices(direction), ROWS)
    return float((update - exact).norm() / exact.norm())


@pytest.mark.rarer(2)
@pytest.mark.parametrize(("case", "name", "orders"), checks("cuda", "products", "full"), ids=str)
def test_an_update_is_as_exact_as_atens_with_the_same_bits_in_all_orders(gpus, case, name, orders):
    results = gpus.run(in_orders, (4,), case=case, name=name, orders=orders)
    aten = results[0][1]
    # Only the kernels of capability 9.0 multiply tall matrices.
    is_tall = case.sides[0] > case.sides[1] and name in PRODUCTS
    different = [results[0][0], *([results[CAPABILITIES.index(90)][0]] if is_tall else [])]
    assert all(any(found.equal(one) for one in different) for found, _ in results), "capabilities differ"
    for kernels in different:
        check_updates(case, name, kernels, aten)


def check_updates(case: Case, name: str, kernels: torch.Tensor, aten: torch.Tensor) -> None:
    momentum = torch.zeros(case.shape)
    before = torch.ones(2, *case.shape)  # by kernels, by ATen
    errors: list[list[float]] = []  # likewise, of each step that applies
    for step, (gradient, (_, applies)) in enumerate(zip(gradients_of(case), STEPS, strict=True)):
        after = torch.stack([kernels[step, 0], aten[step, 0]])
        if applies:
            momentum.lerp_(gradient, 1 - MOMENTUM)
            direction = gradient.double().lerp(momentum.double(), MOMENTUM)
            errors.append([error_of(case, *pair, direction) for pair in zip(before, after, strict=True)])
            print(f"{case} {name} step {step}: {errors[-1][0]:.2e} by kernels, {errors[-1][1]:.2e} by ATen")
        else:
            assert after.equal(before)
        assert kernels[step, 1].equal(momentum), step
        assert aten[step, 1].equal(momentum), step
        before = after
    # Of one small matrix an error varies by a quarter from step to step.
    by_kernels, by_aten = (fmean(of) for of in zip(*errors, strict=True))
    assert by_kernels <= 1.2 * by_aten + 1e-4, errors


def counted(mesh: Any, case: Case, name: str) -> tuple[list[dict[str, int]], dict[str, Any]]:
    """The kernels of each of three equal steps, and what the device counts of the last."""
    group, memo = group_for(case, name), memo_for(case)
    weights, gradient = torch.ones(case.shape).to("emulated"), torch.randn(case.shape).to("emulated")
    momentum, applies = gradient.clone(), torch.tensor(True).to("emulated")
    counts = []
    for step in range(3):
        torch.emulated.synchronize()
        async_device.cuda_counts()
        with async_device.phase(str(step)), async_device.no_host_sync():
            _C.muon_update(weights, momentum, gradient, group, applies, case.blocks, False, memo)
        torch.emulated.synchronize()
        counts.append(async_device.cuda_counts())
    return counts, async_device.statistics()["2"]


@pytest.mark.parametrize("case", [Case((4, 64, 128)), Case((4, 64, 256), blocks=2)], ids=str)
def test_an_updates_elementwise_kernels_move_28_bytes_an_entry_and_the_host_never_waits(gpus, case):
    for counts, statistics in gpus.run(counted, (4,), case=case, name="cuda"):
        moved = [(one["bytes_read"] + one["bytes_written"]) / torch.Size(case.shape).numel() for one in counts]
        assert moved[0] == pytest.approx(38, abs=0.1)  # the scale is guessed wrong: x is written anew
        # 14 to start, 4 to divide by the norm, because ATen's products take no scale, 10 to move the weights
        assert moved[1:] == pytest.approx([28, 28], abs=0.1)
        assert [one["launches"] for one in counts] == [5] * 3  # one writes the scalars
        assert statistics["host_syncs"] == {}


@pytest.mark.parametrize(("name", "launches"), [("products", 14), ("full", 19), ("fused", 18)])
def test_the_kernels_products_divide_by_the_norm(gpus, name, launches):
    for counts, statistics in gpus.run(counted, (4,), case=Case((4, 64, 128)), name=name):
        # The scalars, two to start, one to move the weights, and two symmetric products of each of the five steps.
        # `full`: the third product too. `fused`: the last one moves the weights.
        assert [one["launches"] for one in counts] == [launches] * 3
        assert statistics["host_syncs"] == {}


def in_orders_and_unfused(mesh: Any, case: Case, **by: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return in_orders(mesh, case, **by)[0], updates(case, "full")


@pytest.mark.parametrize(("case", "name", "orders"), checks("fused"), ids=str)
def test_a_last_product_that_moves_weights_has_the_bits_of_both_kernels(gpus, case, name, orders):
    for fused, unfused in gpus.run(in_orders_and_unfused, (4,), case=case, name=name, orders=orders):
        assert fused.equal(unfused)


def races_of_misplaced(mesh: Any, case: Case, order: str) -> list[str]:
    async_device.configure(order=order, seed=mesh.get_rank())
    with async_device.misplaced_cuda_kernels():
        updates(case, "cuda", keeps_memo=True)
    return async_device.races()


@pytest.mark.parametrize("order", async_device.ORDERS)
def test_a_missing_event_is_reported_in_every_order(gpus, order):
    for races in gpus.run(races_of_misplaced, (4,), case=CASES[0], order=order):
        found = " ".join(races)
        assert "race: 'aten::baddbmm_' (test_cuda_kernels.py:" in found
        assert "what 'multiply_f16' (test_cuda_kernels.py:" in found
        assert "race: 'move_weights_f16' (test_cuda_kernels.py:" in found


def tuned(mesh: Any, kernels_take: float, error: float) -> str:
    """Who is chosen, if kernels take this many times as long as ATen and are wrong by this in each weight."""
    setting = Setting(torch.device("emulated", mesh.get_rank()), torch.float16, ROWS)
    gradients = torch.randn(3, 2, 24, 40).to("emulated")
    run = elementwise._Update._run

    def wrong(update: Any, index: int) -> None:
        run(update, index)
        if update.name == "cuda":
            update._weights.add_(error)

    def seconds(update: Any) -> float:
        return kernels_take if update.name == "cuda" else 1.0

    with mock.patch.multiple(elementwise._Update, seconds=seconds, _run=wrong):
        return elementwise.fastest_elementwise(choice_for(CASES[0], ""), gradients, setting, lambda: False)


@pytest.mark.parametrize(
    ("kernels_take", "error", "chosen"), [(0.9, 0.0, "cuda"), (0.98, 0.0, ""), (0.9, 1e-4, "")], ids=str
)
def test_tuning_takes_kernels_where_they_are_exact_and_faster(gpus, kernels_take, error, chosen):
    found = gpus.run(tuned, (4,), kernels_take=kernels_take, error=error)
    assert found == ["" if capability == 90 else chosen for capability in CAPABILITIES]  # the default there


def tuned_last(mesh: Any, backend: str, fused_takes: float, error: float) -> str:
    """The backend that is chosen, if a fused last product takes this many times as long and is wrong by this."""
    setting = Setting(torch.device("emulated", mesh.get_rank()), torch.float16, ROWS)
    gradients = torch.randn(3, 2, 24, 40).to("emulated")
    run = elementwise._Update._run

    def wrong(update: Any, index: int) -> None:
        run(update, index)
        if update.backend == "cuda_fused":
            update._weights.add_(error)

    def seconds(update: Any) -> float:
        return fused_takes if update.backend == "cuda_fused" else 1.0

    choice = _C.Choice(backend, _C.Form.DIRECT, True, choice_for(CASES[0], "full").panel_rows, "cuda")
    with mock.patch.multiple(elementwise._Update, seconds=seconds, _run=wrong):
        found = elementwise.fastest_last_product(choice, gradients, setting, lambda: False)
    assert setting.allows(24, 40, found) and plain_choice(found)[1:] == plain_choice(choice)[1:]
    return found.backend


@pytest.mark.parametrize(
    ("backend", "takes", "error", "chosen"),
    [
        ("cuda_full", 0.9, 0.0, "cuda_fused"),
        ("cuda_full", 0.98, 0.0, "cuda_full"),
        ("cuda_full", 0.9, 1e-4, "cuda_full"),
        ("cuda", 0.9, 0.0, "cuda"),
    ],
    ids=str,
)
def test_tuning_fuses_the_last_product_where_it_is_faster(gpus, backend, takes, error, chosen):
    found = gpus.run(tuned_last, (4,), backend=backend, fused_takes=takes, error=error)
    assert found == [chosen] * 4


SIDES = ((3584, 3584), (2048, 2048), (4096, 14336), (2048, 11008), (512, 3584))


def untuned(mesh: Any, folder: str, capability: int) -> tuple[int, int, list[str]]:
    """Kernels that a step launches, words of a matrix's memo, and who multiplies matrices of SIDES."""
    async_device.use_cuda_kernels(capability)
    with mock.patch.dict(os.environ, DMUON_CACHE_DIR=folder):
        on_default_device(one_step, mesh, {})
    torch.emulated.synchronize()
    device = torch.device("emulated", 0)
    words = Tuned(torch.float16, ROWS, {}).memo_words(device)
    backends = [_C.choose(*sides, ROWS, 5, device, torch.float16).backend for sides in SIDES]
    return async_device.cuda_counts()["launches"], words, backends


@pytest.mark.parametrize("capability", [80, 90])
def test_untuned_kernels_run_only_where_a_gpu_has_been_seen_to_win(tmp_path, capability):
    pool = RankPool(1, device_type="emulated")
    [(launches, words, backends)] = pool.run(untuned, (1,), folder=str(tmp_path), capability=capability)
    pool.close()
    if capability == 90:
        assert launches > 0 and words == 4 and backends == ["cuda", "aten", "cuda", "cuda", "aten"]
    else:
        assert (launches, words, backends) == (0, 0, ["aten"] * 5)  # not even their test ran


def test_a_device_without_kernels_goes_on_by_aten():
    device = torch.device("emulated", 0)
    assert _C.elementwise(device, torch.float16) == ["aten"]  # in this process
    assert updates(CASES[0], "cuda").equal(updates(CASES[0], "aten"))


SHAPES = [(72, 24), (24, 24), (41, 24), (24, 41)]  # of make_gpt


def keep_kernels(mesh: Any) -> None:
    """As `dmuon tune` keeps them at slot 0."""
    rows = _C.resolve_coefficients("polar_express", 5)
    setting = Setting(torch.device("emulated", mesh.get_rank()), torch.float16, rows)
    for sides in SHAPES:
        default = plain_choice(setting.candidates(*sides)[0])
        store(Result(1, *sides, *default[:-1], "cuda", 1, 1e-3, *default, 2, 1e-3, 0.5), setting)


def started(mesh: Any, ns_dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[Any, Any]:
    model = make_gpt(seed)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    return model, dmuon.Muon(model, lr=0.02, ns_dtype=ns_dtype)


def step(mesh: Any, model: Any, optimizer: Any, number: int, scale: float = 1.0) -> float:
    rank, size = place_of(mesh)
    (scale * loss_of(model, part(batch(number), rank, size))).backward()
    norm = float(dmuon.clip_grad_norm_(model, 1.0))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def memos(optimizer: Any) -> list[torch.Tensor]:
    """What this rank's owned matrices keep from step to step, [matrices, words] each."""
    muons = [group["params"] for group in optimizer.param_groups if group["algorithm"] == "muon"]
    leaves = [optimizer._runtime.leaf_of[parameter] for parameters in muons for parameter in parameters]
    parts = [part for leaf in leaves for part in optimizer._runtime.transfers.owned_parts(leaf, "memo")]
    return [part.tensor.view(-1, 4).cpu() for part in parts]


class Trained(NamedTuple):
    norms: list[float]
    saved: dict[str, Any]  # the whole state after three steps, of which the last is skipped
    end: dict[str, Any]  # after two more
    keys: set[str]  # of the state of a parameter in the optimizer's state dict
    launches: int
    memos: list[torch.Tensor]


def trained(mesh: Any, order: str = "random", ns_dtype: torch.dtype = torch.float16, directory: str = "") -> Trained:
    """Trains with a checkpoint in between."""
    async_device.configure(order=order)
    async_device.cuda_counts()
    model, optimizer = started(mesh, ns_dtype)
    norms = [step(mesh, model, optimizer, number, scale) for number, scale in enumerate((1.0, 1.0, float("inf")))]
    assert int(optimizer.skipped_steps) == 1
    saved = full_state(model, optimizer)
    keys = {key for state in optimizer.state_dict()["state"].values() for key in state}
    if directory:
        dcp.save(dicts_of(model, optimizer), checkpoint_id=directory, **group_of(mesh))
    norms += [step(mesh, model, optimizer, number) for number in (3, 4)]
    end = full_state(model, optimizer)
    assert dmuon.verify(model, optimizer)
    torch.emulated.synchronize()
    launches = async_device.cuda_counts()["launches"]
    return Trained(norms, saved, end, keys, launches, memos(optimizer) if launches else [])


def resumed(mesh: Any, directory: str) -> dict[str, Any]:
    """The whole state at the end of what goes on from the checkpoint."""
    model, optimizer = started(mesh, seed=1)
    loaded = dicts_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=directory, **group_of(mesh))
    dsd.set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for number in (3, 4):
        step(mesh, model, optimizer, number)
    return full_state(model, optimizer)


def on_device(mesh: Any, work: Callable[..., Any], folder: str, by_kernels: bool = True, **arguments: Any) -> Any:
    with mock.patch.dict(os.environ, DMUON_CACHE_DIR=f"{folder}/{mesh.get_rank()}-{by_kernels}"):
        if by_kernels and mesh.get_rank() == 0:
            keep_kernels(mesh)
        return on_default_device(work, mesh, arguments)


def distance(begin: dict[str, Any], end: dict[str, Any], other: dict[str, Any]) -> float:
    """Of all weights together from those at the end, relative to their way."""
    pairs = [(other["model"][name] - weights, weights - begin["model"][name]) for name, weights in end["model"].items()]
    error, way = (torch.cat([one.flatten() for one in ones]).norm() for ones in zip(*pairs, strict=True))
    return float(error / way)


def test_training_by_kernels_is_training_by_aten(gpus, tmp_path):
    """Measured: the weights are as far from those of an iteration in fp32."""

    def run(work: Callable[..., Any], **arguments: Any) -> list[Any]:
        return gpus.run(on_device, (2, 2), work=work, folder=str(tmp_path), **arguments)

    kernels, again = run(trained, directory=f"{tmp_path}/saved"), run(resumed, directory=f"{tmp_path}/saved")
    aten, exact = (run(trained, by_kernels=False, ns_dtype=dtype)[0] for dtype in (torch.float16, torch.float32))
    assert aten.launches == 0
    for got, end in zip(kernels, again, strict=True):
        assert got.launches > 0
        assert got.keys == aten.keys  # the memo is not saved
        assert got.memos and all(memo[:, 0].equal(memo[:, 1]) and memo[:, 0].all() for memo in got.memos)
        assert unlike(end, got.end) == []  # although it begins anew
        assert got.norms == pytest.approx(aten.norms, rel=1e-3, nan_ok=True)
        error, error_of_aten = (distance(exact.saved, exact.end, one.end) for one in (got, aten))
        print(f"training: {error:.2e} by kernels, {error_of_aten:.2e} by ATen")
        assert error <= 1.5 * error_of_aten


def test_training_by_kernels_has_the_same_bits_in_all_orders(gpus, tmp_path):
    ends = [
        one.end
        for order in async_device.ORDERS
        for one in gpus.run(on_device, (2, 2), work=trained, folder=str(tmp_path), order=order)
    ]
    assert all(unlike(end, ends[0]) == [] for end in ends)


def races_of_training(mesh: Any, folder: str) -> str:
    try:
        with async_device.misplaced_cuda_kernels():
            on_device(mesh, one_step, folder)
    except AssertionError as error:
        return str(error)
    return ""


def one_step(mesh: Any) -> None:
    step(mesh, *started(mesh), 0)


def test_a_missing_event_of_training_is_reported(gpus, tmp_path):
    found = gpus.run(races_of_training, (4,), folder=str(tmp_path))
    assert all("races, first: race: " in one for one in found), found

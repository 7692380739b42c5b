"""What the headers promise beside accuracy: shapes, scale, determinism, batches, errors."""

import re
from pathlib import Path

import pytest
import torch
from dmuon._running.orthogonalize import orthogonalize
from dmuon._setup.hyperparameters import Tuned, native_group
from exact import relative_error, rounding_bound, textbook

from dmuon import _C

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ODD = [(1, 1), (1, 9), (9, 1), (2, 3), (7, 13), (31, 67), (67, 31), (257, 263), (263, 257), (1, 4099)]
FORMS = [None, _C.Form.DIRECT, _C.Form.GRAM]


def run(x, dtype, form=None, name="polar_express"):
    return _C.orthogonalize(x, name, 5, 0.0, dtype, form=form)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ODD, (152, 430)])
def test_odd_shapes_agree_with_the_textbook_iteration_in_fp64(shape, dtype, form):
    x = torch.randn(*shape, dtype=torch.float64)
    rows = _C.resolve_coefficients("polar_express", 5)
    y = run(x, dtype, form)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert relative_error(y, textbook(x, rows, torch.float64)) <= rounding_bound(rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 6), (3, 0, 6), (2, 0, 4, 6)])
def test_empty_in_empty_out(shape, dtype):
    y = run(torch.empty(*shape), dtype)
    assert y.shape == shape
    assert y.dtype == dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 13), (300, 290)])
def test_a_matrix_gives_the_same_bits_alone_in_a_batch_and_again(shape, dtype, form, threads):
    x = torch.randn(5, *shape)
    x[2] = 0
    y = run(x, dtype, form)
    assert torch.equal(y, run(x, dtype, form))
    assert torch.equal(y, torch.stack([run(one, dtype, form) for one in x]))
    assert torch.equal(y, run(x.reshape(5, 1, *shape), dtype, form).reshape(y.shape))
    assert torch.count_nonzero(y[2]) == 0
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "shape"), [(300, (20, 33)), (45, (64, 200)), (15, (200, 130))])
def test_a_matrix_gives_the_same_bits_in_a_batch_that_no_cache_holds(count, shape, dtype, threads):
    x = torch.randn(count, *shape)
    y = run(x, dtype)
    for i in (0, count // 2, count - 1):
        assert torch.equal(y[i], run(x[i], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_small_shapes_give_the_same_bits_alone_and_in_a_batch(dtype, threads):
    g = torch.Generator().manual_seed(3)
    for _ in range(25):
        b, m, n = (int(torch.randint(1, high, (), generator=g)) for high in (9, 140, 300))
        x = torch.randn(b, m, n, generator=g)
        y = run(x, dtype)
        assert torch.equal(y[b // 2], run(x[b // 2], dtype)), (b, m, n)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_of_the_input_does_not_matter(dtype, form):
    x = torch.randn(20, 33, dtype=torch.float64)
    rows = _C.resolve_coefficients("polar_express", 5)
    expected = run(x, dtype, form)
    for exponent in (-300, -154, -100, -3, 40, 100, 154, 300):
        assert torch.equal(run(torch.ldexp(x, torch.tensor(exponent)), dtype, form), expected)
    for scale in (1e-30, 1e-20, 1e20, 1e30):
        y = run((x * scale).float(), dtype, form)
        assert relative_error(y, expected.double()) <= rounding_bound(
            rows, max(dtype, torch.float32, key=lambda d: torch.finfo(d).eps)
        )
    for half, scale in ((torch.float16, 1e-6), (torch.bfloat16, 1e-30), (torch.bfloat16, 1e30)):
        stored = (x * scale).to(half)
        again = run(stored.double() * 2.0**20, dtype, form)
        assert torch.equal(run(stored, dtype, form), again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp64_inputs_of_mixed_magnitude_lose_nothing(dtype):
    x = torch.randn(8, 8, dtype=torch.float64)
    x[0] *= 1e-3
    assert torch.equal(run(x * 2.0**-700, dtype), run(x, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_in_zero_out_and_non_finite_stays_in_its_matrix(dtype):
    for source in DTYPES:
        assert torch.count_nonzero(run(torch.zeros(6, 9, dtype=source), dtype)) == 0
    x = torch.randn(3, 6, 9)
    x[0, 2, 3] = float("nan")
    x[1, 5, 8] = float("inf")
    y = run(x, dtype)
    assert y[:2].isnan().all()
    assert torch.equal(y[2], run(x[2], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_give_the_bits_of_contiguous_ones_and_are_left_alone(dtype):
    base = torch.randn(40, 62, requires_grad=True)
    for view in (base.T, base[::2, 1::3], base.expand(2, 40, 62), base[None].mT):
        before = view.detach().clone()
        y = run(view, dtype)
        assert torch.equal(y, run(before.contiguous(), dtype))
        assert torch.equal(view, before)
        assert not y.requires_grad


def test_no_steps_return_the_normalised_input():
    x = torch.randn(5, 8, dtype=torch.float64)
    y = _C.orthogonalize(x, [], 0, 1e-7, torch.float64)
    assert torch.allclose(y, x / x.norm(), rtol=1e-15, atol=0)


def test_the_default_dtype_is_fp16_on_gpus_and_what_the_cpu_multiplies_faster_elsewhere():
    assert _C.default_ns_dtype(torch.device("cuda")) == torch.float16
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    cpu = _C.default_ns_dtype(torch.device("cpu"))
    assert cpu in (torch.bfloat16, torch.float32)
    if "avx512_bf16" in capability:
        vendor = re.search(r"vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text())
        is_slow = capability.get("avx512_fp16") and vendor is not None and vendor[1] == "GenuineIntel"
        expected = capability.get("amx_bf16") or (capability["avx512_bf16"] and not is_slow)
        assert (cpu == torch.bfloat16) == bool(expected)
    assert orthogonalize(torch.randn(3, 4)).dtype == cpu


def test_the_python_face_takes_names_and_rows():
    x = torch.randn(6, 10)
    by_name = orthogonalize(x, ns_coefficients="quintic", ns_steps=4, ns_dtype=torch.float32)
    by_rows = orthogonalize(x, ns_coefficients=((3.4445, -4.7750, 2.0315),), ns_steps=4, ns_dtype=torch.float32)
    assert torch.equal(by_name, by_rows)
    assert not torch.equal(by_name, orthogonalize(x, ns_steps=4, ns_dtype=torch.float32))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": torch.randn(5)}, ["x must be", "(5,)"]),
        ({"x": torch.ones(2, 2, dtype=torch.int32)}, ["x must be", "int32"]),
        ({"ns_dtype": torch.int8}, ["ns_dtype", "int8"]),
        ({"ns_steps": -1}, ["ns_steps", "-1"]),
        ({"ns_steps": 100}, ["ns_steps", "100"]),
        ({"ns_steps": 2.0}, ["ns_steps", "2.0"]),
        ({"ns_coefficients": "quartic"}, ["coefficients", "polar_express", "quintic", "you", "quartic"]),
        ({"ns_coefficients": [(1.0, 2.0)]}, ["ns_coefficients", "rows"]),
        ({"ns_coefficients": []}, ["orthogonalize: ns_coefficients: expected", "got []", "at least one row"]),
        ({"ns_coefficients": [(1.0, float("inf"), 2.0)]}, ["coefficients[0]", "finite", "inf"]),
    ],
)
def test_bad_arguments_are_value_errors_that_name_argument_expected_and_got(arguments, words):
    with pytest.raises(ValueError) as raised:
        orthogonalize(**{"x": torch.randn(3, 4), **arguments})
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("eps", [2.0, 1e3])  # torch.optim.Muon has no largest one either
def test_eps_above_the_norm_is_the_divisor(eps):
    x = 1.5 * torch.eye(3, 4, dtype=torch.float64) / 3**0.5  # of norm 1.5
    value = 1.5 / 3**0.5 / eps
    for a, b, c in _C.resolve_coefficients("quintic", 5):
        value = a * value + b * value**3 + c * value**5
    y = _C.orthogonalize(x, "quintic", 5, eps, torch.float64)
    assert torch.allclose(y, value * torch.eye(3, 4, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_engine_rejects_bad_options():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="eps must be at least 0 and finite; got -1"):
        _C.orthogonalize(x, "you", 5, -1.0, None)
    with pytest.raises(ValueError, match="gram_dtype"):
        _C.orthogonalize(x, "you", 5, 0.0, torch.float32, gram_dtype=torch.float16)
    with pytest.raises(ValueError, match="dense"):
        _C.orthogonalize(x.to_sparse(), "you", 5, 0.0, None)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("norm", "smallest", "largest"), [(1e-30, 0, 1e-18), (1e-9, 0.3, 0.4), (1.0, 0.35, 0.45)])
def test_what_is_next_to_nothing_makes_no_full_sized_update_as_in_torch(norm, smallest, largest, batched):
    gradient = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    gradient *= norm / gradient.norm()
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "ns_steps": 5, "adjust_lr_fn": None}
    group = {**options, "ns_coefficients": "quintic", "eps": 1e-7, "ns_dtype": torch.float32}
    ours = torch.zeros(1, 16, 24)
    applies = torch.ones((), dtype=torch.bool)
    rows = _C.resolve_coefficients("quintic", 5)
    candidates = _C.candidates(16, 24, rows, 5, ours.device, torch.float32)
    tuned = Tuned(torch.float32, rows, {(16, 24): next(one for one in candidates if one.batched == batched)})
    _C.muon_update(ours, torch.zeros_like(ours), gradient[None], native_group(group, ours.device, tuned), applies)
    theirs = torch.nn.Parameter(torch.zeros(16, 24))
    theirs.grad = gradient.clone()
    torch.optim.Muon([theirs], **options).step()
    size = float(theirs.detach().norm())
    assert smallest <= size <= largest
    assert float((ours[0] - theirs.detach()).norm()) <= 0.05 * size


@pytest.mark.parametrize(
    ("wrong", "name", "got"),
    [
        ({"gradient": torch.zeros(1, 8, 5)}, "gradient", r"CPUFloatType \[1, 8, 5\]"),
        ({"momentum": torch.zeros(1, 4, 8)}, "momentum", r"CPUFloatType \[1, 4, 8\]"),
        ({"gradient": torch.zeros(1, 8, 4, dtype=torch.bfloat16)}, "gradient", "CPUBFloat16Type"),
        ({"master": torch.zeros(1, 8, 4, dtype=torch.float64)}, "master", "CPUDoubleType"),
    ],
)
def test_an_update_refuses_tensors_that_do_not_fit(wrong, name, got):
    tensors = {one: torch.zeros(1, 8, 4) for one in ("master", "momentum", "gradient")} | wrong
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "ns_steps": 5, "adjust_lr_fn": None}
    group = native_group({**options, "ns_coefficients": "quintic", "eps": 1e-7, "ns_dtype": None}, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"update: {name} must be dense fp32 of master's sizes.*got {got}"):
        _C.muon_update(*tensors.values(), group, torch.tensor(True))

"""Newton-Schulz against exact references: constructed SVDs, hard spectra, torch.optim.Muon's own error."""

import pytest
import torch
from dmuon._planning.tuning import polynomial
from exact import (
    QUINTIC,
    conditioned,
    gaussian,
    relative_error,
    rounding_bound,
    textbook,
    with_singular_values,
)
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon import _C

FORMS = [_C.Form.DIRECT, _C.Form.SEGMENTED, _C.Form.GRAM]
SHAPES = [(128, 128), (96, 384), (384, 96), (300, 460), (64, 67)]
SETS = ["polar_express", "quintic", "you"]


def run(x, coefficients, dtype, form, **options):
    return _C.orthogonalize(x, coefficients, 5, 1e-7, dtype, form=form, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fp64_and_fp32_are_the_exact_polynomial_up_to_rounding(dtype, name, shape, form):
    rows = _C.resolve_coefficients(name, 5)
    for case in (gaussian(*shape), conditioned(*shape, 1e3)):
        got = run(case.x.to(dtype), name, dtype, form)
        assert relative_error(got, case.polynomial(rows)) <= rounding_bound(rows, dtype)


@pytest.mark.parametrize("form", [_C.Form.DIRECT, _C.Form.GRAM])
@pytest.mark.parametrize("shape", [*SHAPES, (256, 256), (128, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_1_3_times_that_of_torch_optim_muon(dtype, shape, form):
    for case in (
        gaussian(*shape),
        conditioned(*shape, 10),
        conditioned(*shape, 1e3),
        conditioned(*shape, 1e7),
    ):
        x = case.x.float()
        exact = case.polynomial(QUINTIC)
        if dtype == torch.bfloat16:
            theirs = _zeropower_via_newtonschulz(x, QUINTIC[0], 5, 1e-7)
        else:
            theirs = textbook(x, QUINTIC, dtype)
        ours = run(x, "quintic", dtype, form)
        assert relative_error(ours, exact) <= 1.3 * relative_error(theirs, exact)


def no_worse_than_torch_optim_muon(x, name, exact):
    rows = _C.resolve_coefficients(name, 5)
    ours = run(x.float(), name, torch.bfloat16, _C.Form.SEGMENTED)
    theirs = textbook(x.float(), rows, torch.bfloat16)
    return relative_error(ours, exact) <= 1.3 * relative_error(theirs, exact)


@pytest.mark.parametrize("shape", [(256, 512), (448, 256), (300, 520), (256, 2048), (512, 1024)])
def test_the_error_of_segments_in_bf16_is_at_most_1_3_times_that_of_torch_optim_muons_arithmetic(shape):
    random = gaussian(*shape)
    for case in (random, *(conditioned(*shape, condition) for condition in (10, 20, 30, 50, 1e3, 1e7))):
        for name in SETS:
            assert no_worse_than_torch_optim_muon(case.x, name, case.polynomial(_C.resolve_coefficients(name, 5))), name
    for exponent in (1, 2, 3):
        for side in (0, 1):
            fall = torch.logspace(0, -exponent, shape[side])
            x = random.x.float() * (fall if side else fall[:, None])
            for name in SETS:
                exact = polynomial(x[None], _C.resolve_coefficients(name, 5))[0]
                assert no_worse_than_torch_optim_muon(x, name, exact), (exponent, side, name)


def test_so_is_that_of_three_steps_at_once():
    for case in (gaussian(1024, 4096), conditioned(4096, 1024, 1e3)):
        for name in ("quintic", "you"):
            assert no_worse_than_torch_optim_muon(case.x, name, case.polynomial(_C.resolve_coefficients(name, 5))), name


def test_segments_are_chosen_in_bf16_alone_for_large_wide_matrices_and_rows_that_were_measured():
    cpu = torch.device("cpu")

    def choice(m, n, name="polar_express", steps=5, dtype=torch.bfloat16):
        return _C.choose(m, n, name, steps, cpu, dtype).form.name

    multiplies = _C.default_ns_dtype(cpu) == torch.bfloat16
    assert choice(1024, 4096) == choice(4096, 1024, "quintic") == ("SEGMENTED" if multiplies else "GRAM")
    assert choice(1024, 1024) == "DIRECT"
    others = [choice(255, 1024), choice(1024, 4096, steps=6), choice(1024, 4096, [(3.0, -3.2, 1.2)])]
    assert "SEGMENTED" not in [
        *others,
        choice(1024, 4096, dtype=torch.float32),
        choice(1024, 4096, dtype=torch.float16),
    ]


@pytest.mark.parametrize("gpu", [False, True])
def test_fp16_meets_the_kernels_error_bounds(gpu):
    """gpu: the form and the 16-bit R, Z, Q that GPUs run, with tensor cores' fp32 accumulation."""
    rows = _C.resolve_coefficients("polar_express", 5)
    for case, bound in (
        (gaussian(128, 512), 4e-3),
        (gaussian(384, 1152), 4e-3),
        (gaussian(256, 256), 2e-2),
        (conditioned(128, 512, 1e3), 6e-2),
        (conditioned(128, 128, 1e3), 6e-2),
    ):
        device = torch.device("cuda" if gpu else "cpu")
        form = _C.choose(*case.x.shape, "polar_express", 5, device, torch.float16).form
        gram_dtype = torch.float16 if gpu else None
        got = run(case.x.float(), "polar_express", torch.float16, form, gram_dtype=gram_dtype)
        assert relative_error(got, case.polynomial(rows)) <= bound


def hard_spectra(size):
    yield torch.logspace(0, -7, size, dtype=torch.float64)
    yield torch.cat([torch.ones(10, dtype=torch.float64), torch.zeros(size - 10, dtype=torch.float64)])
    yield torch.cat([torch.ones(2, dtype=torch.float64), torch.logspace(-4, -7, size - 2, dtype=torch.float64)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_hard_spectra_stay_finite_with_a_spectral_norm_near_the_polynomials(dtype, form):
    # In the Gram form Q is rounded, which after two rows is up to 30 beside directions that it must leave at 1: bf16
    # then adds up to 30 * 2**-9 to what the polynomial has, 1.124. (16-bit Gram matrices are fp16's on GPUs.)
    most = 1.124 + 30 * 2**-9 if (dtype, form) == (torch.bfloat16, _C.Form.GRAM) else 1.16
    for shape in [(128, 128), (128, 400), (400, 128)]:
        for s in hard_spectra(128):
            y = run(with_singular_values(*shape, s).x, "polar_express", dtype, form).double()
            assert torch.isfinite(y).all()
            assert torch.linalg.matrix_norm(y, 2) <= most


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(128, 128), (300, 460), (384, 96)])
def test_singular_values_land_near_one_and_vectors_stay(shape, dtype, form):
    for case in (gaussian(*shape), conditioned(*shape, 300)):
        y = run(case.x, "polar_express", dtype, form).double()
        kept = case.s / case.s.norm() >= 1.2e-3
        along = torch.einsum("mk,mn,nk->k", case.u, y, case.v)[kept]
        assert kept.sum() > 50
        assert along.min() >= 0.83
        assert along.max() <= 1.14
        s = torch.linalg.svdvals(y)[: int(kept.sum())]
        assert s.min() >= 0.83
        assert s.max() <= 1.14

"""Newton-Schulz against exact references: constructed SVDs, hard spectra, torch.optim.Muon's own error."""

import pytest
import torch
from exact import (
    QUINTIC,
    conditioned,
    gaussian,
    hard_spectra,
    relative_error,
    rounding_bound,
    textbook,
    with_singular_values,
)
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon import _C

FORMS = [_C.Form.DIRECT, _C.Form.GRAM]
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


@pytest.mark.parametrize("gram_dtype", [None, torch.float16])
@pytest.mark.parametrize(("name", "steps"), [("quintic", 8), ("you", 7), ("polar_express", 10), ("deepseekv4", 10)])
def test_more_steps_lose_no_more_in_the_gram_form_than_in_the_direct_one(name, steps, gram_dtype):
    rows = _C.resolve_coefficients(name, steps)
    spectra = [with_singular_values(128, 256, s) for s in hard_spectra(128)]
    for case in (gaussian(128, 256), conditioned(128, 384, 1e3), *spectra):
        x, exact = case.x.float(), case.polynomial(rows)
        direct = _C.orthogonalize(x, rows, steps, 1e-7, torch.float16, form=_C.Form.DIRECT)
        gram = _C.orthogonalize(x, rows, steps, 1e-7, torch.float16, form=_C.Form.GRAM, gram_dtype=gram_dtype)
        assert relative_error(gram, exact) <= 2 * relative_error(direct, exact) + 0.05


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

"""The segmented form: as exact as torch.optim.Muon's arithmetic whatever the matrix, and what every form promises."""

import pytest
import torch
from dmuon._planning.tuning import polynomial
from exact import (
    conditioned,
    gaussian,
    hard_spectra,
    has_kernels,
    relative_error,
    rounding_bound,
    textbook,
    with_singular_values,
)

from dmuon import _C

SETS = ["polar_express", "quintic", "you"]
BF16 = torch.bfloat16
# Of each set all divisions into segments, either side the shorter, sides that no register's width divides.
SHAPES = [(128, 260), (420, 136), (257, 389), (256, 512), (768, 256), (260, 2048)]

needs_kernels = pytest.mark.skipif(not has_kernels(BF16), reason="this processor has no AVX512-BF16")


def run(x, name="polar_express", eps=0.0):
    return _C.orthogonalize(x, name, 5, eps, BF16, form=_C.Form.SEGMENTED)


def excess(x, *names):
    """By set, the error over that of torch.optim.Muon's arithmetic."""
    y = (x if x.shape[0] <= x.shape[1] else x.mT).double()
    y = y / y.norm()
    squares, vectors = torch.linalg.eigh(y @ y.mT)
    found = {}
    for name in names or SETS:
        rows = _C.resolve_coefficients(name, 5)
        s, factor = squares.clamp(min=0), torch.ones_like(squares)  # X becomes U factor(S^2) U' X
        for a, b, c in rows:
            change = a + b * s + c * s * s
            s, factor = s * change**2, factor * change
        exact = (vectors * factor) @ (vectors.mT @ y)
        exact = exact if x.shape[0] <= x.shape[1] else exact.mT
        if x.shape == SHAPES[0]:
            assert relative_error(polynomial(x[None], rows)[0], exact) < 1e-9
        found[name] = relative_error(run(x, name), exact) / relative_error(textbook(x, rows, BF16), exact)
    return found


def constructed(shape):
    side = min(shape)
    yield "gaussian", gaussian(*shape).x
    for condition in (10, 20, 30, 50, 1e3, 1e7):
        yield f"condition {condition:g}", conditioned(*shape, condition).x
    two = torch.cat([torch.ones(2, dtype=torch.float64), torch.logspace(-2, -4, side - 2, dtype=torch.float64)])
    yield "two large values", with_singular_values(*shape, two).x


def of_networks(shape):
    """Rows or columns that fall off; a few directions with most of the norm's square; a mean; a layer's gradient."""
    g = torch.Generator().manual_seed(3)

    def normal(*sizes):
        return torch.randn(*sizes, generator=g)

    rows, cols = shape
    for exponent in (1, 2, 3):
        yield f"rows fall {exponent}", normal(*shape) * torch.logspace(0, -exponent, rows)[:, None]
        yield f"columns fall {exponent}", normal(*shape) * torch.logspace(0, -exponent, cols)
    for rank, share in [*((1, s) for s in (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.99, 0.999, 0.9999)), (3, 0.75)]:
        few, rest = normal(rows, rank) @ normal(rank, cols), normal(*shape)
        yield f"{rank} of {share}", share**0.5 * few / few.norm() + (1 - share) ** 0.5 * rest / rest.norm()
    for factor in (3, 30):
        yield f"a row times {factor}", torch.cat([factor * normal(1, cols), normal(rows - 1, cols)])
        yield f"a column times {factor}", torch.cat([factor * normal(rows, 1), normal(rows, cols - 1)], 1)
    yield "mean 1", normal(*shape) + 1
    inputs = normal(256, cols) + 1
    outputs = (inputs @ (normal(cols, rows) / cols**0.5)).relu()
    yield "a layer's gradient", outputs.T @ inputs / 256


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_at_most_1_3_times_that_of_torch_optim_muons_arithmetic(shape):
    cases = [*constructed(shape), *of_networks(shape)]
    found = {(name, what): error for what, x in cases for name, error in excess(x.float()).items()}
    assert len(found) == len(cases) * len(SETS)
    assert max(found.values()) <= 1.3, {case: error for case, error in found.items() if error > 1.3}


# Where columns that fall off cost most: the largest matrices nearest to squares.
@needs_kernels
@pytest.mark.parametrize(("names", "shape"), [(["polar_express", "you"], (1024, 1536)), (["quintic"], (1024, 3072))])
def test_so_it_is_of_large_matrices(names, shape):
    g = torch.Generator().manual_seed(0)
    fall = torch.randn(shape, generator=g) * torch.logspace(0, -3, shape[1])
    for x in (fall, torch.randn(shape[::-1], generator=g)):
        assert max(excess(x, *names).values()) <= 1.3


@needs_kernels
def test_of_gaussian_matrices_the_quintic_has_half_that_error_or_less():
    assert excess(gaussian(384, 1536).x.float(), "quintic")["quintic"] <= 0.5


@needs_kernels
@pytest.mark.parametrize("shape", [(128, 400), (257, 389), (400, 128)])
def test_hard_spectra_stay_finite_with_a_spectral_norm_near_the_polynomials(shape):
    for s in hard_spectra(min(shape)):
        y = run(with_singular_values(*shape, s).x).double()
        assert torch.isfinite(y).all()
        assert torch.linalg.matrix_norm(y, 2) <= 1.16


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_gives_the_same_bits_alone_in_a_batch_on_any_threads_and_again(shape):
    x = torch.randn(3, *shape)
    x[1] = 0
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found += [run(x), torch.stack([run(one) for one in x])]
    torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)
    assert torch.count_nonzero(found[0][1]) == 0
    assert relative_error(run(x[0].mT).mT, found[0][0].double()) <= rounding_bound([], BF16)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_scale_strides_and_what_is_not_finite(shape):
    x = torch.randn(shape, dtype=torch.float64)
    expected = run(x)
    for exponent in (-300, -100, -3, 40, 300):
        assert torch.equal(run(torch.ldexp(x, torch.tensor(exponent))), expected)
    wide = torch.zeros(2 * shape[0], 3 * shape[1], dtype=torch.float64)
    wide[::2, 1::3] = x
    assert torch.equal(run(wide[::2, 1::3]), expected)
    assert torch.equal(run(x.mT.contiguous().mT), expected)
    for wrong in (float("nan"), float("inf")):
        broken = torch.stack([x, x])
        broken[0, 5, 7] = wrong
        y = run(broken)
        assert y[0].isnan().all()
        assert torch.equal(y[1], expected)
    small = 1e-12 * x / x.norm()
    assert 0 < run(small, eps=1e-7).double().norm() < 0.01 * expected.double().norm()


def test_segments_are_chosen_in_bf16_alone_for_wide_matrices_and_rows_that_were_measured():
    cpu = torch.device("cpu")

    def choice(m, n, name="polar_express", steps=5, dtype=torch.bfloat16):
        return _C.choose(m, n, name, steps, cpu, dtype).form.name

    segmented = [choice(1024, 4096), choice(4096, 1024, "quintic"), choice(128, 256), choice(256, 384, "you")]
    assert segmented == ["SEGMENTED"] * 4 if has_kernels(torch.bfloat16) else "SEGMENTED" not in segmented
    assert choice(1024, 1024) == "DIRECT"
    others = [choice(127, 1024), choice(128, 255), choice(256, 380), choice(1024, 4096, steps=6)]
    assert "SEGMENTED" not in [
        *others,
        choice(1024, 4096, [(3.0, -3.2, 1.2)]),
        choice(1024, 4096, dtype=torch.float32),
        choice(1024, 4096, dtype=torch.float16),
    ]

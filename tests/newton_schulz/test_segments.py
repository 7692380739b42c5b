"""The segmented form: as exact as torch.optim.Muon's arithmetic whatever the matrix, and what every form promises."""

import pytest
import torch
from dmuon._planning.tuning import polynomial
from exact import (
    constructed,
    gaussian,
    hard_spectra,
    has_kernels,
    of_networks,
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


def run(x, name="polar_express", eps=0.0, dtype=BF16):
    return _C.orthogonalize(x, name, 5, eps, dtype, form=_C.Form.SEGMENTED)


def errors(x, *names, dtype=BF16):
    """By set, the error and that of torch.optim.Muon's arithmetic."""
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
        ours, theirs = run(x, name, dtype=dtype), textbook(x, rows, dtype)
        found[name] = relative_error(ours, exact), relative_error(theirs, exact)
    return found


def excess(x, *names):
    return {name: ours / theirs for name, (ours, theirs) in errors(x, *names).items()}


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_at_most_1_3_times_that_of_torch_optim_muons_arithmetic(shape):
    cases = [(what, make()) for what, make in {**constructed(shape), **of_networks(shape)}.items()]
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


# In fp16 R, Z and Q are mirrored triangles, on any processor. Here the backend has panels from a short side of 256 on.
# Below 4 eps errors come from rounding alone. Above, a matrix's condition decides, and a third step in a segment fails.
@pytest.mark.parametrize("shape", [(256, 256), (257, 389), (768, 256)])
def test_in_fp16_the_error_is_at_most_the_direct_forms_or_four_eps(shape):
    most = 4 * torch.finfo(torch.float16).eps
    found = {}
    for what, make in {**constructed(shape), **of_networks(shape)}.items():
        for name, (ours, theirs) in errors(make().float(), dtype=torch.float16).items():
            found[name, what] = ours, theirs
    assert len(found) > 30 * len(SETS)
    assert sum(theirs > most for _, theirs in found.values()) >= 5 * len(SETS)
    wrong = {case: pair for case, pair in found.items() if pair[0] > max(1.05 * pair[1], most)}
    assert not wrong


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(pytest.param(shape, BF16, marks=needs_kernels) for shape in [(128, 400), (257, 389), (400, 128)]),
        *((shape, torch.float16) for shape in [(256, 400), (400, 257)]),
    ],
)
def test_hard_spectra_stay_finite_with_a_spectral_norm_near_the_polynomials(shape, dtype):
    for s in hard_spectra(min(shape)):
        y = run(with_singular_values(*shape, s).x, dtype=dtype).double()
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


@pytest.mark.parametrize("shape", [(300, 700), (700, 300)])
def test_in_fp16_a_matrix_gives_the_same_bits_alone_in_a_batch_and_again(shape):
    x = torch.randn(3, *shape)
    found = [run(x, dtype=torch.float16), torch.stack([run(one, dtype=torch.float16) for one in x])]
    assert torch.equal(*found)


def test_in_fp16_segments_are_a_candidate_where_symmetric_products_have_panels_and_never_an_accelerators_default():
    def forms(m, n, device, name="polar_express"):
        place = m, n, name, 5, torch.device(device), torch.float16
        found = {(one.form.name, one.panel_rows) for one in _C.candidates(*place)}
        return _C.choose(*place).form.name, {rows for form, rows in found if form == "SEGMENTED"}

    for name in SETS:
        assert forms(256, 1024, "cpu", name) == ("GRAM", {64, 128, 256})
        assert forms(1024, 1024, "cpu", name) == ("DIRECT", {64, 128, 256})
        assert forms(2048, 3072, "cuda", name) == ("DIRECT", {0, 1024, 512})
        assert forms(8192, 2048, "cuda", name) == ("GRAM", {0, 1024, 512})
        assert forms(1024, 4096, "cuda", name) == ("GRAM", set())
    assert forms(4104, 8192, "cuda") == ("GRAM", set())
    assert forms(2048, 4096, "cuda", [(3.0, -3.2, 1.2)]) == ("GRAM", set())


def test_by_default_segments_are_chosen_in_bf16_alone_for_wide_matrices_and_rows_that_were_measured():
    cpu = torch.device("cpu")

    def choice(m, n, name="polar_express", steps=5, dtype=torch.bfloat16):
        return _C.choose(m, n, name, steps, cpu, dtype).form.name

    segmented = [choice(1024, 4096), choice(4096, 1024, "quintic"), choice(128, 256), choice(256, 384, "you")]
    prefers_bf16 = _C.default_ns_dtype(cpu) == torch.bfloat16
    if has_kernels(torch.bfloat16) and not prefers_bf16:  # R, Z and Q in fp32 are cheaper
        assert segmented == ["GRAM"] * 4 and choice(1024, 1024) == "GRAM"
    else:
        assert segmented == ["SEGMENTED"] * 4 if prefers_bf16 else "SEGMENTED" not in segmented
        assert choice(1024, 1024) == "DIRECT"
    others = [choice(127, 1024), choice(128, 255), choice(256, 380), choice(1024, 4096, steps=6)]
    assert "SEGMENTED" not in [
        *others,
        choice(1024, 4096, [(3.0, -3.2, 1.2)]),
        choice(1024, 4096, dtype=torch.float32),
        choice(1024, 4096, dtype=torch.float16),
    ]

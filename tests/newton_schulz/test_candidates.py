"""All that may be chosen for a shape is as exact as the direct form, and an update takes what is chosen."""

import pytest
import torch
from dmuon._planning.tuning import polynomial
from dmuon._setup.hyperparameters import Tuned, native_group, plain_choice
from exact import conditioned, gaussian, has_kernels, relative_error, rounding_bound

from dmuon import _C

CPU = torch.device("cpu")
SETS = ["polar_express", "quintic", "you"]


@pytest.mark.parametrize("shape", [(31, 67), (64, 64), (200, 96), (420, 140), (256, 256), (400, 256)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_candidate_has_at_most_1_3_times_the_direct_forms_error_or_what_rounding_explains(dtype, shape):
    seen, panels = set(), {}
    for name in SETS:
        rows = _C.resolve_coefficients(name, 5)
        floor = rounding_bound(rows, dtype) if dtype.itemsize > 2 else torch.finfo(dtype).eps / 4
        if dtype == torch.float16:
            floor *= 4
        for case in (gaussian(*shape), conditioned(*shape, 1e3)):
            exact = case.polynomial(rows)
            x = torch.stack([case.x, -case.x])

            def error_of(choice, x=x, exact=exact, name=name):
                got = _C.orthogonalize(x, name, 5, 0.0, dtype, choice=choice)
                return max(relative_error(one, exact * sign) for one, sign in zip(got, (1, -1), strict=True))

            direct = error_of(_C.Choice("cpu", _C.Form.DIRECT, False, 0))
            for one in _C.candidates(*shape, name, 5, CPU, dtype):
                assert error_of(one) <= 1.3 * direct + floor, (name, plain_choice(one))
                seen.add((one.backend, one.form.name, one.batched))
                panels.setdefault(one.backend, set()).add(one.panel_rows)
    segmented = {torch.bfloat16: [(420, 140), (400, 256)], torch.float16: [(256, 256), (400, 256)]}.get(dtype, [])
    segmented_by = {torch.bfloat16: "avx512", torch.float16: "cpu"}.get(dtype) if shape in segmented else None
    in_batches = min(shape) < 256 and dtype != torch.float64
    possible = {"cpu": {64, 128, 256} if min(shape) >= 256 else {0}, "avx512": {16}}
    assert panels == {backend: possible[backend] for backend in panels} and "cpu" in panels
    assert ("avx512" in panels) == has_kernels(dtype)
    assert seen == {
        (backend, form, batched)
        for backend in panels
        for form in ("DIRECT", "GRAM", *(["SEGMENTED"] if backend == segmented_by else []))
        for batched in (False, in_batches)
    }


def test_the_default_is_a_candidate_and_a_batch_that_is_none_is_refused():
    for shape, dtype in (((64, 64), torch.bfloat16), ((300, 900), torch.bfloat16), ((64, 64), torch.float64)):
        place = *shape, "you", 5, CPU, dtype
        assert _C.choose(*place) in _C.candidates(*place)
    for choice, words, shape in (
        (_C.Choice("cpu", _C.Form.GRAM, False, -1), "panel_rows must be at least 0; got -1", (300, 260)),
        (_C.Choice("cpu", _C.Form.GRAM, False, 7), "panel_rows must be 0; got 7", (20, 24)),
        (_C.Choice("cpu", _C.Form.GRAM, True, 0), "batched must be false for 300 x 260 in Float on cpu", (300, 260)),
        (
            _C.Choice("cpu", _C.Form.SEGMENTED, False, 0),
            "form must be direct or Gram for 300 x 260 .* got segmented",
            (300, 260),
        ),
        (
            _C.Choice("aten", _C.Form.GRAM, True, 0),
            r"backend must be one of .*cpu.* on this machine; got 'aten'",
            (8, 8),
        ),
    ):
        with pytest.raises(ValueError, match="orthogonalize: choice." + words):
            _C.orthogonalize(torch.randn(2, *shape), "you", 5, 0.0, torch.float32, choice=choice)


@pytest.mark.parametrize("shape", [(40, 31), (31, 40), (257, 120), (300, 260)])
def test_one_by_one_a_matrix_has_the_same_bits_alone_and_in_a_batch(shape):
    x = torch.randn(4, *shape)
    for one in _C.candidates(*shape, "you", 5, CPU, torch.float32):
        y = _C.orthogonalize(x, "you", 5, 0.0, torch.float32, choice=one)
        assert torch.equal(y, torch.stack([_C.orthogonalize(m, "you", 5, 0.0, torch.float32, choice=one) for m in x]))


@pytest.mark.parametrize("shape", [(700, 1400), (257, 400), (40, 90)])
def test_no_bit_of_the_kernels_depends_on_the_number_of_threads(shape):
    x = torch.randn(shape)
    dtypes = [dtype for dtype in (torch.bfloat16, torch.float32) if has_kernels(dtype)]
    if not dtypes:
        pytest.skip("this machine has no AVX-512")
    for dtype in dtypes:
        for one in _C.candidates(*shape, "quintic", 5, CPU, dtype):
            if one.backend != "avx512":
                continue
            found = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                found.append(_C.orthogonalize(x, "quintic", 5, 0.0, dtype, choice=one))
            assert all(torch.equal(y, found[0]) for y in found), plain_choice(one)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (300, 130)])
def test_the_tuners_reference_is_the_exact_polynomial(shape):
    rows = _C.resolve_coefficients("polar_express", 5)
    for case in (gaussian(*shape), conditioned(*shape, 1e3)):
        assert relative_error(polynomial(case.x[None], rows)[0], case.polynomial(rows)) < 1e-11


def updated(tuned, shape, column_blocks=1, **changes):
    options = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": None, "eps": 0.0}
    group = {**options, "ns_coefficients": "quintic", "ns_steps": 5, "ns_dtype": torch.float32, **changes}
    master = torch.zeros(shape)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    native = native_group(group, CPU, tuned)
    _C.muon_update(master, torch.zeros(shape), gradient, native, torch.tensor(True), column_blocks)
    return -master, gradient


def test_an_update_takes_the_choice_of_its_shape_and_only_with_the_settings_that_were_tuned():
    rows = _C.resolve_coefficients("quintic", 5)
    direct, gram = _C.Form.DIRECT, _C.Form.GRAM
    choice = next(one for one in _C.candidates(24, 40, rows, 5, CPU, torch.float32) if one.form == direct)
    tuned = Tuned(torch.float32, rows, dict.fromkeys([(24, 40), (24, 8)], choice))

    def plain(x, form):
        return _C.orthogonalize(x, rows, 5, 0.0, torch.float32, form=form)

    got, x = updated(tuned, (3, 24, 40))
    assert torch.equal(got, plain(x, direct)) and not torch.equal(got, plain(x, gram))
    assert torch.equal(updated(None, (3, 24, 40))[0], plain(x, gram))
    for changes in ({"ns_steps": 4}, {"ns_coefficients": "you"}, {"ns_dtype": torch.float64}):
        assert torch.equal(updated(tuned, (3, 24, 40), **changes)[0], updated(None, (3, 24, 40), **changes)[0])
    # Blocks of columns are matrices by themselves, here 24 x 8: their shape is tuned, not that of the whole.
    got, x = updated(tuned, (1, 24, 40), 5)
    whole = updated(tuned._replace(choices={(24, 40): tuned.choices[24, 40]}), (1, 24, 40), 5)[0]
    assert torch.equal(whole, updated(None, (1, 24, 40), 5)[0]) and not torch.equal(whole, got)
    expected = plain(x.view(24, 5, 8).transpose(0, 1), direct) * 3**0.5
    assert torch.allclose(got.view(24, 5, 8).transpose(0, 1), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "blocks"), [((2, 40, 24), 1), ((2, 300, 270), 1), ((2, 257, 1100), 2), ((2, 400, 130), 1)]
)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_an_update_is_as_exact_as_its_iteration_by_every_choice_and_for_gradients_of_any_size(
    shape, blocks, size, dtype
):
    generator = torch.Generator().manual_seed(0)
    start, first, second = (scale * torch.randn(shape, generator=generator) for scale in (0.01, 1, 1))
    rows = _C.resolve_coefficients("quintic", 5)
    sides = shape[1], shape[2] // blocks

    def matrices(x):
        return x.view(*shape[:2], blocks, sides[1]).transpose(1, 2).reshape(-1, *sides)

    momentum = 0.1 * first.double()
    moved = 0.9 * momentum + 0.1 * second.double()
    direction = matrices(0.9 * moved + 0.1 * second.double()).float()
    exact = polynomial(direction, rows)
    for choice in _C.candidates(*sides, rows, 5, CPU, dtype):
        found = []
        for threads in (1, 3) if choice.backend == "avx512" else (1,):
            torch.set_num_threads(threads)
            group = {"lr": 0.25, "weight_decay": 0.4, "momentum": 0.9, "nesterov": True, "adjust_lr_fn": None}
            group |= {"eps": 0.0, "ns_coefficients": "quintic", "ns_steps": 5, "ns_dtype": dtype}
            native = native_group(group, CPU, Tuned(dtype, rows, {sides: choice}))
            master, state = start.clone(), size * momentum.float()
            _C.muon_update(master, state, size * second, native, torch.tensor(True), blocks)
            found.append(master)
        assert torch.equal(found[0], found[-1]), plain_choice(choice)
        lr = 0.25 * max(1.0, sides[0] / sides[1]) ** 0.5
        update = matrices(0.9 * start.double() - found[0]) / lr
        alone = _C.orthogonalize(direction, rows, 5, 0.0, dtype, choice=choice)
        assert relative_error(update, exact) <= 1.1 * relative_error(alone, exact) + 1e-6, plain_choice(choice)
        assert relative_error(state / size, moved) < 1e-6

"""Triton's interpreter with the harness's corrections, through real kernels.

Two references: the definition of the formats, written out here, and PyTorch.
"""

import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from harness import HarnessError, triton_interpreter
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

# Triton type, torch type, exponent bits, mantissa bits, bias, FNUZ
FORMATS = {
    "fp8e4nv": (tl.float8e4nv, torch.float8_e4m3fn, 4, 3, 7, False),
    "fp8e4b8": (tl.float8e4b8, torch.float8_e4m3fnuz, 4, 3, 8, True),
    "fp8e5": (tl.float8e5, torch.float8_e5m2, 5, 2, 15, False),
    "fp8e5b16": (tl.float8e5b16, torch.float8_e5m2fnuz, 5, 2, 16, True),
}
FP8 = pytest.mark.parametrize("name", FORMATS)


@triton.jit
def decode_kernel(bits_ptr, out_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(bits_ptr + offsets).to(FORMAT, bitcast=True)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty))


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty))


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "lt":
        out = x < y
    elif OP == "le":
        out = x <= y
    elif OP == "gt":
        out = x > y
    elif OP == "ge":
        out = x >= y
    elif OP == "eq":
        out = x == y
    elif OP == "ne":
        out = x != y
    elif OP == "fmin":
        out = tl.minimum(x, y)
    elif OP == "fmax":
        out = tl.maximum(x, y)
    elif OP == "neg":
        out = -x
    elif OP == "abs":
        out = tl.abs(x)
    elif OP == "where":
        out = tl.where(x < y, x, y)
    elif OP == "clamp":
        out = tl.clamp(x, -1.0, 1.0)
    elif OP == "clamp_nan":
        out = tl.clamp(x, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        out = tl.fma(x, y, x)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def dot_scaled_kernel(
    a_ptr, b_ptr, scale_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    scale = tl.load(scale_ptr + n[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :])
    out = tl.dot_scaled(a, None, "bf16", b, scale, "e4m3")
    tl.store(out_ptr + m[:, None] * N + n[None, :], out)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    if OP == "sum":
        tl.store(out_ptr + offsets, tl.sum(x, axis=0).to(out_ptr.dtype.element_ty))
    elif OP == "max":
        tl.store(out_ptr + offsets, tl.max(x, axis=0).to(out_ptr.dtype.element_ty))
    elif OP == "min":
        tl.store(out_ptr + offsets, tl.min(x, axis=0).to(out_ptr.dtype.element_ty))
    elif OP == "cumsum":
        tl.store(out_ptr + offsets, tl.cumsum(x, axis=0))
    else:
        tl.store(out_ptr + offsets, tl.cumprod(x, axis=0))


@triton.jit
def scalar_mask_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, value, mask=n > 2)


@triton.jit
def toward_zero_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, value.to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def atomic_kernel(x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.atomic_add(x_ptr + offsets, tl.load(x_ptr + offsets))


def value_of(code: int, name: str) -> float:
    """What a code means by the definition of its format."""
    _, _, exponent_bits, mantissa_bits, bias, fnuz = FORMATS[name]
    sign = -1 if code & 0x80 else 1
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if fnuz:
        if code == 0x80:
            return math.nan
    elif name == "fp8e4nv":
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def code_of(x: float, name: str) -> int | None:
    """The code that a downcast of `x` must give; None is any NaN."""
    fnuz = FORMATS[name][5]
    if math.isnan(x) or (fnuz and math.isinf(x)):
        return None
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    codes = [c for c in range(128) if math.isfinite(value_of(c, name))]
    if abs(x) >= value_of(codes[-1], name):
        return sign | codes[-1]
    exact = abs(Fraction(x))
    # The nearest; of two the even code, which has the even mantissa.
    best = min(codes, key=lambda c: (abs(Fraction(value_of(c, name)) - exact), c & 1))
    return best if fnuz and best == 0 else sign | best


def edges(name: str) -> torch.Tensor:
    """Each code's value, each midpoint, both float32 neighbours of these, and
    what lies outside: zeros, tiny and huge values, infinities, NaN."""
    values = [value_of(c, name) for c in range(128)]
    values = [v for v in values if math.isfinite(v)]
    step = values[-1] - values[-2]
    values += [values[-1] + step * i / 2 for i in range(1, 5)]
    points = torch.tensor(values, dtype=torch.float64)
    points = torch.cat([points, (points[1:] + points[:-1]) / 2]).float()
    inf = torch.tensor(math.inf)
    points = torch.cat(
        [points, points.nextafter(inf), points.nextafter(-inf).clamp(min=0)]
    )
    others = [0.0, 1e-45, 1e-38, 1e-10, 1e5, 1e30, 3.4028235e38, math.inf, math.nan]
    points = torch.cat([points, torch.tensor(others)])
    return torch.cat([points, -points])


def padded(x: torch.Tensor) -> torch.Tensor:
    """Zeros added to a power of two, which a Triton block must have."""
    return torch.nn.functional.pad(x, (0, triton.next_power_of_2(len(x)) - len(x)))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = padded(x) if x.dtype.itemsize > 1 else x
    out = torch.empty(len(x), dtype=dtype)
    cast_kernel[(1,)](x, out, N=len(x))
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; any NaN for a NaN."""
    assert got.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    wrong = (bits(got) != bits(expected)) & ~nan
    assert not wrong.any(), (got[wrong][:8], expected[wrong][:8])


def saturated(x: torch.Tensor, name: str) -> torch.Tensor:
    """PyTorch's cast to FP8, after the saturation that it lacks on the CPU.

    Triton's code for NVIDIA and AMD saturates. PyTorch makes an overflow a NaN
    or an infinity.
    """
    _, dtype, *_, fnuz = FORMATS[name]
    limit = torch.finfo(dtype).max
    x = x.float()
    clamped = x.clamp(-limit, limit)
    if fnuz:
        clamped = torch.where(x.isinf(), math.nan, clamped)
    return clamped.to(dtype)


CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@FP8
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_of_all_codes(name, out):
    triton_type, torch_type, *_ = FORMATS[name]
    defined = torch.tensor([value_of(c, name) for c in range(256)]).to(out)
    got = torch.empty(256, dtype=out)
    decode_kernel[(1,)](CODES, got, FORMAT=triton_type, N=256)
    assert_same(got, defined)
    assert_same(got, CODES.view(torch_type).to(out))
    assert_same(cast(CODES.view(torch_type), out), defined)


@FP8
def test_encode_of_edges(name):
    x = edges(name)
    got = cast(x, FORMATS[name][1])[: len(x)]
    assert_same(got, saturated(x, name))
    for value, code in zip(x.tolist(), bits(got).tolist(), strict=True):
        expected = code_of(value, name)
        if expected is None:
            assert math.isnan(value_of(code, name)), (value, code)
        else:
            assert code == expected, (value, code, expected)


@FP8
def test_encode_of_random_float32(name):
    random = torch.Generator().manual_seed(942)
    x = torch.randint(-(2**31), 2**31, (1 << 16,), generator=random)
    near = torch.randn(1 << 16, generator=random) * 2.0 ** torch.randint(
        -20, 12, (1 << 16,), generator=random
    )
    for values in (x.to(torch.int32).view(torch.float32), near):
        assert_same(cast(values, FORMATS[name][1]), saturated(values, name))


@FP8
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_encode_of_all_16_bit_values(name, source):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(source)
    assert_same(cast(x, FORMATS[name][1]), saturated(x, name))


@pytest.mark.parametrize("name", ["fp8e4b8", "fp8e5b16"])
def test_fnuz_has_one_zero_and_one_nan(name):
    x = torch.tensor([-0.0, -1e-30, math.nan, -math.nan, math.inf, -math.inf, 0.0, 1.0])
    assert bits(cast(x, FORMATS[name][1]))[:7].tolist() == [0, 0] + [0x80] * 4 + [0]


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e5"])
def test_ocp_keeps_the_sign_of_zero_and_saturates_infinity(name):
    largest = {"fp8e4nv": 0x7E, "fp8e5": 0x7B}[name]
    x = torch.tensor([-0.0, -1e-30, 0.0, math.inf, -math.inf, 1e30, -1e30, 1.0])
    codes = bits(cast(x, FORMATS[name][1]))[:7].tolist()
    assert codes == [0x80, 0x80, 0, largest, largest | 0x80, largest, largest | 0x80]


def test_float32_to_bfloat16_rounds_to_nearest_even():
    random = torch.Generator().manual_seed(942)
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | low).to(torch.int32).view(torch.float32)
        assert_same(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    low = torch.randint(0, 1 << 16, (1 << 16,), generator=random)
    x = (high | low).to(torch.int32).view(torch.float32)
    assert_same(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_bfloat16_to_wider_types_is_exact():
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    assert_same(cast(x, torch.float32), x.float())
    assert_same(cast(x, torch.float16), x.to(torch.float16))


def test_integers_to_bfloat16():
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    assert_same(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_bfloat16_to_integers_truncates():
    x = torch.tensor([0.0, -0.0, 1.75, -1.75, 2.5, -2.5, 1000.0, -1000.0]).bfloat16()
    assert cast(x, torch.int32).tolist() == [0, 0, 1, -1, 2, -2, 1000, -1000]


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 pairs: random ones of all magnitudes, and all pairs of specials."""
    random = torch.Generator().manual_seed(942)
    raw = torch.randint(-(1 << 15), 1 << 15, (2, 4096), generator=random)
    near = torch.randn(2, 4096, generator=random)
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan]
    )
    x, y = (
        torch.cat(
            [raw[i].to(torch.int16).view(torch.bfloat16), near[i].to(torch.bfloat16)]
        )
        for i in (0, 1)
    )
    product = torch.cartesian_prod(special, special).to(torch.bfloat16)
    return padded(torch.cat([x, product[:, 0]])), padded(torch.cat([y, product[:, 1]]))


def of_numbers(op, x, y):
    """Triton's default: the other operand of a NaN (a signaling one, too)."""
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, op(x, y)))


BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x < y, x, y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "fmin": lambda x, y: of_numbers(torch.minimum, x, y),
    "fmax": lambda x, y: of_numbers(torch.maximum, x, y),
    "fma": lambda x, y: (x.double() * y.double() + x.double()).float().bfloat16(),
}


@pytest.mark.parametrize("op", BINARY)
def test_bfloat16_arithmetic(op):
    x, y = pairs()
    expected = BINARY[op](x, y)
    got = torch.empty(len(x), dtype=expected.dtype)
    binary_kernel[(1,)](x, y, got, N=len(x), OP=op)
    if op in ("fmin", "fmax"):  # of two zeros either one may be returned
        zero = expected == 0
        assert (got[zero] == 0).all()
        got, expected = got[~zero], expected[~zero]
    assert_same(got.to(torch.float32), expected.to(torch.float32))


@pytest.mark.parametrize("op", ["clamp", "clamp_nan"])
def test_bfloat16_clamp(op):
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, math.nan, 3.0, math.inf]).bfloat16()
    got = torch.empty_like(x)
    binary_kernel[(1,)](x, x, got, N=8, OP=op)
    expected = x.clamp(-1.0, 1.0)  # keeps NaN
    assert_same(got, expected if op == "clamp_nan" else expected.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *(f[1] for f in FORMATS.values())])
def test_dot(dtype):
    random = torch.Generator().manual_seed(942)
    a = (torch.randn(16, 64, generator=random)).to(dtype)
    b = (torch.randn(64, 32, generator=random)).to(dtype)
    got = torch.empty(16, 32)
    dot_kernel[(1,)](a, b, got, M=16, N=32, K=64)
    expected = a.double() @ b.double()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


def test_dot_scaled_of_bfloat16():
    # Beyond float16, through which the original takes its operands.
    random = torch.Generator().manual_seed(942)
    a = (torch.randn(16, 64, generator=random) * 2**20).bfloat16()
    b = torch.randn(64, 32, generator=random).to(torch.float8_e4m3fn)
    scale = torch.full((32, 2), 126, dtype=torch.uint8)  # 1/2, as E8M0
    got = torch.empty(16, 32)
    dot_scaled_kernel[(1,)](a, b, scale, got, M=16, N=32, K=64)
    expected = a.double() @ b.double() / 2
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2**20 * 1e-4)


@pytest.mark.parametrize("op", ["sum", "max", "min", "cumsum", "cumprod"])
def test_bfloat16_reductions(op):
    # Multiples of 1/4 with a small total: each partial result is exact.
    x = torch.tensor([0.25, -3.0, 1.5, 0.5, -0.25, 8.0, -1.0, 2.0]).bfloat16()
    got = torch.empty_like(x)
    reduce_kernel[(1,)](x, got, N=8, OP=op)
    if op in ("cumsum", "cumprod"):
        expected = getattr(x.double(), op)(0).bfloat16()
    else:
        expected = getattr(x, op)().expand(8).contiguous()
    assert_same(got, expected)


@pytest.mark.parametrize("n", [2, 3])
def test_comparison_of_scalars_is_a_mask(n):
    out = torch.zeros(4)
    scalar_mask_kernel[(1,)](torch.ones(4), out, n, N=4)
    assert out.tolist() == [float(n > 2)] * 4


def test_what_is_not_modelled_raises():
    x = torch.ones(256)
    with pytest.raises(InterpreterError, match="fp8e4b15 is not supported"):
        decode_kernel[(1,)](CODES, x, FORMAT=tl.float8e4b15, N=256)
    with pytest.raises(InterpreterError, match="rounding toward zero"):
        toward_zero_kernel[(1,)](x, x.bfloat16(), N=256)
    with pytest.raises(InterpreterError, match="atomics on bf16"):
        atomic_kernel[(1,)](x.bfloat16(), N=256)


def test_install_twice_changes_nothing():
    before = dict(vars(interpreter.InterpreterBuilder))
    triton_interpreter.install()
    assert dict(vars(interpreter.InterpreterBuilder)) == before


def test_install_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(HarnessError, match="TRITON_INTERPRET=1"):
        triton_interpreter.install()


def test_another_interpreter_is_refused_by_name(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(interpreter.InterpreterBuilder, "create_dot")
        with pytest.raises(HarnessError, match=r"InterpreterBuilder\.create_dot is mi"):
            triton_interpreter.check()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "unary_op", lambda self, x: x)
        with pytest.raises(HarnessError, match=r"unary_op has parameters \(self x\)"):
            triton_interpreter.check()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", lambda tt_dtype: {}[tt_dtype])
        with pytest.raises(HarnessError, match="_get_np_dtype does not know bf16"):
            triton_interpreter.check()
    triton_interpreter.check()

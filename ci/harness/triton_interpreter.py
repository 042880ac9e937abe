"""bfloat16 and FP8 in Triton's interpreter, computed as a GPU computes them.

The interpreter keeps these types as the integers of their bits. Triton 3.9.0
then adds, multiplies and compares the integers, rounds FP8 downcasts wrongly and
takes a scalar comparison for an integer. `install` replaces the methods that do so.

Arithmetic: operands are widened to float32, the operation is done there, and the
result is rounded to nearest even. For ``+ - * /`` of two bfloat16 this gives the
correctly rounded result; `tl.fma` rounds to float32 first, as LLVM's code for
AMD GPUs does. `tl.dot` accumulates in float32.

Downcasts round to nearest even, and FP8 saturates as in the code that Triton
3.6.0 and 3.9.0 emit:

=================================  ========  ========  ===============  ========
from float32, bfloat16, float16    overflow  infinity  NaN              -0.0
=================================  ========  ========  ===============  ========
float8e4nv, float8e5 (OCP)         maximum   maximum   NaN (0x7F)       -0.0
float8e4b8, float8e5b16 (FNUZ)     maximum   NaN       NaN (0x80)       +0.0
=================================  ========  ========  ===============  ========

How that is known: for NVIDIA, Triton emits ``cvt.rn.satfinite``. For gfx942 and
gfx950 its conversion in software (OCP on gfx942, FNUZ on gfx950) does exactly
this; around the hardware's conversion (FNUZ on gfx942, OCP on gfx950) it sets
``MODE.FP16_OVFL``, which makes overflow saturate. An infinity under that mode is
the one case here for which only the software conversion is evidence. PyTorch's
CPU casts differ: there an overflow is a NaN, or an infinity in ``float8_e5m2``.

Not modelled: the order of a reduction, tf32 in `tl.dot`, and float8e4b15, which
raises ValueError since no GPU of this project has it.
"""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from . import HarnessError

#: Triton's types that the interpreter keeps as integers, and numpy's for them.
FORMATS: dict[tl.dtype, Any] = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e4b8: ml_dtypes.float8_e4m3fnuz,
    tl.float8e5: ml_dtypes.float8_e5m2,
    tl.float8e5b16: ml_dtypes.float8_e5m2fnuz,
}

#: The formats whose infinities become NaN and not the maximum.
_FNUZ = (tl.float8e4b8, tl.float8e5b16)

#: What `install` replaces or relies on, with the parameters that it expects.
_EXPECTED = {
    "_convert_float": "input input_dtype output_dtype rounding_mode",
    "_get_np_dtype": "tt_dtype",
    "_mxfp_value_handle_to_float32": "value_handle",
    "InterpreterBuilder.binary_op": "self lhs rhs op",
    "InterpreterBuilder.cast_impl": "self src dst_type",
    "InterpreterBuilder.create_atomic_rmw": "self rmwOp ptr val mask sem scope",
    "InterpreterBuilder.create_dot": "self a b d input_precision max_num_imprecise_acc",
    "InterpreterBuilder.create_fma": "self x y z",
    "InterpreterBuilder.create_fp_to_fp": "self src dst_type rounding_mode",
    "InterpreterBuilder.get_fp8e4b8_ty": "self",
    "InterpreterBuilder.ternary_op": "self lhs rhs other op",
    "InterpreterBuilder.unary_op": "self arg op",
    "ReduceOps.apply_impl": "self input",
    "ReduceOps.generic_reduce": "self input",
    "ScanOps.cumprod": "self input",
    "ScanOps.cumsum": "self input",
    "ScanOps.generic_scan": "self input",
    "TensorHandle": "data dtype attr",
}

_INSTALLED = "_harness_installed"


def decode(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The values of an array of bits, as float32. All of them are exact."""
    return np.ascontiguousarray(bits).view(FORMATS[dtype]).astype(np.float32)


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Rounds values to a format, by the table above, and returns the bits.

    Values of other types than float32 (float64, wide integers) are rounded to
    float32 first.
    """
    fmt = FORMATS[dtype]
    with np.errstate(all="ignore"):
        values = np.asarray(values).astype(np.float32)
        if dtype.primitive_bitwidth == 8:
            limit = np.float32(ml_dtypes.finfo(fmt).max)
            if dtype in _FNUZ:
                values = np.where(np.isinf(values), np.float32(np.nan), values)
            values = np.clip(values, -limit, limit)  # keeps NaN
        bits = np.ascontiguousarray(values.astype(fmt))
    return bits.view(np.uint8 if dtype.primitive_bitwidth == 8 else np.uint16)


def install() -> None:
    """Corrects the interpreter of this process. Idempotent.

    Raises:
        HarnessError: the interpreter is off, or it is not the one that these
            corrections were written for; the message names the attribute.
    """
    if not triton.knobs.runtime.interpret:
        raise HarnessError("Triton's interpreter is off: set TRITON_INTERPRET=1")
    if getattr(interpreter, _INSTALLED, False):
        return
    check()
    for name, function in _CORRECTIONS.items():
        owner, attribute = _find(name)
        _ORIGINALS[name] = getattr(owner, attribute)
        setattr(owner, attribute, function)
    setattr(interpreter, _INSTALLED, True)


def check() -> None:
    """Raises HarnessError if the interpreter lacks what `install` expects."""
    for name, expected in _EXPECTED.items():
        owner, attribute = _find(name)
        found = " ".join(inspect.signature(getattr(owner, attribute)).parameters)
        if found != expected:
            raise _unexpected(name, f"has parameters ({found}), expected ({expected})")
    for dtype in FORMATS:
        stored = np.uint8 if dtype.primitive_bitwidth == 8 else np.uint16
        try:
            known = interpreter._get_np_dtype(dtype)
        except KeyError:
            raise _unexpected("_get_np_dtype", f"does not know {dtype}") from None
        if known != stored:
            raise _unexpected("_get_np_dtype", f"keeps {dtype} as {known}")


def _find(name: str) -> tuple[Any, str]:
    *parents, attribute = name.split(".")
    owner: Any = interpreter
    for parent in parents:
        owner = getattr(owner, parent, None)
    if not hasattr(owner, attribute):
        raise _unexpected(name, "is missing")
    return owner, attribute


def _unexpected(name: str, what: str) -> HarnessError:
    return HarnessError(
        f"triton {triton.__version__}: triton.runtime.interpreter.{name} {what}. "
        f"Adapt ci/harness/triton_interpreter.py to this Triton (it knows 3.9.0)"
    )


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """A cast of which one side is in `FORMATS`."""
    values = decode(data, source) if source in FORMATS else data
    if target in FORMATS:
        return encode(values, target)
    with np.errstate(all="ignore"):
        return values.astype(interpreter._get_np_dtype(target))


def _concerns(*dtypes: tl.dtype) -> bool:
    """Whether one of the types is kept as an integer."""
    if tl.float8e4b15 in dtypes:
        raise ValueError("type fp8e4b15 is not supported on gfx942, gfx950 and sm_90")
    return any(dtype in FORMATS for dtype in dtypes)


def _values(handle) -> np.ndarray:
    dtype = handle.dtype.scalar
    return decode(handle.data, dtype) if dtype in FORMATS else handle.data


def _handle(values: np.ndarray, dtype: tl.dtype):
    if values.dtype == np.bool_:  # a comparison
        return interpreter.TensorHandle(values, tl.int1)
    data = encode(values, dtype) if dtype in FORMATS else values
    return interpreter.TensorHandle(data, dtype)


# The corrections. Each one has the name and the parameters of the method that
# it replaces, and leaves other types to the original.

_ORIGINALS: dict[str, Any] = {}


def _convert_float(input, input_dtype, output_dtype, rounding_mode):
    # Returns bits, and takes them: float32 values may come as either.
    if not _concerns(input_dtype, output_dtype):
        original = _ORIGINALS["_convert_float"]
        return original(input, input_dtype, output_dtype, rounding_mode)
    if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ and output_dtype in FORMATS:
        raise NotImplementedError("rounding toward zero is not modelled")
    if input_dtype not in FORMATS:
        input = np.ascontiguousarray(input).view(interpreter._get_np_dtype(input_dtype))
    output = _convert(input, input_dtype, output_dtype)
    return output.view(f"uint{output_dtype.primitive_bitwidth}")


def _mxfp_value_handle_to_float32(value_handle):
    if value_handle.dtype in FORMATS:
        return _values(value_handle)
    return _ORIGINALS["_mxfp_value_handle_to_float32"](value_handle)


def cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if not _concerns(source, target):
        return _ORIGINALS["InterpreterBuilder.cast_impl"](self, src, dst_type)
    data = _convert(src.data, source, target)
    return interpreter.TensorHandle(data, target)


def binary_op(self, lhs, rhs, op):
    dtype = lhs.dtype.scalar
    if not _concerns(dtype):
        result = _ORIGINALS["InterpreterBuilder.binary_op"](self, lhs, rhs, op)
        # The original gives a comparison the type of its operands. Splat then
        # turns a scalar one into integers, which are refused as a mask.
        return _handle(result.data, dtype)
    with np.errstate(all="ignore"):
        return _handle(op(_values(lhs), _values(rhs)), dtype)


def unary_op(self, arg, op):
    dtype = arg.dtype.scalar
    if not _concerns(dtype):
        return _ORIGINALS["InterpreterBuilder.unary_op"](self, arg, op)
    with np.errstate(all="ignore"):
        return _handle(op(_values(arg)), dtype)


def ternary_op(self, lhs, rhs, other, op):
    dtype = other.dtype.scalar
    if op is np.where or not _concerns(dtype):  # a selection moves bits
        return _ORIGINALS["InterpreterBuilder.ternary_op"](self, lhs, rhs, other, op)
    return _handle(op(_values(lhs), _values(rhs), _values(other)), dtype)


def create_fma(self, x, y, z):
    dtype = z.dtype.scalar
    original = _ORIGINALS["InterpreterBuilder.create_fma"]
    if not _concerns(dtype):
        return original(self, x, y, z)
    wide = [_handle(_values(arg), tl.float32) for arg in (x, y, z)]
    return _handle(original(self, *wide).data, dtype)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    dtype = d.dtype.scalar
    if not _concerns(a.dtype.scalar, b.dtype.scalar, dtype):
        original = _ORIGINALS["InterpreterBuilder.create_dot"]
        return original(self, a, b, d, input_precision, max_num_imprecise_acc)
    product = np.matmul(_values(a), _values(b), dtype=np.float32)
    total = product + _values(d)
    if dtype not in FORMATS:
        total = total.astype(d.data.dtype)
    return _handle(total, dtype)


def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
    exchange = rmwOp == interpreter._ir.ATOMIC_OP.XCHG
    if _concerns(val.dtype.scalar) and not exchange:
        raise NotImplementedError(f"atomics on {val.dtype.scalar} are not modelled")
    original = _ORIGINALS["InterpreterBuilder.create_atomic_rmw"]
    return original(self, rmwOp, ptr, val, mask, sem, scope)


def reduce_apply_impl(self, input):
    # The shortcuts reduce the array as it is; the generic way combines elements
    # with the operations above.
    if _concerns(*(arg.dtype.scalar for arg in input)):
        return self.generic_reduce(input)
    return _ORIGINALS["ReduceOps.apply_impl"](self, input)


def cumsum(self, input):
    return _scan("ScanOps.cumsum", self, input)


def cumprod(self, input):
    return _scan("ScanOps.cumprod", self, input)


def _scan(name, scan, input):
    if _concerns(input.dtype.scalar):
        return scan.generic_scan((input,))
    return _ORIGINALS[name](scan, input)


_CORRECTIONS = {
    "_convert_float": _convert_float,
    "_mxfp_value_handle_to_float32": _mxfp_value_handle_to_float32,
    "InterpreterBuilder.binary_op": binary_op,
    "InterpreterBuilder.cast_impl": cast_impl,
    "InterpreterBuilder.create_atomic_rmw": create_atomic_rmw,
    "InterpreterBuilder.create_dot": create_dot,
    "InterpreterBuilder.create_fma": create_fma,
    "InterpreterBuilder.ternary_op": ternary_op,
    "InterpreterBuilder.unary_op": unary_op,
    "ReduceOps.apply_impl": reduce_apply_impl,
    "ScanOps.cumprod": cumprod,
    "ScanOps.cumsum": cumsum,
}

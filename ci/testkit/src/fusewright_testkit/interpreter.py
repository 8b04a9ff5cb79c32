"""Triton's interpreter without what it does again and again to no end.

Its numbers come from numpy and stay the same to the bit. Most of its time went into Python around
them: it goes through all of triton.language at each launch and at each call of a device function,
makes a shape's tuples and constants again for each tensor, compares equal types and shapes value by
value, makes a table of all dtypes at each operation to look one up, and computes at each sum and
product of whole numbers whether it overflows, which it asserts in debug mode alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core, semantic
from triton.runtime import interpreter

constexpr, tensor, block_type = core.constexpr, core.tensor, core.block_type
TensorHandle = interpreter.TensorHandle
# Operands of one of these, equal for both, stay what they are.
FLOATS = {"fp16", "fp32", "fp64"}
WHOLE = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
KEPT = {*WHOLE, *FLOATS, "int1", "bf16"}
# Those that divisions keep.
DIVIDED = {*WHOLE, "fp32", "fp64"}
# What is no constexpr and holds none.
PLAIN = {int, float, bool, str, type(None), tensor, core.dtype, block_type, core.pointer_type}
# What carries builtins that a launch replaces, while none of them is replaced.
PATCHED = (tl, core, tl.math, tensor, core.tensor_descriptor_base)
# The code of what ``triton.language.core.builtin`` returns.
WRAPPER = tensor.__add__.__code__


@contextmanager
def quicker() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for replace in (
            replace_types,
            replace_operations,
            replace_handles,
            replace_reductions,
            replace_preparation,
        ):
            replace(patch)
        yield


def replace_types(patch: pytest.MonkeyPatch) -> None:
    """Types and tensors of one shape share what is made of it."""

    # Typed, because 1 and True are equal and only one of them is a length.
    @functools.lru_cache(maxsize=None, typed=True)
    def of_shape(*lengths):
        if not lengths:
            raise TypeError("0d block_type is forbidden")
        numel = validate_block_shape(lengths)
        shape = core.tuple(list(lengths))
        constants = core.tuple([constexpr(length) for length in lengths])
        return lengths, shape, numel, str(shape), (constants, constexpr(numel))

    def make_block_type(self, element_ty, shape):
        lengths = shape.values if type(shape) is core.tuple else shape
        lengths = [x.value if type(x) is constexpr else x for x in lengths]
        self.element_ty = element_ty
        self.lengths, self.shape, self.numel, name, self.constants = of_shape(*lengths)
        self.name = f"<{name}, {element_ty}>"

    no_lengths, one = core.tuple([]), constexpr(1)

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constants if type.is_block() else (no_lengths, one)

    unwrap, dtypes_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    tuples_equal, types_equal = core.tuple.__eq__, block_type.__eq__

    def unwrap_at_once(x):
        kind = type(x)
        if kind is constexpr:
            return x.value
        return x if kind in PLAIN else unwrap(x)

    def tuples_equal_at_once(self, other):
        if type(other) is core.tuple:
            return constexpr(self is other or self.values == other.values)
        return tuples_equal(self, other)

    to_ir = block_type.to_ir

    def to_itself(self, builder):
        return self if self.element_ty.name in KEPT else to_ir(self, builder)

    patch.setattr(block_type, "to_ir", to_itself)
    patch.setattr(block_type, "__init__", make_block_type)
    patch.setattr(tensor, "__init__", make_tensor)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap_at_once)
    patch.setattr(core.tuple, "__eq__", tuples_equal_at_once)
    patch.setattr(core.dtype, "__eq__", lambda a, b: a is b or dtypes_equal(a, b))
    patch.setattr(block_type, "__eq__", lambda a, b: a is b or types_equal(a, b))


def replace_operations(patch: pytest.MonkeyPatch) -> None:
    """Operands of one type and one shape are taken as they are, numbers in the type of the tensor
    beside them, and what is spread to a shape is spread at once.
    """
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    convert = semantic.TritonSemantic.binary_op_type_checking_impl

    def spread(x, block):
        return tensor(filled(x.handle, block.lengths), block.with_element_ty(x.dtype))

    def stretched(x, lengths):
        if x.type.lengths == lengths:
            return x
        data = np.broadcast_to(x.handle.data, lengths)
        return tensor(TensorHandle(data, x.handle.dtype.scalar), block_type(x.dtype, lengths))

    def broadcast_at_once(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if not (left.is_block() and right.is_block()):
            if left.is_block():
                return lhs, spread(rhs, left)
            return (spread(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if left.lengths == right.lengths:
            return lhs, rhs
        pairs = [*zip(left.lengths, right.lengths, strict=False)]
        fitting = all(a == b or a == 1 or b == 1 for a, b in pairs)
        if not fitting or len(left.lengths) != len(right.lengths):
            return broadcast(self, lhs, rhs)
        lengths = tuple([b if a == 1 else a for a, b in pairs])
        return stretched(lhs, lengths), stretched(rhs, lengths)

    def convert_at_once(
        self,
        lhs,
        rhs,
        allow_lhs_ptr=False,
        allow_rhs_ptr=False,
        arithmetic_check=True,
        div_or_mod=False,
    ):
        kept = DIVIDED if div_or_mod else KEPT
        if type(lhs) is tensor and type(rhs) is tensor:
            left, right = lhs.dtype.name, rhs.dtype.name
            offset = allow_lhs_ptr and right in WHOLE and lhs.dtype.is_ptr()
            if offset or (left == right and left in kept):
                return broadcast_at_once(self, lhs, rhs)
        elif arithmetic_check and type(lhs) is tensor and fits_beside(rhs, lhs.dtype, kept):
            return broadcast_at_once(self, lhs, number_of(rhs, lhs.dtype))
        elif arithmetic_check and type(rhs) is tensor and fits_beside(lhs, rhs.dtype, kept):
            return broadcast_at_once(self, number_of(lhs, rhs.dtype), rhs)
        return convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_at_once)
    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", convert_at_once)
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", unchecked)


def fits_beside(number: object, dtype: core.dtype, kept: set[str]) -> bool:
    """Whether a number takes the type of the tensor beside it. Others are left to Triton, which
    widens the tensor or refuses the number.
    """
    kind, name = type(number), dtype.name
    if name not in kept or (kind is not int and kind is not float):
        return False
    if name in WHOLE:
        lowest, highest = dtype.get_int_min_value(), dtype.get_int_max_value()
        return kind is int and lowest <= number <= highest
    return name in FLOATS and (kind is float or abs(number) < 2**31)


def number_of(number: float, dtype: core.dtype) -> tensor:
    # Triton makes every zero a positive one.
    data = np.array([number or 0], interpreter._get_np_dtype(dtype))
    return tensor(TensorHandle(data, dtype), dtype)


def filled(handle: TensorHandle, lengths: tuple[int, ...]) -> TensorHandle:
    data = np.empty(lengths, interpreter._get_np_dtype(handle.dtype))
    data[...] = handle.data
    return TensorHandle(data, handle.dtype.scalar)


def replace_handles(patch: pytest.MonkeyPatch) -> None:
    """numpy's dtypes and the sizes of Triton's are looked up by name."""
    look_up, fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
    known, sizes = {}, {}

    def known_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype.scalar)
        return known[name]

    def fits_by_name(array, dtype):
        if dtype.name not in sizes:
            if dtype.name not in KEPT:
                return fits(array, dtype)
            sizes[dtype.name] = max(8, dtype.primitive_bitwidth) // 8
        return array.itemsize <= sizes[dtype.name]

    check = TensorHandle.__post_init__

    def make_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits_by_name(data, dtype):
            check(self)

    builder = interpreter.InterpreterBuilder
    splat, expand_dims = builder.create_splat, builder.create_expand_dims

    def fill(self, type, handle):
        block = isinstance(handle.dtype, block_type)
        return splat(self, type, handle) if block else filled(handle, type.lengths)

    def add_axis(self, handle, axis):
        if axis < 0:
            return expand_dims(self, handle, axis)
        data = handle.data[(slice(None),) * axis + (None,)]
        return TensorHandle(data, handle.dtype.scalar)

    patch.setattr(builder, "create_splat", fill)
    patch.setattr(builder, "create_expand_dims", add_axis)
    patch.setattr(TensorHandle, "__init__", make_handle)
    patch.setattr(interpreter, "_get_np_dtype", known_dtype)
    patch.setattr(interpreter, "_validate_np_data_size", fits_by_name)


def replace_reductions(patch: pytest.MonkeyPatch) -> None:
    """A function of the caller's combines whole slices, one after the other, instead of numbers."""
    reduce = interpreter.ReduceOps.generic_reduce

    def reduce_slices(self, input):
        if self.axis is None or input[0].handle.data.ndim == 1 or self.keep_dims:
            return reduce(self, input)
        slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
        kept = None
        for values in zip(*slices, strict=True):
            values = [self.to_tensor(x, y.dtype) for x, y in zip(values, input, strict=True)]
            if kept is not None:
                values = self.combine_fn.fn(*kept, *values)
                values = values if isinstance(values, tuple) else (values,)
                values = [
                    self.to_tensor(x.handle.data, y.dtype)
                    for x, y in zip(values, input, strict=True)
                ]
            kept = values
        return kept

    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_slices)


def replace_preparation(patch: pytest.MonkeyPatch) -> None:
    """A launch replaces what it replaces in triton.language once, without a search for it."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replace_members, prepared = interpreter._patch_builtin, set()
    found = {owner: members(owner) for owner in PATCHED}

    def replace_found(owner, builder, scope):
        if owner not in found:
            replace_members(owner, builder, scope)
            return
        for name, member, replacement in found[owner]:
            if getattr(owner, name) is member:
                scope.set_attr(owner, name, replacement)

    @functools.cache
    def languages(function):
        values = function.__globals__.values()
        return frozenset(x.__name__ for x in values if x is tl or x is core)

    def prepare_once(function):
        if languages(function) in prepared:
            return None
        prepared.add(languages(function))
        return prepare(function)

    def launch_afresh(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_builtin", replace_found)
    patch.setattr(interpreter, "_patch_lang", prepare_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)


def members(owner: object) -> list[tuple[str, Callable, Callable]]:
    """Name, value and replacement of each builtin of a module or class."""
    return [
        (name, member, with_semantic(member))
        for name, member in inspect.getmembers(owner)
        if core.is_builtin(member)
    ]


def with_semantic(member: Callable) -> Callable:
    """A builtin that computes with numpy, without the wrapper that asks for its semantic."""
    function = member
    while getattr(function, "__code__", None) is WRAPPER:
        function = function.__wrapped__

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call

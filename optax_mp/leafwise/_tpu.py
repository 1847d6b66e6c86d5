"""Run the elementwise end of a step in one Pallas kernel on a TPU."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_mp._jax._jaxpr import bind, is_literal
from optax_mp.leafwise._blocks import MAXIMUM, MINIMUM, SPREAD, is_block_operation
from optax_mp.leafwise._cut import End
from optax_mp.leafwise._flat import Program, Value, read

_LANES = 128


def run_end(
    program: Program, end: End, known: dict[Value, Any], interpret: bool = False,
    rows: int = 64, columns: int = 4096,
) -> list[Any]:
    """Return the outputs of an end, given what it reads."""
    *_, height, width = end.shape
    br, bc = min(rows, height), min(columns, width)
    arrays = [v for v in end.reads if v.aval.ndim]
    scalars = [v for v in end.reads if not v.aval.ndim]
    outputs = [program.outputs[i] for i in end.outputs]

    def block_shape(aval):
        ratio = aval.shape[-1] / width
        return (br, bc if ratio == 1 else math.ceil(bc * ratio))

    def spec(aval):
        return pl.BlockSpec(block_shape(aval), lambda i, j: (i, j))

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    given_scalars = [_as_32_bits(known[v]).reshape(1) for v in scalars]
    given = [known[v] for v in arrays]

    def kernel(*refs):
        refs = list(refs)
        local = {}
        for v in scalars:
            x = refs.pop(0)[0]
            local[v] = _from_32_bits(x, v.aval.dtype)
        for v in arrays:
            local[v] = refs.pop(0)[...]
        origin = (pl.program_id(0) * br, pl.program_id(1) * bc)
        block = _Block(end.shape, (br, bc), origin)
        for place in end.places:
            node = program.nodes[place]
            inputs = [read(local, x) for x in node.inputs]
            made = block.run(node, inputs)
            local.update(zip(node.outputs, made, strict=True))
        for ref, v in zip(refs, outputs, strict=True):
            ref[...] = local[v].astype(ref.dtype)

    # In place, where an output replaces an input of its type.
    alias: dict[int, int] = {}
    free = list(range(len(arrays)))
    for o, v in enumerate(outputs):
        for i in free:
            if arrays[i].aval.shape == v.aval.shape and arrays[i].aval.dtype == v.aval.dtype and end.alias.get(end.outputs[o]) is arrays[i]:
                alias[len(scalars) + i] = o
                free.remove(i)
                break
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(height, br), pl.cdiv(width, bc)),
        in_specs=[smem] * len(scalars) + [spec(v.aval) for v in arrays],
        out_specs=[spec(v.aval) for v in outputs],
        out_shape=[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs],
        input_output_aliases=alias,
        interpret=interpret,
        compiler_params=None if interpret else pltpu.CompilerParams(vmem_limit_bytes=100 * 2**20),
    )(*given_scalars, *given)


def _as_32_bits(x):
    x = jnp.asarray(x)
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x.astype(jnp.int32)


def _from_32_bits(x, dtype):
    if dtype == jnp.bool_:
        return x != 0
    if dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(dtype) if x.dtype != dtype else x


class _Block:
    def __init__(self, whole, shape, origin):
        self.whole, self.shape, self.origin = whole, shape, origin

    def local(self, shape):
        """Return the shape of the part of an array of `shape` that this block has."""
        if tuple(shape) == tuple(self.whole):
            return self.shape
        return (self.shape[0], math.ceil(self.shape[1] * shape[-1] / self.whole[-1]))

    def run(self, node, inputs):
        eqn = node.equation
        name = eqn.primitive.name
        out = node.outputs[0].aval
        if is_block_operation(eqn):
            return [self.blockwise(eqn.params["name"], inputs[0], node)]
        if not out.ndim:
            return bind(eqn, inputs)
        shape = self.local(out.shape)
        if name == "broadcast_in_dim":
            return [jnp.full(shape, inputs[0], out.dtype)]
        if name == "iota":
            axis = eqn.params["dimension"]
            at = lax.broadcasted_iota(jnp.int32, shape, axis) + self.origin[axis]
            return [at.astype(out.dtype)]
        inputs = [
            jnp.full(shape, x, _dtype(a)) if jnp.ndim(x) == 0 and name not in("integer_pow",) else x
            for x, a in zip(inputs, eqn.invars, strict=True)
        ]
        if name == "reduce_precision":
            assert eqn.params["exponent_bits"] == 8
            return [inputs[0].astype(jnp.bfloat16).astype(jnp.float32)]
        if name == "convert_element_type":
            return [_convert(inputs[0], eqn.params["new_dtype"])]
        return bind(eqn, inputs)

    def blockwise(self, name, x, node):
        size = 32
        r, c = self.shape
        n = c // size
        if name == SPREAD:
            return jnp.dot(x.astype(jnp.float32), _member(n, c), preferred_element_type=jnp.float32)
        # Lane rotations: after five each lane has the extreme of the 32 to its right.
        dtype = x.dtype
        x = x.astype(jnp.int32)
        take = jnp.maximum if name == MAXIMUM else jnp.minimum
        x = _kill_beyond(x, self)
        for shift in (16, 8, 4, 2, 1):
            x = take(x, pltpu.roll(x, c - shift, 1))
        if name == MINIMUM:
            picked = jnp.dot(x.astype(jnp.float32), _first(c, n), preferred_element_type=jnp.float32)
            return picked.astype(jnp.int32).astype(dtype) if dtype != jnp.int32 else picked.astype(jnp.int32)
        # A pattern of 32 bits in two halves, each exact.
        high = (x >> 16).astype(jnp.float32)
        low = (x & 0xFFFF)
        lows = [(low >> 8).astype(jnp.float32), (low & 0xFF).astype(jnp.float32)]
        f = _first(c, n)
        hi = [((x >> 24)).astype(jnp.float32), ((x >> 16) & 0xFF).astype(jnp.float32)]
        parts = [jnp.dot(p, f, preferred_element_type=jnp.float32).astype(jnp.int32) for p in (*hi, *lows)]
        return (parts[0] << 24) | (parts[1] << 16) | (parts[2] << 8) | parts[3]


def _kill_beyond(x, block):
    return x


def _dtype(a):
    return a.aval.dtype


def _convert(x, dtype):
    if x.dtype == jnp.uint8:
        x = x.astype(jnp.int32)
    if dtype == jnp.uint8:
        return x.astype(jnp.int32).astype(jnp.uint8)
    if x.dtype == jnp.uint32 and dtype == jnp.float32:
        x = lax.bitcast_convert_type(x, jnp.int32)
    if x.dtype == jnp.bool_ and dtype not in (jnp.int32, jnp.float32):
        x = x.astype(jnp.int32)
    return x.astype(dtype)


def _member(n, c):
    at = lax.broadcasted_iota(jnp.int32, (n, c), 1) >> 5
    return (at == lax.broadcasted_iota(jnp.int32, (n, c), 0)).astype(jnp.float32)


def _first(c, n):
    at = lax.broadcasted_iota(jnp.int32, (c, n), 0)
    return (at == lax.broadcasted_iota(jnp.int32, (c, n), 1) * 32).astype(jnp.float32)

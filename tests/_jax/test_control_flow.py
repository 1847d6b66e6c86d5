"""Control flow of jaxprs against the same programs in plain Python.

Each program is written once, on a few operations that exist twice: as JAX's, and in
plain Python on sets of names, in which every value is the set of the inputs that it is
computed from.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, shard_map
from jax.extend.core import primitives
from jax.sharding import Mesh, PartitionSpec

from optax_mp._jax._control_flow import bind_with, has_regions, wiring_of
from optax_mp._jax._dataflow import depending_outputs
from optax_mp._jax._jaxpr import bind, evaluate, open_jaxpr, trace_jaxpr

TURNS = 6  # more than any carry here is long
NAMES = "abcdn"


class JaxOperations:
    """The operations, as JAX's; `wave` is the one that a test replaces."""

    def __init__(self, wave=jnp.sin):
        self.wave = wave
        self.one = 1.0

    def mix(self, *values):
        return functools.reduce(jnp.add, values)

    def less(self, a, b):
        return a < b

    def jit(self, fun, *args):
        return jax.jit(fun)(*args)

    def remat(self, fun, *args):
        return jax.checkpoint(fun)(*args)

    def custom_jvp(self, fun, *args):
        function = jax.custom_jvp(fun)
        function.defjvp(lambda primals, tangents: (fun(*primals), fun(*tangents)))
        return function(*args)

    def custom_vjp(self, fun, *args):
        function = jax.custom_vjp(fun)
        function.defvjp(lambda *args: (fun(*args), None), lambda _, ct: ct)
        return function(*args)

    def closed_call(self, fun, *args):
        primitive, closed = primitives.closed_call_p, jax.make_jaxpr(fun)(*args)
        params = primitive.get_bind_params({"call_jaxpr": closed})
        functions, params = params if isinstance(params, tuple) else ((), params)
        return primitive.bind(*functions, *args, **params)

    def shard_map(self, fun, *args):
        mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
        spec = PartitionSpec()
        return shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)(*args)

    def scan(self, body, carry, x, length=TURNS):
        xs = jnp.full(length, x)
        carry, ys = lax.scan(lambda carry, x: body(*carry, x), carry, xs)
        return (*carry, *(y.sum() for y in ys))

    def while_loop(self, test, body, carry):
        return lax.while_loop(lambda x: test(*x), lambda x: body(*x), carry)

    def cond(self, pred, yes, no, *args):
        return lax.cond(pred, yes, no, *args)

    def switch(self, index, branches, *args):
        return lax.switch(jnp.int32(index), branches, *args)


class SetOperations:
    """The operations, on sets of names."""

    one = frozenset()

    def mix(self, *values):
        return frozenset().union(*values)

    wave = less = mix

    def call(self, fun, *args):
        return fun(*args)

    jit = remat = custom_jvp = custom_vjp = closed_call = shard_map = call

    def scan(self, body, carry, x, length=TURNS):
        seen, stacked = [carry], []
        for _ in range(TURNS):
            carry, ys = body(*carry, x)
            seen.append(carry)
            stacked.append(ys)
        return (*self.union(seen), *self.union(stacked))

    def while_loop(self, test, body, carry):
        seen, tests = [carry], []
        for _ in range(TURNS):
            tests.append(test(*carry))
            carry = body(*carry)
            seen.append(carry)
        return self.decided(tests, self.union(seen))

    def cond(self, pred, yes, no, *args):
        return self.switch(pred, [yes, no], *args)

    def switch(self, index, branches, *args):
        outputs = self.union([branch(*args) for branch in branches])
        return self.decided([index], outputs)

    def union(self, rows):
        return tuple(self.mix(*values) for values in zip(*rows, strict=True))

    def decided(self, by, outputs):
        """Count what decides how a value is computed among its sources."""
        return tuple(self.mix(x, *by) for x in outputs)


def call(kind):
    def program(ops, a, b, c, d, n):
        return getattr(ops, kind)(lambda a, b: (ops.wave(a), b, ops.mix(a, b)), a, c)

    return program


def scan(ops, a, b, c, d, n, length=TURNS):
    def body(x, y, d):
        return (ops.mix(x, b), ops.wave(y)), (d, ops.mix(y, d))

    return ops.scan(body, (a, c), d, length)


def scan_without_turns(ops, a, b, c, d, n):
    return scan(ops, a, b, c, d, n, length=0)


def slow_scan(ops, a, b, c, d, n):
    """What is known of the last carry reaches the first after three turns."""

    def body(x, y, z, d):
        return (y, z, ops.mix(ops.wave(z), b)), (x,)

    return ops.scan(body, (a, a, c), d)


def while_loop(ops, a, b, c, d, n):
    def test(i, x, y):
        return ops.less(ops.mix(i, c), n)

    def body(i, x, y):
        return ops.mix(i, ops.one), ops.wave(y), ops.mix(y, b)

    return ops.while_loop(test, body, (d, a, d))


def decision_in_the_carry(ops, a, b, c, d, n):
    """A carry that the condition alone reads."""

    def body(i, x):
        return ops.mix(i, ops.one), ops.wave(x)

    return ops.while_loop(lambda i, x: ops.less(i, n), body, (d, a))[1:]


def cond(ops, a, b, c, d, n):
    return ops.cond(
        ops.less(a, n),
        lambda b, c: (ops.wave(b), c),
        lambda b, c: (b, ops.mix(b, d)),
        *(b, c),
    )


def switch(ops, a, b, c, d, n):
    branches = [lambda x: (ops.wave(x),), lambda x: (c,), lambda x: (d,)]
    return ops.switch(n, branches, b)


def scan_in_while_in_cond(ops, a, b, c, d, n):
    def body(i, x, y):
        x, y, z = slow_scan(ops, x, ops.mix(y, a), y, c, n)[:3]
        return ops.mix(i, ops.one), y, ops.mix(x, z)

    def loop(b, c):
        return ops.while_loop(lambda i, x, y: ops.less(i, n), body, (d, b, b))

    return ops.cond(ops.less(a, n), loop, lambda b, c: (b, c, c), b, c)


def while_in_jit_in_scan(ops, a, b, c, d, n):
    def body(x, y, d):
        _, x, y = ops.jit(lambda x, y, d: while_loop(ops, x, y, d, d, n), x, y, d)
        return (y, x), ()

    return ops.scan(body, (a, b), c)


CALLS = ("jit", "remat", "custom_jvp", "custom_vjp", "closed_call", "shard_map")
PROGRAMS = {kind: call(kind) for kind in CALLS} | {
    program.__name__: program
    for program in (
        scan,
        scan_without_turns,
        slow_scan,
        while_loop,
        decision_in_the_carry,
        cond,
        switch,
        scan_in_while_in_cond,
        while_in_jit_in_scan,
    )
}
INPUTS = (0.1, 0.2, 0.3, 0.4, 2.0)
in_each = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def jaxpr_of(program):
    closed = jax.make_jaxpr(functools.partial(program, JaxOperations()))(*INPUTS)
    assert any(map(has_regions, closed.jaxpr.eqns))
    return closed


def sources_of(program):
    return program(SetOperations(), *map(frozenset, NAMES))


@in_each
def test_outputs_depend_on_what_they_are_computed_from_in_plain_python(program):
    closed = jaxpr_of(program)
    found = [
        {name for name, depends in zip(NAMES, row, strict=True) if depends}
        for row in zip(
            *(depending_outputs(closed, [x == name for x in NAMES]) for name in NAMES),
            strict=True,
        )
    ]
    assert found == list(map(set, sources_of(program)))


def with_cosines(jaxpr, args):
    """Return the outputs of a jaxpr that has cosines for sines, at every depth."""

    def run(equation, inputs):
        if equation.primitive.name == "sin":
            return [jnp.cos(*inputs)]
        if not has_regions(equation):
            return bind(equation, inputs)
        regions = wiring_of(equation).regions
        return bind_with(equation, inputs, lambda: list(map(convert, regions)))

    def convert(region):
        avals = [var.aval for var in open_jaxpr(region.jaxpr)[0].invars]
        return trace_jaxpr(lambda *args: with_cosines(region.jaxpr, args), avals)

    return evaluate(jaxpr, args, run)


@in_each
def test_an_equation_is_bound_with_other_jaxprs_inside(program):
    found = with_cosines(jaxpr_of(program), list(map(jnp.float32, INPUTS)))
    want = program(JaxOperations(wave=jnp.cos), *INPUTS)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert not np.allclose(found, program(JaxOperations(), *INPUTS)) or (
        program in (scan_without_turns, switch)
    )

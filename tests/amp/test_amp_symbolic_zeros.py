"""Derivative rules that ask what is differentiated get the answer that JAX gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import A_FEW_ROUNDINGS, compiled, error, products, runs_in
from jax import lax
from jax.custom_derivatives import SymbolicZero
from slow_cases import mostly_slow

from optax_mp import amp

X = np.random.default_rng(0).standard_normal((4, 4), np.float32)
W = np.random.default_rng(1).standard_normal((4, 4), np.float32) / 2


def is_zero(x):
    return isinstance(x, SymbolicZero)


def value(x):
    return jnp.zeros(x.shape, x.dtype) if is_zero(x) else x


class Probe:
    """A product and a sum, with a rule that records what is differentiated."""

    def __init__(self, kind):
        self.seen = set()
        self.fun = getattr(self, kind)()

    def record(self, what, flags):
        self.seen.add((what, *flags))

    @staticmethod
    def compute(x, w):
        return x @ w, jnp.sum(w)

    def vjp(self):
        fun = jax.custom_vjp(self.compute)

        def forward(x, w):
            flags = (x.perturbed, w.perturbed)
            self.record("forward", flags)
            return fun(x.value, w.value), (x.value, w.value, flags)

        def backward(saved, cotangents):
            x, w, flags = saved
            self.record("backward", [not is_zero(c) for c in cotangents])
            product, total = map(value, cotangents)
            gradients = product @ w.T, x.T @ product + total
            return tuple(
                g if flag else None for g, flag in zip(gradients, flags, strict=True)
            )

        fun.defvjp(forward, backward, symbolic_zeros=True)
        return fun

    def jvp(self):
        fun = jax.custom_jvp(self.compute)

        def rule(primals, tangents):
            (x, w), (dx, dw) = primals, tangents
            self.record("jvp", [not is_zero(t) for t in tangents])
            product, total = fun(x, w)
            terms = [] if is_zero(dx) else [dx @ w]
            terms += [] if is_zero(dw) else [x @ dw]
            zero = SymbolicZero.from_primal_value(total)
            return (product, total), (sum(terms), zero if is_zero(dw) else dw.sum())

        fun.defjvp(rule, symbolic_zeros=True)
        return fun


def chained(first, second):
    """Return a loss that reads one output of two probes, one after the other.

    The second output of the first depends only on `w`, and is read by the second.
    """

    def loss(x, w):
        product, total = first.fun(x, w)
        return second.fun(product, w * total)[0].sum()

    return loss


def in_scan(loss):
    def scanned(x, w):
        return lax.scan(lambda c, _: (c, loss(c, w)), x, None, length=2)[1].sum()

    return scanned


def batch(x):
    return jnp.stack([x, 2 * x])


# From the wrapper and a loss to a function of `x` and `w`.
REVERSE = {
    "grad(amp) by x": lambda wrap, f: jax.grad(wrap(f)),
    "grad(amp) by w": lambda wrap, f: jax.grad(wrap(f), 1),
    "amp(grad)": lambda wrap, f: wrap(jax.grad(f)),
    "grad(amp(vmap))": lambda wrap, f: (
        lambda x, w: jax.grad(lambda x: wrap(jax.vmap(f))(batch(x), batch(w)).sum())(x)
    ),
    "grad(amp(scan)) by x": lambda wrap, f: jax.grad(wrap(in_scan(f))),
    "grad(amp(scan)) by w": lambda wrap, f: jax.grad(wrap(in_scan(f)), 1),
    "grad(remat(amp))": lambda wrap, f: jax.grad(jax.checkpoint(wrap(f)), 1),
}
FORWARD = {
    "jvp(amp) by x": lambda wrap, f: (
        lambda x, w: jax.jvp(wrap(lambda x: f(x, w)), (x,), (x,))
    ),
    "grad(grad(amp))": lambda wrap, f: jax.grad(
        lambda x, w: jax.grad(wrap(f), 1)(x, w).sum()
    ),
    "jvp(amp(fori))": lambda wrap, f: (
        lambda x, w: jax.jvp(
            wrap(lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + f(x, w), 0.0)),
            (x,),
            (x,),
        )
    ),
}
CASES = [(name, kinds) for name in REVERSE for kinds in ("vjp vjp", "vjp jvp")]
CASES += [(name, "jvp vjp") for name in REVERSE if "by x" in name]
CASES += [(name, "jvp jvp") for name in FORWARD]
RUN_BY_DEFAULT = [("grad(amp(vmap))", "vjp jvp"), ("grad(amp(scan)) by x", "jvp vjp")]


def trace(name, kinds, wrap):
    """Return the traced program, and what two new probes saw in it."""
    probes = [Probe(kind) for kind in kinds.split()]
    program = (REVERSE | FORWARD)[name](wrap, chained(*probes))
    return jax.jit(program).trace(X, W), [probe.seen for probe in probes]


def is_seen_by_jax(event, seen):
    """Return whether a rule saw all that an event has as differentiated, or more."""
    what, *flags = event
    return any(
        what == other and all(a <= b for a, b in zip(flags, others, strict=True))
        for other, *others in seen
    )


def run(*case):
    """Return the result of a program."""
    return trace(*case)[0].lower().compile()(X, W)


# Each kind of derivative in a program of its own; all of `CASES` are traced below.
@mostly_slow(
    ("name", "kinds"),
    [*RUN_BY_DEFAULT, ("grad(remat(amp))", "vjp vjp"), ("amp(grad)", "vjp jvp"),
     *((name, "jvp jvp") for name in FORWARD)],
    lambda *case: case in RUN_BY_DEFAULT,
)  # fmt: skip
def test_gradients_with_symbolic_zeros_are_those_without_amp(name, kinds):
    low, full = (run(name, kinds, wrap) for wrap in (amp, lambda fun: fun))
    assert error(low, full) < A_FEW_ROUNDINGS


@pytest.mark.parametrize(("name", "kinds"), CASES)
def test_a_rule_sees_as_differentiated_only_what_it_sees_without_amp(name, kinds):
    _, expected = trace(name, kinds, lambda fun: fun)
    _, found = trace(name, kinds, amp)
    for seen, by_amp in zip(expected, found, strict=True):
        assert {event[0] for event in by_amp} == {event[0] for event in seen}
        assert all(is_seen_by_jax(event, seen) for event in by_amp)


def filtered_vjp():
    """Return a product whose rule refuses a gradient by its second input."""

    @eqx.filter_custom_vjp
    def product(x, w):
        return x @ w

    @product.def_fwd
    def forward(perturbed, x, w):
        assert perturbed
        return x @ w, None

    @product.def_bwd
    def backward(residuals, g, perturbed, x, w):
        return g @ w.T

    return product


def filtered_jvp():
    @eqx.filter_custom_jvp
    def product(x, *, w):
        return x @ w

    @product.def_jvp
    def rule(primals, tangents, *, w):
        (x,), (dx,) = primals, tangents
        return x @ w, dx @ w

    return lambda x, w: product(x, w=w)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("rule", [filtered_vjp, filtered_jvp])
def test_a_rule_of_equinox_may_refuse_some_gradients(rule, transform):
    product = rule()

    def loss(x, w):
        return jnp.sum(jnp.sin(transform(product)(x, w)))

    for program in (jax.grad(amp(loss)), amp(jax.grad(loss))):
        jaxpr, got = jax.make_jaxpr(program, return_shape=True)(X, W)
        assert (got.shape, got.dtype) == (X.shape, X.dtype)
        found = products(jaxpr)
        assert found and all(runs_in(each, "bfloat16") for each in found)


def trajectory(adjoint):
    """Return a loss of the solution that diffrax finds of a differential equation."""
    diffrax = pytest.importorskip("diffrax")

    def loss(w, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=0.5,
            dt0=0.25,
            y0=y,
            args=w,
            adjoint=getattr(diffrax, adjoint)(),
            stepsize_controller=diffrax.PIDController(rtol=3e-2, atol=3e-2),
            max_steps=64,
        )
        return jnp.sum(solution.ys**2)

    return loss


@pytest.mark.slow
def test_the_solution_of_a_differential_equation_is_differentiated():
    exact = jax.grad(trajectory("RecursiveCheckpointAdjoint"), (0, 1))
    want = compiled(exact, W, X[0])(W, X[0])
    for adjoint in ("RecursiveCheckpointAdjoint", "BacksolveAdjoint"):
        program = jax.grad(amp(trajectory(adjoint)), (0, 1))
        # The solver may take other steps, and tolerates 3e-2 in each.
        assert error(compiled(program, W, X[0])(W, X[0]), want) < 5e-2
        found = products(jax.make_jaxpr(program)(W, X[0]))
        assert any(runs_in(each, "bfloat16") for each in found)

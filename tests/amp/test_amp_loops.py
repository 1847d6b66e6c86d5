"""A loop that goes on until low values meet a condition raises a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from slow_cases import mostly_slow

from optax_mp import amp, amp_report, amp_stop

W = np.random.default_rng(0).standard_normal((4, 4), np.float32) / 8
W += 2 * np.eye(4, dtype=np.float32)
LIMIT = 60


def residual(y, w):
    return w @ jnp.tanh(y) + y - 1


def newton(w, tolerance=1e-5):
    """Return a root and the number of steps."""

    def go_on(carry):
        _, size, count = carry
        return (size > tolerance) & (count < LIMIT)

    def step(carry):
        y, _, count = carry
        change = jnp.linalg.solve(jax.jacfwd(residual)(y, w), residual(y, w))
        return y - change, jnp.abs(change).max(), count + 1

    return lax.while_loop(go_on, step, (jnp.zeros(4), jnp.float32(np.inf), 0))[::2]


def chord(w):
    """Return the same, with a flag for a condition and one Jacobian for all steps."""
    inverse = jnp.linalg.inv(jax.jacfwd(residual)(jnp.ones(4), w))

    def step(carry):
        y, count, _ = carry
        change = jnp.dot(inverse, residual(y, w))
        is_done = jnp.logical_or(jnp.sum(change**2) < 1e-10, count + 1 >= LIMIT)
        return y - change, count + 1, is_done

    return lax.while_loop(lambda carry: ~carry[2], step, (jnp.zeros(4), 0, False))[:2]


def stopped(fun):
    @amp
    def both(w):
        product = w @ w
        with amp_stop():
            return *fun(w), product

    return both


@mostly_slow("solve", [newton, chord], lambda solve: solve is newton)
def test_a_root_finder_under_amp_raises_a_warning_and_amp_stop_mends_it(solve):
    _, count = solve(W)
    assert count < LIMIT / 3
    text = r"the while loop at test_amp_loops.py:\d+ compares floats"
    with pytest.warns(UserWarning, match=text) as found:
        assert amp(solve)(W)[1] == LIMIT
    assert "precision of bfloat16, 0.008" in str(found[0].message)
    assert found[0].filename == __file__
    root, steps, product = stopped(solve)(W)
    assert steps == count
    assert np.abs(residual(root, W)).max() < 1e-5
    assert not np.array_equal(product, W @ W)


def averaged(w):
    """Return a fixed point, in as few operations as there may be."""
    step = lambda carry: (w @ carry[0], jnp.abs(carry[0]).max())  # noqa: E731
    return lax.while_loop(lambda carry: carry[1] > 1e-5, step, (w[0], jnp.float32(1)))


def test_the_report_has_the_warning_in_its_text():
    report = amp_report(averaged, W / 4, compute_dtype=jnp.float16)
    (warning,) = report.warnings
    line = averaged.__code__.co_firstlineno + 3
    assert warning.startswith(f"the while loop at test_amp_loops.py:{line} compares")
    assert "the precision of float16, 0.001, so" in warning
    assert "`with optax_mp.amp_stop():`" in warning
    assert str(report).splitlines()[-1] == f"Warning: {warning}"


AROUND = {
    "jit": jax.jit,
    "vmap": lambda fun: lambda w: jax.vmap(fun)(jnp.stack([w, w])),
    "scan": lambda fun: lambda w: lax.scan(lambda c, w: (c, fun(w)), 0, w[None])[1],
    "cond": lambda fun: lambda w: lax.cond(w[0, 0] > 9, lambda: (w[0], 0), lambda: fun(w)),
    "remat": jax.checkpoint,
    "fori": lambda fun: lambda w: lax.fori_loop(0, 2, lambda _, y: y + fun(w)[0], w[0]),
    "derivative rule": lambda fun: with_rule(fun),
}  # fmt: skip


def with_rule(fun):
    fun = jax.custom_jvp(fun)
    fun.defjvp(lambda primals, tangents: (fun(*primals), tangents))
    return fun


@mostly_slow("around", AROUND, lambda around: around == "vmap")
def test_a_loop_is_found_inside_of_others(around):
    with pytest.warns(UserWarning, match="the while loop at test_amp_loops.py"):
        jax.make_jaxpr(amp(AROUND[around](newton)))(W)


def test_a_loop_in_the_backward_pass_of_a_rule_is_found():
    fun = jax.custom_vjp(lambda w: w @ w)
    fun.defvjp(lambda w: (w @ w, w), lambda w, g: (g * newton(w)[0],))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(amp(fun))(W)
    with pytest.warns(UserWarning, match="the while loop .*compares floats"):
        jax.make_jaxpr(jax.grad(lambda w: amp(fun)(w).sum()))(W)


def counted(w):
    return lax.fori_loop(0, jnp.int32(w[0, 0]) + 3, lambda _, y: jnp.tanh(w @ y), w)


def clocked(w):
    """Go on until a time that no product has a part in."""

    def step(carry):
        time, y = carry
        return time + 0.25, y - 0.1 * jnp.tanh(w @ y)

    return lax.while_loop(lambda carry: carry[0] < 1, step, (jnp.float32(0), w))


def decoded(w):
    """Go on until a token."""

    def step(carry):
        token, y, count = carry
        return jnp.argmax(w @ y), w @ y, count + 1

    def go_on(carry):
        return (carry[0] != 7) & (carry[2] < 5)

    return lax.while_loop(go_on, step, (jnp.int32(0), w[0], 0))


def from_low(w):
    """Iterate in float32, from a start and to a bound that a product computes."""
    start = jnp.exp(w @ w[0])

    def step(y):
        return y * 0.5

    return lax.while_loop(lambda y: jnp.abs(y).max() > 1e-6, step, start)


@mostly_slow(
    "fun",
    [counted, clocked, decoded, from_low],
    lambda fun: fun in (clocked, decoded),
)
def test_other_loops_raise_no_warning(fun):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(jax.make_jaxpr(amp(fun))(W))
    assert "while[" in text and "bf16" in text

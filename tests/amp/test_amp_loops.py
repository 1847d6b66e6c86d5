"""A loop that goes on until low values meet a condition raises a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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


def test_a_root_finder_under_amp_raises_a_warning_and_amp_stop_mends_it():
    def stopped(w):
        with amp_stop():
            return newton(w)

    text = r"the while loop at test_amp_loops.py:\d+ compares floats"
    programs = jax.jit(lambda w: (newton(w), amp(newton)(w), amp(stopped)(w)))
    with pytest.warns(UserWarning, match=text) as found:
        (_, count), (_, low_count), (root, steps) = programs(W)
    (warning,) = found
    assert "precision of bfloat16, 0.008" in str(warning.message)
    assert warning.filename == __file__
    assert low_count == LIMIT > 3 * count and steps == count
    assert np.abs(residual(root, W)).max() < 1e-5


def averaged(w):
    """Return a fixed point, in as few operations as there may be."""
    step = lambda carry: (w @ carry[0], jnp.abs(carry[0]).max())  # noqa: E731
    return lax.while_loop(lambda carry: carry[1] > 1e-5, step, (w[0], jnp.float32(1)))


def flagged(w):
    """Return the same, with a flag for a condition."""

    def step(carry):
        y, count, _ = carry
        is_done = jnp.logical_or(jnp.sum(y**2) < 1e-10, count + 1 >= LIMIT)
        return w @ y, count + 1, is_done

    return lax.while_loop(lambda carry: ~carry[2], step, (w[0], 0, False))[:2]


def test_the_report_has_the_warning_in_its_text():
    report = amp_report(averaged, W / 4, compute_dtype=jnp.float16)
    (warning,) = report.warnings
    line = averaged.__code__.co_firstlineno + 3
    assert warning.startswith(f"the while loop at test_amp_loops.py:{line} compares")
    assert "the precision of float16, 0.001, so" in warning
    assert "`with optax_mp.amp_stop():`" in warning
    assert str(report).splitlines()[-1] == f"Warning: {warning}"


def with_rule(fun):
    fun = jax.custom_jvp(fun)
    fun.defjvp(lambda primals, tangents: (fun(*primals), tangents))
    return fun


AROUND = {
    "jit": jax.jit,
    "vmap": lambda fun: lambda w: jax.vmap(fun)(jnp.stack([w, w])),
    "scan": lambda fun: lambda w: lax.scan(lambda c, w: (c, fun(w)), 0, w[None])[1],
    "cond": lambda fun: lambda w: lax.cond(w[0, 0] > 9, lambda: (w[0], 0), lambda: fun(w)),
    "remat": jax.checkpoint,
    "fori": lambda fun: lambda w: lax.fori_loop(0, 2, lambda _, y: y + fun(w)[0], w[0]),
    "derivative rule": with_rule,
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_a_loop_is_found_inside_of_others(around):
    with pytest.warns(UserWarning, match="the while loop at test_amp_loops.py"):
        jax.make_jaxpr(amp(AROUND[around](flagged)))(W)


def test_a_loop_in_the_backward_pass_of_a_rule_is_found():
    fun = jax.custom_vjp(lambda w: w @ w)
    fun.defvjp(lambda w: (w @ w, w), lambda w, g: (g * averaged(w)[0],))
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
    return lax.while_loop(lambda y: jnp.abs(y).max() > 1e-6, lambda y: y * 0.5, start)


@pytest.mark.parametrize("fun", [counted, clocked, decoded, from_low])
def test_other_loops_raise_no_warning(fun):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(jax.make_jaxpr(amp(fun))(W))
    assert "while[" in text and "bf16" in text

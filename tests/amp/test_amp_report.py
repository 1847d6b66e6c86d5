"""amp_report: what it says of each operation, and that it raises what amp raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import CASES, compiled, error
from jax import lax

from optax_mp import amp, amp_report, amp_stop

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3


def test_each_reason_is_named():
    def fun(x, w):
        with amp_stop():
            stopped = jnp.cos(x @ w)
        low = x @ w
        exact = jnp.dot(x, w, precision="highest")
        tiny = lax.tanh(low * 1e-30)
        sunk = jnp.exp(low - 1.0)
        return stopped, lax.sin(low), exact, tiny, sunk, lax.erf(low + x), jnp.sort(low)

    report = amp_report(fun, X, W, compute_dtype=jnp.float16)
    found = {}
    for each in report.operations:
        found.setdefault(each.primitive, []).append((each.ran, each.why))
    assert found["dot_general"] == [
        ("as_written", "scope"),
        ("low", "rule"),
        ("as_written", "precision"),
    ]
    assert found["cos"] == [("as_written", "scope")]
    assert found["sin"] == [("low", "rule")]
    assert found["mul"] == [("f32", "literal")]
    assert found["sub"] == [("f32", "sink")]
    assert found["exp"] == [("f32", "rule")]
    assert found["add"] == [("f32", "inputs")]
    assert found["sort"] == [("low", "rule")]
    lines = str(report).splitlines()
    assert lines[0].split() == ["primitive", "line", "ran", "why", "count"]
    name, _, *said = lines[1].split()
    assert (name, said) == ("dot_general", ["as_written", "scope", "1"])
    ran = "operations: 6 f32, 3 as_written, 3 low; error of the outputs "
    assert lines[-1].startswith(ran)
    assert all(len(line) <= 80 for line in lines)


def test_equal_operations_of_a_line_are_one_row():
    def fun(x, w):
        for _ in range(3):
            x = jax.jit(lambda x: jnp.tanh(x @ w))(x)
        return x

    operations = amp_report(fun, X, W).operations
    line = f"test_amp_report.py:{fun.__code__.co_firstlineno + 2}"
    found = [(each.primitive, each.line, each.count) for each in operations]
    assert found == [("dot_general", line, 3), ("tanh", line, 3)]


@pytest.mark.parametrize(
    "name", ["custom_vjp", pytest.param("sort_scatter_cumsum", marks=pytest.mark.slow)]
)
def test_the_error_of_the_outputs_is_that_of_amp(name):
    fun, arguments, *_ = CASES[name]
    got, want = (compiled(f, *arguments)(*arguments) for f in (amp(fun), fun))
    # An error is a sum of roundings. Where XLA fuses the two runs in different ways, some
    # of these differ, by less than a third of it.
    found = amp_report(fun, *arguments).error
    np.testing.assert_allclose(found, error(got, want), rtol=0.3, atol=1e-5)


def test_a_function_with_effects_does_not_run_and_a_number_beside_nan_is_compared():
    seen = []

    def fun(x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x @ x.T

    report = amp_report(fun, X)
    jax.effects_barrier()
    assert not seen and np.isnan(report.error) and "outputs -" in str(report)
    masked = amp_report(lambda x: jnp.where(x @ x.T > 0, jnp.inf, x @ x.T), X)
    assert 0 < masked.error < 2.0**-7  # Two roundings of bfloat16, of the inputs.
    # 300 squared is infinite in float16.
    large = amp_report(lambda x: x * x, jnp.full(3, 300.0), compute_dtype="float16")
    assert large.error == 0
    rules = {"mul": "low"}
    large = amp_report(
        lambda x: x * x, jnp.full(3, 300.0), compute_dtype="float16", rules=rules
    )
    assert large.error == np.inf


def test_a_report_refuses_what_amp_refuses():
    with pytest.raises(ValueError, match="`compute_dtype` to be .*, got float32"):
        amp_report(jnp.sin, X, compute_dtype=jnp.float32)
    with pytest.raises(TypeError, match="amp_report: expected `fun` to be .*, got 3"):
        amp_report(3, X)

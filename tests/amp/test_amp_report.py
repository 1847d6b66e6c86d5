"""amp_report: what it says of each operation, and that it raises what amp raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import CASES, compiled, error, shard_map
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from slow_cases import mostly_slow

from optax_mp import amp, amp_report, amp_stop

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3


def said(fun, *args, **settings):
    """Return how each operation ran and why, by primitive."""
    found = {}
    for each in amp_report(fun, *args, **settings).operations:
        found.setdefault(each.primitive, []).append((each.ran, each.why))
    return found


def test_each_reason_is_named():
    def fun(x, w):
        with amp_stop():
            stopped = jnp.cos(x @ w)
        low = x @ w
        exact = jnp.dot(x, w, precision="highest")
        tiny = lax.tanh(low * 1e-30)
        sunk = jnp.exp(low - 1.0)
        return stopped, lax.sin(low), exact, tiny, sunk, lax.erf(low + x), jnp.sort(low)

    found = said(fun, X, W, compute_dtype=jnp.float16)
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


def test_equal_operations_of_a_line_are_merged():
    def fun(x, w):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x

    operations = amp_report(fun, X, W).operations
    assert [(each.primitive, each.count) for each in operations] == [
        ("dot_general", 3),
        ("tanh", 3),
    ]
    line = fun.__code__.co_firstlineno + 2
    assert {each.line for each in operations} == {f"test_amp_report.py:{line}"}


def test_the_own_error_is_that_of_the_rounded_operation():
    report = amp_report(lambda x, w: jnp.exp(x @ w), X, W)
    product, exponential = report.operations
    x, w = (
        np.asarray(a.astype(jnp.bfloat16), np.float32) for a in map(jnp.asarray, (X, W))
    )
    rounded = np.asarray(jnp.asarray(x @ w).astype(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(product.own_error, error(rounded, X @ W), rtol=1e-4)
    assert exponential.own_error == 0
    want = error(np.exp(rounded), np.exp(X @ W))
    np.testing.assert_allclose(report.error, want, rtol=1e-4)


@mostly_slow(
    "name",
    [
        "scan_over_layers",
        "cond",
        "while_loop",
        "custom_vjp",
        "remat_in_scan",
        "sharded",
        "sort_scatter_cumsum",
    ],
    lambda name: name in ("scan_over_layers", "custom_vjp"),
)
def test_the_error_of_the_outputs_is_that_of_amp(name):
    case = CASES[name]
    report = amp_report(case.fun, *case.arguments)
    got = compiled(amp(case.fun), *case.arguments)(*case.arguments)
    want = compiled(case.fun, *case.arguments)(*case.arguments)
    # Rounded otherwise where XLA fuses the two runs otherwise.
    np.testing.assert_allclose(report.error, error(got, want), rtol=0.3, atol=1e-5)


def in_scan(x, w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 3)[0] + 0.0


def in_cond(x, w):
    return lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: jnp.cos(x @ w))


def in_shard_map(x, w):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec, none = PartitionSpec("x"), PartitionSpec()
    return shard_map(jnp.dot, mesh=mesh, in_specs=(spec, none), out_specs=spec)(x, w)


@pytest.mark.parametrize("fun", [in_scan, in_cond, in_shard_map])
def test_a_loop_branch_or_shard_map_is_measured_as_a_whole(fun):
    report = amp_report(fun, X, W)
    (whole,) = [x for x in report.operations if x.ran == "mixed"]
    (product,) = [x for x in report.operations if x.primitive == "dot_general"]
    assert product.ran == "low" and np.isnan(product.own_error)
    assert 0 < whole.own_error < 0.1
    assert str(report).splitlines()[1].split()[2] == "mixed"


def test_the_table_has_the_largest_error_first_a_legend_and_a_summary():
    def fun(x, w):
        with amp_stop():
            x = x @ w
        y = lax.tanh(cancelling(x, w))
        return jnp.exp(y) + x

    lines = str(amp_report(fun, X, W)).splitlines()
    assert lines[0].split() == "primitive line ran why count own error".split()
    assert lines[1].startswith("sub ")
    assert lines[5].split()[2:] == ["as_written", "scope", "1", "0.0e+00"]
    assert lines[6].startswith("operations: 4 low, 3 f32, 1 as_written; error of the ")
    assert all(len(line) <= 80 for line in lines)


def test_a_report_refuses_what_amp_refuses():
    with pytest.raises(ValueError, match="`compute_dtype` to be .*, got float32"):
        amp_report(jnp.sin, X, compute_dtype=jnp.float32)
    with pytest.raises(TypeError, match="amp_report: expected `fun` to be .*, got 3"):
        amp_report(3, X)


def test_effects_happen_once_and_leave_the_error_of_the_outputs_unknown():
    seen = []

    def fun(x, w):
        jax.debug.callback(lambda total: seen.append(float(total)), (x @ w).sum())
        return x @ w

    report = amp_report(fun, X, W)
    jax.effects_barrier()
    assert len(seen) == 1
    assert np.isnan(report.error)


def cancelling(x, w):
    large = x @ w + 1000.0
    exact = large - 1000.0
    return exact @ w

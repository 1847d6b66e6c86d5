"""Jaxprs that JAX hides in an object: the same products low, or one warning.

JAX has switches that make `jax.checkpoint` and functions with derivative rules such
operations. They are off by default.
"""

import warnings
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import A_FEW_ROUNDINGS, compiled, error
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from small_models import linen_transformer
from with_rules import gradient, with_jvp, with_vjp

import optax_mp
from optax_mp import amp, amp_report, amp_stop, precision_report

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3
SWITCHES = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
# Before JAX 0.12 a part of them is there, and does not do what later ones do.
needs_switches = pytest.mark.skipif(
    not all(hasattr(jax.config, name) for name in SWITCHES),
    reason="this JAX does not have the switches",
)


@contextmanager
def switched(*names):
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


POLICY = jax.checkpoint_policies.save_only_these_names("hidden")


def named(x, w):
    layer = lambda x: jnp.tanh(checkpoint_name(x @ w, "hidden") * 2) @ w  # noqa: E731
    return jax.checkpoint(layer, policy=POLICY, prevent_cse=False)(x)


FUNCTIONS = {
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x),
    "names": named,
    "custom_vjp": lambda x, w: with_vjp(x, w) @ w,
    "custom_jvp": lambda x, w: with_jvp(x, w) @ w,
    "nested": lambda x, w: jax.checkpoint(lambda x: with_jvp(with_vjp(x, w), w) @ w)(x),
    "scan": lambda x, w: lax.scan(
        jax.checkpoint(lambda x, w: (with_jvp(x, w), None)), x, jnp.stack([w, w])
    )[0],
    "vmap": lambda x, w: jax.vmap(jax.checkpoint(with_vjp), (0, None))(
        jnp.stack([x, x]), w
    ),
}


def all_programs(fun):
    """Return it under amp, its derivatives of both modes, and amp of its gradient."""
    low = amp(fun)
    programs = [low, gradient(low), amp(gradient(fun))]
    if "vjp" not in str(jax.make_jaxpr(fun)(X, W)):
        programs.append(lambda x, w: jax.jvp(low, (x, w), (w[:4], w)))
    return programs


def found(program):
    """Return the products and how many are low, and what is not looked into."""
    report = precision_report(program, X, W)
    return [x.is_wide for x in report.products].count(False), report


@needs_switches
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_products_are_low_with_the_switches_on_as_off(name):
    fun = FUNCTIONS[name]
    want = [found(program) for program in all_programs(fun)]
    values = compiled(gradient(fun), X, W)(X, W)
    with switched(*SWITCHES):
        got = [found(program) for program in all_programs(fun)]
        jaxpr = str(jax.make_jaxpr(fun)(X, W))
        assert "custom_vjp_call" not in jaxpr and "custom_jvp_call" not in jaxpr
        low = compiled(gradient(amp(fun)), X, W)(X, W)
    assert [x for x, _ in got] == [x for x, _ in want]
    for count, report in got:
        assert count == len(report.products) > 0
        assert "not looked into" not in str(report)
    assert 0 < error(low, values) < A_FEW_ROUNDINGS


@needs_switches
def test_a_model_is_as_low_with_the_switches_on():
    problem = linen_transformer()
    arguments = (
        problem.params,
        problem.state,
        jax.tree.map(lambda x: x[0], problem.batches),
    )

    def dtypes():
        fun = jax.grad(amp(problem.loss), has_aux=True)
        products = precision_report(fun, *arguments).products
        return sorted((x.dtype, x.shapes, x.count) for x in products)

    want = dtypes()
    with switched(*SWITCHES):
        assert dtypes() == want
    assert {dtype for dtype, *_ in want} == {"bfloat16"}


@needs_switches
def test_a_checkpoint_keeps_its_settings_and_a_name_its_precision():
    with switched("jax_remat3"):
        (before,), (after,) = (
            [x.params["_prim"] for x in jax.make_jaxpr(f)(X, W).eqns if hidden(x)]
            for f in (FUNCTIONS["names"], amp(FUNCTIONS["names"]))
        )
    for setting in ("policy", "prevent_cse"):
        assert before.params[setting] == after.params[setting]
    kept = [x.invars[0].aval.dtype for x in after.params["jaxpr"].eqns if hidden(x)]
    assert kept == ["bfloat16"]


def hidden(equation):
    return equation.primitive.name == "call_hi_primitive"


@needs_switches
def test_a_loop_that_cannot_be_read_warns_once_by_name_and_line():
    def fun(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([w, w]))[0]

    line = f"test_amp_hidden.py:{fun.__code__.co_firstlineno + 1}"
    with switched("jax_scan3"):
        with pytest.warns(optax_mp.MixedPrecisionWarning) as caught:
            jax.make_jaxpr(amp(fun))(X, W)
        report = precision_report(fun, X, W)
    (text,) = [str(x.message) for x in caught]
    assert f"got call_hi_primitive (Scan3) {line}, whose products stay float32" in text
    assert f"not looked into: call_hi_primitive (Scan3) {line}" in str(report)


@needs_switches
def test_an_operation_of_a_user_keeps_its_rules_and_its_products_are_counted():
    hijax = pytest.importorskip("jax.experimental.hijax")

    class Product(hijax.HiPrim):
        def __init__(self, *avals):
            x, w = self.in_avals = avals
            self.out_aval = jax.core.ShapedArray((x.shape[0], w.shape[1]), x.dtype)
            self.params = {}
            super().__init__()

        def expand(self, x, w):
            return x @ w

        def jvp(self, primals, tangents):
            (x, w), (dx, dw) = primals, tangents
            return x @ w, 2 * (dx @ w + x @ dw)  # not the derivative of a product

    def fun(x, w):
        small = Product(jax.typeof(x), jax.typeof(w))(x, w)
        return jax.vmap(jnp.sin)(Product(jax.typeof(w), jax.typeof(w))(w, w)), small

    with pytest.warns(optax_mp.MixedPrecisionWarning) as caught:
        dots = jax.jvp(amp(fun), (X, W), (X, W))[1]
    assert len(caught) == 2  # lines
    assert all("(Product) test_amp_hidden.py" in str(x.message) for x in caught)
    np.testing.assert_array_equal(dots[1], jax.jvp(fun, (X, W), (X, W))[1][1])
    report = precision_report(fun, X, W)
    # Equal operations, but for the shapes.
    assert sorted(x.flops for x in report.products) == [2 * 4 * 8 * 8, 2 * 8 * 8 * 8]


# A primitive that nobody knows


class Holder:
    """A parameter with a jaxpr in an attribute of an attribute."""

    def __init__(self, jaxpr):
        self.inside = {"of": (1, SlottedHolder(jaxpr))}


class SlottedHolder:
    __slots__ = ("_jaxpr",)

    def __init__(self, jaxpr):
        self._jaxpr = jaxpr


made_up = jax.extend.core.Primitive("made_up")
made_up.def_abstract_eval(lambda x, w, **_: jax.core.ShapedArray(x.shape, x.dtype))


def bind_made_up(x, w, precision=None, dtype=jnp.float32):
    avals = (jax.ShapeDtypeStruct(a.shape, dtype) for a in (x, w))
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.dot(x, w, precision=precision))(*avals)
    return made_up.bind(x, w, held=Holder(jaxpr))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_made_up_primitive_with_a_product_inside_warns(around):
    fun = around(lambda x, w: bind_made_up(bind_made_up(x, w), w))
    with pytest.warns(optax_mp.MixedPrecisionWarning) as caught:
        jax.make_jaxpr(amp(fun))(X, W)
    (text,) = [str(x.message) for x in caught]  # one for both, of one line
    line = f"test_amp_hidden.py:{bind_made_up.__code__.co_firstlineno + 3}"
    assert f"got made_up {line}, whose" in text
    assert "amp_stop()" in text
    report = precision_report(fun, X, W)
    assert "not looked into: made_up test_amp_hidden.py" in str(report)


def test_a_report_lists_what_is_inside_of_a_made_up_primitive():
    def fun(x, w):
        jax.debug.callback(print, x)  # so that the report does not run it
        return bind_made_up(x, w)

    report = amp_report(fun, X, W)
    unknown = [x for x in report.operations if x.why == "unknown"]
    assert {x.primitive for x in unknown} == {"made_up", "dot_general"}
    assert {x.ran for x in unknown} == {"as_written"}
    (warning,) = report.warnings
    assert "got made_up" in warning


def test_a_derivative_rule_warns_as_well():
    @jax.custom_vjp
    def fun(x, w):
        return x @ w

    fun.defvjp(
        lambda x, w: (x @ w, w), lambda w, g: (bind_made_up(g, w), jnp.zeros_like(w))
    )
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="got made_up"):
        jax.make_jaxpr(gradient(amp(fun)))(X, W)


@pytest.mark.parametrize(
    "fun",
    [
        amp_stop(bind_made_up),
        lambda x, w: bind_made_up(x, w, precision="highest"),
        lambda x, w: bind_made_up(x, w, dtype=jnp.bfloat16),
    ],
)
def test_what_would_not_be_low_anyway_raises_no_warning(fun):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(amp(fun))(X, W)
        rules = optax_mp.default_amp_rules | {made_up: "as_written"}
        jax.make_jaxpr(amp(bind_made_up, rules=rules))(X, W)

"""amp's rules: the words, where they apply, what users give, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import CASES, operations, products
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import optax_mp
from optax_mp import MixedPrecisionWarning, amp, amp_stop, default_amp_rules
from optax_mp.autocast import _lattice, _rules

BF16, F16, F32 = (jnp.dtype(x) for x in ("bfloat16", "float16", "float32"))
X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 8), np.float32) / 3


def ran(fun, *args, primitive, rules=default_amp_rules, compute_dtype=BF16):
    """Return the input and output dtypes of the only operation of that name."""
    jaxpr = jax.make_jaxpr(amp(fun, rules=rules, compute_dtype=compute_dtype))(*args)
    (only,) = [each for each in operations(jaxpr) if each.name == primitive]
    floating = [x for x in only.inputs if jnp.issubdtype(x, jnp.floating)]
    return {jnp.dtype(x) for x in (*floating, *only.outputs)}


# The words


def tanh(x, w):
    return jnp.tanh(x @ w)


def scoped(*scopes):
    """Return an exponential of a product in scopes, the outermost first."""

    fun = lambda x, w: jnp.exp(x @ w)  # noqa: E731
    for scope in reversed(scopes):
        fun = jax.named_scope(scope)(fun)
    return fun


# A function, the operation that is looked at, rules of a user's, and where it runs.
RULES = {
    "low is in the compute dtype": (lambda x, w: jnp.exp(x), "exp", {"exp": "low"}, BF16),
    "f32 of low inputs": (tanh, "tanh", {"tanh": "f32"}, F32),
    "f32 by primitive": (tanh, "tanh", {lax.tanh_p: "f32"}, F32),
    "without a rule": (tanh, "tanh", {}, BF16),
    "widest, all low": (lambda x, w: (x @ w) * (x @ w), "mul", {}, BF16),
    "widest, one float32": (lambda x, w: (x @ w) * x, "mul", {}, F32),
    "read by float32 alone": (lambda x, w: jnp.exp(x @ w - 1.0), "sub", {}, F32),
    "one over a low value": (lambda x, w: 1.0 / (x @ w), "div", {}, F32),
    "so by a rule": (lambda x, w: 1.0 / (x @ w), "div", {"div": "low"}, BF16),
    "a low value over another": (lambda x, w: (x @ w) / 3.0 + 1, "div", {}, BF16),
    "not listed": (lambda x, w: lax.nextafter(x @ w, x @ w), "nextafter", {}, F32),
    "not listed, amp_default": (
        lambda x, w: lax.nextafter(x @ w, x @ w), "nextafter", {"amp_default": "low"}, BF16
    ),
    "a scope wins over an operation": (scoped("r"), "exp", {"r": "low"}, BF16),
    "also of a product": (scoped("r"), "dot_general", {"r": "f32"}, F32),
    "the outermost scope wins": (scoped("a", "b"), "exp", {"a": "f32", "b": "low"}, F32),
    "whichever it is": (scoped("b", "a"), "exp", {"a": "f32", "b": "low"}, BF16),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_an_operation_runs_as_its_rule_says(case):
    fun, primitive, rules, dtype = RULES[case]
    rules = default_amp_rules | rules
    assert ran(fun, X, W, primitive=primitive, rules=rules) == {dtype}


@pytest.mark.parametrize(("compute_dtype", "expected"), [(BF16, BF16), (F16, F32)])
def test_a_square_needs_the_range_of_float32(compute_dtype, expected):
    def fun(x, w):
        return jnp.sin(jnp.square(x @ w))

    name = "square" if "square" in str(jax.make_jaxpr(fun)(X, W)) else "integer_pow"
    assert ran(fun, X, W, primitive=name, compute_dtype=compute_dtype) == {expected}


def test_own_keeps_the_dtype_of_each_input():
    jaxpr = jax.make_jaxpr(amp(lambda x, w: lax.sort((x @ w, x), num_keys=1)))(X, W)
    (sort,) = [each for each in operations(jaxpr) if each.name == "sort"]
    assert list(map(jnp.dtype, sort.outputs)) == [BF16, F32]


def test_a_bias_is_added_in_float32_and_the_sum_is_low():
    def fun(x, w, b):
        return jnp.tanh(x @ w + b)

    assert ran(fun, X, W, X[0], primitive="add") == {F32}
    assert ran(fun, X, W, X[0], primitive="tanh") == {BF16}
    widest = default_amp_rules | {"bias_add": "widest"}
    assert ran(fun, X, W, X[0], primitive="tanh", rules=widest) == {F32}


@pytest.mark.parametrize("word", ["widest", "low", "rounded"])
def test_a_rule_for_a_lookup_decides_what_layers_add_to(word):
    def fun(table, w):
        with jax.named_scope("lookup"):
            x = jnp.take(table, np.zeros(300, int), axis=0)
        return jnp.tanh(lax.scan(lambda x, _: (x + x @ w, None), x, length=2)[0])

    rules = default_amp_rules | {"lookup": word}
    is_low = word != "widest"
    assert ran(fun, X, W, primitive="tanh", rules=rules) == {BF16 if is_low else F32}
    # Gradients of equal rows are summed: in 16 bits only by "low".
    loss = lambda table: amp(fun, rules=rules)(table, W).sum()  # noqa: E731
    found = operations(jax.make_jaxpr(jax.grad(loss))(X))
    (sum_,) = [x for x in found if x.name == "scatter-add"]
    assert jnp.dtype(sum_.inputs[0]) == (BF16 if word == "low" else F32)


def test_a_bias_in_16_bits_that_is_cast_is_a_bias():
    def fun(x, w, b):
        x, w, b = optax_mp.cast_floating((x, w, b), F32)
        return jnp.tanh(checkpoint_name(x @ w + b, "hidden"))

    arguments = optax_mp.cast_floating((X, W, X[0]), BF16)
    for program in (fun, lambda x, w, b: fun(x.astype(F32), w, b)):
        assert ran(program, *arguments, primitive="add") == {F32}
        assert ran(program, *arguments, primitive="name") == {BF16}
        assert ran(program, *arguments, primitive="tanh") == {BF16}


@pytest.mark.parametrize("value", [1e-12, 1e30])
def test_a_literal_that_float16_cannot_hold_keeps_its_operation_in_float32(value):
    def fun(x, w):
        return jnp.tanh((x @ w) * value)

    assert ran(fun, X, W, primitive="mul", compute_dtype=F16) == {F32}
    assert ran(fun, X, W, primitive="mul", compute_dtype=BF16) == {BF16}


def test_a_log_softmax_of_low_logits_is_computed_in_float32():
    fun = lambda x, w: jax.nn.log_softmax(x @ w + 1000.0)  # noqa: E731
    jaxpr = jax.make_jaxpr(amp(fun))(X, W)
    differences = [each for each in operations(jaxpr) if each.name == "sub"]
    assert len(differences) == 2
    assert {jnp.dtype(x) for each in differences for x in each.inputs} == {F32}


def test_a_change_of_dtype_is_the_users():
    def fun(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    text = str(jax.make_jaxpr(amp(fun))(X, W))
    assert text == str(jax.make_jaxpr(fun)(X, W))


def test_a_product_in_the_users_default_precision_stays():
    with jax.default_matmul_precision("highest"):
        assert ran(jnp.dot, X, W, primitive="dot_general") == {F32}


def test_weights_of_layers_that_are_cast_before_a_scan_go_into_it_in_16_bits():
    def loss(ws, x):
        ws, x = optax_mp.cast_floating((ws, x), F32)
        layer = lambda x, w: (x + jnp.tanh(jnp.sin(x) @ w), None)  # noqa: E731
        return lax.scan(layer, x, ws)[0].sum()

    arguments = optax_mp.cast_floating((np.stack([W] * 3), X), BF16)
    jaxpr = jax.make_jaxpr(amp(loss))(*arguments)
    (scan,) = [each for each in operations(jaxpr) if each.name == "scan"]
    assert list(map(jnp.dtype, scan.inputs)) == [F32, BF16]
    assert jax.eval_shape(jax.grad(amp(loss)), *arguments).dtype == BF16


# Where a rule applies


def test_a_scope_reaches_into_a_loop_and_its_gradient():
    def fun(w, x):
        with jax.named_scope("exact"):
            return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 3)[0].sum()

    rules = default_amp_rules | {"exact": "f32"}
    for program in (jax.grad(amp(fun, rules=rules)), amp(jax.grad(fun), rules=rules)):
        found = products(jax.make_jaxpr(program)(W, X))
        assert len(found) == 3
        assert all(x.inputs == x.outputs[:1] * 2 for x in found)
        assert {jnp.dtype(x.outputs[0]) for x in found} == {F32}


def test_rules_replace_the_defaults():
    text = str(jax.make_jaxpr(amp(lambda x: x @ x.T, rules={"exp": "low"}))(X))
    assert text == str(jax.make_jaxpr(lambda x: x @ x.T)(X))


# Rules that are functions: the first two are in jaxamp's documentation


def use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params):
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in invars):
        return invars, bind_params
    if "preferred_element_type" in bind_params:
        bind_params["preferred_element_type"] = compute_dtype
    return [x.astype(compute_dtype) for x in invars], bind_params


def use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params):
    pairs = zip(invars, original_dtypes, strict=True)
    return [x.astype(dtype) for x, dtype in pairs], bind_params


def in_float8(compute_dtype, original_dtypes, *invars, **bind_params):
    bind_params["preferred_element_type"] = compute_dtype
    return [x.astype(jnp.float8_e4m3fn) for x in invars], bind_params


def gradients(fun, rules):
    yield jax.grad(amp(fun, rules=rules), (0, 1))
    yield amp(jax.grad(fun, (0, 1)), rules=rules)


FUNCTIONS = "scan_over_layers remat_in_scan cond custom_vjp custom_jvp sharded".split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_reaches_where_a_word_does(name):
    loss = lambda p, x: jnp.sum(jax.tree.leaves(CASES[name].fun(p, x, *rest))[0])  # noqa: E731
    params, x, *rest = CASES[name].arguments
    texts = [
        [str(jax.make_jaxpr(grad)(params, x)) for grad in gradients(loss, rules)]
        for rules in (
            default_amp_rules | {"dot_general": use_compute_precision},
            default_amp_rules,
        )
    ]
    assert texts[0] == texts[1]
    rules = default_amp_rules | {lax.dot_general_p: use_original_precision}
    for grad in gradients(loss, rules):
        found = products(jax.make_jaxpr(grad)(params, x))
        assert found and {dtype for x in found for dtype in x.inputs} == {F32}


@pytest.mark.parametrize(
    ("rule", "read", "result"),
    [
        (use_compute_precision, BF16, BF16),
        (use_original_precision, F32, F32),
        (in_float8, jnp.dtype("float8_e4m3fn"), BF16),
    ],
)
def test_the_result_of_a_function_goes_on_in_its_width(rule, read, result):
    jaxpr = jax.make_jaxpr(amp(tanh, rules=default_amp_rules | {"dot_general": rule}))
    product, activation = (
        next(x for x in operations(jaxpr(X, W)) if x.name == name)
        for name in ("dot_general", "tanh")
    )
    assert {*map(jnp.dtype, product.inputs)} == {read}
    assert {*map(jnp.dtype, activation.inputs)} == {result}
    # Arguments and gradients keep their dtypes.
    loss = lambda x, w: tanh(x, w).sum()  # noqa: E731
    for grad in gradients(loss, {"dot_general": rule}):
        assert [x.dtype for x in jax.eval_shape(grad, X, W)] == [F32, F32]


def test_a_function_for_a_scope_needs_no_other_rules_and_takes_collectives():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    specs = {"in_specs": (P("d"), P()), "out_specs": P()}

    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def fun(x, w):
        with jax.named_scope("low"):
            y = jnp.fft.ifft(jnp.fft.fft(jnp.exp2(x @ w))).real  # has no 16-bit form
            y = y[jnp.array([0, 0])]  # nor has a scatter, its derivative
            return lax.psum(y, "d")

    loss = lambda x, w: jnp.exp(fun(x, w)).sum()  # noqa: E731
    rules = {"low": use_compute_precision}
    forward = operations(jax.make_jaxpr(amp(loss, rules=rules))(X, W))
    dtypes = {x.name: jnp.dtype(x.inputs[0]) for x in forward}
    assert dtypes["dot_general"] == dtypes["exp2"] == BF16
    assert dtypes["fft"] == jnp.complex64 and dtypes["exp"] == F32
    for grad in gradients(loss, rules):
        assert [x.dtype for x in jax.eval_shape(grad, X, W)] == [F32, F32]


def test_the_report_names_what_a_function_runs():
    rules = default_amp_rules | {
        "dot_general": in_float8,
        "tanh": use_original_precision,
    }
    report = optax_mp.amp_report(tanh, X, W, rules=rules)
    assert [(x.primitive, x.ran, x.why) for x in report.operations] == [
        ("dot_general", "function", "rule"),
        ("tanh", "function", "rule"),
    ]
    assert report.error > 0.01 and "operations: 2 function" in str(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, params: x,
        lambda x, params: (x, None),
        lambda x, params: (x * 2, params),
        lambda x, params: ([x[0].astype(int)], params),
        lambda x, params: ([x[0][0]], params),
    ],
)
def test_a_function_may_change_only_dtypes_and_params(change):
    rule = lambda low, dtypes, *x, **params: change(x, params)  # noqa: E731
    with pytest.raises(
        TypeError, match=r"rule of tanh to return .* float32\[4,8\] and"
    ):
        amp(jnp.tanh, rules={"tanh": rule})(X)


# Bad input


IN_8_BITS = "no products in 8 bits: use bfloat16, or qwix, Transformer"
NO_16_BITS = "to be bfloat16 or float16, got .*"
REFUSED = [
    ({"fun": 3}, TypeError, "`fun` to be a function, got 3"),
    (
        {"compute_dtype": "f32"},
        ValueError,
        NO_16_BITS + "call `fun` itself",
    ),
    ({"compute_dtype": "float8_e4m3fn"}, ValueError, NO_16_BITS + IN_8_BITS),
    ({"rules": 3}, TypeError, "`rules` to be a mapping such as"),
    ({"rules": {3: "low"}}, TypeError, "key of `rules` to be a primitive, .*, got 3"),
    *(
        ({"rules": {"a": x}}, ValueError, f"of 'a' .*, got '{x}'; .*{IN_8_BITS}")
        for x in ("f8", "not_f8")
    ),
    *(
        ({"rules": {"tanh": x}}, ValueError, "the rule of 'tanh' to be one of low, f32")
        for x in ("F32", None, [])
    ),
    *(
        ({"rules": {x: "f32"}}, ValueError, f"got one for '{x}' .*jax.named_scope")
        for x in ("convert_element_type", "scan", "custom_jvp_call")
    ),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_bad_arguments_are_refused_with_what_to_use_instead(given, error, message):
    with pytest.raises(error, match=message):
        amp(**{"fun": jnp.sin} | given)


def test_amp_stop_refuses_what_is_not_a_function():
    with pytest.raises(TypeError, match="amp_stop: .* to be a function, got 3; pass"):
        amp_stop(3)


def test_a_misspelt_scope_raises_a_warning():
    def fun(x):
        with jax.named_scope("router"):
            return x @ x.T

    with pytest.warns(MixedPrecisionWarning, match="got 'ruoter'; correct it"):
        amp(fun, rules=default_amp_rules | {"ruoter": "f32"})(X)


def test_a_computed_vector_is_no_bias_wherever_it_is_added():
    def fun(x, w, wrap):
        computed = jnp.exp(x).sum(-1, keepdims=True)
        return jnp.tanh(wrap(lambda a, b: a + b)(x @ w, computed))

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        program = lambda x, w: fun(x, w, wrap)  # noqa: B023, E731
        assert ran(program, X, W, primitive="tanh") == {F32}


def test_a_bias_is_one_in_a_jit_in_a_scan_and_among_stacked_params():
    def layer(x, w, b):
        return jnp.tanh(x @ w + b)

    def scanned(x, w, bs):
        return lax.scan(lambda x, b: (layer(x, w, b), None), x, bs)[0]

    def sliced(x, w, bs):
        return layer(x, w, bs[1])

    bs = np.ones((3, 8), np.float32)
    assert ran(jax.jit(layer), X, W, bs[0], primitive="tanh") == {BF16}
    assert ran(scanned, X, W, bs, primitive="tanh") == {BF16}
    assert ran(sliced, X, W, bs, primitive="tanh") == {BF16}


@pytest.mark.parametrize("preferred", ["float16", "bfloat16"])
@pytest.mark.parametrize("compute_dtype", [BF16, F16])
def test_a_product_returns_the_16_bit_dtype_that_it_was_asked_for(
    preferred, compute_dtype
):
    def fun(x, w):
        return lax.dot(x, w, preferred_element_type=jnp.dtype(preferred))

    assert amp(fun, compute_dtype=compute_dtype)(X, W).dtype == preferred


@pytest.mark.parametrize("name", ["encoder/attention", "layer(1)", "attention"])
def test_a_scope_with_parts_is_found_by_all_of_them(name):
    def fun(x, w):
        scope = name if name != "attention" else "encoder/attention"
        with jax.named_scope(scope):
            return x @ w

    rules = default_amp_rules | {name: "f32"}
    assert ran(fun, X, W, primitive="dot_general", rules=rules) == {F32}
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: amp(fun, rules=rules)(X, w).sum()))(W)
    assert {jnp.dtype(each.outputs[0]) for each in products(jaxpr)} == {F32}


def test_a_bias_has_one_long_axis_and_the_rule_of_add_is_for_all():
    x = np.ones((2, 3, 3), np.float32)
    (add,) = jax.make_jaxpr(jax.lax.add)(x, x).eqns
    for axes in (1, 2):
        precisions = (_lattice.LOW, _lattice.Argument(axes))
        assert _lattice.adds_bias(add, precisions) == (axes == 1)
    rules = _rules.Rules(optax_mp.default_amp_rules | {"add": "f32"}, "bfloat16")
    assert rules.rule_of(add, None, adds_bias=True) == ("f32", "rule")

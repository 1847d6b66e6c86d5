"""precision_report: how often products run, the backward pass, and what it says."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, shard_map
from jax.experimental.sparse import BCOO
from jax.sharding import Mesh, PartitionSpec

from optax_mp import amp, amp_stop, precision_report

LOW = jnp.bfloat16
X = jax.ShapeDtypeStruct((8, 8), LOW)
F = jax.ShapeDtypeStruct((8, 8), jnp.float32)
S = jax.ShapeDtypeStruct((8,), jnp.float32)
FLOPS = 2 * 8**3  # of one product of these


def counts(fun, *args, **settings):
    """Return how often each product runs; in the forward pass, unless asked for."""
    report = precision_report(fun, *args, **({"argnums": ()} | settings))
    for each in report.products:
        assert each.flops == each.count * FLOPS
    return [each.count for each in report.products]


# How often products run


def test_a_scan_counts_each_iteration():
    def fun(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, None, 5)[0]

    assert counts(fun, F, F) == [5]
    assert counts(fun, F, F, argnums=(0, 1)) == [5, 5, 5]
    nested = lambda x, w: lax.scan(lambda x, _: (fun(x, w), None), x, None, 3)[0]  # noqa: E731
    assert counts(nested, F, F) == [15]


def test_a_while_loop_counts_one_iteration_and_says_so():
    def fun(x):
        return lax.while_loop(lambda x: (x @ x).sum() < 9, lambda x: x @ x, x)

    report = precision_report(fun, F, argnums=())
    assert [each.count for each in report.products] == [1, 1]
    (note,) = report.notes
    assert note.startswith("products in a `while` loop: 2, counted for one iteration")


def test_of_branches_the_costliest_counts():
    def fun(i, x):
        branches = [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x]
        return lax.switch(i, branches, x)

    report = precision_report(fun, jnp.int32(0), F, argnums=())
    assert [each.count for each in report.products] == [1, 1, 0]
    assert report.notes[0].startswith("products that count 0: 1, in branches")


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f)), jax.named_call],
    ids=["jit", "remat", "nested", "named"],
)
def test_calls_count_what_is_inside(wrap):
    assert counts(wrap(lambda x: x @ x), F) == [1]


def test_what_is_computed_again_counts_again():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x)))

    report = precision_report(loss, F, F)
    forward = [each for each in report.products if not each.is_backward]
    # Of both products the first is computed again; there are three gradients.
    assert (len(forward), len(report.products)) == (2, 6)


def test_functions_with_a_derivative_rule_count_as_it_says():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, gradient: (gradient @ x @ x @ x,))
    assert counts(square, F) == [1]
    assert counts(square, F, argnums=0) == [1, 1, 1, 1]

    @jax.custom_jvp
    def cube(x):
        return x @ x @ x

    cube.defjvp(lambda x, t: (cube(*x), t[0] @ x[0]))
    assert counts(cube, F) == [1, 1]
    assert counts(cube, F, argnums=0) == [1, 1, 1]


def test_a_shard_map_counts_all_shards():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = PartitionSpec("x")
    fun = shard_map(
        jnp.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    assert counts(fun, F, F) == [1]


def test_what_nothing_reads_does_not_count():
    def fun(x):
        unused = x @ x
        del unused
        return x + 1

    assert counts(fun, F) == []


def test_unknown_operations_are_listed():
    kernels = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    call = kernels.pallas_call(kernel, out_shape=F, interpret=True)
    report = precision_report(lambda x: call(x) @ x, F, argnums=())
    assert [each.count for each in report.products] == [1]
    (note,) = report.notes
    line = test_unknown_operations_are_listed.__code__.co_firstlineno + 7
    assert note == f"not looked into: pallas_call at test_precision.py:{line}"
    twice = precision_report(lambda x: jax.lax.map(call, call(x)[None]), F, argnums=())
    assert len(twice.notes) == 1 and str(twice).count("not looked into") == 1


# The backward pass


def products(report):
    return [(each.is_backward, each.dtype) for each in report.products]


FORWARD, BACKWARD = (False, "float32"), (True, "float32")


def test_by_default_the_first_argument_with_floats_is_differentiated():
    def loss(name, params, x):
        assert name == "a name"
        return jnp.sum(x @ params["w"])

    report = precision_report(loss, "a name", {"w": F, "n": 3}, F)
    assert products(report) == [FORWARD, BACKWARD]
    # And not the data: their gradient would be another product.
    both = precision_report(loss, "a name", {"w": F, "n": 3}, F, argnums=(1, 2))
    assert products(both) == [FORWARD, BACKWARD, BACKWARD]
    by_name = precision_report(loss, "a name", x=F, params={"w": F})
    assert products(by_name) == [FORWARD, BACKWARD]


def test_without_floats_there_is_no_backward_pass():
    fun = lambda n: n @ n  # noqa: E731
    (product,) = precision_report(fun, jnp.ones((2, 2), jnp.int8)).products
    assert (product.dtype, product.is_backward) == ("int8", False)


def test_what_comes_with_a_loss_is_not_differentiated():
    def loss(w, x):
        return jnp.sum(x @ w), {"other": x @ (x @ w)}

    assert len(precision_report(loss, F, F).products) == 3 + 1
    # Without a loss every output is.
    pair = lambda w, x: (x @ w, x @ (x @ w))  # noqa: E731
    assert len(precision_report(pair, F, F).products) == 3 + 3


def test_a_function_without_a_loss_is_differentiated_as_it_is():
    assert products(precision_report(jnp.matmul, F, F)) == [FORWARD, BACKWARD]


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_training_step_is_not_differentiated_again(wrap):
    tx = optax.sgd(0.1)

    @wrap
    def step(w, state, x):
        value, grads = jax.value_and_grad(loss_of)(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    expected = [FORWARD] * 2 + [BACKWARD] * 3
    report = precision_report(step, F, tx.init(F), F)
    assert (
        sorted(products(report))
        == expected
        == products(precision_report(loss_of, F, F))
    )
    assert report.kept_bytes == {}
    gradient = precision_report(wrap(jax.value_and_grad(loss_of)), F, F)
    assert sorted(products(gradient)) == expected


def of_the_second(x, w):
    return jax.value_and_grad(loss_of, argnums=0)(w, x)


def of_the_batch_first(x, w):
    return w - jax.grad(loss_of)(w, x)


def cast_gradients(w, x):
    grads = jax.grad(loss_of)(w, x)
    return grads.astype(jnp.float32)


def of_a_number(w):
    return loss_of(w * jnp.ones((8, 8)), jnp.ones((8, 8)))


def of_a_part(params, x):
    return params["w"] - jax.grad(loss_of)(params["w"], x)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (of_the_second, (F, F)),
        (of_the_batch_first, (jax.ShapeDtypeStruct((4, 8), jnp.float32), F)),
        (cast_gradients, (X, X)),
        (of_a_part, ({"w": F, "frozen": S}, F)),
        (jax.grad(of_a_number), (jnp.float32(2),)),
    ],
)
def test_whatever_computes_a_gradient_is_not_differentiated_again(fun, args):
    traced = []

    @functools.wraps(fun)
    def noted(*args):
        traced.append(args)
        return fun(*args)

    report = precision_report(noted, *args)
    assert report == precision_report(fun, *args, argnums=())
    assert len(traced) == 1
    again = precision_report(fun, *args, argnums=0)
    assert len(again.products) > len(report.products)


@pytest.mark.parametrize("returns", ["nothing", "loss"])
def test_a_step_that_updates_in_place_is_reported(returns):
    nnx = pytest.importorskip("flax.nnx")

    def loss_of_model(model, x):
        return jnp.sum(jnp.tanh(model(x)) ** 2)

    def step(model, x):
        loss, grads = nnx.value_and_grad(loss_of_model)(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, params, grads))
        return loss if returns == "loss" else None

    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    report = precision_report(step, model, F)
    assert products(report) == [FORWARD, BACKWARD]
    assert report == precision_report(step, model, F, argnums=())
    assert model.kernel[...] is before


def test_a_loss_that_changes_a_module_is_differentiated():
    nnx = pytest.importorskip("flax.nnx")

    def loss(layers, x):
        linear, norm = layers
        return jnp.sum(norm(linear(x)) ** 2)  # `norm` has new statistics.

    rngs = nnx.Rngs(0)
    layers = nnx.Linear(8, 8, use_bias=False, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
    assert products(precision_report(loss, layers, F)) == [FORWARD, BACKWARD]


def test_a_loss_that_holds_a_gradient_is_differentiated():
    def loss(w, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x) ** 2)

    def value(report):
        return sum(each.is_backward for each in report.products)

    inner = precision_report(loss, F, F, argnums=())
    assert value(precision_report(loss, F, F)) > value(inner)


def test_a_step_with_a_loop_that_has_no_gradient_is_reported():
    def step(w, x):
        grads = jax.grad(loss_of)(w, x)
        return lax.while_loop(lambda w: w[0, 0] < 0, lambda w: w @ w, w - grads)

    # The product that only the loss reads is left out: nothing reads the loss.
    assert len(precision_report(step, F, F).products) == 5


# What is kept for the backward pass


def test_what_is_kept_is_counted_by_dtype():
    def loss(w, x):
        h = jnp.tanh(x @ w)  # keeps its result, and x and w, which are there anyway
        return jnp.sum(h.astype(jnp.float32) ** 2)  # keeps the cast

    report = precision_report(loss, X, X)
    assert report.kept_bytes["float32"] == 8 * 8 * 4
    assert report.kept_bytes["bfloat16"] in (8 * 8 * 2, 2 * 8 * 8 * 2)
    assert sum(precision_report(amp(loss), X, X).kept_bytes.values()) > 0


def test_what_is_computed_again_is_not_kept():
    layers = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)  # noqa: E731
    loss = lambda w, x: jnp.sum(jnp.sin(layers(w, x)))  # noqa: E731
    again = lambda w, x: jnp.sum(jnp.sin(jax.checkpoint(layers)(w, x)))  # noqa: E731
    kept, less = (precision_report(f, F, F).kept_bytes for f in (loss, again))
    assert less["float32"] < kept["float32"]


# amp


def mixed_loss(params, x):
    h = jnp.tanh(x @ params["in"]) * params["norm"]
    return jnp.mean((h @ params["out"]).astype(jnp.float32) ** 2)


MIXED = {"in": X, "norm": S, "out": X}


def test_amp_mends_it():
    report = precision_report(mixed_loss, MIXED, X)
    assert report.shares() == {"float32": 0.6, "bfloat16": 0.4}
    assert report.low_share == pytest.approx(0.4)
    mended = precision_report(amp(mixed_loss), MIXED, X)
    assert mended.shares() == {"bfloat16": 1.0}
    assert mended.wide_products == () and mended.low_share == 1.0
    assert precision_report(jax.jit(amp(mixed_loss)), MIXED, X).low_share == 1.0


def test_what_amp_leaves_alone_is_said():
    def fun(x):
        with amp_stop():
            stopped = x @ x
        exact = jnp.matmul(x, x, precision="highest")
        return stopped + exact + x @ x

    report = precision_report(fun, F, argnums=())
    assert [each.kept_by for each in report.products] == ["scope", "precision", ""]
    under_amp = precision_report(amp(fun), F, argnums=())
    assert [each.dtype for each in under_amp.products] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    first, *_, last, stop = report.advice()
    assert "`optax_mp.amp(fun)` runs 1 of these 3 products" in first
    assert {last.split(" keeps")[0], stop.split(" keeps")[0]} == {
        "`precision=`",
        "`amp_stop`",
    }


def complex_product(w, x):
    return jnp.abs(x @ w).sum()


def sparse_product(x):
    return BCOO.fromdense(jnp.eye(8), nse=8) @ x


C = jax.ShapeDtypeStruct((8, 8), jnp.complex64)


def test_a_sparse_product_is_of_its_entries_and_the_other_matrix():
    (product,) = precision_report(sparse_product, F, argnums=()).products
    assert product.shapes == ((8,), (8, 8), (8, 8))
    assert product.dtypes == ("float32",) * 3


@pytest.mark.parametrize(
    ("fun", "args", "reason", "words"),
    [
        (complex_product, (C, C), "inputs", "neither float32 nor bfloat16"),
        (sparse_product, (F,), "rule", "has no 16-bit form of 1 product"),
    ],
)
def test_what_amp_cannot_run_low_is_said(fun, args, reason, words):
    report = precision_report(fun, *args, argnums=())
    assert [each.kept_by for each in report.products] == [reason]
    (advice,) = report.advice()
    assert words in advice and advice in str(report)
    other = dataclasses.replace(report.products[0], kept_by="a new reason")
    report = dataclasses.replace(report, products=(other,))
    assert report.advice() == ["`amp` leaves 1 product as written"]


# What it says


def test_the_table_names_lines_causes_and_what_to_change():
    text = str(precision_report(mixed_loss, MIXED, X))
    head, rows, advice = text.split("\n\n")
    assert head.splitlines()[0].split() == (
        "FLOPs of products in forward backward all products".split()
    )
    assert head.splitlines()[1].split() == ["float32", "50%", "66.7%", "60%", "3"]
    assert head.splitlines()[3].startswith("kept for the backward pass: ")
    (row,) = rows.splitlines()[1:]
    line = mixed_loss.__code__.co_firstlineno + 2
    assert row.split() == (
        f"test_precision.py:{line} params['norm'] [8,8] [8,8] 3 3.07k 60%".split()
    )
    assert "`optax_mp.amp(fun)` runs all 3 products in bfloat16" in advice
    assert "for 3 products: params['norm'] is float32; pass it" in advice


def test_all_that_is_float32_by_itself_is_named():
    def advice(fun, *args):
        first, *others = precision_report(fun, *args, argnums=()).advice()
        assert first.startswith("wrap")
        return others

    (both,) = advice(lambda w, x: x @ w, F, F)
    assert both.startswith(
        "or, for 1 product: x and w are float32; pass both in bfloat"
    )
    constant = jnp.ones((8, 8))
    (mixed,) = advice(lambda x: x @ constant, F)
    assert "x is float32; pass it in" in mixed
    assert "; and a constant, float32[8,8] is float32; make it in" in mixed
    five = [F] * 5
    (many,) = advice(lambda *args: [x @ x for x in args], *five)
    assert "args[*] is float32; pass it" in many
    # What follows from one of them needs no remedy of its own.
    (cause,) = advice(lambda w, x: (x.astype(w.dtype) * np.float32(2)) @ w, F, X)
    assert "w is float32" in cause


def test_one_line_sums_it_up():
    assert precision_report(mixed_loss, MIXED, X).summary() == (
        "FLOPs of products: 60% in float32, 40% in bfloat16; 3 of 5 products are "
        "float32 or wider, most because of params['norm']"
    )
    assert precision_report(amp(mixed_loss), MIXED, X).summary() == (
        "FLOPs of products: 100% in bfloat16"
    )
    nothing = precision_report(jnp.tanh, X)
    assert nothing.summary() == "no matrix products or convolutions"
    assert nothing.low_share == 1.0 and str(nothing)


def test_layers_of_a_kind_are_together_in_the_table():
    def fun(params):
        x = params["first"]
        for layer in params["layers"]:
            x = (x * layer["scale"]) @ layer["w"]
        return x

    params = {"first": X, "layers": [{"scale": S, "w": X}] * 30}
    report = precision_report(fun, params, argnums=())
    assert report.wide_products[7].causes[0].name == "params['layers'][7]['scale']"
    row = str(report).splitlines()[4]
    assert (
        row.split()[1:]
        == "params['layers'][*]['scale'] [8,8] [8,8] 30 30.7k 100%".split()
    )
    assert report.summary().endswith("because of params['layers'][*]['scale']")


def test_a_long_table_is_cut_and_the_data_are_not():
    names = [chr(ord("a") + i) for i in range(20)]

    def fun(params):
        x = params["x"]
        for name in names:
            x = (x * params[name]) @ params["x"]
        return x

    report = precision_report(fun, {"x": X} | dict.fromkeys(names, S), argnums=())
    assert len(report.wide_products) == 20
    assert "... and 8 more" in str(report)
    assert "and 16 more are float32" in str(report)


def test_it_can_be_written_as_json():
    report = precision_report(mixed_loss, MIXED, X)
    read = json.loads(json.dumps(dataclasses.asdict(report)))
    assert read["products"][0]["dtype"] == "bfloat16"
    assert read["kept_bytes"] == report.kept_bytes


# What it is given


def test_shapes_say_what_arrays_say():
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), (MIXED, X))
    assert precision_report(mixed_loss, *arrays) == precision_report(
        mixed_loss, MIXED, X
    )


def test_keys_and_static_arguments_are_passed_on():
    class Model:
        def __call__(self, w, x, key, mode):
            assert mode == "train" and not isinstance(key, str)
            x = x * jax.random.bernoulli(key, 0.9, x.shape)
            return jnp.sum(x @ w)

    def loss(model, w, x, key, mode=None, nothing=None):
        assert nothing is None
        return model(w, x, key, mode)

    for key in (jax.random.key(0), jax.eval_shape(lambda: jax.random.key(0))):
        report = precision_report(loss, Model(), F, F, key, mode="train")
        assert products(report) == [FORWARD, BACKWARD]


def test_nothing_is_computed():
    def fun(x):
        jax.debug.callback(lambda x: pytest.fail("it ran"), x)
        return x @ x

    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    report = precision_report(fun, huge)
    assert report.products[0].flops == 2 * 10**18


def test_a_function_that_does_not_trace_raises_what_jax_raises():
    def fun(x):
        return x if x[0, 0] > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        precision_report(fun, F)
    assert error.value.__notes__[-1] == "precision_report: raised while tracing `fun`."
    with pytest.raises(TypeError, match="dot_general|matmul") as error:
        precision_report(jnp.matmul, F, jax.ShapeDtypeStruct((3, 3), jnp.float32))
    assert "precision_report" in error.value.__notes__[-1]


def test_a_function_without_a_gradient_says_how_to_do_without():
    def fun(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    with pytest.raises(ValueError, match="Reverse-mode") as error:
        precision_report(fun, F)
    assert error.value.__notes__[-1] == (
        "precision_report: raised while differentiating `fun` with respect to x; for "
        "the forward pass alone give argnums=()."
    )


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="precision_report: `fun` is 3, expected a f"):
        precision_report(3)
    with pytest.raises(ValueError, match="`argnums` has 2, expected the position of"):
        precision_report(jnp.matmul, F, F, argnums=2)
    with pytest.raises(ValueError, match=r"but n holds int32\[2\], expected floating"):
        precision_report(lambda n: n, jnp.ones(2, jnp.int32), argnums=0)
    with pytest.raises(ValueError, match="but n holds no array, expected floating"):
        precision_report(lambda n: jnp.ones(n), 3, argnums=-1)

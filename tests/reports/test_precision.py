"""precision_report: how often products run, the backward pass, and what it says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, shard_map
from jax.sharding import Mesh, PartitionSpec

from optax_mp import amp, precision_report

LOW = jnp.bfloat16
X = jax.ShapeDtypeStruct((8, 8), LOW)
F = jax.ShapeDtypeStruct((8, 8), jnp.float32)
S = jax.ShapeDtypeStruct((8,), jnp.float32)
FLOPS = 2 * 8**3  # of one product of these


# How often products run


def scanned(x, w):
    return lax.scan(lambda x, _: (x @ w, None), x, None, 5)[0]


def sharded(x, w):
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec("x")
    specs = {"in_specs": (spec, PartitionSpec()), "out_specs": spec}
    return shard_map(jnp.matmul, mesh=mesh, **specs)(x, w)


COUNTS = {
    "a scan": (scanned, [5]),
    "its gradient": (lambda x, w: scanned(x, w).sum(), [5, 5]),
    "a scan in another": (
        lambda x, w: lax.scan(lambda x, _: (scanned(x, w), None), x, None, 3)[0], [15]
    ),
    "jit in jit": (jax.jit(jax.jit(jnp.matmul)), [1]),
    "remat": (jax.checkpoint(jnp.matmul), [1]),
    "a name": (jax.named_call(jnp.matmul), [1]),
    "shards": (sharded, [1]),
    "what nothing reads": (lambda x, w: (x @ w, x + 1)[1], []),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_products_count_as_often_as_they_run(name):
    fun, counts = COUNTS[name]
    products = precision_report(fun, F, F).products
    assert [each.count for each in products] == counts
    assert all(each.flops == each.count * FLOPS for each in products)


def test_a_while_loop_counts_one_iteration_and_says_so():
    def fun(x):
        return lax.while_loop(lambda x: (x @ x).sum() < 9, lambda x: x @ x, x)

    report = precision_report(fun, F)
    assert [each.count for each in report.products] == [1, 1]
    assert report.notes == ("products in a `while` loop count for one iteration",)


def test_of_branches_the_costliest_counts():
    def fun(i, x):
        branches = [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x]
        return lax.switch(i, branches, x)

    report = precision_report(fun, jnp.int32(0), F)
    assert [each.count for each in report.products] == [1, 1, 0]


# The backward pass


def products(report):
    return [(each.is_backward, each.dtype) for each in report.products]


FORWARD, BACKWARD = (False, "float32"), (True, "float32")


def test_of_a_loss_the_first_argument_with_floats_is_differentiated():
    def loss(name, params, x):
        assert name == "a name"
        value = jnp.sum(x @ params["w"])
        return (value, {"other": x @ x}) if "n" in params else value

    # And not the data: their gradient would be another product.
    expected = [FORWARD, BACKWARD]
    assert products(precision_report(loss, "a name", {"w": F}, F)) == expected
    by_name = precision_report(loss, "a name", x=F, params={"w": F})
    assert products(by_name) == expected
    # What comes with a loss is not differentiated.
    with_other = precision_report(loss, "a name", {"w": F, "n": 3}, F)
    assert sorted(products(with_other)) == [FORWARD, FORWARD, BACKWARD]
    # Nor is what is no loss.
    assert products(precision_report(jnp.matmul, F, F)) == [FORWARD]


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_training_step_is_not_differentiated_again(wrap):
    tx = optax.sgd(0.1)

    @wrap
    def step(w, state, x):
        value, grads = jax.value_and_grad(loss_of)(w, x)
        updates, state = tx.update(grads, state, w)
        return value, optax.apply_updates(w, updates), state

    expected = [FORWARD] * 2 + [BACKWARD] * 3
    assert products(precision_report(loss_of, F, F)) == expected
    for fun, args in (
        (step, (F, tx.init(F), F)),
        (wrap(jax.value_and_grad(loss_of)), (F, F)),
    ):
        assert sorted(products(precision_report(fun, *args))) == expected


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
    assert products(precision_report(step, model, F)) == [FORWARD, BACKWARD]
    assert model.kernel[...] is before


# amp


def mixed_loss(params, x):
    h = jnp.tanh(x @ params["in"]) * params["norm"]
    return jnp.mean((h @ params["out"]).astype(jnp.float32) ** 2)


MIXED = {"in": X, "norm": S, "out": X}


def test_amp_mends_it():
    report = precision_report(mixed_loss, MIXED, X)
    assert report.shares() == {"float32": 0.6, "bfloat16": 0.4}
    assert report.low_share == 0.4
    mended = precision_report(amp(mixed_loss), MIXED, X)
    assert mended.shares() == {"bfloat16": 1.0}
    assert mended.wide_products == () and mended.low_share == 1.0
    assert precision_report(jax.jit(amp(mixed_loss)), MIXED, X).low_share == 1.0


# What it says


def test_the_verdict_comes_first_then_the_places_and_what_to_change():
    line = mixed_loss.__code__.co_firstlineno
    blamed = f"params['norm'] at test_precision.py:{line + 1}"
    report = precision_report(mixed_loss, MIXED, X)
    head, rows, advice = str(report).split("\n\n")
    assert (
        head
        == report.summary()
        == (
            "40% of the FLOPs of products run below float32 (60% float32, 40% bfloat16); "
            f"float32 because of {blamed}"
        )
    )
    (row,) = rows.splitlines()[1:]
    place = f"test_precision.py:{line + 2}"
    assert re.split("  +", row) == [
        *(place, blamed, "[8, 8] [8, 8]", "3", "3.07e+03", "60%")
    ]
    assert "`optax_mp.amp(fun)` runs products in bfloat16" in advice
    assert "pass an argument in bfloat16" in advice


def test_what_is_all_low_or_has_no_products_says_so():
    all_low = precision_report(amp(mixed_loss), MIXED, X)
    assert (
        str(all_low)
        == all_low.summary()
        == ("100% of the FLOPs of products run below float32 (100% bfloat16)")
    )
    nothing = precision_report(jnp.tanh, X)
    assert str(nothing) == "no matrix products or convolutions"
    assert nothing.low_share == 1.0


# What it is given


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


def test_a_function_without_a_gradient_is_reported_without():
    def fun(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x).sum()

    report = precision_report(fun, F)
    assert products(report) == [FORWARD]
    assert report.notes[0].startswith(
        "the forward pass alone, as JAX says: Reverse-mode differentiation"
    )


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="precision_report: .*`fun` to be .*, got 3"):
        precision_report(3)


def test_unknown_operations_are_listed():
    kernels = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    call = kernels.pallas_call(kernel, out_shape=F, interpret=True)
    report = precision_report(lambda x: call(x) @ x, F)
    assert [each.count for each in report.products] == [1]
    (note,) = report.notes
    line = test_unknown_operations_are_listed.__code__.co_firstlineno + 7
    assert note == f"not looked into: pallas_call test_precision.py:{line}"
    twice = precision_report(lambda x: jax.lax.map(call, call(x)[None]), F)
    assert len(twice.notes) == 1 and str(twice).count("not looked into") == 1

"""release_gradients against the separate step, and what it refuses."""

import functools
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_rows import AS_SHIPPED
from communication import large, sent_by
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS
from slow_cases import mostly_slow
from steps import by_update

import optax_mp

LAYERS, WIDTH = 4, 6
SCAN = optax_mp.scan_layers


def layers_of(dtype=jnp.float32, count=LAYERS):
    keys = jax.random.split(jax.random.key(0), 2)
    kernel = jax.random.normal(keys[0], (count, WIDTH, WIDTH)) * 0.3
    bias = jax.random.normal(keys[1], (count, WIDTH)) * 0.1
    return {"kernel": kernel.astype(dtype), "bias": bias.astype(dtype)}


def rest_of():
    return {"in": jnp.eye(WIDTH) + 0.1, "gain": jnp.float32(0.7)}


def batches(count=3):
    return jax.random.normal(jax.random.key(2), (count, 5, WIDTH))


def dense(x, w):
    return x + jnp.tanh(x @ w["kernel"].astype(x.dtype) + w["bias"].astype(x.dtype))


def loss(layers, rest, x):
    """A loss whose block closes over another param, and returns an output."""

    @jax.checkpoint
    def block(x, w):
        return dense(x, w) * rest["gain"], jnp.abs(x).mean()

    x, sizes = SCAN(block, x @ rest["in"], layers)
    return jnp.mean(x**2) + 0.1 * sizes.sum()


def separately(fun, tx, *, in_turn=True, max_norm=None, **settings):
    """Return what `release_gradients` does, with the gradients of all layers.

    The step is `tx.update` of each layer in turn, or once of the stacked arrays.
    """

    def step(of_layer):
        grads, opt_state, layer = of_layer
        updates, opt_state = tx.update(grads, opt_state, layer)
        return optax.apply_updates(layer, updates), opt_state

    def run(opt_state, layers, rest, *args):
        value, grads = optax_mp.value_and_grad(fun, (0, 1), **settings)(
            opt_state, layers, rest, *args
        )
        if max_norm is not None:
            grads, _ = optax.clip_by_global_norm(max_norm).update(grads, None)
        stepped = grads[0], opt_state, layers
        return value, grads[1], *(lax.map(step, stepped) if in_turn else step(stepped))

    return run


def train(function, opt_state, layers, rest, inputs=None):
    """Return what the jitted function returns in its last of some steps."""
    for x in batches() if inputs is None else inputs:
        result = function(opt_state, layers, rest, x)
        opt_state, layers = result[3], result[2]
    return result


def assert_same(a, b, exact=True):
    def check(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            # Sums in another order, a product and a sum rounded once or twice.
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)

    jax.tree.map(check, a, b)


def assert_moved(new, old):
    """Every array of every layer must move: a rule that is dropped raises nothing."""
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        axes = tuple(range(1, a.ndim))
        assert np.all(np.any(np.asarray(a != b), axis=axes))


def check(tx, fun=loss, layers=None, exact=True, in_turn=True, inputs=None, **settings):
    """Compare with the separate step; layers and their state bit by bit if `exact`."""
    layers = layers_of() if layers is None else layers
    args = layers, rest_of(), inputs
    released = jax.jit(optax_mp.release_gradients(fun, tx, **settings))
    released = train(released, jax.vmap(tx.init)(layers), *args)
    settings.pop("by_layer", None)
    opt_state = (jax.vmap(tx.init) if in_turn else tx.init)(layers)
    other = jax.jit(separately(fun, tx, in_turn=in_turn, **settings))
    expected = train(other, opt_state, *args)
    # XLA may fuse the sums of these otherwise.
    assert_same(released[:2], expected[:2], exact=False)
    assert_same(released[2], expected[2], exact)
    if in_turn:
        assert_same(released[3], expected[3], exact)
    assert_moved(released[2], layers)


# Optimizers

# They compute something over all arrays: refused, with the function that does.
COUPLED = {
    "dadapt_adamw": "dadapt_adamw",
    "dog": "scale_by_dog",
    "dowg": "scale_by_dowg",
    "dpsgd": "differentially_private_aggregate",
    "lbfgs": "scale_by_lbfgs",
    "mechanize": "mechanize",
    "prodigy": "prodigy",
    "sam": "normalize",
}
# They want the loss.
WANTING_MORE = {"polyak_sgd", "momo", "momo_adam", "sophia"}
# They compute something over each array: over those of a layer, as without a stack.
PER_ARRAY = {
    "adafactor", "fromage", "galore", "lamb", "lars", "muon", "noisy_sgd", "novograd",
    "sm3",
}  # fmt: skip
# XLA fuses their steps with the derivatives, and contracts other operations.
CONTRACTED = {
    "madgrad", "muon", "nadam", "nadamw", "optimistic_adam", "optimistic_adam_v2",
}  # fmt: skip


@mostly_slow("name", OPTIMIZERS, {"prodigy", "sophia"}.__contains__)
def test_every_optimizer_takes_the_separate_step_or_is_refused(name):
    tx = OPTIMIZERS[name]()
    if name in COUPLED:
        refuse(rf"\['bias'\] and \['kernel'\], in {COUPLED[name]} \(", tx)
    elif name in WANTING_MORE:
        refuse("fails for one layer; take a separate step", tx)
    else:
        is_elementwise = name not in PER_ARRAY
        # Sums over an array may be taken in another order.
        exact = is_elementwise and name not in CONTRACTED
        check(tx, exact=exact, in_turn=not is_elementwise)


CLIP = optax.clip_by_global_norm(0.01)
DECAYED = optax.adamw(
    1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p), weight_decay=0.1
)
OTHERS = {
    "a mask": DECAYED,
    "a frozen array": optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"kernel": "a", "bias": "b"}
    ),
    "block RMS, injected": optax.chain(
        optax.clip_by_block_rms(0.01),
        optax.inject_hyperparams(optax.adamw)(
            learning_rate=optax.linear_schedule(0.1, 0.0, 5)
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_parts_of_optimizers_take_the_separate_step(name):
    check(OTHERS[name])


def test_a_norm_of_each_layer_is_an_explicit_choice():
    # The newest XLA sums a norm in another order.
    tx = optax.chain(CLIP, OTHERS["block RMS, injected"])
    check(tx, exact=False, by_layer=True)


# What else a model has


def with_a_mixed_carry(layers, rest, x):
    def block(carry, inputs):
        x, aux, count, key = carry
        w, own = inputs
        key, other = jax.random.split(key)
        kept = jax.random.bernoulli(own, 0.5, x.shape)
        x = jnp.where(kept, dense(x, w), x) + jax.random.normal(other, x.shape)
        return (x, aux + jnp.abs(x).mean(), count + 1, key), count

    keys = jax.random.split(jax.random.key(5), LAYERS)
    carry = x @ rest["in"], 0.0, 0, jax.random.key(1)
    (x, aux, count, _), counts = SCAN(block, carry, (layers, keys))
    return jnp.mean(x**2) * rest["gain"] + aux / count + counts.sum()


def in_reverse_with_slices_of_rest(layers, rest, x):
    policy = jax.checkpoint_policies.dots_saveable

    @functools.partial(jax.checkpoint, policy=policy)
    def block(x, inputs):
        return dense(x, inputs["w"]) * inputs["scale"], x

    inputs = {"w": layers, "scale": jnp.arange(1.0, LAYERS + 1) * rest["gain"]}
    x, _ = SCAN(block, x @ rest["in"], inputs, reverse=True, unroll=2)
    return jnp.mean(x**2)


@pytest.mark.slow
@pytest.mark.parametrize("fun", [with_a_mixed_carry, in_reverse_with_slices_of_rest])
def test_models_take_the_separate_step(fun):
    # XLA multiplies and adds in one in some programs of two unrolled layers only.
    check(optax.adam(1e-2), fun, exact=fun is with_a_mixed_carry)


EXPERTS, LENGTH = 2, 5
POSITIONS = np.arange(LENGTH)  # captured from outside of the loss


class Box(eqx.Module):
    value: jax.Array


@jax.jit
@jax.checkpoint
def decoder(layers, rest, x):
    """A causal decoder: rotary positions, padding, dropout, and one expert a token.

    The block closes over a trace that ends before the backward pass. Its layers are
    tied: attention and experts read the same.
    """
    tokens, key = jnp.argmax(x, -1), jax.random.key(3)
    is_word = tokens != 0
    mask = (POSITIONS[:, None] >= POSITIONS) & is_word
    angles = jnp.cumsum(is_word)[:, None] / 10.0 ** jnp.arange(WIDTH // 2)
    cos, sin = Box(jnp.cos(angles)), jnp.sin(angles)

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        cosine = cos.value
        return jnp.concatenate([a * cosine - b * sin, b * cosine + a * sin], -1)

    @jax.checkpoint
    def block(carry, inputs):
        x, used = carry
        tied, depth = inputs
        w, experts = tied["attention"], tied["mlp"]["experts"]
        q, k = rotated(x @ w["kernel"]), rotated(x + w["bias"])
        scores = jnp.where(mask, q @ k.T, -1e9)
        x = x + rest["gain"] * jax.nn.softmax(scores) @ x
        expert = jnp.argmax(x @ rest["in"][:, :EXPERTS], -1)
        x = x + jnp.einsum("td,tde->te", x @ tied["mlp"]["kernel"], experts[expert])
        kept = jax.random.bernoulli(jax.random.fold_in(key, depth), 0.8, x.shape)
        return (jnp.where(kept, x, 0), used.at[expert].add(1)), expert

    carry = rest["in"][tokens], jnp.zeros(EXPERTS, jnp.int32)
    tied = {"attention": layers, "mlp": layers}
    (x, used), chosen = SCAN(block, carry, (tied, jnp.arange(LAYERS)))
    return jnp.mean(jnp.where(is_word[:, None], x, 0) ** 2), (used, chosen)


def test_a_decoder_with_experts_takes_the_separate_step():
    experts = jax.random.normal(KEY, (LAYERS, EXPERTS, WIDTH, WIDTH)) * 0.3
    layers = layers_of() | {"experts": experts}
    check(optax.adam(1e-2), decoder, layers, exact=False, has_aux=True)


KEY, ONES = jax.random.key(7), jnp.ones((5, WIDTH))


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, key):
            return x + self.dropout(self.linear(x), rngs=nnx.Rngs(dropout=key))

    made = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(nnx.Rngs(0))
    layer, layers = nnx.split(made)
    return layers, lambda w, x, key: nnx.merge(layer, w)(x, key)


@pytest.mark.slow
def test_modules_with_dropout_take_the_separate_step():
    layers, layer = nnx_model()

    def fun(layers, rest, x):
        @jax.checkpoint
        def block(carry, w):
            x, key = carry
            key, own = jax.random.split(key)
            return (layer(w, x, own), key), None

        return jnp.mean(SCAN(block, (x @ rest["in"], KEY), layers)[0][0] ** 2)

    check(optax.adam(1e-2), fun, layers, inputs=batches()[:1])


@pytest.mark.slow
def test_a_layer_may_scan_layers_of_its_own():
    def fun(layers, rest, x):
        def block(x, w):
            return lax.scan(lambda x, w: (dense(x, w), None), x, w)

        return jnp.mean(SCAN(block, x @ rest["in"], layers)[0] ** 2) * rest["gain"]

    pairs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), layers_of())
    check(optax.adam(1e-2), fun, pairs)


def test_integers_among_the_layers_stay():
    def fun(layers, rest, x):
        def block(x, w):
            return dense(x, w) * w["number"], None

        return jnp.mean(SCAN(block, x @ rest["in"], layers)[0] ** 2)

    layers = layers_of() | {"number": jnp.arange(1, LAYERS + 1)}
    tx = optax_mp.mixed_precision(optax.adam(1e-2))
    step = jax.jit(optax_mp.release_gradients(fun, tx, max_norm=1.0))
    new = step(jax.vmap(tx.init)(layers), layers, rest_of(), batches()[0])[2]
    assert_same(new.pop("number"), layers["number"])
    assert_moved(new, {name: layers[name] for name in new})
    # Plain optimizers want a gradient of each array, or change the tree of their state.
    for plain in (optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)):
        for tx in (plain, optax.apply_if_finite(plain, 5)):
            words = r"passes over params without .*\['number'\] is int32\[4\]; pass int"
            refuse(words, tx, fun, layers)


# Clipping, and skipped steps


def two_stacks(layers, rest, x):
    x, _ = SCAN(lambda x, w: (dense(x, w), None), x @ rest["in"], layers["encoder"])
    x, _ = SCAN(lambda x, w: (dense(x, w), None), x, layers["decoder"])
    return jnp.mean(x**2) * rest["gain"]


@mostly_slow("max_norm", [None, 0.1, 1e3], {0.1}.__contains__)
def test_two_stacks_have_two_optimizers_and_one_norm(max_norm):
    txs = {"encoder": optax.sgd(1.0), "decoder": optax.sgd(0.1, momentum=0.9)}
    layers = {"encoder": layers_of(), "decoder": layers_of()}
    state = {name: jax.vmap(txs[name].init)(layers[name]) for name in txs}
    step = optax_mp.release_gradients(two_stacks, txs, max_norm=max_norm)
    released = train(jax.jit(step), state, layers, rest_of(), batches()[:1])
    apart = optax.partition(txs, {name: name for name in txs})
    state = jax.vmap(apart.init)(layers)
    step = separately(two_stacks, apart, max_norm=max_norm)
    expected = train(jax.jit(step), state, layers, rest_of(), batches()[:1])
    for a, b in zip(*map(jax.tree.leaves, (released[1], expected[1])), strict=True):
        # The factor of a norm, which is summed in another order.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    assert_same(released[:3], expected[:3], exact=False)
    assert_moved(released[2], layers)


def with_a_bad_layer(layers, rest, inputs):
    """The gradient of a layer is infinite where `ruins`; its outputs are finite."""
    x, ruins = inputs

    def block(x, of_layer):
        w, ruin = of_layer
        # The root of 0 has an infinite derivative.
        zero = w["bias"] - lax.stop_gradient(w["bias"])
        root = jnp.sqrt(jnp.where(ruin, zero, 1)).sum()
        return dense(x, w) * rest["gain"], root.astype(jnp.float32)

    x, roots = SCAN(block, (x @ rest["in"]).astype(x.dtype), (layers, ruins))
    return jnp.mean(x.astype(jnp.float32) ** 2) + 1e-3 * roots.sum()


# What is around the optimizer of the layers, and then around that of `rest`.
SAME, SCALED = (
    (lambda tx: tx),
    functools.partial(optax_mp.dynamic_loss_scale, init_scale=2.0**20),
)
SKIPPING = {
    "float16": (optax_mp.mixed_precision, SCALED),
    "float32": (SAME, SCALED),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 5), SAME),
}


@mostly_slow("name", SKIPPING, "apply_if_finite".__eq__)
def test_an_overflow_in_one_layer_skips_the_step_of_all(name):
    """The wrapped optimizer takes the same steps on all arrays at once, and clips."""
    dtype = "float16" if name == "float16" else "float32"
    (wrap, scale), sgd = SKIPPING[name], optax.sgd(0.1, momentum=0.9)
    tx = wrap(sgd)
    whole = scale(wrap(optax.chain(optax.clip_by_global_norm(1.0), sgd)))
    tx_of_rest = scale(tx)

    @jax.jit
    def release(state, layers, rest_and_state, inputs):
        rest, of_rest = rest_and_state
        step = optax_mp.release_gradients(with_a_bad_layer, tx, max_norm=1.0)
        _, grads, *new = step(state, layers, rest, inputs, rest_state=of_rest)
        return new, by_update(tx_of_rest)(rest, of_rest, grads)

    @jax.jit
    def separate(state, params, inputs):
        gradients = optax_mp.value_and_grad(lambda p, x: with_a_bad_layer(*p, x))
        value, grads = gradients(state, params, inputs)
        return by_update(whole)(params, state, grads)

    params = optax_mp.cast_floating((layers_of(), rest_of()), dtype)
    (layers, rest), other, moves = params, whole.init(params), 0
    state, of_rest = jax.vmap(tx.init)(layers), tx_of_rest.init(rest)
    for x, bad in zip(batches(6).astype(dtype), [-1, -1, -1, -1, 2, -1], strict=True):
        before, inputs = (layers, rest), (x, jnp.arange(LAYERS) == bad)
        (layers, state), (rest, of_rest) = release(
            state, layers, (rest, of_rest), inputs
        )
        params, other = separate(other, params, inputs)
        pairs = zip(*map(jax.tree.leaves, (before, (layers, rest))), strict=True)
        same = {np.array_equal(a, b) for a, b in pairs}
        assert len(same) == 1 and (same == {True} or bad < 0)
        moves += same == {False}
        verdicts = (state if scale is SAME else of_rest).last_finite
        assert np.all(verdicts == other.last_finite)
        for a, b in zip(*map(jax.tree.leaves, (params, (layers, rest))), strict=True):
            # Two units of float16, one for a param and one for its gradient.
            np.testing.assert_allclose(a, b, rtol=2e-3 if dtype == "float16" else 1e-5)
    assert moves < 5 if dtype == "float16" else moves == 5
    assert optax_mp.loss_scale(of_rest) == optax_mp.loss_scale(other)


def with_bad_parts(layers, rest, inputs):
    """Two stacks; the loss is NaN, or the gradient of one layer or of `rest` infinite."""
    x, ruins, is_nan, ruins_rest = inputs
    zero = rest["gain"] - lax.stop_gradient(rest["gain"])
    value = jnp.sqrt(jnp.where(ruins_rest, zero, 1.0))
    for name, ruined in (("encoder", ruins), ("decoder", ruins & False)):
        value += with_a_bad_layer(layers[name], rest, (x, ruined))
    return jnp.where(is_nan, jnp.nan, 1.0) * value


# For each step: the loss is NaN, the gradient of a layer is not finite, or of `rest`.
BAD = {2: "loss", 3: "loss", 5: "layer", 8: "rest", 9: "loss", 13: "layer", 14: "rest"}


@mostly_slow("passes_value", [True, False], {True}.__contains__)
def test_a_step_has_one_loss_scale_and_one_verdict(passes_value):
    """Of 20 steps each is that of one loss scale around all params, or is skipped."""
    scaled = functools.partial(
        optax_mp.dynamic_loss_scale, init_scale=2.0**14, growth_interval=4
    )
    sgd, adam = optax.sgd(1e-3, momentum=0.9), optax.adam(1e-2)
    txs, tx_of_rest = {"encoder": sgd, "decoder": adam}, scaled(sgd)
    labels = {"encoder": "sgd", "decoder": "adam"}, "sgd"
    whole = scaled(optax.partition({"sgd": sgd, "adam": adam}, labels))

    def known(value):
        return {"value": value} if passes_value else {}

    @jax.jit
    def release(layers, states, rest, of_rest, inputs):
        step = optax_mp.release_gradients(with_bad_parts, txs)
        args = states, layers, rest, inputs
        value, grads, layers, states = step(*args, rest_state=of_rest)
        updates, of_rest = tx_of_rest.update(grads, of_rest, rest, **known(value))
        return layers, states, optax.apply_updates(rest, updates), of_rest

    @jax.jit
    def separate(params, state, inputs):
        gradients = optax_mp.value_and_grad(lambda p, x: with_bad_parts(*p, x))
        value, grads = gradients(state, params, inputs)
        updates, state = whole.update(grads, state, params, **known(value))
        return optax.apply_updates(params, updates), state

    layers = {"encoder": layers_of(), "decoder": layers_of()}
    states = {name: jax.vmap(txs[name].init)(layers[name]) for name in txs}
    run = layers, states, rest_of(), tx_of_rest.init(rest_of())
    params, state = (layers, rest_of()), whole.init((layers, rest_of()))
    scales = set()
    for i, x in enumerate(batches(20)):
        bad, before = BAD.get(i), run
        ruins = jnp.arange(LAYERS) == (2 if bad == "layer" else -1)
        inputs = x, ruins, bad == "loss", bad == "rest"
        run, (params, state) = release(*run, inputs), separate(params, state, inputs)
        assert_same((run[0], run[2]), params, exact=False)
        for name in ("scale", "finite_count", "hysteresis_left", "total_skipped_count"):
            assert getattr(run[3], name) == getattr(state, name)
        if bad:
            assert_same(
                (*run[:3], run[3].inner_state), (*before[:3], before[3].inner_state)
            )
        else:
            assert_moved(run[0], before[0])
        scales.add(float(run[3].scale))
    assert len(scales) > 2


def test_two_passes_take_float32_under_x64(x64):
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    args = optax_mp.cast_floating((layers_of(), rest_of(), batches()[0]), "float32")
    step = optax_mp.release_gradients(loss, tx, max_norm=1.0)
    found = jax.eval_shape(step, jax.vmap(tx.init)(args[0]), *args)
    assert {x.dtype.name for x in jax.tree.leaves(found[:3])} == {"float32"}


# Many devices, and the host


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


WIDE = {"kernel": P(None, "data"), "bias": P(None, "data")}


def wide(mesh):
    """Return layers over eight devices, other params, and a batch."""
    keys = jax.random.split(jax.random.key(0), 2)
    kernel = jax.random.normal(keys[0], (LAYERS, 64, 64)) * 0.1
    layers = {"kernel": kernel, "bias": jnp.zeros((LAYERS, 64))}
    layers = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), layers, WIDE
    )
    rest = jax.device_put(
        {"in": jnp.eye(64), "gain": jnp.float32(0.7)}, NamedSharding(mesh, P())
    )
    x = jax.random.normal(keys[1], (16, 64))
    return layers, rest, jax.device_put(x, NamedSharding(mesh, P("data")))


@mostly_slow("knows_shardings", [False, True], {True}.__contains__)
def test_sharded_layers_send_what_a_separate_step_sends(mesh, knows_shardings):
    layers, rest, x = wide(mesh)
    tx = optax.sgd(0.1, momentum=0.9)
    of_layers = jax.tree.map(lambda x: x.sharding, layers)
    stacked = tx._replace(init=jax.vmap(tx.init))
    of_state = optax_mp.state_shardings(stacked, layers, of_layers)
    opt_state = jax.jit(stacked.init, out_shardings=of_state)(layers)
    results, counts = [], []
    known = of_layers if knows_shardings else None
    release = optax_mp.release_gradients(loss, tx, param_shardings=known)
    for step in (release, separately(loss, tx, in_turn=False)):
        jitted = jax.jit(step, out_shardings=(None, None, of_layers, of_state))
        compiled = jitted.lower(opt_state, layers, rest, x).compile()
        results.append(compiled(opt_state, layers, rest, x))
        counts.append(len(large(sent_by(compiled))))
    assert counts[0] <= counts[1]
    assert_same(*results, exact=False)
    assert_moved(results[0][2], layers)


def test_ranks_of_shard_map_share_their_gradients(mesh):
    layers, rest, x = jax.device_get(wide(mesh))
    tx, max_norm = optax.sgd(0.1, momentum=0.9), 0.1
    opt_state = jax.vmap(tx.init)(layers)

    def mean_loss(*args):
        return lax.pmean(loss(*args), "data")

    step = jax.shard_map(
        optax_mp.release_gradients(mean_loss, tx, max_norm=max_norm),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data")),
        out_specs=P(),
    )
    released = jax.jit(step)(opt_state, layers, rest, x)
    separate = separately(loss, tx, max_norm=max_norm)
    expected = jax.jit(separate)(opt_state, layers, rest, x)
    assert_same(released, expected, exact=False)


def test_ranks_of_shard_map_have_one_loss_scale(mesh):
    """The infinite gradient is of one rank's examples; all ranks skip the step."""
    layers, rest, x = jax.device_get(wide(mesh))
    sgd = optax.sgd(0.1, momentum=0.9)
    tx_of_rest = optax_mp.dynamic_loss_scale(sgd)
    opt_state, of_rest = jax.vmap(sgd.init)(layers), tx_of_rest.init(rest)

    def mean_loss(*args):
        return lax.pmean(loss(*args), "data")

    def step(opt_state, layers, rest, of_rest, x):
        release = optax_mp.release_gradients(mean_loss, sgd, max_norm=0.1)
        value, grads, layers, opt_state = release(
            opt_state, layers, rest, x, rest_state=of_rest
        )
        updates, of_rest = tx_of_rest.update(grads, of_rest, rest, value=value)
        return opt_state, layers, optax.apply_updates(rest, updates), of_rest

    ranks = jax.shard_map(
        step, mesh=mesh, in_specs=(*[P()] * 4, P("data")), out_specs=P()
    )
    old = opt_state, layers, rest, of_rest
    skipped = jax.jit(ranks)(*old, jnp.asarray(x).at[3].set(jnp.inf))
    assert_same(skipped[:3], old[:3])
    new = jax.jit(ranks)(*old, x)
    separate = jax.jit(separately(loss, sgd, max_norm=0.1))
    _, grads, *expected = separate(opt_state, layers, rest, x)
    expected += [optax.apply_updates(rest, sgd.update(grads, sgd.init(rest))[0])]
    assert_same((new[1], new[0], new[2]), tuple(expected), exact=False)


def own_steps(mesh):
    """Return steps of ranks whose types do not say that their gradients differ."""
    tx = optax.sgd(0.1)
    layers, x = layers_of(), jax.random.normal(KEY, (8, 5, WIDTH))
    args = jax.vmap(tx.init)(layers), layers, rest_of()

    def step(x):
        mean_loss = lambda *args: lax.pmean(loss(*args), "data")  # noqa: E731
        return optax_mp.release_gradients(mean_loss, tx)(*args, x)[2]

    ranks = jax.shard_map(
        lambda x: step(x[0]), mesh=mesh, in_specs=P("data"), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    return {"check_vma=False": (ranks, x), "pmap": (jax.pmap(step, "data"), x)}


@pytest.mark.parametrize("name", ["check_vma=False", "pmap"])
def test_ranks_that_would_step_by_their_own_gradients_are_refused(mesh, name):
    step, x = own_steps(mesh)[name]
    words = "the axis 'data' of .*check_vma=False.*jax.pmap.*use .*check_vma=True"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(step, x)


def test_zero1_keeps_a_part_of_the_state_on_each_device(mesh):
    layers, rest, x = wide(mesh)
    layers = jax.device_put(layers, NamedSharding(mesh, P()))
    inner = optax.sgd(0.1, momentum=0.9)
    tx = optax_mp.zero1(inner, mesh, "data")
    opt_state = jax.jit(jax.vmap(tx.init))(layers)
    released = jax.jit(optax_mp.release_gradients(loss, tx))(opt_state, layers, rest, x)
    assert released[3][0].trace["kernel"].sharding.spec == P(None, "data")
    expected = jax.jit(separately(loss, inner))(opt_state, layers, rest, x)
    assert_same(released, expected, exact=False)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="no memory of the host")
def test_a_state_in_host_memory_stays_there():
    tx, layers, args = optax.adam(0.1), layers_of(), (rest_of(), batches()[0])
    opt_state = jax.vmap(optax_mp.offload(tx, min_size=30).init)(layers)
    separate, release = separately(loss, tx), optax_mp.release_gradients(loss, tx)
    expected = train(jax.jit(separate), jax.vmap(tx.init)(layers), layers, args[0])
    released = train(jax.jit(release), opt_state, layers, args[0])
    assert released[3][0].mu["kernel"].sharding.memory_kind == "pinned_host"
    assert_same(jax.device_get(released[2:]), jax.device_get(expected[2:]))
    refuse(
        "expected `tx` without `offload`, got",
        optax_mp.offload(tx, min_size=30),
        state=opt_state,
    )


# What is refused


def refuse(
    match, tx=None, fun=loss, layers=None, state=None, error=ValueError, **settings
):
    tx = optax.sgd(0.1, momentum=0.9) if tx is None else tx
    layers = layers_of() if layers is None else layers
    state = jax.vmap(tx.init)(layers) if state is None else state
    step = optax_mp.release_gradients(fun, tx, **settings)
    with pytest.raises(error, match=match):
        jax.eval_shape(step, state, layers, rest_of(), batches()[0])


CLIPPED = optax.chain(CLIP, optax.adamw(1e-3))
REFUSED = {
    "in clip_by_global_norm .*; clip with .*max_norm": CLIPPED,
    "in clip_by_global_norm": optax.apply_if_finite(CLIPPED, 3),
    "steps of all params or of none": optax.masked(
        optax.apply_if_finite(CLIP, 5), {"kernel": True, "bias": False}
    ),
    "without a loss scale, got one .*`rest` alone": (
        optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    ),
    "got one in `opt_state`": optax.chain(
        optax_mp.static_loss_scale(scale=8.0), optax_mp.mixed_precision(optax.sgd(0.1))
    ),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "several params.* in monitor": optax.chain(
        optax.monitor({"norm": optax.tree.norm}), optax.adam(0.1)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_named(words):
    refuse(words, REFUSED[words])


def test_a_norm_that_reaches_the_update_by_the_state_is_found():
    """Clipping by the last step's norm within one state, which is a layer's own."""

    def update(updates, state, params=None):
        return optax.tree.scale(1 / state, updates), optax.tree.norm(updates)

    tx = optax.GradientTransformation(lambda params: jnp.ones(()), update)
    refuse(r"in .*update", tx)


def stopped(layers, rest, x):
    return lax.stop_gradient(loss(layers, rest, x)) * rest["gain"]


def twice(layers, rest, x):
    return loss(layers, rest, x) + loss(layers, rest, 2 * x)


def stopped_before(layers, rest, x):
    return loss(lax.stop_gradient(layers), rest, x)


def cast_before(layers, rest, x):
    return loss(optax_mp.cast_floating(layers, jnp.bfloat16), rest, x)


def regularized(layers, rest, x):
    """Its leaves are weights and the state: their cotangents are no gradients."""
    return loss(layers, rest, x) + optax.tree.norm(layers)


def regularized_under_jit(layers, rest, x):
    return loss(layers, rest, x) + lax.stop_gradient(jax.jit(optax.tree.norm)(layers))


def never(layers, rest, x):
    return rest["gain"] ** 2


def in_micro_batches(layers, rest, x):
    return lax.map(lambda x: loss(layers, rest, x[None]), x).mean()


def in_a_branch(layers, rest, x):
    return lax.cond(x.sum() > 0, lambda: loss(layers, rest, x), lambda: 0.0)


def in_vmap(layers, rest, x):
    return jax.vmap(lambda x: loss(layers, rest, x))(x).mean()


def changed_in_one_place(layers, rest, x):
    changed = jax.tree.map(lambda x: x * 2, layers)
    block = lambda x, ws: (dense(dense(x, ws[0]), ws[1]), None)  # noqa: E731
    return jnp.mean(SCAN(block, x, (layers, changed))[0])


@pytest.mark.parametrize(
    ("fun", "match"),
    [
        (stopped, "does not depend on the layers .* remove `jax.lax.stop_grad"),
        (twice, "scans them 2 times; .* reuse them in its block"),
        (never, "scans them 0 times"),
        (stopped_before, "reads or changes them outside"),
        (cast_before, "changes them outside of it; cast, regularize"),
        (regularized, "reads or changes them outside"),
        (regularized_under_jit, "reads or changes them outside"),
        (in_micro_batches, "scans them 5 times"),
        (in_a_branch, "scans them several times"),
        (in_vmap, "scan_layers: .* within `jax.vmap`"),
        (changed_in_one_place, "got two versions of them"),
    ],
)
def test_weights_that_would_stand_still_or_move_twice_are_an_error(fun, match):
    refuse(match, fun=fun)


def with_norm(layers, rest, x):
    return loss(layers, rest, x), optax.tree.norm(layers)


ADAM = optax.adam(0.1)
UNFIT = {
    "reads or changes them outside": {"fun": with_norm, "has_aux": True},
    "leading axes of 0": {"layers": layers_of(count=0)},
    "with no arrays": {"layers": {}, "state": optax.sgd(0.1, momentum=0.9).init({})},
    r"\['i'\] in 8 bits or more, got int4\[4,2\]": {
        "layers": layers_of() | {"i": jnp.zeros((LAYERS, 2), jnp.int4)}
    },
    r"at \['kernel'\] to be .* of 3 layers, got float32\[4,6,6\]": {
        "layers": layers_of() | {"bias": jnp.zeros((3, WIDTH))}, "state": (),
    },
    r"`opt_state` at \[0\].count to be .* of 4 layers, got int32\[\]; pass": {
        "tx": ADAM, "state": ADAM.init(layers_of()),
    },
    # Its last part would serve two layers.
    r"at \[0\].count to be .* of 4 layers, got int32\[3\]": {
        "tx": ADAM, "state": jax.vmap(ADAM.init)(layers_of(count=3)),
    },
}  # fmt: skip


@pytest.mark.parametrize("words", UNFIT)
def test_what_does_not_fit_is_named(words):
    refuse(words, **UNFIT[words])


def with_lax_scan(layers, rest, x):
    return lax.scan(lambda x, w: (dense(x, w), None), x, layers)[0].mean()


def with_a_norm(layers, rest, x):
    return loss(layers, rest, x) + jnp.sum(layers["kernel"] ** 2)


@pytest.mark.parametrize("fun", [with_lax_scan, with_a_norm])
def test_layers_that_are_read_without_scan_layers_are_refused(fun):
    words = "use `optax_mp.scan_layers` in place of `jax.lax.scan`"
    refuse(words, fun=fun, error=TypeError)


def test_optimizers_for_other_trees_are_refused():
    sgd, state = optax.sgd(0.1), (optax.EmptyState(),) * 2
    step = optax_mp.release_gradients(loss, {"kernel": sgd, "head": sgd})
    with pytest.raises(ValueError, match="each of the 2 optimizers .*optax.partition"):
        step({"kernel": state, "head": state}, layers_of(), rest_of(), batches()[0])
    for nothing in (None, {}):
        with pytest.raises(TypeError, match="expected `tx` to be .* got (None|{})"):
            optax_mp.release_gradients(loss, nothing)
    with pytest.raises(ValueError, match="`max_norm` to be a positive number, got 0"):
        optax_mp.release_gradients(loss, sgd, max_norm=0)
    layers = layers_of()
    tx = optax.apply_if_finite(sgd, 5)
    step = optax_mp.release_gradients(two_stacks, {"encoder": tx, "decoder": sgd})
    states = {"encoder": jax.vmap(tx.init)(layers), "decoder": state}
    both = {"encoder": layers, "decoder": layers}
    with pytest.raises(ValueError, match="skip steps .* or none, .* 1 of 2 that do"):
        step(states, both, rest_of(), batches()[0])


def test_a_loss_scale_that_nothing_moves_is_refused():
    sgd, layers = optax.sgd(0.1), layers_of()
    state, scaled = jax.vmap(sgd.init)(layers), optax_mp.dynamic_loss_scale(sgd)
    step = optax_mp.release_gradients(loss, sgd)
    with pytest.raises(ValueError, match="expected weights in `rest`, by whose .*dict"):
        step(state, layers, {}, batches()[0], rest_state=scaled.init({}))
    two = scaled.init(rest_of()["in"]), scaled.init(rest_of()["gain"])
    with pytest.raises(ValueError, match="`rest_state`: expected one loss .* got 2"):
        step(state, layers, rest_of(), batches()[0], rest_state=two)


@pytest.mark.parametrize("around", [SAME, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_optimizers_look_for_no_mark(around, after_a_link):
    """A search for the mark of a link would join the gradients of all arrays."""
    tx = around(optax_mp.mixed_precision(optax.adam(1e-2)))
    layers = layers_of(jnp.bfloat16)
    step = optax_mp.release_gradients(loss, tx)
    new = jax.jit(step)(jax.vmap(tx.init)(layers), layers, rest_of(), batches()[0])[2]
    assert_moved(new, layers)


def test_float16_warns_that_there_is_no_loss_scale():
    tx = optax_mp.mixed_precision(optax.sgd(0.1))
    layers = jax.eval_shape(lambda: layers_of(jnp.float16))
    args = jax.eval_shape(jax.vmap(tx.init), layers), layers, rest_of(), batches()[0]
    with (
        pytest.warns(optax_mp.MixedPrecisionWarning, match="put `optax_mp.dynamic_l"),
        pytest.raises(ValueError, match="scans them 0 times"),
    ):
        jax.eval_shape(optax_mp.release_gradients(never, tx), *args)


def test_no_optimizer_is_a_type_error():
    with pytest.raises(TypeError, match="`tx` to be an optax gradient transf"):
        optax_mp.release_gradients(loss, optax.adam)


def test_arrays_alone_are_scanned_by_lax():
    layers, x = layers_of(), batches()[0]
    block = functools.partial(lambda x, w: (dense(x, w), None))
    assert_same(SCAN(block, x, layers), lax.scan(block, x, layers))


@pytest.mark.slow
def test_the_gradients_of_all_layers_never_exist():
    """In programs for accelerators; a CPU copies what loops change."""
    pytest.importorskip("libtpu")
    script = Path(__file__).parents[1] / "support" / "released_for_accelerators.py"
    options = {"capture_output": True, "text": True, "check": True, "env": AS_SHIPPED}
    run = subprocess.run([sys.executable, script], **options)  # noqa: S603
    lines = [line.split() for line in run.stdout.splitlines()]
    shares = {tuple(words): float(share) for *words, share in lines if len(words) == 3}
    assert len(shares) == 12
    for (target, _, way), share in shares.items():
        # On a GPU, XLA writes some float32 arrays of the size of a layer, one of 16.
        most = 0.11 if target == "v5e" else 0.6
        assert (share > 0.9) if way == "separate" else (share < most)


@pytest.mark.skipif(not hasattr(jax.config, "jax_scan3"), reason="of JAX 0.12")
def test_a_switch_under_which_scans_have_no_gradient_is_refused():
    step = optax_mp.release_gradients(lambda layers, rest: 0.0, optax.sgd(0.1))
    jax.config.update("jax_scan3", True)
    try:
        with pytest.raises(ValueError, match="`jax_scan3` to be off"):
            step(
                jax.vmap(optax.sgd(0.1).init)({"w": jnp.ones(3)}), {"w": jnp.ones(3)}, 1
            )
    finally:
        jax.config.update("jax_scan3", False)

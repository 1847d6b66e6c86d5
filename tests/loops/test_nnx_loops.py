"""Flax NNX: `nnx.Optimizer` under `nnx.jit`, with arrays large enough to be coded."""

import jax
import jax.numpy as jnp
import optax
import pytest
from comparison import as_bits
from forms import tx_of
from recent_flax import recent_nnx
from slow_cases import mostly_slow

import optax_mp

nnx = recent_nnx()
# Of one array for each param, of two, of codes and scales, and with all around them.
STRUCTURES = "masters", "5 bytes", "scaled, MultiSteps around"


class Net(nnx.Module):
    """A layer that has a master, and a norm that has none."""

    def __init__(self, rngs):
        """Make the layers."""
        low = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.layer = nnx.Linear(128, 128, **low)
        self.norm = nnx.RMSNorm(128, rngs=rngs)

    def __call__(self, x):
        """Return one number for each row."""
        return self.norm(self.layer(x)).mean(-1)


X = jax.random.normal(jax.random.key(0), (4, 128), jnp.bfloat16)


def made(form):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx_of(form), wrt=nnx.Param)


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def boxed_arrays(optimizer):
    """Return dtype and shape of each variable, as checkpointers and trainers read."""
    flat = nnx.to_flat_state(nnx.state(optimizer))
    return [(path, v.dtype, v.get_value().shape) for path, v in flat]


@mostly_slow("form", STRUCTURES, lambda form: form == "5 bytes")
def test_a_compiled_step_is_that_of_plain_trees(form):
    model, optimizer = made(form)
    before = boxed_arrays(optimizer)
    steps = nnx.jit(step)
    losses = [float(steps(model, optimizer, X)) for _ in range(4)]
    assert losses[3] < losses[0]
    assert boxed_arrays(optimizer) == before

    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params, tx = nnx.as_pure(params), tx_of(form)

    @jax.jit
    def plain_step(params, state):
        def loss(params):
            return ((nnx.merge(graph, params)(X) - 1) ** 2).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(4):
        params, state = plain_step(params, state)
    found = nnx.as_pure(nnx.state(model, nnx.Param))
    # Two bfloat16 numbers below 1: programs that XLA fuses otherwise round otherwise.
    close = jax.tree.map(
        lambda a, b: bool(jnp.allclose(a, b, rtol=0, atol=2**-7)), found, params
    )
    assert all(jax.tree.leaves(close))
    # Without boxes it is the same state, so that each can be converted and checked.
    pure = nnx.as_pure(optimizer.opt_state)
    assert jax.tree.structure(pure) == jax.tree.structure(
        tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))
    )


def test_what_is_absent_is_absent_with_its_box():
    _, optimizer = made("masters")
    masters = optimizer.opt_state.master_params
    assert masters["norm"]["scale"] == optax.MaskedNode()
    assert masters["layer"]["kernel"].dtype == jnp.float32


def test_codes_and_scales_are_boxed_one_by_one():
    _, optimizer = made("5 bytes")
    nu = optimizer.opt_state.inner_state.inner_state[0].nu["layer"]["kernel"]
    assert type(nu.codes) is type(nu.scales) is nnx.training.optimizer.OptVariable
    assert nu.codes.dtype == jnp.uint8
    assert optax_mp.memory_report(optimizer, Net(nnx.Rngs(0))).by_role()["nu"]


@pytest.mark.parametrize("name", ["out_sharding", "sharding_names"])
def test_scales_have_the_metadata_of_the_param_by_its_names(name):
    # Models of older versions say `sharding_names`, which Flax renames, and warns.
    metadata = nnx.Param(X).get_metadata() | {name: (None, "x")}
    param = nnx.Param.from_metadata(jnp.ones((100, 100), jnp.bfloat16), metadata)
    state = tx_of("5 bytes").init(nnx.State({"w": param}))
    nu = state.inner_state.inner_state[0].nu["w"]
    assert nu.codes.get_metadata() == metadata
    assert nu.scales.get_metadata() == metadata | {name: (None, None)}


@mostly_slow("form", ["masters", "5 bytes"], lambda form: form == "masters")
def test_in_a_branch(form):
    model, optimizer = made(form)

    @nnx.jit
    def maybe(model, optimizer, do):
        def leave(model, optimizer):
            return jnp.zeros(())

        def take(model, optimizer):
            return step(model, optimizer, X)

        return nnx.cond(do, take, leave, model, optimizer)

    before = as_bits(nnx.as_pure(optimizer.opt_state))
    maybe(model, optimizer, jnp.array(False))
    assert as_bits(nnx.as_pure(optimizer.opt_state)) == before
    maybe(model, optimizer, jnp.array(True))
    assert as_bits(nnx.as_pure(optimizer.opt_state)) != before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_model_and_optimizer_in_one():
    both = nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), tx_of("5 bytes"))

    @nnx.jit
    def step(both):
        grads = nnx.grad(lambda m: (m(X) ** 2).mean())(both.model)
        both.update(grads)

    step(both)
    step(both)
    assert int(both.step[...]) == 2

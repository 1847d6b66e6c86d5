"""Functions that take a state, with one that `offload` keeps in host memory."""

import jax
import jax.numpy as jnp
import pytest
from comparison import as_bits
from hosted_steps import (
    ADAMW,
    compact,
    hosted,
    kinds,
    masters,
    needs_memories,
    random_params,
    train,
)
from slow_cases import mostly_slow

import optax_mp

pytestmark = needs_memories


FORMS = {"float32 copies": masters, "compact": compact}
SLOW = pytest.param("compact", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["float32 copies", SLOW])
def run(request):
    """Return the form, params and its state after two steps, on the device and not."""
    inner = FORMS[request.param]()
    params, plain, _ = train(inner, 2, params=few_params())
    places = jax.tree.map(lambda x: x.sharding, hosted(inner).init(params))
    return inner, params, plain, jax.device_put(plain, places)


def few_params():
    return {k: v for k, v in random_params().items() if k in ("matrix", "small")}


def both_ways(function):
    return function, jax.jit(function)


def test_masters_are_brought_to_the_device(run):
    _, params, plain, state = run
    want = optax_mp.master_params(plain, params)
    for read in both_ways(optax_mp.master_params):
        got = read(state, params)
        assert kinds(got) == {"Device"}
        assert as_bits(got) == as_bits(want)


def test_masters_are_replaced_where_they_are(run):
    _, params, plain, state = run
    new = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    want = optax_mp.replace_master_params(plain, params, new)
    for replace in both_ways(optax_mp.replace_master_params):
        got = replace(state, params, new)
        assert as_bits(got) == as_bits(want)
        assert memory_of(got) == memory_of(state)


def memory_of(state):
    return [jax.typeof(x).memory_space for x in jax.tree.leaves(state)]


@mostly_slow("to", FORMS, "float32 copies".__eq__)
def test_a_conversion_puts_each_array_where_the_new_form_has_it(run, to):
    inner, params, plain, state = run
    # What 16-bit updates made may miss its master, and `Split` takes no such param.
    params = jax.tree.map(
        lambda p, master: p if "Split" in str(plain) else master.astype(p.dtype),
        params,
        optax_mp.master_params(plain, params),
    )
    other = FORMS[to]()
    want = optax_mp.convert_opt_state(plain, params, inner, other)
    device, host = memory_of(want), memory_of(hosted(other).init(params))
    for start, from_tx, to_tx, memory in (
        (plain, inner, hosted(other), host),
        (state, hosted(inner), other, device),
    ):
        got = optax_mp.convert_opt_state(start, params, from_tx, to_tx)
        assert as_bits(got) == as_bits(want)
        assert memory_of(got) == memory


def test_metrics_are_those_of_the_same_state_on_the_device():
    tx = optax_mp.dynamic_loss_scale(hosted(masters()))
    params = few_params()
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    _, state = jax.jit(tx.update)(bad, jax.jit(tx.init)(params), params)
    assert kinds(state) == {"Device", "Host"}
    want = optax_mp.metrics(jax.device_get(state))
    for read in both_ways(optax_mp.metrics):
        assert as_bits(read(state)) == as_bits(want)
    assert int(state.total_skipped_count) == 1
    optax_mp.check_loss_scale(state, params=params)


def test_a_report_tells_state_that_was_moved_to_the_device_unnoticed():
    tx, params = hosted(ADAMW), few_params()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.jit(tx.init)(params)
    assert optax_mp.memory_report(state, params).host_bytes > 0
    update = jax.jit(tx.update, out_shardings=(device, device))
    _, state = update(params, state, params)
    # JAX says of them that they are on the host.
    assert kinds(state) == {"Device", "Host"}
    assert optax_mp.memory_report(state, params).host_bytes == 0

"""offload: the same numbers, with the large arrays of the state in host memory."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from comparison import as_bits
from forms import named
from guide import names_of
from hosted_steps import (
    ADAMW,
    HOST,
    UNFUSED,
    assert_same_training,
    hosted,
    kinds,
    masters,
    needs_memories,
    random_grads,
    random_params,
    scaled,
    train,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, extra_arguments
from slow_cases import mostly_slow

import optax_mp

# Those of the table with `offload` inside have all properties; here it is around others,
# and between parts that read what it holds.
AROUND = named("scaled", "scaled, MultiSteps inside", "apply_if_finite")
FORMS = {form.name: lambda off, form=form: off(form.tx) for form in AROUND} | {
    "clipped updates": lambda off: off(
        masters(optax.chain(ADAMW, optax.clip_by_global_norm(1.0)))
    ),
    "after a link": lambda off: optax.chain(
        optax_mp.dynamic_loss_scale(init_scale=4.0), off(masters(ADAMW))
    ),
}
BAD = {1, 2}


@needs_memories
@mostly_slow("name", FORMS, lambda name: name == "scaled")
def test_a_form_trains_as_without(name):
    bad = BAD if "scale" in name or "link" in name or "finite" in name else ()
    got = assert_same_training(FORMS[name], steps=5, bad=bad)
    assert kinds(got[1]) == {"Host", "Device"}


# Factored, rare, random, historical, and evaluating ones; a state with params.
TABLE = "lion", "adafactor", "muon", "noisy_sgd", "lbfgs", "schedule_free", "sophia"


@needs_memories
@mostly_slow("name", TABLE, lambda name: name == "lion")
def test_an_optimizer_trains_as_without(name):
    def form(off):
        return off(masters(OPTIMIZERS[name]()))

    # With all of XLA's passes: without them its products for Muon are wrong.
    options = {} if name == "muon" else UNFUSED
    extra = functools.partial(extra_arguments, name)
    assert_same_training(form, extra=extra, options=options)


@needs_memories
def test_large_arrays_are_in_host_memory_and_stay_there():
    mesh = Mesh(jax.devices()[:1], ("device",))
    params = jax.device_put(random_params(), NamedSharding(mesh, PartitionSpec()))
    tx = hosted(masters(ADAMW))
    state = tx.init(params)

    def check(state):
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            assert (x.sharding.memory_kind == HOST) == (x.size >= 256), path

    check(state)
    want = jax.jit(masters(ADAMW).init)(params)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert as_bits(state) == as_bits(want)
    step = jax.jit(lambda p, s: take(tx, p, s), donate_argnums=(0, 1))
    for _ in range(3):
        before = jax.tree.leaves(state)
        params, state = step(params, state)
        check(state)
        assert all(x.is_deleted() for x in before)
    assert step._cache_size() == 1


def take(tx, params, state):
    updates, state = tx.update(params, state, params)
    return optax.apply_updates(params, updates), state


@needs_memories
def test_the_state_waits_for_the_gradients():
    """XLA would copy it while the activations are on the device."""
    params = random_params()
    tx = hosted(masters(ADAMW))
    closed = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    barrier, *_ = (x for x in closed.eqns if "barrier" in x.primitive.name)
    assert set(closed.jaxpr.invars[: len(params)]) < set(barrier.invars)
    copied = {x.invars[0] for x in closed.eqns if x.primitive.name == "device_put"}
    held = [x for x in barrier.outvars if "host" in str(x.aval)]
    assert held and copied.issuperset(held)


@needs_memories
def test_a_chain_around_it_is_skipped_entirely():
    """It is not told, as others' transformations see no argument of this package."""
    params = random_params("float32")
    inner = optax.chain(optax.clip(1.0), hosted(optax.adam(1e-2)))
    tx = optax_mp.dynamic_loss_scale(inner)
    state = tx.init(params)
    step = jax.jit(tx.update)
    _, skipped = step(random_grads(params, 0, {0}), state, params)
    assert as_bits(skipped.inner_state) == as_bits(state.inner_state)
    _, taken = step(random_grads(params, 0), state, params)
    assert as_bits(taken.inner_state) != as_bits(state.inner_state)


@needs_memories
def test_on_a_mesh_of_one_device_with_explicit_axes():
    tx = hosted(masters(ADAMW))
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Explicit,))
    params = {"matrix": random_params()["matrix"]}
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    got = train(tx, 2, params=placed)
    assert as_bits(got) == as_bits(train(tx, 2, params=params))


def keeping(rule):
    """Return an optimizer whose new state is `rule(state, grads)`, as are its updates.

    Its state begins as ones.
    """

    def update(grads, state, params=None):
        new = rule(state, grads)
        return new, new

    def init(params):
        return jax.tree.map(jnp.ones_like, params)

    return optax.GradientTransformation(init, update)


@needs_memories
def test_a_rule_that_depends_on_one_number_of_another_leaf_gives_the_same():
    def rule(state, grads):
        return jax.tree.map(
            lambda m, g: jnp.where(grads["row"][0] > 0, m + g, 0), state, grads
        )

    assert_same_training(
        lambda off: scaled(off(keeping(rule))),
        params=random_params("float32"),
        bad={0, 2},
    )


@needs_memories
def test_a_checkpoint_is_restored_into_host_memory(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = hosted(masters(ADAMW))
    params = random_params()
    state = tx.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    for made_by, wanted in ((tx, {"Host", "Device"}), (masters(ADAMW), {"Device"})):
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            made_by.init(params),
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", template)
        assert kinds(restored) == wanted
        assert as_bits(restored) == as_bits(state)


@needs_memories
def test_what_is_wrong_is_named(monkeypatch):
    with pytest.raises(ValueError, match="`memory_kind` to be 'pinned_"):
        optax_mp.offload(ADAMW, memory_kind="host")
    with pytest.raises(TypeError, match="`min_size` to be .*, got 1.5"):
        optax_mp.offload(ADAMW, min_size=1.5)
    with pytest.raises(TypeError, match="expected `inner` .*, got a function"):
        optax_mp.offload(optax.adam)
    with pytest.raises(TypeError, match="`params` to be .*, got "):
        hosted(ADAMW).init(ADAMW)
    module = "optax_mp.devices._offload.kinds_of_memory"
    monkeypatch.setattr(module, lambda device: ["device"])
    with pytest.raises(ValueError, match=r"\['matrix'\].*'cpu' backend.*\['device'\]"):
        hosted(ADAMW).init({"matrix": jnp.ones((2, 2))})


def test_before_jax_0_10_the_version_is_named(monkeypatch):
    monkeypatch.setattr("optax_mp.core.jax_api._arrays.KNOWS_MEMORIES", False)
    with pytest.raises(
        RuntimeError, match=r"expected JAX 0.10 or later.*memory_kind=N"
    ):
        optax_mp.offload(ADAMW)
    assert optax_mp.offload(ADAMW, memory_kind=None).init is ADAMW.init


@needs_memories
def test_a_step_outside_of_jit_works_and_warns():
    params = random_params()
    tx = hosted(masters(ADAMW))
    state = tx.init(params)
    with pytest.warns(UserWarning, match="within `jax.jit`, got one outside"):
        updates, new = tx.update(params, state, params)
    plain = masters(ADAMW)
    want = jax.jit(plain.update)(params, plain.init(params), params)
    assert as_bits((updates, new)) == as_bits(want)
    assert kinds(new) == {"Host", "Device"}


@needs_memories
def test_state_that_was_pulled_back_is_brought_to_the_host_with_a_warning():
    params = random_params()
    tx = hosted(masters(ADAMW))
    state = tx.init(params)
    on_device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), state)
    pulled = jax.device_put(state, on_device)
    with pytest.warns(UserWarning, match=r"master_params\['matrix'\] of the state"):
        _, new = jax.jit(tx.update)(params, pulled, params)
    assert kinds(new) == {"Host", "Device"}
    want = jax.jit(masters(ADAMW).update)(params, pulled, params)[1]
    assert as_bits(new) == as_bits(want)
    wrapped = scaled(tx)
    pulled = jax.jit(wrapped.init)(params)._replace(inner_state=pulled)
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    with pytest.warns(UserWarning, match="in device memory"):
        _, kept = jax.jit(wrapped.update)(bad, pulled, params)
    assert as_bits(kept.inner_state) == as_bits(pulled.inner_state)
    assert kinds(kept.inner_state) == {"Host", "Device"}


@needs_memories
@pytest.mark.parametrize(("block", "step"), [("loss_fn", "step"), ("update", "update")])
def test_the_steps_of_the_guide_are_compiled_once(block, step):
    assert names_of("offload.md", block)[step]._cache_size() == 1

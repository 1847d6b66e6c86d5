"""with_average: what NumPy makes of the weights after each step that is taken."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from guide import GUIDE
from hosted_steps import UNFUSED, kinds, needs_memories
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import mostly_slow
from steps import by_update

import optax_mp
from optax_mp.averages import AverageState
from optax_mp.core.trees._states import find_states

SGD = optax.sgd(0.1, momentum=0.9)
COMPACT = optax_mp.mixed_precision(
    optax_mp.low_bit_state(SGD, min_size=32), storage=optax_mp.Split(8)
)
MASTERS = optax_mp.mixed_precision(SGD)
# Products with a half are exact, so that it does not matter what XLA contracts.
averaged = functools.partial(optax_mp.with_average, decay=0.5)
scaled = functools.partial(optax_mp.dynamic_loss_scale, init_scale=4.0)
SHAPES = {"w": (8, 32), "b": (3,), "empty": (0, 3)}


def params_of(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    made = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}
    return made | {"count": jnp.int32(3)}


def gradients(steps, bad=()):
    rng = np.random.default_rng(1)
    made = {k: rng.normal(size=(steps, *s)) for k, s in SHAPES.items()}
    made["w"][list(bad)] = np.nan
    made = {k: x.astype(np.float32) for k, x in made.items()}
    return made | {"count": None}


def each(trees, i):
    return jax.tree.map(lambda x: x[i], trees)


def train(tx, params, grads, state=None):
    """Return params and state after jitted steps, and weights and averages of each."""
    state = jax.jit(tx.init)(params) if state is None else state
    jitted = jax.jit(by_update(tx), donate_argnums=(0, 1), compiler_options=UNFUSED)

    @jax.jit
    def read(state, params):
        readers = optax_mp.master_params, optax_mp.average_params
        return [each_reads(state, params) for each_reads in readers]

    params = jax.tree.map(jnp.copy, params)
    trace = []
    for i in range(1 + len(grads["w"])):
        if i:
            params, state = jitted(params, state, each(grads, i - 1))
        trace.append(jax.tree.map(np.array, read(state, params)))
    return params, state, *zip(*trace, strict=True)


def averages_by_numpy(weights, start=0):
    """Return the average after each of some steps that are all taken."""
    average, half = weights[0], np.float32(0.5)
    made = [average]
    for count, new in enumerate(weights[1:]):
        average = new if count < start else half * new + half * average
        made.append(average)
    return made


def float32_of(trace, name):
    return [np.asarray(x[name], np.float32) for x in trace]


def test_it_is_read_in_float32_and_in_the_dtypes_of_params():
    params, grads = params_of(), gradients(6)
    tx = averaged(optax_mp.stochastic_rounding(SGD))
    new_params, state, weights, averages = train(tx, params, grads)
    assert state.average["count"] == optax.MaskedNode()
    assert int(state.step_count) == 6
    for name in SHAPES:
        want = averages_by_numpy(float32_of(weights, name))
        assert as_bits(float32_of(averages, name)) == as_bits(want), name
    found = optax_mp.average_params(state, new_params)
    assert found["w"].dtype == jnp.float32 and found["count"] == params["count"]
    assert as_bits(found["w"]) == as_bits(state.average["w"])
    cast = optax_mp.average_params(state, new_params, in_param_dtypes=True)
    assert as_bits(cast["w"]) == as_bits(np.asarray(found["w"]).astype(jnp.bfloat16))


def test_it_is_incremental_update():
    tx = optax_mp.with_average(SGD, 0.999)

    def step(carry, grads):
        params, state, want = carry
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state, optax.incremental_update(params, want, 1 - 0.999)), None

    params = {"w": params_of(jnp.float32)["w"]}
    start = params, tx.init(params), params
    run = jax.jit(lambda x: jax.lax.scan(step, x, {"w": gradients(9)["w"]})[0])
    _, state, want = run(start)
    assert as_bits(state.average) == as_bits(want) != as_bits(params)


@pytest.mark.parametrize(
    "decay",
    [0, lambda k: 0.0, lambda k: jnp.zeros(()), lambda k: 0 * k],
    ids=["number", "number by a schedule", "float32", "int32"],
)
def test_at_a_decay_of_0_it_is_the_weights_whatever_it_was(decay):
    tx = optax_mp.with_average(optax.sgd(1.0), decay)
    params = {"w": jnp.array([-0.0, 1e-30, 3.0, jnp.inf])}
    state = tx.init(params)
    spoilt = state._replace(average={"w": jnp.array([1.0, jnp.inf, jnp.nan, 0.0])})
    none = {"w": jnp.zeros(4)}  # from which the learning rate makes -0.0
    for update in (tx.update, jax.jit(tx.update)):
        with jax.numpy_dtype_promotion("strict"):
            _, after = update(none, spoilt, params)
        assert as_bits(after.average) == as_bits(params)


def test_a_schedule_is_given_the_number_of_steps_taken_before():
    """Of k / (k + 1) it makes the mean of the weights after each step."""
    tx = optax_mp.with_average(scaled(SGD), lambda k: k / (k + 1))
    params, grads = {"w": jnp.ones((8, 32))}, {"w": gradients(9, bad=(0, 4))["w"]}
    _, state, weights, averages = train(tx, params, grads)
    found = float32_of(weights, "w")
    taken = [found[i] for i in range(1, 10) if i - 1 not in (0, 4)]
    assert as_bits(averages[1]) == as_bits(averages[0])
    # Two roundings of float32 in each of seven steps, of 2^-24 each.
    np.testing.assert_allclose(averages[-1]["w"], np.mean(taken, 0), rtol=1e-6)
    assert int(state.step_count) == 7


def test_a_schedule_may_copy_the_weights_first():
    tx = optax_mp.with_average(MASTERS, lambda k: jnp.where(k < 3, 0, 0.5))
    params, grads = {"w": params_of()["w"]}, {"w": gradients(6)["w"]}
    *_, weights, averages = train(tx, params, grads)
    want = averages_by_numpy(float32_of(weights, "w"), start=3)
    assert as_bits(float32_of(averages, "w")) == as_bits(want)


def multi_steps(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


# How each is made, and how many of 50 steps it takes. That a loss scale around an average
# skips it is a property of all forms.
FORMS = {
    "inside": (lambda x: averaged(scaled(x)), 40),
    "link": (lambda x: optax.chain(scaled(), averaged(x)), 40),
    "apply_if_finite": (lambda x: averaged(optax.apply_if_finite(x, 9)), 40),
    "MultiSteps": (lambda x: averaged(multi_steps(x)), 25),
    "MultiSteps around": (lambda x: multi_steps(averaged(x)), 25),
    "both": (lambda x: averaged(scaled(multi_steps(x))), 20),
    # It takes the second bad step after another, and all until a good one.
    "gives up": (
        lambda x: averaged(optax.apply_if_finite(optax.chain(optax.zero_nans(), x), 1)),
        44,
    ),
}
BAD = 1, 4, 5, 12, 13, 14, 30, 37, 48, 49


@pytest.mark.parametrize("form", FORMS)
def test_only_steps_that_are_taken_count(form):
    make, taken = FORMS[form]
    tx, params = make(MASTERS), {"w": params_of()["w"]}
    grads = gradients(50, bad=() if form.startswith("Multi") else BAD)["w"]

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)
        weights = optax_mp.master_params(state, params)
        average = optax_mp.average_params(state, params)
        return (params, state), (weights["w"], average["w"])

    start = params, jax.jit(tx.init)(params)
    run = jax.jit(lambda x: jax.lax.scan(step, x, grads), compiler_options=UNFUSED)
    (_, state), made = run(start)
    # Weights change in the steps that are taken, and in no other.
    first = np.asarray(params["w"], np.float32)
    weights, found = ([first, *map(np.asarray, x)] for x in made)
    changed = [0, *(i for i in range(1, 51) if (weights[i] != weights[i - 1]).any())]
    assert len(changed) - 1 == taken
    want = averages_by_numpy([weights[i] for i in changed])
    for i, average in enumerate(found):
        at = max(k for k, step in enumerate(changed) if step <= i)
        assert as_bits(average) == as_bits(want[at])
    ((_, node),) = find_states(state, AverageState)
    assert int(node.step_count) == taken


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize(
    "inner", [optax.sgd(0.5), optax.chain(optax.zero_nans(), optax.adam(0.5))]
)
def test_what_apply_if_finite_takes_in_the_end_counts(inner, is_group):
    """And what it skips does not, although another group of params moves."""
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    bad = {"w": jnp.full(2, jnp.nan), "b": jnp.ones(2)}
    tx = optax.apply_if_finite(inner, 1)
    if is_group:
        groups = {"w": tx, "b": optax.sgd(0.5, momentum=0.9)}
        tx = optax.partition(groups, {"w": "w", "b": "b"})
    tx = averaged(tx)
    state, now, counts = tx.init(params), params, []
    weights = [np.ones(2, np.float32)]
    for grads in (params, bad, bad):
        updates, state = jax.jit(tx.update)(grads, state, now)
        now = optax.apply_updates(now, updates)
        counts.append(int(state.step_count))
        weights.append(np.asarray(now["w"]))
    assert counts == [1, 1, 2]
    want = averages_by_numpy([*weights[:2], weights[3]])[-1]
    np.testing.assert_array_equal(state.average["w"], want)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("inner", [optax.sgd(1.0), MASTERS])
def test_it_averages_params_of_8_bits_after_wider_updates(dtype, inner):
    tx, params = averaged(inner), {"w": jnp.ones((4,), dtype)}
    state = tx.init(params)
    weights = [np.ones(4, np.float32)]
    for _ in range(3):
        grads = {"w": jnp.full((4,), 0.25)}
        updates, state = tx.update(grads, state, params)
        wide = params["w"].astype(jnp.float32) + updates["w"]
        params = {"w": wide.astype(dtype)}
        weights.append(np.asarray(optax_mp.master_params(state, params)["w"]))
    want = averages_by_numpy(weights)[-1]
    np.testing.assert_array_equal(state.average["w"], want)
    assert weights[-1][0] < 1


@pytest.mark.parametrize(
    "storage", [optax_mp.FullCopy(), optax_mp.Split(16), optax_mp.Split(8)]
)
def test_it_starts_at_the_weights_that_are_cast_after_init(storage):
    tx = averaged(
        optax_mp.mixed_precision(SGD, param_dtype=jnp.bfloat16, storage=storage)
    )
    params = {"w": params_of(jnp.float32)["w"]}
    state = tx.init(params)
    assert as_bits(state.average) == as_bits(params)
    cast = optax_mp.cast_floating(params, jnp.bfloat16)
    _, state = tx.update({"w": gradients(1)["w"][0]}, state, cast)
    assert state.average["w"].dtype == jnp.float32


@needs_memories
def test_the_orders_of_the_guide_average_the_weights():
    mesh = jax.make_mesh((1,), ("data",))
    params = {"train": params_of()["w"], "freeze": params_of()["b"]}
    names = {
        "k": 2,
        "labels": {"train": "train", "freeze": "freeze"},
        "with_average": lambda inner, *_: averaged(inner),
        "MultiSteps": lambda *args: optax.MultiSteps(*args).gradient_transformation(),
        "partition": optax.partition,
        "set_to_zero": optax.set_to_zero,
        "mixed_precision": optax_mp.mixed_precision,
        "dynamic_loss_scale": scaled,
        "offload": hosted,
        "zero1": functools.partial(optax_mp.zero1, mesh=mesh, axis="data"),
    }
    page = (GUIDE / "average.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("| order |")[2], re.MULTILINE)
    orders = re.findall("`(.*?)`", " ".join(rows))
    assert len(orders) == 9
    for order in orders:
        names["tx"] = SGD if "mixed_precision" in order else MASTERS
        tx = eval(order.replace("...", "tx"), names)
        now, state = params, tx.init(params)
        weights = [np.asarray(params["train"], np.float32)]
        step = jax.jit(by_update(tx))
        for _ in range(4):
            now, state = step(now, state, jax.tree.map(jnp.ones_like, params))
            new = np.asarray(optax_mp.master_params(state, now)["train"], np.float32)
            weights += [new] if (new != weights[-1]).any() else []
        assert len(weights) == (3 if "MultiSteps" in order else 5), order
        want = averages_by_numpy(weights)[-1]
        found = [x for _, x in find_states(state, AverageState)]
        assert len(found) == order.count("with_average")
        for node in found:
            got = jax.device_get(node.average["train"])
            np.testing.assert_array_equal(got, want, err_msg=order)


@pytest.mark.parametrize("form", [averaged, FORMS["inside"][0]])
def test_a_step_overwrites_the_average(form):
    """A `lax.cond` would copy it, all of it."""
    params = {k: jnp.ones(2**16, jnp.bfloat16) for k in "abcd"}
    grads = {k: jnp.ones(2**16) for k in "abcd"}

    def temporaries(tx):
        step = jax.jit(by_update(tx), donate_argnums=(0, 1))
        compiled = step.lower(params, tx.init(params), grads).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024
        return memory.temp_size_in_bytes

    extra = temporaries(form(MASTERS)) - temporaries(scaled(MASTERS))
    assert extra <= 4 * 2**16 + 1024


def test_boxes_masks_and_edits():
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    optimizer = nnx.Optimizer(model, averaged(MASTERS), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    step = nnx.jit(lambda *args: args[1].update(args[0], args[2]))
    step(model, optimizer, grads)
    average = optax_mp.average_params(optimizer, model, in_param_dtypes=True)
    nnx.update(model, average)
    assert model.kernel[...].dtype == jnp.bfloat16
    plain = {"w": linen.Partitioned(jnp.ones((4, 2)), ("data", None)), "b": jnp.ones(2)}
    tx = optax.partition(
        {"train": averaged(SGD), "freeze": optax.set_to_zero()},
        {"w": "train", "b": "freeze"},
    )
    state = tx.init(plain)
    ((_, node),) = find_states(state, AverageState)
    assert isinstance(node.average["w"], linen.Partitioned)
    assert node.average["b"] == optax.MaskedNode()
    updates, state = tx.update(plain, state, plain)
    plain = optax.apply_updates(plain, updates)
    found = optax_mp.average_params(state, plain)
    half_way = (1 + float(plain["w"].value[0, 0])) / 2
    np.testing.assert_array_equal(found["w"].value, np.float32(half_way))
    # A projection between two steps is followed as masters follow it.
    tx, params = averaged(MASTERS), {"w": jnp.ones(2, jnp.bfloat16)}
    state = optax_mp.follow_params(tx.init(params), {"w": params["w"] / 2})
    _, state = tx.update({"w": jnp.zeros(2)}, state, {"w": params["w"] / 2})
    assert state.average["w"].tolist() == [0.75, 0.75]


hosted = functools.partial(optax_mp.offload, min_size=64)


def test_on_eight_devices_its_sharding_is_that_of_the_params():
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    params = jax.device_put({"w": params_of()["w"]}, placed)
    found = optax_mp.state_shardings(averaged(MASTERS), params)
    assert found.average["w"] == placed


@mostly_slow(
    "order",
    ["zero1 around", "zero1 inside", "host"],
    {"zero1 around"}.__contains__,
)
@needs_memories
def test_on_eight_devices_it_is_sharded_as_the_params_are(order):
    mesh = jax.make_mesh((8,), ("data",))
    placed = NamedSharding(mesh, P() if "zero1" in order else P("data"))
    cut = functools.partial(optax_mp.zero1, mesh=mesh, axis="data")
    make = {
        "zero1 around": lambda x: cut(averaged(x)),
        "zero1 inside": lambda x: averaged(cut(x)),
        "host": lambda x: hosted(averaged(x)),
    }[order]
    params = {"w": params_of()["w"]}
    on_mesh, tx = jax.device_put(params, placed), make(MASTERS)
    want = train(averaged(MASTERS), params, {"w": gradients(3)["w"]})[1]
    state = tx.init(on_mesh)
    assert state.average["w"].sharding.spec[:1] == ("data",)
    after, state, *_ = train(tx, on_mesh, {"w": gradients(3)["w"]}, state)
    found = state.average["w"].sharding
    assert found.spec[:1] == ("data",), found
    assert (found.memory_kind == "pinned_host") == (order == "host")
    assert as_bits(state.average) == as_bits(want.average)
    average = optax_mp.average_params(state, after)
    assert as_bits(average) == as_bits(want.average)


IN_HOST_MEMORY = {
    "in a scale": lambda x: scaled(hosted(averaged(x))),
    "inside": lambda x: averaged(hosted(scaled(x))),
}


@needs_memories
@mostly_slow(
    ("inner", "form"),
    [(MASTERS, form) for form in IN_HOST_MEMORY] + [(COMPACT, "inside")],
    lambda inner, _: inner is MASTERS,
)
def test_in_host_memory_the_bits_are_the_same(inner, form):
    params = {"w": params_of()["w"], "b": params_of()["b"]}
    grads = {k: gradients(4, bad=(1,))[k] for k in "wb"}
    want = train(averaged(scaled(inner)), params, grads)
    got = train(IN_HOST_MEMORY[form](inner), params, grads)
    assert as_bits(got[2:]) == as_bits(want[2:])
    ((_, node),) = find_states(got[1], AverageState)
    is_on_host = form == "in a scale"
    assert kinds(node.average["w"]) == {"Host" if is_on_host else "Device"}
    assert kinds(got[1]) == {"Device", "Host"}


def test_reports_and_conversions_know_it():
    params, plain, tx = params_of(), MASTERS, averaged(scaled(MASTERS))
    grads = each(gradients(1), 0)
    state = plain.init(params)
    updates, state = plain.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    added = optax_mp.convert_opt_state(state, params, plain, tx)
    assert avals(added) == avals(tx.init(params))
    masters = optax_mp.master_params(state, params)
    assert as_bits(optax_mp.average_params(added, params)) == as_bits(masters)
    roles = optax_mp.memory_report(added, params).by_role()
    assert roles["average"] == roles["masters"] == 4 * (8 * 32 + 3)
    moved = added._replace(average=jax.tree.map(jnp.zeros_like, added.average))
    other = optax_mp.with_average(plain, 0.75)
    kept = optax_mp.convert_opt_state(moved, params, tx, other)
    assert as_bits(kept.average) == as_bits(moved.average)
    # Of one around another the inner one goes on, and the outer one starts.
    nested = optax_mp.with_average(other, 0.875)
    two = optax_mp.convert_opt_state(moved, params, tx, nested)
    assert as_bits(two.inner_state.average) == as_bits(moved.average)
    assert as_bits(optax_mp.average_params(two, params)) == as_bits(masters)
    two = two._replace(step_count=jnp.int32(7))
    one = optax_mp.convert_opt_state(two, params, nested, other)
    assert as_bits(one) == as_bits(kept)
    same = optax_mp.convert_opt_state(two, params, nested, nested)
    assert as_bits(same) == as_bits(two)
    dropped = optax_mp.convert_opt_state(added, params, tx, plain)
    assert as_bits(dropped) == as_bits(state)


@needs_memories
def test_a_conversion_gives_each_param_its_own_average():
    split = functools.partial(optax.partition, param_labels={"w": "x", "b": "y"})
    fast, slow = (functools.partial(averaged, decay=x) for x in (0.5, 0.75))
    forms = {
        "nested": slow(fast(MASTERS)),
        "groups": split({"x": slow(MASTERS), "y": fast(MASTERS)}),
        "hosted": hosted(slow(fast(MASTERS))),
        "around groups": slow(split({"x": MASTERS, "y": MASTERS})),
    }
    # One label stands for a branch.
    params, grads = (
        {"w": of["w"], "b": {"c": of["b"]}} for of in (params_of(), gradients(3))
    )
    runs = {k: train(tx, params, grads)[:2] for k, tx in forms.items()}
    olds = {"groups": "groups", "around groups": "groups", "nested": "hosted"}
    for new, old in olds.items():
        params, state = runs[old]
        found = optax_mp.convert_opt_state(state, params, forms[old], forms[new])
        averages = [optax_mp.average_params(x, params) for x in (found, state)]
        assert as_bits(averages[0]) == as_bits(averages[1])
        assert kinds(found) == {"Device"}
        back = optax_mp.convert_opt_state(found, params, forms[new], forms[old])
        assert as_bits(back) == as_bits(state) and kinds(back) == kinds(state)


def test_a_cast_average_stays_finite():
    tx = averaged(optax_mp.mixed_precision(SGD, param_dtype=jnp.float16))
    state = tx.init({"w": jnp.full(2, -1e5)})
    params = {"w": jnp.zeros(2, jnp.float16)}
    found = optax_mp.average_params(state, params, in_param_dtypes=True)
    assert found["w"].tolist() == [-65504, -65504]


def test_wrong_arguments_are_said():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for decay, error in ((1.0, ValueError), ("0.9", TypeError)):
        with pytest.raises(error, match="`decay` .* less than 1, such as 0.999, got"):
            optax_mp.with_average(SGD, decay)
    with pytest.raises(ValueError, match="average_params: .*without an AverageState"):
        optax_mp.average_params(MASTERS.init(params), params)
    with pytest.raises(ValueError, match="with_average: expected `params`"):
        averaged(SGD).update(params, averaged(SGD).init(params))
    lost = averaged(SGD).init(params)._asdict()
    with pytest.raises(ValueError, match="has lost its class"):
        optax_mp.average_params(lost, params)

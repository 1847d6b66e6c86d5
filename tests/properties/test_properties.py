"""What every form of `tests/support/forms.py` promises, each promise one function.

Four steps of each form are taken once, by one program, and most properties look at
these. A failure says the form, the path of the leaf and what was expected of it.
"""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from buffers import check_no_buffer_is_shared, keeps_params
from comparison import as_bits
from form_runs import (
    STEPS,
    bare_runs,
    bare_step,
    check_bits,
    check_leaves,
    check_types,
    copied,
    masters_of,
    options_of,
    put_masters,
    read_average,
    read_masters,
    run_of,
    scaled_gradients,
    step_of,
    take,
    without_counters,
)
from forms import (
    SHAPES,
    finite,
    floating,
    forms_that,
    gradients,
    grouped,
    multi_steps,
    named,
    params_of,
    placed,
    widened,
)
from jax.tree_util import keystr, tree_leaves_with_path
from programs import operations
from reference import follow, join, remainder, rounded
from steps import by_update

import optax_mp
from optax_mp.core.trees._states import find_states

# By default, of properties with programs of their own.
A_FEW = named("link, Split(16)", "scaled, average, 5 bytes")


# Types


@forms_that()
def test_types_stay_and_the_step_is_compiled_once(form):
    start, *after = run_of(form)
    for run in after:
        check_types(form, "after a step", run, start)
    assert step_of(form)._cache_size() <= 1, form


@forms_that(lambda form: form.bare is not finite)
def test_a_description_of_params_gives_one_of_the_state(form):
    params, state = run_of(form)[0]
    described = form.tx.init(jax.eval_shape(lambda: params))
    is_alike = lambda a, b: (  # noqa: E731
        isinstance(a, jax.ShapeDtypeStruct) and (a.shape, a.dtype) == (b.shape, b.dtype)
    )
    assert jax.tree.structure(described) == jax.tree.structure(state)
    check_leaves(form, "described", described, state, is_alike)


# Within `optax.MultiSteps` and `apply_if_finite` neither holds.
@forms_that(lambda form: not form.has_cond)
def test_a_step_has_no_branch_and_needs_no_promotion(form):
    """What is skipped is chosen: a branch would copy the state."""
    params, state = run_of(form)[0]
    with jax.numpy_dtype_promotion("strict"):
        jaxpr, (_, after) = jax.make_jaxpr(form.tx.update, return_shape=True)(
            gradients(form, 0), state, params
        )
    check_types(form, "under strict promotion", after, state)
    found = {x.name for x in operations(jaxpr)} & {"cond", "while", "switch"}
    assert not found or form.on_host, (form, found)


@forms_that(by_default=lambda form: True)
def test_a_large_matrix_has_a_state_of_as_many_bytes_as_the_form_says(form):
    matrix = jax.ShapeDtypeStruct((1024, 1024), form.dtype)
    state = jax.eval_shape(form.tx.init, {"embed": matrix})
    sizes = {
        keystr(k): x.size * x.dtype.itemsize for k, x in tree_leaves_with_path(state)
    }
    # Beside a code there are scales, 2 bytes for each of the lines.
    assert sum(sizes.values()) / 2**20 == pytest.approx(form.bytes, rel=2e-3), (
        form,
        sizes,
    )


@forms_that(lambda form: form.dtype == "bfloat16")
def test_16_bit_gradients_get_updates_of_as_many_bits_where_these_may_be_rounded(form):
    """As in optax. A remainder needs exact updates, and a loss scale unscales to 32."""
    params, state = run_of(form)[0]
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients(form, 0))
    _, (updates, after) = jax.make_jaxpr(form.tx.update, return_shape=True)(
        grads, state, params
    )
    check_types(form, "after 16-bit gradients", after, state)
    wants_16 = form.bits == 0 and form.scale is None
    want = "bfloat16" if wants_16 else "float32"
    found = {name: updates[name].dtype.name for name in ("embed", "scalar")}
    assert set(found.values()) == {want}, (form, found)


# Values


@forms_that(lambda form: form.near == 0 and not form.in_8_bits)
def test_masters_are_the_params_of_float32_training(form):
    """To the bit, but that a step of `optax.MultiSteps` makes 0.0 of -0.0."""
    for i, (run, want) in enumerate(zip(run_of(form), bare_runs(form), strict=True)):
        what = f"masters after {i} steps"
        check_leaves(form, what, masters_of(run), want[0], np.array_equal)


@forms_that(lambda form: form.near > 0 or form.in_8_bits)
def test_masters_are_near_the_params_of_float32_training(form):
    start, want = (bare_runs(form)[i][0] for i in (0, -1))
    got = masters_of(run_of(form)[-1])

    def is_near(got, want, start):
        norm = np.linalg.norm
        return norm(got - want) <= form.near * norm(want - start)

    what = f"within {form.near} of the way"
    check_leaves(form, what, got, jax.device_get(want), is_near, start)


@forms_that(lambda form: form.bits is not None and not form.in_8_bits)
def test_params_are_rounded_masters(form):
    """In NumPy. A float32 sum with the old param lands no nearer than 2^-23 of that."""
    low = np.dtype(form.dtype)

    def param_of(master):
        own = follow(master, low, form.bits) if form.bits else rounded(master, low)
        return np.asarray(own).astype(np.float32)

    def is_landed(got, want, before):
        return (abs(got - want) <= 2.0**-23 * abs(before)).all()

    for before, after in itertools.pairwise(run_of(form)):
        old, new, masters = widened(before[0]), widened(after[0]), masters_of(after)
        want = jax.tree.map(param_of, masters) | {"norm": masters["norm"]}
        check_leaves(form, "a param", new, want, is_landed, old)


@forms_that()
def test_what_is_not_trained_stays(form):
    """Integers and None, with gradients of None."""
    first, last = (run_of(form)[i][0] for i in (0, -1))
    for name in first.keys() - SHAPES.keys():
        assert as_bits(last[name]) == as_bits(first[name]), (form, name)
    if form.bare is None:
        check_leaves(
            form,
            "is trained",
            floating(last),
            floating(first),
            lambda a, b: (np.asarray(a) != np.asarray(b)).any(),
        )


@forms_that()
def test_counters_count_the_steps_that_were_taken(form):
    for i, (_, state) in enumerate(run_of(form)):
        for path, x in tree_leaves_with_path(state):
            name = keystr(path).rpartition(".")[2]
            if name in ("step_count", "finite_count", "count"):
                every = 2 if form.bare is multi_steps and name != "finite_count" else 1
                assert int(x) == i // every, (form, i, keystr(path), int(x))


@forms_that(lambda form: form.averaged)
def test_an_average_is_that_of_the_weights(form):
    want = masters_of(run_of(form)[0])
    for i, run in enumerate(run_of(form)[1:]):
        want = jax.tree.map(lambda m, w: m / 2 + w / 2, masters_of(run), want)
        found = floating(read_average(run[1], run[0]))
        check_bits(form, f"average after {i + 1} steps", found, want)


@forms_that(lambda form: form.random)
def test_no_random_number_is_used_twice(form):
    """Not by two leaves, and not by two steps.

    After one step two leaves differ in nothing else: what is stored of a master, codes,
    and params that are rounded.
    """
    params, state = run_of(form)[1]
    stored = [x for x in jax.tree.leaves(state) if x.shape == SHAPES["twin"]]
    stored = [x for x in stored if x.dtype.itemsize == 1]
    if "stochastic" in form.name:
        stored += params["layers"], params["twin"]
    assert len(stored) >= 2, form
    assert len({str(as_bits(x)) for x in stored}) == len(stored), form

    # Each counter by itself, but that of an average, by which no number is drawn.
    counters = [
        (i, name.removesuffix(".step_count"))
        for i, (path, _) in enumerate(tree_leaves_with_path(state))
        if (name := keystr(path)).endswith(".step_count")
    ]
    names = [keystr(path) for path, _ in tree_leaves_with_path(state)]
    want = take(form, (params, state), 1)
    for at, node in counters:
        if any(name.startswith(f"{node}.average") for name in names):
            continue
        leaves, treedef = jax.tree.flatten(state)
        leaves[at] += 1
        got = take(form, (params, treedef.unflatten(leaves)), 1)
        pairs = zip(tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
        differ = [keystr(path) for (path, a), b in pairs if as_bits(a) != as_bits(b)]
        assert any("twin" in name for name in differ), (form, node, differ)


# Skips and edits


def each_leaf_made(form, values):
    """Yield (name, gradients of the last step with a number that is not finite)."""
    for i, name in enumerate(SHAPES):
        grads = gradients(form, STEPS)
        bad = np.array(jax.tree.leaves(grads[name])[0])
        bad.flat[-1] = values[i % len(values)]
        grads[name] = jax.tree.map(lambda _, bad=bad: bad, grads[name])
        yield name, grads


@forms_that(lambda form: form.scale is not None)
def test_a_skipped_step_moves_nothing(form):
    """Whatever leaf is bad: no bit of params, edited or not, and of the state."""
    for i, (name, grads) in enumerate(each_leaf_made(form, (np.nan, np.inf, -np.inf))):
        # At the start a param is -0.0.
        params, state = run_of(form)[-1 if i % 2 else 0]
        params = params if i % 4 < 2 else placed(form, edited(params))
        after, skipped = take(form, (params, state), grads=placed(form, grads))
        got, want = (without_counters(x) for x in (skipped, state))
        check_bits(form, f"not finite: {name}", (after, got), (params, want))
        (old,), (new,) = (
            [x for _, x in find_states(tree, optax_mp.LossScaleState)]
            for tree in (state, skipped)
        )
        backoff = 1 if "static" in form.name else 0.5
        assert new.scale == old.scale * backoff, (form, name)
        assert (int(new.total_skipped_count), bool(new.last_finite)) == (1, False), form
        # Of all leaves that have a gradient, in the order of a tree.
        assert int(new.nonfinite_index) == sorted(params).index(name), (form, name)


@forms_that(lambda form: form.scale == "link" and form.bare is not grouped)
def test_a_leaf_of_negative_zeros_marks_no_skipped_step(form):
    """A link marks one by negative zeros in all leaves."""
    params, state = run_of(form)[0]
    for name in SHAPES:
        grads = gradients(form, 0)
        grads[name] = jax.tree.map(lambda g: np.full_like(g, -0.0), grads[name])
        after, _ = take(form, (params, state), grads=grads)
        others = [{k: x[k] for k in SHAPES if k != name} for x in (after, params)]
        have_moved = lambda a, b: (np.asarray(a) != np.asarray(b)).any()  # noqa: E731
        check_leaves(form, f"-0.0 in {name}", *others, have_moved)


@forms_that(lambda form: form.leafwise)
def test_a_bad_number_stays_in_its_leaf(form):
    run = run_of(form)[-1]
    want = take(form, run, STEPS)
    for name, grads in each_leaf_made(form, [np.nan]):
        got = take(form, run, grads=placed(form, grads))
        others = [
            {
                keystr(k): x
                for k, x in tree_leaves_with_path(tree)
                if f"'{name}'" not in keystr(k)
            }
            for tree in (got, want)
        ]
        check_bits(form, f"NaN in {name}", *others)


def edited(params):
    """Return params that a loop has halved, pruned, and moved by a place."""
    change = {
        "embed": lambda x: x * 0.5,
        "layers": lambda x: x * (x > 0),
        "box": lambda x: x + jnp.asarray(2.0, x.dtype),
    }
    return {
        k: jax.tree.map(
            lambda x, k=k: jnp.asarray(change.get(k, lambda x: x)(x), x.dtype), v
        )
        for k, v in params.items()
    }


@forms_that(lambda form: form.bare is not grouped and form.dtype != "float8_e4m3fn")
def test_edits_are_followed(form):
    """The step after an edit starts from it; a full copy takes it as its master."""
    params, state = run_of(form)[-2]
    start = placed(form, edited(params))
    after = take(form, (start, state), STEPS - 1)
    if form.near:
        # A step is 2^-6, and a rounding at random 2^-7 of params of up to 4.
        is_near = lambda a, b: abs(a - b).max() <= 2.0**-4  # noqa: E731
        check_leaves(form, "an edit", masters_of(after), widened(start), is_near)
        return
    masters, old, new = masters_of((params, state)), widened(params), widened(start)
    if form.bits:
        stored = jax.tree.map(
            lambda p, m, old: join(
                np.asarray(p), remainder(m, np.asarray(old), form.bits)
            ),
            floating(start),
            masters,
            floating(params),
        ) | {"norm": masters["norm"]}
    else:
        stored = jax.tree.map(lambda m, a, b: np.where(a == b, m, b), masters, old, new)
    _, bare_state = bare_runs(form)[-2]
    want, _ = bare_step(form)(stored, bare_state, floating(gradients(form, STEPS - 1)))
    check_bits(form, "masters after an edit", masters_of(after), want)


# What JAX makes of a step


@forms_that(lambda form: not (form.on_host or form.on_mesh), A_FEW.__contains__)
def test_without_jit_it_is_the_same(form):
    """`init` and a step of a few leaves, by a rule that rounds no product."""
    tx = form.of(optax.chain(optax.trace(0.5), optax.scale(-(2.0**-6))))
    names = params_of(form).keys() & {"layers", "norm", "count", "absent"}
    params, grads = (
        {k: x[k] for k in names} for x in (params_of(form), gradients(form, 0))
    )
    eager, jitted = (params, tx.init(params)), (params, jax.jit(tx.init)(params))
    check_types(form, "init", eager, jitted)
    check_bits(form, "init", eager, jitted)
    step = by_update(tx)
    eager, jitted = step(*eager, grads), jax.jit(step)(*jitted, grads)
    check_types(form, "a step", eager, jitted)
    check_bits(form, "a step", eager, jitted)


@forms_that(by_default=A_FEW.__contains__)
def test_a_scan_takes_the_same_steps(form):
    def step(run, grads):
        params, state = run
        scale = optax_mp.loss_scale(state)
        grads = jax.tree.map(lambda g: g * scale, grads)
        return by_update(form.tx)(params, state, grads), None

    stacked = jax.tree.map(
        lambda *x: np.stack(x), *(gradients(form, i) for i in range(STEPS))
    )
    scan = jax.jit(
        lambda run, grads: jax.lax.scan(step, run, grads)[0], **options_of(form)
    )
    got = scan(copied(run_of(form)[0]), placed(form, stacked))
    check_bits(form, "four steps", got, run_of(form)[-1])


@forms_that(lambda form: not (form.on_mesh or form.on_host), A_FEW.__contains__)
def test_members_of_a_vmap_take_their_own_steps(form):
    """One takes its step, and one skips it or has NaN in a leaf."""
    run = run_of(form)[1]
    good = scaled_gradients(form, run[1], 1)
    bad = good | {"bias": good["bias"] * np.float32(np.nan)}
    both = jax.tree.map(lambda *x: np.stack(x), good, bad)
    got = jax.jit(jax.vmap(by_update(form.tx), (None, None, 0)))(*run, both)
    for i, grads in enumerate((good, bad)):
        alone = take(form, run, grads=grads)
        member = jax.tree.map(lambda x, i=i: x[i], got)
        check_bits(form, f"member {i}", member, alone)


@forms_that(lambda form: not (form.on_mesh or form.on_host), A_FEW.__contains__)
def test_ranks_of_a_shard_map_take_the_same_step(form):
    """Of params that all of them have."""
    mesh, everywhere = jax.make_mesh((2,), ("ranks",)), jax.P()
    step = jax.shard_map(
        by_update(form.tx), mesh=mesh, in_specs=everywhere, out_specs=everywhere
    )
    run = run_of(form)[0]
    got = jax.jit(step)(*run, scaled_gradients(form, run[1], 0))
    check_bits(form, "a step", got, run_of(form)[1])


# Files, and what reads a state


@forms_that()
def test_a_pickled_run_goes_on_to_the_bit(form):
    run = run_of(form)[2]
    kept = pickle.loads(pickle.dumps(jax.device_get(run)))
    assert jax.tree.structure(kept) == jax.tree.structure(run), form
    check_bits(form, "a file", kept, run)
    back = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), kept, run)
    check_bits(form, "the next step", take(form, back, 2), run_of(form)[3])


@forms_that(lambda form: form.bare is not grouped)
def test_what_is_read_has_arrays_of_its_own(form):
    """`master_params`, also in `jit`, without masters too: params in float32."""
    params, state = copied(run_of(form)[-1])
    found = optax_mp.master_params(state, params)
    jitted = jax.jit(optax_mp.master_params)(state, params)
    check_bits(form, "master_params in jit", jitted, found)
    dtypes = {x.dtype.name for x in jax.tree.leaves(floating(found))}
    assert dtypes == {"float32"}, form
    if form.bits is None:
        check_bits(form, "params in float32", floating(found), widened(params))
    for name in params.keys() - SHAPES.keys():
        assert as_bits(found[name]) == as_bits(params[name]), (form, name)
    for array in jax.tree.leaves((params, state)):
        array.delete()
    assert not any(x.is_deleted() for x in jax.tree.leaves(found)), form


@forms_that(lambda form: form.bits is not None and not form.in_8_bits)
def test_masters_are_replaced_and_nothing_else(form):
    """By those that round to the params; in the last place of a remainder of 8 bits."""
    params, state = run_of(form)[-1]
    masters = read_masters(state, params)
    with jax.numpy_dtype_promotion("strict"):
        same = put_masters(state, params, masters)
    check_types(form, "the same masters", same, state)
    check_bits(form, "the same masters", same, state)
    half = jax.tree.map(lambda x: np.asarray(x) / 2, floating(masters))
    low = jax.tree.map(lambda x, p: x.astype(p.dtype), half, floating(params))
    low, half = (
        jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), masters | new, params)
        for new in (low, half)
    )
    with jax.numpy_dtype_promotion("strict"):
        found = put_masters(state, low, half)
    read = floating(read_masters(found, low))
    places = {0: 0, 16: 1, 8: 2**9}[form.bits]
    check_leaves(
        form,
        "new masters",
        widened(read),
        widened(half),
        lambda a, b: abs(a.view(np.int32) - b.view(np.int32)).max() <= places,
    )


@forms_that(
    lambda form: form.bare is None and not form.on_mesh,
    lambda form: "," not in form.name or form.only_floats,
)
def test_a_state_shares_no_buffer(form):
    """With params or with itself, whatever the rule does: both may be donated."""
    params = {"low": jnp.ones(8, form.dtype), "norm": jnp.ones(8)}
    check_no_buffer_is_shared(form, form.of(keeps_params()), params)


# Params of other kinds, with a rule and a program of their own


def is_plain(form):
    is_elsewhere = form.has_cond or form.on_mesh or form.on_host or form.bare
    return form.dtype in ("bfloat16", "float16") and not is_elsewhere


INF = np.inf
INFINITE = [-INF, 1.5, 0.0, 2.0**-20, INF, -INF]


def masked_params(dtype, row):
    """Return params with the mask of an attention: four lines of these values."""
    mask = jnp.tile(jnp.array(row, dtype), (4, 1))
    return {"mask": mask, "w": jnp.linspace(-2, 2, 64).astype(dtype)}


def take_same_steps(form, rule, params, grads):
    """Return params, state and masters after four steps with the same gradients."""
    tx = form.of(rule)
    run, step = (params, jax.jit(tx.init)(params)), jax.jit(by_update(tx))
    for _ in range(STEPS):
        scale = np.float32(optax_mp.loss_scale(run[1]))
        new = step(*run, jax.tree.map(lambda g, s=scale: g * s, grads))
        check_types(form, "a step", new, run)
        run = new
    return *run, read_masters(run[1], run[0])


@forms_that(is_plain, A_FEW.__contains__)
def test_an_infinite_param_without_a_gradient_stays(form):
    """In steps that move the others; with no remainder or code beside an infinity."""
    start = masked_params(form.dtype, INFINITE)
    grads = {"mask": np.zeros((4, 6), "f"), "w": np.full(64, 2.0**-4, "f")}
    params, state, masters = take_same_steps(form, optax.adam(1e-2), start, grads)
    check_bits(form, "infinite", params["mask"], start["mask"])
    assert (np.asarray(params["w"]) != np.asarray(start["w"])).all(), form
    for path, x in tree_leaves_with_path(state):
        if x.shape == (4, 6) and jnp.issubdtype(x.dtype, jnp.integer):
            beside = np.asarray(x)[:, np.isinf(INFINITE)]
            assert not beside.any(), (form, keystr(path), beside)
    want = np.asarray(start["mask"]).astype(np.float32)
    np.testing.assert_array_equal(masters["mask"], want, err_msg=str(form))


@forms_that(is_plain, A_FEW.__contains__)
def test_an_infinite_master_makes_its_param_infinite(form):
    """As in float32 training; finite masters out of the dtype's range do not."""
    row = [100.0, -100.0, 2.0**-10, -(2.0**-10), 0.0, 0.0]
    grads = {"mask": np.tile(np.float32(row), (4, 1)), "w": np.zeros(64, "f")}
    start = masked_params(form.dtype, [1.0] * 6)
    params, _, masters = take_same_steps(form, optax.sgd(1e38), start, grads)
    want = np.float32([[-INF, INF, -4e38 / 2**10, 4e38 / 2**10, 1.0, 1.0]] * 4)
    found = np.asarray(params["mask"]).astype(np.float32)
    is_inf = np.isinf(want)
    np.testing.assert_array_equal(found[is_inf], want[is_inf], err_msg=str(form))
    # Some masters are rounded at random or in 24 bits, by less than 2^-7.
    low = rounded(want, np.dtype(form.dtype)).astype(np.float32)
    np.testing.assert_allclose(found, low, rtol=2.0**-7, err_msg=str(form))
    if form.bits is not None:
        is_same = np.isinf(np.asarray(masters["mask"])) == is_inf
        assert is_same.all(), (form, masters["mask"])


@forms_that(is_plain, A_FEW[:1].__contains__)
def test_a_python_float_is_a_param(form):
    """As it is one in plain optax, of which it has the value."""
    loss = lambda p: p["t"] ** 2 + 0 * p["w"].astype("f").sum()  # noqa: E731

    def train(tx, dtype):
        params = {"t": 1.5, "w": jnp.ones(2, dtype)}
        state = tx.init(params)
        step, gradient = jax.jit(by_update(tx)), optax_mp.value_and_grad(loss)
        for _ in range(3):
            new, after = step(params, state, gradient(state, params)[1])
            if tx is not bare:  # whose moments start with weak types
                check_types(form, "a step", after, state)
            params, state = new, after
        return params["t"]

    bare = optax.adamw(0.1)
    # A product and a sum may be rounded once or twice.
    np.testing.assert_allclose(
        train(form.of(bare), form.dtype), train(bare, "float32"), rtol=1e-6
    )


@forms_that(
    lambda form: form.leafwise and not form.only_floats,
    lambda form: form.name == "masters",
)
def test_gradients_of_integers_may_be_float0(form):
    """As `jax.grad(allow_int=True)` has them. A loss scale computes with all."""
    grads = gradients(form, 0) | {"count": np.zeros((), jax.dtypes.float0)}
    step = jax.jit(by_update(form.tx), **options_of(form))
    got = step(*run_of(form)[0], grads)
    check_bits(form, "a step", got, run_of(form)[1])

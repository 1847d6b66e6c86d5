"""A run goes on in another form, as if it had been in that form, or in none."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from slow_cases import mostly_slow
from steps import take_rounded_steps, take_steps

import optax_mp
from optax_mp.compact._codes import decode
from optax_mp.core.trees._boxes import plain

# Params that are cast make templates here, and states of other forms.
pytestmark = pytest.mark.filterwarnings("ignore:mixed_precision. param .* at `init`")

adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20))
low_bit = optax_mp.low_bit_state(adamw, min_size=64)
masters = functools.partial(optax_mp.mixed_precision, param_dtype=jnp.bfloat16)
averaged = functools.partial(optax_mp.with_average, decay=0.5)
# Unlike those of tests/support/forms.py they begin at float32 params, which are then cast.
FORMS = {
    "float32": lambda: adamw,
    "full copy": lambda: masters(adamw),
    "average": lambda: averaged(masters(adamw)),
    "split 16": lambda: masters(adamw, storage=optax_mp.Split(16)),
    "split 8": lambda: masters(adamw, storage=optax_mp.Split(8)),
    "low-bit": lambda: low_bit,
    "5 bytes": lambda: masters(low_bit, storage=optax_mp.Split(8)),
    "stochastic": lambda: optax_mp.stochastic_rounding(adamw),
}
IN_FLOAT32 = ("float32", "low-bit")
EXACT = {"float32", "full copy", "split 16"}
# From float32 params and to these; the others are in tests/properties.
PAIRS = [
    ("float32", "split 16"),
    ("split 16", "float32"),
    ("float32", "low-bit"),
    ("low-bit", "5 bytes"),
    ("5 bytes", "low-bit"),
    ("stochastic", "float32"),
]
every_pair = mostly_slow(("old", "new"), PAIRS, lambda *pair: pair == PAIRS[0])


def gradients(step):
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((32, 32), np.float32),
        "b": rng.standard_normal(3, np.float32),
    }


def start_of(name):
    tx = FORMS[name]()
    weights = np.random.default_rng(100).standard_normal((32, 32), np.float32)
    params = {"w": jnp.asarray(weights), "b": jnp.zeros(3)}
    state = tx.init(params)
    if name not in IN_FLOAT32:
        params = optax_mp.cast_floating(params, "bfloat16")
    return tx, params, state


def train(tx, params, state, steps):
    return take_steps(tx, params, state, map(gradients, steps))


def truth(params, state):
    try:
        return optax_mp.master_params(state, params)
    except ValueError:
        return params


@functools.cache
def uninterrupted():
    return train(*start_of("float32"), range(20))[0]


def continued(old, new):
    tx, params, state = start_of(old)
    params, state = train(tx, params, state, range(10))
    new_tx = FORMS[new]()
    with jax.numpy_dtype_promotion("strict"):
        new_state = optax_mp.convert_opt_state(state, params, tx, new_tx)
    if new in IN_FLOAT32:
        params = optax_mp.cast_floating(truth(params, state), "float32")
    else:
        params = optax_mp.cast_floating(params, "bfloat16")
    params, new_state = train(new_tx, params, new_state, range(10, 20))
    return truth(params, new_state), new_state


@every_pair
def test_a_converted_run_goes_on(old, new):
    found, state = continued(old, new)
    wanted = uninterrupted()
    # 20 stochastically rounded steps of 1e-2 in bfloat16; moments or remainders in 8 bits;
    # nothing, but that XLA rounds a product and a sum once or twice in each step.
    bound = 5e-6 if {old, new} <= EXACT else 5e-3
    bound = 0.1 if "stochastic" in (old, new) else bound
    difference = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a, np.float32) - b).max(), found, wanted
    )
    assert max(difference.values()) < bound
    assert avals(state) == avals(FORMS[new]().init(start_of(new)[1]))
    counts = optax.tree.get_all_with_path(state, "count")
    assert {int(count) for _, count in counts} == {20}


def test_a_scale_out_of_new_bounds_is_brought_into_them_by_the_first_update():
    params = {"w": jnp.ones(4)}
    tx = optax_mp.dynamic_loss_scale(adamw, max_scale=2.0**20, hysteresis=2)
    old = tx.init(params)
    old = old._replace(scale=jnp.float32(2.0**24), hysteresis_left=jnp.int32(9))
    _, new = tx.update(params, old, params)
    assert float(new.scale) == 2.0**20 and int(new.hysteresis_left) == 2


def test_a_scale_and_its_counters_go_over():
    tx = optax_mp.dynamic_loss_scale(masters(adamw))
    params = {"w": jnp.ones((32, 32), jnp.bfloat16)}
    state = tx.init(params)
    _, state = tx.update({"w": jnp.full((32, 32), jnp.inf)}, state, params)
    to_tx = optax_mp.dynamic_loss_scale(masters(adamw, storage=optax_mp.Split(8)))
    found = optax_mp.convert_opt_state(state, params, tx, to_tx)
    counters = (x._replace(inner_state=()) for x in (found, state))
    assert as_bits(next(counters)) == as_bits(next(counters))
    to_tx = optax_mp.static_loss_scale(masters(adamw), 8.0)
    assert optax_mp.convert_opt_state(state, params, tx, to_tx).scale == 8.0


def test_random_numbers_go_on_between_forms_that_draw_them():
    """Numbers that came again would not be right on average. Others have no counter."""
    old, params, state = start_of("split 8")
    params, state = train(old, params, state, range(3))
    counts = {}
    for name in ("5 bytes", "split 16"):
        new = FORMS[name]()
        there = optax_mp.convert_opt_state(state, params, old, new)
        back = optax_mp.convert_opt_state(there, params, new, old)
        counts[name] = [there.step_count, back.step_count]
        # Remainders of 8 bits lose nothing on the way, but a tie that 16 bits hold.
        assert as_bits(back.master_params) == as_bits(state.master_params)
    assert counts == {"5 bytes": [3, 3], "split 16": [None, 0]}
    scaled = optax_mp.dynamic_loss_scale(old)
    there = optax_mp.convert_opt_state(state, params, old, scaled)
    assert there.inner_state.step_count == 3


def test_codes_of_8_and_of_16_bits_become_each_other():
    wide = optax_mp.low_bit_state(adamw, min_size=64, bits=16)
    params = {"w": jnp.ones((32, 32)), "b": jnp.zeros(3)}
    params, state = train(low_bit, params, low_bit.init(params), range(3))
    there = optax_mp.convert_opt_state(state, params, low_bit, wide)
    assert avals(there) == avals(wide.init(params))
    back = optax_mp.convert_opt_state(there, params, wide, low_bit)
    assert avals(back) == avals(state)
    for field in ("mu", "nu"):
        forms = (getattr(x.inner_state[0], field)["w"] for x in (state, there, back))
        old, wide, again = (np.asarray(decode(x)) for x in forms)
        largest = np.abs(old).max()
        # Half a code of 16 bits, 3e-5 of its root, four times in a fourth power.
        np.testing.assert_allclose(wide, old, rtol=2e-3, atol=1e-6 * largest)
        # And half one of 8: a scale that is nearer to the largest has other codes.
        np.testing.assert_allclose(again, old, rtol=0.1, atol=1e-3 * largest)


def test_groups_keep_whether_their_updates_were_rounded():
    """Else the next step takes the roundings of a 16-bit update for edits."""
    label = functools.partial(optax.partition, param_labels={"w": "a", "b": "b"})

    def tx(inner):
        wrapped = {"a": masters(inner), "b": masters(optax.sgd(0.1))}
        return optax.chain(optax.clip(1.0), label(wrapped))

    params = {"w": jnp.ones((32, 32), jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    grads = {"w": jnp.ones((32, 32)), "b": params["b"]}
    _, state = tx(adamw).update(grads, tx(adamw).init(params), params)
    found = optax_mp.convert_opt_state(state, params, tx(adamw), tx(low_bit))
    assert avals(found) == avals(tx(low_bit).init(params))
    flags = [found[1].inner_states[x].inner_state.last_exact for x in "ab"]
    assert list(map(bool, flags)) == [True, False]
    groups = label({"a": adamw, "b": optax.sgd(0.1)})
    merged = optax.chain(optax.clip(1.0), masters(groups))
    found = optax_mp.convert_opt_state(state, params, tx(adamw), merged)
    assert not found[1].last_exact


def test_what_does_not_fit_is_an_error():
    tx, params, state = start_of("split 16")
    short = params | {"w": params["w"][:3]}
    for given, from_tx, to_tx, message in (
        (params, FORMS["full copy"](), tx, r"FullCopy\(\), .*, got masters in Split\("),
        (params, adamw, tx, r"no masters, as `from_tx` .*, got masters in Split\("),
        (params, optax_mp.static_loss_scale(tx), tx, "a state of `from_tx` must have"),
        (short, tx, tx, r"at .*'w'\] to be int16\[3,32\], .*, got int16\[32,32\]"),
        (params, tx, masters(optax.sgd(0.1)), "`opt_state` and that of `to_tx`"),
        (params, tx, params, "`to_tx` .*, got a dict"),
    ):
        error = TypeError if to_tx is params else ValueError
        with pytest.raises(error, match="convert_opt_state: .*" + message):
            optax_mp.convert_opt_state(state, given, from_tx, to_tx)


def test_moments_of_rounded_params_stay_float32():
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    rounded = optax_mp.stochastic_rounding(adamw)
    state = optax_mp.convert_opt_state(rounded.init(params), params, rounded, adamw)
    assert state[0].mu["w"].dtype == jnp.float32


def test_a_state_without_its_counter_is_refused():
    """As it was before the last bit was rounded at random."""
    tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.Split(8))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    old = tx.init(params)._replace(step_count=None)
    message = r"convert_opt_state: expected a state with `step_count`.*pass `state._rep"
    with pytest.raises(ValueError, match=message):
        optax_mp.convert_opt_state(old, params, tx, tx)


@pytest.mark.parametrize("params", [jnp.float32(0.5), {"a": jnp.ones(2, "complex64")}])
@pytest.mark.filterwarnings("ignore:mixed_precision. the storage")
def test_params_that_are_their_own_masters_have_none_in_any_storage(params):
    split, full = (
        optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(adamw, storage=storage))
        for storage in (optax_mp.Split(16), optax_mp.FullCopy())
    )
    state = split.init(params)
    assert optax_mp.memory_report(state, params).by_role().get("masters", 0) == 0
    converted = optax_mp.convert_opt_state(state, params, split, full)
    assert avals(converted) == avals(full.init(params))


def test_a_master_that_does_not_round_to_its_param_is_not_split():
    """Beside a param that misses its master a remainder does not fit."""
    sgd = optax.sgd(1.0)
    tx = optax_mp.mixed_precision(sgd)
    params, state = take_rounded_steps(tx)
    masters = state.master_params["w"]
    split = optax_mp.mixed_precision(sgd, storage=optax_mp.Split(16))
    message = r"master of \['w'\] to round to the param, .* misses its master by"
    with pytest.raises(ValueError, match=message):
        optax_mp.convert_opt_state(state, params, tx, split)
    cast = optax_mp.cast_floating(state.master_params, "bfloat16")
    converted = optax_mp.convert_opt_state(state, cast, tx, split)
    # `Split` rounds ties away from zero, the cast to even.
    found = optax_mp.master_params(converted, cast)["w"]
    np.testing.assert_array_max_ulp(found, np.asarray(masters), maxulp=1)
    scaled = optax_mp.dynamic_loss_scale(tx)
    found = optax_mp.convert_opt_state(state, params, tx, scaled)
    assert as_bits(found.inner_state) == as_bits(state) and not state.last_exact


def test_a_state_may_be_of_params_that_were_cast_before():
    """Its masters are replaced, so that they do not begin from rounded weights."""
    cast = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = masters(optax.sgd(0.1))
    state = tx.init({"w": jnp.ones(2)})
    with warnings.catch_warnings(action="error"):
        found = optax_mp.convert_opt_state(state, cast, tx, tx)
    assert as_bits(found) == as_bits(state)


def test_scales_in_groups_go_on_in_their_own_groups():
    """By their places around the bare optimizer, and not in the order of both forms."""
    scaled = functools.partial(optax_mp.dynamic_loss_scale, init_scale=16.0)
    params = {"a": jnp.ones(4), "b": jnp.ones(4)}

    def groups(a, b):
        return optax.partition({"a": a, "b": b}, {"a": "a", "b": "b"})

    forms = {
        "both": groups(scaled(adamw), scaled(adamw)),
        "one": groups(adamw, scaled(adamw)),
        "around": scaled(groups(adamw, adamw)),
    }
    bad = {"a": params["a"], "b": jnp.full(4, jnp.inf)}
    _, state = forms["both"].update(bad, forms["both"].init(params), params)

    def convert(state, old, new):
        return optax_mp.convert_opt_state(state, params, forms[old], forms[new])

    def scales(state):
        return {k: float(x.inner_state.scale) for k, x in state.inner_states.items()}

    assert scales(state) == {"a": 16.0, "b": 8.0}
    assert float(convert(state, "both", "one").inner_states["b"].inner_state.scale) == 8
    back = convert(convert(state, "both", "one"), "one", "both")
    assert scales(back) == {"a": 16.0, "b": 8.0}
    around = forms["around"].init(params)._replace(scale=jnp.float32(4.0))
    assert scales(convert(around, "around", "both")) == {"a": 4.0, "b": 4.0}
    assert float(convert(around, "around", "around").scale) == 4


def test_numbers_of_random_rounding_go_on_in_their_own_groups():
    label = functools.partial(optax.partition, param_labels={"w": "a", "v": "b"})
    low = functools.partial(optax_mp.low_bit_state, min_size=64)
    params = {"w": jnp.ones((32, 32)), "v": jnp.ones((32, 32))}
    both = label({"a": low(adamw), "b": optax.apply_if_finite(low(adamw), 9)})
    one = label({"a": adamw, "b": optax.apply_if_finite(low(adamw), 9)})
    state = both.init(params)
    for value in (1.0, jnp.nan):
        grads = {"w": params["w"], "v": jnp.full((32, 32), value)}
        _, state = both.update(grads, state, params)
    found = optax_mp.convert_opt_state(state, params, both, one)
    assert found.inner_states["b"].inner_state.inner_state.step_count == 1


@pytest.mark.parametrize("around", [lambda x: x, averaged])
@pytest.mark.parametrize("bits", [16, 8])
def test_float32_params_may_be_split_before_they_are_cast(around, bits):
    """As NNX's way is: the masters keep their bits, whatever form they were in."""
    params = {"w": start_of("float32")[1]["w"]}
    to_tx = around(masters(adamw, storage=optax_mp.Split(bits)))
    for from_tx in (adamw, optax_mp.mixed_precision(adamw)):
        state = from_tx.init(params)
        found = optax_mp.convert_opt_state(state, params, from_tx, to_tx)
        assert avals(found) == avals(to_tx.init(params))
        cast = optax_mp.cast_floating(params, "bfloat16")
        got = optax_mp.master_params(found, cast)["w"]
        # Half a unit of what is kept: 16 bits of a remainder keep all.
        rtol = 2.0**-16 if bits == 8 else 0
        np.testing.assert_allclose(got, params["w"], rtol=rtol)


# Forms without masters, and with codes and averages.
@mostly_slow(
    ("old", "new"),
    [("stochastic", "average"), ("full copy", "5 bytes"), ("5 bytes", "float32")],
    lambda old, _: old == "stochastic",
)
def test_an_nnx_optimizer_is_converted_in_place_as_its_page_says(old, new):
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "to_pure_dict"):
        pytest.skip("the page is about newer releases")
    from_tx, to_tx = FORMS[old](), FORMS[new]()
    model = nnx.Linear(32, 32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, from_tx, wrt=nnx.Param)
    grads = jax.tree.map(
        lambda x: jnp.sin(x.astype(jnp.float32)), nnx.state(model, nnx.Param)
    )
    optimizer.update(model, grads)
    weights = optax_mp.master_params(optimizer, model)
    changed = optax_mp.convert_opt_state(optimizer, model, optimizer.tx, to_tx)
    if new in IN_FLOAT32:
        nnx.update(model, weights)
    again = nnx.Optimizer(model, to_tx, wrt=nnx.Param)
    nnx.update(again.opt_state, nnx.state(changed))
    again.step[...] = optimizer.step[...]
    assert as_bits(plain(again)) == as_bits(plain(changed))
    again.update(model, grads)
    assert again.step[...] == 2

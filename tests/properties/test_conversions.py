"""A run of each form goes on in another, as if it had been in that form."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from form_runs import (
    bare_runs,
    check_bits,
    check_leaves,
    check_types,
    init_of,
    masters_of,
    run_of,
    take,
)
from forms import FORMS, named
from slow_cases import mostly_slow

import optax_mp
from optax_mp.core.trees._states import find_states

# Params that are cast make templates of states here.
pytestmark = pytest.mark.filterwarnings("ignore:mixed_precision. param .* at `init`")
HERE = [
    form
    for form in FORMS
    if form.dtype == "bfloat16"
    and not (form.on_mesh or form.on_host or form.bare or form.only_floats)
]
# From each to the next, there and back. A link is a part of the optimizer's chain.
PAIRS = []
for are_links in False, True:
    group = [form for form in HERE if (form.scale == "link") == are_links]
    for old, new in itertools.pairwise([*group, group[0]]):
        PAIRS += [(old, new), (new, old)]
BY_DEFAULT = [tuple(named("masters", "scaled, average, 5 bytes"))]
# There and back, and from counters of random numbers.
STACKED = [
    *BY_DEFAULT,
    BY_DEFAULT[0][::-1],
    tuple(named("stochastic, low-bit", "Split(8)")),
]


@mostly_slow(
    ("old", "new"),
    dict.fromkeys([*BY_DEFAULT, *PAIRS]),
    lambda *pair: pair in BY_DEFAULT,
    ids=str,
)
def test_a_converted_run_goes_on(old, new):
    form = f"{old} to {new}"
    params, state = run_of(old)[2]
    convert = functools.partial(
        optax_mp.convert_opt_state, from_tx=old.tx, to_tx=new.tx
    )
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(convert)(state, params)
    check_types(form, "converted", found, init_of(new)(params))
    ((_, schedule),) = find_states(found, optax.ScaleByScheduleState)
    assert int(schedule.count) == 2, form
    near = max(old.near, new.near)

    def is_near(got, want, start):
        norm = np.linalg.norm
        return norm(got - want) <= near * norm(want - start)

    start, _, _, want = (run[0] for run in bare_runs(new)[:4])
    after = masters_of(take(new, (params, found), 2))
    what = f"within {near} of the way"
    check_leaves(form, what, after, jax.device_get(want), is_near, start)


@mostly_slow(("old", "new"), STACKED, lambda *pair: pair in BY_DEFAULT, ids=str)
def test_stacked_states_are_converted_by_vmap(old, new):
    """Each member as it is alone, with all of its numbers."""
    form = f"{old} to {new}"
    convert = functools.partial(
        optax_mp.convert_opt_state, from_tx=old.tx, to_tx=new.tx
    )
    members = [run_of(old)[i][::-1] for i in (1, 3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *members)
    found = jax.jit(jax.vmap(convert))(*stacked)
    alone = jax.jit(convert)
    for i, member in enumerate(members):
        got = jax.tree.map(lambda x, i=i: x[i], found)
        check_bits(form, f"member {i}", got, alone(*member))
    with pytest.raises(ValueError, match="convert a state of `jax.vmap.tx.init.` by"):
        convert(*stacked)

"""Forms over eight devices: the bits of one, whether axes are explicit or not."""

import contextlib
import itertools

import jax
import optax
import pytest
from form_runs import check_bits, check_types, init_of, run_of, scaled_gradients
from forms import FORMS, Box, clipped, named, params_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path
from slow_cases import mostly_slow
from steps import by_update

pytestmark = pytest.mark.usefixtures("no_long_constant_folding")
# Rows and columns, along which devices share lines of codes or do not.
SPECS = {
    "embed": P("a", "b"),
    "layers": P(None, "b", "a"),
    "twin": P(None, ("a", "b")),
    "head": P("b"),
    "norm": P("b"),
    "box": P(None, "a"),
}
# A norm is summed in another order, and what is flattened has no sharding of its own.
NOT_ALIKE = clipped, optax.flatten
OVER_DEVICES = [
    form
    for form in FORMS
    if not (form.on_mesh or form.on_host or form.bare in NOT_ALIKE)
]
KINDS = AxisType.Auto, AxisType.Explicit
BY_DEFAULT = [
    (*named("link, Split(16)"), AxisType.Explicit),
    (*named("scaled, average, 5 bytes"), AxisType.Auto),
]


def within_a_jit(step):
    """Return a step of which `jit` does not say how its arguments are sharded."""
    step = jax.jit(step)
    return lambda *args: step(*args)


@mostly_slow(
    ("form", "kind"),
    dict.fromkeys([*BY_DEFAULT, *zip(OVER_DEVICES, itertools.cycle(KINDS))]),
    lambda *case: case in BY_DEFAULT,
    ids=str,
)
def test_sharded_params_get_the_bits_of_one_device(form, kind):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    step = by_update(form.tx)
    step = jax.jit(within_a_jit(step) if kind is AxisType.Auto else step)

    def sharded(tree):
        where = {k: NamedSharding(mesh, SPECS.get(k, P())) for k in tree}
        where |= {"box": Box(where["box"]), "absent": None}
        kept = {k: v for k, v in tree.items() if v is not None}
        return tree | jax.device_put(kept, {k: where[k] for k in kept})

    alone = run_of(form)
    grads = [scaled_gradients(form, alone[i][1], i) for i in range(2)]
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        params = sharded(params_of(form))
        start = run = params, init_of(form)(params)
        for each in grads:
            run = step(*run, sharded(each))
    check_types(form, "after two steps", run, start)
    check_bits(form, "after two steps", run, alone[2])
    where = params["embed"].sharding
    for path, x in tree_leaves_with_path(run):
        if x.shape == params["embed"].shape:
            assert x.sharding.is_equivalent_to(where, 2), (
                form,
                keystr(path),
                x.sharding,
            )

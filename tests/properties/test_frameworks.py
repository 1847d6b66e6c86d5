"""Forms of params in the boxes of frameworks: the bits of those without boxes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from comparison import as_bits
from form_runs import check_bits, check_types, run_of, scaled_gradients
from forms import named
from slow_cases import mostly_slow
from steps import by_update

import optax_mp


def in_linen(x):
    linen = pytest.importorskip("flax.linen")
    return linen.Partitioned(x, names=(None,) * x.ndim)


def in_nnx(x):
    return pytest.importorskip("flax.nnx").Param(x)


def in_haliax(x):
    haliax = pytest.importorskip("haliax")
    return haliax.named(x, tuple(f"axis{i}" for i in range(x.ndim)))


def in_equinox(x):
    return pytest.importorskip("equinox").nn.Embedding(weight=x)


BOXES = in_linen, in_nnx, in_haliax, in_equinox
IN_BOXES = "embed", "head"
A_FEW = named(
    "scaled, average, 5 bytes", "link, Split(16)", "masters", "stochastic, low-bit"
)


def boxed(box, tree):
    return tree | {name: box(jnp.asarray(tree[name])) for name in IN_BOXES}


@mostly_slow(
    ("form", "box"),
    itertools.product(A_FEW, BOXES),
    lambda form, box: form is A_FEW[0],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_params_in_boxes_are_stepped_as_those_without(form, box):
    (params, state), want = run_of(form)[:2]
    params, grads = (boxed(box, x) for x in (params, scaled_gradients(form, state, 0)))
    start = params, jax.jit(form.tx.init)(params)
    got = jax.jit(by_update(form.tx))(*start, grads)
    check_types(form, "in boxes", got, start)
    plain = jax.tree.unflatten(jax.tree.structure(want), jax.tree.leaves(got))
    check_bits(form, "in boxes", plain, want)


@pytest.mark.slow
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("form", A_FEW[:1], ids=str)
def test_states_in_boxes_are_converted_as_those_without(form, box):
    (new,) = named("average")
    convert = jax.jit(
        functools.partial(optax_mp.convert_opt_state, from_tx=form.tx, to_tx=new.tx)
    )
    params, state = run_of(form)[0]
    in_boxes = boxed(box, params)
    found = convert(jax.jit(form.tx.init)(in_boxes), in_boxes)
    check_types(form, "converted", found, jax.eval_shape(new.tx.init, in_boxes))
    assert as_bits(found) == as_bits(convert(state, params)), form

"""Four steps of a form, taken once for all properties; and failures that say where.

A failure says the form, the path of the leaf and what was expected of it.
"""

import functools

import jax
import numpy as np
import pytest
from comparison import as_bits, avals
from forms import Form, floating, gradients, params_of, placed, widened
from hosted_steps import UNFUSED
from jax.tree_util import keystr
from steps import by_update

import optax_mp

STEPS = 4


def options_of(form: Form):
    """Return options of `jit`: in host memory XLA for CPUs fuses other operations."""
    return {"compiler_options": UNFUSED} if form.on_host else {}


@functools.cache
def step_of(form: Form):
    """Return the step of a form, which overwrites params and state."""
    return jax.jit(by_update(form.tx), donate_argnums=(0, 1), **options_of(form))


@functools.cache
def init_of(form: Form):
    # `zero1` says more of a sharding outside of `jit`, and so does a step.
    return form.tx.init if form.on_mesh else jax.jit(form.tx.init)


def copied(tree):
    """Return arrays of their own, where they are."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), tree)


def scaled_gradients(form, state, step):
    """Return what a loss that is scaled by the state's scale gives."""
    scale = np.float32(optax_mp.loss_scale(state))
    return placed(form, jax.tree.map(lambda g: g * scale, gradients(form, step)))


def take(form, run, step=0, grads=None):
    """Return (params, state) after a step, whose arguments are donated."""
    params, state = copied(run)
    if grads is None:
        grads = scaled_gradients(form, state, step)
    return step_of(form)(params, state, grads)


@functools.cache
def start_of(form: Form):
    """Return (params, state) before the first step."""
    params = params_of(form)
    return params, init_of(form)(params)


@functools.cache
def run_of(form: Form):
    """Return (params, state) at the start and after each step."""
    runs = [start_of(form)]
    for step in range(STEPS):
        runs.append(take(form, runs[-1], step))
    return runs


@functools.cache
def bare_step(form: Form):
    return jax.jit(by_update(form.in_float32))


@functools.cache
def bare_runs(form: Form):
    """Return the same run without this package, in float32."""
    params = widened(params_of(form))
    runs = [(params, form.in_float32.init(params))]
    for step in range(STEPS):
        runs.append(bare_step(form)(*runs[-1], floating(gradients(form, step))))
    return runs


read_masters, read_average, put_masters = map(
    jax.jit,
    (
        optax_mp.master_params,
        optax_mp.average_params,
        optax_mp.replace_master_params,
    ),
)


def masters_of(run):
    params, state = run
    return widened(read_masters(state, params))


# Failures


def check_leaves(form, what, got, want, is_right, *others):
    """Fail with the form, the path of a leaf and what was expected.

    `is_right` takes leaves of `got`, `want` and of further trees.
    """
    __tracebackhide__ = True
    paths = jax.tree_util.tree_leaves_with_path(got)
    rest = map(jax.tree.leaves, (want, *others))
    for (path, a), b, *more in zip(paths, *rest, strict=True):
        if not is_right(a, b, *more):
            pytest.fail(f"{form}: {what}: {keystr(path)}: {difference(a, b)}")


def difference(got, want):
    """Say what was expected and what came: the first number that differs."""
    if avals(got)[1] != avals(want)[1] or not hasattr(got, "__array__"):
        return f"expected {avals(want)[1]}, got {avals(got)[1]}"
    arrays = [np.array(x) for x in (got, want)]
    a, b = (x.view(f"u{x.itemsize}") for x in arrays)
    differs = np.argwhere(a != b)
    if not len(differs):
        return f"expected {want!r}, got {got!r}"
    at = tuple(map(int, differs[0]))
    a, b = (x[at] for x in arrays)
    return f"expected {b} at {list(at)}, got {a}; {len(differs)} of {got.size} differ"


def check_bits(form, what, got, want):
    __tracebackhide__ = True
    check_leaves(form, what, got, want, lambda a, b: as_bits(a) == as_bits(b))


def check_types(form, what, got, want):
    """Compare structures, shapes, dtypes and weak types."""
    __tracebackhide__ = True
    assert jax.tree.structure(got) == jax.tree.structure(want), (form, what)
    check_leaves(form, what, got, want, lambda a, b: avals(a)[1] == avals(b)[1])


def without_counters(state):
    """Return a state without the scales and counters of its loss scales."""
    is_scale = lambda x: isinstance(x, optax_mp.LossScaleState)  # noqa: E731
    return jax.tree.map(
        lambda x: without_counters(x.inner_state) if is_scale(x) else x,
        state,
        is_leaf=is_scale,
    )

"""Orbax: every form comes back bit for bit and goes on, wrong templates do not."""

import chex
import jax
import jax.numpy as jnp
import pytest
from comparison import as_bits, avals
from jax.tree_util import keystr, tree_leaves_with_path
from slow_cases import mostly_slow
from trained_forms import FORMS, SCALED, UNSCALED, start_of, template_of, train

import optax_mp

ocp = pytest.importorskip("orbax.checkpoint")

# By default the one with the most parts.
OFTEN = "scaled average"
every_form = mostly_slow("name", [*UNSCALED, OFTEN], lambda name: name == OFTEN)


def saved(path, name, steps=6):
    """Train, save, and return what was saved."""
    run = train(name, *start_of(name), range(steps))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)
    return run


def by_path(tree):
    return {
        keystr(path, simple=True, separator="/"): leaf
        for path, leaf in tree_leaves_with_path(tree)
    }


def check_template(checkpointer, path, template):
    """Compare what was saved with a template, as docs/guide/checkpoints.md does."""
    metadata = checkpointer.metadata(path).item_metadata.tree
    chex.assert_trees_all_equal_shapes_and_dtypes(by_path(metadata), by_path(template))


@every_form
def test_a_restored_run_is_the_same_and_goes_on_as_if_never_stopped(tmp_path, name):
    run, template = saved(tmp_path / "checkpoint", name), template_of(name)
    with ocp.StandardCheckpointer() as checkpointer:
        if name != "chance":  # of its key Orbax describes the data
            check_template(checkpointer, tmp_path / "checkpoint", template)
        restored = checkpointer.restore(tmp_path / "checkpoint", template)
    assert as_bits(restored) == as_bits(run)
    assert avals(restored) == avals(run)
    found = train(name, *restored, range(6, 10))
    assert as_bits(found) == as_bits(train(name, *start_of(name), range(10)))
    if name in SCALED:
        assert int(found[1].total_skipped_count) == 3


def test_a_template_of_other_dtypes_rounds_masters_and_the_check_tells(tmp_path):
    """The trap: Orbax rounds them and says nothing."""
    path = tmp_path / "checkpoint"
    run = saved(path, "full copy", steps=0)
    rounding = optax_mp.cast_floating(jax.tree.map(jnp.zeros_like, run), "bfloat16")
    with ocp.StandardCheckpointer() as checkpointer:
        _, state = checkpointer.restore(path, rounding)
        assert state.master_params["w"].dtype == jnp.bfloat16
        with pytest.raises(AssertionError, match="types: float32 != bfloat16"):
            check_template(checkpointer, path, rounding)


def test_another_form_is_told_and_converted_after_the_restore(tmp_path):
    old, new, path = "low-bit 8", "full copy", tmp_path / "checkpoint"
    params, _ = saved(path, old, steps=0)
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(AssertionError, match="1/master_params/w"):
            check_template(checkpointer, path, template_of(new))
        _, state = checkpointer.restore(path, template_of(old))
    converted = optax_mp.convert_opt_state(state, params, FORMS[old], FORMS[new])
    assert avals(converted) == avals(FORMS[new].init(params))

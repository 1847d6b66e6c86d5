"""Orbax: every form comes back bit for bit and goes on, wrong templates do not."""

import chex
import jax
import jax.numpy as jnp
import pytest
from form_runs import check_bits, check_types, run_of, start_of, take
from forms import forms_that, named
from jax.tree_util import keystr, tree_leaves_with_path

import optax_mp

ocp = pytest.importorskip("orbax.checkpoint")


def saved(path, run):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)
    return run


def template_of(run):
    """Return what to restore a run into: shapes, dtypes, and where arrays are to be."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run
    )


def by_path(tree):
    return {
        keystr(path, simple=True, separator="/"): leaf
        for path, leaf in tree_leaves_with_path(tree)
    }


def check_template(checkpointer, path, template):
    """Compare what was saved with a template, as docs/guide/checkpoints.md does."""
    metadata = checkpointer.metadata(path).item_metadata.tree
    chex.assert_trees_all_equal_shapes_and_dtypes(by_path(metadata), by_path(template))


# By default the one with the most parts.
@forms_that(by_default=lambda form: form.often and form.averaged)
def test_a_restored_run_is_the_same_and_goes_on_as_if_never_stopped(tmp_path, form):
    run, template = (
        saved(tmp_path / "run", run_of(form)[3]),
        template_of(run_of(form)[0]),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        check_template(checkpointer, tmp_path / "run", template)
        restored = checkpointer.restore(tmp_path / "run", template)
    check_types(form, "restored", restored, run)
    check_bits(form, "restored", restored, run)
    check_bits(form, "the next step", take(form, restored, 3), run_of(form)[4])


def test_a_template_of_other_dtypes_rounds_masters_and_the_check_tells(tmp_path):
    """The trap: Orbax rounds them and says nothing."""
    (form,) = named("masters")
    run = saved(tmp_path / "run", start_of(form))
    rounding = optax_mp.cast_floating(jax.tree.map(jnp.zeros_like, run), "bfloat16")
    with ocp.StandardCheckpointer() as checkpointer:
        _, state = checkpointer.restore(tmp_path / "run", rounding)
        assert state.master_params["embed"].dtype == jnp.bfloat16
        with pytest.raises(AssertionError, match="types: float32 != bfloat16"):
            check_template(checkpointer, tmp_path / "run", rounding)


def test_another_form_is_told_and_converted_after_the_restore(tmp_path):
    old, new = named("5 bytes", "masters")
    params, _ = saved(tmp_path / "run", start_of(old))
    wanted = template_of(start_of(new))
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(AssertionError, match="1/master_params/"):
            check_template(checkpointer, tmp_path / "run", wanted)
        _, state = checkpointer.restore(tmp_path / "run", template_of(start_of(old)))
    converted = optax_mp.convert_opt_state(state, params, old.tx, new.tx)
    check_types("5 bytes to masters", "converted", converted, wanted[1])

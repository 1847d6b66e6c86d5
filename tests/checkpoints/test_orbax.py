"""Orbax: every form comes back bit for bit and goes on, wrong templates do not."""

import jax
import jax.numpy as jnp
import pytest
from comparison import as_bits, avals
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


@every_form
def test_a_restored_run_is_the_same_and_goes_on_as_if_never_stopped(tmp_path, name):
    run, template = saved(tmp_path / "checkpoint", name), template_of(name)
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "checkpoint")
        optax_mp.check_checkpoint(metadata, template)
        restored = checkpointer.restore(tmp_path / "checkpoint", template)
    assert as_bits(restored) == as_bits(run)
    assert avals(restored) == avals(run)
    found = train(name, *restored, range(6, 10))
    assert as_bits(found) == as_bits(train(name, *start_of(name), range(10)))
    if name in SCALED:
        assert int(found[1].total_skipped_count) == 3


def test_a_template_that_would_round_masters_is_refused(tmp_path):
    """The trap: Orbax itself rounds them and says nothing."""
    path = tmp_path / "checkpoint"
    run = saved(path, "full copy", steps=0)
    rounding = optax_mp.cast_floating(jax.tree.map(jnp.zeros_like, run), "bfloat16")
    with ocp.StandardCheckpointer() as checkpointer:
        _, state = checkpointer.restore(path, rounding)
        assert state.master_params["w"].dtype == jnp.bfloat16
        with pytest.raises(ValueError, match="restore would round the masters") as e:
            optax_mp.check_checkpoint(checkpointer.metadata(path), rounding)
    assert (
        "[1].master_params['w'] to be bfloat16[16,32], got float32[16,32]: a restore"
        in str(e.value)
    )
    assert "optax_mp.convert_opt_state(opt_state, params, tx, new_tx)" in str(e.value)


def test_another_form_is_refused_and_converted_after_the_restore(tmp_path):
    old, new, path = "low-bit 8", "full copy", tmp_path / "checkpoint"
    params, _ = saved(path, old, steps=0)
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="expected .* of `template`"):
            optax_mp.check_checkpoint(checkpointer.metadata(path), template_of(new))
        _, state = checkpointer.restore(path, template_of(old))
    converted = optax_mp.convert_opt_state(state, params, FORMS[old], FORMS[new])
    assert avals(converted) == avals(FORMS[new].init(params))


def test_a_manager_that_knows_no_items_is_told_apart_from_an_empty_checkpoint(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    with ocp.CheckpointManager(tmp_path) as manager:
        metadata = manager.item_metadata(0)
    assert metadata is None
    with pytest.raises(ValueError, match="item_handlers=orbax.*StandardCheckpointHand"):
        optax_mp.check_checkpoint(metadata, {"w": jnp.ones(2)})

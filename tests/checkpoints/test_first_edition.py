"""Checkpoints of the first edition load, say what they are, and go on bit for bit.

They were made by the first edition itself: see support/first_edition/make.py.
"""

import itertools
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from slow_cases import mostly_slow

import optax_mp

serialization = pytest.importorskip("flax.serialization")
pytest.importorskip("orbax.checkpoint")
FOLDER = Path(__file__).parents[1] / "support" / "first_edition"
sys.path.insert(0, str(FOLDER))
try:
    from make import STEPS_AFTER, STEPS_BEFORE, forms, start, train
finally:
    sys.path.remove(str(FOLDER))

FORMS = forms()
every_form = pytest.mark.parametrize("name", FORMS)
# Of what is pickled the types survive.
KINDS = ("pickle", "msgpack", "orbax")
UNTYPED = ("msgpack", "orbax")


def read(name):
    return pickle.loads((FOLDER / f"{name}.pickle").read_bytes())


def restored(name, kind):
    """Return a checkpoint as its library restores it without a template."""
    saved = read(name)[kind]
    if kind == "pickle":
        params, opt_state = pickle.loads(saved)
        return {"params": params, "opt_state": opt_state}
    return serialization.msgpack_restore(saved) if kind == "msgpack" else saved


def template(name):
    return jax.eval_shape(
        lambda: {"params": start(), "opt_state": FORMS[name].init(start())}
    )


def without_new_fields(tree):
    """Return a tree without what the states of the first edition did not have."""
    return jax.tree.map(
        lambda x: x._replace(nonfinite_index=()) if is_loss_scale(x) else x,
        tree,
        is_leaf=is_loss_scale,
    )


def is_loss_scale(x):
    return isinstance(x, optax_mp.LossScaleState)


@mostly_slow(
    ("name", "kind"), itertools.product(FORMS, KINDS), lambda _, kind: kind == "pickle"
)
def test_an_upgraded_run_goes_on_as_the_first_edition_did(name, kind):
    upgraded = optax_mp.upgrade_checkpoint(restored(name, kind), template(name))
    assert avals(upgraded) == avals(template(name))
    optax_mp.check_checkpoint(upgraded, template(name))
    params, opt_state = upgraded["params"], upgraded["opt_state"]
    later = train(FORMS[name], params, opt_state, STEPS_AFTER, len(STEPS_BEFORE))
    assert as_bits(without_new_fields(later)) == as_bits(read(name)["later"])


@every_form
@pytest.mark.parametrize("kind", KINDS)
def test_upgrading_changes_no_bit(name, kind):
    saved = restored(name, "pickle")
    upgraded = optax_mp.upgrade_checkpoint(restored(name, kind), template(name))
    assert upgraded["opt_state"].nonfinite_index == -1
    assert as_bits(without_new_fields(upgraded)) == as_bits(without_new_fields(saved))


@every_form
@pytest.mark.parametrize("kind", UNTYPED)
def test_a_first_edition_checkpoint_is_recognised(name, kind):
    with pytest.raises(
        ValueError,
        match=r"check_checkpoint: the checkpoint was saved by the first edition .*"
        r"`optax_mp.upgrade_checkpoint\(restored, template\)`",
    ):
        optax_mp.check_checkpoint(restored(name, kind), template(name))


@pytest.mark.parametrize("name", [name for name in FORMS if "stochastic" not in name])
def test_an_unpickled_state_without_a_storage_is_recognised(name):
    with pytest.raises(ValueError, match="was saved by the first edition"):
        optax_mp.check_checkpoint(restored(name, "pickle"), template(name))


@pytest.mark.slow
def test_an_unpickled_loss_scale_continues_without_an_upgrade():
    opt_state = restored("full_copy", "pickle")["opt_state"]
    tx, params = optax_mp.dynamic_loss_scale(optax.sgd(0.1)), start()
    opt_state = opt_state._replace(inner_state=tx.init(params).inner_state)
    for value in (1.0, jnp.inf):
        grads = jax.tree.map(lambda x, value=value: value * jnp.ones_like(x), params)
        opt_state = jax.jit(tx.update)(grads, opt_state, params)[1]
    assert opt_state.nonfinite_index == 0 and not opt_state.last_finite


@mostly_slow("name", FORMS, lambda name: name == "full_copy")
def test_an_upgraded_state_without_the_index_is_recognised(name):
    """As of a version between the editions, which had the new names of counters."""
    saved = serialization.to_state_dict(FORMS[name].init(start()))
    del saved["nonfinite_index"]
    wanted = template(name)["opt_state"]
    with pytest.raises(ValueError, match="optax_mp.upgrade_checkpoint"):
        optax_mp.check_checkpoint(saved, wanted)
    assert optax_mp.upgrade_checkpoint(saved, wanted).nonfinite_index == -1


def test_an_unpickled_state_is_upgraded_before_it_is_used():
    name = "full_copy"
    saved, tx = restored(name, "pickle"), FORMS[name]
    params, opt_state = saved["params"], saved["opt_state"]
    for use in (
        lambda: optax_mp.convert_opt_state(opt_state, params, tx, tx),
        lambda: optax_mp.master_params(opt_state, params),
    ):
        with pytest.raises(ValueError, match="`optax_mp.upgrade_checkpoint"):
            use()
    assert "masters" in optax_mp.memory_report(opt_state, params).by_role()


@every_form
def test_a_checkpoint_of_this_edition_is_not_taken_for_one_of_the_first(name):
    saved = {"params": start(), "opt_state": FORMS[name].init(start())}
    for tree in (saved, serialization.to_state_dict(saved)):
        optax_mp.check_checkpoint(tree, template(name))
        upgraded = optax_mp.upgrade_checkpoint(tree, template(name))
        assert as_bits(jax.tree.leaves(upgraded)) == as_bits(jax.tree.leaves(saved))


@pytest.mark.parametrize("kind", KINDS)
def test_an_upgrade_refuses_another_form(kind):
    for other, message in [
        ("split_16", r"\['w'\] was saved as float32\[16,16\], .* a restore would cast"),
        ("stochastic_rounding", r"was saved as float32\[16,16\], .* no such leaf"),
    ]:
        with pytest.raises(ValueError, match=f"(?s)upgrade_checkpoint: .*{message}"):
            optax_mp.upgrade_checkpoint(restored("full_copy", kind), template(other))


def test_an_upgrade_refuses_to_round_reshape_or_invent():
    saved, wanted = restored("full_copy", "orbax"), template("full_copy")
    rounding = optax_mp.cast_floating(jax.tree.map(jnp.zeros_like, wanted), "bfloat16")
    with pytest.raises(ValueError, match="a restore would round the masters"):
        optax_mp.upgrade_checkpoint(saved, rounding)
    saved["params"]["w"] = saved["params"]["w"].reshape(-1)
    with pytest.raises(ValueError, match=r"bfloat16\[256\], .*: another shape"):
        optax_mp.upgrade_checkpoint(saved, wanted)
    del saved["params"]["w"]
    with pytest.raises(ValueError, match=r"\['params'\]\['w'\] was not saved"):
        optax_mp.upgrade_checkpoint(saved, wanted)


def test_an_upgrade_needs_values():
    described = jax.eval_shape(lambda: restored("full_copy", "orbax"))
    with pytest.raises(TypeError, match="`saved` has a ShapeDtypeStruct at .*restore "):
        optax_mp.upgrade_checkpoint(described, template("full_copy"))


def test_an_upgrade_restores_keys_numbers_and_what_is_no_array():
    key = jax.random.key(3)
    wanted = {"key": key, "count": jnp.int32(0), "epoch": 0, "act": jnp.tanh}
    saved = {"key": np.asarray(jax.random.key_data(key)), "count": 3, "epoch": 2}
    found = optax_mp.upgrade_checkpoint(saved, wanted)
    assert as_bits(found["key"]) == as_bits(key)
    assert (int(found["count"]), found["count"].dtype) == (3, jnp.int32)
    assert (found["epoch"], found["act"]) == (2, jnp.tanh)


def test_an_upgrade_takes_the_sharding_of_the_template():
    mesh = jax.make_mesh((1,), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    wanted = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)
    found = optax_mp.upgrade_checkpoint(np.ones(4, np.float32), wanted)
    assert found.sharding == where


def test_every_class_of_the_first_edition_is_unpickled():
    found = {name: pickle.loads(saved) for name, saved in read("values").items()}
    for name, value in found.items():
        assert type(value) is getattr(optax_mp, name)
    assert found["Split"] == optax_mp.Split(8)
    assert found["FullCopy"] == optax_mp.FullCopy()
    assert found["Policy"] == optax_mp.get_policy("params=bfloat16,compute=bfloat16")
    scale = found["DynamicLossScale"]
    assert float(scale.loss_scale) == 2.0**10 and float(scale.min_loss_scale) == 0.5
    assert "total" in str(found["MemoryReport"])
    assert "float16" in str(found["GradientRangeReport"])


def test_old_modules_have_public_names_only():
    module = sys.modules["optax_mp._scaling"]
    assert module.LossScaleState is optax_mp.LossScaleState
    with pytest.raises(AttributeError, match="no public name '_Forgotten'"):
        module._Forgotten  # noqa: B018

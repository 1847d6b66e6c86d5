"""The guide's recipes for trainers: they do what the framework's own methods do."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from forms import tx_of
from guide import names_of
from recent_flax import recent_nnx

import optax_mp

nnx = recent_nnx()
pytest.importorskip("flax.training.train_state")
pytest.importorskip("orbax.checkpoint")
X = jax.random.normal(jax.random.key(0), (4, 128), jnp.bfloat16)


def test_a_train_state_hands_the_loss_to_the_loss_scale():
    state_class = names_of("loss_scaling.md", "State")["State"]
    tx = optax_mp.dynamic_loss_scale(tx_of("masters"))
    params = {"w": jnp.full((128, 1), 0.01, jnp.float16)}
    state = state_class.create(apply_fn=None, params=params, tx=tx)
    loss_and_grads = optax_mp.value_and_grad(
        lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32) ** 2)
    )

    @jax.jit
    def step(state, x):
        loss, grads = loss_and_grads(state.opt_state, state.params, x)
        return state.apply_gradients(grads=grads, value=loss)

    x = X.astype(jnp.float16)
    skipped = step(state, x.at[0, 0].set(jnp.nan))
    assert skipped.opt_state.scale == state.opt_state.scale  # the loss is to blame
    assert as_bits(skipped.params) == as_bits(params)
    taken = step(skipped, x)
    assert int(taken.step) == 2 and int(taken.opt_state.total_skipped_count) == 1
    assert as_bits(taken.params) != as_bits(params)


def learning_rate_as_tunix_reads_it(opt_state):
    """Look at the state, then at its fields, for hyperparameters."""
    for part in (opt_state, *opt_state):
        if hasattr(part, "hyperparams"):
            return part.hyperparams["learning_rate"][...]
    return None


def test_trainers_find_injected_hyperparameters():
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)
    low_bit = optax_mp.mixed_precision(optax_mp.low_bit_state(adamw))
    scaled = optax_mp.dynamic_loss_scale(low_bit)
    for tx in (adamw, optax_mp.mixed_precision(adamw), scaled):
        model = nnx.Linear(128, 128, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        opt_state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
        rate = optax.tree.get(nnx.as_pure(opt_state), "hyperparams")["learning_rate"]
        assert float(rate) == np.float32(1e-2)
        assert float(learning_rate_as_tunix_reads_it(opt_state)) == float(rate)
        if tx is not adamw:
            logged = optax_mp.metrics(nnx.as_pure(opt_state))["learning_rate"]
            assert float(logged) == float(rate)
    assert opt_state.inner_state.inner_state.hyperparams["learning_rate"] == rate


def test_a_state_answers_for_the_fields_of_the_state_in_it():
    accumulated = optax.MultiSteps(optax.adam(1e-2), 2)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    for wrap in (
        optax_mp.mixed_precision,
        optax_mp.low_bit_state,
        optax_mp.stochastic_rounding,
        lambda tx: optax_mp.static_loss_scale(optax_mp.mixed_precision(tx)),
    ):
        state = wrap(accumulated).init(params)
        copies = copy.deepcopy(state), pickle.loads(pickle.dumps(state))
        for found in (state, *copies, jax.tree.map(jnp.copy, state)):
            # As nanodo logs them.
            assert (int(found.gradient_step), int(found.mini_step)) == (0, 0)
            assert jax.tree.structure(found) == jax.tree.structure(state)
        assert not accumulated.has_updated(state)
        assert not hasattr(state, "_private") and not hasattr(state, "hyperparams")
        with pytest.raises(AttributeError, match="no field 'hyperparams'"):
            _ = state.hyperparams
        assert len(optax.tree.get_all_with_path(state, "mini_step")) == 1


def test_the_end_of_an_accumulation_is_seen_through_all_wrappers():
    accumulated = optax.MultiSteps(optax.adam(1e-2), 2)
    tx = optax_mp.with_average(
        optax_mp.dynamic_loss_scale(
            optax_mp.mixed_precision(optax_mp.low_bit_state(accumulated))
        ),
        decay=0.9,
    )
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for _ in range(4):
        _, state = update(params, state, params)
        seen.append(bool(accumulated.has_updated(state)))
    assert seen == [False, True, False, True]


def test_micro_batches_are_summed_in_float32_and_a_bad_one_skips_the_step():
    names = names_of("recipes.md", "accumulated_step")
    params, state = names["params"], names["opt_state"]
    x = jax.random.normal(jax.random.key(0), (256, 64), jnp.bfloat16)
    _, grads = jax.jit(names["over_micro_batches"])(state, params, x)
    each = [
        jax.jit(names["value_and_grad"])(state, params, x[i::64])[1]["w"]
        for i in range(64)
    ]
    mean = np.mean(np.asarray(each, np.float64), 0)
    # Float32 sums, of half a unit, 6e-8, for each batch.
    assert np.linalg.norm(grads["w"] - mean) < 1e-6 * np.linalg.norm(mean)
    copies = jax.tree.map(jnp.copy, (params, state))
    after, skipped, _ = names["accumulated_step"](*copies, x.at[7].set(jnp.nan))
    assert as_bits(after) == as_bits(params)
    assert as_bits(skipped.inner_state) == as_bits(state.inner_state)


def test_a_line_search_goes_on_from_its_results_at_masters():
    names = names_of("recipes.md", "line_search_step")
    assert names["line_search_step"]._cache_size() == 1
    masters = optax_mp.master_params(names["opt_state"], names["params"])
    assert float(names["loss"](masters)) < 1e-4


def test_merged_adapters_compute_what_they_did_and_start_again():
    names = names_of("adapters.md", "merge")
    model, optimizer, x = names["model"], names["optimizer"], names["x"]
    names["step"](model, optimizer, x, names["y"])
    before, adapter = model(x), model.hidden.lora_a[...]
    assert model.hidden.lora_b[...].any()
    names["merge"](model, optimizer, nnx.Rngs(9))
    # The merged kernel is rounded to bfloat16, by 2^-9 of itself; outputs are about 4.
    found = model(x).astype(np.float32)
    np.testing.assert_allclose(found, before.astype(np.float32), rtol=0, atol=2**-5)
    assert not model.hidden.lora_b[...].any()
    assert (model.hidden.lora_a[...] != adapter).any()
    state = nnx.as_pure(optimizer.opt_state)
    assert optax.tree.get(state, "count") == 121
    for name in ("mu", "nu"):
        assert not any(x.any() for x in jax.tree.leaves(optax.tree.get(state, name)))

"""docs/porting.md: its code trains, and what it says of both sides is so.

Where the old library runs, its block runs beside ours; where it does not, its rule is
written down in plain Python or NumPy, after the source that the page links.
"""

import contextlib
import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "porting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
TRAINING = [name for name in SECTIONS if name != "A run that is under way"]


def block(section, language, place=0):
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.S)[place]


@functools.cache
def new_code(section, place=0):
    """Return the names of a new block, and the losses that it printed."""
    return run(block(section, "python", place))


def run(source, **names):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "porting.md", "exec"), names)
    return names, [float(line) for line in printed.getvalue().split()]


def old_beside_new(section, **names):
    """Run the old block with the model of the new one; return both."""
    before_its_loop = block(section, "python").split("\nfor _ in")[0]
    model, _ = run(before_its_loop)
    return run(block(section, "py"), **{**model, **names}), new_code(section)


def as_bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def random_finite(seed=0, steps=400, share_bad=0.02):
    return np.random.default_rng(seed).random(steps) >= share_bad


def scaled(**settings):
    return optax_mp.dynamic_loss_scale(optax.sgd(0.1), **settings)


@functools.cache
def jitted_update(**settings):
    return jax.jit(scaled(**settings).update)


def scales_of(sequence, scale=2.0**16, finite_count=0, **settings):
    """Return the scale after each step of a transform, and its last state."""
    params, update = jnp.ones(2), jitted_update(**settings)
    state = carried(scaled(**settings), params, scale, finite_count)
    scales = []
    for finite in sequence:
        grads = np.full(2, 1.0 if finite else np.nan, np.float32)
        _, state = update(grads, state, params)
        scales.append(float(state.scale))
    return scales, state


def carried(tx, params, scale, finite_count):
    """Return a state with the scale and the count of an old run, as the page has it."""
    return tx.init(params)._replace(
        scale=jnp.float32(scale), finite_count=jnp.int32(finite_count)
    )


@jax.jit
def adjusted(scale, finite):
    return scale.adjust(finite)


# The page.


# By default every fourth one.
@mostly_slow("section", TRAINING, TRAINING[::4].__contains__)
def test_new_code_trains(section):
    _, losses = new_code(section)
    assert len(losses) == 20 and np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def test_every_link_of_the_table_has_its_section():
    slugs = {
        re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in SECTIONS
    }
    assert set(re.findall(r"\]\(#(.+?)\)", PAGE)) == slugs


# jmp.


def test_jmp_and_new_code_train_alike():
    jmp = pytest.importorskip("jmp")
    (old, old_losses), (new, losses) = old_beside_new("jmp", jmp=jmp)
    assert losses == pytest.approx(old_losses, rel=1e-6)
    np.testing.assert_allclose(new["params"]["w"], old["params"]["w"], rtol=1e-5)
    assert float(new["opt_state"].scale) == float(old["scale"].loss_scale)


def test_jmp_code_runs_after_a_change_of_the_import():
    (old, losses), (new, new_losses) = old_beside_new("jmp", jmp=optax_mp)
    assert isinstance(old["scale"], optax_mp.DynamicLossScale)
    assert losses == pytest.approx(new_losses, rel=1e-6)


def test_names_that_jmp_has_and_optax_mp_has_not_are_those_named():
    jmp = pytest.importorskip("jmp")
    missing = set(jmp.__all__) - set(optax_mp.__all__)
    assert missing == {"cast_to_half", "cast_to_full", "LossScale"}
    assert all(f"`{name}`" in SECTIONS["jmp"] for name in missing)


def test_scale_moves_as_with_jmp():
    jmp = pytest.importorskip("jmp")
    old = jmp.DynamicLossScale(jnp.float32(2.0**10), period=8)
    new = optax_mp.DynamicLossScale(2.0**10, period=8)
    sequence, scales = random_finite(0, 200, 0.12), []
    for finite in sequence:
        old, new = adjusted(old, finite), adjusted(new, finite)
        assert float(new.loss_scale) == float(old.loss_scale)
        assert int(new.counter) == int(old.counter)
        scales.append(float(old.loss_scale))
    found, _ = scales_of(sequence, 2.0**10, growth_interval=8, min_scale=1.0)
    assert found == scales
    assert len(set(scales)) > 3 and min(scales) == 1


def test_least_scale_of_jmp_is_lost_under_jit_and_ours_is_not():
    jmp = pytest.importorskip("jmp")
    through_jit = jax.jit(lambda scale: scale)
    old = jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=jnp.float32(2.0**-10))
    new = optax_mp.DynamicLossScale(1.0, min_loss_scale=2.0**-10)
    assert float(through_jit(old).min_loss_scale) == 1
    assert float(through_jit(new).min_loss_scale) == 2.0**-10


def test_float16_losses_and_scales_fail_in_jmp_only():
    jmp = pytest.importorskip("jmp")
    old = jmp.DynamicLossScale(jnp.asarray(2.0**15))
    new = optax_mp.DynamicLossScale(jnp.asarray(2.0**15))
    assert jnp.isinf(old.scale(jnp.float16(4)))
    assert float(new.scale(jnp.float16(4))) == 2.0**17

    as_in_its_readme = jmp.half_dtype()(2**15)
    with pytest.raises(TypeError, match="same dtypes"):
        jmp.DynamicLossScale(as_in_its_readme).adjust(jnp.array(True))
    ours = optax_mp.DynamicLossScale(as_in_its_readme).adjust(True)
    assert (ours.loss_scale.dtype, float(ours.loss_scale)) == (jnp.float32, 2.0**15)


def test_policies_differ_from_jmp_in_half_in_saturation_and_in_names():
    jmp = pytest.importorskip("jmp")
    assert jnp.dtype(jmp.half_dtype()) == jnp.float16  # on a CPU
    assert optax_mp.half_dtype() == jnp.bfloat16
    assert optax_mp.get_policy("half").compute_dtype == jnp.bfloat16

    large = jnp.float32(1e5)
    assert jnp.isinf(jmp.get_policy("p=f16").cast_to_param(large))
    assert float(optax_mp.get_policy("p=f16").cast_to_param(large)) == 65504

    old = jmp.get_policy("p=f32,c=f16,o=f32")
    new = optax_mp.get_policy("p=f32,c=f16,o=f32")
    assert str(old) == "p=full,c=f16,o=full"
    assert str(new) == "params=float32,compute=float16,output=float32"
    assert optax_mp.get_policy(str(old)) == optax_mp.get_policy(str(new)) == new
    assert str(optax_mp.Policy(*3 * [np.dtype("float32")])).startswith("params=float32")


def test_jmp_scale_passes_the_limit_of_ours():
    jmp = pytest.importorskip("jmp")
    old = jmp.DynamicLossScale(jnp.float32(2.0**24), period=1)
    assert float(old.adjust(jnp.array(True)).loss_scale) == 2.0**25
    scales, _ = scales_of([True] * 10, 2.0**24, growth_interval=8)
    assert scales == [2.0**24] * 10


@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-2), optax.adam(lambda n: 0.1 / (n + 1))]
)
def test_bad_step_moves_nothing_of_the_optimizer(inner):
    """Moments, counts and schedules; torch's scheduler and flax's step would go on."""
    tx, params = optax_mp.dynamic_loss_scale(inner), {"w": jnp.ones(3)}
    state = tx.init(params)
    _, state = tx.update({"w": jnp.ones(3)}, state, params)
    updates, after = tx.update({"w": jnp.array([1, jnp.inf, 1])}, state, params)
    assert as_bits(after.inner_state) == as_bits(state.inner_state)
    assert as_bits(optax.apply_updates(params, updates)) == as_bits(params)
    # The bare optimizer counts the step, and takes the inf in.
    _, bare = inner.update({"w": jnp.array([1, jnp.inf, 1])}, state.inner_state, params)
    assert as_bits(bare) != as_bits(state.inner_state)


# jaxamp.


def jaxamp_scales(sequence, scale=2.0**15, patience=2000):
    """Return the scales of jaxamp's rule: grow where the count has passed patience."""
    count, scales = 0, []
    for finite in sequence:
        if not finite:
            scale, count = np.float32(scale / 2), 0
        elif count >= patience:
            scale, count = np.float32(scale * 2), 0
        else:
            count += 1
        scales.append(float(scale))
    return scales


def test_scale_grows_one_step_before_that_of_jaxamp_and_does_not_vanish():
    new, scales = optax_mp.DynamicLossScale(2.0**15, period=3), []
    for _ in range(8):
        new = adjusted(new, True)
        scales.append(float(new.loss_scale))
    assert scales == [2.0**15] * 2 + [2.0**16] * 3 + [2.0**17] * 3
    old = jaxamp_scales([True] * 8, patience=3)
    assert old == [2.0**15] * 3 + [2.0**16] * 4 + [2.0**17]
    for _ in range(200):
        new = adjusted(new, False)
    assert float(new.loss_scale) == 1
    assert jaxamp_scales([False] * 200)[-1] == 0


def test_rule_of_jaxamp_is_as_written_down():
    jaxamp = pytest.importorskip("jaxamp")
    f = jax.jit(
        jaxamp.dynamic_scale_value_and_grad(
            lambda x, bad: (x * bad).sum(), redo_on_nan=0
        )
    )
    state = jaxamp.DynamicScalerState(patience=jnp.int32(3))
    sequence = np.concatenate([random_finite(0, 30, 0.1), [False] * 170])
    scales = []
    for finite in sequence:
        bad = 1.0 if finite else np.nan
        state, _ = f(jnp.ones(2), bad, dynamic_scaler_state=state)
        scales.append(float(state.scaler))
    # From 2^-127 on XLA on CPU sees zero, and NumPy does not.
    assert scales[:160] == jaxamp_scales(sequence[:160], patience=3)
    assert scales[-1] == 0
    with_aux = jaxamp.dynamic_scale_value_and_grad(
        lambda x: (x.sum(), jnp.nan), has_aux=True, redo_on_nan=0
    )
    state, _ = with_aux(jnp.ones(2), dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert float(state.scaler) == 2.0**14
    with pytest.raises(ValueError, match="too many values"):
        jaxamp.amp(lambda x: x @ x)(jnp.ones((2, 2)))


def test_nan_in_auxiliary_output_leaves_the_scale():
    f = optax_mp.dynamic_scale_value_and_grad(
        lambda x: (x.sum(), jnp.nan), has_aux=True, redo_on_nan=3
    )
    scale, _ = f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(8.0))
    assert (float(scale.loss_scale), int(scale.counter)) == (8, 1)


@pytest.mark.slow
def test_what_ten_tries_do_not_mend_is_skipped_by_a_static_scale():
    names, _ = new_code("jaxamp")
    nan = jnp.full_like(names["x"], jnp.nan)
    params, state = names["params"], names["opt_state"]
    scale, (_, grads) = names["loss_and_grads"](
        params, nan, loss_scale=optax_mp.DynamicLossScale(2.0**15)
    )
    assert float(scale.loss_scale) == 2.0 ** (15 - 11)
    updates, after = names["update"](grads, state, params)
    assert as_bits(optax.apply_updates(params, updates)) == as_bits(params)
    assert int(after.total_skipped_count) == int(state.total_skipped_count) + 1


def test_amp_enters_jit_and_multiplies_in_the_widest_dtype_of_its_inputs():
    w, x = jnp.full((4, 4), 1 / 3), jnp.full((4, 4), 1 / 7)
    product = optax_mp.amp(jax.jit(lambda x: x @ w), compute_dtype=jnp.float16)
    rounded = x.astype(jnp.float16) @ w.astype(jnp.float16)
    np.testing.assert_array_equal(product(x), rounded.astype(jnp.float32))
    # A product and a bias of it: 16 bits times 16 bits stays 16 bits.
    twice = optax_mp.amp(lambda x: (x @ w) * (x @ w), compute_dtype=jnp.float16)
    np.testing.assert_array_equal(twice(x), (rounded * rounded).astype(jnp.float32))


# flax.


@pytest.mark.slow
def test_flax_and_new_code_train_alike():
    scale = pytest.importorskip("flax.training.dynamic_scale")
    (old, old_losses), (new, losses) = old_beside_new(
        "flax DynamicScale", DynamicScale=scale.DynamicScale
    )
    assert losses == pytest.approx(old_losses, rel=1e-6)
    np.testing.assert_allclose(new["params"]["w"], old["params"]["w"], rtol=1e-5)
    assert float(new["opt_state"].scale) == float(old["scale"].scale)
    with pytest.raises(TypeError, match="keyword"):
        old["scale"].value_and_grad(old["loss_fn"])(old["params"], x=old["x"])
    step = functools.partial(optax_mp.value_and_grad(new["loss_fn"]), x=new["x"])
    loss, _ = jax.eval_shape(step, new["opt_state"], new["params"])
    assert loss.shape == ()


def flax_step(loss_fn=lambda p: (p**2).sum()):
    return jax.jit(lambda scale, p: scale.value_and_grad(loss_fn)(p))


def test_scale_grows_one_step_before_that_of_flax():
    flax = pytest.importorskip("flax.training.dynamic_scale")
    old, step, scales = flax.DynamicScale(growth_interval=8), flax_step(), []
    for _ in range(18):
        old, *_ = step(old, jnp.ones(2))
        scales.append(float(old.scale))
    assert scales == [2.0**16] * 8 + [2.0**17] * 9 + [2.0**18]
    new, _ = scales_of([True] * 18, growth_interval=8)
    assert new == [2.0**16] * 7 + [2.0**17] * 8 + [2.0**18] * 3


def test_400_bad_steps_end_at_the_floor_and_are_told():
    new, state = scales_of([False] * 400, growth_interval=8)
    assert new[-1] == 2.0**-14
    with pytest.raises(
        FloatingPointError, match="400(?s:.*)a NaN or infinity of the model"
    ):
        optax_mp.check_loss_scale(state)


def test_400_bad_steps_leave_flax_next_to_nothing():
    flax = pytest.importorskip("flax.training.dynamic_scale")
    old, step = flax.DynamicScale(), flax_step()
    for _ in range(400):
        old, *_ = step(old, jnp.full(2, jnp.nan))
    assert 0 < float(old.scale) < 2e-38


def test_first_float16_loss_is_nan_in_flax_only():
    flax = pytest.importorskip("flax.training.dynamic_scale")

    def loss_fn(p):
        return p.astype(jnp.float16).sum()

    step = flax_step(loss_fn)
    scale, finite, loss, _ = step(flax.DynamicScale(), jnp.ones(1))
    assert np.isnan(loss) and not finite
    step(scale, jnp.ones(1))
    assert step._cache_size() == 2
    state = scaled().init(jnp.ones(1))
    loss, _ = optax_mp.value_and_grad(loss_fn)(state, jnp.ones(1))
    assert float(loss) == 1


def test_axis_name_makes_ranks_agree_and_averages_nothing():
    tx = scaled(axis_name="ranks", init_scale=1.0)
    params = jnp.ones((2, 1))
    ranks = jax.jit(jax.vmap(tx.update, (0, None, 0), axis_name="ranks"))

    def update(grads):
        return ranks(grads, tx.init(params[0]), params)

    updates, _ = update(jnp.array([[1.0], [3.0]]))
    np.testing.assert_allclose(updates, [[-0.1], [-0.3]], rtol=1e-6)
    updates, state = update(jnp.array([[1.0], [jnp.nan]]))
    assert not updates.any() and not state.last_finite.any()


def test_train_state_counts_a_skipped_step_and_the_optimizer_does_not():
    train_state = pytest.importorskip("flax.training.train_state")
    tx = optax_mp.dynamic_loss_scale(optax.adam(1e-2))
    state = train_state.TrainState.create(
        apply_fn=lambda: None, params={"w": jnp.ones(2)}, tx=tx
    )
    state = state.apply_gradients(grads={"w": jnp.full(2, jnp.inf)})
    assert int(state.step) == 1
    assert int(optax.tree.get(state.opt_state, "count")) == 0


# Masters by hand.


def test_masters_by_hand_are_those_of_mixed_precision_bit_for_bit():
    (old, old_losses), (new, losses) = old_beside_new(
        "Hand-written masters", optax_mp=optax_mp
    )
    assert losses == old_losses
    assert as_bits(new["masters"]) == as_bits(old["masters"])
    assert as_bits(new["params"]) == as_bits(old["params"])
    assert as_bits(new["opt_state"].inner_state) == as_bits(old["opt_state"])
    # What it is for: without masters the params end elsewhere.
    start, _ = run("\n".join(block("Hand-written masters", "python").split("\n")[:8]))
    assert as_bits(start["params"]) != as_bits(new["params"])


@pytest.mark.slow
def test_masters_by_hand_agree_on_random_gradients_of_all_sizes():
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(8, 32)), jnp.float16)}
    tx = optax_mp.mixed_precision(optax.adamw(1e-2), update_dtype=jnp.float32)
    masters = optax_mp.cast_floating(params, jnp.float32)
    old_state, state = optax.adamw(1e-2).init(masters), tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(30):
        size = 10 ** rng.uniform(-7, 2, (8, 32))
        grads = {"w": jnp.asarray(rng.normal(size=(8, 32)) * size, jnp.float16)}
        masters, old_state = step_by_hand(masters, old_state, grads)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert as_bits(params["w"]) == as_bits(masters["w"].astype(jnp.float16))
    assert as_bits(state) == as_bits((masters, old_state))


@jax.jit
def step_by_hand(masters, state, grads):
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, state = optax.adamw(1e-2).update(grads, state, masters)
    return optax.apply_updates(masters, updates), state


def test_master_too_large_for_float16_saturates():
    tx = optax_mp.mixed_precision(optax.sgd(1.0), update_dtype=jnp.float32)
    params = jnp.full(2, 6e4, jnp.float16)
    updates, state = tx.update(jnp.full(2, -1e4, jnp.float16), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    master = optax_mp.master_params(state, params)
    np.testing.assert_array_equal(master, np.float32(np.float16(6e4)) + np.float32(1e4))
    np.testing.assert_array_equal(params, np.float16(65504))
    assert jnp.isinf(master.astype(jnp.float16)).all()  # By hand, and `x .= xT`.


def test_split_is_two_bytes_a_weight_less_and_float32_has_no_second_copy():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "norm": jnp.ones(64)}

    def size(**settings):
        state = optax_mp.mixed_precision(optax.sgd(0.1), **settings).init(params)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    assert size() == 4 * 64 * 64
    assert size(storage=optax_mp.Split()) == 2 * 64 * 64


# torch.


def scales_by(scaler, sequence):
    """Return the scale of one of the scalers here after each step."""
    found = []
    for finite in sequence:
        scaler.update(finite)
        found.append(float(scaler.scale))
    return found


class TorchScaler:
    """GradScaler's numbers, after its kernel: a tracker, and no limits."""

    def __init__(self, scale=2.0**16, tracker=0, interval=2000):
        self.scale, self.tracker, self.interval = np.float32(scale), tracker, interval

    def update(self, finite):
        if not finite:
            self.scale, self.tracker = np.float32(self.scale * np.float32(0.5)), 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            doubled = np.float32(self.scale * np.float32(2))
            self.scale = doubled if np.isfinite(doubled) else self.scale
            self.tracker = 0


def test_scale_moves_as_that_of_torch_within_the_limits():
    sequence = random_finite(2, 300, 0.06)
    scales, state = scales_of(sequence, growth_interval=8)
    torch = TorchScaler(interval=8)
    assert scales == scales_by(torch, sequence)
    assert int(state.finite_count) == torch.tracker
    assert len(set(scales)) > 3


def test_defaults_are_those_of_torch():
    assert float(scaled().init(jnp.ones(1)).scale) == TorchScaler().scale
    scales, _ = scales_of([True, True, False], finite_count=1998)
    assert scales == scales_by(TorchScaler(tracker=1998), [True, True, False])
    assert scales == [2.0**16, 2.0**17, 2.0**16]


def test_scale_of_torch_alone_has_no_limits():
    assert scales_by(TorchScaler(), [False] * 400)[-1] == 0
    assert scales_of([False] * 40, growth_interval=8)[0][-1] == 2.0**-14
    assert scales_by(TorchScaler(2.0**24, interval=1), [True]) == [2.0**25]


def test_clipping_inside_sees_true_gradients():
    grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.1])}
    params = jax.tree.map(jnp.zeros_like, grads)
    tx = optax_mp.dynamic_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), init_scale=2.0**10
    )
    scaled_grads = jax.tree.map(lambda g: g * 2.0**10, grads)
    updates, _ = tx.update(scaled_grads, tx.init(params), params)
    norm = np.sqrt(3**2 + 4**2 + 0.1**2)
    for name, grad in grads.items():
        np.testing.assert_allclose(updates[name], -np.asarray(grad) / norm, rtol=1e-6)


def test_partition_inside_is_skipped_whole():
    labels = {"a": "adam", "b": "sgd"}
    inner = optax.partition({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, labels)
    tx = optax_mp.dynamic_loss_scale(inner)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    grads = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert as_bits(optax.apply_updates(params, updates)) == as_bits(params)


def test_float16_params_and_gradients_are_unscaled():
    tx = optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(optax.sgd(1.0)))
    params = jnp.ones(2, jnp.float16)
    grads = jnp.full(2, 2.0**-8, jnp.float16)  # 2^-24 times the scale
    _, state = tx.update(grads, tx.init(params), params)
    master = optax_mp.master_params(state, params)
    np.testing.assert_array_equal(master, np.float32(1 - 2.0**-24))


def test_adamw_decays_less_than_that_of_torch_by_default():
    """torch's default takes 1e-3 * 0.01 of a weight a step, optax's 1e-3 * 1e-4."""
    updates = {}
    for name, tx in {
        "optax": optax.adamw(1e-3),
        "torch": optax.adamw(1e-3, weight_decay=0.01),
    }.items():
        updates[name], _ = tx.update(jnp.zeros(1), tx.init(jnp.ones(1)), jnp.ones(1))
    assert float(updates["optax"][0]) == pytest.approx(-1e-7)
    assert float(updates["torch"][0]) == pytest.approx(-1e-5)


# Apex.


class ApexScaler:
    """LossScaler's numbers, after apex/amp/scaler.py: a ceiling, and no floor."""

    def __init__(self, scale=2.0**16, unskipped=0, window=2000):
        self.scale, self.unskipped, self.window = scale, unskipped, window

    def update(self, finite):
        if finite:
            self.unskipped += 1
        else:
            self.scale, self.unskipped = self.scale / 2, 0
        if self.unskipped == self.window:
            self.scale, self.unskipped = min(2.0**24, self.scale * 2), 0


def test_scale_moves_as_that_of_apex_up_to_the_ceiling():
    sequence = random_finite(3, 300, 0.02)
    scales, state = scales_of(sequence, growth_interval=8)
    apex = ApexScaler(window=8)
    assert scales == scales_by(apex, sequence)
    assert int(state.finite_count) == apex.unskipped
    assert max(scales) == 2.0**24
    assert scales_by(ApexScaler(), [False] * 40)[-1] < 2.0**-14


def test_static_scale_skips_too():
    tx = optax_mp.static_loss_scale(optax.sgd(1.0), 128.0)
    updates, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)), jnp.ones(1))
    assert float(updates[0]) == 0 and float(state.scale) == 128


def test_o2_keeps_norms_in_float32_and_the_weights_in_masters():
    names, _ = new_code("Apex O2")
    dtypes = {name: leaf.dtype for name, leaf in names["params"].items()}
    assert dtypes == {"w": jnp.float16, "norm": jnp.float32}
    master = optax_mp.master_params(names["opt_state"], names["params"])
    from_float16 = np.asarray(names["params"]["w"], np.float32)
    assert np.abs(np.asarray(master["w"]) - from_float16).max() > 0
    np.testing.assert_array_equal(
        np.asarray(master["w"]).astype(np.float16), names["params"]["w"]
    )


# Optimisers.jl.


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_rule_sees_float32_gradients_and_that_of_optimisers_jl_does_not(size):
    grads = jnp.full(2, size, jnp.float16)
    params = jnp.ones(2, jnp.float16)
    tx = optax_mp.mixed_precision(optax.adam(1e-3, b2=0.999), jnp.float32)
    _, state = tx.update(grads, tx.init(params), params)
    nu = np.asarray(optax.tree.get(state, "nu"))
    true = 0.001 * np.asarray(grads, np.float64) ** 2
    np.testing.assert_allclose(nu, true, rtol=1e-4)
    # There `abs2(dx)` is a Float16: 0 for the small one, inf for the large.
    with np.errstate(over="ignore", under="ignore"):
        squared = np.asarray(grads) * np.asarray(grads)
    assert squared.dtype == np.float16
    assert (squared == (0 if size < 1 else np.inf)).all()


def test_float16_squares_vanish_and_overflow_where_the_page_says():
    sizes = np.float16([1.7e-4, 1.75e-4, 255.8, 256])
    with np.errstate(over="ignore", under="ignore"):
        vanished, kept, finite, overflown = sizes * sizes
    assert vanished == 0 < kept
    assert np.isfinite(finite) and np.isinf(overflown)


def test_learning_rate_is_set_by_name():
    names, _ = new_code("Optimisers.jl")
    assert float(optax.tree.get(names["opt_state"], "learning_rate")) == np.float32(
        1e-3
    )
    update = jax.jit(names["tx"].update)
    grads = jax.tree.map(jnp.ones_like, names["params"])
    _, state = update(grads, names["opt_state"], names["params"])
    before = optax_mp.master_params(names["opt_state"], names["params"])
    after = optax_mp.master_params(state, names["params"])
    # Adam's first steps are as long as the rate: under it now, where 1e-2 was.
    assert 0 < np.abs(np.asarray(after["w"]) - np.asarray(before["w"])).max() < 2e-3


# Emily.


def emily_scales(sequence, scale=65536.0, interval=2000, least=1.0):
    counter, scales = 0, []
    for finite in sequence:
        counter = counter + 1 if finite else 0
        if not finite:
            scale = max(least, scale * 0.5)
        elif counter >= interval:
            scale, counter = scale * 2.0, 0
        scales.append(scale)
    return scales


def test_scale_moves_as_that_of_emily():
    start = random_finite(4, 200, 0.1)
    sequence = np.concatenate([start, [False] * 30, [True] * 30])
    scales, _ = scales_of(sequence, growth_interval=8, min_scale=1.0)
    assert scales == emily_scales(sequence, interval=8)
    assert min(scales) == 1
    assert emily_scales([True] * 10, 2.0**24, interval=1)[-1] == 2.0**34


def test_columns_of_emily_agree():
    grads = {"w": jnp.array([2.0**-10, 1.0], jnp.float16), "count": jnp.int32(3)}
    scale = optax_mp.DynamicLossScale(65536.0)
    tx = scaled(min_scale=1.0)
    state = tx.init({"w": jnp.ones(2)})
    loss = jnp.float16(2.0)
    assert (
        float(scale.scale(loss)) == float(optax_mp.scale_loss(loss, state)) == 2.0**17
    )
    unscaled = scale.unscale(grads)
    np.testing.assert_array_equal(unscaled["w"], np.float32([2.0**-26, 2.0**-16]))
    assert unscaled["count"].dtype == jnp.int32
    updates, _ = tx.update({"w": grads["w"]}, state, {"w": jnp.ones(2)})
    np.testing.assert_allclose(
        updates["w"], -0.1 * np.asarray(unscaled["w"]), rtol=1e-6
    )
    # Emily's order: in the gradient's own type, and cast afterwards.
    with np.errstate(under="ignore"):
        assert float(np.float16(2.0**-10) * np.float16(2.0**-16)) == 0
    assert bool(optax_mp.all_finite(unscaled))
    assert not optax_mp.all_finite({"w": jnp.array([jnp.inf])})


# Runs that are under way.


def test_fields_that_are_replaced_keep_their_dtypes():
    names, _ = new_code("A run that is under way", 0)
    assert kinds(names["opt_state"]) == kinds(names["tx"].init(names["params"]))


def test_scale_is_set_by_name_in_any_nesting():
    link = optax_mp.dynamic_loss_scale()
    tx = optax.chain(link, optax_mp.mixed_precision(optax.adam(1e-3)))
    state = tx.init({"w": jnp.ones(2, jnp.float16)})
    moved = optax.tree.set(state, scale=jnp.float32(8), finite_count=jnp.int32(3))
    assert float(optax_mp.loss_scale(moved)) == 8
    assert int(moved[0].finite_count) == 3
    assert kinds(moved) == kinds(state)
    assert as_bits(moved[1:]) == as_bits(state[1:])


def kinds(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


def adamw_of_torch(params, grads, m, v, count, rate=1e-3, decay=0.01):
    """Return a step of AdamW as torch documents it, in float64."""
    params = params * (1 - rate * decay)
    m, v = 0.9 * m + 0.1 * grads, 0.999 * v + 0.001 * grads**2
    count += 1
    step = rate / (1 - 0.9**count)
    return params - step * m / (np.sqrt(v / (1 - 0.999**count)) + 1e-8), m, v, count


def test_run_with_torch_goes_on():
    names, _ = new_code("A run that is under way", 0)
    params, state, tx = names["params"], names["opt_state"], names["tx"]
    old, scaler = (np.ones(4), np.full(4, 0.1), np.full(4, 0.01), 7000), names["scaler"]
    torch = TorchScaler(
        scaler["scale"], scaler["_growth_tracker"], scaler["growth_interval"]
    )
    update, rng = jax.jit(tx.update), np.random.default_rng(6)
    for step in range(200):
        grads, finite = rng.normal(size=4), step not in (5, 6, 190)
        if finite:
            old = adamw_of_torch(old[0], grads, *old[1:])
        scaled_grads = grads * float(torch.scale) if finite else np.full(4, np.inf)
        torch.update(finite)
        grads = {"w": np.float32(scaled_grads)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert float(state.scale) == torch.scale
        assert int(state.finite_count) == torch.tracker
    np.testing.assert_allclose(params["w"], old[0], rtol=1e-5)
    assert np.abs(old[0] - 1).max() > 1e-3
    assert int(optax.tree.get(state, "count")) == old[3] == 7197


def test_scale_of_a_run_with_jmp_goes_on():
    jmp = pytest.importorskip("jmp")
    old, sequence = (
        jmp.DynamicLossScale(jnp.float32(2.0**9), period=8),
        random_finite(7),
    )
    for finite in sequence[:40]:
        old = adjusted(old, finite)
    assert int(old.counter) > 0
    scales, _ = scales_of(
        sequence[40:100], old.loss_scale, old.counter, growth_interval=8, min_scale=1.0
    )
    expected = []
    for finite in sequence[40:100]:
        old = adjusted(old, finite)
        expected.append(float(old.loss_scale))
    assert scales == expected and len(set(scales)) > 2


def test_scale_of_a_run_with_flax_goes_on_and_grows_a_step_earlier():
    flax = pytest.importorskip("flax.training.dynamic_scale")
    old, step = flax.DynamicScale(growth_interval=8), flax_step()
    for _ in range(6):
        old, *_ = step(old, jnp.ones(2))
    scales, _ = scales_of([True] * 3, old.scale, old.fin_steps, growth_interval=8)
    assert scales == [2.0**16, 2.0**17, 2.0**17]
    expected = []
    for _ in range(3):
        old, *_ = step(old, jnp.ones(2))
        expected.append(float(old.scale))
    assert expected == [2.0**16, 2.0**16, 2.0**17]


def test_scale_over_the_limit_stays_until_an_overflow():
    scales, _ = scales_of([True] * 9 + [False], 2.0**30, growth_interval=8)
    assert scales == [2.0**30] * 9 + [2.0**29]


def test_run_with_masters_by_hand_goes_on_bit_for_bit():
    rng = np.random.default_rng(8)
    masters = {"w": jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)}
    old_state = optax.adamw(1e-2).init(masters)
    stream = [{"w": jnp.asarray(g, jnp.float16)} for g in rng.normal(size=(10, 8, 32))]
    for grads in stream[:5]:
        masters, old_state = step_by_hand(masters, old_state, grads)

    params = optax_mp.cast_floating(masters, jnp.float16)
    tx = optax_mp.mixed_precision(optax.adamw(1e-2), param_dtype=jnp.float16)
    state = tx.init(masters)._replace(inner_state=old_state)
    assert kinds(state) == kinds(tx.init(masters))
    around = optax_mp.dynamic_loss_scale(tx)
    nested = around.init(params)
    nested = nested._replace(
        inner_state=tx.init(params)._replace(inner_state=old_state)
    )
    nested = optax_mp.replace_master_params(nested, params, masters)
    assert as_bits(nested.inner_state) == as_bits(state)

    update = jax.jit(tx.update)
    for grads in stream[5:]:
        masters, old_state = step_by_hand(masters, old_state, grads)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert as_bits(state) == as_bits((masters, old_state))


def test_blocks_of_masters_give_the_same_state_in_both_ways():
    names, _ = new_code("A run that is under way", 1)
    first = names["tx"].init(names["masters"])
    first = first._replace(inner_state=names["old_state"])
    assert as_bits(first) == as_bits(names["opt_state"])
    master = optax_mp.master_params(names["opt_state"], names["params"])
    assert as_bits(master) == as_bits(names["masters"])

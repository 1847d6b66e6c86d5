"""docs/porting: its code trains, and what it says of both sides is so.

Where the old library runs, its block runs beside ours; where it does not, its rule is
written down in plain Python or NumPy, after the source that the page links.
"""

import contextlib
import functools
import io
import pathlib
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from guide import names_of
from reference import LossScaleRule
from slow_cases import mostly_slow

import optax_mp

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "porting"
PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))
}
TRAINING = [name for name in PAGES if name != "running"]


def block(page, language, place=0):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.S)[place]


@functools.cache
def new_code(page, place=0):
    """Return the names of a new block, and the losses that it printed."""
    return run(block(page, "python", place))


def run(source, **names):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "porting", "exec"), names)
    return names, [float(line) for line in printed.getvalue().split()]


def old_beside_new(page, **names):
    """Run the old block with the model of the new one; return both."""
    before_its_loop = block(page, "python").split("\nfor _ in")[0]
    model, _ = run(before_its_loop)
    return run(block(page, "py"), **{**model, **names}), new_code(page)


@mostly_slow("page", TRAINING, lambda page: page == "torch")
def test_new_code_trains(page):
    _, losses = new_code(page)
    assert len(losses) == 20 and np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


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
    assert all(f"`{name}`" in PAGES["jmp"] for name in missing)


@pytest.mark.slow
def test_flax_and_new_code_train_alike():
    scale = pytest.importorskip("flax.training.dynamic_scale")
    (old, old_losses), (new, losses) = old_beside_new(
        "flax", DynamicScale=scale.DynamicScale
    )
    assert losses == pytest.approx(old_losses, rel=1e-6)
    np.testing.assert_allclose(new["params"]["w"], old["params"]["w"], rtol=1e-5)
    assert float(new["opt_state"].scale) == float(old["scale"].scale)
    with pytest.raises(TypeError, match="keyword"):
        old["scale"].value_and_grad(old["loss_fn"])(old["params"], x=old["x"])
    step = functools.partial(optax_mp.value_and_grad(new["loss_fn"]), x=new["x"])
    loss, _ = jax.eval_shape(step, new["opt_state"], new["params"])
    assert loss.shape == ()


def test_masters_by_hand_are_those_of_mixed_precision_bit_for_bit():
    (old, old_losses), (new, losses) = old_beside_new("masters", optax_mp=optax_mp)
    assert losses == old_losses
    assert as_bits(new["masters"]) == as_bits(old["masters"])
    assert as_bits(new["params"]) == as_bits(old["params"])
    assert as_bits(new["opt_state"].inner_state) == as_bits(old["opt_state"])
    # What it is for: without masters the params end elsewhere.
    start, _ = run("\n".join(block("masters", "python").split("\n")[:8]))
    assert as_bits(start["params"]) != as_bits(new["params"])


def adamw_of_torch(params, grads, m, v, count, rate=1e-3, decay=0.01):
    """Return a step of AdamW as torch documents it, in float64."""
    params = params * (1 - rate * decay)
    m, v = 0.9 * m + 0.1 * grads, 0.999 * v + 0.001 * grads**2
    count += 1
    step = rate / (1 - 0.9**count)
    return params - step * m / (np.sqrt(v / (1 - 0.999**count)) + 1e-8), m, v, count


def test_run_with_torch_goes_on():
    names, _ = new_code("running", 0)
    params, state, tx = names["params"], names["opt_state"], names["tx"]
    old, scaler = (np.ones(4), np.full(4, 0.1), np.full(4, 0.01), 7000), names["scaler"]
    torch = LossScaleRule(scaler["scale"], scaler["growth_interval"])
    torch.finite_count = scaler["_growth_tracker"]
    update, rng = jax.jit(tx.update), np.random.default_rng(6)
    for step in range(200):
        grads, finite = rng.normal(size=4), step not in (5, 6, 190)
        if finite:
            old = adamw_of_torch(old[0], grads, *old[1:])
        scaled_grads = grads * float(torch.scale) if finite else np.full(4, np.inf)
        torch.step("." if finite else "x")
        grads = {"w": np.float32(scaled_grads)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert float(state.scale) == torch.scale
        assert int(state.finite_count) == torch.finite_count
    np.testing.assert_allclose(params["w"], old[0], rtol=1e-5)
    assert np.abs(old[0] - 1).max() > 1e-3
    assert int(optax.tree.get(state, "count")) == old[3] == 7197


def test_a_torch_script_goes_on_from_its_file():
    names, _ = new_code("torch")
    saved = names["file"].read_bytes()
    here = jax.tree.map(jnp.copy, (names["params"], names["opt_state"]))
    # A micro-batch that is dropped right after a step: all that counts steps stays.
    bad = names["step"](*pickle.loads(saved), jnp.full((8, 16), jnp.inf))
    assert names["accumulated"].has_updated(bad[1])
    assert as_bits(bad[0]) == as_bits(here[0]) and bad[1].step_count == 20
    runs = [here, pickle.loads(saved)]
    for i in range(4):
        runs = [names["step"](*run, names["x"][i])[:2] for run in runs]
    assert as_bits(runs[0]) == as_bits(runs[1])
    assert runs[0][1].step_count == 21


def test_weights_and_moments_of_torch_go_on_in_flax():
    names = names_of("from_torch.md", "to_flax")
    to_flax, like, tx = names["to_flax"], names["like"], names["tx"]
    rng = np.random.default_rng(8)
    kinds = names["weights"].items()
    weights = {name: rng.normal(size=w.shape) for name, w in kinds}
    first = {name: 0.1 * rng.normal(size=w.shape) for name, w in kinds}
    second = {name: rng.uniform(1e-4, 1e-2, size=w.shape) for name, w in kinds}
    pretrained = to_flax(weights, like)
    x = rng.normal(size=(3, 4))
    dense = pretrained["Dense_0"]
    expected = x @ weights["0.weight"].T + weights["0.bias"]
    np.testing.assert_allclose(x @ dense["kernel"] + dense["bias"], expected, rtol=1e-5)

    state = optax.tree.set(
        tx.init(pretrained),
        mu=to_flax(first, like),
        nu=to_flax(second, like),
        count=jnp.int32(7000),
    )
    params = optax_mp.cast_floating(pretrained, jnp.bfloat16)
    old = {name: (weights[name], first[name], second[name], 7000) for name, _ in kinds}
    for _ in range(3):
        grads = {name: rng.normal(size=w.shape) for name, w in kinds}
        old = {
            name: adamw_of_torch(w, grads[name], *rest)
            for name, (w, *rest) in old.items()
        }
        updates, state = jax.jit(tx.update)(to_flax(grads, like), state, params)
        params = optax.apply_updates(params, updates)
    found = optax_mp.master_params(state, params)
    expected = to_flax({name: w for name, (w, *_) in old.items()}, like)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    conv = {"Conv_0": {"kernel": jnp.zeros((3, 5, 2, 7))}}
    kernel = to_flax({"Conv_0.weight": np.zeros((7, 2, 3, 5))}, conv)
    assert kernel["Conv_0"]["kernel"].shape == (3, 5, 2, 7)

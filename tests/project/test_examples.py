"""The examples train as float32 does, on params that are their masters rounded."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits, avals
from recent_flax import recent_nnx
from slow_cases import mostly_slow

import optax_mp

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAMEWORKS = {
    "plain_jax": None,
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "equinox_mlp": "equinox",
    "haiku_mlp": "haiku",
}
# Of one shape: `FORMS` and `train(dtype, tx, batches)`.
LOOPS = [*FRAMEWORKS, "lookahead", "schedule_free"]
STEPS, BAD_STEP = 8, 5


@functools.cache
def example(name):
    """Import an example by its path, or skip the test without what it is for."""
    if FRAMEWORKS.get(name):
        pytest.importorskip(FRAMEWORKS[name])
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Training


def trained(name, form, batches):
    """Return (params, opt_state, losses) of an example, whatever it holds them in."""
    module = example(name)
    dtype, tx = module.FORMS[form]
    *run, losses = module.train(dtype, tx, batches)
    if name == "flax_linen":
        params, opt_state = run[0].params, run[0].opt_state
    else:
        params, opt_state = run
    if name == "flax_nnx":
        nnx = recent_nnx()
        params = nnx.as_pure(nnx.state(params, nnx.Param))
        opt_state = nnx.as_pure(opt_state.opt_state)
    if name == "equinox_mlp":
        equinox = pytest.importorskip("equinox")
        params = equinox.filter(params, equinox.is_inexact_array)
    return params, opt_state, np.array(losses, np.float32)


def short_run(name, form, steps=STEPS):
    """Return what `trained` does after a few steps; with a loss scale one is skipped."""
    x, y = example(name).data(STEPS)
    if form == "float16":
        x[BAD_STEP] = np.inf
    return trained(name, form, (x[:steps], y[:steps]))


# Each framework with a loss scale, and what takes longer in one form.
HALF_RUNS = [(name, "float16") for name in LOOPS] + [("plain_jax", "bfloat16")]
TRAINED = [(name, "bfloat16") for name in LOOPS]
TRAINED += [
    ("plain_jax", "float16"),
    ("flax_nnx", "compact"),
    ("equinox_mlp", "compact"),
]


@mostly_slow(
    ("name", "form"), HALF_RUNS, lambda *case: case == ("plain_jax", "float16")
)
def test_params_are_rounded_masters_and_nothing_changes_its_dtype(name, form):
    (params, opt_state, losses), start = short_run(name, form), short_run(name, form, 0)
    masters = optax_mp.master_params(opt_state, params)
    assert {x.dtype.name for x in jax.tree.leaves(masters)} == {"float32"}
    assert as_bits(optax_mp.cast_floating(masters, form)) == as_bits(params)
    assert avals((params, opt_state)) == avals(start[:2])
    assert as_bits(params) != as_bits(start[0])
    if form == "float16":
        assert opt_state.total_skipped_count >= 1 and np.isnan(losses[BAD_STEP])
        assert opt_state.finite_count == STEPS - 1 - BAD_STEP


@pytest.mark.slow
@pytest.mark.parametrize("name, form", TRAINED)
def test_the_loss_falls_as_in_float32(name, form):
    batches = example(name).data()
    losses, full = (trained(name, each, batches)[2] for each in (form, "float32"))
    assert full[-20:].mean() < 0.3 * full[:3].mean()
    assert losses[-20:].mean() == pytest.approx(full[-20:].mean(), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_runs_as_a_script(name, capsys):
    example(name).main()
    assert len(capsys.readouterr().out.splitlines()) >= 3


# One script for every precision


PRECISIONS = ["f32", "bf16", "f16", "compact", "amp"]
COUNTS = ["finite_count", "skipped_count", "total_skipped_count"]
FLAGS = "at_min_scale", "last_finite", "skipped_by_loss"
LOGGED = {
    precision: ["loss", "step_count"] for precision in PRECISIONS if precision != "f16"
} | {"f16": sorted([*COUNTS, *FLAGS, "loss", "loss_scale", "step_count"])}


@functools.cache
def run_in(precision, steps=150):
    seen = []
    module = example("any_precision")
    weights, losses = module.train(
        precision, module.data(steps), [lambda *logged: seen.append(logged)]
    )
    return weights, np.array(losses), seen


@mostly_slow("precision", PRECISIONS, lambda precision: precision == "f16")
def test_one_script_logs_and_returns_float32_in_every_precision(precision):
    weights, losses, seen = run_in(precision, 12)
    assert {x.dtype.name for x in jax.tree.leaves(weights)} == {"float32"}
    assert [number for number, _ in seen] == [0, 10]
    for number, scalars in seen:
        assert list(scalars) == LOGGED[precision]
        assert all(type(value) is float for value in scalars.values())
        assert scalars["loss"] == losses[number]
        skipped = scalars.get("total_skipped_count", 0)
        assert scalars["step_count"] == number + 1 - skipped


@pytest.mark.slow
def test_the_script_takes_the_precision_and_a_file(tmp_path, capsys):
    file = tmp_path / "metrics.csv"
    example("any_precision").main(["--precision", "amp", "--csv", str(file)])
    assert capsys.readouterr().out.startswith("amp: 0.1")
    assert file.read_text(encoding="utf-8").startswith("step,loss,step_count")


# LoRA


@functools.cache
def lora_run(way, steps=20):
    module = example("lora")
    if way == "adapters only":
        return module.train_adapters_only(module.data(steps))
    return module.train(module.FORMS[way], module.data(steps))


LORA = ["partition", "masked", "adapters only"]


@mostly_slow("way", LORA, lambda way: way == "masked")
def test_frozen_weights_have_neither_master_nor_moments(way):
    params, opt_state, _ = lora_run(way)
    tree = params
    if way == "adapters only":
        assert "frozen" not in opt_state.master_params
        tree = params["adapters"]
    by_leaf = optax_mp.memory_report(opt_state, tree).by_leaf()
    if way != "adapters only":
        frozen = by_leaf.pop("['frozen']['weight']")
        assert frozen == params["frozen"]["weight"].nbytes == 2 * 32 * 32
    by_leaf.pop("")  # the count
    assert len(by_leaf) == 2
    assert set(by_leaf.values()) == {2 * 32 * (2 + 4 + 4 + 4)}


@pytest.mark.parametrize("way", LORA)
def test_frozen_weights_keep_every_bit(way):
    params, _, _ = lora_run(way)
    assert as_bits(params["frozen"]) == as_bits(example("lora").init()["frozen"])
    assert as_bits(params["adapters"]) != as_bits(example("lora").init()["adapters"])


# Averages


@functools.cache
def averages():
    module = example("ema_of_params")
    start = optax_mp.cast_floating(module.init(), jnp.bfloat16)
    ema, history = module.train(module.data(200))
    return ema, history, module.errors(ema, history, start)


@pytest.mark.slow
def test_only_an_average_of_masters_is_right():
    _, _, errors = averages()
    assert errors["masters"] < 1e-3
    assert errors["params"] > 3e-3
    assert errors["params in bfloat16"] > 0.5

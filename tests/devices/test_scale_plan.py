"""The planner of `benchmarks`: its tables, and its numbers against compiled programs."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_rows import BENCHMARKS, FOLDERS
from communication import large, sent_by
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

DEVICES, LAYERS, WIDTH = 8, 2, 64
BYTES = {"u8": 1, "u16": 2, "bf16": 2, "u32": 4, "f32": 4}


def planner():
    # A copy, because it is changed.
    path = BENCHMARKS / "memory" / "scale_plan.py"
    spec = importlib.util.spec_from_file_location("small_scale_plan", path)
    module = importlib.util.module_from_spec(spec)
    sys.path[:0] = FOLDERS
    spec.loader.exec_module(module)
    module.VOCABULARY = 256
    return module


def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def cut(leaf):
    """Return the sharding of an array along a dimension that eight divides."""
    for axis, size in enumerate(leaf.shape):
        if size % DEVICES == 0:
            return NamedSharding(mesh(), P(*[None] * axis, "data"))
    return NamedSharding(mesh(), P())


def placed(tree, sharding):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree
    )


def replicated(leaf):
    del leaf
    return NamedSharding(mesh(), P())


def compiled_step(scale_plan, form, layout):
    """Return (params, state, the optimizer's step, compiled) from shapes alone."""
    dtype = jnp.float32 if form == "float32" else jnp.bfloat16
    params = scale_plan.transformer(LAYERS, WIDTH, dtype)
    tx, state = scale_plan.adamw(form), scale_plan.state_of(params, form)
    of_params = cut if layout == "fully sharded" else replicated
    if layout == "zero1":
        tx = optax_mp.zero1(tx, mesh(), "data")

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    given = (
        placed(params, of_params),
        placed(params, of_params),
        placed(state, replicated if layout == "replicated" else cut),
    )
    return params, state, jax.jit(step).lower(*given).compile()


@pytest.mark.slow
def test_devices_hold_what_is_planned():
    scale_plan = planner()
    for form in scale_plan.FORMS:
        for layout in scale_plan.LAYOUTS:
            params, state, step = compiled_step(scale_plan, form, layout)
            plan = scale_plan.plan(params, state, DEVICES, layout)
            held = step.memory_analysis().argument_size_in_bytes
            assert held == plan.held, (form, layout, held, plan.held)


@pytest.mark.slow
def test_zero1_gathers_what_is_planned():
    """The optimizer gathers params; the model sums gradients."""
    scale_plan = planner()
    for form in scale_plan.FORMS:
        params, state, step = compiled_step(scale_plan, form, "zero1")
        sent = large(sent_by(step))
        assert {kind for kind, _, _ in sent} == {"all-gather"}, sent
        gathered = sum(BYTES[dtype] * n for _, dtype, n in sent)
        share = (DEVICES - 1) / DEVICES
        plan = scale_plan.plan(params, state, DEVICES, "zero1")
        # In the plan the reduce-scatter of gradients sends as much again.
        assert 2 * share * gathered == plan.sent, (form, gathered, plan.sent)


def test_the_table_of_a_trillion_weights_takes_no_memory(capsys, monkeypatch):
    arguments = ["scale_plan.py", "--weights", "1T", "--devices", "8", "4096"]
    monkeypatch.setattr(sys, "argv", arguments)
    planner().main()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    found = {(form, layout): cells for form, layout, *cells in rows[1:]}
    weights = 128 * (12 * 25600**2 + 2 * 25600) + (2 * 256 + 1) * 25600
    copies = 2 * weights + 2 * weights + 12 * weights / 8
    sent = 7 / 8 * 4 * weights
    held = found["full copies", "zero1"][0]
    assert held == f"{copies / 1e9:,.0f}, {sent / 1e9:,.0f}"
    # Eight times fewer bytes at least where all is sharded over 512 times more devices.
    first, last = found["5.1 bytes", "fully sharded"]
    assert float(first.split(", ")[0]) / float(last.split(", ")[0]) == pytest.approx(
        512, rel=0.01
    )

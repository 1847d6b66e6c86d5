"""What a report says of compiled programs, against sizes known by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp
from optax_mp.reports import CollectiveRow

LAYERS, WIDTH = 3, 32
SHAPES = {"stack": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, 5 * WIDTH), "bias": (WIDTH,)}


def mesh_of(data=8, model=1):
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((data, model), ("data", "model"), axis_types=kinds)


def described(mesh, dtype="float32", specs=None):
    return {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, (specs or {}).get(name, P()))
        )
        for name, shape in SHAPES.items()
    }


def loss(params, x):
    def layer(x, weights):
        return jnp.tanh(x @ weights), None

    x, _ = jax.lax.scan(layer, x + params["bias"], params["stack"])
    return jnp.mean((x @ params["head"]) ** 2)


def report_of(step, params, mesh, *others):
    x = jax.ShapeDtypeStruct(
        (16, WIDTH), params["head"].dtype, sharding=NamedSharding(mesh, P("data"))
    )
    compiled = jax.jit(step).lower(params, *others, x).compile()
    return optax_mp.collectives_report(compiled, params)


def sent(size, width, devices=8, rounds=1):
    return round(rounds * size * width * (devices - 1) / devices)


def test_data_parallel_gradients_are_reduced_in_float32():
    mesh = mesh_of()
    report = report_of(jax.value_and_grad(loss), described(mesh), mesh)
    rows = {row.path: row for row in report.rows}
    assert set(rows) == {"['stack']", "['head']", "['bias']"}
    for name, shape in SHAPES.items():
        row = rows[f"['{name}']"]
        times = LAYERS if name == "stack" else 1
        size = functools.reduce(int.__mul__, shape)
        assert row == CollectiveRow(
            "all-reduce", row.path, "data", "float32", "float32", times,
            sent(size, 4, rounds=2),
        )  # fmt: skip
    assert not report.low_sums and "For float32" not in str(report)
    first = str(report).splitlines()[0].split("  ")
    assert first[0] == "kind" and str(report).count("\n") == 4
    assert report._repr_html_().count("<tr>") == 4


@pytest.mark.parametrize("by", ["sum_gradients", "zero1", "psum_scatter"])
def test_an_exchange_in_16_bits_is_summed_in_float32(by):
    mesh = mesh_of()
    params = described(mesh, "bfloat16")
    tx = optax.sgd(0.1)
    if by == "zero1":
        tx = optax_mp.zero1(tx, mesh, "data", exchange_dtype="bfloat16")

    def step(params, x):
        if by == "zero1":
            each = jax.vmap(jax.grad(loss), (None, 0), spmd_axis_name="data")
            grads = each(params, x.reshape(8, -1, WIDTH))
            return tx.update(grads, tx.init(params), params)[0]

        def on_each(params, x):
            grads = jax.grad(loss)(params, x)
            if by == "sum_gradients":
                return optax_mp.sum_gradients(grads, "data")
            scatter = lambda x: jax.lax.psum_scatter(x, "data", tiled=True)  # noqa: E731
            return {name: scatter(grads[name]) for name in ("head", "bias")}

        specs = P(), P("data")
        out = P("data") if by == "psum_scatter" else P()
        return jax.shard_map(
            on_each, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
        )(params, x)

    report = report_of(step, params, mesh)
    sizes = {"['head']": 5 * WIDTH**2, "['bias']": WIDTH}
    for path, size in sizes.items():
        summed = [x for x in report.rows if x.path == path and x.sum_dtype]
        assert {x.sum_dtype for x in summed} == {"float32"}
        (kind,) = {x.kind for x in summed}
        if by == "psum_scatter":
            # A CPU promotes 16-bit sums.
            assert kind == "reduce-scatter" and summed[0].exchange_dtype == "float32"
            continue
        assert kind == "all-to-all" and summed[0].exchange_dtype == "uint16"
        assert summed[0].bytes == sent(size, 2)
        (gathered,) = [x for x in report.rows if x.path == path and not x.sum_dtype]
        assert gathered.kind == "all-gather" and gathered.bytes == sent(size, 2)


def test_axes_and_shards_of_a_mesh_are_told_apart():
    mesh = mesh_of(2, 4)
    specs = {"head": P(None, "model"), "stack": P(None, None, "data")}
    report = report_of(jax.grad(loss), described(mesh, specs=specs), mesh)
    found = {row.path: (row.axes, row.bytes) for row in report.rows}
    pair = functools.partial(sent, width=4, devices=2, rounds=2)
    assert found == {
        "['stack']": ("data", pair(LAYERS * WIDTH**2)),
        "['head']": ("data", pair(5 * WIDTH**2 // 4)),
        "['bias']": ("data", pair(WIDTH)),
    }
    assert report.other_bytes > 0  # activations, over "model"


def test_params_of_one_size_share_a_row():
    mesh = mesh_of()
    where = NamedSharding(mesh, P())
    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where)] * 3
    x = jax.ShapeDtypeStruct(
        (16, 8), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    step = jax.jit(jax.grad(lambda p, x: jnp.mean((x @ p[0] @ p[1] @ p[2]) ** 2)))
    compiled = step.lower(params, x).compile()
    (row,) = optax_mp.collectives_report(compiled, params).rows
    assert row.path == "[0] or 2 more" and row.count == 3


class Text(jax.stages.Compiled):
    """A program of which only the text is known."""

    def __init__(self, text):
        """Hold the text."""
        self.text = text

    def as_text(self):
        return self.text

    @property
    def input_shardings(self):
        return NamedSharding(mesh_of(), P())


# As compilers for a GPU and a TPU write them, shortened.
OF_A_GPU = """HloModule jit_step

%add (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(%x, %y)
}

%less (i: s32[]) -> pred[] {
  %limit = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (p: (s32[], bf16[32,32])) -> (s32[], bf16[32,32]) {
  %dot = bf16[32,32]{1,0} fusion(%p), kind=kCustom, calls=%gemm
  %start = ((bf16[32,32]{1,0}), bf16[4,32]{1,0}) reduce-scatter-start(%dot), channel_id=1, \
replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}, to_apply=%add
  ROOT %done = bf16[4,32]{1,0} reduce-scatter-done(%start)
}

ENTRY %main (p: bf16[32]) -> bf16[32] {
  %w = (s32[], bf16[32,32]{1,0}) while(%t), condition=%less, body=%body
  %a = bf16[5120]{0} bitcast(%x)
  %b = bf16[32]{0} bitcast(%y)
  %joined = bf16[5152]{0} fusion(%a, %b), kind=kLoop, calls=%concatenated
  %both = bf16[5152]{0} all-reduce-start(%joined), channel_id=3, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  ROOT %end = bf16[5152]{0} all-reduce-done(%both)
}
"""
OF_A_TPU = """HloModule jit_step

%add (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %sum = bf16[]{:T(256)} add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[32,160]) -> bf16[4,160] {
  %r = bf16[32,160]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=8, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[4,160]{1,0} dynamic-slice(%r, %i, %zero)
}

ENTRY %main (p: bf16[32]) -> bf16[32] {
  %part = bf16[4,160]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %g.1 = u16[3,32,32]{2,1,0:T(8,128)S(1)} all-gather(%p.1), channel_id=9, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, frontend_attributes={chain_id="0"}
  %g.2 = u16[3,32,32]{2,1,0:T(8,128)} all-gather(%p.2), channel_id=9, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, frontend_attributes={chain_id="0"}
  %m = bf16[1,4]{1,0} collective-permute(%q), channel_id=4, \
source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  %n = bf16[4]{0} bitcast(%m)
  ROOT %o = f32[4]{0} add(%n, %n)
}
"""


def test_programs_of_other_compilers_are_read():
    low, ways = ("bfloat16", "bfloat16"), {}
    for text in (OF_A_GPU, OF_A_TPU):
        report = optax_mp.collectives_report(Text(text), described(mesh_of()))
        for row in report.rows:
            assert row.axes == "data"
            ways[row.kind, row.path] = (
                row.exchange_dtype, row.sum_dtype, row.count, row.bytes
            )  # fmt: skip
        assert len(report.low_sums) == (3 if text == OF_A_GPU else 2)
        assert "`zero1` with `exchange_dtype`" in str(report)
    assert ways == {
        ("reduce-scatter", "['stack']"): (*low, 3, sent(3 * WIDTH**2, 2)),
        ("all-reduce", "['head']"): (*low, 1, sent(5 * WIDTH**2, 2, rounds=2)),
        ("all-reduce", "['bias']"): (*low, 1, sent(WIDTH, 2, rounds=2)),
        ("reduce-scatter", "['head']"): (*low, 1, sent(5 * WIDTH**2, 2)),
        ("all-gather", "['stack']"): ("uint16", None, 1, sent(3 * WIDTH**2, 2)),
        ("collective-permute", "['bias']"): (*low, 1, 2 * WIDTH // 8),
    }


def test_only_compiled_programs_are_read():
    step = jax.jit(loss)
    with pytest.raises(
        TypeError, match=r"`compiled` to be .*, got .*lower\(\*args\).compile\(\)"
    ):
        optax_mp.collectives_report(step, {})
    nothing = step.lower(
        {name: jnp.ones(s) for name, s in SHAPES.items()}, jnp.ones((2, WIDTH))
    )
    report = optax_mp.collectives_report(nothing.compile(), {})
    assert str(report) == "no params or gradients are sent; others: 0 bytes"


def test_one_warning_says_that_texts_of_another_xla_are_not_read(monkeypatch):
    from optax_mp._jax import _program_text

    mesh, ask = mesh_of(), _program_text.collectives_in
    monkeypatch.setattr(_program_text, "_COLLECTIVE", re.compile("(no)thing(.)(.)"))
    ask.is_known.cache_clear()
    try:
        with pytest.warns(UserWarning, match="`collectives_report` finds nothing"):
            report = report_of(jax.grad(loss), described(mesh), mesh)
        assert report.rows == ()
    finally:
        ask.is_known.cache_clear()

"""What the benchmark of collectives reads in programs, against sizes known by hand."""

import sys

import jax
import jax.numpy as jnp
import pytest
from benchmark_rows import BENCHMARKS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES, LAYERS, WIDTH = 8, 3, 32
SIZES = {"stack": LAYERS * WIDTH**2, "head": 5 * WIDTH**2, "bias": WIDTH}


@pytest.fixture
def exchanges(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "memory"))
    import exchanges

    yield exchanges.exchanges
    sys.modules.pop("exchanges")


def sent(size, width, rounds=1):
    """Return the bytes that a device sends in a ring, of numbers of `width` bytes."""
    return round(rounds * size * width * (DEVICES - 1) / DEVICES)


@pytest.mark.parametrize("by", ["psum", "psum_scatter", "all_to_all"])
def test_what_a_program_for_cpus_sends_is_read(exchanges, by):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def on_each(x):
        if by == "psum":
            return jax.lax.psum(x, "data")
        if by == "psum_scatter":
            return jax.lax.psum_scatter(x, "data", tiled=True)
        # As 16-bit gradients are summed in float32.
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
        parts = jax.lax.all_to_all(bits.reshape(DEVICES, -1), "data", 0, 0)
        wide = jax.lax.bitcast_convert_type(parts, jnp.bfloat16).astype(jnp.float32)
        return wide.sum(0)

    out = P() if by == "psum" else P("data")
    step = jax.shard_map(on_each, mesh=mesh, in_specs=P(), out_specs=out)
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=NamedSharding(mesh, P()))
    text = jax.jit(step).lower(x).compile().as_text()
    (found,) = exchanges(text, {"w": 256, "other": 256}, DEVICES)
    expected = {
        "psum": ("all-reduce", "float32", sent(256, 4, rounds=2)),
        "psum_scatter": ("reduce-scatter", "float32", sent(256, 4)),
        "all_to_all": ("all-to-all", "uint16", sent(256, 2)),
    }
    kind, dtype, size = expected[by]
    assert found == (kind, "w or 1 more", dtype, "float32", 1, size)


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


def test_programs_for_gpus_and_tpus_are_read(exchanges):
    low = "bfloat16", "bfloat16"
    # A loop sends one layer of a stack at a time.
    of_a_gpu = exchanges(OF_A_GPU, SIZES | {"layer": WIDTH**2}, DEVICES)
    assert of_a_gpu == [
        ("all-reduce", "head", *low, 1, sent(SIZES["head"], 2, rounds=2)),
        ("reduce-scatter", "layer", *low, 3, sent(SIZES["stack"], 2)),
        ("all-reduce", "bias", *low, 1, sent(WIDTH, 2, rounds=2)),
    ]
    # All parts of a ring are of the bias.
    assert exchanges(OF_A_TPU, SIZES, DEVICES) == [
        ("reduce-scatter", "head", *low, 1, sent(SIZES["head"], 2)),
        ("all-gather", "stack", "uint16", None, 1, sent(SIZES["stack"], 2)),
        ("collective-permute", "bias", *low, 1, 2 * WIDTH // 8),
    ]

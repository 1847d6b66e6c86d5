"""The counts of what a compiled program moves, by programs made by hand."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_rows import BENCHMARKS

# A loop of four turns. Each reads 8 numbers of two arrays, and overwrites them in both.
LOOP = """
%fused (a: f32[32], b: f32[32], i: s32[]) -> (f32[32], f32[32]) {
  %a = f32[32]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  %x = f32[8]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={8}
  %y = f32[8]{0} dynamic-slice(%b, %i), dynamic_slice_sizes={8}
  %z = f32[8]{0} add(%x, %y)
  %c = f32[32]{0} dynamic-update-slice(%a, %z, %i)
  %d = f32[32]{0} dynamic-update-slice(%b, %z, %i)
  ROOT %r = (f32[32]{0}, f32[32]{0}) tuple(%c, %d)
}

%body (t: (s32[], f32[32], f32[32])) -> (s32[], f32[32], f32[32]) {
  %t = (s32[]{:S(6)}, f32[32]{0}, f32[32]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %a = f32[32]{0} get-tuple-element(%t), index=1
  %b = f32[32]{0} get-tuple-element(%t), index=2
  %f = (f32[32]{0}, f32[32]{0}) fusion(%a, %b, %i), kind=kLoop, calls=%fused
  %c = f32[32]{0} get-tuple-element(%f), index=0
  %d = f32[32]{0} get-tuple-element(%f), index=1
  ROOT %r = (s32[]{:S(6)}, f32[32]{0}, f32[32]{0}) tuple(%i, %c, %d)
}

%condition (t: (s32[], f32[32], f32[32])) -> pred[] {
  %bound = s32[]{:S(6)} constant(4)
}

ENTRY %main (a: f32[32], b: f32[32]) -> f32[32] {
  %a = f32[32]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %i = s32[]{:S(6)} constant(0)
  %t = (s32[]{:S(6)}, f32[32]{0}, f32[32]{0}) tuple(%i, %a, %b)
  %w = (s32[], f32[32]{0}, f32[32]{0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[32]{0} get-tuple-element(%w), index=1
}
"""

# Squares, a product with them, a sum, another product; the sum stays on the chip.
PRODUCTS = """
ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} multiply(%a, %a)
  %c = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[4,4]{1,0:S(1)} add(%c, %b)
  %e = f32[4,4]{1,0} dot(%d, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %f = f32[4,4]{1,0} negate(%e)
}
"""

# Over eight devices: a sum in two halves, and a gather of two arrays in one piece.
COLLECTIVES = """
ENTRY %main (a: f32[32], b: bf16[4]) -> f32[32] {
  %a = f32[32]{0} parameter(0)
  %b = bf16[4]{0} parameter(1)
  %s = f32[32]{0} all-reduce-start(%a), channel_id=1, to_apply=%add
  %t = f32[32]{0} all-reduce-done(%s)
  %u = f32[32]{0} all-reduce(%a), channel_id=1, to_apply=%add
  %g = ((f32[32]{0}, bf16[4]{0}), (f32[256]{0}, bf16[32]{0})) all-gather-start(%t, %b)
  %h = (f32[256]{0}, bf16[32]{0}) all-gather-done(%g), dimensions={0}
  ROOT %r = f32[32]{0} negate(%u)
}
"""


@pytest.fixture
def traffic(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "memory"))
    import traffic

    yield traffic
    sys.modules.pop("traffic")


def test_every_array_that_a_turn_updates_counts_once_each_turn(traffic):
    assert traffic.bytes_moved(LOOP) == 4 * (2 + 2) * 8 * 4


def test_what_stays_on_the_chip_is_not_moved(traffic):
    # Squares, a product, a sum that is written to the chip and read there, and so on.
    arrays = 3 + 3 + 2 + 2 + 2
    assert traffic.bytes_moved(PRODUCTS) == arrays * 4 * 4 * 4


def test_collectives_read_and_write_and_count_once(traffic):
    gathered = 256 * 4 + 32 * 2
    assert traffic.collectives(COLLECTIVES) == [
        ("all-reduce", 32 * 4),
        ("all-gather", gathered),
    ]
    read_and_written = 3 * 2 * 32 * 4 + (32 * 4 + 4 * 2) + gathered
    assert traffic.bytes_moved(COLLECTIVES) == read_and_written


def test_the_form_by_hand_trains_like_adamw(traffic):
    """It is what compiled steps are compared with, so it is to be AdamW."""
    from by_hand import by_hand

    def train(tx, dtype):
        params = jnp.zeros((64, 128), dtype)
        goal = jax.random.normal(jax.random.key(0), params.shape)

        def step(carry, _):
            params, state = carry
            grads = params - goal.astype(dtype)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=200)
        return np.asarray(params, np.float32)

    exact = train(optax.adamw(1e-3), "float32")
    found = train(by_hand(), "bfloat16")
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)

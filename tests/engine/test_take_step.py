"""take_step and `tx.update` leaf by leaf: the same as a step as a whole."""

import contextlib
import functools
import math
import operator
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, check_alike
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec
from optimizers import (
    DISTINCT,
    OPTIMIZERS,
    example_gradients,
    example_params,
    extra_arguments,
)
from slow_cases import mostly_slow

import optax_mp
from optax_mp.engine import _by_platform, _chunks, _gpu, _in_turn, _kernels, _tpu

pytestmark = pytest.mark.filterwarnings("ignore:take_step. this step runs without")
KERNELS = {"tpu": _tpu, "cuda": _gpu}


def compact(inner, storage=None, **settings):
    storage = storage or optax_mp.Split(8)
    low = optax_mp.low_bit_state(inner, min_size=1, **settings)
    return optax_mp.mixed_precision(low, storage=storage)


ADAMW = functools.partial(optax.adamw, 1e-2)


def flips(next_flips):
    """Turn the signs of updates where an array of booleans says so."""

    def init(params):
        return jax.tree.map(
            lambda p: jnp.arange(p.size).reshape(p.shape) % 3 == 0, params
        )

    def update(updates, where, params=None):
        turned = jax.tree.map(lambda u, b: jnp.where(b, -u, u), updates, where)
        return turned, jax.tree.map(next_flips, updates, where)

    return optax.GradientTransformation(init, update)


FORMS = {
    "5.1 bytes": lambda: compact(ADAMW()),
    "16 bits": lambda: compact(ADAMW(), optax_mp.Split(16), bits=16),
    "to nearest": lambda: compact(ADAMW(), seed=None),
    "blocks of 128": lambda: compact(ADAMW(), block_size=128),
    "bfloat16 state": lambda: compact(ADAMW(), dtype=jnp.bfloat16),
    "full copies": lambda: compact(ADAMW(), optax_mp.FullCopy()),
    "split": lambda: optax_mp.mixed_precision(ADAMW(), storage=optax_mp.Split(16)),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(compact(ADAMW())),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), compact(optax.lion(1e-3))
    ),
    "stochastic rounding": lambda: optax_mp.stochastic_rounding(
        optax_mp.low_bit_state(ADAMW(), min_size=1)
    ),
    "MultiSteps": lambda: compact(
        optax.MultiSteps(ADAMW(), 2, should_skip_update_fn=optax.skip_not_finite)
    ),
    "booleans": lambda: compact(optax.chain(ADAMW(), flips(lambda _, where: where))),
    "muon": lambda: compact(optax.contrib.muon(1e-2)),
    "madgrad": lambda: compact(optax.contrib.madgrad(1e-2)),
    "float16": lambda: compact(ADAMW()),
}
# Of those that have codes, what differs most.
CUT = sorted(DISTINCT - {"noisy_sgd"} | {"adan", "rprop", "sm3"})
ON_GPUS = {"5.1 bytes", "16 bits", "stochastic rounding", "float16"}
ON_GPUS |= {"MultiSteps", "booleans"}
# How many codes may differ, where it is more than one in a thousand: each step computes
# the params anew, so that the last place of any sum shows.
# Muon by its products of matrices, float16 by the rest that its remainders round.
CODES = {"madgrad": 3e-3, "muon": 2e-3, "float16": 3e-3}
# Groups of 8 rows, all in one tile; of 33; of 40, four in a tile of a TPU; an axis that no
# block divides; blocks along another axis, with groups of 24; small and empty ones.
SHAPES = [(64, 384), (33, 4224), (1, 320, 512), (2, 2, 32, 130), (2, 99, 5, 24), (70,)]
SHAPES += [(), (0, 4)]


def random_tree(seed, dtype="bfloat16", scale=1.0, shapes=SHAPES):
    # Every third column is small, so that it is shifted.
    rng = np.random.default_rng(seed)

    def array(shape):
        columns = np.indices(shape)[np.argmax(shape)] if shape else 1
        sizes = np.where(columns % 3, 1, 2.0**-10)
        return jnp.asarray(scale * rng.normal(size=shape) * sizes, dtype)

    return {f"p{i}": array(shape) for i, shape in enumerate(shapes)}


@contextlib.contextmanager
def lowered_for(platform, kernels=False, device_count=1, read=None):
    """Lower steps for CPUs as for another platform.

    Yields the shapes of the leaves that a kernel computed, interpreted. Adds to `read`
    the dtypes of the arrays that it read.
    """
    target = _by_platform.Target(platform, device_count)
    ran, read = [], set() if read is None else read

    def interpreted(end, part, args):
        ran.append(end.shape)
        read.update(x.dtype.name for x in args if jnp.shape(x) == end.shape)
        return KERNELS[platform].run_tail(end, part, args)

    kernel = types.SimpleNamespace(
        obstacle=KERNELS[platform].obstacle, run_tail=interpreted
    )
    interpreted_call = functools.partial(pl.pallas_call, interpret=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_by_platform.Target, "of", lambda *_: target)
        patch.setattr(_kernels, "import_module", lambda _: kernel)
        patch.setattr(pl, "pallas_call", interpreted_call)
        patch.setenv("OPTAX_MP_KERNELS", str(int(kernels)))
        yield ran


def by_update(tx, grads, state, params, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


WAYS = [optax_mp.take_step, by_update]


def in_all_ways(run):
    """Return `run(way)` as a CPU computes it, and cut: each tail as it is written.

    All leaves at once: when they step in turn, XLA may round a last place differently.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_in_turn, "_LARGE", math.inf)
        whole = run(by_update)
    with lowered_for("tpu"):
        return [whole, *map(run, WAYS)]


def dtype_of(form):
    return "float16" if form == "float16" else "bfloat16"


def trained(step, tx, steps=3, shapes=SHAPES, dtype="bfloat16"):
    params = random_tree(0, dtype, shapes=shapes)
    state = tx.init(params)
    for i in range(steps):
        grads = random_tree(i + 1, dtype, scale=0.1, shapes=shapes)
        params, state = step(grads, state, params)
    return params, state


def exactly(way, tx):
    """Return a step in which XLA rounds to 16 bits where the program says so."""
    options = {"xla_allow_excess_precision": False}
    return jax.jit(functools.partial(way, tx), compiler_options=options)


@functools.cache
def as_by_update(form, shapes):
    """Return a form, and what two of its steps make of random params."""
    tx = FORMS[form]()
    return tx, trained(exactly(by_update, tx), tx, 2, shapes, dtype_of(form))


@mostly_slow("name", CUT, "lion".__eq__)
def test_a_step_is_that_of_optax_bit_for_bit(name):
    tx = optax.with_extra_args_support(compact(OPTIMIZERS[name]()))
    params = example_params("bfloat16", name)
    grads = example_gradients(name, params, 3, jnp.float32)

    def run(way):
        @jax.jit
        def step(grads, state, params):
            return way(tx, grads, state, params, **extra_arguments(name, grads))

        carry = (params, tx.init(params))
        for i in range(3):
            carry = step(
                jax.tree.map(operator.itemgetter(i), grads), carry[1], carry[0]
            )
        return as_bits(carry)

    want, *others = in_all_ways(run)
    assert others == [want, want]


@pytest.mark.filterwarnings("ignore:static_loss_scale")
@mostly_slow("dtype", ["float32", "bfloat16", "float16"], "bfloat16".__eq__)
def test_a_plain_step_is_that_of_optax_bit_for_bit(dtype):
    tx = optax_mp.static_loss_scale(optax_mp.mixed_precision(ADAMW()), 8.0)
    steps = (jax.jit(functools.partial(way, tx)) for way in WAYS)
    got, want = (trained(x, tx, 2, SHAPES[3:], dtype) for x in steps)
    assert as_bits(got) == as_bits(want)


@mostly_slow(
    ("form", "platform", "shapes"),
    [
        (form, platform, shapes)
        for form in FORMS
        for platform in KERNELS
        for shapes in (SHAPES[:5:2], SHAPES)
        if form == "5.1 bytes" or shapes != SHAPES
        # What both have, on one of them.
        if form == "5.1 bytes" or (platform == "cuda") == (form in ON_GPUS)
    ],
    lambda form, platform, shapes: form == "5.1 bytes" and shapes != SHAPES,
)
def test_a_kernel_does_the_same(form, platform, shapes):
    """Interpreted: all but what a compiler contracts.

    That is the last place of one in a hundred float32, and one code in a thousand.
    """
    tx, want = as_by_update(form, tuple(shapes))
    with lowered_for(platform, kernels=True) as ran:
        step = exactly(optax_mp.take_step, tx)
        got = trained(step, tx, 2, shapes, dtype_of(form))
    assert ran
    check_alike(got, want, CODES.get(form, 1e-3))


@mostly_slow("platform", KERNELS, "cuda".__eq__)
def test_a_micro_step_around_codes_changes_none(platform):
    """With `MultiSteps` around `low_bit_state`; within, they are rounded again."""
    low = optax_mp.low_bit_state(optax.sgd(1e-2, 0.9), min_size=1)
    steps = optax.MultiSteps(low, 2, should_skip_update_fn=optax.skip_not_finite)
    tx = optax_mp.mixed_precision(steps, storage=optax_mp.Split(8))
    shapes = [(256, 128)]
    with lowered_for(platform, kernels=True) as ran:
        step = exactly(optax_mp.take_step, tx)
        params, before = trained(step, tx, 2, shapes)
        grads = random_tree(9, shapes=shapes)
        new, after = step(grads, before, params)
        _, last = step(grads, after, new)
    assert ran
    codes, kept, moved = (
        as_bits(x.inner_state.inner_opt_state) for x in (before, after, last)
    )
    assert kept == codes != moved
    assert as_bits(new) == as_bits(params)


def test_masters_of_many_equal_leaves_are_those_of_float32():
    """Split(16), bit for bit: jit against jit, with float32 gradients."""
    shapes = [(64, 96)] * 6
    params = random_tree(0, shapes=shapes)
    tx = FORMS["split"]()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    bare = jax.jit(functools.partial(by_update, ADAMW()))
    for way in WAYS:
        step = jax.jit(functools.partial(way, tx))
        got, state = params, tx.init(params)
        want, bare_state = wide, ADAMW().init(wide)
        for i in range(2):
            grads = random_tree(i + 1, "float32", 0.1, shapes)
            got, state = step(grads, state, got)
            want, bare_state = bare(grads, bare_state, want)
        assert as_bits(optax_mp.master_params(state, got)) == as_bits(want)


def test_a_kernel_reads_gradients_as_they_were_before_they_were_widened():
    """A loop's float32 gradients take no memory if they came from 16 bits."""
    tx = optax_mp.dynamic_loss_scale(compact(optax.sgd(1e-2, 0.9)))

    def step(params, slopes, state):
        def loss(params):
            return (slopes["p0"] * params["p0"]).sum()

        _, grads = optax_mp.value_and_grad(loss)(state, params)
        assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        return optax_mp.take_step(tx, grads, state, params)

    for platform, dtype in (("cuda", "float16"), ("tpu", "bfloat16")):
        params, slopes = (random_tree(i, dtype, shapes=[(256, 128)]) for i in (0, 1))
        args, read = (params, slopes, tx.init(params)), set()
        with lowered_for(platform, kernels=True, read=read) as ran:
            run = jax.jit(lambda *args: step(*args)).lower(*args)
        assert ran and read == {dtype, "int8"}
    check_alike(run.compile()(*args), jax.jit(step)(*args), 2e-3)


# Rows left over, of a group of each device; more axes; rows that groups do not divide;
# one axis; a small one.
IN_CHUNKS = ["blocks of 128", "stochastic rounding", "MultiSteps", "booleans"]
IN_CHUNKS += ["float16", "split", "muon", "madgrad"]
CHUNKED = [(640, 520), (4, 64, 256), (262, 256), (133, 1032), (2**18,), (300,)]


# MADGRAD keeps sums of histories, which are never coded.
@pytest.mark.filterwarnings("ignore:low_bit_state. 0% of the:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "device_count"), [("5.1 bytes", 8), *((form, 1) for form in IN_CHUNKS)]
)
def test_chunks_do_the_same(form, device_count, monkeypatch):
    tx, ran = FORMS[form](), []
    want = trained(exactly(by_update, tx), tx, 2, CHUNKED, dtype_of(form))
    monkeypatch.setattr(_chunks, "COUNT", 2**13)
    run_tail = _chunks.run_tail

    def in_chunks(end, cuts, args):
        ran.append(end.shape)
        return run_tail(end, cuts, args)

    monkeypatch.setattr(_chunks, "run_tail", in_chunks)
    with lowered_for("tpu", device_count=device_count):
        step = exactly(optax_mp.take_step, tx)
        got = trained(step, tx, 2, CHUNKED, dtype_of(form))
    assert set(ran) == set(CHUNKED[: -1 if device_count == 1 else 1])
    check_alike(got, want, CODES.get(form, 1e-3))


# Rows of a matrix over one axis of a mesh and columns over another; and heads, whose
# blocks lie along the first axis.
SHARDED = {(256, 512): ("a", "b"), (256, 4, 64): ("b", "a")}


@mostly_slow(
    ("platform", "shape", "way"),
    [
        *(("cuda", shape, "kernel") for shape in SHARDED),
        ("tpu", (256, 512), "kernel"),
        *(("tpu", shape, "chunks") for shape in SHARDED),
    ],
    lambda platform, shape, way: way == "chunks" and len(shape) == 3,
)
def test_each_device_takes_the_step_of_its_shards(platform, shape, way, monkeypatch):
    """If `jit` says how its arguments are sharded. Each shard knows its place."""
    monkeypatch.setattr(_chunks, "COUNT", 2**12)
    tx = compact(optax.sgd(1e-2, 0.9))
    params, grads = (random_tree(i, shapes=[shape]) for i in (0, 1))
    args = params, tx.init(params), grads
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)

    def place(x):
        spec = SHARDED[shape] if x.ndim else ()
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def run(args, device_count):
        def step(params, state, grads):
            return optax_mp.take_step(tx, grads, state, params)

        has_kernels = way == "kernel"
        with lowered_for(platform, has_kernels, device_count=device_count) as ran:
            lowered = jax.jit(step).trace(*args).lower()
        assert bool(ran) == has_kernels
        assert has_kernels or "stablehlo.while" in lowered.as_text()
        return lowered.compile()(*args)

    got = run(jax.tree.map(place, args), 4)
    assert as_bits(got) == as_bits(run(args, 1))
    check_alike(
        got, jax.jit(functools.partial(by_update, tx))(grads, args[1], params), 1e-3
    )


def test_without_a_kernel_a_tpu_goes_by_chunks_and_a_gpu_twice(monkeypatch):
    monkeypatch.setenv("OPTAX_MP_KERNELS", "0")
    shapes = ((2**11, 2**11),)
    for platform in ("cpu", "tpu", "cuda"):
        text = lowered(FORMS["5.1 bytes"](), platform, shapes)
        found = "stablehlo.while" in text, *(call in text for call in CALLS.values())
        assert found == (platform == "tpu", False, False)
    assert "optimization_barrier %arg" in text  # the last is a GPU's


def test_two_passes_do_the_same():
    tx, want = as_by_update("5.1 bytes", tuple(SHAPES))
    with lowered_for("cuda"):
        check_alike(trained(exactly(optax_mp.take_step, tx), tx, 2), want, 1e-3)


def lowered(
    tx, platform, shapes=((256, 8192),), way=optax_mp.take_step, dtype="bfloat16"
):
    params = random_tree(0, dtype, shapes=shapes)
    step = functools.partial(way, tx)
    state = jax.eval_shape(tx.init, params)
    with a_gpu():
        traced = jax.jit(step).trace(params, state, params)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def a_gpu():
    """Pallas of JAX 0.12 asks which one it is, where there is none."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


CALLS = {"tpu": "tpu_custom_call", "cuda": "triton"}


@pytest.mark.parametrize("platform", CALLS)
def test_a_platform_has_one_kernel_for_each_leaf(platform):
    text = lowered(FORMS["5.1 bytes"](), platform, ((256, 8192), (256, 4096)))
    assert text.count(f"@{CALLS[platform]}") == 2 or text.count(CALLS[platform]) >= 2
    assert CALLS[platform] not in lowered(ADAMW(), platform)
    assert CALLS[platform] not in lowered(FORMS["5.1 bytes"](), "cpu")
    # Small leaves.
    assert CALLS[platform] not in lowered(FORMS["5.1 bytes"](), platform, ((8, 8),))


def test_a_gpu_has_kernels_for_float16_and_new_booleans_and_a_tpu_none():
    new = compact(optax.chain(ADAMW(), flips(lambda updates, _: updates > 0)))
    for platform in CALLS:
        texts = [lowered(new, platform, ((256, 4096),))]
        for form in ("5.1 bytes", "split"):
            texts.append(lowered(FORMS[form](), platform, dtype="float16"))
        assert {CALLS[platform] in text for text in texts} == {platform == "cuda"}


@pytest.mark.slow
def test_a_step_is_exported_for_several_platforms():
    """As written: a kernel is for one of them."""
    tx = FORMS["5.1 bytes"]()
    grads, params = random_tree(0), random_tree(1)
    args = grads, tx.init(params), params
    step = jax.jit(functools.partial(optax_mp.take_step, tx))
    exported = jax.export.export(step, platforms=("cpu", "tpu", "cuda"))(*args)
    assert "custom_call @tpu" not in exported.mlir_module()
    assert as_bits(exported.call(*args)) == as_bits(step(*args))


def test_an_update_has_kernels_on_a_tpu_alone():
    """On a GPU the updates, which have to be written, cost more than kernels gain.

    But for branches, between which XLA writes more, and for shifts.
    """
    shapes = ((256, 512),)
    for has_shifts in (False, True):
        tx = compact(ADAMW(), column_scales=has_shifts)
        form = optax_mp.dynamic_loss_scale(tx)
        assert lowered(form, "tpu", shapes, by_update).count("tpu_custom_call")
        assert ("triton" in lowered(form, "cuda", shapes, by_update)) == has_shifts
    multi_steps = FORMS["MultiSteps"]()
    for platform, call in CALLS.items():
        assert call in lowered(multi_steps, platform, shapes, by_update)
    # Also in one of two branches.
    steps = optax.MultiSteps(FORMS["5.1 bytes"](), 2).gradient_transformation()
    assert "tpu_custom_call" in lowered(steps, "tpu", shapes, by_update)


def raises(end, part, args):
    raise ValueError("a new Pallas")


def has_a_sort(end, part, args):
    """Traced, but not lowered, in the middle of other operations."""
    out = [value.aval for value in end.outputs]
    [x] = pl.pallas_call(
        lambda x, y: y.__setitem__(..., jnp.sort(x[...], axis=0)),
        out_shape=[jax.ShapeDtypeStruct((8, 128), jnp.float32)],
    )(jnp.full((8, 128), args[-1].ravel()[0], jnp.float32))
    return [jnp.full(aval.shape, x[0, 0].astype(aval.dtype)) for aval in out]


@pytest.mark.parametrize(
    ("failing", "warning"),
    [(raises, "no Pallas kernel"), (has_a_sort, "could not be lowered")],
)
def test_a_kernel_that_cannot_be_made_is_done_without(failing, warning, monkeypatch):
    monkeypatch.setattr(_tpu, "run_tail", failing)
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=warning) as warned:
        text = lowered(FORMS["5.1 bytes"](), "tpu", ((256, 8192), (256, 8192)))
    assert len(warned) == 1
    assert "tpu_custom_call" not in text


def a_step(way=optax_mp.take_step):
    """Return a step of one leaf, its gradients, the state and the params."""
    tx = compact(optax.sgd(1e-2, 0.9))
    params, grads = (random_tree(seed, shapes=((64, 128),)) for seed in (0, 1))
    return functools.partial(way, tx), grads, tx.init(params), params


def twice(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def test_vmap_works():
    step, *args = a_step()
    got = jax.jit(jax.vmap(step))(*map(twice, args))
    want = jax.jit(step)(*args)
    assert as_bits(jax.tree.map(operator.itemgetter(1), got)) == as_bits(want)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_scan_eager_and_grad_work(way):
    step, grads, start, params = a_step(way)

    def scanned(carry, grads):
        params, state = carry
        return step(grads, state, params), None

    got, _ = jax.lax.scan(scanned, (params, start), twice(grads))
    want = jax.jit(step)(grads, start, params)
    want = jax.jit(step)(grads, want[1], want[0])
    assert as_bits(got) == as_bits(want)
    eager = step(grads, start, params)
    assert as_bits(eager[1].inner_state.step_count) == as_bits(jnp.int32(1))

    def loss(scale):
        moved, _ = step(grads, start, params)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in moved.values()) * scale

    assert np.isfinite(jax.jit(jax.grad(loss))(1.0))


@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_that_is_known_to_be_zero_stays_so(way):
    """That of a second moment of 0 is: else its square root makes NaN of it."""
    params = {"w": jnp.ones((64, 128))}
    grads = {"w": jnp.ones((64, 128)).at[0].set(0)}
    state = optax_mp.low_bit_state(optax.adam(0.1), min_size=1).init(params)

    def loss(rate, way):
        low = optax_mp.low_bit_state(optax.adam(rate), min_size=1)
        moved, after = way(low, grads, state, params)
        return jnp.sum(way(low, grads, after, moved)[0]["w"] ** 2)

    slope = jax.jacfwd(jax.jit(loss, static_argnums=1))
    want = slope(0.1, by_update)
    assert np.isfinite(want)
    np.testing.assert_allclose(slope(0.1, way), want, rtol=1e-5)


def test_one_row_and_64_bit_types_are_not_tried(x64):
    """Mosaic cannot lower them: a warning would be an error here."""
    assert "tpu_custom_call" not in lowered(FORMS["5.1 bytes"](), "tpu")
    jax.config.update("jax_enable_x64", False)
    text = lowered(FORMS["5.1 bytes"](), "tpu", ((1, 8192),))
    assert "tpu_custom_call" not in text


def test_constants_of_the_optimizer_and_extra_arguments_reach_the_kernel():
    mask = jnp.arange(64.0 * 128).reshape(64, 128) % 3

    def masked(updates, state, params=None, *, factor=1.0):
        return jax.tree.map(lambda u: u * mask * factor, updates), state

    extra = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), masked)
    tx = compact(optax.chain(optax.trace(0.9), extra))
    params = random_tree(0, shapes=((64, 128),))

    def run(way):
        step = jax.jit(lambda g, s, p, factor: way(tx, g, s, p, factor=factor))
        return step(params, tx.init(params), params, jnp.float32(0.01))

    want, *others = map(as_bits, in_all_ways(run))
    assert others == [want, want]


def rule(function):
    def update(updates, state, params=None, **extra):
        return function(updates, **extra), state

    init = lambda params: optax.EmptyState()  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, update)


def test_what_is_no_optimizer_is_named():
    with pytest.raises(TypeError, match="take_step: expected `tx` .*, got a function"):
        optax_mp.take_step(optax.adamw, {}, (), {})


def test_a_step_without_kernels_says_why_once():
    inner = optax.trace(0.9)
    tx = optax_mp.low_bit_state(inner, min_size=1, seed=None, column_scales=False)
    params, grads = (random_tree(i, "float32", shapes=((64, 128),)) for i in (0, 1))
    args = grads, tx.init(params), params
    step = functools.partial(optax_mp.take_step, tx)

    def noisy(updates):
        jax.debug.print("{}", 1)
        return updates

    noisy = optax_mp.low_bit_state(optax.chain(inner, rule(noisy)), min_size=1)
    printing = functools.partial(optax_mp.take_step, noisy)
    for function, values, reason in (
        (step, args, "not within `jit`"),
        (jax.vmap(step), map(twice, args), "within `vmap` or `grad`"),
        (jax.jit(printing), (grads, noisy.init(params), params), "effe"),
        (jax.checking_leaks()(jax.jit(step)), args, "JAX looks for leaked tracers"),
    ):
        said = f"without kernels.*{reason}"
        with pytest.warns(optax_mp.MixedPrecisionWarning, match=said):
            function(*values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*args)
        optax_mp.take_step(inner, grads, inner.init(params), params)


def test_a_step_with_effects_is_traced_once():
    traces = []

    def noisy(updates):
        traces.append(updates)
        jax.debug.callback(lambda _: None, updates["p0"].sum())
        return updates

    tx = optax_mp.dynamic_loss_scale(compact(optax.chain(rule(noisy), ADAMW())))
    params = random_tree(0, shapes=((64, 128),))
    args = params, tx.init(params), params
    for way in WAYS:
        traces.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.jit(functools.partial(way, tx)).trace(*args)
        assert len(traces) == 1


def test_a_constant_turns_no_kernel_off():
    """One param, or one gradient, that `jit` does not trace."""
    tx = FORMS["5.1 bytes"]()
    shapes = ((256, 256), (256, 128))
    params, grads = random_tree(0, shapes=shapes), random_tree(1, shapes=shapes)
    state = tx.init(params)

    @jax.jit
    def closed(state, params):
        return optax_mp.take_step(
            tx, grads, state, {"p0": params["p0"], "p1": constant}
        )

    constant = params["p1"]
    traced = closed.trace(state, params)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 2


def test_without_pallas_all_else_works():
    program = """
import sys
sys.modules["jax.experimental.pallas"] = None
import functools, warnings, jax, jax.numpy as jnp, optax, optax_mp
tx = optax_mp.low_bit_state(optax.adam(0.1))
params = {"w": jnp.ones((64, 128))}
step = jax.jit(functools.partial(optax_mp.take_step, tx))
state = tx.init(params)
moved, _ = step(params, state, params)
assert float(moved["w"][0, 0]) < 1
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for platform in ("tpu", "cuda"):
        traced = step.trace(params, state, params)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call" not in text
    row = optax_mp.step_report(tx, params, state, params).rows[0]
assert "no kernel" in row.tpu and "no kernel" in row.gpu, row
assert 1 <= len(warned) <= 2  # each said once
for warning in warned:
    assert "no Pallas kernel could be made" in str(warning.message)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()

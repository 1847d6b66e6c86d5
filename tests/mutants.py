"""Which faults the fast tests of a room find: each mutant is one wrong line.

    python tests/mutants.py            # all, on two cores in ten to thirty minutes
    python tests/mutants.py scaling    # in one room

Each mutant changes a copy of the package, and the fast tests of its room are run until
one fails. The table that is printed has those that live. Run the suite before: a test
that fails anyway would kill every mutant.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
WORKERS, SECONDS = 2, 400  # a mutant that never ends is found as well

# File | the line's text | what it becomes | test files that run, if not all of the room.
TABLE = """
core/wrappers/_updates.py | if is_complex else -0.0 | if is_complex else 0.0 | scaling/test_transform.py
core/wrappers/_choose.py | if treedef != new_treedef or _types_of | if _types_of | scaling/test_transform.py
core/trees/_tree.py | shape)) :] == shape | shape)) :] != () | test_tree.py test_states.py
core/_policy.py | pattern = pattern.lower() | pattern = pattern.upper() | test_policy.py
core/_dtypes.py | multiple * step, rounded) | rounded, rounded) | test_dtypes.py
core/_dtypes.py | is_above & is_finite, is_below & is_finite | is_above, is_below | test_dtypes.py
core/trees/_states.py | contents is not None and not any(map(is_above, contents)) | contents is not None | test_states.py
core/jax_api/_contact.py | _VARYING = "manual_axis_type", "vma" | _VARYING = "manual", "v" | jax_api
compact/_flows.py | return first ^ inputs[1].terms | return first &#124; inputs[1].terms | compact/test_full_precision.py
jaxprs/_control_flow.py | return params["length"] | return 1 | jaxprs/test_control_flow.py
release/_release.py | jnp.where(skips & is_bad, jnp.nan, factor) | factor + 0.0 * is_bad | release/test_release.py
release/_release.py | sums, _layers.measure(_layers.times(grads, unscale)) | sums, jnp.zeros(2) | release/test_release.py
release/_release.py | value, _layers.times(grads, factor), layers | value, grads, layers | release/test_release.py
release/_layers.py | grads = times(grads, factor) | grads = times(grads, None) | release/test_release.py
release/_layers.py | return x.astype(jnp.float32) | return jnp.ones(x.shape) | release/test_release.py
release/_scan.py | if not all(a is b for a, b in pairs): | if False: | release/test_release.py
release/_scan.py | "reverse": not self.settings["reverse"] | "reverse": self.settings["reverse"] | release/test_release.py
release/_checks.py | if any(map(_arrays.is_host_type, init.out_avals)): | if False: | release/test_release.py
release/_checks.py | if untold: | if False: | release/test_release.py
release/_checks.py | if find_states(state, LossScaleState): | if False: | release/test_release.py
release/_checks.py | if not jax.tree.leaves(_tree.only_inexact(plain(rest))): | if False: | release/test_release.py
release/_checks.py | if without_gradient and | if False and | release/test_release.py
release/_release.py | of_layers = factor if unscale is None else factor * unscale | of_layers = factor | release/test_release.py
release/_layers.py | _tree.all_finite((grads, factor)) if self.skips else True | True | release/test_release.py
core/wrappers/_choose.py | _a_link_ran.is_set() and _may_be_marked.get() | _a_link_ran.is_set() | release/test_release.py
core/_random_numbers.py | keys * jnp.uint32(31) + part | keys + part | compact/test_random_rounding.py compact/test_stochastic.py compact/test_low_bit.py
compact/_rounding.py | (lax.select(is_rounded, rounded, x), exact) | (rounded, exact) | compact/test_random_rounding.py compact/test_stochastic.py
compact/_rounding.py | (lax.select(is_rounded, rounded, x), exact) | (lax.select(is_rounded, rounded, x), x) | compact/test_stochastic.py
compact/_codes.py | np.int32(0xFFFF)) | np.int32(0)) | compact/test_codes.py
compact/_codes.py | lax.mul(uniform_numbers(values.shape, key), lax.sub(high, low)) | lax.mul(np.float32(0.5), lax.sub(high, low)) | compact/test_codes.py
compact/_codes.py | codes = lax.mul(lax.max(codes, least), least) | codes = lax.mul(codes, least) | compact/test_codes.py
compact/_codes.py | largest = lax.pmax(largest, shared) | largest = largest + 0 * len(shared) | compact/test_low_bit_on_devices.py
compact/_codes.py | is_finite = lax.lt(largest, _INFINITY) | is_finite = lax.le(largest, _INFINITY) | compact/test_codes.py
compact/_codes.py | if has_untold_ranks(values): | if False: | compact/test_low_bit_on_devices.py
compact/_quantized.py | {"int8": 4, "uint8": 8 | {"int8": 2, "uint8": 4 | compact/test_low_bit.py
compact/_code_choice.py | is_moment and n not in stay: | is_moment and n not in starts: | compact/test_full_precision.py
compact/_quantized.py | last <= _LONGEST_ROW | last < _LONGEST_ROW | compact/test_codes.py
compact/_quantized.py | last > _MOST_UNEVEN * before | last >= _MOST_UNEVEN * before | compact/test_codes.py
compact/_code_choice.py | decays or is_rooted and n not in positions | decays or is_rooted | compact/test_full_precision.py
compact/_code_choice.py | is_wide = n in whole.multiplied &#124; whole.factored | is_wide = n in whole.factored | compact/test_full_precision.py
compact/_code_choice.py | flow.shrinks and _is_number(leaves[i]) | False | compact/test_full_precision.py
compact/_low_bit.py | seed, _SALT, state.step_count) | seed, _SALT, 0) | compact/test_low_bit.py
compact/_flows.py | case "max" &#124; "min" if first and inputs[1].terms: | case "max" &#124; "min": | compact/test_full_precision.py
core/masters/_split.py | magnitude = lax.min(lax.add(magnitude, more), _LARGEST) | magnitude = lax.add(magnitude, more) | masters/test_split.py
core/masters/_split.py | return jnp.where(rises, rounded + 2 * half_place, rounded) | return rounded | masters/test_split.py
core/masters/_transform.py | rounding_keys(len(stored), 0, _SALT, count) | rounding_keys(len(stored), 0, _SALT, 0) | properties/test_properties.py
checkpoints/_convert.py | state = state._replace(step_count=counts[0]) | counts = counts | checkpoints/test_convert.py
compact/_stochastic.py | rounding_keys(len(wide), seed, state.step_count) | rounding_keys(len(wide), seed, 0) | compact/test_stochastic.py
core/masters/_split.py | np.int32((1 << shift) // 2) | np.int32(0) | masters/test_split.py
core/masters/_split.py | remainder = lax.select(is_zero, lax.max(remainder, _ZERO), remainder) | is_zero = is_zero | masters/test_split.py
core/masters/_split.py | lax.add(lax.min(magnitude, _LARGEST_BFLOAT16), | lax.add(magnitude, | masters/test_split.py masters/test_infinities.py
averages/_average.py | taken &= new.gradient_step != old.gradient_step | taken &= True | averages/test_average.py
averages/_average.py | taken &= state.last_finite | taken &= True | averages/test_average.py
averages/_average.py | taken &= new.last_finite &#124; gave_up | taken &= new.last_finite | averages/test_average.py
averages/_average.py | ~_tree.all_finite(changes) if at else ~_all_zero(changes) | ~_all_zero(changes) | averages/test_average.py
averages/_average.py | taken = is_unmarked(updates, extra_args) | taken = True | averages/test_average.py
averages/_average.py | _share_at(decay, state.step_count) | _share_at(decay, state.step_count + 1) | averages/test_average.py
averages/_average.py | lax.select(jnp.asarray(decay == 0), weight, moved) | moved | averages/test_average.py
averages/_average.py | lax.select(taken, moved, average) | lax.cond(taken, lambda: moved, lambda: average) | averages/test_average.py
core/masters/_edits.py | is_edited = lax.is_finite(wide) & lax.ne | is_edited = lax.ne | masters/test_infinities.py masters/test_edits.py
core/masters/_transform.py | elif None not in exact: | else: | masters/test_edits.py
core/masters/_transform.py | like = grad if wanted is None | like = param if wanted is None | masters/test_master_weights.py
core/masters/_transform.py | if given and all(is_cast) and | if given and any(is_cast) and | masters/test_master_weights.py
core/masters/_transform.py | proceed = is_unmarked(updates, extra_args) | proceed = True | properties/test_properties.py
core/masters/_transform.py | settings.check_masters(leaves, stored) | leaves = leaves | masters/test_master_weights.py
core/masters/_access.py | target.astype(new.dtype)) | target) | masters/test_master_access.py
core/masters/_split.py | return with_derivative_of(master, param) | return master | masters/test_hypergradients.py
core/masters/_split.py | with_derivative_of(landing.astype(param.dtype), exact) | landing.astype(param.dtype) | masters/test_hypergradients.py
core/_dtypes.py | return with_derivative_of(jnp.where(is_subnormal, multiple * step, rounded), x) | return jnp.where(is_subnormal, multiple * step, rounded) | test_dtypes.py
core/masters/_transform.py | master_dtype, copy=True) | master_dtype, copy=False) | masters/test_master_weights.py
core/scaling/_loss_scaling.py | unscale(updates, state.scale) | unscale(updates, adjust(rule, Counters(state.scale, state.finite_count, state.hysteresis_left), jnp.array(True), jnp.array(False)).scale) | scaling/test_transform.py scaling/test_gradients.py
core/scaling/_loss_scaling.py | loss_is_finite = lax.pmin(seen, axis_name) | loss_is_finite = seen | scaling/test_bad_data.py
core/scaling/_loss_scaling.py | skipped_count=jnp.where(finite, 0, | skipped_count=jnp.where(finite, state.skipped_count, | scaling/test_rule.py
core/scaling/_loss_scaling.py | overflowed &= loss_is_finite == 1 | pass | scaling/test_rule.py
core/scaling/_loss_scaling.py | divide(extra_args["grad"], state.scale) | extra_args["grad"] | scaling/test_transform.py
core/scaling/_rule.py | is_due = finite_count >= | is_due = finite_count > | scaling/test_rule.py
core/scaling/_rule.py | overflowed & (hysteresis_left == 0) | overflowed & (hysteresis_left <= 1) | scaling/test_rule.py
core/scaling/_rule.py | jnp.where(is_stuck, AT_FLOOR, hysteresis_left) | hysteresis_left | scaling/test_rule.py
core/scaling/_rule.py | jnp.where(is_due, hysteresis, hysteresis_left) | jnp.where(grows, hysteresis, hysteresis_left) | scaling/test_rule.py
core/trees/_tree.py | x.astype(_dtypes.at_least_float32(x.dtype)) if _dtypes.is_floating(x) else x | x | scaling/test_gradients.py
core/scaling/_values.py | ~finite & (tries < redo_on_nan) | ~finite & (tries <= redo_on_nan) | scaling/test_retries.py
core/scaling/_gradients.py | has_scaled_itself &#124;= "scales its loss" | has_scaled_itself = "scales its loss" | system/test_mistakes.py
core/scaling/_state.py | np.ravel, counts)))[-1] | np.ravel, counts)))[0] | scaling/test_check.py
devices/_offload.py | _updates.select(proceed, new, before) | new | devices/test_offload.py
devices/_offload.py | _, held = lax.optimization_barrier((grads, held)) | pass | devices/test_offload.py
devices/_zero1.py | _warn_if_elsewhere(state, cuts.shardings_of(state)) | pass | devices/test_zero1.py
devices/_zero1.py | jnp.where(is_unchanged, -jnp.zeros((), change.dtype), difference) | difference | devices/test_zero1.py
devices/_sum.py | jnp.float32 if scatter else dtype, 0, part | dtype, 0, part | devices/test_sum.py
devices/_sum.py | start = -jnp.zeros_like | start = jnp.zeros_like | devices/test_sum.py
devices/_sum.py | return total + x.astype(jnp.float32), None | return (total.astype(x.dtype) + x).astype(jnp.float32), None | devices/test_sum.py
devices/_shardings.py | if any(name in names for names in whole for name in axes): | if False: | devices/test_zero1.py devices/test_sharding.py
checkpoints/_convert.py | return type(node)(**fields) | return node | checkpoints/test_convert.py
checkpoints/_convert.py | if any(isinstance(x, StochasticRoundingState) for _, x in own): | if False: | checkpoints/test_convert.py
checkpoints/_convert.py | same = [x for x in old if x.position == at] | same = old | checkpoints/test_convert.py
checkpoints/_convert.py | _refuse_stacked(state, expected) | pass | properties/test_conversions.py
checkpoints/_convert.py | and jax.tree.leaves(x.master_params) | and True | checkpoints/test_convert.py
autocast/_lattice.py | count <= 1 and count < result | count < result | amp/test_amp_rules.py amp/test_amp_models.py
autocast/_lattice.py | return LOW if strong == {LOW} else FULL | return LOW if LOW in strong else FULL | amp/test_amp_rules.py amp/test_amp_cases.py
autocast/_plan.py | self._smallest <= size <= self._largest | size <= self._largest | amp/test_amp_rules.py
autocast/_plan.py | if i in wiring.summed and x == _lattice.LOW: | if False: | amp/test_amp_transformations.py
autocast/_rules.py | if own == "widest" and adds_bias: | if adds_bias: | amp/test_amp_rules.py
autocast/_rules.py | if self._is_unknown(equation, scope): | if False: | amp/test_amp_hidden.py
jaxprs/_search.py | yield from getattr(value, "__dict__", {}).values() | yield from () | amp/test_amp_hidden.py
jaxprs/_search.py | for name in (slots,) if isinstance(slots, str) else slots: | for name in (): | amp/test_amp_hidden.py
autocast/_run.py | for text in _plan.warnings_of_unknown(plan.sites(jaxpr)): | for text in (): | amp/test_amp_hidden.py
autocast/_derivatives.py | cast(tangent, x.dtype) if depends else SymbolicZero.from_primal_value(x) | cast(tangent, x.dtype) | amp/test_amp_symbolic_zeros.py
reports/_memory_report.py | if quantized or _dtypes.is_floating(leaf) else count | if _dtypes.is_floating(leaf) else count | reports/test_memory.py
jaxprs/_primitives.py | return algorithm_dtype(equation) or _wider(*operand_dtypes) | return _wider(*operand_dtypes) | reports/test_precision_flops.py
core/_policy.py | elif left := _left_within( | elif left := () and _left_within( | test_policy.py
core/_policy.py | return [] | continue | test_policy.py
core/scaling/_loss_scaling.py | jnp.where(loss_is_finite == 1, bad_index, BAD_LOSS) | bad_index | scaling/test_bad_data.py
reports/_gradient_range.py | is_zero = middles < smallest / 2 | is_zero = middles < smallest | reports/test_gradient_range.py
reports/_updates.py | jnp.where(moves, _MOVED, _STALLED) | jnp.where(moves, _STALLED, _MOVED) | reports/test_updates.py
reports/_metrics.py | if len(_states.find_states(x, optax.MultiStepsState)) == 1 | if True | reports/test_metrics.py
core/scaling/_values.py | from optax_mp.core.trees import _tree | from optax_mp.core.trees import _tree; import optax_mp.reports | project/test_core.py
core/masters/_transform.py | proceed = is_unmarked(updates, extra_args) | import optax_mp.compact; proceed = is_unmarked(updates, extra_args) | project/test_core.py
core/wrappers/_mistakes.py | if not _OVERWRITTEN.isdisjoint(path): | if False: | scaling/test_fp8_leaves.py system/test_fp8_refused.py
core/wrappers/_mistakes.py | if is_link and any(map(_ends_in_masters, links[:i])): | if False: | system/test_mistakes.py
core/scaling/_state.py | state.hysteresis_left == AT_FLOOR | state.hysteresis_left == AT_FLOOR - 1 | scaling/test_bad_data.py
core/scaling/_state.py | state.hysteresis_left == AT_FLOOR | state.hysteresis_left <= 0 | scaling/test_bad_data.py scaling/test_check.py
compact/_scales_in_boxes.py | return _resized(box, old, scales, fit) | return _boxes.in_box_like(box, scales) | compact/test_low_bit.py loops/test_boxes.py properties/test_frameworks.py
averages/_average.py | moved if taken is True else lax.select(taken, moved, average) | moved | averages/test_average.py
core/masters/_transform.py | count = jnp.asarray(optax.safe_increment(count)) | count = jnp.asarray(count) | properties/test_properties.py
core/masters/_transform.py | self._advance_leaf(i, master, keys[i]) | self._advance_leaf(i, master, keys[0]) | properties/test_properties.py
core/masters/_transform.py | master = follow_edits_if(last_exact, master, jnp.asarray(param)) | last_exact = last_exact | properties/test_properties.py
core/masters/_transform.py | target = _dtypes.round_to(target, param.dtype) | target = lax.reduce_precision(target, 8, 9) | properties/test_properties.py
core/masters/_transform.py | partial(step.run, inner), state, extra_args) | partial(step.run, inner), state, {}) | masters
core/masters/_split.py | return self.bits == 8 | return False | properties/test_properties.py
core/masters/_split.py | shift_left(remainder, np.int32(16 - self.bits)) | shift_left(remainder, np.int32(8)) | properties/test_properties.py
core/masters/_split.py | form.round_at_random(master, uniform_numbers(master.shape, key)) | master | properties/test_properties.py
core/masters/_edits.py | lax.select(follows, follow_edits(master, param), master) | follow_edits(master, param) | masters/test_edits.py
core/masters/_edits.py | lax.select(is_edited, edited, master) | edited | properties/test_properties.py
core/_random_numbers.py | keys = _hash(keys * jnp.uint32(31) + part) | keys = keys | properties/test_properties.py
core/_random_numbers.py | keys = _hash(lax.iota(jnp.uint32, count)) | keys = _hash(lax.full((count,), 1, jnp.uint32)) | properties/test_properties.py
core/wrappers/_choose.py | return _updates.select(proceed, new, jnp.asarray(old)) | return new | properties/test_properties.py
core/wrappers/_choose.py | lambda x: _updates.or_negative_zeros(proceed, x), updates | lambda x: x, updates | properties/test_properties.py
core/wrappers/_choose.py | lambda x: _updates.or_negative_zeros(finite, x), unscaled | lambda x: x, unscaled | properties/test_properties.py
core/wrappers/_choose.py | return ~_tree.all_true([_is_negative_zero(leaf) for leaf in leaves]) | return ~_is_negative_zero(leaves[0]) | properties/test_properties.py
core/wrappers/_updates.py | moves = lax.bitwise_or(lax.is_finite(start), lax.ne(target, target)) | moves = lax.eq(start, start) | properties/test_properties.py
core/wrappers/_updates.py | jnp.full(param.shape, -0.0 if is_inexact(param) else 0, param.dtype) | jnp.ones(param.shape, param.dtype) | properties/test_properties.py
core/wrappers/_arguments.py | return lax.convert_element_type(grad, inner_param.dtype) | return lax.convert_element_type(grad.astype(jnp.bfloat16), inner_param.dtype) * jnp.float32(1.001) | properties/test_properties.py
core/scaling/_unscale.py | return unscaled, lax.sort(bad)[0] | return unscaled, lax.sort(bad)[-1] | properties/test_properties.py
core/scaling/_unscale.py | i: _tree.leaf_finite(leaf) for i, leaf in leaves if _dtypes.is_inexact(leaf) | i: _tree.leaf_finite(leaf) for i, leaf in leaves if _dtypes.is_inexact(leaf) and leaf.ndim | properties/test_properties.py
core/scaling/_loss_scaling.py | inner_state=copy_shared(inner_state, params) | inner_state=inner_state | properties/test_properties.py
core/scaling/_loss_scaling.py | jnp.where(finite, total, optax.safe_increment(total)) | jnp.where(finite, total, total) | properties/test_properties.py
core/trees/_tree.py | if id(leaf) in seen or getattr(leaf, "weak_type", False): | if getattr(leaf, "weak_type", False): | properties/test_properties.py
core/trees/_descriptions.py | if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves): | if False: | properties/test_properties.py
core/trees/_descriptions.py | return is_number and param.ndim > 0 and has_same_spec and not varying_axes(param) | return False | properties/test_meshes.py loops/test_loops_on_devices.py
compact/_low_bit.py | count = jnp.asarray(optax.safe_increment(state.step_count)) | count = jnp.asarray(state.step_count) | properties/test_properties.py
compact/_low_bit.py | _codes.encode(leaf, old[path], keys.get(path)) if path in old | _codes.encode(leaf, old[path], None) if path in old | properties/test_properties.py
compact/_low_bit.py | choose_codes(inner, params, state, bits, min_size) | choose_codes(inner, params, state, 8, min_size) | properties/test_properties.py
compact/_low_bit.py | _codes.decode, state.inner_state, is_leaf=_quantized.is_quantized | lambda x: _codes.decode(x) * 1.01 if _quantized.is_quantized(x) else x, state.inner_state, is_leaf=_quantized.is_quantized | properties/test_properties.py
compact/_stochastic.py | count = jnp.asarray(optax.safe_increment(state.step_count)) | count = jnp.asarray(state.step_count) | properties/test_properties.py
compact/_stochastic.py | leaves.values[i].dtype, keys[i]) | leaves.values[i].dtype, keys[0]) | properties/test_properties.py
compact/_stochastic.py | inner_state = _tree.copy_shared(inner_state, leaves.values) | inner_state = inner_state | properties/test_properties.py
compact/_stochastic.py | return choose_step(is_unmarked(updates, extra_args), step, state | return choose_step(True, step, state | properties/test_properties.py
averages/_average.py | inner_state = _tree.copy_shared(inner.init(params), params) | inner_state = inner.init(params) | properties/test_properties.py
averages/_average.py | _dtypes.at_least_float32(weight.dtype), copy=True) | _dtypes.at_least_float32(weight.dtype), copy=False) | properties/test_properties.py
averages/_average.py | moved: Any = optax.incremental_update(weight, average, 1 - decay) | moved: Any = optax.incremental_update(weight, average, decay * 0.9) | properties/test_properties.py
averages/_average.py | leaves = Leaves.of(_after(params, changes), caller=_CALLER) | leaves = Leaves.of(params, caller=_CALLER) | properties/test_properties.py
core/trees/_boxes.py | if is_nnx_optimizer(given): | if True: | test_nnx.py
core/trees/_boxes.py | if is_nnx_optimizer(given): | if False: | test_nnx.py
checkpoints/_convert.py | if jax.tree.structure(opt_state) != structure_by(from_tx): | if True: | test_nnx.py
checkpoints/_convert.py | if jax.tree.structure(opt_state) != structure_by(from_tx): | if False: | test_nnx.py
release/_layers.py | args = grads, opt_state, weights | args = grads, opt_state, jax.tree.map(jnp.zeros_like, weights) | properties/test_released.py
"""

Mutant = tuple[str, str, str, list[str]]


def read() -> list[Mutant]:
    """Return the mutants of the table; raise for one whose line is not there once."""
    mutants = []
    for line in TABLE.strip().splitlines():
        cells = (cell.strip().replace("&#124;", "|") for cell in line.split(" | "))
        file, old, new, tests = cells
        if (ROOT / "optax_mp" / file).read_text(encoding="utf-8").count(old) != 1:
            raise ValueError(f"{file} has not one {old!r}")
        mutants.append((file, old, new, tests.split()))
    return mutants


def is_killed(mutant: Mutant) -> tuple[bool, float]:
    """Return whether a fast test fails on a mutant, and after how many seconds."""
    file, old, new, tests = mutant
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("optax_mp", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "optax_mp" / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new))
        files = [f"tests/{name}" for name in tests]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        environment = os.environ | {"PYTHONPATH": folder}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS
            )
            is_found = done.returncode in (1, 2)  # a failed test, or no import
            if done.returncode not in (0, 1, 2, 5):  # 5: no test is fast
                raise RuntimeError(f"{file}: {done.stdout.decode()[-2000:]}")
        except subprocess.TimeoutExpired:
            is_found = True
    return is_found, time.monotonic() - began


def main() -> None:
    """Run the mutants of the rooms that are named, or all, and print the table."""
    rooms = tuple(sys.argv[1:])
    mutants = [x for x in read() if x[0].startswith(rooms or "")]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        results = []
        for mutant, (is_found, took) in zip(
            mutants, pool.map(is_killed, mutants), strict=True
        ):
            results.append(is_found)
            word = "killed" if is_found else "LIVES "
            print(f"{word} {took:4.0f} s  {mutant[0]}: {mutant[1]}", flush=True)
    killed = sum(results)
    print(f"{killed} of {len(results)} are killed, {killed / len(results):.0%}")


if __name__ == "__main__":
    main()

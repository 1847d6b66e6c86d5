"""Steps whose state has low-bit arrays, in one pass over the memory of each leaf.

A step is a function from what it reads and what it replaces, two pytrees, to its result
and the new tree: `step(inputs, kept) -> (result, kept)`. It is any optimizer's. The
engine traces it once, splits off the elementwise tail of each leaf, and runs the tails
in the best way that the platform has. The result is what the step itself returns.

- `run_step` returns that, and, if no platform has another way, why not.
- `update_leafwise` does the same for the `update` of a transformation.
- `step_from_host` takes the step of a state in host memory, part by part; it returns
  None where that cannot be. `run_on_device` then copies all of the state.
- `compute_in_groups` computes the outputs of a traced function a few at a time.
- `explain_step` says what computes each param on each platform.

Nothing else of this folder is imported elsewhere, and nothing of it before the first
step of a state that was made to hold low-bit codes (`may_hold_codes`): plain masters
and loss scales have no use for it. Inside:

- `_tailwise`: a step, traced once, and what replaces it in a program for a platform.
- `_by_platform`: a call that is lowered differently for some platforms.
- `_lowered`: what a program that is being lowered says of its arrays.
- `_program`: a traced step as one list of equations, and which of them are the same
  computation.
- `_tails`: where the elementwise tail of a leaf begins.
- `_layout`: each device's shard of a leaf.

Ways to run a tail:

- `_tpu`, `_gpu`: in a kernel. Add another platform here. `_kernels` says which tails
  have one, `_proof` compares it with XLA at its first use.
- `_chunks`: chunk by chunk, from device or host memory.
- `_evaluator`: for both, what evaluates elementwise equations on a part of a leaf, also
  in a kernel, where some operations do not exist.
- `_in_turn`: on a CPU, one leaf after another.
- `_from_host`: of a state in host memory, and how that is made.
- `_explain`: none, but say how.
"""

from optax_mp.engine._explain import explain_step
from optax_mp.engine._from_host import compute_in_groups, run_on_device, step_from_host
from optax_mp.engine._tailwise import run_step, update_leafwise

__all__ = [
    "compute_in_groups",
    "explain_step",
    "run_on_device",
    "run_step",
    "step_from_host",
    "update_leafwise",
]

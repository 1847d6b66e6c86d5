"""Take a step in one pass over each leaf: `take_step`.

- `_take_step`: the public function, and the same for `tx.update` of the package's
  transformations.
- `_engine`: a step, traced once, and what replaces it in a program for a TPU or a GPU.
- `_program`: a traced step as one list of equations, and which of these are the same
  computation.
- `_tails`: where the elementwise tail of a leaf begins.
- `_layout`: the part of a leaf that each device has.
- `_evaluator`: what evaluates elementwise equations on parts of a leaf, also inside a
  kernel, where some operations do not exist.
- `_chunks`: chunk by chunk, from device or host memory.
- `_tpu`, `_gpu`: the kernels. Add another platform here.

`offload` takes steps whose state is in host memory:

- `_from_host`: copy each leaf to the device, take its step, and copy it back.
"""

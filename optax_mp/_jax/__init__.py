"""The only door to JAX's internals: all else in the package uses its public API.

- `_jaxpr`: read, run and trace jaxprs.
- `_control_flow`: equations with jaxprs inside. To support another one, change this.
- `_dependence`: which outputs of a jaxpr depend on its inputs.
- `_traced`: a function of pytrees as a jaxpr of their arrays.
- `_arrays`: what is known of one array: whether it is traced, and its type.
- `_placement`: where arrays lie.
- `_kernels`: where XLA ends a kernel on a CPU.
- `_choose`: a step, or nothing at all.
"""

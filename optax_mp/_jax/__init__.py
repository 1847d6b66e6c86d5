"""The only door to JAX's tracing and jaxprs."""

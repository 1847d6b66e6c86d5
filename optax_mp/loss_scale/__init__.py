"""Loss scaling: the rule, the transform, loss scales as values, scaled gradients."""

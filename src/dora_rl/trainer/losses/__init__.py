"""Policy objectives: pure functions on log-prob tensors of whole, packed responses."""

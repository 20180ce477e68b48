"""Which sample of a batch owns each element of an activation."""

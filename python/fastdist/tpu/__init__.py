"""TPUs: one traced program over all cores, through torch_xla."""

"""Training on TPUs: one traced program for all cores, by torch_xla."""

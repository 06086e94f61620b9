"""Modules and optimizers whose values are on parameter servers."""

"""The name of the backend, for modules that import torch and the one that does not."""

NAME = "fastdist"

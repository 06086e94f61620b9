"""What replicas of a model keep alike: modules, gradients, buffers, metrics, optimizer steps."""

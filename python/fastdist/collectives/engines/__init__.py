"""What moves bytes under a communicator: one file per engine, and what they share."""

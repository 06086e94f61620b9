"""The ways in which the ranks of a job find each other and connect."""

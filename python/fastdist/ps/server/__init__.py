"""A parameter server: keeps variables and tables, and applies updates."""

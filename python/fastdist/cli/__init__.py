"""The `fastdist` command: one module per subcommand, each adding its own parser."""

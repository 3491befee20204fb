"""The ``fxbucket`` command: ``__main__`` has the table of its subcommands, each of which is a file."""

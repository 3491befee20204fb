"""What every suite has: pytester, for runs of pytest within a test."""

pytest_plugins = ["pytester"]

"""pytest-fxbucket: FSDP bucket plans as pytest items."""

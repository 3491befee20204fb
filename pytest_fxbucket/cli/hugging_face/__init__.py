"""``fxbucket init --hf``: model, batches, loss and a plan from a configuration of the package transformers."""

"""``fxbucket init --torchtitan``: model, batches, loss, trainer and a plan from torchtitan's own registry."""

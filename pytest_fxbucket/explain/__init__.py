"""What a pass made of a plan, told to people and programs: the leaves of ``fxbucket explain``."""

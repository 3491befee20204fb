"""The captured train step: a user's own step, traced once and then called like the function."""

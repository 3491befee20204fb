"""Private parts of torch, a file for each area; each import says which versions have it."""

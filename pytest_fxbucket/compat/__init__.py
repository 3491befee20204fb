"""Private parts of torch, a file for each area; each file, or part of one, says which versions have them."""

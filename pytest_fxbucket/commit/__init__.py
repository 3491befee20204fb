"""The files of a commit beside the working tree: which commit is meant, and a git worktree that holds it for a while."""

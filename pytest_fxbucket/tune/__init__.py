"""A better plan: moves from one plan to others, a search among them by simulated steps, and the plan file that it proposes."""

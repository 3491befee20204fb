"""Pages that show step time: samples by commit, and one step on each rank's clock. Self-contained; plotly.js draws them."""

"""Overlap found by itself: launches and waits where simulated exposed time is least, within limits."""

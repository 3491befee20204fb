"""One step on a clock: where each rank launched, waited and computed."""

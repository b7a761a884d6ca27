"""Training: optimizers, schedules, the loop, and what is kept of a run."""

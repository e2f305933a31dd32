"""Where a run runs: each world builds the parts and starts the same loop."""

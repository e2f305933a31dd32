"""From a configuration to a checked plan of the run: what runs where, in how much memory."""

"""The run: one loop, what it hears, what it does, what it writes down."""

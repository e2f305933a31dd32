"""What a finished run proves: its files against its log, its samples computed again."""

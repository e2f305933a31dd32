"""Models that transformers runs: behind the decoder's interface, and checked before they train."""

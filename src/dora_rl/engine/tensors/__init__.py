"""What an engine has in memory whatever the device: weights, KV cache, and how tokens are drawn."""

"""The model that is trained: the packed decoder, its layers and adapters, and how it is loaded."""

"""A Hugging Face model: its shape, its files, its names; below the engine and the trainer.

A family of models is one file in `families/`.
"""

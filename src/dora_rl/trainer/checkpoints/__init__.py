"""What a learner leaves behind: checkpoints, published versions and what makes these exact."""

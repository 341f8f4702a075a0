"""What holds attention in training, on any model, in any trainer."""

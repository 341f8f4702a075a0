"""What a running model's attention does, measured as it is called."""

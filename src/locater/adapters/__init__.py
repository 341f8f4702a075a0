"""What knows models and files: where families keep their queries and keys, live or on disk."""

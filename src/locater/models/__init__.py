"""Where families of models keep their queries and keys, in files and in live models."""

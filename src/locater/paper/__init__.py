"""The paper's wing: its figures, its claims and its laboratory; the tool never imports it."""

"""Figures and the page: records in, charts and one HTML file out."""

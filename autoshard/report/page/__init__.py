"""The HTML report: its data, and in `parts/` its page, style and scripts."""

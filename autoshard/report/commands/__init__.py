"""What one command each draws in a terminal."""

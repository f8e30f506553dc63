"""`python -m autoshard` is the command line."""
from autoshard.cli import main

main()

"""How many rows of tokens a rank has room for, where they travel to its experts."""
EXPERT_CAPACITY = 2.0
"""Over those of an even load, if nobody says: of two ranks one may get all."""

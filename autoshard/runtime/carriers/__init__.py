"""How the bytes of a collective travel between ranks."""
